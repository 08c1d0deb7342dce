//! The listeners for clients: over TCP, through shared memory on this host, and by RDMA.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Weak};

use libmodelio::transport::frames::{Framed, Link};
use libmodelio::transport::rdma::VerbsError;
use libmodelio::transport::stream::Stream;
use libmodelio::transport::tcp::SocketOptions;

use super::conversation::Peer;
use super::options::{NoRdma, RdmaUse, ServerError};
use super::rdma_clients::{Rdma, RdmaClient};
use super::shared::Shared;
use super::shm_clients::{Listening, Meets, ShmClient};

/// The number of bytes that are read from a TCP connection at once, before its kind is known.
const AHEAD: usize = 128;

/// Listens over TCP.
pub(super) fn over_tcp(shared: &Arc<Shared>, listener: TcpListener) -> Result<(), ServerError> {
    let of_factory = Arc::clone(shared);
    let accept = move |peer: SocketAddr| -> Option<Box<dyn Stream>> {
        let peer = Peer::new(Arc::clone(&of_factory), peer);
        Some(Box::new(Framed::new(peer, Link::default(), AHEAD)))
    };
    let listens = shared.net.listen(listener, SocketOptions::default(), accept);
    listens.map(drop).map_err(|error| ServerError::Threads(error.to_string()))
}

/// Listens for connections through shared memory. If that fails, the log says why.
pub(super) fn through_memory(shared: &Arc<Shared>) -> Option<Listening> {
    match Listening::start(&shared.identity.address, &shared.fast.memory, OnThisHost(Arc::downgrade(shared)))
    {
        Ok(listening) => Some(listening),
        Err(why) => {
            tracing::warn!("clients on this host cannot share memory with this shard: {why}");
            let _ = shared.fast.no_memory.set(why);
            None
        }
    }
}

struct OnThisHost(Weak<Shared>);

impl Meets for OnThisHost {
    type End = Peer;

    fn goes_on(&self) -> bool {
        self.0.upgrade().is_some_and(|shared| !shared.ending.has_begun())
    }

    fn end(&self, memory: ShmClient) -> Option<Peer> {
        Some(Peer::through_memory(self.0.upgrade()?, memory))
    }
}

/// Listens for RDMA connections beside those at `address`, if the options want that. If it fails, the log says why.
///
/// # Errors
/// When RDMA is required and not available.
pub(super) fn by_rdma(shared: &Arc<Shared>, address: SocketAddr) -> Result<(), ServerError> {
    let Err(no_rdma) = start_rdma(shared, address) else { return Ok(()) };
    let NoRdma { why, hindered } = &no_rdma;
    match (shared.options.rdma, hindered) {
        (RdmaUse::On, _) => return Err(ServerError::Rdma(why.clone())),
        (_, true) => tracing::warn!("clients elsewhere cannot reach this shard by RDMA: {why}"),
        (_, false) => tracing::debug!("no RDMA: {why}"),
    }
    let _ = shared.fast.no_rdma.set(no_rdma);
    Ok(())
}

fn start_rdma(shared: &Arc<Shared>, address: SocketAddr) -> Result<(), NoRdma> {
    if shared.options.rdma == RdmaUse::Off {
        return Err(NoRdma::off());
    }
    let (options, port) = (&shared.options.rdma_options, shared.options.rdma_port);
    let weak = Arc::downgrade(shared);
    let meets = move |peer: String, remote: RdmaClient| Some(Peer::by_rdma(weak.upgrade()?, peer, remote));
    let started = Rdma::start(address, port, options, shared.options.device_memory.clone(), meets);
    let started = started.map_err(|error| {
        let hindered = match error {
            VerbsError::NotBuilt => false,
            // Naming a device means expecting one.
            VerbsError::NoDevice => options.device.is_some(),
            _ => true,
        };
        NoRdma { why: error.to_string(), hindered }
    })?;
    let _ = shared.fast.rdma.set(started);
    Ok(())
}
