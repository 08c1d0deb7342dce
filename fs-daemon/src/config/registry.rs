//! Where the registry is: with a process of the cluster, or in an etcd.

use std::fmt;

use libmodelio::registry::{EtcdError, EtcdUrl};

use super::endpoint::{DEFAULT_PORT, Endpoint};
use crate::error::Error;

/// The place of a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistryAt {
    /// A process serves it.
    Process(Endpoint),
    /// The registry is in an etcd.
    Etcd(Box<EtcdUrl>),
}

impl RegistryAt {
    /// The place that `text` names.
    ///
    /// # Errors
    /// With what is wrong with it.
    pub fn parse(text: &str) -> Result<RegistryAt, Error> {
        if !EtcdUrl::is_meant(text) {
            return Endpoint::to_connect_to(text).map(RegistryAt::Process);
        }
        let wrong = |error: EtcdError| {
            Error::usage(error.to_string())
                .hint("write etcd://a:2379,b:2379,c:2379, with /PREFIX for more than one cluster")
        };
        EtcdUrl::parse(text).map(Box::new).map(RegistryAt::Etcd).map_err(wrong)
    }

    /// Where a process serves it, if one does.
    pub fn process(&self) -> Option<&Endpoint> {
        match self {
            RegistryAt::Process(endpoint) => Some(endpoint),
            RegistryAt::Etcd(_) => None,
        }
    }
}

/// This host's registry.
impl Default for RegistryAt {
    fn default() -> RegistryAt {
        RegistryAt::Process(Endpoint { host: "localhost".into(), port: DEFAULT_PORT })
    }
}

impl fmt::Display for RegistryAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RegistryAt::Process(endpoint) => endpoint.fmt(f),
            RegistryAt::Etcd(url) => url.fmt(f),
        }
    }
}
