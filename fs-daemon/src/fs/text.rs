//! The contents of the small text files.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use libmodelio::client::core::PullReport;
use libmodelio::vocabulary::controls::SETTINGS;
use libmodelio::vocabulary::ids::{LearnerId, Version};
use libmodelio::vocabulary::norm::Norm;
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::vocabulary::readers::ReaderState;
use libmodelio::vocabulary::reducer::decimal;
use libmodelio::vocabulary::settings_json;
use serde_json::json;

use super::model_tree::ModelTree;
use super::node::File;
use crate::session::error::{CallError, CallResult};
use crate::session::model::{Model, Snapshots};

/// `README` in the mount's root.
pub fn readme(trees: &[Arc<ModelTree>]) -> String {
    let model = |tree: &Arc<ModelTree>| {
        let (name, layout) = (&tree.model.name, &tree.model.layout);
        let (tensors, size, block) = (layout.tensors().len(), layout.size(), layout.block_size());
        format!("  {name}/  {tensors} tensors, {size} bytes in blocks of {block}\n")
    };
    let setting = |(name, meaning): &(&str, String)| format!("  {name:<14} {meaning}\n");
    include_str!("readme.txt")
        .replace("{settings}", &SETTINGS.iter().map(setting).collect::<String>())
        .replace("{models}", &trees.iter().map(model).collect::<String>())
}

/// The facts about the mount itself in `status.json`.
pub struct MountStatus {
    /// Whether reads and mappings may bypass the daemon.
    pub passthrough: bool,
    /// Files open now.
    pub open_files: usize,
    /// Processes whose end will be noticed.
    pub watched_processes: usize,
}

