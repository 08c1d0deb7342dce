//! The thread that makes connections. It handles requests of other threads, events of rdma_cm, and errors of the
//! device.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::maker::{Maker, shorter};
use super::requests::{Command, OVER, Shared, Wish};
use super::state::State;
use crate::offer::{Shortage, Strange};
use crate::queue_pair::QueuePair;
use crate::verbs::{CmEvent, CmId, CmKind, VerbsError};
use modelio_base::transport::stream::Stream;

/// The interval for checks of queue pairs that may be gone. Everything else wakes the thread or has a deadline.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The pause after a failure that may last.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The longest wait for an accepted connection to be established.
const ACCEPTING: Duration = Duration::from_secs(5);

/// The thread that makes connections.
pub(super) struct Manager {
    maker: Maker,
    commands: Receiver<Command>,
    shared: Shared,
    states: HashMap<u64, State>,
    next_token: u64,
    /// Whether the device still exists.
    is_there: bool,
}

impl Manager {
    /// A manager that takes commands from `commands`.
    pub(super) fn new(maker: Maker, shared: &Shared, commands: Receiver<Command>) -> Manager {
        Manager {
            maker,
            commands,
            shared: shared.clone(),
            states: HashMap::new(),
            next_token: 1,
            is_there: true,
        }
    }

    /// Runs until the endpoint is shut down.
    pub(super) fn run(mut self) {
        while !self.shared.over.load(Ordering::Acquire) {
            self.wait();
            while let Ok(command) = self.commands.try_recv() {
                self.obey(command);
            }
            self.maker.device.log_device_events();
            loop {
                match self.maker.channel().next() {
                    Ok(Some(event)) => self.on_event(event),
                    Ok(None) => break,
                    Err(error) => {
                        tracing::error!(%error, "no more RDMA connections can be made");
                        std::thread::sleep(RETRY_PAUSE);
                        break;
                    }
                }
            }
            self.check(Instant::now());
        }
        let all: Vec<State> = self.states.drain().map(|(_, state)| state).collect();
        all.into_iter().for_each(|state| self.give_up(state, OVER));
        drop(self.shared.commands.lock().take());
        while let Ok(command) = self.commands.try_recv() {
            command.refuse();
        }
    }

