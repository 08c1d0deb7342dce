//! RDMA in a build without it. Opening a device fails, and nothing else can be called: none of these types has a value.
//!
//! Each name is as in the build with RDMA, which has the words on it.
#![allow(missing_docs, clippy::missing_safety_doc)]

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use modelio_base::bytes::mmap::Mapping;
use modelio_base::transport::stream::{Connection, Piece, Stream, Target};

use crate::device_info::DeviceInfo;
use crate::device_memory::DeviceMemory;
use crate::error::VerbsError;
use crate::memory::{RemoteMemory, Spare};
use crate::options::RdmaOptions;

/// There is none.
#[derive(Debug)]
enum Never {}

#[derive(Debug)]
pub struct Arena(Never);
#[derive(Debug)]
pub struct Chunk(Never);
#[derive(Debug)]
pub struct Device(Never);
pub struct Endpoint(Never);
#[derive(Debug)]
pub struct Pool(Never);
#[derive(Debug)]
pub struct QueuePair(Never);
#[derive(Debug)]
pub struct Registration(Never);
#[derive(Debug)]
pub struct Slot(Never);

#[derive(Debug)]
pub enum Work {
    ReadTo { target: Target },
    Read { slot: Slot },
    Write {},
    Ring {},
}

#[derive(Debug)]
pub struct Finished {
    pub token: u64,
    pub work: Work,
}

pub type Done = Vec<Finished>;

pub fn devices() -> Result<Vec<DeviceInfo>, VerbsError> {
    Err(VerbsError::NotBuilt)
}

pub fn usable() -> Result<Vec<String>, VerbsError> {
    Err(VerbsError::NotBuilt)
}

impl Endpoint {
    pub fn open(_: &RdmaOptions, _: u16) -> Result<Arc<Endpoint>, VerbsError> {
        Err(VerbsError::NotBuilt)
    }

    pub fn over(device: Arc<Device>, _: u16) -> Result<Arc<Endpoint>, VerbsError> {
        match device.0 {}
    }

    pub fn device(&self) -> &Arc<Device> {
        match self.0 {}
    }

    pub fn connections(&self) -> usize {
        match self.0 {}
    }

    pub fn listen(
        &self,
        _: SocketAddr,
        _: impl FnMut(&Arc<QueuePair>, Option<SocketAddr>) -> Option<Box<dyn Stream>> + Send + 'static,
    ) -> Result<SocketAddr, VerbsError> {
        match self.0 {}
    }

    pub fn connect(
        &self,
        _: SocketAddr,
        _: Instant,
        _: usize,
        _: impl FnOnce(Result<&Arc<QueuePair>, String>) -> Option<Box<dyn Stream>> + Send + 'static,
    ) {
        match self.0 {}
    }

    pub fn shut_down(&self, _: Duration) {
        match self.0 {}
    }
}

impl Device {
    pub fn open_with(_: &RdmaOptions, _: Option<Arc<dyn DeviceMemory>>) -> Result<Arc<Device>, VerbsError> {
        Err(VerbsError::NotBuilt)
    }

    pub fn register(self: &Arc<Device>, _: &Mapping) -> Result<Arc<Registration>, VerbsError> {
        match self.0 {}
    }

    pub fn register_to_fill(self: &Arc<Device>, _: &Mapping) -> Result<Arc<Registration>, VerbsError> {
        match self.0 {}
    }

    pub fn spare(&self, _: Weak<dyn Spare>) {
        match self.0 {}
    }

    pub fn knows(&self, _: &Mapping) -> bool {
        match self.0 {}
    }

    pub fn forget(&self, _: &Mapping) {
        match self.0 {}
    }

    pub fn forget_to_fill(&self, _: &Mapping) {
        match self.0 {}
    }

    pub fn name(&self) -> String {
        match self.0 {}
    }

    pub fn is_iwarp(&self) -> bool {
        match self.0 {}
    }

    pub fn arena(&self) -> &Arc<Arena> {
        match self.0 {}
    }

    pub fn payload_arena(&self) -> &Arc<Arena> {
        match self.0 {}
    }

    pub fn options(&self) -> &RdmaOptions {
        match self.0 {}
    }
}

impl QueuePair {
    pub fn device(&self) -> &Arc<Device> {
        match self.0 {}
    }

    pub fn connection(&self) -> Option<&Connection> {
        match self.0 {}
    }

    pub fn room(&self, _: usize) -> usize {
        match self.0 {}
    }

    pub fn read(
        &self,
        _: u64,
        _: Slot,
        _: usize,
        _: RemoteMemory,
        _: bool,
    ) -> Result<(), (VerbsError, Slot)> {
        match self.0 {}
    }

    pub fn read_to(
        &self,
        _: u64,
        _: Target,
        _: Arc<Registration>,
        _: RemoteMemory,
    ) -> Result<(), VerbsError> {
        match self.0 {}
    }

    pub fn write(&self, _: u64, _: Piece, _: Arc<Registration>, _: RemoteMemory) -> Result<(), VerbsError> {
        match self.0 {}
    }

    pub fn post(&self) -> Result<(), VerbsError> {
        match self.0 {}
    }

    pub fn take(&self, _: &mut Done) {
        match self.0 {}
    }

    pub fn give_up(&self, _: &VerbsError) {
        match self.0 {}
    }

    pub fn break_off(&self, _: String) {
        match self.0 {}
    }

    pub fn end(&self) {
        match self.0 {}
    }
}

impl Arena {
    pub fn take(self: &Arc<Arena>, _: usize) -> Result<Chunk, VerbsError> {
        match self.0 {}
    }

    pub fn available(&self) -> u64 {
        match self.0 {}
    }
}

impl Chunk {
    pub fn open(&self) -> Result<Arc<Registration>, VerbsError> {
        match self.0 {}
    }
}

impl Pool {
    pub fn new(chunk: Chunk, _: usize, _: bool) -> Arc<Pool> {
        match chunk.0 {}
    }

    pub fn count(&self) -> usize {
        match self.0 {}
    }

    pub fn take(self: &Arc<Pool>, _: Option<&Connection>) -> Option<Slot> {
        match self.0 {}
    }
}

impl Slot {
    pub fn copied_out<'a>(&self, _: usize, _: &'a mut Vec<u8>) -> Result<Option<&'a [u8]>, VerbsError> {
        match self.0 {}
    }

    pub unsafe fn bytes(&self, _: usize) -> &[u8] {
        match self.0 {}
    }

    pub fn copy<const N: usize>(&self) -> [u8; N] {
        match self.0 {}
    }
}

impl Registration {
    pub fn remote(&self) -> RemoteMemory {
        match self.0 {}
    }
}
