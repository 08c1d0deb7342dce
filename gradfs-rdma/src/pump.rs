//! Moving the bytes of all queue pairs of one completion queue, to and from their rings.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{EpollEvent, EpollFlags};

use super::assigned::{Assigned, Expected};
use super::options::Polling;
use super::queue_pair::QueuePair;
use super::served::Served;
use super::verbs::{Completion as News, Poller, VerbsError};
use modelio_base::transport::reactor::{Completion, Driver, Phase, Port, Sleeper, Table, ThreadState};
use modelio_base::transport::stream::Token;

const QUEUE: u64 = u64::MAX - 1;
/// The interval for checks of flags, which make no event.
const CHECK_INTERVAL: Duration = Duration::from_micros(200);
/// After this long without a completion, the checks become less frequent.
const BUSY: Duration = Duration::from_millis(20);

/// The driver of one completion queue.
pub(super) struct Pump {
    poller: Arc<Poller>,
    assigned: Arc<Assigned>,
    expected: Arc<Expected>,
    served: HashMap<u32, Served>,
    by_token: HashMap<Token, u32>,
    sleeper: Sleeper,
    thread: Arc<ThreadState>,
    polling: Polling,
    /// Whether peers write flags.
    flags: bool,
    news: Vec<News>,
    /// The time of the last completion.
    last: Instant,
    /// The queue has failed.
    lost: bool,
}

impl Pump {
    /// A driver of `poller`'s queue pairs, those in `assigned` and `expected`. With `flags`, peers write flags.
    pub(crate) fn new(
        poller: &Arc<Poller>,
        (assigned, expected): (Arc<Assigned>, Arc<Expected>),
        thread: Arc<ThreadState>,
        polling: Polling,
        flags: bool,
    ) -> Result<Pump, Errno> {
        let sleeper = Sleeper::new(Arc::clone(&thread))?;
        sleeper.epoll.add(poller.as_ref().as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, QUEUE))?;
        Ok(Pump {
            poller: Arc::clone(poller),
            assigned,
            expected,
            served: HashMap::new(),
            by_token: HashMap::new(),
            sleeper,
            thread,
            polling,
            flags,
            news: Vec::with_capacity(64),
            last: Instant::now(),
            lost: false,
        })
    }

    /// The queue pair of a connection. It becomes known when it is first used.
    fn bind(&mut self, token: Token, port: &Port) -> Result<u32, Errno> {
        if self.lost {
            return Err(Errno::EIO);
        }
        if let Some(&number) = self.by_token.get(&token) {
            return Ok(number);
        }
        let (queue_pair, said) = self.expected.lock().remove(&port.fd.as_raw_fd()).ok_or(Errno::ENOTCONN)?;
        let number = queue_pair.number();
        self.sleeper.epoll.add(&said, EpollEvent::new(EpollFlags::EPOLLRDHUP, u64::from(number)))?;
        self.by_token.insert(token, number);
        self.served.insert(number, Served::new(queue_pair, token, said));
        Ok(number)
    }

    /// The queue has failed: all connections on it end, and later ones end at once. The process's other queues go on.
    fn lose(&mut self, error: &VerbsError) {
        if std::mem::replace(&mut self.lost, true) {
            return;
        }
        tracing::error!(%error, "a completion queue is lost: its connections end, and new ones on it until a restart");
        // Its events are of no use any more.
        let _ = self.sleeper.epoll.delete(self.poller.as_ref().as_fd());
        for served in self.served.values() {
            served.queue_pair.break_off(format!("a completion queue is lost: {error}"));
        }
    }

    /// Takes the completions of the queue. True if there were some.
    fn poll_completions(&mut self) -> bool {
        let mut any = false;
        self.served.values_mut().for_each(|served| served.gone = served.queue_pair.is_gone());
        if self.lost {
            return any;
        }
        loop {
            let more = match self.poller.poll(&mut self.news) {
                Ok(more) => more,
                Err(error) => {
                    self.lose(&error);
                    return true;
                }
            };
            any |= !self.news.is_empty();
            for news in self.news.drain(..) {
                if news.is_receive()
                    && let Err(error) = self.poller.wait_for_another()
                {
                    tracing::error!(%error, "RDMA cannot post a receive again: one message fewer can come at once");
                }
                let Some(queue_pair) = news.pair().and_then(|pair| self.assigned.get(pair)) else { continue };
                match queue_pair.complete(news) {
                    Ok(true) => {
                        if let Some(connection) = queue_pair.connection() {
                            connection.wake();
                        }
                    }
                    Ok(false) => {}
                    Err(why) => queue_pair.break_off(why),
                }
            }
            if !more {
                break;
            }
        }
        if self.flags {
            let broken: Vec<(Arc<QueuePair>, String)> = self
                .served
                .values()
                .filter_map(|served| Some((Arc::clone(&served.queue_pair), served.queue_pair.check().err()?)))
                .collect();
            for (queue_pair, why) in broken {
                queue_pair.break_off(why);
            }
        }
        if any {
            self.last = Instant::now();
        }
        any
    }

    fn progress(&mut self, table: &mut Table, done: &mut Vec<Completion>) {
        for served in self.served.values_mut() {
            if let Some(entry) = table.get(served.token) {
                served.progress(&mut entry.port, done);
            }
        }
        if !done.is_empty() {
            self.last = Instant::now();
        }
    }

    fn possible(&self) -> bool {
        self.served.values().any(Served::is_possible)
    }

    fn sleep(&mut self, timeout: Duration) -> Result<(), Errno> {
        let mut events = [EpollEvent::empty(); 16];
        let count = self.sleeper.sleep(&mut events, timeout)?;
        for event in &events[..count] {
            match event.data() {
                Sleeper::WOKEN => {}
                QUEUE if event.events().intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP) => {
                    self.lose(&VerbsError::Broken("its device is gone".into()));
                }
                QUEUE => self.poller.disarm(),
                number => self.said(number as u32),
            }
        }
        Ok(())
    }

    /// A stream has sent everything.
    fn said(&mut self, number: u32) {
        let Some(served) = self.served.get_mut(&number) else { return };
        if served.ends() {
            // The event would repeat as long as the descriptor is watched.
            let _ = self.sleeper.epoll.delete(&served.said);
        }
    }
}

