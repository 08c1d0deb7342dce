//! A device in software, which refuses what a real one would do wrongly now and then.
//!
//! Work is done as late as possible: when somebody waits for it, and no sooner. So a result that is used before it was
//! waited for is wrong each time. Besides, every access to memory has its place in an order of what happens before
//! what, as streams, events and waits make it. Two accesses of which one writes, and that no order holds apart, are a
//! race, and end the test. So do copies and kernels out of bounds, memory that is used after it was given back or given
//! back while it is used, and whatever is left when the device ends.
//!
//! Kernels are computed by the CPU's, with formulas that are written anew here.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use libmodelio::bytes::kernels::{self, Input, Lanes, Op, Operands, Output, Scalar, Source};
use ps_backend::device::{Accelerator, Address, Adoption, Device, DeviceError, Event, Launch, Room, Stream};
use ps_backend::reducers::{CONSTANTS, Formula, Function};

/// For each stream, how much of its work.
type Clock = BTreeMap<u64, u64>;

fn merge(clock: &mut Clock, other: &Clock) {
    for (&stream, &count) in other {
        let known = clock.entry(stream).or_default();
        *known = (*known).max(count);
    }
}

/// A use of memory, of the device or of the host: their addresses do not overlap.
#[derive(Clone, Debug)]
struct Access {
    range: Range<u64>,
    writes: bool,
    stream: u64,
    number: u64,
    what: &'static str,
}

type Work = Box<dyn FnOnce(&mut Memory) + Send>;

enum Task {
    Work(Work),
    /// Other streams' work up to here comes first.
    After(Clock),
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<(u64, Task)>,
    /// What its next task comes after, itself included.
    clock: Clock,
    /// The number of its last task.
    number: u64,
}

/// The memory, by the first address of each allocation.
#[derive(Default)]
struct Memory(BTreeMap<u64, Vec<u8>>);

impl Memory {
    fn bytes(&mut self, at: u64, len: usize) -> &mut [u8] {
        let (start, bytes) = self.0.range_mut(..=at).next_back().expect("memory of the device");
        let from = (at - start) as usize;
        &mut bytes[from..from + len]
    }

    fn words(&mut self, at: u64, len: usize) -> Vec<f32> {
        self.bytes(at, len * 4).as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
    }

    fn holds(&self, range: &Range<u64>) -> bool {
        let start = self.0.range(..=range.start).next_back();
        start.is_some_and(|(start, bytes)| range.end <= start + bytes.len() as u64)
    }
}

#[derive(Default)]
struct Inner {
    memory: Memory,
    taken: u64,
    next: u64,
    streams: HashMap<u64, Queue>,
    events: HashMap<u64, Clock>,
    pinned: HashMap<usize, usize>,
    /// What the host has waited for.
    seen: Clock,
    accesses: Vec<Access>,
    /// Copies and kernels that may still be ordered before the device fails.
    lives_for: Option<u64>,
    launches: u64,
}

/// The device.
pub struct Software {
    room: u64,
    inner: Mutex<Inner>,
}

impl std::fmt::Debug for Software {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Software")
    }
}

/// The device, and an accelerator on it.
pub fn software(room: u64) -> (Arc<Software>, Arc<Accelerator>) {
    let device = Software::new(room);
    let accelerator = Accelerator::new(Arc::clone(&device) as Arc<dyn Device>).expect("room for lanes");
    (device, accelerator)
}

impl Software {
    /// A device with so many bytes.
    pub fn new(room: u64) -> Arc<Software> {
        let inner = Inner { next: 1 << 60, ..Inner::default() };
        Arc::new(Software { room, inner: Mutex::new(inner) })
    }

    /// The device fails after so many more copies and kernels.
    pub fn fail_after(&self, count: u64) {
        self.lock().lives_for = Some(count);
    }

    /// The number of kernels that were launched.
    pub fn launches(&self) -> u64 {
        self.lock().launches
    }