/// `status.json`.
pub fn status(tree: &ModelTree, mount: &MountStatus) -> String {
    let model = &tree.model;
    // What is said of the job, and what of the versions that are shown.
    let (whole, shown) = (model.whole(), model.job.status());
    let (status, controls) = (whole.job.status(), whole.job.controls());
    let host = nix::unistd::gethostname().ok().and_then(|host| host.into_string().ok());
    let learners: Vec<_> = status
        .members
        .iter()
        .map(|member| {
            // Only the mount that a learner is of knows what it waits for.
            let is_here = model.learner(member.learner).is_ok();
            let times = model.learner(member.learner).ok().map(|learner| Arc::clone(&learner.times));
            let stall = times.as_ref().map(|times| times.stall());
            let staleness = times.as_ref().and_then(|times| times.staleness());
            json!({
                "id": member.name,
                "incarnation": member.incarnation,
                "host": host.as_deref().filter(|_| is_here),
                "step": member.step,
                "steps_per_second": whole.times.steps_per_second(member).map(round),
                "phase": member.phase,
                "joined_at_version": member.joined_at,
                "silent_seconds": round(member.silent.as_secs_f64()),
                "stall_seconds": stall.map(|of| round(of.stall.as_secs_f64())),
                "stall_share": stall.map(|of| round(of.share)),
                "stall_share_since_join": stall.map(|of| round(of.share_since_join)),
                "staleness": staleness.map(|of| {
                    json!({ "versions": of.versions, "ms": of.behind.as_millis() as u64 })
                }),
            })
        })
        .collect();
    let (state, readers) = (whole.job.state(), whole.job.readers());
    let readers: Vec<_> = readers.iter().map(ReaderState::to_json).collect();
    let view = |(name, number)| {
        let model = tree.views.tree(number).ok().flatten().map(|tree| Arc::clone(&tree.model));
        let (version, size) =
            (model.as_ref().map(|of| of.job.version()), model.as_ref().map(|of| of.layout.size()));
        json!({ "id": name, "version": version, "size_bytes": size })
    };
    let views: Vec<_> = tree.views.names().into_iter().map(view).collect();
    let view_bytes: u64 = tree.views.made().iter().map(|of| of.model.job.memory().versions).sum();
    let shards: Vec<_> = status
        .shards
        .iter()
        .map(|shard| {
            let mut value = json!({
                "id": shard.shard,
                "address": shard.address,
                "transport": shard.transport.to_string(),
                "blocks": shard.blocks,
                "wire": shard.coding.map_or_else(|| "full".to_owned(), |coding| coding.to_string()),
                "connected": shard.connected,
            });
            if let Some(checksum) = shard.checksum {
                value["checksum"] = json!(checksum.name());
            }
            if let Some(why) = shard.full_because {
                value["wire_full_because"] = json!(why.to_string());
            }
            if let Some(why) = &shard.no_memory {
                value["not_shm_because"] = json!(why);
            }
            if let Some(why) = &shard.no_rdma {
                value["not_rdma_because"] = json!(why);
            }
            if let Some(why) = &shard.lost {
                value["connection_lost_because"] = json!(why);
            }
            value
        })
        .collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since = |waited: Duration| round(now.saturating_sub(waited).as_secs_f64());
    let waits_for_shards: Vec<_> = status
        .shards
        .iter()
        // A job that has failed waits for nobody.
        .filter(|_| status.state != JobPhase::Failed)
        .filter_map(|shard| {
            let since = since(shard.away?);
            Some(json!({ "id": shard.shard, "address": shard.address, "since_unix_seconds": since, "because": shard.lost }))
        })
        .collect();
    let waits_for_learners: Vec<_> = status
        .late
        .iter()
        .flat_map(|(late, waited)| {
            late.learners.iter().map(|name| json!({ "id": name, "since_unix_seconds": since(*waited) }))
        })
        .collect();
    let version = tree.tensors_name.shown(shown.version);
    let published =
        model.job.get(version).or_else(|| model.job.get(shown.version)).map(|view| view.published);
    let published =
        published.and_then(|at| at.duration_since(UNIX_EPOCH).ok()).map(|d| round(d.as_secs_f64()));
    let memory = model.job.memory();
    let mut value = json!({
        "model": model.name,
        "client": whole.job.id().0,
        "state": status.state.name(),
        "waits_for_shards": waits_for_shards,
        "waits_for_learners": waits_for_learners,
        "held_by": state.held_by,
        "durable_version": state.durable.map(|version| version.0),
        "snapshots": whole.snapshots_here(),
        "restored": whole.job.lineage().restored,
        "waits_for_more_learners": status.late.as_ref().map_or(0, |(late, _)| late.more),
        "version": version,
        "published_unix_seconds": published,
        "size_bytes": model.layout.size(),
        "tensors": model.layout.tensors().len(),
        "block_size": model.layout.block_size(),
        "blocks": model.layout.blocks(),
        "registry": match &whole.snapshots {
            Snapshots::Registry(at) => Some(at),
            Snapshots::Here(_) | Snapshots::Never(_) | Snapshots::PartOf(_) => None,
        },
        "transport": whole.job.kind().to_string(),
        "shards": shards,
        "passthrough": mount.passthrough,
        "open_files": mount.open_files,
        "watched_processes": mount.watched_processes,
        "learners": learners,
        "readers": readers,
        "views": views,
        "committed_for_next_version": status.committed,
        "contributions": status.contributions,
        "contributions_of_newest_version": status.newest_of,
        "grace_window_seconds": status.grace_window.map(|window| round(window.as_secs_f64())),
        "gradient_norm": status.norm.map(Norm::get),
        "learning_rate": controls.learning_rate_after(status.version),
        "stale_learning_rate": status.rate.map(decimal),
        "versions_in_memory": shown.versions,
        "memory": {
            "versions": memory.versions,
            "state": memory.state,
            "sums": memory.sums,
            "residuals": memory.residuals,
            "staging": memory.staging,
            "connections": memory.connections,
            "views": view_bytes,
        },
        "version_buffers": {
            "existing": shown.buffers.0,
            "free": shown.buffers.1,
            "no_memory": model.job.shortage(),
        },
        "traffic": {
            "written_bytes": model.traffic.written.load(Ordering::Relaxed),
            "reduced_on_arrival_bytes": model.traffic.reduced_on_arrival.load(Ordering::Relaxed),
            "staged_bytes": model.traffic.staged.load(Ordering::Relaxed),
            "blocks_reduced_on_arrival": status.blocks_on_arrival,
        },
        "control": settings_json::all_of(&controls),
    });
    if let Some((policy, PullReport { pulls, pull, interval, bubble }, whole)) = status.pull {
        let seconds = |of: Option<Duration>| of.map(|of| (of.as_secs_f64() * 1e6).round() / 1e6);
        let behind = model.job.staleness(model.job.version());
        value["pull"] = json!({
            "policy": policy.to_string(),
            "behind": {"versions": behind.versions, "ms": behind.behind.as_millis() as u64},
            "pulls": pulls,
            "blocks": model.layout.blocks(),
            "whole_blocks": whole,
            "seconds": seconds(pull),
            "open_interval_seconds": seconds(interval),
            "bubble_seconds": seconds(bubble),
        });
    }
    if let Some((push, pull)) = whole.times.rates(&whole.job) {
        (value["push_gb_per_s"], value["pull_gb_per_s"]) =
            (json!(round(push / 1e9)), json!(round(pull / 1e9)));
    }
    if let Some(via) = whole.job.relays() {
        value["via"] = json!({
            "relay": via.relay,
            "connected": via.connected,
            "listens": via.listens,
            "followers": via.followers,
            "relayed_bytes": via.relayed_bytes,
            "blocks_from_shards_instead": via.replaced_blocks,
        });
    }
    if let Some(payload) = whole.job.payload() {
        value["payload"] = json!(payload);
    }
    let mut text = serde_json::to_string_pretty(&value).unwrap_or_default();
    text.push('\n');
    text
}

