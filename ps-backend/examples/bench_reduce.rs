//! How fast versions are computed, beside the memory that bounds it; `scripts/bench-reduce` runs this.
//!
//! `bench_reduce [--quick] [--cpu | --gpu NUMBER]` prints a JSON object: the name of the device, and seconds and bytes of
//! each measurement, as medians. The bytes are those that are read and written.

use std::error::Error;
use std::process::ExitCode;
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Instant;

use libmodelio::bytes::kernels::{Input, Operands, Output, Source, Wire, bytes, bytes_mut, stream_copy};
#[cfg(feature = "cuda")]
use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::reducer::{Reducer, Step};
use ps_backend::reducers::apply;
use serde_json::{Map, Value, json};

/// Samples of each measurement.
const SAMPLES: usize = 7;
/// Elements of a block, as a shard has them.
const BLOCK: usize = 64 << 10;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// The median time of `work`, which is done once before.
fn time(mut work: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    work()?;
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        let start = Instant::now();
        work()?;
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(median(samples))
}

fn figure(seconds: f64, bytes: usize) -> Value {
    json!({ "seconds": seconds, "bytes": bytes })
}

fn step(reducer: Reducer) -> Step {
    Step { reducer, contributions: 1, t: 2, ..Step::default() }
}

/// The bytes that a step reads and writes of each fp32 element: the sum, and the weights and state twice.
fn bytes_of(reducer: Reducer) -> usize {
    4 + 8 * (1 + reducer.state_slots())
}

/// Passes of one sample on the CPU: threads have to be started.
const PASSES: usize = 8;

/// One thread's part of the arrays, each with its place for results.
struct Part {
    arrays: [Vec<f32>; 6],
    sum: Vec<f32>,
}

impl Part {
    fn new(elements: usize) -> Part {
        let value = |value: f32| vec![value; elements];
        Part { arrays: [0.5, 1.0, 0.1, 1.0, 0.2, 1.0].map(value), sum: value(0.25) }
    }

    fn copy(&mut self) {
        let [from, to, ..] = &mut self.arrays;
        for (from, to) in from.chunks(BLOCK).zip(to.chunks_mut(BLOCK)) {
            stream_copy(bytes(from), bytes_mut(to));
        }
    }

    fn reduce(&mut self, step: &Step) {
        let slots = step.reducer.state_slots();
        let [w, w_out, m, m_out, v, v_out] = &mut self.arrays;
        for start in (0..w.len()).step_by(BLOCK) {
            let range = start..(start + BLOCK).min(w.len());
            let slot = |number: usize| if number < slots { range.clone() } else { 0..0 };
            let input =
                Input { weights: bytes(&w[range.clone()]), master: None, slots: [&m[slot(0)], &v[slot(1)]] };
            let output = Output {
                weights: bytes_mut(&mut w_out[range.clone()]),
                master: None,
                slots: [&mut m_out[slot(0)], &mut v_out[slot(1)]],
            };
            let sources = [Source::Acc(&self.sum[range.clone()])];
            apply(step, Operands { wire: Wire::F32, sources: &sources, input, output }, false);
        }
    }
}

/// Does all passes of a sample.
fn on_threads(parts: &mut [Part], work: impl Fn(&mut Part) + Sync) {
    std::thread::scope(|scope| {
        for part in parts {
            let work = &work;
            scope.spawn(move || (0..PASSES).for_each(|_| work(part)));
        }
    });
}

/// All threads of the machine, each with its part of the elements.
fn cpu(quick: bool) -> Outcome<Value> {
    let threads = available_parallelism()?.get();
    let elements = (if quick { 32 << 20 } else { 128 << 20 }) / threads / BLOCK * BLOCK;
    // Each thread touches its memory first.
    let mut parts: Vec<Part> = std::thread::scope(|scope| {
        let made: Vec<_> = (0..threads).map(|_| scope.spawn(move || Part::new(elements))).collect();
        made.into_iter().filter_map(|made| made.join().ok()).collect()
    });
    let all = elements * threads;
    let mut figures = Map::new();
    let of_pass = |seconds: f64, bytes| figure(seconds / PASSES as f64, bytes);
    let seconds = time(|| {
        on_threads(&mut parts, Part::copy);
        Ok(())
    })?;
    figures.insert("copy".into(), of_pass(seconds, all * 8));
    for reducer in [Reducer::Sgd, Reducer::Momentum, Reducer::Adam] {
        let step = step(reducer);
        let seconds = time(|| {
            on_threads(&mut parts, |part| part.reduce(&step));
            Ok(())
        })?;
        figures.insert(reducer.name().into(), of_pass(seconds, all * bytes_of(reducer)));
    }
    Ok(json!({ "device": format!("{threads} threads of the CPU"), "elements": all, "figures": figures }))
}

#[cfg(not(feature = "cuda"))]
fn gpu(_: u32, _: bool) -> Outcome<Value> {
    Err("this program was built without the feature cuda".into())
}

