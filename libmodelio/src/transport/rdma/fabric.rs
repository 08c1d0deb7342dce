//! How lines come about: one thread asks for them, is asked for them, and hears of their ends. What is served on them
//! is its callers' business.
//!
//! What both ends say of themselves is in `offer`.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

use super::device::Device;
use super::line::Line;
use super::offer::{Lack, Offer, Strange};
use super::options::{Mtu, RdmaOptions};
use super::pollers::Pollers;
use super::verbs::{
    CmChannel, CmEvent, CmKind, Endpoint, Notify, Parameters, Remote, Reserved, Rings, VerbsError,
};
use crate::transport::stream::Stream;
use crate::wire::Protocol;

/// Free ports that are tried, where rdma_cm chooses.
const PORTS: u32 = 16;
/// Requests that may wait to be taken.
const BACKLOG: i32 = 128;
/// Lines that are gone are looked for no more seldom than this. All else wakes the thread, or has a deadline.
const LOOK: Duration = Duration::from_secs(2);
/// After a failure that may last.
const PAUSE: Duration = Duration::from_millis(100);
const OVER: &str = "RDMA is shut down";
/// Longest wait for a connection that was taken to come about.
const ACCEPTING: Duration = Duration::from_secs(5);

/// What is served on a line that somebody has asked for.
type Accept = Box<dyn FnMut(&Arc<Line>, Option<SocketAddr>) -> Option<Box<dyn Stream>> + Send>;
/// What is served on a line that was asked for, or what becomes of that there is none.
type Then = Box<dyn FnOnce(Result<&Arc<Line>, String>) -> Option<Box<dyn Stream>> + Send>;

enum Command {
    Listen { at: SocketAddr, accept: Accept, answer: Sender<Result<SocketAddr, VerbsError>> },
    Connect(Wish),
}

/// A connection that somebody wants.
struct Wish {
    to: SocketAddr,
    deadline: Instant,
    /// Which queue's.
    number: usize,
    /// How often it may be asked for from another port.
    ports: u32,
    then: Then,
}

/// A connection, as far as it has got.
enum State {
    Listening { _endpoint: Endpoint, accept: Accept },
    Resolving { endpoint: Endpoint, wish: Wish },
    Connecting { line: Arc<Line>, wish: Wish },
    Accepting { line: Arc<Line>, deadline: Instant, number: usize, listener: u64 },
    Up(std::sync::Weak<Line>),
}

impl Wish {
    fn fail(self, why: impl std::fmt::Display) {
        drop((self.then)(Err(format!("{}: {why}", self.to))));
    }
}

impl State {
    fn deadline(&self) -> Option<Instant> {
        match self {
            State::Resolving { wish, .. } | State::Connecting { wish, .. } => Some(wish.deadline),
            State::Accepting { deadline, .. } => Some(*deadline),
            State::Listening { .. } | State::Up(_) => None,
        }
    }
}

/// A device with all of its lines.
pub struct Fabric {
    device: Arc<Device>,
    pollers: Arc<Pollers>,
    /// `None` when nobody hears them any more.
    commands: Arc<Mutex<Option<Sender<Command>>>>,
    wake: Arc<EventFd>,
    over: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
    lines: Arc<AtomicUsize>,
}

impl Fabric {
    /// Opens the device and starts its threads.
    ///
    /// # Errors
    /// [`VerbsError`], which says what is missing.
    pub fn open(options: &RdmaOptions) -> Result<Arc<Fabric>, VerbsError> {
        Fabric::over(Device::open(options)?)
    }

