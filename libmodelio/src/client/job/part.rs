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
use crate::bytes::changes::Changed;
use crate::bytes::crc32c::crc32c;
use crate::bytes::region::RegionKey;
use crate::client::parts::{Ask, Asks};
use crate::client::peers::routes::Routes;
use crate::transport::tally::Flow;
use crate::vocabulary::block_ranges;
use crate::vocabulary::ids::{ClientId, Epoch, Generation, Version};
use crate::vocabulary::meta::Meta;
use crate::vocabulary::shard_error::ShardError;
use crate::vocabulary::strided::Strided;
use crate::wire::{Message, PartOf, Refusal};

/// So many bytes are sent together.
const AT_ONCE: usize = 4 << 20;
/// So many requests are on their way to each shard.
const UNDER_WAY: usize = 4;
/// How often it is looked whether anybody waits, and whether shards must be told that this end lives: they end connections
/// over which nothing comes for some seconds.
const BEAT: Duration = Duration::from_millis(200);
/// A shard that does not answer for so long is taken for dead.
const PATIENCE: Duration = Duration::from_secs(10);

/// An older version, and the same bytes of that.
type Older<'a> = Option<(Version, &'a [u8])>;

/// Why a part was not published.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// The part's bytes have not come to the shards.
    #[error(transparent)]
    Sending(#[from] PartsError),
    /// The part was refused, or others have not come.
    #[error(transparent)]
    Shard(#[from] ShardError),
}

impl From<AdminError> for PartError {
    fn from(error: AdminError) -> PartError {
        match error {
            AdminError::Refusal(Refusal::NotMine { .. } | Refusal::NoModel(_) | Refusal::Epoch { .. }) => {
                PartsError::Moving.into()
            }
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

    /// Publishes a part of new weights, and waits until all parts of its set are a version that this client shows.
    /// `pieces` say where the part's bytes belong in the model, and where the same bytes lie in `memory`, in the same
    /// order. If that is given of an older version, too, shards that have it are sent what has changed. Now and then,
    /// `goes_on` says whether anybody waits.
    ///
    /// # Errors
    /// [`PartError`]. No part of the set is in a version then.
    ///
    /// # Panics
    /// If pieces lie outside `memory`.
    pub fn publish_part(
        &self,
        (name, part): (RegionKey, PartOf),
        (pieces, memory, older): (impl Iterator<Item = (Vec<Strided>, Vec<Strided>)>, &[u8], Older<'_>),
        meta: Meta,
        timeout: Duration,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), PartError> {
        let (deadline, layout) = (Instant::now() + timeout, self.layout());
        let (mut peers, mut blocks) =
            (PartsPeers::default(), FixedBitSet::with_capacity(layout.blocks() as usize));
        // All of it goes by one block map. Shards refuse what comes by another one.
        let routes = Arc::clone(&self.shared.inner.lock().peers.routes);
        let (mut batch, mut bytes, mut before) = (Vec::new(), Vec::new(), Vec::new());
        let mut pieces = pieces.peekable();
        while let Some((of, here)) = pieces.next() {
            let ranges = of.iter().flat_map(Strided::pieces);
            ranges.flat_map(|range| layout.blocks_of(range)).for_each(|block| blocks.insert(block.index()));
            batch.extend(of);
            for range in here.iter().flat_map(Strided::pieces) {
                let range = range.start as usize..range.end as usize;
                bytes.extend_from_slice(&memory[range.clone()]);
                older.inspect(|(_, older)| before.extend_from_slice(&older[range]));
            }
            if bytes.len() >= AT_ONCE || pieces.peek().is_none() {
                if !goes_on() {
                    return Err(ShardError::Interrupted.into());
                }
                peers.0.values_mut().try_for_each(|peer| peer.keep_alive(deadline))?;
                let older = older.map(|(version, _)| (version, &before[..]));
                self.send_pieces((&mut peers, &routes), name.0, (&batch, &bytes, older), deadline)?;
                batch.clear();
                bytes.clear();
                before.clear();
            }
        }
        let scattered = |_| ShardError::NotAllowed("the part is too scattered".into());
        let blocks = block_ranges::from_bits(&blocks).map_err(scattered)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let message = Message::AssignPart { token: name.0, part, blocks, timeout_ms: millis(left), meta };
        let (sender, answers) = mpsc::channel();
        self.request(message, left, Box::new(move |answer| drop(sender.send(answer))));
        let (mut lost, mut withdrawn) = (None, false);
        loop {
            match (answers.recv_timeout(BEAT), lost) {
                (Ok(Ok(_)), _) => {
                    self.show_newest(deadline);
                    return Ok(());
                }
                (Ok(Err(Refusal::Shard(ShardError::Interrupted))), Some(lost)) => {
                    return Err(PartError::from(lost));
                }
                (Ok(Err(refusal)), _) => return Err(shard_error(refusal).into()),
                (Err(RecvTimeoutError::Disconnected), _) => return Err(ShardError::Unreachable.into()),
                (Err(RecvTimeoutError::Timeout), before) => {
                    // A shard that cannot be told lets go of the part.
                    let mut told = || {
                        peers.0.values_mut().find_map(|peer| peer.keep_alive(Instant::now() + PATIENCE).err())
                    };
                    lost = before.or_else(&mut told);
                    if (lost.is_some() || !goes_on()) && !withdrawn {
                        withdrawn = true;
                        self.withdraw_assign(name);
                    }
                }
            }
        }
    }

    /// Waits until this client shows the newest version. One that was made counts even if that takes too long.
    fn show_newest(&self, deadline: Instant) {
        let (sender, shown) = mpsc::channel();
        let left = deadline.saturating_duration_since(Instant::now());
        self.shared.await_newest(left, Box::new(move |_| sender.send(()).unwrap_or_default()));
        // The core answers at the deadline at the latest, and so does a job that ends.
        let _ = shown.recv();
    }

    /// Brings packed pieces of a part to their shards, all of which are written at the same time.
    fn send_pieces(
        &self,
        (peers, routes): (&mut PartsPeers, &Routes),
        token: u64,
        (pieces, bytes, older): (&[Strided], &[u8], Older<'_>),
        deadline: Instant,
    ) -> Result<(), PartError> {
        let owned = routes.partitions.iter().map(|route| route.owned.as_slice());
        let (mut asks, mut place) = (Asks::new(owned, self.layout().block_size()), 0);
        for piece in pieces {
            asks.add(*piece, place);
            place += (piece.run * piece.count) as usize;
        }
        let tally = &self.shared.accounts.tally;
        tally.copied(Flow::Push, 2 * bytes.len());
        let (asks, of) = (asks.of(), (self.generation(), routes.epoch, self.shared.client, token));
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (partition, asks) in asks.iter().enumerate().filter(|(_, asks)| !asks.is_empty()) {
                let address = routes.address(partition);
                let peer = peers.0.remove(address);
                let write = move || {
                    let mut peer = peer.map_or_else(|| AdminPeer::connect(address, deadline), Ok)?;
                    let sent = |bytes| tally.moved(Flow::Push, bytes);
                    write_to(&mut peer, of, (asks, bytes, older), &sent, deadline)?;
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

/// Sends what a shard has of the pieces, with several requests on their way: what has changed in them since an older
/// version, or all of them if the shard does not have that.
fn write_to(
    peer: &mut AdminPeer,
    (generation, epoch, client, token): (Generation, Epoch, ClientId, u64),
    (asks, bytes, older): (&[Ask], &[u8], Older<'_>),
    sent: &dyn Fn(usize),
    deadline: Instant,
) -> Result<(), AdminError> {
    let pieces =
        |ask: &Ask, of: &[u8]| ask.places.iter().map(|at| &of[at.clone()]).collect::<Vec<_>>().concat();
    let write = |peer: &mut AdminPeer, ask: &Ask, older: Older<'_>| {
        let (payload, mut patch) = (pieces(ask, bytes), Vec::new());
        let patched = older.filter(|(_, older)| {
            // The bytes of the narrowest elements that most models have.
            Changed::between(&pieces(ask, older), &payload, 2).patch(&payload, &mut patch)
        });
        let patched = patched.map(|(base, _)| (base, crc32c(&payload)));
        let payload = if patched.is_some() { patch } else { payload };
        let parts = ask.parts.clone();
        sent(payload.len());
        peer.ask(&Message::WritePart { generation, epoch, client, token, patched, parts }, &payload, deadline)
    };
    let (mut waiting, mut under_way) = (asks.iter(), Vec::new());
    loop {
        while under_way.len() < UNDER_WAY
            && let Some(ask) = waiting.next()
        {
            under_way.push((write(peer, ask, older)?, ask, older.is_some()));
        }
        if under_way.is_empty() {
            return Ok(());
        }
        let (number, answer, _) = peer.answer(deadline)?;
        let asked = under_way.iter().position(|(of, ..)| *of == number).map(|at| under_way.swap_remove(at));
        match (answer, asked) {
            (Message::Refused(Refusal::NoVersion { .. }), Some((_, ask, true))) => {
                under_way.push((write(peer, ask, None)?, ask, false));
            }
            (Message::Refused(refusal), _) => return Err(refusal.into()),
            _ => {}
        }
    }
}
