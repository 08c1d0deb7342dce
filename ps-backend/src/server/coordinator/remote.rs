//! A shard of the model on the network: its address, and the coordinator's connection to it.
//!
//! A number alone does not identify a shard, because a restarted registry may give it to another one. So
//! the coordinator stays with the address at which it has found the blocks. Only the process at that address can
//! report that the blocks are lost.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libmodelio::transport::frames::{Conversation, Framed, Link, Outgoing, Take};
use libmodelio::transport::reactor::Thread;
use libmodelio::transport::stream::Close;
use libmodelio::transport::tcp::SocketOptions;
use libmodelio::vocabulary::ids::{ClientId, ShardId};
use libmodelio::vocabulary::phase::Heard;
use libmodelio::wire::{Limits, Message, Protocol, Received, Refusal, Role, ShardRecord};
use parking_lot::Mutex;

use super::Coordinator;

/// The knowledge of a shard's address.
#[derive(Debug)]
enum Place {
    /// The registry must be asked.
    Unknown,
    /// The registry's answer.
    Named(String),
    /// The blocks are, or were, at this address.
    Found(String),
}

/// A shard of the model on the network.
pub(super) struct RemoteShard {
    pub shard: ShardId,
    pub link: Mutex<Option<Link>>,
    /// A connection is open or being opened.
    busy: AtomicBool,
    pub trouble: Mutex<Option<String>>,
    /// Since when there is no connection.
    gone_since: Mutex<Option<Duration>>,
    heard: Mutex<Heard>,
    place: Mutex<Place>,
    pauses: Mutex<Pauses>,
}

/// The growing pauses between tries for a connection.
#[derive(Debug, Default)]
struct Pauses {
    tries: u32,
    until: Duration,
}

impl Pauses {
    const FIRST: Duration = Duration::from_millis(50);
    /// How often the pauses double.
    const DOUBLED: u32 = 5;

    fn failed(&mut self, now: Duration) {
        self.until = now + Self::FIRST * (1 << self.tries.min(Self::DOUBLED));
        self.tries += 1;
    }

    fn succeeded(&mut self) {
        self.tries = 0;
    }

    fn are_over(&self, now: Duration) -> bool {
        self.until <= now
    }
}

impl RemoteShard {
    /// The shard of this number. If it is among the `known` ones, its blocks are at their address.
    pub(super) fn new(shard: ShardId, known: &[ShardRecord], now: Duration) -> RemoteShard {
        let known = known.iter().find(|record| record.shard == shard);
        let place = known.map_or(Place::Unknown, |record| Place::Found(record.address.clone()));
        RemoteShard {
            shard,
            link: Mutex::new(None),
            busy: AtomicBool::new(false),
            trouble: Mutex::new(None),
            gone_since: Mutex::new(Some(now)),
            heard: Mutex::default(),
            place: Mutex::new(place),
            pauses: Mutex::default(),
        }
    }

    /// The address, as far as it is known.
    pub(super) fn address(&self) -> Option<String> {
        match &*self.place.lock() {
            Place::Unknown => None,
            Place::Named(address) | Place::Found(address) => Some(address.clone()),
        }
    }

    /// Whether the address is known.
    pub(super) fn is_at_hand(&self) -> bool {
        self.address().is_some_and(|address| address.parse::<SocketAddr>().is_ok())
    }

    /// Whether to connect now. If so, the caller must do that, or call [`Self::is_lost`].
    pub(super) fn is_due(&self, now: Duration) -> bool {
        self.pauses.lock().are_over(now) && !self.busy.swap(true, Ordering::Relaxed)
    }

    /// There is no connection. The next try comes after a pause.
    pub(super) fn is_lost(&self, why: String, now: Duration) {
        *self.trouble.lock() = Some(why);
        self.gone_since.lock().get_or_insert(now);
        self.pauses.lock().failed(now);
        self.busy.store(false, Ordering::Relaxed);
    }

    /// How long the shard has been out of reach, and why.
    pub(super) fn is_gone(&self, now: Duration) -> Option<(Duration, String)> {
        let (gone, silent) = (*self.gone_since.lock(), self.heard.lock().silent_since(now));
        let since = gone.into_iter().chain(silent).min()?;
        let why = if gone.is_some() { "no connection yet" } else { "it does not answer" };
        let why = self.trouble.lock().clone().unwrap_or_else(|| why.into());
        Some((now.saturating_sub(since), why))
    }

    /// Asks for a sign of life, if the shard is silent.
    pub(super) fn look(&self, now: Duration) {
        if let Some(link) = &*self.link.lock()
            && self.heard.lock().asks(now)
        {
            link.send_message(0, Message::Ping);
        }
    }

    /// The address. The registry is asked once, unless the shard is not at its answer.
    fn find(&self, resolve: impl FnOnce(ShardId) -> Result<String, String>) -> Result<String, String> {
        if let Some(address) = self.address() {
            return Ok(address);
        }
        let address = resolve(self.shard)?;
        *self.place.lock() = Place::Named(address.clone());
        Ok(address)
    }

