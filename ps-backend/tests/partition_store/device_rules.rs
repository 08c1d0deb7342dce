//! The device in software finds what a real one would do wrongly now and then.

use std::sync::Arc;

use ps_backend::device::{Device, DeviceError, Event, Memory, Stream};

use test_devices::software_device::Software;

const BYTES: usize = 1 << 10;

/// A device with two streams, an event and memory, which are left to it: a test that ends well closes them.
struct Bench {
    device: Arc<dyn Device>,
    streams: [Stream; 2],
    event: Event,
    memory: Memory,
    host: Vec<u8>,
}

impl Bench {
    fn new() -> Bench {
        let device: Arc<dyn Device> = Software::new(1 << 20);
        let streams = [device.open_stream().unwrap(), device.open_stream().unwrap()];
        let event = device.open_event().unwrap();
        let memory = Memory::take(&device, BYTES).unwrap();
        Bench { device, streams, event, memory, host: vec![7; BYTES] }
    }

    fn upload(&self, stream: usize) -> Result<(), DeviceError> {
        // SAFETY: the memory outlives the work, or the test fails.
        unsafe { self.device.upload(self.streams[stream], &self.host[..], self.memory.at(0..BYTES)) }
    }

    /// Reads back, and returns what was read at once.
    fn download(&mut self, stream: usize) -> Result<(), DeviceError> {
        let from = self.memory.at(0..BYTES);
        // SAFETY: as above.
        unsafe { self.device.download(self.streams[stream], from, &raw mut self.host[..]) }
    }

    fn end(self) {
        let Bench { device, streams, event, memory, .. } = self;
        drop(memory);
        streams.into_iter().for_each(|stream| device.close_stream(stream));
        device.close_event(event);
    }
}

#[test]
fn work_that_is_ordered_is_done_when_it_was_waited_for() {
    let mut bench = Bench::new();
    bench.upload(0).unwrap();
    bench.device.record(bench.streams[0], bench.event).unwrap();
    bench.device.wait(bench.streams[1], bench.event).unwrap();
    let mut back = vec![0; BYTES];
    // SAFETY: the memory outlives the work.
    unsafe {
        let from = bench.memory.at(0..BYTES);
        bench.device.download(bench.streams[1], from, &raw mut back[..]).unwrap();
    }
    assert!(back.iter().all(|byte| *byte == 0), "nobody has waited for it");
    bench.device.synchronize(bench.streams[1]).unwrap();
    assert_eq!(back, bench.host);
    // The host has waited for both streams now: through the event, the first one, too.
    bench.download(0).unwrap();
    bench.device.synchronize(bench.streams[0]).unwrap();
    bench.end();
}

#[test]
#[should_panic(expected = "race")]
fn a_read_on_a_stream_that_has_not_waited_for_the_write_is_a_race() {
    let mut bench = Bench::new();
    bench.upload(0).unwrap();
    let _ = bench.download(1);
}

#[test]
#[should_panic(expected = "race")]
fn an_event_stands_for_no_work_that_comes_after_it() {
    let mut bench = Bench::new();
    bench.device.record(bench.streams[0], bench.event).unwrap();
    bench.upload(0).unwrap();
    bench.device.wait(bench.streams[1], bench.event).unwrap();
    let _ = bench.download(1);
}

#[test]
#[should_panic(expected = "race")]
fn memory_of_the_host_has_races_too() {
    let mut bench = Bench::new();
    let other = Memory::take(&bench.device, BYTES).unwrap();
    bench.download(0).unwrap();
    // SAFETY: the test fails.
    let _ = unsafe { bench.device.upload(bench.streams[1], &bench.host[..], other.at(0..BYTES)) };
}

#[test]
#[should_panic(expected = "is not in the device's memory")]
fn a_copy_out_of_bounds_is_found() {
    let bench = Bench::new();
    let at = bench.memory.at(4..BYTES);
    // SAFETY: the test fails.
    let _ = unsafe { bench.device.clear(bench.streams[0], at, BYTES) };
}

#[test]
#[should_panic(expected = "is not in the device's memory")]
fn memory_that_was_given_back_is_not_used() {
    let bench = Bench::new();
    let other = Memory::take(&bench.device, BYTES).unwrap();
    let at = other.at(0..BYTES);
    drop(other);
    // SAFETY: the test fails.
    let _ = unsafe { bench.device.clear(bench.streams[0], at, BYTES) };
}

#[test]
#[should_panic(expected = "given back while in use")]
fn memory_in_use_is_not_given_back() {
    let bench = Bench::new();
    bench.upload(0).unwrap();
    drop(bench.memory);
}

#[test]
#[should_panic(expected = "are left")]
fn what_is_left_when_the_device_ends_is_found() {
    let device: Arc<dyn Device> = Software::new(1 << 20);
    device.open_stream().unwrap();
}

#[test]
#[should_panic(expected = "work left")]
fn a_stream_with_work_is_not_closed() {
    let bench = Bench::new();
    bench.upload(0).unwrap();
    bench.device.close_stream(bench.streams[0]);
}
