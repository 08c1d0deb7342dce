//! Models as network block devices, for clients on a socket of their own.
//!
//! | module | holds |
//! |---|---|
//! | `exports` | the names that clients open, and what they stand for |
//! | `face` | what a client reads and writes through an open export |
//! | `lobby` | the places of clients, and who goes if there are too many |
//! | `connection` | one client: its handshake, its requests and the replies |
//!
//! `libmodelio::nbd` is the protocol. A client is served on a reactor, so a slow one keeps nobody else waiting.

mod connection;
mod exports;
mod face;
mod lobby;

use std::fmt;
use std::io::{self, ErrorKind, Read as _};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use libmodelio::nbd::REQUEST_LEN;
use libmodelio::transport::exchange::Exchanging;
use libmodelio::transport::reactor::{Choice, Reactor, ReactorOptions, Refused};
use libmodelio::transport::stream::Stream;
use libmodelio::transport::tcp::SocketOptions;
use ps_backend::server;

use crate::config::NbdAddress;
use crate::error::Error;
use connection::{Client, PIECE};
use exports::ModelExports;
pub use exports::Models;
use lobby::Lobby;

/// The most clients at a time.
const MAX_CLIENTS: usize = lobby::MOST_WAITING + lobby::MOST_SEATED;
/// SO_SNDBUF of Unix sockets, in bytes: with the kernel's own, a large reply needs twice as many wake-ups.
const SEND_BUFFER: usize = 512 << 10;
/// The threads that serve clients. On two cores, four take writes of four connections faster than two do.
const THREADS: usize = 4;

enum Listener {
    Unix(UnixListener, SocketFile),
    Tcp(TcpListener, SocketAddr),
}

/// A socket's file, which goes with it.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// An address that is taken, and not served yet: who connects waits.
pub struct Bound(Listener);

/// Takes an address.
///
/// # Errors
/// When it is another program's already, or open to other hosts and not meant to be (`insecure`): the protocol says
/// nothing of who a client is.
pub fn bind(at: &NbdAddress, insecure: bool) -> Result<Bound, Error> {
    Ok(Bound(match at {
        NbdAddress::Unix(path) => {
            // A daemon in the background leaves the directory that it was started in.
            let path = std::path::absolute(path)
                .map_err(|error| Error::new("cannot tell the present directory").caused_by(error))?;
            let listener = bind_unix(&path)?;
            Listener::Unix(listener, SocketFile(path))
        }
        NbdAddress::Tcp(endpoint) => {
            let failed = || Error::new(format!("cannot serve NBD on {endpoint}"));
            let address = server::resolve(&endpoint.to_string()).map_err(|why| {
                let hint = "a path of a Unix socket has a / in it (./name), or unix: before it";
                Error::new(format!("cannot serve NBD: {why}")).hint(hint)
            })?;
            if !insecure && !address.ip().is_loopback() {
                return Err(failed().hint(
                    "NBD knows no users: name a Unix socket or a loopback address, and have ssh forward it to other hosts (or give \
                     it to all who reach it, with the flag --insecure)",
                ));
            }
            let bound = TcpListener::bind(address).and_then(|listener| {
                let address = listener.local_addr()?;
                Ok((listener, address))
            });
            let (listener, address) = bound.map_err(|error| failed().caused_by(error))?;
            Listener::Tcp(listener, address)
        }
    }))
}

/// A socket that only its owner can connect to. A socket that a killed program has left there is replaced.
fn bind_unix(path: &Path) -> Result<UnixListener, Error> {
    let failed = || Error::new(format!("cannot serve NBD on {}", path.display()));
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if is_socket && !is_served(path) {
        std::fs::remove_file(path).map_err(|error| failed().caused_by(error))?;
    }
    bind_private(path).map_err(|error| {
        let hint = match error.kind() {
            _ if error.raw_os_error() == Some(libc::ENAMETOOLONG) => {
                "name a shorter path: the kernel takes 107 bytes"
            }
            ErrorKind::AddrInUse => "another program has it, or it is no socket: name another path",
            _ => "its directory must be there, and yours to write to",
        };
        failed().caused_by(error).hint(hint)
    })
}