#[cfg(feature = "cuda")]
fn gpu(number: u32, quick: bool) -> Outcome<Value> {
    use libmodelio::vocabulary::groups::Steps;
    use libmodelio::vocabulary::tensor_steps::Treatment;
    use ps_backend::device::cuda::Cuda;
    use ps_backend::device::{Accelerator, Arrays, Device, Does, Launch, Memory, Runs};
    use ps_backend::reducers::formula;

    /// Kernels of one sample.
    const REPEATED: usize = 10;
    let cuda = Arc::new(Cuda::new(number)?);
    let device: Arc<dyn Device> = Arc::clone(&cuda) as _;
    let elements: usize = if quick { 64 << 20 } else { 256 << 20 };
    let size = elements * 4;
    let mut figures = Map::new();
    {
        let stream = device.open_stream()?;
        let arrays = (0..4).map(|_| Memory::take(&device, size)).collect::<Result<Vec<_>, _>>()?;
        let at = |array: usize| arrays[array].at(0..size);
        for array in 0..4 {
            // SAFETY: the memory lives to the end of this block, and the stream is waited for.
            unsafe { device.clear(stream, at(array), size)? };
        }
        device.synchronize(stream)?;
        let seconds = time(|| {
            for _ in 0..REPEATED {
                // SAFETY: as above.
                unsafe { cuda.copy(stream, at(0), at(1), size)? };
            }
            Ok(device.synchronize(stream)?)
        })?;
        figures.insert("copy".into(), figure(seconds / REPEATED as f64, 2 * size));
        for reducer in [Reducer::Sgd, Reducer::Momentum, Reducer::Adam] {
            let formula = formula(&step(reducer), true);
            let slots = [2, 3].map(|array| (array - 2 < reducer.state_slots()).then(|| at(array)));
            let sums = [at(1)];
            let (wire, values) = (Wire::F32, at(0));
            let launch =
                Launch { wire, formula: &formula, count: elements, values, slots, sums: &sums, out: None };
            let seconds = time(|| {
                for _ in 0..REPEATED {
                    // SAFETY: as above.
                    unsafe { device.reduce(stream, &launch)? };
                }
                Ok(device.synchronize(stream)?)
            })?;
            let moved = elements * bytes_of(reducer);
            figures.insert(reducer.name().into(), figure(seconds / REPEATED as f64, moved));
        }
        device.close_stream(stream);
    }
    // A version is made of sums in the host's memory, into a version's buffer there.
    let accelerator = Accelerator::new(Arc::clone(&device))?;
    let sum = Arc::new(Mapping::anonymous(size)?);
    let [front, back] = [Mapping::memfd("front", size)?, Mapping::memfd("back", size)?].map(Arc::new);
    for memory in [&sum, &front, &back] {
        memory.prefault()?;
    }
    let arrays = Arrays::new(&accelerator, elements, 2)?;
    let mut runs = Runs::new(elements);
    let of = Treatment { t: 2, ..Treatment::default() };
    let does = Does::Reduce { of, anew: false, sums: [Arc::clone(&sum)].into_iter().collect() };
    runs.push(Wire::F32, &does, 0..elements, 0);
    let adam = Steps::from(step(Reducer::Adam));
    let seconds = time(|| {
        // SAFETY: this thread alone uses the memory. The runs are of all elements, each once.
        unsafe { arrays.run(&adam, &front, &back, &runs)? };
        Ok(())
    })?;
    figures.insert("end_to_end".into(), figure(seconds, 2 * size));
    let there = Memory::take(&device, size)?;
    let stream = device.open_stream()?;
    let seconds = time(|| {
        // SAFETY: nobody writes the sums, and the copy is waited for.
        unsafe { device.upload(stream, sum.bytes(0..size), there.at(0..size))? };
        Ok(device.synchronize(stream)?)
    })?;
    figures.insert("upload".into(), figure(seconds, size));
    let seconds = time(|| {
        // SAFETY: nobody else uses the version, and the copy is waited for.
        unsafe { device.download(stream, there.at(0..size), back.bytes_mut(0..size))? };
        Ok(device.synchronize(stream)?)
    })?;
    figures.insert("download".into(), figure(seconds, size));
    let other = device.open_stream()?;
    let seconds = time(|| {
        // SAFETY: nobody writes the sums, nobody else uses the version, and the copies are waited for. Their memory on the
        // device is not the same.
        unsafe {
            device.upload(stream, sum.bytes(0..size / 2), there.at(0..size / 2))?;
            device.download(other, there.at(size / 2..size), back.bytes_mut(0..size / 2))?;
        }
        device.synchronize(stream)?;
        Ok(device.synchronize(other)?)
    })?;
    figures.insert("both_ways".into(), figure(seconds, size));
    device.close_stream(other);
    device.close_stream(stream);
    Ok(json!({ "device": device.name(), "elements": elements, "figures": figures }))
}

fn measured() -> Outcome<Value> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (quick, rest) = match arguments[..] {
        ["--quick", ref rest @ ..] => (true, rest),
        ref rest => (false, rest),
    };
    match rest {
        [] | ["--cpu"] => cpu(quick),
        ["--gpu", number] => gpu(number.parse()?, quick),
        _ => Err("usage: bench_reduce [--quick] [--cpu | --gpu NUMBER]".into()),
    }
}

fn main() -> ExitCode {
    match measured() {
        Ok(measured) => {
            println!("{measured}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
