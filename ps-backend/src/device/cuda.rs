//! NVIDIA GPUs, by the CUDA driver.
//!
//! The driver is looked for at run time, and nothing else of CUDA is needed: the kernels are PTX in this program
//! (`kernels.ptx`, which `scripts/build-ptx` makes of `kernels.cu`), and the driver compiles them for the GPU when the
//! device is opened.
//!
//! This module holds `unsafe`: calls of the driver. Handles come from the driver, and live as long as the device.
//! Whoever orders work keeps to the rules of [`Device`].

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use libmodelio::bytes::kernels::Wire;
use strum::IntoEnumIterator;

use super::kernels;
use super::{Address, Adoption, Device, DeviceError, Event, Launch, Room, Stream};
use crate::reducers::{CONSTANTS, Function};

/// The compute capability that the PTX is for.
const CAPABILITY: (i32, i32) = (7, 0);
/// Threads of a block.
const THREADS: u32 = 256;
/// Elements that a thread computes at once, but for F64.
const ELEMENTS_PER_THREAD: usize = 4;

/// A GPU.
#[derive(Debug)]
pub struct Cuda {
    name: String,
    number: sys::CUdevice,
    context: sys::CUcontext,
    module: sys::CUmodule,
    reduce: HashMap<(Function, Wire), sys::CUfunction>,
    adopt: HashMap<Wire, sys::CUfunction>,
}

// SAFETY: the driver's handles may be used by any thread, at once. Each call makes the context the thread's own first.
unsafe impl Send for Cuda {}
// SAFETY: as for Send.
unsafe impl Sync for Cuda {}

/// A run's memory, as `kernels.cu` declares it.
#[repr(C)]
struct Run {
    values: u64,
    slots: [u64; 2],
    sums: [u64; 2],
    out: u64,
    count: u64,
    sum_count: u32,
    unused: u32,
}

type Outcome = Result<(), result::DriverError>;

/// The driver's words for an error.
fn text(error: result::DriverError) -> String {
    let [name, about] = [error.error_name(), error.error_string()]
        .map(|text| text.map_or_else(|_| "unknown".into(), |text| text.to_string_lossy()));
    format!("{about} ({name})")
}

impl Cuda {
    /// Opens the GPU of this number.
    ///
    /// # Errors
    /// [`DeviceError::Missing`] if there is no such GPU, no driver, or a GPU or driver that is too old.
    pub fn open(number: u32) -> Result<Arc<dyn Device>, DeviceError> {
        Cuda::new(number).map(|cuda| Arc::new(cuda) as Arc<dyn Device>)
    }

