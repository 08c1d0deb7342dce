//! Promises of queues of requests on files, by io_uring and by threads.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::aio::{Buffer, Engine, FileId, MAX_REQUESTS, Op, Queue, QueueOptions};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};

/// The longest wait for what must come.
const LONG: Duration = Duration::from_secs(600);

fn queue(engine: Engine, depth: u32, piece: usize) -> Queue {
    Queue::new(QueueOptions { depth, piece, engine }).unwrap()
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn taken(queue: &Queue, file: &File) -> FileId {
    queue.file(file.try_clone().unwrap().into()).unwrap()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 256) as u8).collect()
}

fn on_each(test: impl Fn(Engine)) {
    [Engine::Uring, Engine::Threads].into_iter().for_each(test);
}

fn one(queue: &Queue) -> Result<(usize, Buffer), Errno> {
    let [done]: [_; 1] = queue.wait(1, LONG).unwrap().try_into().unwrap();
    done.result.map(|bytes| (bytes, done.buffer))
}

#[test]
fn a_large_request_is_moved_in_pieces_and_ends_once() {
    on_each(|engine| {
        let (queue, bytes) = (queue(engine, 8, 10_000), pattern(1 << 20));
        let disk = file(&[]);
        let id = taken(&queue, &disk);
        let mut buffer = queue.buffer(bytes.len()).unwrap();
        buffer.copy_from_slice(&bytes);
        queue.submit(id, Op::Write, 5000, buffer, LONG).unwrap();
        let (written, buffer) = one(&queue).unwrap();
        assert_eq!((written, queue.len()), (bytes.len(), 0));
        queue.submit(id, Op::Sync, 0, Buffer::none(), LONG).unwrap();
        assert_eq!(one(&queue).unwrap().0, 0);
        drop(buffer);
        // More than there is: the read ends with the file.
        queue.submit(id, Op::Read, 5000, Buffer::new(bytes.len() + 77).unwrap(), LONG).unwrap();
        let (read, buffer) = one(&queue).unwrap();
        assert!(read == bytes.len() && buffer[..read] == bytes && buffer[read..] == [0; 77]);
        queue.submit(id, Op::Read, 1 << 40, Buffer::new(9).unwrap(), LONG).unwrap();
        assert_eq!(one(&queue).unwrap().0, 0);
    });
}

#[test]
fn many_requests_of_several_threads_end_once_each() {
    on_each(|engine| {
        let (queue, bytes) = (Arc::new(queue(engine, 16, 4096)), pattern(1 << 18));
        let id = taken(&queue, &file(&bytes));
        let submit = |seed| {
            let (queue, mut rng) = (Arc::clone(&queue), fastrand::Rng::with_seed(seed));
            std::thread::spawn(move || {
                let request = |_| {
                    let (at, len) = (rng.usize(..200_000), rng.usize(1..30_000));
                    let ticket = queue.submit(id, Op::Read, at as u64, Buffer::new(len).unwrap(), LONG);
                    (ticket.unwrap(), at, len)
                };
                (0..200).map(request).collect::<Vec<_>>()
            })
        };
        let threads: Vec<_> = (0..3).map(submit).collect();
        let mut done = Vec::new();
        while done.len() < 600 {
            done.extend(queue.wait(1, LONG).unwrap());
        }
        let asked = threads.into_iter().flat_map(|thread| thread.join().unwrap());
        for (ticket, at, len) in asked {
            let mine: Vec<_> = done.iter().filter(|done| done.ticket == ticket).collect();
            let [mine] = mine[..] else { panic!("{} completions", mine.len()) };
            assert!(mine.result == Ok(len) && mine.buffer[..] == bytes[at..at + len]);
        }
        assert!(queue.is_empty() && queue.wait(9, LONG).unwrap().is_empty(), "nothing is left to wait for");
    });
}

