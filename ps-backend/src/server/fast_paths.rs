//! The ways to this shard that are faster than TCP: through shared memory, and by RDMA.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use libmodelio::transport::shm::Threads;
use serde_json::{Value, json};

use super::options::NoRdma;
use super::rdma_clients::Rdma;
use super::shm_clients::MAX_CONNECTIONS;

/// Connections that are faster than TCP, or why there are none.
pub(super) struct FastPaths {
    /// Connections through shared memory.
    pub memory: Arc<Threads>,
    pub no_memory: OnceLock<String>,
    /// Connections by RDMA.
    pub rdma: OnceLock<Rdma>,
    pub no_rdma: OnceLock<NoRdma>,
}

impl FastPaths {
    pub(super) fn new() -> FastPaths {
        FastPaths {
            memory: Threads::new(MAX_CONNECTIONS),
            no_memory: OnceLock::new(),
            rdma: OnceLock::new(),
            no_rdma: OnceLock::new(),
        }
    }

    /// What there is, and what is lacking, for the log.
    pub(super) fn describe(&self) -> String {
        let memory = match self.no_memory.get() {
            None => "shm on this host".to_owned(),
            Some(why) => format!("no shm on this host: {why}"),
        };
        if let Some(rdma) = self.rdma.get() {
            return format!("{memory}; {}", rdma.name());
        }
        match self.no_rdma.get() {
            Some(NoRdma { why, hindered: true }) => format!("{memory}; no rdma: {why}"),
            _ => memory,
        }
    }

    pub(super) fn memory_status(&self) -> Value {
        json!({ "connections": self.memory.connections(), "unavailable": self.no_memory.get() })
    }

    /// RDMA in the status of a shard whose TCP address is `beside`.
    pub(super) fn rdma_status(&self, beside: &str) -> Value {
        if let Some(rdma) = self.rdma.get() {
            return json!({
                "address": self.rdma_address(beside),
                "device": rdma.device(),
                "connections": rdma.connections(),
                "unavailable": null,
                "hindered": false,
            });
        }
        let no_rdma = self.no_rdma.get();
        json!({
            "address": null,
            "device": null,
            "connections": 0,
            "unavailable": no_rdma.map(|no_rdma| &no_rdma.why),
            "hindered": no_rdma.is_some_and(|no_rdma| no_rdma.hindered),
        })
    }

    /// The address for RDMA connections to a shard whose TCP address is `beside`. Empty if there is none.
    pub(super) fn rdma_address(&self, beside: &str) -> String {
        if let Some(rdma) = self.rdma.get() {
            let host = beside.rsplit_once(':').map_or(beside, |(host, _)| host);
            return format!("{host}:{}", rdma.address().port());
        }
        String::new()
    }

    pub(super) fn shut_down(&self, patience: Duration) {
        if let Some(rdma) = self.rdma.get() {
            rdma.shut_down(patience);
        }
        if let Err(error) = self.memory.shut_down(patience) {
            tracing::warn!(%error, "connections through shared memory");
        }
    }
}
