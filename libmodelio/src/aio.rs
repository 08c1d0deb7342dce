//! Batched asynchronous I/O: many reads and writes at once on files of a mount, on block devices, and on models without
//! a mount (iRDMA §V-B).
//!
//! A [`Queue`] takes requests of any size and cuts them into pieces, of which it keeps so many under way. They go by
//! io_uring with registered files and buffers, or by threads where that is denied. A request ends once: [`Queue::wait`]
//! returns it with its memory. A request has a deadline, and so has each wait.
//!
//! ```no_run
//! use std::time::Duration;
//! use libmodelio::aio::{Buffer, Op, Queue, QueueOptions};
//!
//! # fn main() -> std::io::Result<()> {
//! let queue = Queue::new(QueueOptions::default())?;
//! let weights = queue.file(std::fs::File::open("/mnt/m/model/weights")?.into())?;
//! queue.submit(weights, Op::Read, 0, queue.buffer(64 << 20)?, Duration::from_secs(30))?;
//! for done in queue.wait(1, Duration::from_secs(60))? {
//!     println!("{} bytes", done.result?);
//! }
//! # Ok(()) }
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `table` | requests and pieces: what begins next, what is late |
//! | `ring`, `threads` | the two ways by which the kernel moves pieces |
//! | `files` | what a queue moves, and memory that the kernel knows |
//! | `network` | pieces of a model without a mount |
//! | `memory` | the memory of requests |

mod files;
mod memory;
mod network;
mod ring;
mod table;
mod threads;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

pub use memory::Buffer;
pub use table::Op;

use self::files::{Registered, Target};
use self::ring::{Ring, Work};
use self::table::{Finished, Piece, Table};
use self::threads::Threads;

/// The most requests that a queue has at a time.
pub const MAX_REQUESTS: usize = 1 << 14;
/// The most pieces under way.
pub const MAX_DEPTH: u32 = 1 << 12;
/// The most bytes of a piece.
pub const MAX_PIECE: usize = 1 << 30;
/// The longest sleep of a thread that waits. The queue then looks at its deadlines again.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// How pieces reach files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// io_uring where it can be used, else threads.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads that call pread(2) and pwrite(2), one for each piece under way.
    Threads,
}

/// The options of a queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// The most pieces under way.
    pub depth: u32,
    /// The most bytes of a piece. FUSE takes 1 MiB in a request.
    pub piece: usize,
    /// How they reach files.
    pub engine: Engine,
}

impl Default for QueueOptions {
    fn default() -> QueueOptions {
        QueueOptions { depth: 32, piece: 1 << 20, engine: Engine::Auto }
    }
}

/// A file of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub usize);

/// A request of a queue, by which it can be cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A request that has ended.
#[derive(Debug)]
pub struct Completion {
    /// The request.
    pub ticket: Ticket,
    /// The bytes from its beginning on, fewer than were asked for at the end of a file. ETIMEDOUT after its deadline,
    /// ECANCELED if it was cancelled, or the file's error.
    pub result: Result<usize, Errno>,
    /// Its memory.
    pub buffer: Buffer,
}

enum Kernel {
    Ring(Box<Ring>),
    Threads(Threads),
}

/// Pieces that ended otherwise than in the ring, and the event that says so.
pub(crate) struct Doorbell {
    ended: Mutex<Vec<(usize, Result<usize, Errno>)>>,
    event: Arc<EventFd>,
}

impl Doorbell {
    fn ring(&self, slot: usize, result: Result<usize, Errno>) {
        self.ended.lock().push((slot, result));
        self.wake();
    }

    /// Has whoever sleeps look again.
    fn wake(&self) {
        let _ = self.event.write(1);
    }
}

/// Requests under way. All threads of a process may use it; one of them waits at a time.
pub struct Queue {
    table: Mutex<Table<Buffer>>,
    kernel: Kernel,
    files: Mutex<Vec<Option<Arc<Target>>>>,
    registered: Mutex<Registered>,
    bell: Arc<Doorbell>,
    /// Readable when something has ended, once somebody has asked for it.
    notices: Mutex<Option<Arc<EventFd>>>,
    waiting: Mutex<()>,
    is_shut: AtomicBool,
}