#[test]
fn errors_are_those_of_the_file_and_change_nothing() {
    on_each(|engine| {
        let queue = queue(engine, 2, 4096);
        let read_only = queue.file(File::open("/dev/zero").unwrap().into()).unwrap();
        queue.submit(read_only, Op::Write, 0, Buffer::new(9).unwrap(), LONG).unwrap();
        assert_eq!(one(&queue).unwrap_err(), Errno::EBADF);
        let full = File::options().write(true).open("/dev/full").unwrap();
        let full = queue.file(full.into()).unwrap();
        queue.submit(full, Op::Write, 0, Buffer::new(9000).unwrap(), LONG).unwrap();
        assert_eq!(one(&queue).unwrap_err(), Errno::ENOSPC);
        let submit = |file, at| queue.submit(file, Op::Read, at, Buffer::new(9).unwrap(), LONG);
        assert_eq!(submit(FileId(7), 0), Err(Errno::EBADF));
        assert_eq!(submit(full, u64::MAX - 3), Err(Errno::EINVAL));
        assert_eq!(queue.close(FileId(7)), Err(Errno::EBADF));
        assert_eq!((queue.close(full), queue.close(full)), (Ok(()), Err(Errno::EBADF)));
        assert_eq!(submit(full, 0), Err(Errno::EBADF));
    });
    for wrong in [(0, 1), (1, 0), (1 << 20, 1), (1, 1 << 40)] {
        let options = QueueOptions { depth: wrong.0, piece: wrong.1, engine: Engine::Auto };
        assert_eq!(Queue::new(options).err().and_then(|error| error.raw_os_error()), Some(libc::EINVAL));
    }
}

/// A queue, and a pipe to which nobody has written.
fn silent() -> (Queue, FileId, OwnedFd) {
    let queue = queue(Engine::Uring, 4, 4096);
    let (read, write) = nix::unistd::pipe().unwrap();
    let id = queue.file(read).unwrap();
    (queue, id, write)
}

#[test]
fn a_request_ends_at_its_deadline_and_a_wait_at_its_own() {
    let (queue, id, _write) = silent();
    queue.submit(id, Op::Read, 0, Buffer::new(9).unwrap(), LONG).unwrap();
    assert!(queue.wait(1, Duration::from_millis(1)).unwrap().is_empty());
    assert!(queue.wait(0, LONG).unwrap().is_empty(), "it does not wait");
    let begun = Instant::now();
    let late = queue.submit(id, Op::Read, 0, Buffer::new(9).unwrap(), Duration::from_millis(50)).unwrap();
    let [done]: [_; 1] = queue.wait(1, LONG).unwrap().try_into().unwrap();
    assert_eq!((done.ticket, done.result, queue.len()), (late, Err(Errno::ETIMEDOUT), 1));
    assert!(begun.elapsed() >= Duration::from_millis(50));
}

#[test]
fn a_cancelled_request_ends_and_a_queue_that_is_dropped_cancels_all() {
    let (queue, id, _write) = silent();
    let submit = || queue.submit(id, Op::Read, 0, Buffer::new(9).unwrap(), LONG).unwrap();
    let tickets: Vec<_> = (0..6).map(|_| submit()).collect();
    assert_eq!(queue.close(id), Err(Errno::EBUSY));
    // The last two have not begun.
    queue.cancel(tickets[5]);
    queue.cancel(tickets[0]);
    let mut ended = Vec::new();
    while ended.len() < 2 {
        ended.extend(queue.wait(1, LONG).unwrap().into_iter().map(|done| (done.ticket, done.result)));
    }
    assert_eq!(ended, [(tickets[5], Err(Errno::ECANCELED)), (tickets[0], Err(Errno::ECANCELED))]);
    queue.cancel(tickets[0]);
    assert_eq!(queue.len(), 4);
    drop(queue);
}