/// `learners/<id>/status`.
///
/// # Errors
/// ENOENT for a learner that is gone.
pub fn learner_status(model: &Model, id: LearnerId) -> CallResult<String> {
    let learner = model.learner(id)?;
    let status = model.job.status();
    let Some(member) = status.members.iter().find(|member| member.learner == id) else {
        return Err(CallError::not_found());
    };
    Ok(format!(
        "id: {}\nincarnation: {}\nstep: {}\nphase: {}\nopen_bytes: {}\nsilent_seconds: {:.3}\njob: {}\n",
        member.name,
        member.incarnation,
        member.step,
        member.phase,
        learner.open_bytes(),
        member.silent.as_secs_f64(),
        status.state,
    ))
}

/// `versions/<n>/meta.json`: a line.
pub fn meta(model: &Model, version: Version) -> String {
    format!("{}\n", model.job.meta(version))
}

/// `durable_version`: a line; nothing if there is no snapshot.
pub fn durable(model: &Model) -> String {
    let durable = model.whole().job.state().durable;
    durable.map_or_else(String::new, |version| format!("{version}\n"))
}

/// `readers/<id>/staged`, `readers/<id>/applied` and `readers/applied`: a line; nothing if nothing was applied.
///
/// # Errors
/// ENOENT for a reader that has gone.
pub fn of_reader(model: &Model, file: File) -> CallResult<String> {
    let version = match file {
        File::ReaderStaged(id) => Some(model.reader(id)?.staged),
        file => model.applied(file.reader())?,
    };
    Ok(version.map_or_else(String::new, |version| format!("{version}\n")))
}

/// `learners/<id>/weight`: a line.
///
/// # Errors
/// ENOENT for a learner that is gone.
pub fn weight(model: &Model, id: LearnerId) -> CallResult<String> {
    Ok(format!("{}\n", model.learner(id)?.weight()))
}

/// `error` of a learner: a line, or nothing.
///
/// # Errors
/// ENOENT for a learner that is gone.
pub fn error(tree: &ModelTree, file: File) -> CallResult<String> {
    let refusal = tree.refusal_of(file).ok_or_else(CallError::not_found)?;
    Ok(refusal.text().map_or_else(String::new, |text| text + "\n"))
}

/// The value of a setting, by its name: a line, or more.
/// None for one that there is not.
pub fn setting(model: &Model, name: &str) -> Option<String> {
    Some(format!("{}\n", settings_json::get(&model.job.controls(), name)?))
}

fn round(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}
