//! Requests of administration that take time. They run on threads apart from those that move bytes and compute. All that
//! ask from one address share a few threads, and the rest of their requests wait in a queue.
//!
//! A request may wait for other shards, and those for requests of this one. So requests that wait never have all threads
//! of an address: the others, for which somebody else may be waiting, go on.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Weak};

use libmodelio::wire::Refusal;
use parking_lot::Mutex;

use super::origins::Origin;
use super::unsent::Unsent;

/// The most threads for the requests of one address.
const MAX_THREADS: usize = 8;
/// Of those, the most for requests that wait for other shards.
const MAX_OF_OTHERS: usize = 3;
/// Of those, the most for requests that take memory, and for models' records. Both keep a core busy.
const MAX_OF_MEMORY: usize = 2;
const MAX_OF_RECORDS: usize = 1;
/// The most threads for all addresses. Beyond half of them each address has one.
const MAX_ALL_THREADS: usize = 128;
/// The most bytes that came with the waiting requests of one address.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// The kind of a request, by what it may wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrandKind {
    /// For no other request.
    Short,
    /// For no other request. Its answer is long.
    Changes,
    /// For no other request. Its answer is pieces of a version.
    Parts,
    /// For no other request. It is about a model's record.
    Record,
    /// For memory.
    Memory,
    /// For other shards.
    Others,
}

/// In the order in which they begin.
const KINDS: [ErrandKind; 6] = [
    ErrandKind::Short,
    ErrandKind::Changes,
    ErrandKind::Parts,
    ErrandKind::Record,
    ErrandKind::Memory,
    ErrandKind::Others,
];

/// A request, and the count of what its connection has under way.
pub(super) struct Errand {
    pub kind: ErrandKind,
    pub unsent: Unsent,
    pub work: Box<dyn FnOnce(Unsent) + Send>,
}

/// The requests of one address.
#[derive(Default)]
struct Line {
    waiting: [VecDeque<Errand>; KINDS.len()],
    running: [usize; KINDS.len()],
    bytes: usize,
}

#[derive(Default)]
struct Lines {
    lines: BTreeMap<Origin, Line>,
    /// The address whose request has begun last: those behind it are next.
    last: Option<Origin>,
    threads: usize,
    /// A thread is starting, and has not taken a request yet.
    is_starting: bool,
}

/// The requests of a process.
pub(super) struct Errands {
    lines: Mutex<Lines>,
    this: Weak<Errands>,
}

impl Errands {
    pub(super) fn new() -> Arc<Errands> {
        Arc::new_cyclic(|this| Errands { lines: Mutex::default(), this: this.clone() })
    }

    /// Runs a request, at once or when there is a thread for it. If its connection ends before that, it does not run.
    ///
    /// # Errors
    /// When too much waits, or there is no thread at all.
    pub(super) fn run(&self, origin: Origin, errand: Errand) -> Result<(), Refusal> {
        let mut lines = self.lines.lock();
        let (line, bytes) = (lines.lines.entry(origin).or_default(), errand.unsent.bytes());
        if line.bytes > 0 && line.bytes + bytes > MAX_WAITING_BYTES {
            let most = MAX_WAITING_BYTES >> 20;
            return Err(Refusal::other(format!("requests with more than {most} MiB wait from this address")));
        }
        line.bytes += bytes;
        line.waiting[errand.kind as usize].push_back(errand);
        match self.add_thread(&mut lines) {
            // Another thread takes it, if there is one.
            Err(error) if lines.threads == 0 => {
                lines.lines.remove(&origin);
                Err(Refusal::other(format!("no thread for it: {error}")))
            }
            _ => Ok(()),
        }
    }

    /// Starts a thread if one more has something to do. One that is starting adds the next one by itself.
    fn add_thread(&self, lines: &mut Lines) -> io::Result<()> {
        let Some(this) = self.this.upgrade().filter(|_| !lines.is_starting && lines.has_next()) else {
            return Ok(());
        };
        std::thread::Builder::new().name("errand".into()).spawn(move || this.work())?;
        lines.threads += 1;
        lines.is_starting = true;
        Ok(())
    }