    /// Like [`Self::open`].
    ///
    /// # Errors
    /// The errors of [`Self::open`].
    pub fn new(number: u32) -> Result<Cuda, DeviceError> {
        let asked = format!("cuda:{number}");
        let missing = |why: String| DeviceError::Missing(format!("{asked}: {why}"));
        let refused = |what: &'static str| {
            let asked = asked.clone();
            move |error| DeviceError::Missing(format!("{asked}: {what}: {}", text(error)))
        };
        // SAFETY: it only loads the driver's library, which any program may.
        if !unsafe { sys::is_culib_present() } {
            return Err(missing("there is no NVIDIA driver here (libcuda.so.1 cannot be loaded)".into()));
        }
        result::init().map_err(refused("the NVIDIA driver does not start"))?;
        let count = result::device::get_count().map_err(refused("no GPU is found"))?;
        let Some(ordinal) = i32::try_from(number).ok().filter(|&number| number < count) else {
            let known = match count {
                0 => "none".to_owned(),
                1 => "only cuda:0".to_owned(),
                count => format!("cuda:0 to cuda:{}", count - 1),
            };
            return Err(missing(format!("there is no such GPU: this host has {known}")));
        };
        let device = result::device::get(ordinal).map_err(refused("the GPU cannot be used"))?;
        let model = result::device::get_name(device).map_err(refused("the GPU has no name"))?;
        let name = format!("{asked} ({model})");
        let capability = [
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        ];
        // SAFETY: the driver has just given the device.
        let [major, minor] = capability.map(|of| unsafe { result::device::get_attribute(device, of) });
        let refuses = refused("the GPU does not tell its compute capability");
        let (major, minor) = (major.map_err(&refuses)?, minor.map_err(&refuses)?);
        if (major, minor) < CAPABILITY {
            let (least, of_least) = CAPABILITY;
            return Err(missing(format!(
                "the {model} is too old: its compute capability is {major}.{minor}, and {least}.{of_least} is needed"
            )));
        }
        let waits = sys::CUctx_flags::CU_CTX_SCHED_BLOCKING_SYNC as u32;
        // SAFETY: as above. A thread that waits for the GPU sleeps. If the context exists already, its flags stay.
        let _ = unsafe { sys::cuDevicePrimaryCtxSetFlags_v2(device, waits).result() };
        // SAFETY: as above.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(refused("the GPU cannot be used by this process"))?;
        let mut opened = Cuda {
            name,
            number: device,
            context,
            module: std::ptr::null_mut(),
            reduce: HashMap::new(),
            adopt: HashMap::new(),
        };
        opened.load().map_err(refused("the driver does not take the kernels"))?;
        Ok(opened)
    }

    /// Has the driver compile the kernels.
    fn load(&mut self) -> Outcome {
        let ptx = CString::new(kernels::PTX).expect("PTX is text");
        self.enter()?;
        // SAFETY: the text ends with a zero.
        self.module = unsafe { result::module::load_data(ptx.as_ptr().cast())? };
        let module = self.module;
        let kernel = |name: String| {
            let name = CString::new(name).expect("a name is text");
            // SAFETY: the module is loaded.
            unsafe { result::module::get_function(module, name) }
        };
        for function in Function::iter() {
            for wire in kernels::WIRES {
                let kernel = kernel(kernels::reducing(function, wire))?;
                self.reduce.insert((function, wire), kernel);
            }
        }
        for wire in kernels::WIRES.into_iter().filter(|wire| wire.is_narrow()) {
            self.adopt.insert(wire, kernel(kernels::adopting(wire))?);
        }
        Ok(())
    }

    /// Makes the GPU's context this thread's.
    fn enter(&self) -> Outcome {
        // SAFETY: the context is retained as long as this exists.
        unsafe { result::ctx::set_current(self.context) }
    }

    /// Does something in the GPU's context.
    fn does<T>(&self, call: impl FnOnce() -> Result<T, result::DriverError>) -> Result<T, DeviceError> {
        let outcome = self.enter().and_then(|()| call());
        outcome.map_err(|error| DeviceError::Failed { device: self.name.clone(), what: text(error) })
    }

    /// Copies within the GPU's memory, to measure what that takes.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Safety
    /// The conditions of [`Device`].
    pub unsafe fn copy(
        &self,
        stream: Stream,
        from: Address,
        to: Address,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        self.does(|| unsafe { result::memcpy_dtod_async(to.0, from.0, bytes, stream_of(stream)) })
    }

    /// Launches a kernel over so many elements, of which a thread computes some at once.
    ///
    /// # Safety
    /// The parameters are those of the kernel, and the conditions of [`Device`].
    unsafe fn launch(
        &self,
        kernel: sys::CUfunction,
        stream: Stream,
        elements: usize,
        parameters: &mut [*mut c_void],
    ) -> Result<(), DeviceError> {
        if elements == 0 {
            return Ok(());
        }
        // More elements than that are computed in turns.
        let blocks = elements.div_ceil(THREADS as usize).min(i32::MAX as usize) as u32;
        // SAFETY: passed on to the caller.
        self.does(|| unsafe {
            result::launch_kernel(kernel, (blocks, 1, 1), (THREADS, 1, 1), 0, stream_of(stream), parameters)
        })
    }
}

/// A pointer to a kernel's parameter.
fn parameter<T>(of: &mut T) -> *mut c_void {
    std::ptr::from_mut(of).cast()
}

fn stream_of(stream: Stream) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(stream.0 as usize)
}

fn event_of(event: Event) -> sys::CUevent {
    std::ptr::with_exposed_provenance_mut(event.0 as usize)
}

impl Device for Cuda {
    fn name(&self) -> &str {
        &self.name
    }

    fn room(&self) -> Result<Room, DeviceError> {
        let (free, total) = self.does(result::mem_get_info)?;
        Ok(Room { free: free as u64, total: total as u64 })
    }

    fn allocate(&self, bytes: usize) -> Result<Address, DeviceError> {
        // SAFETY: the memory is the caller's, and `free` gives it back.
        let taken = self.enter().and_then(|()| unsafe { result::malloc_sync(bytes) });
        match taken {
            Ok(at) => Ok(Address(at)),
            Err(result::DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let free = self.room()?.free;
                Err(DeviceError::Room { device: self.name.clone(), needed: bytes as u64, free })
            }
            Err(error) => Err(DeviceError::Failed { device: self.name.clone(), what: text(error) }),
        }
    }

    fn free(&self, at: Address) {
        // SAFETY: it comes from `allocate`, and the driver waits for work that uses it.
        if let Err(error) = self.does(|| unsafe { result::free_sync(at.0) }) {
            tracing::debug!(%error, "memory of the device is not given back");
        }
    }

