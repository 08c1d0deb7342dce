//! One part of new weights: its bytes go to the shards, each of which keeps them, and the coordinator is told of it. The
//! parts of a set become a version together.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use fixedbitset::FixedBitSet;

use super::Job;
use super::parts::{PartsError, PartsPeers};
use super::requests::{millis, shard_error};
use crate::admin::{AdminError, AdminPeer};
use crate::bytes::region::RegionKey;
use crate::client::parts::{Ask, Asks};
use crate::transport::tally::Flow;
use crate::vocabulary::block_ranges;
use crate::vocabulary::ids::{ClientId, Generation};
use crate::vocabulary::meta::Meta;
use crate::vocabulary::shard_error::ShardError;
use crate::vocabulary::strided::Strided;
use crate::wire::{Message, PartOf, Refusal};

/// Bytes that are sent together.
const AT_ONCE: usize = 4 << 20;
/// So many requests are on their way to each shard.
const UNDER_WAY: usize = 4;
/// Shards end connections over which nothing comes for some seconds. So it is looked this often whether they must be told
/// that this end lives.
const BEAT: Duration = Duration::from_secs(1);

/// Why a part was not published.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// Its bytes have not come to the shards.
    #[error(transparent)]
    Sending(#[from] PartsError),
    /// It was refused, or others have not come.
    #[error(transparent)]
    Shard(#[from] ShardError),
}

impl From<AdminError> for PartError {
    fn from(error: AdminError) -> PartError {
        match error {
            AdminError::Refusal(Refusal::NotMine { .. } | Refusal::NoModel(_)) => PartsError::Moving.into(),
            AdminError::Refusal(Refusal::Shard(error)) => error.into(),
            error => PartsError::from(error).into(),
        }
    }
}

impl Job {
    /// Whether parts of new weights may be published now.
    ///
    /// # Errors
    /// [`ShardError::NotAllowed`], also if the shard is in this process.
    pub fn may_publish_parts(&self) -> Result<(), ShardError> {
        if self.shared.shards.local().is_some() {
            let why =
                "the model is in this process, and has no shards to bring parts to: write its own publish";
            return Err(ShardError::NotAllowed(why.into()));
        }
        self.may_take_weights()
    }

    /// A name for a part that [`Self::publish_part`] publishes, by which [`Self::withdraw_assign`] takes it back.
    pub fn name_part(&self) -> RegionKey {
        RegionKey(self.next_key.fetch_add(1, Ordering::Relaxed))
    }

    /// Publishes a part of new weights, whose `pieces` lie apart, and waits until all parts of its set are a version.
    /// `goes_on` is asked now and then whether anybody waits.
    ///
    /// # Errors
    /// [`PartError`]. There is no version then, of any of the parts.
    pub fn publish_part(
        &self,
        (name, part): (RegionKey, PartOf),
        pieces: impl Iterator<Item = (Vec<Strided>, Vec<u8>)>,
        meta: Meta,
        timeout: Duration,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), PartError> {
        let (deadline, layout) = (Instant::now() + timeout, self.layout());
        let (mut peers, mut blocks) =
            (PartsPeers::default(), FixedBitSet::with_capacity(layout.blocks() as usize));
        let (mut batch, mut bytes) = (Vec::new(), Vec::new());
        let mut pieces = pieces.peekable();
        while let Some((of, packed)) = pieces.next() {
            let ranges = of.iter().flat_map(Strided::pieces);
            ranges.flat_map(|range| layout.blocks_of(range)).for_each(|block| blocks.insert(block.index()));
            batch.extend(of);
            bytes.extend(packed);
            if bytes.len() >= AT_ONCE || pieces.peek().is_none() {
                if !goes_on() {
                    return Err(ShardError::Interrupted.into());
                }
                peers.0.values_mut().try_for_each(|peer| peer.keep_alive(deadline))?;
                self.send_pieces(&mut peers, name.0, (&batch, &bytes), deadline)?;
                batch.clear();
                bytes.clear();
            }
        }
        let scattered = |_| ShardError::NotAllowed("the part is too scattered".into());
        let blocks = block_ranges::from_bits(&blocks).map_err(scattered)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let message = Message::AssignPart { token: name.0, part, blocks, timeout_ms: millis(left), meta };
        let (sender, answers) = mpsc::channel();
        self.request(message, left, Box::new(move |answer| drop(sender.send(answer))));
        loop {
            match answers.recv_timeout(BEAT) {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(refusal)) => return Err(shard_error(refusal).into()),
                Err(RecvTimeoutError::Disconnected) => return Err(ShardError::Unreachable.into()),
                // A shard that cannot be told lets go of the part, and says so when the others are there.
                Err(RecvTimeoutError::Timeout) => {
                    let soon = Instant::now() + BEAT;
                    peers.0.retain(|_, peer| peer.keep_alive(soon).is_ok());
                }
            }
        }
    }

    /// Brings packed pieces of a part to their shards, all of which are written at the same time.
    fn send_pieces(
        &self,
        peers: &mut PartsPeers,
        token: u64,
        (pieces, bytes): (&[Strided], &[u8]),
        deadline: Instant,
    ) -> Result<(), PartError> {
        let routes = Arc::clone(&self.shared.inner.lock().peers.routes);
        let owned = routes.partitions.iter().map(|route| route.owned.as_slice());
        let (mut asks, mut place) = (Asks::new(owned, self.layout().block_size()), 0);
        for piece in pieces {
            asks.add(*piece, place);
            place += (piece.run * piece.count) as usize;
        }
        self.shared.accounts.tally.moved(Flow::Push, bytes.len());
        self.shared.accounts.tally.copied(Flow::Push, 2 * bytes.len());
        let (asks, of) = (asks.of(), (self.generation(), self.shared.client, token));
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (partition, asks) in asks.iter().enumerate().filter(|(_, asks)| !asks.is_empty()) {
                let address = routes.address(partition);
                let peer = peers.0.remove(address);
                let write = move || {
                    let mut peer = peer.map_or_else(|| AdminPeer::connect(address, deadline), Ok)?;
                    write_to(&mut peer, of, (asks, bytes), deadline)?;
                    Ok::<_, AdminError>(peer)
                };
                let thread = std::thread::Builder::new().name("writes-part".into());
                threads.push((address, thread.spawn_scoped(scope, write).map_err(PartsError::Thread)?));
            }
            for (address, thread) in threads {
                let ended = || PartsError::Thread(io::Error::other("it has panicked"));
                peers.0.insert(address.to_owned(), thread.join().map_err(|_| ended())??);
            }
            Ok(())
        })
    }
}

/// Sends what a shard has of the pieces, with several requests on their way.
fn write_to(
    peer: &mut AdminPeer,
    (generation, client, token): (Generation, ClientId, u64),
    (asks, bytes): (&[Ask], &[u8]),
    deadline: Instant,
) -> Result<(), AdminError> {
    let mut answers = 0;
    for ask in asks {
        let payload = ask.places.iter().flat_map(|place| &bytes[place.clone()]).copied().collect::<Vec<_>>();
        peer.ask(
            &Message::WritePart { generation, client, token, parts: ask.parts.clone() },
            &payload,
            deadline,
        )?;
        answers += 1;
        if answers == UNDER_WAY {
            taken(peer, deadline)?;
            answers -= 1;
        }
    }
    (0..answers).try_for_each(|_| taken(peer, deadline))
}

/// Waits until one request is answered.
fn taken(peer: &mut AdminPeer, deadline: Instant) -> Result<(), AdminError> {
    match peer.answer(deadline)?.1 {
        Message::Refused(refusal) => Err(refusal.into()),
        _ => Ok(()),
    }
}
