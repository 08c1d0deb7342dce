//! The metrics of a shard.

use std::time::Duration;

use libmodelio::observe::histogram::Counts;
use libmodelio::transport::tally::Payloads;
use serde::Deserialize;
use serde_json::Value;

use super::page::{JobWaits, PHASES, PHASES_HELP, Page, Payload};

/// The fields of a shard's status that metrics show.
#[derive(Deserialize)]
struct Status {
    tcp: Connections,
    shared_memory: Connections,
    rdma: Rdma,
    models: Vec<ModelFigures>,
}

#[derive(Deserialize)]
struct Connections {
    connections: u64,
}

#[derive(Deserialize)]
struct Rdma {
    connections: u64,
    address: Option<String>,
}

#[derive(Deserialize)]
struct ModelFigures {
    name: String,
    version: u64,
    blocks: u64,
    memory_bytes: u64,
    payload: Payloads,
    reduce_seconds: Counts,
    coordinator: Option<Coordinator>,
}

#[derive(Deserialize)]
struct Coordinator {
    learners: Vec<serde::de::IgnoredAny>,
    state: String,
    contributions: u64,
    unreachable: Vec<Away>,
    late: Option<LateLearners>,
}

#[derive(Deserialize)]
struct LateLearners {
    learners: Vec<String>,
    more: usize,
    seconds: f64,
}

#[derive(Deserialize)]
struct Away {
    shard: u16,
    seconds: f64,
}

/// The page, from the status that `gradfs status --json` shows.
///
/// # Errors
/// Fails only if names or labels here are wrong, or the status is not as expected.
pub fn page(status: &Value) -> Result<String, prometheus::Error> {
    let status = Status::deserialize(status).map_err(|error| {
        prometheus::Error::Msg(format!("the shard's status is not what is expected: {error}"))
    })?;
    let page = Page::new()?;
    let of_model = &["model"];
    let connections = page.gauge(
        "gradfs_connections",
        "Connections of this shard: by tcp those to and from mounts, shards and commands, by shm and rdma from mounts.",
        &["transport"],
    )?;
    let rdma = page.gauge("gradfs_rdma_available", "1 if this shard takes connections by RDMA.", &[])?;
    let version = page.gauge(
        "gradfs_partition_version",
        "The newest version of this shard's partition of a model.",
        of_model,
    )?;
    let blocks =
        page.gauge("gradfs_partition_blocks", "Blocks of a model that this shard owns.", of_model)?;
    let memory = page.gauge(
        "gradfs_partition_memory_bytes",
        "Memory of this shard's partition of a model.",
        of_model,
    )?;
    let learners = page.gauge(
        "gradfs_learners",
        "Learners in the job of a model that this shard coordinates.",
        of_model,
    )?;
    let contributions = page.counter(
        "gradfs_contributions_total",
        "Contributions that are part of a version, of a model that this shard coordinates.",
        of_model,
    )?;
    let away = page.gauge(
        "gradfs_shard_unreachable_seconds",
        "For how long a shard of a model that this one coordinates cannot be reached.",
        &["model", "shard"],
    )?;
    let waits = JobWaits::new(&page)?;
    let payload = Payload::new(&page)?;
    let phases = page.histograms(PHASES, PHASES_HELP, &["model", "phase"])?;
    connections.set(&["tcp"], status.tcp.connections)?;
    connections.set(&["shm"], status.shared_memory.connections)?;
    connections.set(&["rdma"], status.rdma.connections)?;
    rdma.set(&[], status.rdma.address.is_some().into())?;
    for model in &status.models {
        let name = model.name.as_str();
        version.set(&[name], model.version)?;
        blocks.set(&[name], model.blocks)?;
        memory.set(&[name], model.memory_bytes)?;
        payload.total(name, &model.payload)?;
        phases.tell(&[name, "reduce"], &model.reduce_seconds)?;
        if let Some(coordinator) = &model.coordinator {
            learners.set(&[name], coordinator.learners.len() as u64)?;
            contributions.total(&[name], coordinator.contributions)?;
            let late = coordinator.late.as_ref();
            let waited = |late: &LateLearners| Duration::try_from_secs_f64(late.seconds).unwrap_or_default();
            let late = late.map(|late| (&late.learners[..], late.more, waited(late)));
            waits.tell(name, &coordinator.state, late)?;
            for one in &coordinator.unreachable {
                away.set(&[name, &one.shard.to_string()], one.seconds as u64)?;
            }
        }
    }
    page.text()
}
