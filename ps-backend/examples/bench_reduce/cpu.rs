//! The CPU's part: all threads at once, each with its part of the arrays, which lie in memory as a shard's do.

use std::io::{BufRead, Write, stdin, stdout};
use std::thread::available_parallelism;
use std::time::Instant;

use libmodelio::bytes::kernels::{
    Input, Operands, Output, Source, Wire, accumulate, bytes, bytes_mut, stream_copy,
};
use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::reducer::{Reducer, Step};
use ps_backend::reducers::apply;
use serde_json::{Map, Value, json};

use super::{Outcome, SAMPLES, bytes_of, step};

/// Elements of a block, as a shard has them.
const BLOCK: usize = 64 << 10;

/// Passes of one sample: threads have to be started.
const PASSES: usize = 8;

/// The bytes that a pass reads and writes of each fp32 sum to which a bf16 element is added.
const BYTES_OF_SUM: usize = 2 + 4 + 4;

/// fp32 values in huge pages, where the kernel has them.
struct Array {
    memory: Mapping,
}

impl Array {
    fn new(elements: usize, value: f32) -> Outcome<Array> {
        let mut array = Array { memory: Mapping::anonymous(elements * 4)? };
        array.get_mut().fill(value);
        Ok(array)
    }

    fn get(&self) -> &[f32] {
        // SAFETY: the memory is borrowed as this is.
        unsafe { self.memory.floats(0..self.memory.len() / 4) }
    }

    fn get_mut(&mut self) -> &mut [f32] {
        // SAFETY: the memory is borrowed as this is, which is exclusively.
        unsafe { self.memory.floats_mut(0..self.memory.len() / 4) }
    }
}

/// One thread's part of the arrays, each with its place for results.
struct Part {
    weights: [Array; 2],
    slots: [[Array; 2]; 2],
    sum: Array,
}

/// What is done to a part.
#[derive(Clone)]
enum Work {
    /// The "copy" of STREAM.
    Copy,
    /// An update in place that reads and writes as many bytes as [`Work::Accumulate`], and computes as little as can be.
    Update,
    /// A contribution of bf16 is added to sums.
    Accumulate,
    /// A version is made.
    Reduce(Step),
}

impl Part {
    fn new(elements: usize) -> Outcome<Part> {
        let array = |value| Array::new(elements, value);
        Ok(Part {
            weights: [array(0.5)?, array(1.0)?],
            slots: [[array(0.1)?, array(1.0)?], [array(0.2)?, array(1.0)?]],
            sum: array(0.25)?,
        })
    }

    fn copy(&mut self) {
        let [from, to] = &mut self.weights;
        for (from, to) in from.get().chunks(BLOCK).zip(to.get_mut().chunks_mut(BLOCK)) {
            stream_copy(bytes(from), bytes_mut(to));
        }
    }

    fn update(&mut self) {
        let sums = self.weights[1].get_mut().as_chunks_mut::<16>().0;
        for (line, sums) in self.sum.get().as_chunks::<8>().0.iter().zip(sums) {
            let (low, high) = sums.split_at_mut(8);
            low.iter_mut().zip(high).zip(line).for_each(|((low, high), value)| {
                *low += value;
                *high += value;
            });
        }
    }

    fn accumulate(&mut self) {
        let sums = self.weights[1].get_mut().chunks_mut(BLOCK);
        for (contribution, sums) in bytes(self.sum.get()).chunks(BLOCK * 2).zip(sums) {
            accumulate(Wire::BF16, contribution, sums, false);
        }
    }

