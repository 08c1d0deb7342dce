//! Learners and shards that the jobs of a cluster wait for. The coordinators name them; a coordinator that does not answer
//! is itself waited for.

use std::collections::{BTreeMap, BTreeSet};

use libmodelio::registry::Registry;
use libmodelio::vocabulary::members::WaitedFor;
use libmodelio::wire::ModelRecord;
use serde_json::{Value, json};

use super::{ask, ask_all, deadline, list, string};
use crate::config::registry::RegistryAt;

/// A shard that has not been reached for this many seconds is waited for.
const AWAY: f64 = 2.0;

/// The jobs that `shards` coordinate, and those of `models` that no shard coordinates: `name`, `state`, the
/// shards and the learners that they wait for, and for how many seconds.
pub fn states(registry: &dyn Registry, at: &RegistryAt, shards: &[Value], models: &[String]) -> Vec<Value> {
    let mut jobs: Vec<Value> = shards.iter().flat_map(|shard| coordinated(shards, shard)).collect();
    let until = deadline();
    let is_known = |name: &&String| jobs.iter().any(|job| job["name"] == json!(name));
    let lost = models.iter().filter(|name| !is_known(name));
    let lost = lost.filter_map(|name| Some((name, registry.model(name, until).ok()?)));
    let (lost, made): (Vec<_>, Vec<_>) = lost.partition(|(_, record)| record.ready);
    // Else a model that is not ready is being created, and need not have a job yet.
    jobs.extend(made.iter().filter(|(_, record)| record.lineage.restored > 0).map(|(name, record)| {
        json!({
            "name": name,
            "state": "restoring",
            "by_shard": record.lineage.by.0,
            "waits_for_shards": [],
            "waits_for_learners": null,
        })
    }));
    if lost.is_empty() {
        return jobs;
    }
    let status = at.process().and_then(|at| ask(&at.to_string()).ok()).unwrap_or_default();
    let announced = list(&status["registry_announcements"]);
    let announced =
        |record: &ModelRecord| announced.iter().find(|one| one["shard"] == json!(record.coordinator.0));
    let address = |record: &ModelRecord| announced(record).and_then(|one| one["address"].as_str());
    // A coordinator may have moved since the shards were asked. One that did not answer then is not asked again.
    let silent = |at: &str| {
        let shard = shards.iter().find(|shard| shard["address"] == json!(at));
        shard.and_then(|shard| shard["unreachable"].as_str()).map(str::to_owned)
    };
    let asked: BTreeSet<&str> = lost.iter().filter_map(|(_, record)| address(record)).collect();
    let asked: Vec<&str> = asked.into_iter().filter(|at| silent(at).is_none()).collect();
    let answers: BTreeMap<&str, _> = asked.iter().copied().zip(ask_all(asked.iter().copied())).collect();
    for (name, record) in &lost {
        let (known, address) = (announced(record), address(record));
        let answer = match address {
            None => Err("the registry does not know where it is".to_owned()),
            Some(at) => answers.get(at).cloned().unwrap_or_else(|| Err(silent(at).unwrap_or_default())),
        };
        match answer {
            Err(why) => jobs.push(json!({
                "name": name,
                "state": "waiting",
                "waits_for_shards": [{
                    "shard": record.coordinator.0,
                    "address": address,
                    "seconds": known.map_or(&Value::Null, |one| &one["seconds"]),
                    "why": why,
                }],
                "waits_for_learners": null,
            })),
            Ok(answer) => match coordinated(shards, &answer).find(|job| job["name"] == json!(name)) {
                Some(job) => jobs.push(job),
                None if has(&answer, name) => {}
                None => jobs.push(json!({
                    "name": name,
                    "state": "failed",
                    "why": format!("shard {} coordinated it and has come back without it", record.coordinator),
                    "waits_for_shards": [],
                    "waits_for_learners": null,
                })),
            },
        }
    }
    jobs
}

/// The jobs that a shard coordinates, as it says itself.
fn coordinated<'a>(shards: &'a [Value], shard: &'a Value) -> impl Iterator<Item = Value> + 'a {
    let coordinated = list(&shard["models"]).iter().filter(|model| model["coordinator"].is_object());
    coordinated.map(move |model| {
        let coordinator = &model["coordinator"];
        let away = list(&coordinator["unreachable"])
            .iter()
            .filter(|one| one["seconds"].as_f64().unwrap_or(0.0) >= AWAY);
        let away = away.map(|one| {
            let known = shards.iter().find(|shard| shard["shard"] == one["shard"]);
            // The registry forgets a shard that has been silent for its lease.
            let address = known.map_or(&one["address"], |shard| &shard["address"]);
            json!({ "shard": one["shard"], "address": address, "seconds": one["seconds"], "why": one["why"] })
        });
        json!({
            "name": model["name"],
            "state": coordinator["state"],
            "why": coordinator["why"],
            "waits_for_shards": away.collect::<Vec<_>>(),
            "waits_for_learners": coordinator["late"],
        })
    })
}

