//! Whole new weights: the client side of writing `weights` (reducer `assign`, or to initialise).
//!
//! Bytes go straight into a buffer that becomes the version at commit: no copy besides that from the
//! request. Holds `unsafe` for entering that buffer; see [`crate::bytes::mmap`] for the rule.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::client::Job;
use crate::tracker::WriteRefused;
use crate::transport::{Region, ShardError};
use crate::vocabulary::ranges;

#[derive(Debug, Default)]
struct State {
    written: Vec<Range<u64>>,
    in_flight: u32,
    sealed: bool,
    /// A write that was refused after others. The buffer lacks something that the program wanted to write.
    failed: Option<WriteRefused>,
}

/// A version being written.
pub struct Publisher {
    job: Arc<Job>,
    buffer: Region,
    size: u64,
    state: Mutex<State>,
    idle: Condvar,
}

impl Publisher {
    /// With a buffer from the shard.
    ///
    /// # Errors
    /// When the shard has none.
    pub fn new(job: Arc<Job>) -> Result<Publisher, ShardError> {
        let buffer = job.allocate()?;
        let size = buffer.memory().len() as u64;
        Ok(Publisher { job, buffer, size, state: Mutex::default(), idle: Condvar::new() })
    }

    /// Stores `data` at `offset`. Bytes may be written again until the commit.
    ///
    /// # Errors
    /// [`WriteRefused::PastEnd`]; nothing is stored then. If something was written before, it has
    /// [failed](Self::failed).
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), WriteRefused> {
        let end = offset.saturating_add(data.len() as u64);
        if end > self.size {
            let refused = WriteRefused::PastEnd { offset, end, size: self.size };
            let mut state = self.state.lock();
            if !state.written.is_empty() {
                state.failed = Some(refused);
            }
            return Err(refused);
        }
        {
            let mut state = self.state.lock();
            if state.sealed {
                return Err(WriteRefused::Sealed);
            }
            state.in_flight += 1;
        }
        // SAFETY: nobody reads the buffer before the commit, which waits for this copy. Two writers of the
        // same bytes race as two write(2) calls on any file do.
        unsafe { self.buffer.memory().write(offset as usize, data) };
        let mut state = self.state.lock();
        ranges::insert(&mut state.written, offset..end);
        state.in_flight -= 1;
        if state.in_flight == 0 {
            self.idle.notify_all();
        }
        Ok(())
    }

    /// Whether something was written.
    pub fn is_open(&self) -> bool {
        let state = self.state.lock();
        !state.sealed && !state.written.is_empty()
    }

    /// The refused write because of which the written bytes must not become a version.
    pub fn failed(&self) -> Option<WriteRefused> {
        self.state.lock().failed
    }

    /// The memory that becomes the version.
    pub fn buffer(&self) -> &Region {
        &self.buffer
    }

    /// Ranges written so far, sorted and disjoint.
    pub fn written(&self) -> Vec<Range<u64>> {
        self.state.lock().written.clone()
    }

    /// Whether every byte was written.
    pub fn is_complete(&self) -> bool {
        matches!(&self.state.lock().written[..], [all] if *all == (0..self.size))
    }

    /// Publishes what was written as the next version; the rest keeps its value. `done` gets Ok once the
    /// version is out. Whatever the outcome, this publisher is done.
    pub fn commit(&self, timeout: Duration, done: impl FnOnce(Result<(), ShardError>) + Send + 'static) {
        let written = {
            let mut state = self.state.lock();
            let deadline = Instant::now() + timeout;
            while state.in_flight > 0 {
                if self.idle.wait_until(&mut state, deadline).timed_out() {
                    drop(state);
                    return done(Err(ShardError::TimedOut("writes are still in flight".into())));
                }
            }
            state.sealed = true;
            std::mem::take(&mut state.written)
        };
        self.job.assign(self.buffer.clone(), &written, timeout, Box::new(done));
    }

    /// Ends the wait for a commit that is on its way: unless it has begun, it does not take place.
    pub fn withdraw(&self) {
        self.job.withdraw_assign(self.buffer.key());
    }
}