/// A listening socket whose file has mode 0600 from the start. The directory may be everybody's, and who connects before
/// the mode is changed would be let in.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
    use nix::sys::stat::{Mode, fchmod};
    let address = UnixAddr::new(path)?;
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // The file gets the mode that the socket has when it is bound.
    fchmod(&fd, Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(fd.as_raw_fd(), &address)?;
    listen(&fd, Backlog::MAXCONN)?;
    Ok(fd.into())
}

/// Whether a program accepts connections there. The kernel may close the socket of a program that was killed a while
/// later than that, and then breaks off connections that it has let in meanwhile.
fn is_served(path: &Path) -> bool {
    const TRIES: usize = 20;
    for _ in 0..TRIES {
        let mut stream = match UnixStream::connect(path) {
            Ok(stream) => stream,
            // It may be another user's.
            Err(error) => return error.kind() != ErrorKind::ConnectionRefused,
        };
        if stream.set_read_timeout(Some(Duration::from_secs(1))).is_err() {
            return true;
        }
        match stream.read(&mut [0]) {
            Ok(0) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            // It says something, or is silent.
            Ok(_) | Err(_) => return true,
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    true
}

impl Bound {
    /// Serves the models until the answer is dropped.
    ///
    /// # Errors
    /// When the system has no threads for it.
    pub fn serve(self, models: Models) -> Result<Serving, Error> {
        let options = ReactorOptions {
            name: "nbd".to_owned(),
            threads: THREADS,
            // The listener is one more, and clients that are sent away take a moment to go.
            connections_a_thread: MAX_CLIENTS / THREADS * 5 / 4 + 1,
            // A reply to a single request leaves sooner by system calls than by io_uring, and many are as fast.
            choice: Choice::Poll,
        };
        let failed = || Error::new("cannot serve NBD");
        let reactor = Reactor::start(&options).map_err(|error| failed().caused_by(error))?;
        let exports = Arc::new(ModelExports::new(models));
        let of_clients = Arc::clone(&exports);
        let lobby = Lobby::default();
        let make = move || {
            let client = Client::new(Arc::clone(&of_clients), lobby.clone());
            Some(Box::new(Exchanging::new(client, PIECE, REQUEST_LEN)) as Box<dyn Stream>)
        };
        let handle = reactor.handle();
        let refused = |error: Refused| failed().caused_by(error);
        let (uri, file) = match self.0 {
            Listener::Unix(listener, file) => {
                handle.listen_unix(listener, SEND_BUFFER, make).map_err(refused)?;
                (format!("nbd+unix:///?socket={}", escaped(&file.0)), Some(file))
            }
            Listener::Tcp(listener, address) => {
                let options = SocketOptions::default();
                handle.listen(listener, options, move |_| make()).map_err(refused)?;
                (format!("nbd://{address}"), None)
            }
        };
        Ok(Serving { uri, _reactor: reactor, _file: file })
    }
}

/// A path as it stands in the query of a URI.
fn escaped(path: &Path) -> String {
    use std::fmt::Write as _;
    use std::os::unix::ffi::OsStrExt as _;
    let mut text = String::new();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'.' | b'_' | b'~' => {
                text.push(byte.into());
            }
            _ => {
                let _ = write!(text, "%{byte:02X}");
            }
        }
    }
    text
}

/// Clients are served as long as this lives.
pub struct Serving {
    uri: String,
    _reactor: Reactor,
    _file: Option<SocketFile>,
}

impl fmt::Display for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block devices at {}", self.uri)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_path_outlives_a_change_of_directory() {
        let name = format!("gradfs-test-{}.sock", std::process::id());
        let bound = bind(&NbdAddress::Unix(Path::new(".").join(&name)), false).expect("a socket");
        let here = std::env::current_dir().expect("a directory").join(&name);
        assert!(
            matches!(&bound.0, Listener::Unix(_, file) if file.0 == here),
            "the URI and the end name {here:?}"
        );
        drop(bound);
        assert!(!here.exists());
    }

    #[test]
    fn paths_in_uris_are_escaped() {
        assert_eq!(escaped(Path::new("/run/a b/ä&?.sock")), "/run/a%20b/%C3%A4%26%3F.sock");
    }
}
