//! A shard that does what a test's script says. It owns all blocks of its model, and coordinates it.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::ids::{ClientId, Epoch, Generation, Incarnation, LearnerId, ShardId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::wire::{
    JobState, Limits, Message, ModelRecord, Moved, Protocol, Receiver, Role, ShardRecord, frame,
};

use crate::world::until;

pub const BYTES: u64 = 300_000;
pub const LEARNER: LearnerId = LearnerId(1);

/// What a shard does, and what it has seen.
#[derive(Default)]
pub struct Script {
    pub epoch: Epoch,
    /// What it says to whoever greets it under an older map; under any, if it is `deaf`.
    pub moved: Option<Vec<u8>>,
    /// It welcomes nobody.
    pub deaf: bool,
    /// What it says in its welcome, if not the truth.
    pub claims: Option<Epoch>,
    /// What it says at once on connections of this role.
    pub now: Vec<(Role, Vec<u8>)>,
    /// Commits are answered.
    pub answers: bool,
    /// Who has greeted it, and under which map.
    pub greeted: Vec<(Role, Epoch, ClientId)>,
    /// Commits, by the number of their request.
    pub commits: Vec<u64>,
    pub gone: bool,
    /// The newest version, which is announced. All its bytes are its number.
    pub newest: Version,
    /// The patch, and the checksum, that it sends of any block to whoever has an older version.
    pub patch: Option<(Vec<u8>, Option<u32>)>,
    /// How often it has sent that, and blocks as a whole.
    pub sent: (usize, usize),
}

/// A shard that owns all blocks of its model, and coordinates it.
#[derive(Clone)]
pub struct ScriptedShard {
    pub record: ShardRecord,
    pub script: Arc<Mutex<Script>>,
}

impl ScriptedShard {
    pub fn start(shard: ShardId, epoch: Epoch) -> ScriptedShard {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let record =
            ShardRecord { shard, address, host: "elsewhere".into(), draining: false, rdma: String::new() };
        let script = Arc::new(Mutex::new(Script { epoch, ..Script::default() }));
        let of_thread = Arc::clone(&script);
        std::thread::spawn(move || {
            loop {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let script = Arc::clone(&of_thread);
                        std::thread::spawn(move || Talk { stream, script, shard }.run());
                    }
                    Err(_) if of_thread.lock().unwrap().gone => return,
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        });
        ScriptedShard { record, script }
    }

    pub fn with<R>(&self, f: impl FnOnce(&mut Script) -> R) -> R {
        f(&mut self.script.lock().unwrap())
    }

    /// Says it on the connections of this role that are there.
    pub fn say_now(&self, role: Role, payload: Vec<u8>) {
        self.with(|script| script.now.push((role, payload)));
    }

    pub fn controls(&self) -> usize {
        self.with(|script| script.greeted.iter().filter(|(role, ..)| *role == Role::Control).count())
    }

    /// Ends; nobody listens at its address any more.
    pub fn stop(&self) {
        self.with(|script| script.gone = true);
        until("it has ended", || TcpStream::connect(&self.record.address).is_err());
    }
}

/// One connection of a shard.
struct Talk {
    stream: TcpStream,
    script: Arc<Mutex<Script>>,
    shard: ShardId,
}

impl Talk {
    fn say(&mut self, message: &Message, request: u64, payload: &[u8]) {
        let mut bytes = frame(message, request, Epoch(0), payload).unwrap();
        bytes.extend_from_slice(payload);
        let _ = self.stream.write_all(&bytes);
    }