    /// Runs requests until none may begin.
    fn work(&self) {
        let mut lines = self.lines.lock();
        lines.is_starting = false;
        while let Some((origin, errand)) = lines.next() {
            // If there is no other thread, this one goes on alone.
            let _ = self.add_thread(&mut lines);
            drop(lines);
            let Errand { kind, unsent, work } = errand;
            if !unsent.is_in_vain() {
                work(unsent);
            }
            lines = self.lines.lock();
            lines.ended(origin, kind);
        }
        lines.threads -= 1;
    }
}

impl Line {
    /// The kind of the request that may begin next.
    fn next(&self, threads: usize) -> Option<ErrandKind> {
        if self.running.iter().sum::<usize>() >= threads {
            return None;
        }
        KINDS.into_iter().find(|&kind| {
            let most = match kind {
                ErrandKind::Short | ErrandKind::Changes | ErrandKind::Parts => threads,
                ErrandKind::Record => MAX_OF_RECORDS,
                ErrandKind::Memory => MAX_OF_MEMORY,
                ErrandKind::Others => MAX_OF_OTHERS,
            };
            !self.waiting[kind as usize].is_empty() && self.running[kind as usize] < most
        })
    }

    fn is_idle(&self) -> bool {
        self.running.iter().all(|running| *running == 0) && self.waiting.iter().all(VecDeque::is_empty)
    }
}

impl Lines {
    /// The threads that each address may have now.
    fn share(&self) -> usize {
        if self.threads > MAX_ALL_THREADS / 2 { 1 } else { MAX_THREADS }
    }

    /// Whether one thread more has something to do.
    fn has_next(&self) -> bool {
        self.threads < MAX_ALL_THREADS && self.lines.values().any(|line| line.next(self.share()).is_some())
    }

    /// The next request. It counts as running.
    fn next(&mut self) -> Option<(Origin, Errand)> {
        let share = self.share();
        let may = |(origin, line): (&Origin, &Line)| Some((*origin, line.next(share)?));
        let behind = |origin: &Origin| self.last.is_none_or(|last| *origin > last);
        let found = self.lines.iter().filter(|(origin, _)| behind(origin)).find_map(may);
        let (origin, kind) = found.or_else(|| self.lines.iter().find_map(may))?;
        let line = self.lines.get_mut(&origin)?;
        let errand = line.waiting[kind as usize].pop_front()?;
        line.running[kind as usize] += 1;
        line.bytes -= errand.unsent.bytes();
        self.last = Some(origin);
        Some((origin, errand))
    }