    /// The same over a device that is open.
    ///
    /// # Errors
    /// [`VerbsError`], which says what is missing.
    pub fn over(device: Arc<Device>) -> Result<Arc<Fabric>, VerbsError> {
        let start = |errno| VerbsError::Call { doing: "starting threads for RDMA", errno };
        let flags = device.notify() == Notify::Flag;
        let pollers =
            Arc::new(Pollers::start(device.pollers(), device.options().polling, flags).map_err(start)?);
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let wake = Arc::new(wake.map_err(start)?);
        let (sender, heard) = channel();
        let commands = Arc::new(Mutex::new(Some(sender)));
        let over = Arc::new(AtomicBool::new(false));
        let lines = Arc::new(AtomicUsize::new(0));
        let manager = Manager {
            device: Arc::clone(&device),
            pollers: Arc::clone(&pollers),
            channel: CmChannel::new()?,
            heard,
            commands: Arc::clone(&commands),
            wake: Arc::clone(&wake),
            over: Arc::clone(&over),
            states: HashMap::new(),
            next_token: 1,
            next_poller: 0,
            lines: Arc::clone(&lines),
            is_there: true,
        };
        let thread = std::thread::Builder::new().name("rdma-cm".into()).spawn(move || manager.run());
        let thread =
            thread.map_err(|error| start(Errno::from_raw(error.raw_os_error().unwrap_or(libc::EAGAIN))))?;
        let thread = Mutex::new(Some(thread));
        Ok(Arc::new(Fabric { device, pollers, commands, wake, over, thread, lines }))
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Connections that there are.
    pub fn lines(&self) -> usize {
        self.lines.load(Ordering::Relaxed)
    }

    fn command(&self, command: Command) {
        let refused = match &*self.commands.lock() {
            Some(sender) => sender.send(command).err().map(|unsent| unsent.0),
            None => Some(command),
        };
        match refused {
            Some(command) => refuse(command),
            None => drop(self.wake.write(1)),
        }
    }

    /// Takes connections: `accept` says what is served on each; `None` hangs up. The address, with the port that was found.
    ///
    /// # Errors
    /// [`VerbsError`].
    pub fn listen(
        &self,
        at: SocketAddr,
        accept: impl FnMut(&Arc<Line>, Option<SocketAddr>) -> Option<Box<dyn Stream>> + Send + 'static,
    ) -> Result<SocketAddr, VerbsError> {
        const PATIENCE: Duration = Duration::from_secs(5);
        let (answer, answered) = channel();
        self.command(Command::Listen { at, accept: Box::new(accept), answer });
        answered.recv_timeout(PATIENCE).map_err(|_| VerbsError::Broken("RDMA does not answer".into()))?
    }

    /// Asks for a connection. `then` is called once, on a thread that must not be blocked: it says what is served on the
    /// line, or hears why there is none, before `deadline` is long over. `number` says which completion queue's thread
    /// serves it.
    pub fn connect(
        &self,
        to: SocketAddr,
        deadline: Instant,
        number: usize,
        then: impl FnOnce(Result<&Arc<Line>, String>) -> Option<Box<dyn Stream>> + Send + 'static,
    ) {
        self.command(Command::Connect(Wish { to, deadline, number, ports: PORTS, then: Box::new(then) }));
    }

    /// Ends all connections, and the threads. On one of them, nobody waits for it.
    pub fn shut_down(&self, patience: Duration) {
        self.over.store(true, Ordering::Release);
        let _ = self.wake.write(1);
        if let Err(error) = self.pollers.shut_down(patience) {
            tracing::warn!(%error, "RDMA");
        }
        let Some(thread) = self.thread.lock().take() else { return };
        if thread.thread().id() == std::thread::current().id() {
            return;
        }
        let deadline = Instant::now() + patience;
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        if !thread.is_finished() {
            tracing::error!("the thread of RDMA connections does not end");
        } else if thread.join().is_err() {
            tracing::error!("the thread of RDMA connections panicked");
        }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        self.shut_down(PATIENCE);
    }
}

struct Manager {
    device: Arc<Device>,
    pollers: Arc<Pollers>,
    channel: Arc<CmChannel>,
    heard: Receiver<Command>,
    commands: Arc<Mutex<Option<Sender<Command>>>>,
    wake: Arc<EventFd>,
    over: Arc<AtomicBool>,
    states: HashMap<u64, State>,
    next_token: u64,
    next_poller: usize,
    lines: Arc<AtomicUsize>,
    /// The device has not been removed.
    is_there: bool,
}

impl Manager {
    fn run(mut self) {
        while !self.over.load(Ordering::Acquire) {
            self.rest();
            while let Ok(command) = self.heard.try_recv() {
                self.obey(command);
            }
            self.device.hear_trouble();
            loop {
                match self.channel.next() {
                    Ok(Some(event)) => self.hear(event),
                    Ok(None) => break,
                    Err(error) => {
                        tracing::error!(%error, "no more RDMA connections can come about");
                        std::thread::sleep(PAUSE);
                        break;
                    }
                }
            }
            self.look(Instant::now());
        }
        let all: Vec<State> = self.states.drain().map(|(_, state)| state).collect();
        all.into_iter().for_each(|state| self.give_up(state, OVER));
        drop(self.commands.lock().take());
        while let Ok(command) = self.heard.try_recv() {
            refuse(command);
        }
    }

