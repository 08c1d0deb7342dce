//! Work on many blocks. A partition hands a batch to an executor and goes on. The executor calls back when the batch is
//! done. So a thread that moves bytes computes no block but the one that it has received.
//!
//! [`Pool`] has a device make the versions of the models that lie there, many blocks at once. A batch names its pass and
//! its blocks, and owns all that it needs.

use std::io;
use std::sync::Arc;

use libmodelio::vocabulary::ids::BlockId;
use rayon::prelude::*;

use super::store::{Making, Merge, PartitionError, PartitionJob};
use crate::device::Accelerator;

/// The same pass over some blocks of a plan. No block is in two batches at once.
pub struct Batch {
    /// The pass and its blocks, as the partition numbers them.
    pub pass: Pass,
    /// Called once nothing uses what the pass holds any more, with the first error.
    pub done: Done,
}

/// Called with the outcome of a batch.
pub type Done = Box<dyn FnOnce(Result<(), (BlockId, PartitionError)>) + Send>;

/// Work on each block of a batch.
pub enum Pass {
    /// Computes blocks for which no more payload comes, from their sums in the store, or measures those sums.
    Compute(Arc<PartitionJob>, Vec<BlockId>),
    /// Makes blocks of a version that counts, and changes their state in place.
    Make(Making, Vec<BlockId>),
    /// Reduces payloads that lie in memory of this machine. The closure knows where they lie.
    Gather(Box<dyn Fn(BlockId) + Send + Sync>, Vec<BlockId>),
    /// Adds the sums of a concluded plan to those of earlier plans.
    Merge(Merge),
}

/// Does work on many blocks of any number of models, on threads other than the caller's.
pub trait Executor: Send + Sync {
    /// Does a batch, and then calls its `done`. Returns at once.
    fn execute(&self, batch: Batch);

    /// Makes blocks of a version that counts, and returns when that is done, with the first error.
    ///
    /// # Errors
    /// The errors of [`Making::block`].
    fn make(&self, making: &Making, blocks: &[BlockId]) -> Result<(), (BlockId, PartitionError)>;

    /// The device that new models have their state on, if this computes on one.
    fn device(&self) -> Option<&Arc<Accelerator>> {
        None
    }

    /// Runs other slow work on a thread. Returns at once.
    fn spawn(&self, work: Box<dyn FnOnce() + Send>);

    /// Calls `work` for each number below `count` on the threads, and returns when all calls have returned.
    fn for_each(&self, count: usize, work: &(dyn Fn(usize) + Sync));

    /// The number of threads.
    fn threads(&self) -> usize;
}

/// Pool with the kernels of this machine's CPU, and the device that new models have their state on, if there is one.
pub struct Pool {
    pool: rayon::ThreadPool,
    device: Option<Arc<Accelerator>>,
}

impl Pool {
    /// Starts this many threads.
    ///
    /// # Errors
    /// If the system cannot start threads.
    pub fn start(threads: usize, device: Option<Arc<Accelerator>>) -> io::Result<Arc<dyn Executor>> {
        let pool =
            rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("reduce-{i}"));
        Ok(Arc::new(Pool { pool: pool.build().map_err(io::Error::other)?, device }))
    }
}

impl Executor for Pool {
    fn execute(&self, Batch { pass, done }: Batch) {
        self.pool.spawn(move || {
            let outcome = pass.run();
            done(outcome);
        });
    }

    fn make(&self, making: &Making, blocks: &[BlockId]) -> Result<(), (BlockId, PartitionError)> {
        // The threads have to be woken first, and a thread that waits for a device needs no other.
        match blocks {
            [_] => make(making, blocks),
            blocks if making.is_on_device() => make(making, blocks),
            blocks => self.pool.install(|| make(making, blocks)),
        }
    }

    fn device(&self) -> Option<&Arc<Accelerator>> {
        self.device.as_ref()
    }

    fn spawn(&self, work: Box<dyn FnOnce() + Send>) {
        self.pool.spawn(work);
    }

    fn for_each(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        self.pool.install(|| (0..count).into_par_iter().for_each(work));
    }

    fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}

/// Makes blocks in this thread and the others of its pool.
fn make(making: &Making, blocks: &[BlockId]) -> Result<(), (BlockId, PartitionError)> {
    let make = |&block: &BlockId| making.block(block).map_err(|error| (block, error));
    match blocks {
        _ if making.is_on_device() => making.blocks(blocks),
        [one] => make(one),
        blocks => blocks.par_iter().try_for_each(make),
    }
}

impl Pass {
    /// Does the pass in this thread and the others of its pool.
    fn run(self) -> Result<(), (BlockId, PartitionError)> {
        match self {
            Pass::Compute(job, blocks) => blocks
                .into_par_iter()
                .try_for_each(|block| job.finish_all(block, &[]).map(drop).map_err(|error| (block, error))),
            Pass::Make(making, blocks) => make(&making, &blocks),
            Pass::Gather(gather, blocks) => {
                blocks.into_par_iter().for_each(gather);
                Ok(())
            }
            Pass::Merge(merge) => {
                const MAX_MERGED_AT_ONCE: usize = 16;
                let all = merge.len();
                (0..all.div_ceil(MAX_MERGED_AT_ONCE)).into_par_iter().for_each(|part| {
                    let start = part * MAX_MERGED_AT_ONCE;
                    merge.run(start..(start + MAX_MERGED_AT_ONCE).min(all));
                });
                Ok(())
            }
        }
    }
}