    fn ended(&mut self, origin: Origin, kind: ErrandKind) {
        if let Some(line) = self.lines.get_mut(&origin) {
            line.running[kind as usize] -= 1;
            if line.is_idle() {
                self.lines.remove(&origin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::super::unsent::UnsentAll;
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn origin(number: u8) -> Origin {
        Origin::of(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)))
    }

    /// Requests that say their number when they begin, and last until they are told.
    struct World {
        errands: Arc<Errands>,
        begun: (Sender<u32>, Receiver<u32>),
        connection: Arc<UnsentAll>,
    }

    impl World {
        fn new() -> World {
            World { errands: Errands::new(), begun: channel(), connection: Arc::default() }
        }

        /// Its end is that of what is returned.
        fn ask(&self, origin: Origin, kind: ErrandKind, number: u32) -> Sender<()> {
            self.ask_on(&Arc::default(), origin, kind, number)
        }

        fn ask_on(&self, of: &Arc<UnsentAll>, origin: Origin, kind: ErrandKind, number: u32) -> Sender<()> {
            let (end, ends) = channel();
            let begun = self.begun.0.clone();
            let work = move |_| {
                begun.send(number).unwrap();
                let _ = ends.recv();
            };
            let unsent = Unsent::one_more(of, 1).unwrap();
            self.errands.run(origin, Errand { kind, unsent, work: Box::new(work) }).unwrap();
            end
        }

        fn next(&self) -> u32 {
            self.begun.1.recv_timeout(PATIENCE).expect("a request begins")
        }

        fn none(&self) -> bool {
            self.begun.1.try_recv().is_err()
        }
    }

    #[test]
    fn the_requests_of_an_address_share_a_few_threads_and_others_go_on() {
        let world = World::new();
        let mut ends: Vec<_> =
            (0..500).map(|number| world.ask(origin(1), ErrandKind::Short, number)).collect();
        for _ in 0..MAX_THREADS {
            assert!(world.next() < MAX_THREADS as u32);
        }
        let _other = world.ask(origin(2), ErrandKind::Short, 1000);
        assert_eq!(world.next(), 1000);
        assert!(world.none() && world.errands.lines.lock().threads == MAX_THREADS + 1);
        for next in MAX_THREADS as u32..500 {
            drop(ends.remove(0));
            assert_eq!(world.next(), next, "in their order");
        }
    }

    #[test]
    fn many_requests_at_once_start_no_more_threads_than_may_run() {
        let errands = Errands::new();
        let connection = Arc::new(UnsentAll::default());
        for _ in 0..10_000 {
            let Ok(unsent) = Unsent::one_more(&connection, 0) else { continue };
            errands.run(origin(1), Errand { kind: ErrandKind::Short, unsent, work: Box::new(drop) }).unwrap();
            assert!(errands.lines.lock().threads <= MAX_THREADS + 1);
        }
        while errands.lines.lock().threads > 0 {
            std::thread::yield_now();
        }
        assert!(errands.lines.lock().lines.is_empty());
    }

    #[test]
    fn requests_that_wait_leave_threads_to_others_of_their_address() {
        let world = World::new();
        let slow = [ErrandKind::Record, ErrandKind::Memory, ErrandKind::Others].repeat(50);
        let _ends: Vec<_> = slow.into_iter().map(|kind| world.ask(origin(1), kind, 0)).collect();
        for _ in 0..MAX_OF_RECORDS + MAX_OF_MEMORY + MAX_OF_OTHERS {
            world.next();
        }
        assert!(world.none());
        let _short = world.ask(origin(1), ErrandKind::Short, 1);
        assert_eq!(world.next(), 1);
    }

    #[test]
    fn many_addresses_have_no_more_than_their_threads_and_each_has_one() {
        let world = World::new();
        let asks = |number: u32| world.ask(origin((number % 100) as u8), ErrandKind::Short, number % 100);
        let _ends: Vec<_> = (0..800).map(asks).collect();
        let _last = world.ask(origin(200), ErrandKind::Short, 200);
        let mut begun = std::collections::BTreeSet::new();
        while begun.len() < 101 {
            begun.insert(world.next());
        }
        assert!(begun.contains(&200) && world.errands.lines.lock().threads <= MAX_ALL_THREADS);
    }

    #[test]
    fn a_request_whose_connection_has_ended_does_not_run() {
        let world = World::new();
        let ends: Vec<_> =
            (0..MAX_THREADS as u32).map(|number| world.ask(origin(1), ErrandKind::Short, number)).collect();
        for _ in 0..MAX_THREADS {
            world.next();
        }
        let _in_vain = world.ask_on(&world.connection, origin(1), ErrandKind::Short, 100);
        world.connection.end();
        let _later = world.ask(origin(1), ErrandKind::Short, 101);
        drop(ends);
        assert_eq!(world.next(), 101);
    }

    #[test]
    fn the_bytes_of_waiting_requests_are_limited_by_address() {
        let errands = Errands::new();
        let (end, ends) = channel::<()>();
        let ends = Arc::new(Mutex::new(ends));
        let ask = |from, bytes| {
            let ends = Arc::clone(&ends);
            let unsent = Unsent::one_more(&Arc::default(), bytes)?;
            let work = Box::new(move |_| {
                let _ = ends.lock().recv();
            });
            errands.run(origin(from), Errand { kind: ErrandKind::Memory, unsent, work })
        };
        for _ in 0..MAX_OF_MEMORY {
            ask(1, 1).unwrap();
        }
        while errands.lines.lock().lines[&origin(1)].bytes > 0 {
            std::thread::yield_now();
        }
        ask(1, MAX_WAITING_BYTES - 10).unwrap();
        ask(1, 11).unwrap_err();
        ask(1, 10).unwrap();
        ask(2, MAX_WAITING_BYTES).unwrap();
        drop(end);
    }
}
