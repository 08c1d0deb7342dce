//! The metrics of a shard.

use std::time::Duration;

use libmodelio::observe::histogram::Counts;
use libmodelio::transport::tally::Payloads;
use serde::Deserialize;
use serde_json::Value;

use super::page::{PHASES, PHASES_HELP, Page};

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
    readers: Vec<Reader>,
    held_by: Vec<serde::de::IgnoredAny>,
    snapshots: Option<Snapshots>,
}

#[derive(Deserialize)]
struct Snapshots {
    durable_version: Option<u64>,
    age_seconds: Option<f64>,
    seconds: Option<f64>,
    written_bytes: Option<u64>,
    failures: u64,
}

#[derive(Deserialize)]
struct Reader {
    id: String,
    applied: Option<u64>,
    staged: u64,
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
    let mut page = Page::new();
    for (transport, connections) in [
        ("tcp", status.tcp.connections),
        ("shm", status.shared_memory.connections),
        ("rdma", status.rdma.connections),
    ] {
        page.gauge(
            "gradfs_connections",
            "Connections of this shard: by tcp those to and from mounts, shards and commands, by shm and rdma from mounts.",
            &[("transport", transport)],
            connections as f64,
        );
    }
    let rdma = f64::from(status.rdma.address.is_some());
    page.gauge("gradfs_rdma_available", "1 if this shard takes connections by RDMA.", &[], rdma);
    for model in &status.models {
        let of_model = &[("model", &*model.name)];
        let help = "The newest version of this shard's partition of a model.";
        page.gauge("gradfs_partition_version", help, of_model, model.version as f64);
        let help = "Blocks of a model that this shard owns.";
        page.gauge("gradfs_partition_blocks", help, of_model, model.blocks as f64);
        let help = "Memory of this shard's partition of a model.";
        page.gauge("gradfs_partition_memory_bytes", help, of_model, model.memory_bytes as f64);
        page.payload(&model.name, &model.payload);
        let labels = &[("model", &*model.name), ("phase", "reduce")];
        page.histogram(PHASES, PHASES_HELP, labels, &model.reduce_seconds);
        if let Some(coordinator) = &model.coordinator {
            coordinator.tell(&mut page, &model.name);
        }
    }
    page.text()
}

impl Snapshots {
    fn tell(&self, page: &mut Page, model: &str) {
        let of = &[("model", model)];
        let written = self.written_bytes.map(|bytes| bytes as f64);
        for (name, help, value) in [
            (
                "gradfs_durable_version",
                "The newest version of which there is a snapshot in the job's store.",
                self.durable_version.map(|version| version as f64),
            ),
            (
                "gradfs_snapshot_age_seconds",
                "How long ago the newest snapshot in the job's store was begun.",
                self.age_seconds,
            ),
            ("gradfs_snapshot_seconds", "How long the newest snapshot has taken.", self.seconds),
            ("gradfs_snapshot_written_bytes", "What was written for the newest snapshot.", written),
        ] {
            if let Some(value) = value {
                page.gauge(name, help, of, value);
            }
        }
        let help = "Snapshots that were to be taken and were not.";
        page.counter("gradfs_snapshot_failures_total", help, of, self.failures as f64);
    }
}

impl Coordinator {
    fn tell(&self, page: &mut Page, model: &str) {
        let help = "Learners in the job of a model that this shard coordinates.";
        page.gauge("gradfs_learners", help, &[("model", model)], self.learners.len() as f64);
        let help = "Contributions that are part of a version, of a model that this shard coordinates.";
        page.counter("gradfs_contributions_total", help, &[("model", model)], self.contributions as f64);
        let waited = |late: &LateLearners| Duration::try_from_secs_f64(late.seconds).unwrap_or_default();
        let late = self.late.as_ref().map(|late| (&late.learners[..], late.more, waited(late)));
        page.waits(model, &self.state, late);
        let readers = self.readers.iter().map(|reader| (&*reader.id, reader.applied, reader.staged));
        page.readers(model, readers, self.held_by.len());
        if let Some(snapshots) = &self.snapshots {
            snapshots.tell(page, model);
        }
        for one in &self.unreachable {
            page.gauge(
                "gradfs_shard_unreachable_seconds",
                "For how long a shard of a model that this one coordinates cannot be reached.",
                &[("model", model), ("shard", &one.shard.to_string())],
                one.seconds.trunc(),
            );
        }
    }
}
