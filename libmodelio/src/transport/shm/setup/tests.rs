//! Ends that meet, and those that do not.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::transport::shm::Wants;

const SOON: Duration = Duration::from_millis(200);
const LONG: Duration = Duration::from_secs(600);

/// An address that no other test has.
fn address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("test-{}-{}:1", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn accept(listener: &OwnedFd) -> OwnedFd {
    use std::os::fd::FromRawFd;
    poll(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], PollTimeout::try_from(LONG).unwrap())
        .unwrap();
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket::accept4(listener.as_raw_fd(), flags).unwrap();
    // SAFETY: it was made just now.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// The result for a peer that sends `bytes` with `fds`: this end's view, and the answer.
fn greeted(bytes: &[u8], fds: &[&OwnedFd]) -> (SetupError, String) {
    let at = address();
    let listener = listen(&at).unwrap();
    let stranger = unix_socket().unwrap();
    socket::connect(stranger.as_raw_fd(), &name(&at).unwrap()).unwrap();
    let raw: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    descriptors::send(&stranger, bytes, &raw).unwrap();
    let error = receive(accept(&listener), SOON).unwrap_err();
    let mut answer = [0; REASON];
    let (len, _) = await_message(&stranger, &mut answer, LONG).unwrap();
    (error, String::from_utf8_lossy(&answer[..len]).into_owned())
}

#[test]
fn two_ends_meet_and_share_rings() {
    for at in [address(), format!("{}{}", "long-name.".repeat(30), address())] {
        let listener = listen(&at).unwrap();
        let shard = std::thread::spawn(move || receive(accept(&listener), LONG).unwrap());
        let mut client = meet(&at, LONG).unwrap();
        let mut shard = shard.join().unwrap();
        let mut said = *b"frames";
        let mut received = [0; 6];
        // SAFETY: both arrays are this thread's.
        unsafe {
            assert_eq!(client.end.write([(said.as_mut_ptr(), 6)].into_iter()), Ok(6));
            assert_eq!(shard.end.read([(received.as_mut_ptr(), 6)].into_iter()), Ok(6));
        }
        assert_eq!(received, said);
        // Bells are those of the other end.
        for turn in 0..2 {
            let (sleeper, waker) = match turn {
                0 => (&shard.end, &mut client.end),
                _ => (&client.end, &mut shard.end),
            };
            sleeper.wait(Wants { bytes: true, room: false });
            // SAFETY: as above.
            unsafe { waker.write([(said.as_mut_ptr(), 1)].into_iter()).unwrap() };
            let mut ready = [PollFd::new(sleeper.bell(), PollFlags::POLLIN)];
            assert_eq!(poll(&mut ready, PollTimeout::try_from(LONG).unwrap()), Ok(1));
        }
    }
}

#[test]
fn an_absent_peer_is_reported_at_once_and_a_silent_one_is_given_up() {
    let at = address();
    let error = meet(&at, LONG).unwrap_err();
    assert!(error.to_string().contains("Connection refused"), "{error}");
    let listener = listen(&at).unwrap();
    assert!(listen(&at).unwrap_err().to_string().contains("in use"));
    assert!(matches!(meet(&at, SOON), Err(SetupError::Late(_))));
    let silent = accept(&listener);
    assert!(matches!(
        receive(silent, SOON),
        Err(SetupError::Stranger(_) | SetupError::Gone | SetupError::System { .. })
    ));
    let stranger = unix_socket().unwrap();
    socket::connect(stranger.as_raw_fd(), &name(&at).unwrap()).unwrap();
    assert!(matches!(receive(accept(&listener), SOON), Err(SetupError::Late(_))));
}

#[test]
fn strangers_get_the_reason_for_a_refusal() {
    let memory = |len: usize, sealed: bool| {
        let memory = Mapping::memfd("rings", len).unwrap();
        if sealed {
            memory.fix_size().unwrap();
        }
        memory.fd().unwrap().try_clone_to_owned().unwrap()
    };
    let bell = || OwnedFd::from(EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK).unwrap());
    let (pipe, _other) = nix::unistd::pipe().unwrap();
    let hello = [&MAGIC[..], &(MEMORY as u32).to_le_bytes()].concat();
    let another = [&MAGIC[..], &(2 * MEMORY as u32).to_le_bytes()].concat();
    let (good, short, open) = (memory(MEMORY, true), memory(4096, true), memory(MEMORY, false));
    let (a, b) = (bell(), bell());
    let cases: [(&[u8], Vec<&OwnedFd>, &str); 9] = [
        (b"GET / HTTP/1.1\r\n", vec![], "something else"),
        (&[0xff; 64], vec![&pipe], "something else"),
        (&another, vec![&good, &a, &b], "bytes, not"),
        (&hello, vec![], "are not three"),
        (&hello, vec![&good, &a], "are not three"),
        (&hello, vec![&good, &a, &b, &pipe], "are not three"),
        (&hello, vec![&short, &a, &b], "4096 bytes, not"),
        (&hello, vec![&open, &a, &b], "not sealed"),
        (&hello, vec![&good, &a, &pipe], "no eventfd"),
    ];
    for (bytes, fds, why) in cases {
        let (error, answer) = greeted(bytes, &fds);
        assert!(matches!(error, SetupError::Stranger(_)), "{error}");
        assert!(answer.contains(why), "{answer} does not say {why}");
    }
}