    fn run(mut self) {
        self.stream.set_nonblocking(false).unwrap();
        self.stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let mut receiver = Receiver::new(Limits::MAX);
        let (mut came, mut role, mut due) = (Vec::new(), None, 0);
        let begun = self.script.lock().unwrap().now.len();
        let mut said = begun;
        let mut announced = Version(0);
        loop {
            let mut bytes = [0; 64 << 10];
            match self.stream.read(&mut bytes) {
                Ok(0) => return,
                Ok(count) => came.extend_from_slice(&bytes[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => return,
            }
            loop {
                if due > 0 {
                    let count = came.len().min(due);
                    came.drain(..count);
                    due -= count;
                    if due > 0 {
                        break;
                    }
                }
                let (used, received) = receiver.push(&came).unwrap();
                came.drain(..used);
                let Some(received) = received else { break };
                due = received.header.payload_len() as usize;
                let (request, epoch) = (received.header.request(), received.header.epoch());
                if let Message::Hello { role: of, client, .. } = received.message {
                    role = Some(of);
                    if !self.greet(of, epoch, client) {
                        return;
                    }
                } else {
                    self.receive(received.message, request, epoch);
                }
            }
            let (new, gone, newest) = {
                let script = self.script.lock().unwrap();
                let new: Vec<_> = script.now[said..].to_vec();
                said = script.now.len();
                (new, script.gone, script.newest)
            };
            if role == Some(Role::Control) && newest > announced {
                announced = newest;
                self.announce(newest);
            }
            for (_, payload) in new.iter().filter(|(of, _)| Some(*of) == role) {
                self.say(&Message::Moved, 0, payload);
            }
            if gone {
                return;
            }
        }
    }

    fn announce(&mut self, version: Version) {
        let sequence = self.script.lock().unwrap().epoch.0 * 1000 + version.0;
        let state = JobState { sequence, version, ..JobState::default() };
        self.say(&Message::State(Box::new(state)), 0, &[]);
    }

    /// False when the conversation is over.
    fn greet(&mut self, role: Role, epoch: Epoch, client: ClientId) -> bool {
        let (own, moved, deaf, claimed) = {
            let mut script = self.script.lock().unwrap();
            script.greeted.push((role, epoch, client));
            let claimed = script.claims.unwrap_or(script.epoch);
            (script.epoch, script.moved.clone(), script.deaf, claimed)
        };
        if let Some(moved) = moved.filter(|_| epoch < own || deaf) {
            self.say(&Message::Moved, 0, &moved);
            return false;
        }
        assert_eq!(epoch, own);
        let protocol = Protocol::NEWEST.number();
        self.say(&Message::Welcome { protocol, shard: self.shard, epoch: claimed, silence_ms: 5000 }, 0, &[]);
        if role == Role::Control {
            let state = JobState { sequence: own.0 * 1000, ..JobState::default() };
            self.say(&Message::State(Box::new(state)), 0, &[]);
        }
        true
    }

    fn receive(&mut self, message: Message, request: u64, epoch: Epoch) {
        // A connection's own pings are of no map.
        if message != Message::Ping {
            assert_eq!(epoch, self.script.lock().unwrap().epoch, "{} of another map", message.name());
        }
        match message {
            Message::Ping => self.say(&Message::Pong, 0, &[]),
            Message::Join { .. } => {
                let joined =
                    Message::Joined { learner: LEARNER, incarnation: Incarnation(1), since: u64::MAX };
                self.say(&joined, request, &[]);
            }
            Message::Commit { .. } => {
                let answers = {
                    let mut script = self.script.lock().unwrap();
                    script.commits.push(request);
                    script.answers
                };
                if answers {
                    self.say(&Message::Done, request, &[]);
                }
            }
            Message::Pull { version, blocks, base } => {
                let layout = ModelLayout::blank(BYTES, DType::F32, 64 << 10).unwrap();
                for block in blocks.map(libmodelio::vocabulary::ids::BlockId) {
                    let patch = {
                        let mut script = self.script.lock().unwrap();
                        let patch = script.patch.clone().zip(base);
                        let (patched, whole) = &mut script.sent;
                        *(if patch.is_some() { patched } else { whole }) += 1;
                        patch
                    };
                    if let Some(((patch, crc), base)) = patch {
                        self.say(&Message::Changes { version, block, base, crc }, 0, &patch);
                        continue;
                    }
                    let bytes = vec![version.0 as u8; layout.block_len(block).unwrap() as usize];
                    self.say(&Message::Block { version, block }, 0, &bytes);
                }
            }
            _ => {}
        }
    }
}

/// The model with all blocks on one shard.
pub fn record(shard: ShardId, epoch: Epoch) -> ModelRecord {
    let layout = ModelLayout::blank(BYTES, DType::F32, 64 << 10).unwrap();
    let map = BlockMap::from_owners(epoch, vec![shard; layout.blocks() as usize]).unwrap();
    let mut record =
        ModelRecord::new("m", Generation(7), &layout, BTreeMap::new(), &map, shard, Default::default())
            .unwrap();
    record.ready = true;
    record
}

pub fn moved_to(to: &ScriptedShard, epoch: Epoch) -> Moved {
    Moved { record: record(to.record.shard, epoch), shards: vec![to.record.clone()] }
}