/// Whether a shard has, or will soon have, a partition of the model.
fn has(shard: &Value, name: &str) -> bool {
    let of = |key: &str| list(&shard[key]).iter().any(|model| model["name"] == json!(name));
    of("models") || of("incoming")
}

/// Whether a job is stuck.
pub fn is_in_trouble(job: &Value) -> bool {
    matches!(job["state"].as_str(), Some("waiting" | "failed" | "restoring"))
}

/// Lines for people about a job that waits or has failed.
pub fn lines(job: &Value) -> Vec<String> {
    let name = string(&job["name"]);
    let mut lines = Vec::new();
    let since =
        |value: &Value| value.as_f64().map_or(String::new(), |seconds| format!(" for {seconds:.0} s"));
    let has_failed = job["state"] == json!("failed");
    // A job that has failed waits for nobody.
    for shard in list(&job["waits_for_shards"]).iter().filter(|_| !has_failed) {
        let at = shard["address"].as_str().map_or(String::new(), |address| format!(" at {address}"));
        let (number, since) = (&shard["shard"], since(&shard["seconds"]));
        let why = string(&shard["why"]);
        lines.push(format!("{name}: waiting for shard {number}{at}, not reached{since}: {why}"));
    }
    if has_failed {
        let why = job["why"].as_str().map_or(String::new(), |why| format!(": {why}"));
        lines.push(format!("{name}: failed{why}"));
    }
    if job["state"] == json!("restoring") {
        let by = job["by_shard"].as_u64().map_or(String::new(), |by| format!(" by shard {by}"));
        lines.push(format!("{name}: blocks are lost, and it is restored from its newest snapshot{by}"));
    }
    let late = &job["waits_for_learners"];
    if late.is_object() {
        let whom = WaitedFor {
            learners: list(&late["learners"]).iter().filter_map(Value::as_str).map(str::to_owned).collect(),
            more: late["more"].as_u64().unwrap_or(0) as usize,
        };
        lines.push(format!("{name}: waiting{} for learners: {whom}", since(&late["seconds"])));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_names_awaited_shards_and_learners_and_since_when() {
        let shards = [
            json!({ "shard": 1, "address": "node1:7070", "models": [{ "name": "m", "coordinator": {
                "state": "waiting",
                "unreachable": [
                    { "shard": 2, "why": "connection refused", "seconds": 12.4 },
                    { "shard": 3, "why": "no connection yet", "seconds": 1.9 },
                    { "shard": 4, "address": "node4:7070", "why": "no greeting", "seconds": 30.2 },
                ],
                "late": { "learners": ["a", "b"], "more": 2, "seconds": 7.1 },
            } }, { "name": "n", "coordinator": null }] }),
            json!({ "shard": 2, "address": "node2:7070", "unreachable": "connection refused" }),
        ];
        let jobs: Vec<Value> = coordinated(&shards, &shards[0]).collect();
        assert_eq!(jobs.len(), 1, "{jobs:?}");
        assert!(is_in_trouble(&jobs[0]));
        assert_eq!(
            lines(&jobs[0]),
            [
                "m: waiting for shard 2 at node2:7070, not reached for 12 s: connection refused",
                "m: waiting for shard 4 at node4:7070, not reached for 30 s: no greeting",
                "m: waiting for 7 s for learners: a, b and 2 more",
            ]
        );
        let running =
            json!({ "name": "m", "state": "running", "waits_for_shards": [], "waits_for_learners": null });
        assert!(!is_in_trouble(&running) && lines(&running).is_empty());
        let restoring = json!({ "name": "m", "state": "restoring", "by_shard": 2, "waits_for_shards": [] });
        assert!(is_in_trouble(&restoring));
        assert_eq!(
            lines(&restoring),
            ["m: blocks are lost, and it is restored from its newest snapshot by shard 2"]
        );
        let failed = json!({ "name": "m", "state": "failed", "why": "so", "waits_for_shards": [] });
        assert!(is_in_trouble(&failed));
        assert_eq!(lines(&failed), ["m: failed: so"]);
    }
}
