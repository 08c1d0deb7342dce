//! `gradfs status`: the shards, the models, and their states; or those of a mount.

mod learners;
mod mounted;
mod readers;
mod relays;
mod snapshots;

use std::fmt::Write as _;
use std::process::ExitCode;

use libmodelio::wire::{RefusedShard, ShardRecord};
use serde_json::{Value, json};

use super::{YOUNG, age, ask_all, deadline, jobs, list, registry, registry_error, string};
use crate::config::cluster::{StatusConfig, StatusOf};
use crate::error::Error;
use crate::shown::shown_within;

/// The exit status if a job waits for a shard, or has failed.
const IN_TROUBLE: u8 = 3;
/// Learners of each job that the status of a whole cluster lists.
const FEW_LEARNERS: usize = 16;

/// Prints the state of a cluster, of one of its models or of a mount, and says by the exit status whether all jobs can
/// go on.
///
/// # Errors
/// When the registry or the mount does not answer, or there is no such model. A shard that does not answer is part of the
/// answer.
pub fn run(config: &StatusConfig) -> Result<ExitCode, Error> {
    let (text, in_trouble) = match &config.of {
        StatusOf::Mount(path) => mounted::status(path, config.json)?,
        StatusOf::Model(name) => of_cluster(config, Some(name))?,
        StatusOf::All => of_cluster(config, None)?,
    };
    print!("{text}");
    Ok(if in_trouble { IN_TROUBLE.into() } else { ExitCode::SUCCESS })
}

/// The text to print, and whether a job is in trouble.
fn of_cluster(config: &StatusConfig, only: Option<&str>) -> Result<(String, bool), Error> {
    let registry = registry(&config.registry)?;
    let failed = |error| registry_error(&config.registry, error);
    // Without this, a name that is misspelt would look like an idle model.
    only.map(|name| registry.model(name, deadline())).transpose().map_err(failed)?;
    let shards = registry.shards(deadline()).map_err(failed)?;
    let refused = registry.refused(deadline()).map_err(failed)?;
    let models = match only {
        Some(name) => vec![name.to_owned()],
        None => registry.models(deadline()).map_err(failed)?,
    };
    let records = shards.iter().chain(refused.iter().map(|refused| &refused.record));
    let answers = ask_all(records.clone().map(|record| record.address.as_str()));
    let mut told = records.zip(answers).map(|(record, answer)| told(record, answer));
    let shards: Vec<Value> = told.by_ref().take(shards.len()).collect();
    let refused: Vec<Value> =
        told.zip(&refused).map(|(told, refused)| told_of_refused(told, refused)).collect();
    let [shards, refused] = [shards, refused].map(|shards| match only {
        Some(name) => shards.into_iter().filter_map(|shard| only_of(shard, name)).collect(),
        None => shards,
    });
    let jobs = jobs::states(&*registry, &config.registry, &[&shards[..], &refused].concat(), &models);
    let in_trouble = jobs.iter().any(jobs::is_in_trouble);
    let status = json!({
        "registry": config.registry.to_string(),
        "registry_seconds": age(&config.registry).map(|age| age.as_secs_f64()),
        "shards": shards,
        "refused": refused,
        "models": models,
        "jobs": jobs,
    });
    let few = only.is_none().then_some(FEW_LEARNERS);
    let text = if config.json { format!("{status:#}\n") } else { for_people(&shown_within(status), few) };
    Ok((text, in_trouble))
}

/// The part of a shard's status that is about one model; `None` if it has nothing of it. A shard that does not answer may
/// have something.
fn only_of(mut shard: Value, name: &str) -> Option<Value> {
    if shard["unreachable"].is_string() {
        return Some(shard);
    }
    for of in ["models", "incoming"] {
        if let Some(models) = shard[of].as_array_mut() {
            models.retain(|model| model["name"] == json!(name));
        }
    }
    let has = |of: &str| !list(&shard[of]).is_empty();
    (has("models") || has("incoming")).then_some(shard)
}

