//! A registry in another process, asked over a connection that is made when it is needed.

use std::time::Instant;

use parking_lot::Mutex;

use super::{Registry, RegistryError};
use crate::admin::{AdminError, AdminPeer};
use crate::wire::{Message, RegistryAnswer, RegistryRequest};

/// The registry at an address. It makes one call at a time. A call that fails ends the connection, and the
/// next call makes another.
#[derive(Debug)]
pub struct RemoteRegistry {
    address: String,
    peer: Mutex<Option<AdminPeer>>,
}

impl RemoteRegistry {
    /// The registry at `address` (`host:port`). Connects at the first call.
    pub fn new(address: impl Into<String>) -> RemoteRegistry {
        RemoteRegistry { address: address.into(), peer: Mutex::new(None) }
    }

    /// Its address.
    pub fn address(&self) -> &str {
        &self.address
    }

    fn answer(
        &self,
        answered: Result<(Message, Vec<u8>), AdminError>,
        peer: AdminPeer,
        place: &mut Option<AdminPeer>,
    ) -> Result<(RegistryAnswer, Vec<u8>), RegistryError> {
        match answered {
            Ok((Message::Registered(answer), payload)) => {
                *place = Some(peer);
                Ok((answer, payload))
            }
            Ok((other, _)) => {
                Err(AdminError::Unexpected { address: self.address.clone(), what: other.name() }.into())
            }
            Err(AdminError::Refusal(refusal)) => {
                *place = Some(peer);
                Err(refusal.into())
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl Registry for RemoteRegistry {
    fn ask(
        &self,
        request: RegistryRequest,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<(RegistryAnswer, Vec<u8>), RegistryError> {
        let busy =
            || AdminError::TimedOut { address: self.address.clone(), doing: "waiting for other calls to" };
        let mut place = self.peer.try_lock_until(deadline).ok_or_else(busy)?;
        let request = Message::Registry(request);
        // A connection from before may have ended unnoticed: then the call is made again on a new one, which
        // changes nothing if it was carried out.
        if let Some(mut peer) = place.take().filter(|peer| !peer.is_stale()) {
            match peer.request(&request, payload, deadline) {
                Err(error) if error.is_disconnect() => {}
                answered => return self.answer(answered, peer, &mut place),
            }
        }
        let mut peer = AdminPeer::connect(&self.address, deadline)?;
        let answered = peer.request(&request, payload, deadline);
        self.answer(answered, peer, &mut place)
    }
}