    /// The bytes in use.
    pub fn taken(&self) -> u64 {
        self.lock().taken
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn failed(&self) -> DeviceError {
        DeviceError::Failed { device: self.name().into(), what: "it has fallen off the bus".into() }
    }

    /// Orders work, with its accesses.
    fn order(
        &self,
        stream: Stream,
        what: &'static str,
        uses: &[(Range<u64>, bool)],
        work: impl FnOnce(&mut Memory) + Send + 'static,
    ) -> Result<(), DeviceError> {
        let mut inner = self.lock();
        if let Some(left) = &mut inner.lives_for {
            if *left == 0 {
                return Err(self.failed());
            }
            *left -= 1;
        }
        let seen = inner.seen.clone();
        let queue = inner.streams.get_mut(&stream.0).expect("an open stream");
        queue.number += 1;
        let number = queue.number;
        merge(&mut queue.clock, &seen);
        queue.clock.insert(stream.0, number);
        queue.tasks.push_back((number, Task::Work(Box::new(work))));
        let clock = queue.clock.clone();
        for (range, writes) in uses.iter().filter(|(range, _)| !range.is_empty()) {
            if range.start >= 1 << 60 {
                assert!(inner.memory.holds(range), "{what}: {range:x?} is not in the device's memory");
            }
            for other in &inner.accesses {
                let overlaps = other.range.start < range.end && range.start < other.range.end;
                let conflicts = overlaps && (other.writes || *writes);
                let ordered = || clock.get(&other.stream).is_some_and(|&known| other.number <= known);
                assert!(
                    !conflicts || ordered(),
                    "race: {what} on stream {} and {} on stream {} use {range:x?}",
                    stream.0,
                    other.what,
                    other.stream
                );
            }
        }
        let uses = uses.iter().cloned();
        let new = uses.map(|(range, writes)| Access { range, writes, stream: stream.0, number, what });
        inner.accesses.extend(new);
        Ok(())
    }
}

impl Inner {
    /// Does the work of a stream up to a number.
    fn run(&mut self, stream: u64, upto: u64) {
        loop {
            let Some(queue) = self.streams.get_mut(&stream) else { return };
            if queue.tasks.front().is_none_or(|(number, _)| *number > upto) {
                return;
            }
            let Some((_, task)) = queue.tasks.pop_front() else { return };
            match task {
                Task::Work(work) => work(&mut self.memory),
                Task::After(clock) => {
                    for (other, upto) in clock.into_iter().filter(|(other, _)| *other != stream) {
                        self.run(other, upto);
                    }
                }
            }
        }
    }
}

fn device_range(at: Address, bytes: usize) -> Range<u64> {
    at.0..at.0 + bytes as u64
}

fn host_range(of: *const [u8]) -> Range<u64> {
    let start = of.cast::<u8>().addr() as u64;
    start..start + of.len() as u64
}

/// Ends the test unless this holds. A test that has failed already gives back what it has in no order.
fn demand(holds: bool, what: &str) {
    assert!(holds || std::thread::panicking(), "{what}");
}

/// Host memory that a copy uses later. Whoever orders the copy keeps it.
struct Host(*mut u8, usize);

// SAFETY: the caller of a copy says that nobody else uses the memory until it is done.
unsafe impl Send for Host {}

impl Device for Software {
    fn name(&self) -> &str {
        "a device in software"
    }

    fn room(&self) -> Result<Room, DeviceError> {
        Ok(Room { free: self.room - self.lock().taken, total: self.room })
    }

    fn allocate(&self, bytes: usize) -> Result<Address, DeviceError> {
        let mut inner = self.lock();
        let free = self.room - inner.taken;
        if bytes as u64 > free {
            let device = self.name().to_owned();
            return Err(DeviceError::Room { device, needed: bytes as u64, free });
        }
        let at = inner.next;
        // The gap is nobody's, so a use that runs over the end is found.
        inner.next += (bytes as u64).next_multiple_of(256) + 4096;
        inner.taken += bytes as u64;
        // Whoever reads what nobody has written sees NaN.
        inner.memory.0.insert(at, vec![0xff; bytes]);
        Ok(Address(at))
    }