    fn rest(&mut self) {
        let device = Arc::clone(&self.device);
        let mut ready = [self.channel.as_fd(), self.wake.as_fd(), device.trouble()]
            .map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        // A device that is gone would wake it for ever.
        let watched = if self.is_there { &mut ready[..] } else { &mut ready[..2] };
        // Rounded up, so that a deadline is over when it wakes.
        let left = self.states.values().filter_map(State::deadline).min().map_or(LOOK, |at| {
            at.saturating_duration_since(Instant::now()).min(LOOK) + Duration::from_millis(1)
        });
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        if let Err(errno) = poll(watched, timeout)
            && errno != Errno::EINTR
        {
            tracing::error!(%errno, "RDMA connections cannot be waited for");
            std::thread::sleep(PAUSE);
        }
        let gone = PollFlags::POLLERR | PollFlags::POLLHUP | PollFlags::POLLNVAL;
        if self.is_there && ready[2].revents().is_some_and(|seen| seen.intersects(gone)) {
            tracing::error!(
                device = device.name(),
                "the RDMA device is gone: no connections over it until a restart"
            );
            self.is_there = false;
        }
        let _ = self.wake.read();
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    fn obey(&mut self, command: Command) {
        let token = self.token();
        match command {
            Command::Listen { at, accept, answer } => {
                let made = self.listen(at, token).map(|(endpoint, at)| {
                    self.states.insert(token, State::Listening { _endpoint: endpoint, accept });
                    at
                });
                if answer.send(made).is_err() {
                    // Whoever asked has given up, and knows nothing of it.
                    self.states.remove(&token);
                }
            }
            Command::Connect(wish) => self.begin(token, wish),
        }
    }

    fn begin(&mut self, token: u64, wish: Wish) {
        let begun = Endpoint::new(&self.channel, token).and_then(|mut endpoint| {
            let options = self.device.options();
            if let Some(class) = options.traffic_class {
                endpoint.set_traffic_class(class)?;
            }
            endpoint.must_come_from(options.gid_index);
            let from = self.device.source().map(|address| SocketAddr::new(address, 0));
            endpoint.resolve_address(from, wish.to, millis(wish.deadline))?;
            Ok(endpoint)
        });
        match begun {
            Ok(endpoint) => drop(self.states.insert(token, State::Resolving { endpoint, wish })),
            Err(error) => wish.fail(&error),
        }
    }

    /// What listens. A port that rdma_cm chooses may be one that a TCP socket has, which iWARP cannot have, too: then
    /// another one is tried.
    fn listen(&self, at: SocketAddr, token: u64) -> Result<(Endpoint, SocketAddr), VerbsError> {
        let tries = if at.port() == 0 { PORTS } else { 1 };
        let mut outcome = Err(VerbsError::Broken("it was not tried".into()));
        for _ in 0..tries {
            outcome = Endpoint::new(&self.channel, token).and_then(|endpoint| {
                let at = endpoint.listen(at, BACKLOG)?;
                Ok((endpoint, at))
            });
            if !matches!(outcome, Err(VerbsError::Call { errno: Errno::EADDRINUSE, .. })) {
                break;
            }
        }
        outcome
    }

    fn hear(&mut self, event: CmEvent) {
        let CmEvent { token, kind, private } = event;
        tracing::debug!(token, ?kind, "an RDMA connection");
        match kind {
            CmKind::Request(endpoint) => self.requested(token, endpoint, &private),
            CmKind::AddressResolved => self.resolved(token),
            CmKind::RouteResolved => self.routed(token),
            CmKind::Answered => self.answered(token, &private),
            CmKind::Established => self.established(token, &private),
            CmKind::Rejected => {
                let why = match Offer::decode(&private, self.device.notify()) {
                    Err(strange @ (Strange::Protocol { .. } | Strange::Notify { .. } | Strange::Mtu(_))) => {
                        format!("refused by the shard: {strange}")
                    }
                    // They understand each other: it is short of something.
                    Ok(_) => format!("refused by the shard: {}", Lack::decode(&private)),
                    Err(Strange::Magic) => "refused: nobody listens there for RDMA".to_owned(),
                };
                self.failed(token, &why);
            }
            CmKind::Failed(why) => self.failed(token, &why),
            CmKind::Disconnected => self.failed(token, "closed by the peer"),
            CmKind::DeviceRemoved => self.failed(token, "the RDMA device is gone"),
            CmKind::Other => {}
        }
    }

    fn failed(&mut self, token: u64, why: &str) {
        tracing::debug!(token, why, known = self.states.contains_key(&token), "no RDMA connection any more");
        match self.states.remove(&token) {
            Some(State::Up(line)) => {
                self.lines.fetch_sub(1, Ordering::Relaxed);
                if let Some(line) = line.upgrade() {
                    line.hang_up();
                }
            }
            Some(listening @ State::Listening { .. }) => {
                tracing::error!(why, "RDMA connections are not taken any more");
                end(listening, why);
            }
            Some(state) => self.give_up(state, why),
            None => {}
        }
    }

    /// Ends what did not come about.
    fn give_up(&self, state: State, why: &str) {
        match &state {
            State::Connecting { line, wish } => self.pollers.lines(wish.number).leave(line),
            State::Accepting { line, number, .. } => self.pollers.lines(*number).leave(line),
            State::Listening { .. } | State::Resolving { .. } | State::Up(_) => {}
        }
        end(state, why);
    }

    fn resolved(&mut self, token: u64) {
        let Some(State::Resolving { endpoint, wish }) = self.states.get(&token) else { return };
        let outcome = match endpoint.context() {
            Some(_) if self.is_by(endpoint) => {
                endpoint.resolve_route(millis(wish.deadline)).map_err(|error| error.to_string())
            }
            Some(context) => Err(format!(
                "the way leads over {} port {}, and {} is used (--rdma-device names another one)",
                context.name(),
                endpoint.port(),
                self.device.name()
            )),
            None => Err("no device leads there".to_owned()),
        };
        if let Err(why) = outcome {
            self.failed(token, &why);
        }
    }

    fn routed(&mut self, token: u64) {
        let Some(State::Resolving { endpoint, wish }) = self.states.remove(&token) else { return };
        let made = self.device.rings().and_then(|rings| {
            let reserved = self.device.reserve(wish.number)?;
            self.line(endpoint, rings, (wish.number, reserved)).map_err(|(error, _)| error)
        });
        let asked = made.and_then(|line| {
            let parameters = self.parameters(&line, self.device.options().mtu);
            line.endpoint()
                .connect(&parameters)
                .inspect_err(|_| self.pollers.lines(wish.number).leave(&line))?;
            Ok(line)
        });
        match asked {
            Ok(line) => drop(self.states.insert(token, State::Connecting { line, wish })),
            // The port that rdma_cm has chosen is a TCP socket's, which iWARP cannot have, too.
            Err(VerbsError::Call { errno: Errno::EADDRINUSE, .. }) if wish.ports > 1 => {
                let token = self.token();
                self.begin(token, Wish { ports: wish.ports - 1, ..wish });
            }
            Err(error) => wish.fail(&error),
        }
    }

    /// Room for one more on the queue whose turn it is, or the next that has some.
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

    /// Whether a connection goes by this device, and by its port, if one was asked for.
    fn is_by(&self, endpoint: &Endpoint) -> bool {
        let port = self.device.options().port;
        endpoint.context() == Some(self.device.context()) && port.is_none_or(|port| port == endpoint.port())
    }

    /// A line whose news are heard, by the queue of that number.
    #[allow(clippy::result_large_err)] // Seldom.
    fn line(
        &self,
        endpoint: Endpoint,
        rings: Rings,
        (number, reserved): (usize, Reserved),
    ) -> Result<Arc<Line>, (VerbsError, Endpoint)> {
        let line = Line::new(&self.device, endpoint, rings, reserved)?;
        self.pollers.lines(number).enter(&line);
        Ok(line)
    }

    fn parameters(&self, line: &Line, mtu: Option<Mtu>) -> Parameters {
        let RdmaOptions { reads, retries, .. } = *self.device.options();
        Parameters { private: Offer::of(line, mtu).encode().to_vec(), reads, retries }
    }

    fn requested(&mut self, listener: u64, mut endpoint: Endpoint, private: &[u8]) {
        let token = self.token();
        endpoint.rename(token);
        let peer = endpoint.peer().map_or_else(|| "an RDMA peer".to_owned(), |peer| peer.to_string());
        let offer = match Offer::decode(private, self.device.notify()) {
            Ok(offer) => offer,
            Err(strange) => {
                return self.turn_away(&endpoint, &peer, &strange, Lack::Other);
            }
        };
        if !self.is_by(&endpoint) {
            let by = endpoint.context().map_or_else(|| "no device".to_owned(), |context| context.name());
            let why =
                format!("it comes by {by} port {}, and {} is used", endpoint.port(), self.device.name());
            return self.turn_away(&endpoint, &peer, &why, Lack::Device);
        }
        let rings = match self.device.rings() {
            Ok(rings) => rings,
            Err(error) => return self.turn_away(&endpoint, &peer, &error, Lack::Rings),
        };
        let (number, reserved) = match self.reserve() {
            Ok(found) => found,
            Err(error) => return self.turn_away(&endpoint, &peer, &error, Lack::Completions),
        };
        let line = match self.line(endpoint, rings, (number, reserved)) {
            Ok(line) => line,
            Err((error, endpoint)) => return self.turn_away(&endpoint, &peer, &error, Lack::Other),
        };
        line.invited(offer.ring);
        let mtu = shorter(offer.mtu, self.device.options().mtu);
        if let Err(error) = line.endpoint().accept(&self.parameters(&line, mtu), mtu) {
            self.pollers.lines(number).leave(&line);
            return self.turn_away(line.endpoint(), &peer, &error, Lack::Other);
        }
        let deadline = Instant::now() + ACCEPTING;
        self.states.insert(token, State::Accepting { line, deadline, number, listener });
    }

    /// Refuses a connection, and says what this end would have taken, and what it lacks.
    fn turn_away(&self, endpoint: &Endpoint, peer: &str, why: &dyn std::fmt::Display, lack: Lack) {
        tracing::warn!(peer, "turned away: {why}");
        let ring = Remote { address: 0, key: 0 };
        let (protocol, notify) = (Protocol::NEWEST.number(), self.device.notify());
        let mut own = Offer { protocol, notify, mtu: self.device.options().mtu, ring }.encode();
        own[12..16].copy_from_slice(&lack.code().to_le_bytes());
        if let Err(error) = endpoint.reject(&own) {
            tracing::debug!(%error, peer, "it was not told so");
        }
    }

    /// The peer has accepted, and says what is used.
    fn answered(&mut self, token: u64, private: &[u8]) {
        let Some(State::Connecting { line, .. }) = self.states.get(&token) else { return };
        // What else is wrong with its answer is told once the connection is there, and ended.
        let agreed = Offer::decode(private, self.device.notify()).ok().and_then(|offer| offer.mtu);
        match line.endpoint().establish(shorter(agreed, self.device.options().mtu)) {
            Ok(()) => self.established(token, private),
            Err(error) => self.failed(token, &error.to_string()),
        }
    }

    fn established(&mut self, token: u64, private: &[u8]) {
        match self.states.remove(&token) {
            Some(State::Connecting { line, wish: Wish { to, number, then, .. } }) => {
                match Offer::decode(private, self.device.notify()) {
                    Ok(offer) => {
                        line.invited(offer.ring);
                        match then(Ok(&line)) {
                            Some(stream) => self.serve(token, &line, number, stream),
                            None => self.pollers.lines(number).leave(&line),
                        }
                    }
                    Err(strange) => {
                        self.pollers.lines(number).leave(&line);
                        drop(then(Err(format!("{to}: {strange}"))));
                    }
                }
            }
            Some(State::Accepting { line, number, listener, .. }) => {
                let peer = line.endpoint().peer();
                let stream = match self.states.get_mut(&listener) {
                    Some(State::Listening { accept, .. }) => accept(&line, peer),
                    _ => None,
                };
                match stream {
                    Some(stream) => self.serve(token, &line, number, stream),
                    None => self.pollers.lines(number).leave(&line),
                }
            }
            Some(other) => {
                self.states.insert(token, other);
            }
            None => {}
        }
    }

    fn serve(&mut self, token: u64, line: &Arc<Line>, number: usize, stream: Box<dyn Stream>) {
        match self.pollers.serve(number, line, stream) {
            Ok(_) => {
                self.lines.fetch_add(1, Ordering::Relaxed);
                self.states.insert(token, State::Up(Arc::downgrade(line)));
            }
            Err(error) => tracing::warn!(%error, "an RDMA connection is not served"),
        }
    }

    /// Ends what takes too long, and forgets what is gone.
    fn look(&mut self, now: Instant) {
        let late = |state: &State| match state {
            State::Up(line) => line.strong_count() == 0,
            other => other.deadline().is_some_and(|deadline| now >= deadline),
        };
        let late: Vec<u64> =
            self.states.iter().filter(|(_, state)| late(state)).map(|(&token, _)| token).collect();
        for token in late {
            self.failed(token, "no answer before the deadline");
        }
    }
}

/// Tells whoever asks that nobody hears.
fn refuse(command: Command) {
    match command {
        Command::Listen { answer, .. } => drop(answer.send(Err(VerbsError::Broken(OVER.into())))),
        Command::Connect(wish) => wish.fail(OVER),
    }
}

/// Tells whoever waits for a connection that there is none.
fn end(state: State, why: &str) {
    match state {
        State::Resolving { wish, .. } | State::Connecting { wish, .. } => wish.fail(why),
        State::Accepting { .. } | State::Listening { .. } | State::Up(_) => {}
    }
}

/// What suits both.
fn shorter(one: Option<Mtu>, other: Option<Mtu>) -> Option<Mtu> {
    one.into_iter().chain(other).min()
}

fn millis(deadline: Instant) -> i32 {
    let left = deadline.saturating_duration_since(Instant::now()).as_millis().max(1);
    i32::try_from(left).unwrap_or(i32::MAX)
}
