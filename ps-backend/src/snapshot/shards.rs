//! The data of shards, over the network: several requests are under way at a time, to several shards, and the
//! answers are taken in the order of the requests.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::vocabulary::ids::{BlockId, Epoch, Generation, ShardId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::wire::{Message, Refusal};

use super::{Piece, Sink, SnapshotError, Source};

/// Requests that are under way: enough to keep the wire busy.
const WINDOW: usize = 32;
/// The most bytes that are requested at a time: early answers are held here.
const WINDOW_BYTES: usize = 64 << 20;
/// Longest wait for one piece.
const PIECE_TIMEOUT: Duration = Duration::from_secs(20);
/// Connections to one shard that may be lost one after the other, with nothing having come over them.
const LOSSES: u32 = 3;

/// The data to fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// The newest version, while nothing makes another one.
    Newest(Epoch, Version),
    /// A copy.
    Copy(u64),
}

/// Shards of a model as a source.
pub struct Shards<'a> {
    generation: Generation,
    fetched: Fetched,
    /// The most bytes of a piece.
    piece_bytes: usize,
    /// Finds the shard of a block.
    owner: Box<dyn Fn(BlockId) -> Result<ShardId, Refusal> + 'a>,
    peers: BTreeMap<ShardId, Peer>,
}

struct Peer {
    address: String,
    connection: Option<AdminPeer>,
    /// Since something came.
    losses: u32,
}

/// A request.
struct Asked {
    piece: Piece,
    shard: ShardId,
    request: u64,
}

impl<'a> Shards<'a> {
    /// The data of a model in blocks of `layout`, from the shards at these addresses; `owner` names the
    /// shard of a block.
    pub fn new(
        generation: Generation,
        fetched: Fetched,
        layout: &ModelLayout,
        addresses: impl IntoIterator<Item = (ShardId, String)>,
        owner: impl Fn(BlockId) -> Result<ShardId, Refusal> + 'a,
    ) -> Shards<'a> {
        let peer = |(shard, address)| (shard, Peer { address, connection: None, losses: 0 });
        // Masters and state of narrow elements take more than the elements' room.
        let piece_bytes = layout.block_size() as usize * layout.widening();
        let peers = addresses.into_iter().map(peer).collect();
        Shards { generation, fetched, piece_bytes, owner: Box::new(owner), peers }
    }

    fn message(&self, (block, what): Piece) -> Message {
        let generation = self.generation;
        match self.fetched {
            Fetched::Newest(epoch, version) => Message::Fetch { generation, epoch, version, block, what },
            Fetched::Copy(snapshot) => Message::FetchCopy { generation, snapshot, block, what },
        }
    }

    fn peer(&mut self, shard: ShardId) -> Result<&mut Peer, SnapshotError> {
        let known = self.peers.get_mut(&shard);
        known.ok_or_else(|| Refusal::other(format!("shard {shard} is not announced")).into())
    }

    fn ask(&mut self, shard: ShardId, piece: Piece) -> Result<u64, SnapshotError> {
        let message = self.message(piece);
        let peer = self.peer(shard)?;
        let deadline = Instant::now() + PIECE_TIMEOUT;
        let asked = match &mut peer.connection {
            Some(connection) => connection.ask(&message, &[], deadline),
            none => AdminPeer::connect(&peer.address, deadline)
                .and_then(|connection| none.insert(connection).ask(&message, &[], deadline)),
        };
        asked.map_err(|error| peer.failed(shard, error))
    }

    /// The connection to a shard is lost: requests over it are made again.
    fn ask_again(
        &mut self,
        shard: ShardId,
        error: SnapshotError,
        asked: &mut VecDeque<Asked>,
        came: &HashMap<Piece, Vec<u8>>,
    ) -> Result<(), SnapshotError> {
        let peer = self.peer(shard)?;
        (peer.connection, peer.losses) = (None, peer.losses + 1);
        let is_lost = matches!(&error, SnapshotError::Shard { error, .. } if error.is_disconnect());
        if !is_lost || peer.losses >= LOSSES {
            return Err(error);
        }
        for again in asked.iter_mut().filter(|asked| asked.shard == shard) {
            if !came.contains_key(&again.piece) {
                again.request = self.ask(shard, again.piece)?;
            }
        }
        Ok(())
    }
}

impl Peer {
    fn failed(&self, shard: ShardId, error: AdminError) -> SnapshotError {
        SnapshotError::Shard { shard, address: self.address.clone(), error }
    }
}

impl Source for Shards<'_> {
    fn send(
        &mut self,
        wanted: &mut dyn Iterator<Item = Piece>,
        sink: &mut dyn Sink,
    ) -> Result<(), SnapshotError> {
        let window = (WINDOW_BYTES / self.piece_bytes).clamp(1, WINDOW);
        let mut asked: VecDeque<Asked> = VecDeque::new();
        // Answers that have come before their turn.
        let mut came: HashMap<Piece, Vec<u8>> = HashMap::new();
        loop {
            while asked.len() < window
                && let Some(piece) = wanted.next()
            {
                let shard = (self.owner)(piece.0)?;
                let request = self.ask(shard, piece);
                asked.push_back(Asked { piece, shard, request: *request.as_ref().unwrap_or(&0) });
                if let Err(error) = request {
                    self.ask_again(shard, error, &mut asked, &came)?;
                }
            }
            let Some(&Asked { piece, shard, .. }) = asked.front() else { return Ok(()) };
            if let Some(bytes) = came.remove(&piece) {
                asked.pop_front();
                sink.take(piece, &bytes)?;
                continue;
            }
            let peer = self.peer(shard)?;
            let Some(connection) = &mut peer.connection else {
                return Err(Refusal::other(format!("the connection to shard {shard} is lost")).into());
            };
            let unexpected = |what| AdminError::Unexpected { address: peer.address.clone(), what };
            let answer = connection.answer(Instant::now() + PIECE_TIMEOUT).and_then(|answer| match answer {
                (request, Message::Fetched, bytes) => Ok((request, bytes)),
                (_, Message::Refused(refusal), _) => Err(refusal.into()),
                (_, other, _) => Err(unexpected(other.name())),
            });
            match answer.map_err(|error| peer.failed(shard, error)) {
                Ok((request, bytes)) => {
                    peer.losses = 0;
                    let is_it = |asked: &&Asked| {
                        (asked.shard, asked.request) == (shard, request) && !came.contains_key(&asked.piece)
                    };
                    let unasked = || Refusal::other(format!("shard {shard} answers what nobody asked"));
                    let piece = asked.iter().find(is_it).ok_or_else(unasked)?.piece;
                    came.insert(piece, bytes);
                }
                Err(error) => self.ask_again(shard, error, &mut asked, &came)?,
            }
        }
    }
}
