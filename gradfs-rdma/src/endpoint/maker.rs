//! Making connections over one device: connecting, accepting and refusing.

use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;

use crate::device::Device;
use crate::offer::{Offer, Shortage, Strange};
use crate::options::{Mtu, RdmaOptions};
use crate::pollers::Pollers;
use crate::queue_pair::QueuePair;
use crate::verbs::{CmChannel, CmId, Parameters, RemoteMemory, Reserved, Rings, VerbsError};

/// The most free ports that are tried if rdma_cm chooses the port.
pub(super) const PORTS: u32 = 16;
/// The most connection requests that may wait.
const BACKLOG: i32 = 128;

/// A device, and the threads that serve its connections.
pub(super) struct Maker {
    pub device: Arc<Device>,
    pub pollers: Arc<Pollers>,
    channel: Arc<CmChannel>,
    /// The protocol of the frames, as both ends must speak it.
    protocol: u16,
    next_poller: usize,
}

impl Maker {
    pub(super) fn new(
        device: Arc<Device>,
        pollers: Arc<Pollers>,
        channel: Arc<CmChannel>,
        protocol: u16,
    ) -> Maker {
        Maker { device, pollers, channel, protocol, next_poller: 0 }
    }

    /// The offer of a peer that this end can use.
    pub(super) fn understood(&self, private: &[u8]) -> Result<Offer, Strange> {
        Offer::decode(private, self.protocol, self.device.notify())
    }

    /// Events of all connections.
    pub(super) fn channel(&self) -> &Arc<CmChannel> {
        &self.channel
    }

    /// Listens, and returns the identifier. rdma_cm may choose a port that a TCP socket has, which iWARP cannot use.
    /// Then another port is tried.
    pub(super) fn listen(&self, at: SocketAddr, token: u64) -> Result<(CmId, SocketAddr), VerbsError> {
        let tries = if at.port() == 0 { PORTS } else { 1 };
        let mut outcome = Err(VerbsError::Broken("it was not tried".into()));
        for _ in 0..tries {
            outcome = CmId::new(&self.channel, token).and_then(|cm_id| {
                let at = cm_id.listen(at, BACKLOG)?;
                Ok((cm_id, at))
            });
            if !matches!(outcome, Err(VerbsError::Call { errno: Errno::EADDRINUSE, .. })) {
                break;
            }
        }
        outcome
    }

    /// Begins to connect: looks for the device that leads to `to`.
    pub(super) fn resolve(&self, token: u64, to: SocketAddr, deadline: Instant) -> Result<CmId, VerbsError> {
        let mut cm_id = CmId::new(&self.channel, token)?;
        let options = self.device.options();
        if let Some(class) = options.traffic_class {
            cm_id.set_traffic_class(class)?;
        }
        cm_id.must_come_from(options.gid_index);
        let from = self.device.source().map(|address| SocketAddr::new(address, 0));
        cm_id.resolve_address(from, to, millis(deadline))?;
        Ok(cm_id)
    }

    /// Whether a connection goes by this device, and by the port of the options.
    fn is_by(&self, cm_id: &CmId) -> bool {
        let port = self.device.options().port;
        cm_id.context() == Some(self.device.context()) && port.is_none_or(|port| port == cm_id.port())
    }

    /// Looks for the route of a connection whose device is known.
    ///
    /// # Errors
    /// The reason, for people.
    pub(super) fn resolve_route(&self, cm_id: &CmId, deadline: Instant) -> Result<(), String> {
        match cm_id.context() {
            Some(_) if self.is_by(cm_id) => {
                cm_id.resolve_route(millis(deadline)).map_err(|error| error.to_string())
            }
            Some(context) => Err(format!(
                "the route leads over {} port {}, and this process uses {} (--rdma-device names another one)",
                context.name(),
                cm_id.port(),
                self.device.name()
            )),
            None => Err("no device leads there".to_owned()),
        }
    }

    /// Connects to the peer once the route is known. The completion queue of this number serves the connection.
    pub(super) fn connect(&self, cm_id: CmId, number: usize) -> Result<Arc<QueuePair>, VerbsError> {
        let rings = self.device.rings()?;
        let reserved = self.device.reserve(number)?;
        let queue_pair = self.queue_pair(cm_id, rings, (number, reserved)).map_err(|(error, _)| error)?;
        let parameters = self.parameters(&queue_pair, self.device.options().mtu);
        queue_pair.cm_id().connect(&parameters).inspect_err(|_| self.leave(&queue_pair, number))?;
        Ok(queue_pair)
    }

