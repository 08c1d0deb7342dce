//! The one thread that has the listener and all connections (edge module). It waits for nobody: a client that is slow,
//! or silent, has a deadline, and of too many the oldest one goes.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;

use super::http::{self, Asked, MAX_REQUEST, Refusal};

/// The most connections at a time.
const MAX_CONNECTIONS: usize = 64;
/// The number of connections that are accepted before other work gets its turn.
const MAX_ACCEPTED_PER_TURN: usize = 16;
/// The time for a request to come.
const REQUEST: Duration = Duration::from_secs(5);
/// The time for a client to take the answer.
const ANSWER: Duration = Duration::from_secs(10);
/// The time for the client to hang up. If gradfs hung up first, with unread bytes, the client might lose the answer.
const LINGER: Duration = Duration::from_secs(1);
/// The most bytes that gradfs reads and throws away until the client hangs up.
const MAX_LEFTOVER: usize = 1 << 20;
/// The pause before the next connection is accepted, if there is no descriptor to spare.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Makes what is scraped.
type Page = dyn Fn() -> Result<String, prometheus::Error>;

/// The state of a connection.
enum Stage {
    /// This much of the request has come.
    Asking(Vec<u8>),
    /// The answer, and how much of it is sent.
    Answering(Vec<u8>, usize),
    /// The answer is sent; up to this many further bytes are read and thrown away.
    Leaving(usize),
}

struct Connection {
    stream: TcpStream,
    stage: Stage,
    deadline: Instant,
}

/// Serves until `stop` can be read.
pub fn run(listener: &TcpListener, stop: &EventFd, page: &Page) {
    // The oldest one first.
    let mut connections: VecDeque<Connection> = VecDeque::new();
    let mut paused: Option<Instant> = None;
    loop {
        let now = Instant::now();
        paused = paused.filter(|until| *until > now);
        connections.retain(|connection| connection.deadline > now);
        let next = connections.iter().map(|connection| connection.deadline).chain(paused).min();
        let mut polled = vec![PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
        let interest = if paused.is_some() { PollFlags::empty() } else { PollFlags::POLLIN };
        polled.push(PollFd::new(listener.as_fd(), interest));
        polled.extend(connections.iter().map(Connection::interest));
        match poll(&mut polled, timeout(next, now)) {
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(errno) => return tracing::error!(%errno, "metrics are not served any more"),
        }
        let mut ready = polled.iter().map(|fd| fd.any() == Some(true)).collect::<Vec<_>>().into_iter();
        if ready.next() == Some(true) {
            return;
        }
        let knocked = ready.next() == Some(true);
        let now = Instant::now();
        connections
            .retain_mut(|connection| ready.next() != Some(true) || connection.goes_on(now, page).is_ok());
        if knocked && let Err(error) = accept(listener, &mut connections, now) {
            tracing::debug!(%error, "a scrape is not accepted now");
            paused = Some(now + ACCEPT_PAUSE);
        }
    }
}

/// How long to wait until `next`; rounded up, so that it is over then.
fn timeout(next: Option<Instant>, now: Instant) -> PollTimeout {
    let Some(next) = next else { return PollTimeout::NONE };
    let millis = next.saturating_duration_since(now).as_millis() + 1;
    PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
}

/// Accepts who waits. If there are too many, the oldest one goes: a scrape takes milliseconds.
fn accept(listener: &TcpListener, connections: &mut VecDeque<Connection>, now: Instant) -> io::Result<()> {
    for _ in 0..MAX_ACCEPTED_PER_TURN {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            // The connection was gone before it was accepted.
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {
                continue;
            }
            Err(error) => return Err(error),
        };
        stream.set_nonblocking(true)?;
        if connections.len() >= MAX_CONNECTIONS {
            connections.pop_front();
        }
        connections.push_back(Connection {
            stream,
            stage: Stage::Asking(Vec::new()),
            deadline: now + REQUEST,
        });
    }
    Ok(())
}

/// The connection is over, in good order or not.
struct Over;

impl Connection {
    fn interest(&self) -> PollFd<'_> {
        let flags = match self.stage {
            Stage::Asking(_) | Stage::Leaving(_) => PollFlags::POLLIN,
            Stage::Answering(..) => PollFlags::POLLOUT,
        };
        PollFd::new(self.stream.as_fd(), flags)
    }

    /// Does what can be done now: one read or write, so that all have their turn.
    fn goes_on(&mut self, now: Instant, page: &Page) -> Result<(), Over> {
        match &mut self.stage {
            Stage::Asking(request) => {
                let mut piece = [0; MAX_REQUEST];
                let Some(len) = ready(self.stream.read(&mut piece[request.len()..]))? else { return Ok(()) };
                let from = request.len();
                request.extend_from_slice(&piece[from..from + len]);
                let answer = match http::asked(request) {
                    Asked::More => return Ok(()),
                    Asked::Metrics { is_head } => match page() {
                        Ok(text) => http::metrics(&text, is_head),
                        Err(error) => {
                            tracing::error!(%error, "metrics cannot be collected");
                            http::refusal(Refusal::Failed)
                        }
                    },
                    Asked::Refused(refusal) => http::refusal(refusal),
                };
                self.stage = Stage::Answering(answer, 0);
                self.deadline = now + ANSWER;
            }
            Stage::Answering(answer, sent) => {
                *sent += ready(self.stream.write(&answer[*sent..]))?.unwrap_or(0);
                if *sent == answer.len() {
                    self.stream.shutdown(Shutdown::Write).map_err(|_| Over)?;
                    self.stage = Stage::Leaving(MAX_LEFTOVER);
                    self.deadline = now + LINGER;
                }
            }
            Stage::Leaving(most) => {
                let mut piece = [0; MAX_REQUEST];
                let len = ready(self.stream.read(&mut piece))?.unwrap_or(0);
                *most = most.checked_sub(len).ok_or(Over)?;
            }
        }
        Ok(())
    }
}

/// The bytes that were moved; none if that has to wait. At the end of the stream it is over.
fn ready(moved: io::Result<usize>) -> Result<Option<usize>, Over> {
    match moved {
        Ok(0) => Err(Over),
        Ok(len) => Ok(Some(len)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(_) => Err(Over),
    }
}
