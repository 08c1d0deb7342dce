//! Pieces of a version, for programs that hold no more of it.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::Job;
use crate::admin::{AdminError, AdminPeer};
use crate::bytes::block;
use crate::bytes::changes::Changed;
use crate::bytes::crc32c::crc32c;
use crate::client::parts::{Ask, Asks};
use crate::transport::tally::Flow;
use crate::view::{Flat, Source as _};
use crate::vocabulary::ids::{Generation, Version};
use crate::vocabulary::strided::Strided;
use crate::wire::{Message, Refusal};

/// The pause before shards are asked again.
const AGAIN: Duration = Duration::from_millis(20);
/// So many requests are on their way to each shard.
const AT_ONCE: usize = 4;

/// Why pieces were not read.
#[derive(Debug, thiserror::Error)]
pub enum PartsError {
    /// One of them is none.
    #[error("pieces of the model are asked for that do not lie in it, or have no bytes")]
    Outside,
    /// There is more or less room than they need.
    #[error("the pieces have {bytes} bytes, and there is room for {room}")]
    Room {
        /// All their bytes.
        bytes: u64,
        /// Of the buffer.
        room: u64,
    },
    /// Newer versions have taken its place.
    #[error("version {0} is gone")]
    Gone(Version),
    /// Nobody has it until the deadline.
    #[error("version {0} has not come out")]
    NotYet(Version),
    /// What was read of an older version is not what the shards have of it.
    #[error("what has changed in the pieces does not make those that the shards have")]
    NotPatched,
    /// The shards say that others have the blocks.
    #[error("the shards do not have the blocks, as of a model that is being moved")]
    Moving,
    /// There is no thread to ask a shard.
    #[error("no thread to ask a shard: {0}")]
    Thread(#[source] io::Error),
    /// A shard cannot be asked, or answers with something else.
    #[error(transparent)]
    Asking(#[from] AdminError),
}

/// The connections by which pieces are read. Shards keep a version for whoever reads on over the same ones.
#[derive(Debug, Default)]
pub struct PartsPeers(pub(super) BTreeMap<String, AdminPeer>);

/// The answer to a request: the bytes, or a patch that makes them, and their CRC32C.
type Answer<'a> = Result<(&'a Ask, Option<u32>, Vec<u8>), PartsError>;

impl Job {
    /// Reads pieces of a version into `out`, one behind the other, and waits until `deadline` at most. They are copied from
    /// here if the version is here. Otherwise all shards that have some of them are asked at the same time, each of them
    /// for no more than these bytes. After an error, some of the bytes may be there.
    ///
    /// # Errors
    /// [`PartsError`].
    pub fn read_parts(
        &self,
        version: Version,
        parts: &[Strided],
        out: &mut [u8],
        deadline: Instant,
    ) -> Result<(), PartsError> {
        self.read_parts_by(&mut PartsPeers::default(), (version, None), parts, out, deadline)
    }

    /// Like [`Self::read_parts`], over connections that are there already, and stay for the next call. If `out` holds the
    /// same pieces of an older version, the shards need send only what has changed since.
    ///
    /// # Errors
    /// [`PartsError`].
    pub fn read_parts_by(
        &self,
        peers: &mut PartsPeers,
        (version, mut base): (Version, Option<Version>),
        parts: &[Strided],
        out: &mut [u8],
        deadline: Instant,
    ) -> Result<(), PartsError> {
        let (bytes, room) = (Strided::total(parts, self.layout().size()), out.len() as u64);
        match bytes.ok_or(PartsError::Outside)? {
            bytes if bytes == room => {}
            bytes => return Err(PartsError::Room { bytes, room }),
        }
        let mut before = None;
        loop {
            let are_used = !peers.0.is_empty();
            match self.try_parts(peers, (version, base), parts, out, deadline) {
                Err(error @ PartsError::NotPatched) => {
                    let model = self.model();
                    tracing::warn!(model, %version, "pieces are pulled whole: {error}");
                    base = None;
                }
                // A client may know of a version, or of a move, before or after its shards do.
                Err(error @ (PartsError::NotYet(_) | PartsError::Moving))
                    if Instant::now() + AGAIN < deadline =>
                {
                    before = Some(error);
                    std::thread::sleep(AGAIN);
                }
                // A shard ends connections over which nothing came for long.
                Err(PartsError::Asking(error)) if are_used && error.is_disconnect() => {}
                Err(PartsError::Asking(AdminError::TimedOut { .. })) if let Some(why) = before => {
                    return Err(why);
                }
                outcome => return outcome,
            }
        }
    }

