//! The commands of a cluster: a registry, shards, models on them, and mounts of those.

pub mod copy;
pub mod drain;
mod jobs;
pub mod mount;
mod offer;
pub mod save;
pub mod shard;
pub mod snapshots;
pub mod status;
pub mod upload;

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::registry::{self, Registry, RegistryError};
use libmodelio::wire::{Message, ModelRecord, ShardRecord};
use serde_json::{Map, Value};

use crate::config::registry::RegistryAt;
use crate::error::Error;
use crate::memory;

/// Longest wait for the registry.
const REGISTRY_TIMEOUT: Duration = Duration::from_secs(10);

fn deadline() -> Instant {
    Instant::now() + REGISTRY_TIMEOUT
}

fn registry(at: &RegistryAt) -> Result<Arc<dyn Registry>, Error> {
    registry::open(&at.to_string()).map_err(|error| registry_error(at, error))
}

/// A model that is ready, all shards, and the one that coordinates it.
fn coordinated(
    registry: &dyn Registry,
    at: &RegistryAt,
    name: &str,
) -> Result<(ModelRecord, Vec<ShardRecord>, String), Error> {
    let record = registry.model(name, deadline()).map_err(|error| registry_error(at, error))?;
    if !record.ready {
        let error = Error::new(format!("model {name} is still being created"));
        return Err(error.hint("try again when it is there"));
    }
    let shards = registry.shards(deadline()).map_err(|error| registry_error(at, error))?;
    let coordinator = shards.iter().find(|shard| shard.shard == record.coordinator).ok_or_else(|| {
        let what = format!("shard {}, which coordinates {name}, is not announced", record.coordinator);
        explain_new_registry(at, Error::new(what).hint("start it, or wait until it is reached again"))
    })?;
    let address = coordinator.address.clone();
    Ok((record, shards, address))
}

/// Turns the registry's refusal into an error for the user of the command.
fn registry_error(at: &RegistryAt, error: RegistryError) -> Error {
    let error_text = match &error {
        RegistryError::Peer(_) => format!("the registry at {at} cannot be asked"),
        _ => format!("the registry at {at} refuses"),
    };
    let is_unknown = matches!(error, RegistryError::NoModel(_));
    let error = Error::new(error_text).caused_by(error);
    if is_unknown { explain_new_registry(at, error) } else { error }
}

/// For this long a registry that was restarted may not know of all shards and models.
const YOUNG: Duration = Duration::from_secs(15);

/// Something is not in the registry. The error says so if the registry may not know everything yet.
fn explain_new_registry(at: &RegistryAt, error: Error) -> Error {
    match age(at) {
        Some(age) if age < YOUNG => {
            let before = error.hint.as_ref().map(|hint| format!("{hint}; ")).unwrap_or_default();
            error.hint(format!(
                "{before}the registry was started {} s ago; if that was not the first time, shards tell it of their models \
                 within seconds: try again then",
                age.as_secs()
            ))
        }
        _ => error,
    }
}

/// For how long there has been a registry, if it says so.
fn age(at: &RegistryAt) -> Option<Duration> {
    let status = ask(&at.process()?.to_string()).ok()?;
    Duration::try_from_secs_f64(status["registry_seconds"].as_f64()?).ok()
}

/// Asks a shard or a registry, over a connection of its own.
fn request(at: &str, message: &Message, until: Instant) -> Result<(Message, Vec<u8>), AdminError> {
    AdminPeer::connect(at, deadline().min(until))?.request(message, &[], until)
}

/// The status of a shard or a registry.
fn ask(at: &str) -> Result<Value, String> {
    ask_until(at, deadline())
}

/// The statuses of shards, which are asked at once: one that does not answer holds up no other one.
fn ask_all<'a>(at: impl Iterator<Item = &'a str>) -> Vec<Result<Value, String>> {
    let until = deadline();
    // Each is asked over a connection.
    memory::raise_file_limit();
    std::thread::scope(|scope| {
        let asks = |at: &'a str| {
            let asks = move || ask_until(at, until);
            std::thread::Builder::new().name("asks-shard".into()).spawn_scoped(scope, asks)
        };
        let asked: Vec<_> = at.map(asks).collect();
        let answer = |asked: std::io::Result<std::thread::ScopedJoinHandle<'_, _>>| match asked {
            Ok(asked) => asked.join().unwrap_or_else(|_| Err("a thread panicked".to_owned())),
            Err(error) => Err(error.to_string()),
        };
        asked.into_iter().map(answer).collect()
    })
}

fn ask_until(at: &str, until: Instant) -> Result<Value, String> {
    match request(at, &Message::Status, until) {
        Ok((Message::Text, text)) => status_in(&text),
        Ok((other, _)) => Err(format!("it answers with {}", other.name())),
        Err(error) => Err(error.to_string()),
    }
}

/// The status in a shard's answer, which is an object. Whoever asks completes it.
fn status_in(text: &[u8]) -> Result<Value, String> {
    let status: Map<String, Value> =
        serde_json::from_slice(text).map_err(|error| format!("its answer is no status: {error}"))?;
    Ok(Value::Object(status))
}

/// The values of a list in a status; none if there is no list.
fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The text of a value in a status.
fn string(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn an_answer_that_is_no_status_is_an_error() {
        assert!(status_in(br#"{"shard":1}"#).is_ok_and(|status| status["shard"] == 1));
        for text in ["[1,2]", "7", "null", "\"a\"", "", "no json"] {
            let why = status_in(text.as_bytes()).unwrap_err();
            assert!(why.starts_with("its answer is no status"), "{why}");
        }
    }

    #[test]
    fn a_shard_that_does_not_answer_holds_up_no_other_one() {
        let silent = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = silent.each_ref().map(|listener| listener.local_addr().unwrap().to_string());
        let asked = std::thread::spawn(move || ask_all(addresses.iter().map(String::as_str)));
        // All of them hear of it before one answers.
        let heard = silent.each_ref().map(|listener| listener.accept().unwrap());
        // Nobody is there to be asked again.
        drop(silent);
        drop(heard);
        for answer in asked.join().unwrap() {
            let why = answer.unwrap_err();
            assert!(!why.contains("before the deadline"), "{why}");
        }
    }
}
