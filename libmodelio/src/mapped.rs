//! Memory that programs map: they store into it whatever they contribute or publish next, while this process reads it.
//!
//! This module holds `unsafe` for entering that memory. Stores of the program race with the calls here as they do with
//! read(2) and write(2) on any mapped file: each byte is old or new.

use std::io;
use std::sync::Arc;

use crate::bytes::available;
use crate::bytes::mmap::Mapping;
use crate::bytes::region::Region;
use crate::client::Job;
use crate::tracker::WriteRefused;
use crate::vocabulary::shard_error::ShardError;

/// A region of a model's size that a program maps.
pub struct MappedMemory(Region);

impl MappedMemory {
    /// Zeros, for a program of this job. `name` is shown in `/proc/*/maps`. Pages are taken when they are touched.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(job: &Job, name: &str) -> Result<MappedMemory, ShardError> {
        let memory = Mapping::memfd(name, job.layout().size() as usize);
        Ok(MappedMemory(job.register(Arc::new(memory.map_err(|error| ShardError::no_memory(&error))?))))
    }

    /// The region to map.
    pub fn region(&self) -> &Region {
        &self.0
    }

    /// Takes its pages now, not one fault at a time in the program that maps it.
    ///
    /// # Errors
    /// When the memory is not there.
    pub fn prefault(&self) -> io::Result<()> {
        available::promise_before_spares(self.0.memory())?;
        self.0.memory().prefault()
    }

    /// Stores bytes that a program has put into its mapping. The kernel hands them over if it does not map the region
    /// itself.
    ///
    /// # Errors
    /// [`WriteRefused::PastEnd`].
    pub fn store(&self, offset: u64, data: &[u8]) -> Result<(), WriteRefused> {
        let (size, end) = (self.size(), offset.saturating_add(data.len() as u64));
        // The last page of a mapping reaches past the end. Those bytes belong to no tensor.
        let len = size.saturating_sub(offset).min(data.len() as u64) as usize;
        if len == 0 && !data.is_empty() {
            return Err(WriteRefused::PastEnd { offset, end, size });
        }
        // SAFETY: this is the program's own store, which comes while the program reads or waits.
        unsafe { self.0.memory().write(offset as usize, &data[..len]) };
        Ok(())
    }

    /// Reads it. Bytes past its end are left as they are.
    pub fn load(&self, offset: u64, bytes: &mut [u8]) {
        let len = self.size().saturating_sub(offset).min(bytes.len() as u64) as usize;
        if len > 0 {
            let start = offset as usize;
            // SAFETY: this is like read(2) of a file that others have mapped: each byte is old or new.
            bytes[..len].copy_from_slice(unsafe { self.0.memory().bytes(start..start + len) });
        }
    }

    fn size(&self) -> u64 {
        self.0.memory().len() as u64
    }
}
