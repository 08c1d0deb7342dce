//! A connection for administration: requests and their answers, one at a time, blocking, with deadlines.
//!
//! The edge around [`wire`](crate::wire) for tools and for the registry's clients; bulk goes other ways.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use gradfs_stores::etcd::EtcdError;

use crate::bytes::crc32c::crc32c;
use crate::vocabulary::ids::{ClientId, Epoch, Generation, ShardId};
use crate::wire::{
    Limits, Message, Payload, Protocol, Received, Receiver, Refusal, Role, WireError, append_frame,
    ping_after,
};

/// The first and the longest pause before another try of who is hung up on unheard.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// The reason why a request has no answer. Except for [`AdminError::Refusal`], it is unknown whether the
/// request was carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdminError {
    /// The address is none, or its name is unknown.
    #[error("{address}: {reason}: give host:port of a shard or registry")]
    Address {
        /// The address as given.
        address: String,
        /// The resolver's error.
        reason: String,
    },
    /// Nobody listens at the address.
    #[error("{address}: connection refused: is the shard or registry running there?")]
    ConnectionRefused {
        /// The address.
        address: String,
    },
    /// No way there.
    #[error("{address}: {source}: check the address and the network")]
    NoRoute {
        /// The address.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// The deadline passed.
    #[error("{address}: no answer before the deadline while {doing} it: is it overloaded or cut off?")]
    TimedOut {
        /// The address.
        address: String,
        /// The operation that failed.
        doing: &'static str,
    },
    /// The peer sent nothing for as long as its welcome allows.
    #[error("{address}: silent for {silence:?}: taken for dead; try again")]
    Silent {
        /// The address.
        address: String,
        /// How long.
        silence: Duration,
    },
    /// The connection ended.
    #[error("{address}: the connection ended while {doing} it ({source}): try again")]
    Disconnected {
        /// The address.
        address: String,
        /// The operation that failed.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// Something else listens there.
    #[error("{address}: {source}: something else listens there, give the port of a shard or registry")]
    NotGradfs {
        /// The address.
        address: String,
        /// The received frame's fault.
        source: WireError,
    },
    /// Another release.
    #[error(
        "{address}: speaks protocol {got}, this is protocol {expected}: use the same release on both sides"
    )]
    Protocol {
        /// The address.
        address: String,
        /// This end's.
        expected: u16,
        /// The peer's.
        got: u16,
    },
    /// Damage, or a peer that errs.
    #[error(
        "{address}: {source}: damaged on the way? Try again; if it stays, one of the two hosts or programs is broken"
    )]
    Wire {
        /// The address.
        address: String,
        /// The fault.
        source: WireError,
    },
    /// A message that does not belong there.
    #[error(
        "{address}: answers with {what}, which does not belong there: use the same release on both sides"
    )]
    Unexpected {
        /// The address.
        address: String,
        /// The message's name.
        what: &'static str,
    },
    /// The peer understands, and refuses: nothing has changed.
    #[error(transparent)]
    Refusal(#[from] Refusal),
    /// The request cannot be sent: nothing has changed.
    #[error("the request cannot be sent: {0}")]
    Request(WireError),
    /// The registry is in an etcd, which does not do it.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// Something on this side.
    #[error("{address}: {source}")]
    Io {
        /// The address.
        address: String,
        /// The system's error.
        source: io::Error,
    },
}

impl AdminError {
    /// Whether the connection ended, so that another one may be better.
    pub fn is_disconnect(&self) -> bool {
        matches!(self, AdminError::Disconnected { .. } | AdminError::Silent { .. })
    }
}

/// A connection to a shard or a registry that greeted it. After an error other than a refusal it is of no use.
#[derive(Debug)]
pub struct AdminPeer {
    address: String,
    stream: TcpStream,
    receiver: Receiver,
    /// Read from the stream and not yet taken.
    unread: Vec<u8>,
    outgoing: Vec<u8>,
    shard: ShardId,
    epoch: Epoch,
    silence: Duration,
    ping_after: Duration,
    last_sent: Instant,
    last_bytes: Instant,
    next_request: u64,
}