    /// The blocks are at this address.
    fn has_it(&self, address: &str) {
        *self.place.lock() = Place::Found(address.to_owned());
        self.pauses.lock().succeeded();
    }

    /// The blocks are not at this address. It is an error if they never were there, as far as is known. Then the
    /// registry is asked again.
    fn has_not(&self, address: &str) -> Result<(), String> {
        let mut place = self.place.lock();
        if matches!(&*place, Place::Found(found) if found == address) {
            return Ok(());
        }
        *place = Place::Unknown;
        Err(format!(
            "{address}, which the registry names as shard {}, has no blocks of the model: waiting for the one that has",
            self.shard
        ))
    }
}

impl Coordinator {
    pub(super) fn try_connect(&self, index: usize, remote: &Arc<RemoteShard>) -> Result<(), String> {
        const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
        let network = self.network.as_ref().ok_or("the model has no shards elsewhere")?;
        let address = remote.find(|shard| (network.resolve)(shard))?;
        let mut found = address.to_socket_addrs().map_err(|error| format!("{address}: {error}"))?;
        let found = found.next().ok_or_else(|| format!("{address} leads nowhere"))?;
        let coordinator = self.this.upgrade().ok_or("the model is gone")?;
        let link = Link::default();
        let conversation = ToPartition {
            coordinator,
            address,
            index,
            remote: Arc::clone(remote),
            link: link.clone(),
            silence: None,
        };
        let stream = Box::new(Framed::new(conversation, link, 4 << 10));
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let connected = network.net.connect(found, SocketOptions::default(), deadline, stream, Thread::Any);
        connected.map(drop).map_err(|error| error.to_string())
    }
}

/// The coordinator's end of its connection to a shard.
struct ToPartition {
    coordinator: Arc<Coordinator>,
    /// The address of the connection.
    address: String,
    index: usize,
    remote: Arc<RemoteShard>,
    link: Link,
    silence: Option<Duration>,
}

impl Conversation for ToPartition {
    fn opened(&mut self, link: &Link) -> Result<(), Close> {
        let hello = Message::Hello {
            protocol: Protocol::NEWEST.number(),
            role: Role::Coordinator,
            model: self.coordinator.model.clone(),
            generation: self.coordinator.generation,
            client: ClientId(self.coordinator.over().0),
        };
        link.send(Outgoing { epoch: self.coordinator.epoch, ..Outgoing::new(0, hello) });
        Ok(())
    }

    fn message(&mut self, received: &Received) -> Result<Take, Close> {
        match (&received.message, self.silence) {
            (Message::Welcome { silence_ms, .. }, None) => {
                self.silence = Some(Duration::from_millis((*silence_ms).into()));
                *self.remote.link.lock() = Some(self.link.clone());
                *self.remote.trouble.lock() = None;
                *self.remote.gone_since.lock() = None;
                self.remote.heard.lock().heard(self.coordinator.now());
                self.remote.has_it(&self.address);
                let index = self.index;
                self.coordinator.with_core(|state, _, actions| state.core.partition_up(index, actions));
            }
            (Message::Refused(refusal), None) => {
                // A shard answers that does not have the blocks. It was restarted, or it is another one that got
                // the number from a new registry.
                if matches!(refusal, Refusal::NoModel(_) | Refusal::Generation { .. }) {
                    if let Err(why) = self.remote.has_not(&self.address) {
                        return Err(Close::Asked(why.into()));
                    }
                    self.coordinator.partition_message(self.index, 0, received.message.clone());
                }
                return Err(Close::Asked(refusal.to_string().into()));
            }
            (other, None) => {
                return Err(Close::Asked(format!("expected Welcome, got {}", other.name()).into()));
            }
            // This refusal ends the connection. The order is repeated over another one.
            (Message::Refused(refusal @ Refusal::Frame { .. }), Some(_)) => {
                return Err(Close::Asked(format!("refused by the shard: {refusal}").into()));
            }
            (message, Some(_)) => {
                if let Message::Refused(refusal @ Refusal::Plan { .. }) = message {
                    tracing::debug!(model = %self.coordinator.model, shard = %self.remote.shard, "{refusal}");
                }
                self.coordinator.partition_message(self.index, received.header.request(), message.clone());
            }
        }
        Ok(Take::Nothing)
    }

    fn payload(&mut self, _: &Received, _: &[u8]) -> Result<(), Close> {
        Ok(())
    }

    fn limits(&self) -> Limits {
        if self.silence.is_some() { Limits { payload: 0, ..Limits::MAX } } else { Limits::GREETING }
    }

    fn silence(&self) -> Option<Duration> {
        self.silence
    }

    fn alive(&mut self) {
        self.remote.heard.lock().heard(self.coordinator.now());
    }

    fn closed(&mut self, why: &Close) {
        let mut link = self.remote.link.lock();
        link.take_if(|known| known.is(&self.link));
        drop(link);
        self.remote.is_lost(why.to_string(), self.coordinator.now());
        if self.silence.is_some() && !self.coordinator.stopping.load(Ordering::Relaxed) {
            tracing::warn!(model = %self.coordinator.model, shard = %self.remote.shard, "connection lost: {why}");
        }
    }
}
