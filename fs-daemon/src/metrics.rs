//! Metrics in Prometheus' text format, for clients that ask `GET /metrics` on a listener of their own.
//!
//! Nothing is counted for metrics: each scrape reads what `status.json` and `gradfs status` read, so the two
//! cannot say different things, and no data path knows of metrics.
//!
//! | module | holds |
//! |---|---|
//! | `page` | names, labels and values, as text |
//! | `mount`, `shard` | what is told of each |
//! | `http` | what a request asks for, and what it is answered (no socket, no clock) |
//! | `listener` | the one thread that has all connections |

mod http;
mod listener;
pub mod mount;
mod page;
pub mod shard;

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};
use ps_backend::server;

use crate::config::endpoint::Endpoint;
use crate::error::Error;

/// How long the thread may take to end: it never waits, but it may be reading the state of many models.
const FAREWELL: Duration = Duration::from_secs(2);

/// An address that is taken, and not served yet: who connects waits.
pub struct Bound {
    listener: TcpListener,
    address: SocketAddr,
}

/// Takes the address `at`.
///
/// # Errors
/// When it is not this host's, or another program's already.
pub fn bind(at: &Endpoint) -> Result<Bound, Error> {
    const HINT: &str = "--metrics needs an address of this host, and each program a port of its own; port 0 is any \
                        free one";
    let address = server::resolve(&at.to_string())
        .map_err(|why| Error::new(format!("cannot serve metrics: {why}")).hint(HINT))?;
    let bound = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Bound { listener, address })
    });
    bound
        .map_err(|error| Error::new(format!("cannot serve metrics on {address}")).caused_by(error).hint(HINT))
}

impl Bound {
    /// Serves what `page` makes, anew for each scrape, until the answer is dropped. `page` is called on a thread of its
    /// own and must not block.
    ///
    /// # Errors
    /// When the system has no thread or descriptor for it.
    pub fn serve(
        self,
        page: impl Fn() -> Result<String, prometheus::Error> + Send + 'static,
    ) -> Result<Serving, Error> {
        let failed = || Error::new("cannot start the thread of the metrics");
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let stop = Arc::new(stop.map_err(|error| failed().caused_by(error))?);
        let (ends, ended) = mpsc::channel();
        let Bound { listener, address } = self;
        let of_thread = Arc::clone(&stop);
        std::thread::Builder::new()
            .name("gradfs-metrics".into())
            .spawn(move || {
                listener::run(&listener, &of_thread, &page);
                drop(ends);
            })
            .map_err(|error| failed().caused_by(error))?;
        Ok(Serving { address, stop, ended })
    }
}

/// Metrics are served as long as this lives.
pub struct Serving {
    address: SocketAddr,
    stop: Arc<EventFd>,
    ended: mpsc::Receiver<std::convert::Infallible>,
}

impl fmt::Display for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "metrics at http://{}/metrics", self.address)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It cannot fail: nothing else adds to the counter.
        let _ = self.stop.write(1);
        if self.ended.recv_timeout(FAREWELL) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the thread of the metrics does not end");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;
    use std::time::Instant;

    use super::*;

    fn bound() -> Bound {
        bind(&Endpoint { host: "127.0.0.1".to_owned(), port: 0 }).unwrap()
    }

    fn asks(serving: &Serving) -> TcpStream {
        let mut stream = TcpStream::connect(serving.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        stream
    }

    #[test]
    fn an_answer_longer_than_the_sockets_buffers_comes_whole_and_holds_up_nobody() {
        let page = "gradfs_x 1\n".repeat(1 << 20);
        let wanted = page.clone();
        let serving = bound().serve(move || Ok(page.clone())).unwrap();
        // It has its answer, and does not take it yet.
        let mut slow = asks(&serving);
        for mut stream in [asks(&serving), slow.try_clone().unwrap()] {
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert!(head.contains(&format!("Content-Length: {}\r\n", wanted.len())), "{head}");
            assert!(body == wanted);
        }
        assert_eq!(slow.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_metric_that_cannot_be_collected_is_an_error_and_the_next_scrape_succeeds() {
        let mut outcomes = vec![Ok("a 1\n".to_owned()), Err(prometheus::Error::AlreadyReg)];
        let outcomes = std::sync::Mutex::new(std::iter::from_fn(move || outcomes.pop()));
        let serving = bound().serve(move || outcomes.lock().unwrap().next().unwrap()).unwrap();
        for status in ["500 Internal Server Error", "200 OK"] {
            let mut answer = String::new();
            asks(&serving).read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{answer}");
        }
    }

    #[test]
    fn its_end_waits_for_no_client_and_frees_the_port() {
        let serving = bound().serve(|| Ok("a 1\n".repeat(1 << 22))).unwrap();
        let address = serving.address;
        let deaf = asks(&serving);
        let silent = TcpStream::connect(address).unwrap();
        let start = Instant::now();
        drop(serving);
        assert!(start.elapsed() < FAREWELL, "{:?}", start.elapsed());
        // Some other process may have been given the port for a moment.
        let endpoint = Endpoint { host: address.ip().to_string(), port: address.port() };
        while let Err(error) = bind(&endpoint) {
            assert!(start.elapsed() < Duration::from_secs(20), "{error}");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop((deaf, silent));
    }

    #[test]
    fn an_address_that_is_taken_is_said() {
        let taken = bound();
        let error =
            bind(&Endpoint { host: "127.0.0.1".to_owned(), port: taken.address.port() }).err().unwrap();
        assert_eq!(error.message, format!("cannot serve metrics on {}", taken.address));
        assert!(error.source.is_some() && error.hint.unwrap().contains("--metrics"));
    }
}