    fn wait(&mut self) {
        let (device, channel) = (Arc::clone(&self.maker.device), Arc::clone(self.maker.channel()));
        let mut ready = [channel.as_fd(), self.shared.wake.as_fd(), device.trouble()]
            .map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        // A removed device would wake the thread all the time.
        let watched = if self.is_there { &mut ready[..] } else { &mut ready[..2] };
        // The timeout is rounded up, so that the deadline is over when the thread wakes.
        let left = self.states.values().filter_map(State::deadline).min().map_or(CHECK_INTERVAL, |at| {
            at.saturating_duration_since(Instant::now()).min(CHECK_INTERVAL) + Duration::from_millis(1)
        });
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        if let Err(errno) = poll(watched, timeout)
            && errno != Errno::EINTR
        {
            tracing::error!(%errno, "RDMA connections cannot be waited for");
            std::thread::sleep(RETRY_PAUSE);
        }
        let gone = PollFlags::POLLERR | PollFlags::POLLHUP | PollFlags::POLLNVAL;
        if self.is_there && ready[2].revents().is_some_and(|seen| seen.intersects(gone)) {
            tracing::error!(
                device = device.name(),
                "the RDMA device is gone: no connections over it until a restart"
            );
            self.is_there = false;
        }
        let _ = self.shared.wake.read();
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    fn obey(&mut self, command: Command) {
        let token = self.token();
        match command {
            Command::Listen { at, accept, answer } => {
                let made = self.maker.listen(at, token).map(|(cm_id, at)| {
                    self.states.insert(token, State::Listening { _cm_id: cm_id, accept });
                    at
                });
                if answer.send(made).is_err() {
                    // The caller has given up, and does not know the connection.
                    self.states.remove(&token);
                }
            }
            Command::Connect(wish) => self.begin(token, wish),
        }
    }

    fn begin(&mut self, token: u64, wish: Wish) {
        match self.maker.resolve(token, wish.to, wish.deadline) {
            Ok(cm_id) => drop(self.states.insert(token, State::Resolving { cm_id, wish })),
            Err(error) => wish.fail(&error),
        }
    }

    fn on_event(&mut self, event: CmEvent) {
        let CmEvent { token, kind, private } = event;
        tracing::debug!(token, ?kind, "an RDMA connection");
        match kind {
            CmKind::Request(cm_id) => self.requested(token, cm_id, &private),
            CmKind::AddressResolved => self.resolved(token),
            CmKind::RouteResolved => self.routed(token),
            CmKind::Answered => self.answered(token, &private),
            CmKind::Established => self.established(token, &private),
            CmKind::Rejected => {
                let why = match self.maker.understood(&private) {
                    Err(strange @ (Strange::Protocol { .. } | Strange::Notify { .. } | Strange::Mtu(_))) => {
                        format!("refused by the shard: {strange}")
                    }
                    // Both ends understand each other, and a resource is missing at the shard.
                    Ok(_) => format!("refused by the shard: {}", Shortage::decode(&private)),
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
            Some(State::Up(queue_pair)) => {
                self.shared.connections.fetch_sub(1, Ordering::Relaxed);
                if let Some(queue_pair) = queue_pair.upgrade() {
                    queue_pair.hang_up();
                }
            }
            Some(listening @ State::Listening { .. }) => {
                tracing::error!(why, "RDMA connections are not taken any more");
                listening.end(why);
            }
            Some(state) => self.give_up(state, why),
            None => {}
        }
    }

    /// Gives up a connection that could not be made.
    fn give_up(&self, state: State, why: &str) {
        match &state {
            State::Connecting { queue_pair, wish } => self.maker.leave(queue_pair, wish.number),
            State::Accepting { queue_pair, number, .. } => self.maker.leave(queue_pair, *number),
            State::Listening { .. } | State::Resolving { .. } | State::Up(_) => {}
        }
        state.end(why);
    }

    fn resolved(&mut self, token: u64) {
        let Some(State::Resolving { cm_id, wish }) = self.states.get(&token) else { return };
        let outcome = self.maker.resolve_route(cm_id, wish.deadline);
        if let Err(why) = outcome {
            self.failed(token, &why);
        }
    }

    /// The route is known, so the thread connects to the peer.
    fn routed(&mut self, token: u64) {
        let Some(State::Resolving { cm_id, wish }) = self.states.remove(&token) else { return };
        match self.maker.connect(cm_id, wish.number) {
            Ok(queue_pair) => drop(self.states.insert(token, State::Connecting { queue_pair, wish })),
            // rdma_cm has chosen a port that a TCP socket has, which iWARP cannot use.
            Err(VerbsError::Call { errno: Errno::EADDRINUSE, .. }) if wish.ports > 1 => {
                let token = self.token();
                self.begin(token, Wish { ports: wish.ports - 1, ..wish });
            }
            Err(error) => wish.fail(&error),
        }
    }

    /// A peer wants to connect.
    fn requested(&mut self, listener: u64, mut cm_id: CmId, private: &[u8]) {
        let token = self.token();
        cm_id.rename(token);
        if let Some((queue_pair, number)) = self.maker.accept(cm_id, private) {
            let deadline = Instant::now() + ACCEPTING;
            self.states.insert(token, State::Accepting { queue_pair, deadline, number, listener });
        }
    }

    /// The peer has accepted, and has sent its offer.
    fn answered(&mut self, token: u64, private: &[u8]) {
        let Some(State::Connecting { queue_pair, .. }) = self.states.get(&token) else { return };
        // Other faults of the offer are reported once the connection is established, and end it.
        let agreed = self.maker.understood(private).ok().and_then(|offer| offer.mtu);
        match queue_pair.cm_id().establish(shorter(agreed, self.maker.device.options().mtu)) {
            Ok(()) => self.established(token, private),
            Err(error) => self.failed(token, &error.to_string()),
        }
    }

    fn established(&mut self, token: u64, private: &[u8]) {
        match self.states.remove(&token) {
            Some(State::Connecting { queue_pair, wish: Wish { to, number, then, .. } }) => {
                match self.maker.understood(private) {
                    Ok(offer) => {
                        queue_pair.invited(offer.ring);
                        match then(Ok(&queue_pair)) {
                            Some(stream) => self.serve(token, &queue_pair, number, stream),
                            None => self.maker.leave(&queue_pair, number),
                        }
                    }
                    Err(strange) => {
                        self.maker.leave(&queue_pair, number);
                        drop(then(Err(format!("{to}: {strange}"))));
                    }
                }
            }
            Some(State::Accepting { queue_pair, number, listener, .. }) => {
                let peer = queue_pair.cm_id().peer();
                let stream = match self.states.get_mut(&listener) {
                    Some(State::Listening { accept, .. }) => accept(&queue_pair, peer),
                    _ => None,
                };
                match stream {
                    Some(stream) => self.serve(token, &queue_pair, number, stream),
                    None => self.maker.leave(&queue_pair, number),
                }
            }
            Some(other) => {
                self.states.insert(token, other);
            }
            None => {}
        }
    }

    fn serve(&mut self, token: u64, queue_pair: &Arc<QueuePair>, number: usize, stream: Box<dyn Stream>) {
        match self.maker.pollers.serve(number, queue_pair, stream) {
            Ok(_) => {
                self.shared.connections.fetch_add(1, Ordering::Relaxed);
                self.states.insert(token, State::Up(Arc::downgrade(queue_pair)));
            }
            Err(error) => tracing::warn!(%error, "an RDMA connection is not served"),
        }
    }

    /// Ends connections that take too long, and forgets those that are gone.
    fn check(&mut self, now: Instant) {
        let late: Vec<u64> =
            self.states.iter().filter(|(_, state)| state.is_late(now)).map(|(&token, _)| token).collect();
        for token in late {
            self.failed(token, "no answer before the deadline");
        }
    }
}
