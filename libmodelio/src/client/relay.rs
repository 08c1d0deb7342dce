//! The end of a relay: it takes connections from other clients, and sends them versions that its own jobs show or are
//! pulling.
//!
//! A block is sent as soon as it has come whole, from the buffer that it lies in. Whether the version is shown here does
//! not matter: a follower shows it by what its own coordinator says. A request for what is not here yet waits.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::transport::frames::{Conversation, Framed, Link, Outgoing, Take};
use crate::transport::reactor::Handle;
use crate::transport::stream::{Close, Connection, Stream};
use crate::transport::tcp::SocketOptions;
use crate::vocabulary::ids::{Epoch, Generation, ShardId, Version};
use crate::wire::{Limits, Message, Protocol, Received, Refusal, Role};

/// The longest silence on a connection.
const SILENCE: Duration = Duration::from_secs(10);
/// The most requests that wait on one connection.
const MAX_PULLS: usize = 256;
/// The most connections that have greeted, and the most that have not.
const MAX_CONNECTIONS: usize = 64;
/// A request is refused if no block could be sent for so long.
const HELD: Duration = Duration::from_secs(5);
/// The number of bytes that are read from a connection at once.
const AHEAD: usize = 128;

/// A job, as its followers see it.
pub(super) trait Relayed: Send + Sync {
    /// The life of the model.
    fn generation(&self) -> Generation;

    /// The next block of what a follower has asked for. If there is none, its connection is woken when there may be.
    fn next_for(&self, follower: &mut Asked) -> Option<Outgoing>;

    /// The follower is gone, or is refused what it has asked for. Returns the newest version that is shown.
    fn dismisses(&self, follower: &mut Asked) -> Version;
}

/// What one follower has asked for on one connection.
#[derive(Default)]
pub(super) struct Asked {
    pub(super) link: Link,
    pub(super) epoch: Epoch,
    /// Versions, their blocks, and the version that the follower has.
    pub(super) pulls: VecDeque<(Version, Range<u32>, Option<Version>)>,
    /// The version that is kept for it.
    pub(super) pinned: Option<Version>,
}

/// The jobs of a process that serve others, by their models, and the followers.
#[derive(Default)]
struct Served {
    jobs: BTreeMap<String, Weak<dyn Relayed>>,
    followers: Vec<(Link, String, SocketAddr)>,
    /// The number of connections that have not greeted.
    strangers: usize,
}

/// Takes connections from followers, for all jobs of a process.
pub struct RelayPort {
    address: SocketAddr,
    zone: String,
    served: Mutex<Served>,
    listening: OnceLock<Connection>,
}

impl RelayPort {
    /// Listens on `listener`, on a thread of `net`. Others reach the relay at `address`, and its host is in this `zone`.
    ///
    /// # Errors
    /// The system's.
    pub fn listen(
        net: &Handle,
        listener: TcpListener,
        address: SocketAddr,
        zone: String,
    ) -> io::Result<Arc<RelayPort>> {
        let (served, listening) = (Mutex::default(), OnceLock::new());
        let port = Arc::new(RelayPort { address, zone, served, listening });
        let weak = Arc::downgrade(&port);
        let accept = move |peer: SocketAddr| -> Option<Box<dyn Stream>> {
            let port = weak.upgrade()?;
            let mut served = port.served.lock();
            if served.strangers >= MAX_CONNECTIONS {
                return None;
            }
            served.strangers += 1;
            drop(served);
            let (job, asked, moved) = (None, Asked::default(), Instant::now());
            let serving = Serving { port, peer, job, asked, moved, is_strange: true };
            Some(Box::new(Framed::new(serving, Link::default(), AHEAD)))
        };
        let listening = net.listen(listener, SocketOptions::default(), accept);
        let _ = port.listening.set(listening.map_err(|refused| io::Error::other(refused.to_string()))?);
        Ok(port)
    }

    /// Where others reach the relay.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The zone of its host.
    pub fn zone(&self) -> &str {
        &self.zone
    }

    /// The addresses from which others pull this model.
    pub fn followers(&self, model: &str) -> Vec<SocketAddr> {
        let served = self.served.lock();
        let mut of_model: Vec<SocketAddr> =
            served.followers.iter().filter(|(_, of, _)| of == model).map(|(_, _, peer)| *peer).collect();
        of_model.sort_unstable();
        of_model
    }

    /// Serves the versions of a job, in place of an earlier one of the same model.
    pub(super) fn serves(&self, model: &str, job: Weak<dyn Relayed>) {
        self.served.lock().jobs.insert(model.to_owned(), job);
    }

    /// A job ends. Its followers are told to go.
    pub(super) fn ends(&self, model: &str, generation: Generation) {
        let mut served = self.served.lock();
        let job = served.jobs.get(model).and_then(Weak::upgrade);
        if job.is_none_or(|job| job.generation() == generation) {
            served.jobs.remove(model);
            served
                .followers
                .iter()
                .filter(|(_, of, _)| of == model)
                .for_each(|(link, ..)| link.close(Close::ShutDown));
        }
    }