    fn open_stream(&self) -> Result<Stream, DeviceError> {
        let stream = self.does(|| result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(Stream(stream.expose_provenance() as u64))
    }

    fn close_stream(&self, stream: Stream) {
        // SAFETY: it comes from `open_stream`, and is not used any more.
        if let Err(error) = self.does(|| unsafe { result::stream::destroy(stream_of(stream)) }) {
            tracing::debug!(%error, "a stream does not end");
        }
    }

    fn open_event(&self) -> Result<Event, DeviceError> {
        let event = self.does(|| result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING))?;
        Ok(Event(event.expose_provenance() as u64))
    }

    fn close_event(&self, event: Event) {
        // SAFETY: it comes from `open_event`, and is not used any more.
        if let Err(error) = self.does(|| unsafe { result::event::destroy(event_of(event)) }) {
            tracing::debug!(%error, "an event does not end");
        }
    }

    unsafe fn pin(&self, start: NonNull<u8>, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        self.does(|| unsafe { sys::cuMemHostRegister_v2(start.as_ptr().cast(), bytes, 0).result() })
    }

    fn unpin(&self, start: NonNull<u8>) {
        // SAFETY: `pin` has pinned it, and it is still mapped.
        let undone = self.does(|| unsafe { sys::cuMemHostUnregister(start.as_ptr().cast()).result() });
        if let Err(error) = undone {
            tracing::debug!(%error, "memory stays pinned");
        }
    }

    unsafe fn upload(&self, stream: Stream, from: *const [u8], to: Address) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        self.does(|| unsafe { result::memcpy_htod_async(to.0, &*from, stream_of(stream)) })
    }

    unsafe fn download(&self, stream: Stream, from: Address, to: *mut [u8]) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        self.does(|| unsafe { result::memcpy_dtoh_async(&mut *to, from.0, stream_of(stream)) })
    }

    unsafe fn clear(&self, stream: Stream, at: Address, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        self.does(|| unsafe { result::memset_d8_async(at.0, 0, bytes, stream_of(stream)) })
    }

    unsafe fn reduce(&self, stream: Stream, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let Launch { wire, formula, count, values, slots, sums, out } = launch;
        assert!(sums.len() <= 2, "a kernel adds up two sums");
        assert!(formula.function.slots() <= slots.iter().flatten().count(), "slots of {formula:?}");
        let sum = |number: usize| sums.get(number).map_or(0, |at| at.0);
        let mut run = Run {
            values: values.0,
            slots: slots.map(|slot| slot.map_or(0, |at| at.0)),
            sums: [sum(0), sum(1)],
            out: out.map_or(0, |at| at.0),
            count: *count as u64,
            sum_count: sums.len() as u32,
            unused: 0,
        };
        let kernel = self.reduce[&(formula.function, *wire)];
        let mut single: [f32; CONSTANTS] = formula.single;
        let mut double: [f64; CONSTANTS] = formula.double;
        let (constants, elements) = match wire {
            Wire::F64 => (parameter(&mut double), *count),
            // The ragged ends take no threads of their own.
            _ => (parameter(&mut single), count.div_ceil(ELEMENTS_PER_THREAD)),
        };
        // SAFETY: a kernel of this name takes a run and constants of this type; the rest is passed on to the caller.
        unsafe { self.launch(kernel, stream, elements, &mut [parameter(&mut run), constants]) }
    }

    unsafe fn adopt(&self, stream: Stream, adoption: &Adoption) -> Result<(), DeviceError> {
        let Adoption { wire, count, values, before, after } = adoption;
        let (mut values, mut before, mut after, mut elements) = (values.0, before.0, after.0, *count as u64);
        let parameters = &mut [
            parameter(&mut values),
            parameter(&mut before),
            parameter(&mut after),
            parameter(&mut elements),
        ];
        // SAFETY: the kernel takes three pointers and a number; the rest is passed on to the caller.
        unsafe { self.launch(self.adopt[wire], stream, *count, parameters) }
    }

    fn record(&self, stream: Stream, event: Event) -> Result<(), DeviceError> {
        // SAFETY: both exist.
        self.does(|| unsafe { result::event::record(event_of(event), stream_of(stream)) })
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), DeviceError> {
        let plain = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both exist.
        self.does(|| unsafe { result::stream::wait_event(stream_of(stream), event_of(event), plain) })
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        // SAFETY: it exists.
        self.does(|| unsafe { result::stream::synchronize(stream_of(stream)) })
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // SAFETY: nothing uses the module any more, and the context is this device's until here.
        unsafe {
            if self.enter().is_ok() && !self.module.is_null() {
                let _ = result::module::unload(self.module);
            }
            let _ = result::primary_ctx::release(self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_is_not_there_has_a_clear_error() {
        // Whatever GPUs there are, this is none of them.
        let error = Cuda::new(4_000_000_000).unwrap_err().to_string();
        assert!(error.starts_with("cuda:4000000000: "), "{error}");
        let known = ["no NVIDIA driver", "does not start", "there is no such GPU", "no GPU is found"];
        assert!(known.iter().any(|known| error.contains(known)), "{error}");
    }
}