    fn try_parts(
        &self,
        peers: &mut PartsPeers,
        (version, base): (Version, Option<Version>),
        parts: &[Strided],
        out: &mut [u8],
        deadline: Instant,
    ) -> Result<(), PartsError> {
        if let Some(local) = self.shared.shards.local() {
            let held = local.shard.version(version).map_err(|newest| missing(version, newest))?;
            let version = block::pinned_bytes(held.region.memory(), 0..self.layout().size());
            let Ok(()) = Flat(version).read(parts, out);
            return Ok(());
        }
        if self.pin(version) {
            if let Some(view) = self.get(version) {
                let Ok(()) = Flat(view.bytes(0..self.layout().size())).read(parts, out);
            }
            self.unpin(version, 1);
            return Ok(());
        }
        let routes = Arc::clone(&self.shared.inner.lock().peers.routes);
        let owned = routes.partitions.iter().map(|route| route.owned.as_slice());
        let (mut asks, mut place) = (Asks::new(owned, self.layout().block_size()), 0);
        for part in parts {
            asks.add(*part, place);
            place += (part.run * part.count) as usize;
        }
        let (asks, generation) = (asks.of(), self.generation());
        let mut used = std::mem::take(&mut peers.0);
        std::thread::scope(|scope| {
            let ((sender, answers), mut threads) = (mpsc::sync_channel(AT_ONCE), Vec::new());
            for (partition, asks) in asks.iter().enumerate().filter(|(_, asks)| !asks.is_empty()) {
                let (address, answers) = (routes.address(partition), sender.clone());
                let peer = used.remove(address).filter(|peer| !peer.is_stale());
                let read = move || {
                    let to = |answer| answers.send(answer).is_ok();
                    let peer = peer.map_or_else(|| AdminPeer::connect(address, deadline), Ok);
                    let asked = peer.map_err(PartsError::from).and_then(|mut peer| {
                        ask_shard(&mut peer, address, (generation, version, base), (asks, &to), deadline)?;
                        Ok(peer)
                    });
                    asked.map_err(|error| to(Err(error))).ok()
                };
                let thread = std::thread::Builder::new().name("asks-for-parts".into());
                threads.push((address, thread.spawn_scoped(scope, read).map_err(PartsError::Thread)?));
            }
            drop(sender);
            // If one fails, the others end with their next answer.
            for answer in answers {
                let (ask, patched, bytes) = answer?;
                let tally = &self.shared.accounts.tally;
                tally.moved(Flow::Pull, bytes.len());
                let bytes = match patched {
                    Some(crc) => patched_pieces(ask, out, (&bytes, crc))?,
                    None => bytes,
                };
                tally.patched(patched.map_or(0, |_| bytes.len()));
                tally.copied(Flow::Pull, bytes.len());
                let mut bytes = bytes.as_slice();
                for place in &ask.places {
                    let (piece, rest) = bytes.split_at(place.len());
                    out[place.clone()].copy_from_slice(piece);
                    bytes = rest;
                }
            }
            let over =
                threads.into_iter().filter_map(|(address, thread)| Some((address, thread.join().ok()??)));
            peers.0.extend(over.map(|(address, peer)| (address.to_owned(), peer)));
            Ok(())
        })
    }
}

/// A version is not where it should be.
fn missing(version: Version, newest: Version) -> PartsError {
    if newest < version { PartsError::NotYet(version) } else { PartsError::Gone(version) }
}

/// The pieces of a request, made from those of the base in `out`. They have this CRC32C.
fn patched_pieces(ask: &Ask, out: &[u8], (patch, crc): (&[u8], u32)) -> Result<Vec<u8>, PartsError> {
    let mut pieces = ask.places.iter().map(|place| &out[place.clone()]).collect::<Vec<_>>().concat();
    let is_right = Changed::apply(patch, &mut pieces).is_ok() && crc32c(&pieces) == crc;
    is_right.then_some(pieces).ok_or(PartsError::NotPatched)
}

/// Asks one shard, with several requests on their way. Returns when all are answered, or nobody takes the answers.
fn ask_shard<'a>(
    peer: &mut AdminPeer,
    address: &str,
    (generation, version, base): (Generation, Version, Option<Version>),
    (asks, to): (&'a [Ask], &dyn Fn(Answer<'a>) -> bool),
    deadline: Instant,
) -> Result<(), PartsError> {
    let (mut waiting, mut under_way) = (asks.iter(), Vec::new());
    loop {
        while under_way.len() < AT_ONCE
            && let Some(ask) = waiting.next()
        {
            let message = Message::ReadParts { generation, version, base, parts: ask.parts.clone() };
            under_way.push((peer.ask(&message, &[], deadline)?, ask));
        }
        if under_way.is_empty() {
            return Ok(());
        }
        let (number, answer, bytes) = peer.answer(deadline)?;
        let asked = under_way.iter().position(|(of, _)| *of == number).map(|at| under_way.swap_remove(at).1);
        match (answer, asked) {
            (Message::PartBytes { patched }, Some(ask))
                if patched.map_or(bytes.len() == ask.bytes, |_| base.is_some()) =>
            {
                if !to(Ok((ask, patched, bytes))) {
                    return Ok(());
                }
            }
            (Message::Refused(Refusal::NoVersion { newest, .. }), Some(_)) => {
                return Err(missing(version, newest));
            }
            (Message::Refused(Refusal::NotMine { .. } | Refusal::NoModel(_)), Some(_)) => {
                return Err(PartsError::Moving);
            }
            (Message::Refused(refusal), Some(_)) => return Err(AdminError::Refusal(refusal).into()),
            (other, _) => {
                let (address, what) = (address.to_owned(), other.name());
                return Err(AdminError::Unexpected { address, what }.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_count_only_with_the_checksum_that_the_shard_gives() {
        let ask = Ask { parts: Vec::new(), places: vec![0..600, 1000..1400], bytes: 1000 };
        let (out, old, mut new, mut patch) = ([7; 1400], [7; 1000], [7; 1000], Vec::new());
        new[700] = 1;
        assert!(Changed::between(&old, &new, 1).patch(&new, &mut patch));
        assert_eq!(patched_pieces(&ask, &out, (&patch, crc32c(&new))).unwrap(), new);
        for (out, patch, crc) in [
            (out, &patch[..], crc32c(&new) ^ 1),
            ([6; 1400], &patch, crc32c(&new)),
            (out, &patch[1..], crc32c(&new)),
        ] {
            let pieces = patched_pieces(&ask, &out, (patch, crc));
            assert!(matches!(pieces, Err(PartsError::NotPatched)), "{pieces:?}");
        }
    }
}