fn told(shard: &ShardRecord, answer: Result<Value, String>) -> Value {
    match answer {
        Ok(mut status) => {
            status["draining"] = json!(shard.draining);
            status
        }
        Err(why) => json!({ "shard": shard.shard.0, "address": shard.address, "unreachable": why }),
    }
}

/// Another shard has its number: it takes part in what it holds, and in nothing else.
fn told_of_refused(mut status: Value, refused: &RefusedShard) -> Value {
    status["refused_because"] = json!(refused.why);
    status
}

/// How far a model is that moves, as its coordinator tells.
pub(super) fn moving(coordinator: &Value) -> Option<String> {
    let (off, stage) = (coordinator["moving"]["off"].as_u64()?, coordinator["moving"]["stage"].as_str()?);
    let (blocks, of) = (&coordinator["moving"]["blocks"], &coordinator["moving"]["of"]);
    let count = if of == &json!(0) { String::new() } else { format!(", {blocks} of {of} blocks") };
    Some(format!("moves off shard {off}: {stage}{count}"))
}

/// RDMA of a shard: where and on what, or why not where that is to be expected.
fn rdma(status: &Value) -> String {
    let of = |key: &str| string(&status[key]);
    match (status["address"].is_string(), status["hindered"] == json!(true)) {
        (true, _) => {
            let (device, address) = (of("device"), of("address"));
            format!(", rdma on {device} at {address} with {} connection(s)", status["connections"])
        }
        (false, true) => format!(", no rdma: {}", of("unavailable")),
        (false, false) => String::new(),
    }
}

