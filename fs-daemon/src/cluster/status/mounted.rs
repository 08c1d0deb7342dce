//! The status of a mount on this host: what `status.json` of its models says, and what their coordinators know besides.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::ShardId;
use serde_json::{Map, Value, json};

use super::super::{ask_until, deadline, jobs, list, registry, registry_error, string};
use super::{learners, readers};
use crate::config::registry::RegistryAt;
use crate::error::Error;
use crate::mountpoint;
use crate::shown::shown_within;

/// The time for a coordinator to say what learners it has. The mount itself names it as away after as long.
const ANSWERS: Duration = Duration::from_secs(2);

/// The text to print about a mount, or about the model that `path` is in, and whether a job is in trouble.
pub fn status(path: &Path, as_json: bool) -> Result<(String, bool), Error> {
    let (mount, rest) = mountpoint::of(path)?;
    let failed = |path: &Path, error| Error::new(format!("cannot read {}", path.display())).caused_by(error);
    let names = match rest.iter().next() {
        Some(model) => vec![model.to_string_lossy().into_owned()],
        None => {
            let mut names = mountpoint::names(&mount).map_err(|error| failed(&mount, error))?;
            names.sort_unstable();
            names.retain(|name| name != "README");
            names
        }
    };
    let mut models: Vec<Value> = Vec::new();
    for name in names {
        let path = mount.join(&name).join("status.json");
        let text = match mountpoint::text(&path) {
            Ok(text) => text,
            // The model was deleted meanwhile.
            Err(_) if rest.iter().next().is_none() && is_gone(&mount, &name) => continue,
            Err(error) => return Err(failed(&path, error)),
        };
        let status: Map<String, Value> =
            serde_json::from_str(&text).map_err(|error| failed(&path, error.into()))?;
        models.push(Value::Object(status));
    }
    // A coordinator that does not answer holds up no other model.
    std::thread::scope(|scope| {
        for model in &mut models {
            scope.spawn(|| {
                if let Err(why) = complete(model) {
                    model["others_unknown_because"] = json!(why.to_string());
                }
            });
        }
    });
    let in_trouble = models.iter().any(jobs::is_in_trouble);
    let text = match as_json {
        true => format!("{:#}\n", json!({ "mount": mount.display().to_string(), "models": models })),
        false => models.into_iter().map(|model| for_people(&shown_within(model), &mount)).collect(),
    };
    Ok((text, in_trouble))
}

/// Whether the mount has no model of this name.
fn is_gone(mount: &Path, name: &str) -> bool {
    mountpoint::names(mount).is_ok_and(|names| !names.iter().any(|one| one == name))
}

/// Adds the learners of other mounts, as the model's coordinator knows them: a mount knows only its own.
fn complete(model: &mut Value) -> Result<(), Error> {
    let (Some(at), Some(name)) = (model["registry"].as_str(), model["model"].as_str()) else {
        return Ok(());
    };
    let at = RegistryAt::parse(at).map_err(|error| error.of("the mount's registry"))?;
    let failed = |error| registry_error(&at, error);
    let table = registry(&at)?;
    let coordinator = table.model(name, deadline()).map_err(failed)?.coordinator;
    let shards = table.shards(deadline()).map_err(failed)?;
    let gone = || Error::new(format!("shard {coordinator}, which coordinates {name}, is not announced"));
    let shard = shards.iter().find(|shard| shard.shard == coordinator).ok_or_else(gone)?;
    if let Some(because) = known_away(model, coordinator) {
        let why = format!("the mount cannot reach shard {coordinator}, which coordinates {name}: {because}");
        return Err(Error::new(why));
    }
    let status = ask_until(&shard.address, Instant::now() + ANSWERS).map_err(Error::new)?;
    let of_model = list(&status["models"]).iter().find(|one| one["name"] == json!(name));
    let known = of_model.map(|model| list(&model["coordinator"]["learners"])).unwrap_or_default();
    add_others(model, known);
    Ok(())
}

/// Why the mount waits for this shard, if it does: whoever asks the shard would wait, too.
fn known_away(model: &Value, coordinator: ShardId) -> Option<&str> {
    let is_it = |shard: &&Value| shard["id"] == json!(coordinator.0);
    let shard = model["waits_for_shards"].as_array()?.iter().find(is_it)?;
    Some(shard["because"].as_str().unwrap_or("it does not answer"))
}

/// Adds the learners that a coordinator knows of, and this mount does not have. What is no learner is passed over.
fn add_others(model: &mut Value, known: &[Value]) {
    let Some(learners) = model["learners"].as_array_mut() else { return };
    for mut learner in known.iter().filter(|known| known.is_object()).cloned() {
        learner["id"] = learner["name"].take();
        if !learners.iter().any(|own| own["id"] == learner["id"]) {
            learners.push(learner);
        }
    }
}

fn for_people(model: &Value, mount: &Path) -> String {
    let mut text = String::new();
    let (name, control) = (string(&model["model"]), &model["control"]);
    let _ = writeln!(
        text,
        "{}: {}, version {}, reducer {}, {}; {} learner(s), {} contributions",
        mount.join(name).display(),
        string(&model["state"]),
        model["version"],
        string(&control["reducer"]),
        string(&control["consistency"]),
        list(&model["learners"]).len(),
        model["contributions"],
    );
    for shard in list(&model["shards"]) {
        let at = shard["address"].as_str().map_or(String::new(), |address| format!(" at {address}"));
        let connected = if shard["connected"] == json!(false) { ", not connected" } else { "" };
        let (blocks, transport) = (&shard["blocks"], string(&shard["transport"]));
        let _ = writeln!(text, "  shard {}{at}: {transport}, {blocks} blocks{connected}", shard["id"]);
    }
    learners::tell(&mut text, "  ", list(&model["learners"]), string(&control["consistency"]), None);
    for shard in list(&model["waits_for_shards"]) {
        let because = string(&shard["because"]);
        let _ =
            writeln!(text, "  waiting for shard {} at {}: {because}", shard["id"], string(&shard["address"]));
    }
    let late: Vec<String> =
        list(&model["waits_for_learners"]).iter().map(|late| string(&late["id"]).to_owned()).collect();
    let more = model["waits_for_more_learners"].as_u64().unwrap_or_default() as usize;
    if !late.is_empty() || more > 0 {
        let late = libmodelio::vocabulary::members::WaitedFor { learners: late, more };
        let _ = writeln!(text, "  waiting for learners: {late}");
    }
    readers::tell(&mut text, "  ", model);
    if let Some(why) = model["others_unknown_because"].as_str() {
        let _ = writeln!(text, "  learners of other mounts are not known: {why}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coordinator_that_the_mount_waits_for_is_not_asked() {
        let model =
            json!({ "waits_for_shards": [{ "id": 2, "address": "node2:7070", "because": "silent" }] });
        assert_eq!([1, 2].map(|shard| known_away(&model, ShardId(shard))), [None, Some("silent")]);
        assert_eq!(known_away(&json!({ "waits_for_shards": null }), ShardId(2)), None);
    }

    #[test]
    fn learners_of_others_are_added_and_what_is_no_learner_is_passed_over() {
        let mut model = json!({ "learners": [{ "id": "a" }] });
        add_others(&mut model, &[json!([1]), json!(7), json!({ "name": "a" }), json!({ "name": "b" })]);
        assert_eq!(model["learners"], json!([{ "id": "a" }, { "id": "b", "name": null }]));
    }
}