    fn free(&self, at: Address) {
        let mut inner = self.lock();
        let bytes = inner.memory.0.remove(&at.0).expect("memory is given back once");
        let range = device_range(at, bytes.len());
        let in_use = inner.accesses.iter().find(|use_| {
            use_.range.start < range.end
                && range.start < use_.range.end
                && inner.seen.get(&use_.stream).is_none_or(|&seen| seen < use_.number)
        });
        demand(in_use.is_none(), "memory is given back while in use");
        inner.accesses.retain(|use_| use_.range.start >= range.end || range.start >= use_.range.end);
        inner.taken -= bytes.len() as u64;
    }

    fn open_stream(&self) -> Result<Stream, DeviceError> {
        let mut inner = self.lock();
        let stream = inner.next;
        inner.next += 256;
        inner.streams.insert(stream, Queue::default());
        Ok(Stream(stream))
    }

    fn close_stream(&self, stream: Stream) {
        let mut inner = self.lock();
        let queue = inner.streams.remove(&stream.0).expect("a stream is closed once");
        demand(queue.tasks.is_empty(), "a stream is closed that has work left");
        let is_used = inner.accesses.iter().any(|use_| use_.stream == stream.0);
        demand(!is_used, "a stream is closed whose work nobody has waited for");
        let Inner { streams, events, seen, .. } = &mut *inner;
        let clocks = streams.values_mut().map(|queue| &mut queue.clock).chain(events.values_mut());
        for clock in clocks.chain([seen]) {
            clock.remove(&stream.0);
        }
    }

    fn open_event(&self) -> Result<Event, DeviceError> {
        let mut inner = self.lock();
        let event = inner.next;
        inner.next += 256;
        inner.events.insert(event, Clock::new());
        Ok(Event(event))
    }

    fn close_event(&self, event: Event) {
        self.lock().events.remove(&event.0).expect("an event is closed once");
    }

    unsafe fn pin(&self, start: NonNull<u8>, bytes: usize) -> Result<(), DeviceError> {
        assert!(bytes > 0);
        let before = self.lock().pinned.insert(start.as_ptr().addr(), bytes);
        assert_eq!(before, None, "memory is pinned once");
        Ok(())
    }

    fn unpin(&self, start: NonNull<u8>) {
        let mut inner = self.lock();
        let bytes = inner.pinned.remove(&start.as_ptr().addr()).expect("memory is unpinned once");
        let start = start.as_ptr().addr() as u64;
        let in_use = inner.accesses.iter().any(|use_| {
            use_.range.start < start + bytes as u64
                && start < use_.range.end
                && inner.seen.get(&use_.stream).is_none_or(|&seen| seen < use_.number)
        });
        demand(!in_use, "memory is unpinned while in use");
    }

    unsafe fn upload(&self, stream: Stream, from: *const [u8], to: Address) -> Result<(), DeviceError> {
        let host = Host(from.cast::<u8>().cast_mut(), from.len());
        let uses = [(host_range(from), false), (device_range(to, from.len()), true)];
        self.order(stream, "upload", &uses, move |memory| {
            let Host(start, len) = { host };
            // SAFETY: the caller keeps the memory until the copy is done.
            let from = unsafe { std::slice::from_raw_parts(start, len) };
            memory.bytes(to.0, len).copy_from_slice(from);
        })
    }

    unsafe fn download(&self, stream: Stream, from: Address, to: *mut [u8]) -> Result<(), DeviceError> {
        let host = Host(to.cast::<u8>(), to.len());
        let uses = [(host_range(to), true), (device_range(from, to.len()), false)];
        self.order(stream, "download", &uses, move |memory| {
            let Host(start, len) = { host };
            // SAFETY: the caller keeps the memory for the copy until it is done.
            let to = unsafe { std::slice::from_raw_parts_mut(start, len) };
            to.copy_from_slice(memory.bytes(from.0, len));
        })
    }

    unsafe fn clear(&self, stream: Stream, at: Address, bytes: usize) -> Result<(), DeviceError> {
        let uses = [(device_range(at, bytes), true)];
        self.order(stream, "clear", &uses, move |memory| memory.bytes(at.0, bytes).fill(0))
    }