fn event() -> io::Result<EventFd> {
    Ok(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?)
}

impl Queue {
    /// An empty queue.
    ///
    /// # Errors
    /// EINVAL for a depth or a piece out of bounds, and what io_uring says if it is required.
    pub fn new(options: QueueOptions) -> io::Result<Queue> {
        let QueueOptions { depth, piece, engine } = options;
        if !(1..=MAX_DEPTH).contains(&depth) || !(1..=MAX_PIECE).contains(&piece) {
            return Err(Errno::EINVAL.into());
        }
        let event = Arc::new(event()?);
        let bell = Arc::new(Doorbell { ended: Mutex::default(), event: Arc::clone(&event) });
        let kernel = match engine {
            Engine::Threads => Kernel::Threads(Threads::new(depth, Arc::clone(&bell))),
            Engine::Uring => Kernel::Ring(Box::new(Ring::new(depth, event)?)),
            Engine::Auto => match Ring::new(depth, event) {
                Ok(ring) => Kernel::Ring(Box::new(ring)),
                Err(error) => {
                    tracing::info!(%error, "no io_uring: pieces go by threads");
                    Kernel::Threads(Threads::new(depth, Arc::clone(&bell)))
                }
            },
        };
        let table = Mutex::new(Table::new(depth as usize, piece));
        let (files, registered, notices, waiting) = Default::default();
        Ok(Queue {
            table,
            kernel,
            files,
            registered,
            bell,
            notices,
            waiting,
            is_shut: AtomicBool::new(false),
        })
    }