impl Driver for Pump {
    fn receive(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        let number = self.bind(token, port)?;
        if let Some(served) = self.served.get_mut(&number) {
            served.receiving = true;
        }
        port.receiving = Phase::Outstanding;
        Ok(())
    }

    fn send(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        let number = self.bind(token, port)?;
        if let Some(served) = self.served.get_mut(&number) {
            served.sending = true;
        }
        port.sending = Phase::Outstanding;
        Ok(())
    }

    fn cancel(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        (port.receiving, port.sending) = (Phase::Idle, Phase::Idle);
        // The connection may not be bound yet.
        if let Some((queue_pair, _)) = self.expected.lock().remove(&port.fd.as_raw_fd()) {
            self.assigned.leave(&queue_pair);
            queue_pair.end();
        }
        if let Some(served) = self.by_token.remove(&token).and_then(|number| self.served.remove(&number)) {
            let _ = self.sleeper.epoll.delete(&served.said);
            self.assigned.leave(&served.queue_pair);
            served.queue_pair.end();
        }
        Ok(())
    }

    fn ready(&self) -> bool {
        self.possible()
    }

    fn wait(
        &mut self,
        table: &mut Table,
        done: &mut Vec<Completion>,
        timeout: Duration,
    ) -> Result<(), Errno> {
        self.poll_completions();
        self.progress(table, done);
        if !done.is_empty() || timeout.is_zero() {
            // Finished streams are checked now and then, even while there is always work.
            return if self.served.is_empty() { Ok(()) } else { self.sleep(Duration::ZERO) };
        }
        let until = Instant::now() + timeout;
        let spins = match self.polling {
            Polling::Busy => timeout,
            Polling::Adaptive(time) => {
                (self.last + time).saturating_duration_since(Instant::now()).min(timeout)
            }
            Polling::Event => Duration::ZERO,
        };
        let spun = Instant::now() + spins;
        let mut slept = Instant::now();
        loop {
            let now = Instant::now();
            if now >= spun || self.poll_completions() || self.possible() || self.thread.is_notified() {
                break;
            }
            if now.duration_since(slept) >= CHECK_INTERVAL {
                // This call alone handles streams that have sent everything.
                self.sleep(Duration::ZERO)?;
                slept = now;
            }
            std::hint::spin_loop();
        }
        if !self.possible()
            && !self.thread.is_notified()
            && Instant::now() < until
            && self.polling != Polling::Busy
        {
            if !self.lost
                && let Err(error) = self.poller.arm()
            {
                self.lose(&error);
            }
            // Work that was done before the queue was armed makes no event.
            if !self.poll_completions() && !self.possible() {
                let left = until.saturating_duration_since(Instant::now());
                if self.flags && !self.served.is_empty() {
                    // A flag makes no event.
                    let pause = if self.last.elapsed() < BUSY { CHECK_INTERVAL } else { 5 * CHECK_INTERVAL };
                    std::thread::sleep(pause.min(left));
                    self.sleep(Duration::ZERO)?;
                } else {
                    self.sleep(left)?;
                }
                self.poll_completions();
            }
        } else {
            self.sleep(Duration::ZERO)?;
        }
        self.progress(table, done);
        Ok(())
    }
}