    unsafe fn reduce(&self, stream: Stream, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let &Launch { wire, formula, count, values, slots, sums, out } = launch;
        let (formula, sums) = (*formula, sums.to_vec());
        let bytes = count * wire.words() * 4;
        let slots = &slots[..formula.function.slots()];
        let slots: Vec<Address> = slots.iter().map(|slot| slot.expect("a slot")).collect();
        assert_eq!(out.is_some(), wire.is_narrow(), "narrow weights have a place of their own");
        // A kernel reads and writes 16 bytes at once.
        let phases = slots.iter().chain(&sums).chain([&values]).map(|at| at.0 % 16);
        let phases: Vec<u64> = phases.chain(out.map(|at| at.0 * (4 / wire.size()) as u64 % 16)).collect();
        assert!(phases.iter().all(|phase| *phase == phases[0] && phase % 4 == 0), "{phases:?}");
        let writes = slots.iter().chain([&values]).map(|at| (device_range(*at, bytes), true));
        let reads = sums.iter().map(|at| (device_range(*at, bytes), false));
        let narrow = out.map(|at| (device_range(at, count * wire.size()), true));
        let uses: Vec<_> = writes.chain(reads).chain(narrow).collect();
        self.lock().launches += 1;
        self.order(stream, "a kernel", &uses, move |memory| {
            let words = count * wire.words();
            let before = memory.words(values.0, words);
            let old: Vec<Vec<f32>> = slots.iter().map(|at| memory.words(at.0, words)).collect();
            let sums: Vec<Vec<f32>> = sums.iter().map(|at| memory.words(at.0, words)).collect();
            let sources: Vec<Source<'_>> = sums.iter().map(|sum| Source::Acc(sum)).collect();
            let mut master = before.clone();
            let mut new = old.clone();
            let mut weights = vec![0; count * wire.size()];
            let unread = vec![0; count * wire.size()];
            let slot = |number: usize| old.get(number).map_or(&[][..], Vec::as_slice);
            let input = Input {
                weights: if wire.is_narrow() { &unread } else { kernels::bytes(&before) },
                master: wire.is_narrow().then_some(&before),
                slots: [slot(0), slot(1)],
            };
            let mut new_slots = new.iter_mut();
            let mut next = || new_slots.next().map_or(&mut [][..], Vec::as_mut_slice);
            let output = Output {
                weights: &mut weights,
                master: wire.is_narrow().then_some(&mut master),
                slots: [next(), next()],
            };
            compute(&formula, Operands { wire, sources: &sources, input, output });
            let result = if wire.is_narrow() { kernels::bytes(&master) } else { &weights };
            memory.bytes(values.0, bytes).copy_from_slice(result);
            for (at, slot) in slots.iter().zip(&new) {
                memory.bytes(at.0, bytes).copy_from_slice(kernels::bytes(slot));
            }
            if let Some(out) = out {
                memory.bytes(out.0, weights.len()).copy_from_slice(&weights);
            }
        })
    }

    unsafe fn adopt(&self, stream: Stream, adoption: &Adoption) -> Result<(), DeviceError> {
        let &Adoption { wire, count, values, before, after } = adoption;
        assert!(wire.is_narrow());
        let reads = [before, after].map(|at| (device_range(at, count * wire.size()), false));
        let uses = [&reads[..], &[(device_range(values, count * 4), true)]].concat();
        self.order(stream, "a kernel that adopts", &uses, move |memory| {
            let [old, new] = [before, after].map(|at| memory.bytes(at.0, count * wire.size()).to_vec());
            let mut masters = memory.words(values.0, count);
            kernels::widen_changed(wire, &old, &new, &mut masters);
            memory.bytes(values.0, count * 4).copy_from_slice(kernels::bytes(&masters));
        })
    }