    /// How pieces reach files.
    pub fn engine(&self) -> &'static str {
        match self.kernel {
            Kernel::Ring(_) => "io_uring",
            Kernel::Threads(_) => "threads",
        }
    }

    /// Submits a request for all of `buffer` at `offset` of the file. [`Op::Sync`] takes [`Buffer::none`].
    ///
    /// # Errors
    /// EBADF for no such file, EINVAL for an offset past the largest file, EAGAIN if there are [`MAX_REQUESTS`].
    pub fn submit(
        &self,
        file: FileId,
        op: Op,
        offset: u64,
        buffer: Buffer,
        timeout: Duration,
    ) -> Result<Ticket, Errno> {
        let len = if op == Op::Sync { 0 } else { buffer.len() };
        if offset.checked_add(len as u64).is_none_or(|end| end > i64::MAX as u64) {
            return Err(Errno::EINVAL);
        }
        let now = Instant::now();
        let deadline = now.checked_add(timeout).unwrap_or(now + Duration::from_secs(u64::from(u32::MAX)));
        let (ticket, is_next) = {
            // The file stays the same one meanwhile.
            let files = self.files.lock();
            if self.is_shut.load(Ordering::SeqCst) {
                return Err(Errno::ECANCELED);
            }
            if files.get(file.0).is_none_or(Option::is_none) {
                return Err(Errno::EBADF);
            }
            let mut table = self.table.lock();
            if table.len() >= MAX_REQUESTS {
                return Err(Errno::EAGAIN);
            }
            let ticket = table.submit((file.0, op, offset), buffer, len, deadline);
            (ticket, table.deadline() == Some(deadline) || table.finished() > 0)
        };
        self.pump();
        self.flush();
        if is_next {
            // Who sleeps looks when it is due.
            self.bell.wake();
        }
        Ok(Ticket(ticket))
    }

    /// Begins pieces while there is room.
    fn pump(&self) {
        loop {
            let mut table = self.table.lock();
            let Some((slot, piece)) = table.begin() else { return };
            let work = self.work(&table, &piece);
            drop(table);
            self.begin(slot, &piece, work);
        }
    }

    fn work(&self, table: &Table<Buffer>, piece: &Piece) -> Work {
        let memory = table.memory(piece.ticket);
        let (start, len) = memory.map_or((0, 0), Buffer::span);
        let registered = self.registered.lock();
        let within = |(at, size, _): &(usize, usize, _)| len > 0 && start >= *at && start + len <= at + size;
        let number = registered.iter().position(within).map(|number| number as u16);
        let none = Buffer::none();
        let place = memory.unwrap_or(&none).place(piece.start, piece.len, number);
        Work { file: piece.file, op: piece.op, offset: piece.offset, place, is_slow: false }
    }

    fn begin(&self, slot: usize, piece: &Piece, mut work: Work) {
        let target = self.files.lock().get(piece.file).cloned().flatten();
        let begun = match (target.as_deref(), &self.kernel) {
            (None, _) => Err(Errno::EBADF),
            (Some(Target::File(_, is_fuse)), Kernel::Ring(ring)) => {
                work.is_slow = *is_fuse;
                // SAFETY: the table keeps the memory until the piece has ended.
                unsafe { ring.begin(slot, piece.ticket, &work) }
            }
            (Some(Target::File(file, _)), Kernel::Threads(threads)) => {
                threads.begin(slot, Arc::clone(file), work)
            }
            (Some(Target::Version(version)), _) => {
                self.bell.ring(slot, version.read(&work));
                Ok(())
            }
            (Some(Target::Learner(learner)), _) => {
                learner.begin(slot, work, piece.deadline, Arc::clone(&self.bell));
                Ok(())
            }
        };
        if let Err(errno) = begun {
            self.bell.ring(slot, Err(errno));
        }
    }

    fn flush(&self) {
        if let Kernel::Ring(ring) = &self.kernel
            && let Err(errno) = ring.submit()
        {
            tracing::warn!(%errno, "io_uring");
        }
    }

    /// Takes what has ended, gives up what is late, and begins what there is room for. The kernel gets that by the next
    /// sleep, or [`Self::flush`].
    fn turn(&self) {
        let mut ended = Vec::new();
        if let Kernel::Ring(ring) = &self.kernel {
            ring.reap(&mut ended);
            ring.listen();
        }
        // After that: whose bell was heard is taken.
        ended.append(&mut self.bell.ended.lock());
        for (slot, result) in ended {
            let mut table = self.table.lock();
            if let Some(rest) = table.ended(slot, result) {
                let work = self.work(&table, &rest);
                drop(table);
                self.begin(slot, &rest, work);
            }
        }
        let late = self.table.lock().expire(Instant::now());
        self.cancel_pieces(late);
        self.pump();
    }

    fn cancel_pieces(&self, pieces: Vec<(usize, Piece)>) {
        for (slot, piece) in pieces {
            let target = self.files.lock().get(piece.file).cloned().flatten();
            match (target.as_deref(), &self.kernel) {
                (Some(Target::File(..)), Kernel::Ring(ring)) => ring.cancel(slot, piece.ticket),
                (Some(Target::Learner(learner)), _) if piece.op == Op::Sync => learner.withdraw(),
                // It ends by itself.
                _ => {}
            }
        }
    }

    /// Waits until `min` requests have ended, or the time is over, and returns those that have ended. With 0 it does not
    /// wait.
    ///
    /// # Errors
    /// ECANCELED if the queue was shut down, and what the kernel says. The requests go on.
    pub fn wait(&self, min: usize, timeout: Duration) -> Result<Vec<Completion>, Errno> {
        self.wait_for(min, usize::MAX, timeout)
    }

    /// The same for `max` requests at most.
    ///
    /// # Errors
    /// As for [`Self::wait`].
    pub fn wait_for(&self, min: usize, max: usize, timeout: Duration) -> Result<Vec<Completion>, Errno> {
        let end = Instant::now().checked_add(timeout);
        let left = || end.map_or(LONGEST_SLEEP, |end| end.saturating_duration_since(Instant::now()));
        let Some(_turn) = self.waiting.try_lock_for(left()) else { return Ok(Vec::new()) };
        self.silence();
        loop {
            self.turn();
            let sleep = {
                let mut table = self.table.lock();
                // More cannot end than there are.
                let enough = table.finished() >= min.min(max).min(table.len());
                if self.is_shut.load(Ordering::SeqCst) {
                    return Err(Errno::ECANCELED);
                }
                if enough || left().is_zero() {
                    let taken = std::iter::from_fn(|| table.take()).take(max).map(Completion::from).collect();
                    let has_more = table.finished() > 0;
                    drop(table);
                    if has_more {
                        self.notices.lock().as_ref().unwrap_or(&self.bell.event).write(1).unwrap_or_default();
                    }
                    self.flush();
                    return Ok(taken);
                }
                let due = table.deadline().map(|at| at.saturating_duration_since(Instant::now()));
                left().min(due.unwrap_or(LONGEST_SLEEP)).min(LONGEST_SLEEP)
            };
            self.sleep(sleep)?;
        }
    }

    fn sleep(&self, longest: Duration) -> Result<(), Errno> {
        match &self.kernel {
            Kernel::Ring(ring) => ring.wait(longest),
            Kernel::Threads(_) => threads::wait(&self.bell.event, longest),
        }
    }

    /// What was rung so far is about to be looked at.
    fn silence(&self) {
        if let Some(notices) = &*self.notices.lock() {
            let _ = notices.read();
        }
        // The ring is told of each write anew, and leaves the count alone.
        if matches!(self.kernel, Kernel::Threads(_)) {
            let _ = self.bell.event.read();
        }
    }

    /// A descriptor that is readable when something may have ended, for poll(2) and its like. [`Self::wait`] makes it
    /// silent.
    ///
    /// # Errors
    /// EMFILE, or what the kernel says.
    pub fn event(&self) -> io::Result<OwnedFd> {
        let mut notices = self.notices.lock();
        let event = match (&*notices, &self.kernel) {
            (Some(event), _) => Arc::clone(event),
            (None, Kernel::Threads(_)) => Arc::clone(&self.bell.event),
            (None, Kernel::Ring(ring)) => {
                let event = Arc::new(event()?);
                ring.notify(&event)?;
                // Something may have ended before.
                event.write(1)?;
                Arc::clone(notices.insert(event))
            }
        };
        event.as_fd().try_clone_to_owned()
    }

    /// Cancels a request. It ends with ECANCELED, unless it is over by then, once the kernel has let go of its memory.
    pub fn cancel(&self, ticket: Ticket) {
        let slots = self.table.lock().give_up(ticket.0, Errno::ECANCELED);
        self.cancel_pieces(slots);
        self.flush();
        self.bell.wake();
    }

    /// Cancels all requests, and ends the waits of all threads. Returns the requests when the kernel has let go of their
    /// memory, for which it waits. Nothing can be submitted any more.
    pub fn shut_down(&self) -> Vec<Completion> {
        self.is_shut.store(true, Ordering::SeqCst);
        self.bell.wake();
        let _turn = self.waiting.lock();
        let tickets = self.table.lock().tickets();
        tickets.into_iter().for_each(|ticket| self.cancel(Ticket(ticket)));
        while !self.table.lock().tickets().is_empty() {
            self.turn();
            let is_over = self.table.lock().tickets().is_empty();
            if !is_over && let Err(errno) = self.sleep(LONGEST_SLEEP) {
                // The program has closed a descriptor that is not its own. The kernel may still use the memory.
                tracing::error!(%errno, "a queue cannot hear of its requests any more: their memory is kept");
                self.table.lock().leak();
                break;
            }
        }
        let mut table = self.table.lock();
        std::iter::from_fn(|| table.take()).map(Completion::from).collect()
    }

    /// The number of requests that were submitted and not returned by a wait.
    pub fn len(&self) -> usize {
        self.table.lock().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl From<Finished<Buffer>> for Completion {
    fn from(Finished { ticket, result, memory }: Finished<Buffer>) -> Completion {
        Completion { ticket: Ticket(ticket), result, buffer: memory }
    }
}

impl Drop for Queue {
    /// Cancels what is under way, and waits for the kernel to let go of its memory.
    fn drop(&mut self) {
        self.shut_down();
    }
}