    /// Finds the job of a model, for one more follower.
    fn meet(
        &self,
        model: &str,
        generation: Generation,
        link: &Link,
        peer: SocketAddr,
    ) -> Result<Weak<dyn Relayed>, Refusal> {
        let mut served = self.served.lock();
        let job = served.jobs.get(model).and_then(Weak::upgrade);
        let job = job.ok_or_else(|| Refusal::NoModel(model.to_owned()))?;
        let expected = job.generation();
        if expected != generation {
            return Err(Refusal::Generation { model: model.to_owned(), expected, got: generation });
        }
        if served.followers.len() >= MAX_CONNECTIONS {
            return Err(Refusal::other(format!(
                "this relay has {MAX_CONNECTIONS} connections already, the limit"
            )));
        }
        served.followers.push((link.clone(), model.to_owned(), peer));
        Ok(Arc::downgrade(&job))
    }
}

impl Drop for RelayPort {
    fn drop(&mut self) {
        if let Some(listening) = self.listening.get() {
            listening.close(Close::ShutDown);
        }
    }
}

/// A connection of a follower.
struct Serving {
    port: Arc<RelayPort>,
    peer: SocketAddr,
    /// None before the greeting.
    job: Option<Weak<dyn Relayed>>,
    asked: Asked,
    /// When a block was last sent, or asked for after all others were sent.
    moved: Instant,
    /// It has not greeted.
    is_strange: bool,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.is_known();
    }
}

impl Serving {
    /// It has greeted, or never will.
    fn is_known(&mut self) {
        if std::mem::take(&mut self.is_strange) {
            self.port.served.lock().strangers -= 1;
        }
    }

    fn greet(&mut self, received: &Received) -> Result<(), Refusal> {
        let Message::Hello { protocol, role, model, generation, .. } = &received.message else {
            return Err(Refusal::Role { what: received.message.name().to_owned() });
        };
        let expected = Protocol::NEWEST.number();
        if *protocol != expected {
            return Err(Refusal::Protocol { expected, got: *protocol });
        }
        if *role != Role::Relay {
            return Err(Refusal::other("this is a relay, and no shard"));
        }
        self.job = Some(self.port.meet(model, *generation, &self.asked.link, self.peer)?);
        self.is_known();
        let (epoch, silence_ms) = (received.header.epoch(), SILENCE.as_millis() as u32);
        let welcome = Message::Welcome { protocol: expected, shard: ShardId(0), epoch, silence_ms };
        self.asked.epoch = epoch;
        self.asked.link.expect_much();
        self.asked.link.send(Outgoing { epoch, ..Outgoing::new(0, welcome) });
        Ok(())
    }

    fn take(&mut self, message: &Message) -> Result<(), Refusal> {
        match message {
            Message::Pull { .. } if self.asked.pulls.len() >= MAX_PULLS => {
                Err(Refusal::other(format!("more than {MAX_PULLS} pulls on one connection")))
            }
            Message::Pull { version, blocks, base } => {
                if self.asked.pulls.is_empty() {
                    self.moved = Instant::now();
                }
                self.asked.pulls.push_back((*version, blocks.clone(), *base));
                Ok(())
            }
            other => Err(Refusal::Role { what: other.name().to_owned() }),
        }
    }

    fn refuse(&self, refusal: Refusal) -> Close {
        let why = refusal.to_string();
        let epoch = self.asked.epoch;
        self.asked.link.send_last(Outgoing { epoch, ..Outgoing::new(0, Message::Refused(refusal)) });
        Close::Asked(why.into())
    }
}

impl Conversation for Serving {
    fn opened(&mut self, link: &Link) -> Result<(), Close> {
        self.asked.link = link.clone();
        Ok(())
    }

    fn message(&mut self, received: &Received) -> Result<Take, Close> {
        let taken = match self.job {
            None => self.greet(received),
            Some(_) => match received.expect_payload(0) {
                Ok(()) => self.take(&received.message),
                Err(error) => Err(error.to_refusal()),
            },
        };
        taken.map(|()| Take::Nothing).map_err(|refusal| self.refuse(refusal))
    }

    fn payload(&mut self, _: &Received, _: &[u8]) -> Result<(), Close> {
        Ok(())
    }

    fn next(&mut self) -> Option<Outgoing> {
        let next = self.job.as_ref()?.upgrade()?.next_for(&mut self.asked)?;
        self.moved = Instant::now();
        Some(next)
    }

    fn limits(&self) -> Limits {
        if self.job.is_none() { Limits::GREETING } else { Limits { payload: 0, ..Limits::MAX } }
    }

    fn silence(&self) -> Option<Duration> {
        self.job.as_ref().map(|_| SILENCE)
    }

    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        let Some(job) = &self.job else { return Ok(None) };
        let Some(job) = job.upgrade() else { return Err(Close::ShutDown) };
        let Some(&(wanted, ..)) = self.asked.pulls.front() else { return Ok(None) };
        if now < self.moved + HELD {
            return Ok(Some(self.moved + HELD));
        }
        let refusal = Refusal::NoVersion { wanted, newest: job.dismisses(&mut self.asked) };
        let epoch = self.asked.epoch;
        self.asked.link.send(Outgoing { epoch, ..Outgoing::new(0, Message::Refused(refusal)) });
        Ok(None)
    }

    fn farewell(&mut self, refusal: Refusal) -> Option<Outgoing> {
        Some(Outgoing { epoch: self.asked.epoch, ..Outgoing::new(0, Message::Refused(refusal)) })
    }

    fn closed(&mut self, why: &Close) {
        tracing::debug!(peer = %self.peer, %why, "a follower's connection is over");
        self.port.served.lock().followers.retain(|(link, ..)| !link.is(&self.asked.link));
        if let Some(job) = self.job.take().and_then(|job| job.upgrade()) {
            job.dismisses(&mut self.asked);
        }
    }
}
