//! The commands of a cluster: a registry, shards, models on them, and mounts of those.

pub mod drain;
pub mod mount;
pub mod shard;
pub mod status;
pub mod upload;

use std::time::{Duration, Instant};

use libmodelio::registry::{RegistryError, RemoteRegistry};

use crate::config::endpoint::Endpoint;
use crate::error::Error;

/// Longest wait for the registry.
const PATIENCE: Duration = Duration::from_secs(10);

fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

fn registry(at: &Endpoint) -> RemoteRegistry {
    RemoteRegistry::new(at.to_string())
}

/// What the registry's refusal means to whoever has typed the command.
fn registry_error(at: &Endpoint, error: RegistryError) -> Error {
    let error_text = match &error {
        RegistryError::Peer(_) => format!("the registry at {at} cannot be asked"),
        _ => format!("the registry at {at} refuses"),
    };
    Error::new(error_text).caused_by(error)
}
