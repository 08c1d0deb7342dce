//! The GPU's part. Seconds are medians.

use std::sync::Arc;
use std::time::Instant;

use libmodelio::bytes::kernels::Wire;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::groups::Steps;
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::tensor_steps::Treatment;
use ps_backend::device::cuda::Cuda;
use ps_backend::device::{Accelerator, Arrays, Device, Does, Launch, Memory, Runs};
use ps_backend::reducers::formula;
use serde_json::{Map, Value, json};

use super::{Outcome, SAMPLES, bytes_of, step};

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

/// Kernels, copies and whole versions on a GPU.
pub fn measured(number: u32, quick: bool) -> Outcome<Value> {
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