impl AdminPeer {
    /// Connects to `address` (`host:port`), trying each address it resolves to, and greets. One that is hung up on unheard,
    /// because too many others have connected meanwhile, tries again some times.
    ///
    /// # Errors
    /// [`AdminError`], the last address's where none answers.
    pub fn connect(address: &str, deadline: Instant) -> Result<AdminPeer, AdminError> {
        let addresses = resolve(address, deadline)?;
        let mut pause = FIRST_PAUSE;
        loop {
            let mut peer = AdminPeer::over(address, stream_to(address, &addresses, deadline)?)?;
            let opened = peer.last_bytes;
            let Err(error) = peer.greet(deadline) else { return Ok(peer) };
            let is_unheard = error.is_disconnect() && peer.last_bytes == opened;
            if !is_unheard || pause > LAST_PAUSE || left(deadline) <= pause {
                return Err(error);
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
    }

    fn over(address: &str, stream: TcpStream) -> Result<AdminPeer, AdminError> {
        let address = address.to_owned();
        // Requests are short, and must not wait for more data.
        stream.set_nodelay(true).map_err(|source| AdminError::Io { address: address.clone(), source })?;
        let now = Instant::now();
        Ok(AdminPeer {
            address,
            stream,
            receiver: Receiver::new(Limits::GREETING),
            unread: Vec::new(),
            outgoing: Vec::new(),
            shard: ShardId(0),
            epoch: Epoch(0),
            // Until the welcome says otherwise, only the deadline counts.
            silence: Duration::MAX,
            ping_after: Duration::MAX,
            last_sent: now,
            last_bytes: now,
            next_request: 1,
        })
    }

    fn greet(&mut self, deadline: Instant) -> Result<(), AdminError> {
        let hello = Message::Hello {
            protocol: Protocol::NEWEST.number(),
            role: Role::Admin,
            model: String::new(),
            generation: Generation(0),
            client: ClientId(0),
        };
        const DOING: &str = "greeting";
        self.send(&hello, 0, &[], deadline, DOING)?;
        let received = self.receive(deadline, DOING)?;
        let address = || self.address.clone();
        match received.0.message {
            Message::Welcome { shard, epoch, silence_ms, .. } => {
                (self.shard, self.epoch) = (shard, epoch);
                self.silence = Duration::from_millis(silence_ms.max(1).into());
                self.ping_after = ping_after(silence_ms);
                self.receiver.set_limits(Limits::MAX);
                Ok(())
            }
            Message::Refused(Refusal::Protocol { expected, got }) => {
                // This is the peer's view: the protocol it expects is the protocol it speaks.
                Err(AdminError::Protocol { address: address(), expected: got, got: expected })
            }
            Message::Refused(refusal) => Err(refusal.into()),
            other => Err(AdminError::Unexpected { address: address(), what: other.name() }),
        }
    }

    /// The shard that answers.
    pub fn shard(&self) -> ShardId {
        self.shard
    }

    /// The epoch that its welcome named.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The connection was silent for so long that the peer has given it up, or soon will.
    pub fn is_stale(&self) -> bool {
        self.last_sent.elapsed() >= self.silence / 2
    }

    /// Sends a message with its payload, and waits for the answer and its payload.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn request(
        &mut self,
        message: &Message,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<(Message, Vec<u8>), AdminError> {
        // Silence counts from here: between requests nobody listens.
        self.last_bytes = Instant::now();
        let request = self.ask(message, payload, deadline)?;
        match self.answer(deadline)? {
            (of, Message::Refused(refusal), _) if of == request => Err(refusal.into()),
            (of, answer, payload) if of == request => Ok((answer, payload)),
            (_, other, _) => {
                Err(AdminError::Unexpected { address: self.address.clone(), what: other.name() })
            }
        }
    }

    /// Sends a message and does not wait; its number, which the answer has, too. Several can be under way.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn ask(&mut self, message: &Message, payload: &[u8], deadline: Instant) -> Result<u64, AdminError> {
        let request = self.next_request;
        self.next_request += 1;
        self.send(message, request, payload, deadline, "asking")?;
        Ok(request)
    }

    /// The next answer, whose it is, and its payload. A refusal is one.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn answer(&mut self, deadline: Instant) -> Result<(u64, Message, Vec<u8>), AdminError> {
        loop {
            let (received, payload) = self.receive(deadline, "waiting for")?;
            match received.message {
                Message::Ping => self.send(&Message::Pong, 0, &[], deadline, "answering")?,
                Message::Pong => {}
                // The peer's last word on the connection, which does not answer the request.
                Message::Refused(refusal) if received.header.request() == 0 => {
                    let refused = io::Error::other(format!("refused: {refusal}"));
                    return Err(disconnected(&self.address, "waiting for", refused));
                }
                answer => return Ok((received.header.request(), answer, payload)),
            }
        }
    }