    fn record(&self, stream: Stream, event: Event) -> Result<(), DeviceError> {
        let mut inner = self.lock();
        let seen = inner.seen.clone();
        let queue = inner.streams.get_mut(&stream.0).expect("an open stream");
        merge(&mut queue.clock, &seen);
        let clock = queue.clock.clone();
        *inner.events.get_mut(&event.0).expect("an open event") = clock;
        Ok(())
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), DeviceError> {
        let mut inner = self.lock();
        let clock = inner.events.get(&event.0).expect("an open event").clone();
        let queue = inner.streams.get_mut(&stream.0).expect("an open stream");
        queue.number += 1;
        let number = queue.number;
        merge(&mut queue.clock, &clock);
        queue.clock.insert(stream.0, number);
        queue.tasks.push_back((number, Task::After(clock)));
        Ok(())
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        let mut inner = self.lock();
        let upto = inner.streams.get(&stream.0).expect("an open stream").number;
        inner.run(stream.0, upto);
        let clock = inner.streams[&stream.0].clock.clone();
        merge(&mut inner.seen, &clock);
        let Inner { accesses, seen, .. } = &mut *inner;
        accesses.retain(|use_| seen.get(&use_.stream).is_none_or(|&seen| seen < use_.number));
        match inner.lives_for {
            Some(0) => Err(self.failed()),
            _ => Ok(()),
        }
    }
}

impl Drop for Software {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let inner = self.lock();
        assert!(inner.memory.0.is_empty(), "{} allocations are left", inner.memory.0.len());
        assert!(inner.streams.is_empty() && inner.events.is_empty(), "streams or events are left");
        assert!(inner.pinned.is_empty(), "memory is left pinned");
    }
}

/// The formulas, in the order of [`Function`].
struct Mirror<const F: u8, S>([S; CONSTANTS]);

impl<const F: u8, S: Scalar> Clone for Mirror<F, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<const F: u8, S: Scalar> Copy for Mirror<F, S> {}

impl<const F: u8, S: Scalar> Op for Mirror<F, S> {
    type Scalar = S;
    const READS_WEIGHTS: bool = F != 0 && F != 1;
    const READS_SLOTS: bool = F != 4 && F != 6;
    const SLOTS: usize = [0, 0, 0, 0, 1, 1, 1, 1, 2, 1, 1, 1][F as usize];

    fn step<L: Lanes<Scalar = S>>(&self, g: L, w: L, [s0, s1]: [L; 2]) -> (L, [L; 2]) {
        let k = self.0.map(L::splat);
        let gradient = (g * k[0]).clamp(self.0[2]) + k[1] * w;
        match F {
            0 => (g, [s0, s1]),
            1 | 2 => (k[0] * w + (k[1] * g).clamp(self.0[2]), [s0, s1]),
            3 => (w - k[3] * gradient, [s0, s1]),
            4..=7 => {
                let first = F == 4 || F == 6;
                let buffer = if first { gradient } else { k[4] * s0 + k[5] * gradient };
                let direction = if F >= 6 { gradient + k[4] * buffer } else { buffer };
                (w - k[3] * direction, [buffer, s1])
            }
            8 => {
                let m = s0 + (gradient - s0) * k[4];
                let v = k[5] * s1 + k[6] * gradient * gradient;
                (k[3] * w - k[7] * m / (v.sqrt() + k[8]), [m, v])
            }
            9 => {
                let square = k[3] * s0 + k[4] * gradient * gradient;
                (w - k[5] * gradient / (square.sqrt() + k[6]), [square, s1])
            }
            10 => {
                let squares = s0 + gradient * gradient;
                (w - k[3] * gradient / (squares.sqrt() + k[4]), [squares, s1])
            }
            11 => {
                let direction = (k[4] * s0 + k[5] * gradient).sign();
                (k[3] * w - k[8] * direction, [k[6] * s0 + k[7] * gradient, s1])
            }
            _ => unreachable!("no mirror of formula {F}"),
        }
    }
}

fn compute(formula: &Formula, operands: Operands<'_>) {
    macro_rules! with {
        ($number:literal) => {
            operands
                .reduce(|| Mirror::<$number, f32>(formula.single), || Mirror::<$number, f64>(formula.double))
        };
    }
    match formula.function {
        Function::Total => with!(0),
        Function::Scaled => with!(1),
        Function::Carried => with!(2),
        Function::Sgd => with!(3),
        Function::MomentumFirst => with!(4),
        Function::Momentum => with!(5),
        Function::NesterovFirst => with!(6),
        Function::Nesterov => with!(7),
        Function::Adam => with!(8),
        Function::RmsProp => with!(9),
        Function::AdaGrad => with!(10),
        Function::Lion => with!(11),
    };
}