/// `few` learners of each job are told of, or all.
fn for_people(status: &Value, few: Option<usize>) -> String {
    let mut text = String::new();
    let _ = write!(text, "registry {}", string(&status["registry"]));
    let _ = match status["registry_seconds"].as_f64().filter(|&age| age < YOUNG.as_secs_f64()) {
        Some(age) => {
            let later = "if that was not the first time, shards tell it of their models within seconds";
            writeln!(text, ", started {age:.0} s ago: {later}")
        }
        None => writeln!(text),
    };
    for shard in list(&status["shards"]).iter().chain(list(&status["refused"])) {
        let address = string(&shard["address"]);
        let _ = write!(text, "shard {} at {address}", shard["shard"]);
        if let Some(why) = shard["refused_because"].as_str() {
            let _ = write!(text, ": not listed: {why}");
        }
        if let Some(why) = shard["unreachable"].as_str() {
            let _ = writeln!(text, ": unreachable: {why}");
            continue;
        }
        let is_empty = list(&shard["models"]).is_empty();
        let draining = match shard["draining"] == json!(true) {
            true if is_empty => ", drained: no blocks are left",
            true => ", draining",
            false => "",
        };
        let memory = &shard["shared_memory"];
        let memory = match (memory["unavailable"].as_str(), &memory["connections"]) {
            (Some(why), _) => format!("no shm: {why}"),
            (None, connections) => format!("shm with {} connection(s) of this host", connections),
        };
        let (io, rdma) = (string(&shard["io"]), rdma(&shard["rdma"]));
        let checksum =
            if shard["checksum"] == json!("off") { ", sends blocks without checksums" } else { "" };
        let _ = writeln!(text, ": {io}, {memory}{rdma}{checksum}{draining}");
        for model in list(&shard["incoming"]) {
            let name = string(&model["name"]);
            let (blocks, of) = (&model["blocks"], &model["of"]);
            let _ = match model["failed"].as_str() {
                None => writeln!(text, "  {name}: moves here, {blocks} of {of} blocks"),
                Some(why) => writeln!(text, "  {name}: cannot move here: {why}"),
            };
        }
        for model in list(&shard["models"]) {
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            let memory = mib(model["memory_bytes"].as_u64().unwrap_or(0));
            let name = string(&model["name"]);
            let _ = writeln!(
                text,
                "  {name}: version {}, {} blocks, {memory:.0} MiB of memory{}",
                model["version"],
                model["blocks"],
                match model["device_bytes"].as_u64().zip(shard["device"].as_str()) {
                    Some((bytes, device)) => format!(", {:.0} MiB of {device}", mib(bytes)),
                    None => String::new(),
                },
            );
            if model["loaded"] == false {
                text.push_str(
                    "    being created: not all blocks are there (if nobody does, gradfs delete it)\n",
                );
            }
            if let Some(why) = model["not_in_registry"].as_str() {
                let _ = writeln!(text, "    the registry does not have it: {why}");
            }
            let coordinator = &model["coordinator"];
            if coordinator.is_object() {
                let of = |key: &str| string(&coordinator[key]);
                let _ = writeln!(
                    text,
                    "    coordinates: {}, reducer {}, {}; {} learner(s) on {} client(s), {} contributions",
                    of("state"),
                    of("reducer"),
                    of("consistency"),
                    list(&coordinator["learners"]).len(),
                    coordinator["clients"],
                    coordinator["contributions"],
                );
                learners::tell(&mut text, "    ", list(&coordinator["learners"]), of("consistency"), few);
                readers::tell(&mut text, "    ", coordinator);
                relays::tell(&mut text, "    ", coordinator);
                snapshots::tell(&mut text, "    ", coordinator);
                if let Some(moving) = moving(coordinator) {
                    let _ = writeln!(text, "    {moving}");
                }
                for lost in list(&coordinator["unreachable"]) {
                    let why = string(&lost["why"]);
                    let _ = writeln!(text, "    shard {} cannot be reached: {why}", lost["shard"]);
                }
            }
        }
    }
    for line in list(&status["jobs"]).iter().flat_map(jobs::lines) {
        let _ = writeln!(text, "{line}");
    }
    let models: Vec<&str> = list(&status["models"]).iter().filter_map(Value::as_str).collect();
    let _ = match &models[..] {
        [] => writeln!(text, "no models"),
        names => writeln!(text, "models: {}", names.join(", ")),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_tells_a_drained_shard_from_one_that_still_has_blocks() {
        let status = |models: Value| {
            let shard = json!({ "shard": 1, "address": "node1:7070", "draining": true, "models": models });
            for_people(&json!({ "registry": "node1:7070", "shards": [shard] }), None)
        };
        assert!(status(json!([])).contains(", drained: no blocks are left\n"));
        assert!(status(json!([{ "name": "m" }])).contains(", draining\n"));
    }

    #[test]
    fn the_status_says_that_a_young_registry_may_not_know_everything() {
        let status =
            |age: f64| for_people(&json!({ "registry": "node1:7070", "registry_seconds": age }), None);
        let later = "if that was not the first time, shards tell it of their models within seconds";
        assert_eq!(status(3.2), format!("registry node1:7070, started 3 s ago: {later}\nno models\n"));
        assert_eq!(status(99.0), "registry node1:7070\nno models\n");
    }

    #[test]
    fn the_status_has_a_shards_rdma_if_there_is_any() {
        let with = json!({ "address": "node1:7070", "device": "mlx5_0 port 1", "connections": 4 });
        assert_eq!(rdma(&with), ", rdma on mlx5_0 port 1 at node1:7070 with 4 connection(s)");
        let hindered =
            json!({ "address": null, "unavailable": "port 1 of mlx5_0 is down", "hindered": true });
        assert_eq!(rdma(&hindered), ", no rdma: port 1 of mlx5_0 is down");
        let without = json!({ "address": null, "unavailable": "there is no RDMA device", "hindered": false });
        assert_eq!(rdma(&without), "");
        // A status of a shard that does not know of RDMA.
        assert_eq!(rdma(&Value::Null), "");
    }
}