    /// Tells the peer that this end lives, unless that was said lately, and waits until the peer says the same. Nothing
    /// else may be under way.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn keep_alive(&mut self, deadline: Instant) -> Result<(), AdminError> {
        if self.last_sent.elapsed() < self.ping_after {
            return Ok(());
        }
        self.last_bytes = Instant::now();
        self.send(&Message::Ping, 0, &[], deadline, "asking")?;
        while self.receive(deadline, "waiting for")?.0.message != Message::Pong {}
        Ok(())
    }

    /// Sends a message that has no answer (`Load`), with its payload.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn notify(&mut self, message: &Message, payload: &[u8], deadline: Instant) -> Result<(), AdminError> {
        self.send(message, 0, payload, deadline, "sending")
    }

    fn send(
        &mut self,
        message: &Message,
        request: u64,
        payload: &[u8],
        deadline: Instant,
        doing: &'static str,
    ) -> Result<(), AdminError> {
        let sent = Payload::of(payload).map_err(AdminError::Request)?;
        self.outgoing.clear();
        append_frame(&mut self.outgoing, message, request, Epoch(0), sent).map_err(AdminError::Request)?;
        for mut part in [self.outgoing.as_slice(), payload] {
            while !part.is_empty() {
                let left = left(deadline);
                if left.is_zero() {
                    return Err(AdminError::TimedOut { address: self.address.clone(), doing });
                }
                let sent = self.stream.set_write_timeout(Some(left)).and_then(|()| self.stream.write(part));
                match sent {
                    Ok(count) => part = &part[count..],
                    Err(error) if is_retry(&error) => {}
                    Err(error) => return Err(disconnected(&self.address, doing, error)),
                }
            }
        }
        self.last_sent = Instant::now();
        Ok(())
    }

    /// The next message and its payload.
    fn receive(&mut self, deadline: Instant, doing: &'static str) -> Result<(Received, Vec<u8>), AdminError> {
        let received = loop {
            let (used, received) = self.receiver.push(&self.unread).map_err(|error| self.wrong(error))?;
            self.unread.drain(..used);
            match received {
                Some(received) => break received,
                None => self.read(self.receiver.wanted(), deadline, doing)?,
            }
        };
        let Some(due) = self.receiver.payload_due() else { return Ok((received, Vec::new())) };
        // The buffer grows as data comes, and does not allocate by the announced length.
        while self.unread.len() < due as usize {
            self.read(due as usize - self.unread.len(), deadline, doing)?;
        }
        let rest = self.unread.split_off(due as usize);
        let payload = std::mem::replace(&mut self.unread, rest);
        self.receiver.payload_done(crc32c(&payload)).map_err(|error| self.wrong(error))?;
        Ok((received, payload))
    }

    /// Reads at most `wanted` bytes, pinging meanwhile as the welcome asks for.
    fn read(&mut self, wanted: usize, deadline: Instant, doing: &'static str) -> Result<(), AdminError> {
        let mut piece = [0; 64 << 10];
        let wanted = wanted.min(piece.len());
        loop {
            let address = || self.address.clone();
            if left(deadline).is_zero() {
                return Err(AdminError::TimedOut { address: address(), doing });
            }
            if self.last_bytes.elapsed() >= self.silence {
                return Err(AdminError::Silent { address: address(), silence: self.silence });
            }
            let pause = self.ping_after.saturating_sub(self.last_sent.elapsed());
            if pause.is_zero() {
                self.send(&Message::Ping, 0, &[], deadline, doing)?;
                continue;
            }
            let silent = self.silence - self.last_bytes.elapsed().min(self.silence);
            let wait = left(deadline).min(pause).min(silent).max(Duration::from_millis(1));
            let read = self
                .stream
                .set_read_timeout(Some(wait))
                .and_then(|()| self.stream.read(&mut piece[..wanted]));
            match read {
                Ok(0) => return Err(disconnected(&self.address, doing, ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    self.last_bytes = Instant::now();
                    self.unread.extend_from_slice(&piece[..count]);
                    return Ok(());
                }
                Err(error) if is_retry(&error) => {}
                Err(error) => return Err(disconnected(&self.address, doing, error)),
            }
        }
    }

    fn wrong(&self, error: WireError) -> AdminError {
        let address = self.address.clone();
        match error {
            WireError::Protocol { expected, got } => AdminError::Protocol { address, expected, got },
            source @ WireError::Magic { .. } => AdminError::NotGradfs { address, source },
            source => AdminError::Wire { address, source },
        }
    }
}