#[test]
fn who_waits_hears_of_a_cancel_and_of_an_earlier_deadline() {
    let (queue, id, _write) = silent();
    let queue = Arc::new(queue);
    let submit = |timeout| queue.submit(id, Op::Read, 0, Buffer::new(9).unwrap(), timeout).unwrap();
    let first = submit(LONG);
    let waits = |queue: &Arc<Queue>| {
        let queue = Arc::clone(queue);
        std::thread::spawn(move || queue.wait(1, LONG).map(|ended| ended[0].result.map(drop)))
    };
    let waiter = waits(&queue);
    queue.cancel(first);
    assert_eq!(waiter.join().unwrap(), Ok(Err(Errno::ECANCELED)));
    submit(LONG);
    let waiter = waits(&queue);
    submit(Duration::from_millis(20));
    assert_eq!(waiter.join().unwrap(), Ok(Err(Errno::ETIMEDOUT)));
    // The end of the queue ends waits, and gives back the requests.
    let waiter = waits(&queue);
    let given_back: Vec<_> = queue.shut_down().into_iter().map(|ended| ended.result.map(drop)).collect();
    let waited = waiter.join().unwrap();
    assert!(waited == Err(Errno::ECANCELED) && given_back == [Err(Errno::ECANCELED)]);
    assert_eq!(queue.submit(id, Op::Read, 0, Buffer::new(9).unwrap(), LONG), Err(Errno::ECANCELED));
}

#[test]
fn a_sync_after_a_write_that_failed_commits_nothing() {
    on_each(|engine| {
        let queue = queue(engine, 4, 4096);
        let full = File::options().write(true).open("/dev/full").unwrap();
        let full = queue.file(full.into()).unwrap();
        queue.submit(full, Op::Write, 0, Buffer::new(9).unwrap(), LONG).unwrap();
        queue.submit(full, Op::Sync, 0, Buffer::none(), LONG).unwrap();
        let mut ended = Vec::new();
        while ended.len() < 2 {
            ended.extend(queue.wait(1, LONG).unwrap().into_iter().map(|done| done.result));
        }
        assert_eq!(ended, [Err(Errno::ENOSPC), Err(Errno::ENOSPC)]);
    });
}

#[test]
fn a_request_outlives_the_thread_that_has_submitted_it() {
    let (queue, id, write) = silent();
    let queue = Arc::new(queue);
    let of = Arc::clone(&queue);
    let submit = move || of.submit(id, Op::Read, 0, Buffer::new(5).unwrap(), LONG).map(drop);
    std::thread::spawn(submit).join().unwrap().unwrap();
    assert!(queue.wait(1, Duration::from_millis(1)).unwrap().is_empty());
    nix::unistd::write(&write, b"hello").unwrap();
    assert_eq!(one(&queue).unwrap().0, 5);
}

#[test]
fn the_event_is_readable_when_a_request_has_ended() {
    on_each(|engine| {
        let queue = queue(engine, 4, 4096);
        let id = taken(&queue, &file(b"abc"));
        let event = queue.event().unwrap();
        let rings =
            |timeout: u16| poll(&mut [PollFd::new(event.as_fd(), PollFlags::POLLIN)], timeout).unwrap() == 1;
        while rings(0) {
            assert!(queue.wait(0, LONG).unwrap().is_empty());
        }
        queue.submit(id, Op::Read, 0, Buffer::new(3).unwrap(), LONG).unwrap();
        let mut done = Vec::new();
        while done.is_empty() {
            assert!(rings(u16::MAX), "the request has ended");
            done = queue.wait(0, LONG).unwrap();
        }
        assert_eq!(&done[0].buffer[..], b"abc");
        assert!(!rings(0), "the wait has made it silent");
        for _ in 0..2 {
            queue.submit(id, Op::Read, 0, Buffer::new(3).unwrap(), LONG).unwrap();
        }
        let mut taken = 0;
        while taken < 2 {
            assert!(rings(u16::MAX), "there is another one");
            taken += queue.wait_for(0, 1, LONG).unwrap().len();
        }
    });
}

#[test]
fn a_queue_takes_no_more_requests_than_it_says() {
    let (queue, id, _write) = silent();
    for _ in 0..MAX_REQUESTS {
        queue.submit(id, Op::Sync, 0, Buffer::none(), LONG).unwrap();
    }
    assert_eq!(queue.submit(id, Op::Sync, 0, Buffer::none(), LONG), Err(Errno::EAGAIN));
    for _ in 0..3 {
        assert!(!queue.wait(1, LONG).unwrap().is_empty());
    }
}