    fn reduce(&mut self, step: &Step) {
        let count = step.reducer.state_slots();
        let [w, w_out] = &mut self.weights;
        let [[m, m_out], [v, v_out]] = &mut self.slots;
        let (sum, w, m, v) = (self.sum.get(), w.get(), m.get(), v.get());
        let (w_out, m_out, v_out) = (w_out.get_mut(), m_out.get_mut(), v_out.get_mut());
        for start in (0..w.len()).step_by(BLOCK) {
            let range = start..(start + BLOCK).min(w.len());
            let slot = |number: usize| if number < count { range.clone() } else { 0..0 };
            let input =
                Input { weights: bytes(&w[range.clone()]), master: None, slots: [&m[slot(0)], &v[slot(1)]] };
            let output = Output {
                weights: bytes_mut(&mut w_out[range.clone()]),
                master: None,
                slots: [&mut m_out[slot(0)], &mut v_out[slot(1)]],
            };
            let sources = [Source::Acc(&sum[range.clone()])];
            apply(step, Operands { wire: Wire::F32, sources: &sources, input, output }, false);
        }
    }

    fn work(&mut self, work: &Work) {
        match work {
            Work::Copy => self.copy(),
            Work::Update => self.update(),
            Work::Accumulate => self.accumulate(),
            Work::Reduce(step) => self.reduce(step),
        }
    }
}

/// The parts of all threads of the machine.
struct Parts {
    parts: Vec<Part>,
    elements: usize,
}

impl Parts {
    fn new(elements: usize) -> Outcome<Parts> {
        let threads = available_parallelism()?.get();
        let each = (elements / threads).next_multiple_of(BLOCK);
        // Each thread touches its memory first.
        let parts = std::thread::scope(|scope| {
            let made: Vec<_> = (0..threads)
                .map(|_| scope.spawn(move || Part::new(each).map_err(|error| error.to_string())))
                .collect();
            made.into_iter()
                .map(|made| made.join().map_err(|_| "a thread has ended")?)
                .collect::<Result<_, String>>()
        })?;
        Ok(Parts { parts, elements: each * threads })
    }

    /// The time of a pass, as a mean of several.
    fn time(&mut self, work: &Work) -> f64 {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in &mut self.parts {
                scope.spawn(move || (0..PASSES).for_each(|_| part.work(work)));
            }
        });
        start.elapsed().as_secs_f64() / PASSES as f64
    }
}

/// Measures everything in each round.
pub fn measured(quick: bool) -> Outcome<Value> {
    let mut parts = Parts::new(if quick { 32 << 20 } else { 128 << 20 })?;
    let mut all = vec![
        ("copy", Work::Copy, 8),
        ("update", Work::Update, BYTES_OF_SUM),
        ("bf16_accumulate", Work::Accumulate, BYTES_OF_SUM),
    ];
    for reducer in [Reducer::Sgd, Reducer::Momentum, Reducer::Adam] {
        all.push((reducer.name(), Work::Reduce(step(reducer)), bytes_of(reducer)));
    }
    let mut seconds = vec![Vec::new(); all.len()];
    // The first round is not counted.
    for round in 0..=SAMPLES {
        for ((_, work, _), seconds) in all.iter().zip(&mut seconds) {
            let taken = parts.time(work);
            if round > 0 {
                seconds.push(taken);
            }
        }
    }
    let figures: Map<String, Value> = (all.iter().zip(seconds))
        .map(|((name, _, bytes), seconds)| {
            ((*name).to_owned(), json!({ "seconds": seconds, "bytes": bytes * parts.elements }))
        })
        .collect();
    let threads = parts.parts.len();
    Ok(json!({
        "device": format!("{threads} threads of the CPU"),
        "threads": threads,
        "elements": parts.elements,
        "figures": figures,
    }))
}

/// A step of Adam for each line of standard input, and its seconds on standard output.
pub fn adam_by_turns(elements: usize) -> Outcome<Value> {
    let mut parts = Parts::new(elements)?;
    let work = Work::Reduce(step(Reducer::Adam));
    parts.time(&work);
    for line in stdin().lock().lines() {
        line?;
        println!("{}", parts.time(&work));
        stdout().flush()?;
    }
    Ok(Value::Null)
}