/// A connection to one of the addresses.
fn stream_to(address: &str, addresses: &[SocketAddr], deadline: Instant) -> Result<TcpStream, AdminError> {
    let mut failed = None;
    for (tried, socket) in addresses.iter().enumerate() {
        // An address that does not answer leaves time for those behind it.
        let share = left(deadline) / (addresses.len() - tried) as u32;
        if share.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(socket, share) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = Some(unconnected(address, error)),
        }
    }
    Err(failed
        .unwrap_or_else(|| AdminError::TimedOut { address: address.to_owned(), doing: "connecting to" }))
}

/// Time until `deadline`; none if it has passed.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Timeouts, which a loop looks at itself, and interruptions.
fn is_retry(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn disconnected(address: &str, doing: &'static str, source: io::Error) -> AdminError {
    AdminError::Disconnected { address: address.to_owned(), doing, source }
}

fn unconnected(address: &str, source: io::Error) -> AdminError {
    let address = address.to_owned();
    match source.kind() {
        ErrorKind::ConnectionRefused => AdminError::ConnectionRefused { address },
        ErrorKind::TimedOut | ErrorKind::WouldBlock => {
            AdminError::TimedOut { address, doing: "connecting to" }
        }
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::AddrNotAvailable => {
            AdminError::NoRoute { address, source }
        }
        _ => AdminError::Io { address, source },
    }
}

/// The addresses behind a name. The system's resolver knows no deadline, so a thread of its own asks it.
fn resolve(address: &str, deadline: Instant) -> Result<Vec<SocketAddr>, AdminError> {
    if let Ok(socket) = address.parse() {
        return Ok(vec![socket]);
    }
    let bad = |reason: String| AdminError::Address { address: address.to_owned(), reason };
    let (sender, answer) = mpsc::sync_channel(1);
    let name = address.to_owned();
    std::thread::Builder::new()
        .name("resolver".to_owned())
        .spawn(move || {
            // Nobody listens any more when the deadline has passed.
            let _ = sender.send(name.to_socket_addrs().map(Vec::from_iter));
        })
        .map_err(|source| AdminError::Io { address: address.to_owned(), source })?;
    match answer.recv_timeout(left(deadline)) {
        Ok(Ok(addresses)) if addresses.is_empty() => Err(bad("has no address".to_owned())),
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(error)) => Err(bad(error.to_string())),
        Err(RecvTimeoutError::Timeout) => {
            Err(AdminError::TimedOut { address: address.to_owned(), doing: "resolving the name of" })
        }
        Err(RecvTimeoutError::Disconnected) => Err(bad("the resolver ended".to_owned())),
    }
}

#[cfg(test)]
mod tests;