    /// Accepts a peer's connection, and returns the number of the queue that serves it; or refuses it.
    pub(super) fn accept(&mut self, cm_id: CmId, private: &[u8]) -> Option<(Arc<QueuePair>, usize)> {
        let peer = cm_id.peer().map_or_else(|| "an RDMA peer".to_owned(), |peer| peer.to_string());
        let offer = match self.understood(private) {
            Ok(offer) => offer,
            Err(strange) => return self.turn_away(&cm_id, &peer, &strange, Shortage::Other),
        };
        if !self.is_by(&cm_id) {
            let by = cm_id.context().map_or_else(|| "no device".to_owned(), |context| context.name());
            let why =
                format!("it comes by {by} port {}, and this shard uses {}", cm_id.port(), self.device.name());
            return self.turn_away(&cm_id, &peer, &why, Shortage::Device);
        }
        let rings = match self.device.rings() {
            Ok(rings) => rings,
            Err(error) => return self.turn_away(&cm_id, &peer, &error, Shortage::Rings),
        };
        let (number, reserved) = match self.reserve() {
            Ok(found) => found,
            Err(error) => return self.turn_away(&cm_id, &peer, &error, Shortage::Completions),
        };
        let queue_pair = match self.queue_pair(cm_id, rings, (number, reserved)) {
            Ok(queue_pair) => queue_pair,
            Err((error, cm_id)) => return self.turn_away(&cm_id, &peer, &error, Shortage::Other),
        };
        queue_pair.invited(offer.ring);
        let mtu = shorter(offer.mtu, self.device.options().mtu);
        if let Err(error) = queue_pair.cm_id().accept(&self.parameters(&queue_pair, mtu), mtu) {
            self.leave(&queue_pair, number);
            return self.turn_away(queue_pair.cm_id(), &peer, &error, Shortage::Other);
        }
        Some((queue_pair, number))
    }
    /// Reserves a completion queue for one more queue pair: the one whose turn it is, or the next one that has room.
    fn reserve(&mut self) -> Result<(usize, Reserved), VerbsError> {
        let mut outcome = Err(VerbsError::Broken("there is no completion queue".into()));
        for _ in self.device.pollers() {
            let number = self.next_poller;
            self.next_poller += 1;
            outcome = self.device.reserve(number).map(|reserved| (number, reserved));
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }

    /// Makes a queue pair. The thread of the completion queue of this number handles its completions.
    #[allow(clippy::result_large_err)] // Seldom.
    fn queue_pair(
        &self,
        cm_id: CmId,
        rings: Rings,
        (number, reserved): (usize, Reserved),
    ) -> Result<Arc<QueuePair>, (VerbsError, CmId)> {
        let queue_pair = QueuePair::new(&self.device, cm_id, rings, reserved)?;
        self.pollers.assigned(number).enter(&queue_pair);
        Ok(queue_pair)
    }

    /// The thread ignores further events of the queue pair.
    pub(super) fn leave(&self, queue_pair: &QueuePair, number: usize) {
        self.pollers.assigned(number).leave(queue_pair);
    }

    fn parameters(&self, queue_pair: &QueuePair, mtu: Option<Mtu>) -> Parameters {
        let RdmaOptions { reads, retries, .. } = *self.device.options();
        Parameters { private: Offer::of(queue_pair, mtu, self.protocol).encode().to_vec(), reads, retries }
    }

    /// Refuses a connection. The peer gets this end's offer and the reason.
    fn turn_away<T>(&self, cm_id: &CmId, peer: &str, why: &dyn Display, shortage: Shortage) -> Option<T> {
        tracing::warn!(peer, "turned away: {why}");
        let ring = RemoteMemory { address: 0, key: 0 };
        let (protocol, notify) = (self.protocol, self.device.notify());
        let mut own = Offer { protocol, notify, mtu: self.device.options().mtu, ring }.encode();
        own[12..16].copy_from_slice(&shortage.code().to_le_bytes());
        if let Err(error) = cm_id.reject(&own) {
            tracing::debug!(%error, peer, "the refusal was not sent");
        }
        None
    }
}

/// The MTU that suits both ends.
pub(super) fn shorter(one: Option<Mtu>, other: Option<Mtu>) -> Option<Mtu> {
    one.into_iter().chain(other).min()
}

fn millis(deadline: Instant) -> i32 {
    let left = deadline.saturating_duration_since(Instant::now()).as_millis().max(1);
    i32::try_from(left).unwrap_or(i32::MAX)
}
