//! Work on many blocks: whoever has some hands a batch to an executor and goes on, and the executor calls back when all of
//! it is done. So a thread that moves bytes does no more than the pass over the block that it has received.
//!
//! [`Cpu`] is the executor of threads. Another one, as of a device, does the passes that it can where it has their memory,
//! and has a [`Cpu`] do the others: a batch names its plan and its blocks, and owns all that it needs.

use std::io;
use std::sync::Arc;

use libmodelio::vocabulary::ids::{BlockId, PlanId};
use rayon::prelude::*;

use super::store::{Merge, PartitionError, PartitionJob};

/// The same pass over some blocks of a plan. No block is in two batches at once.
pub struct Batch {
    /// The plan.
    pub plan: PlanId,
    /// The pass and its blocks, as the partition numbers them.
    pub pass: Pass,
    /// Called once nothing uses what the pass holds any more, with the first error.
    pub done: Done,
}

/// Hears how a batch has ended.
pub type Done = Box<dyn FnOnce(Result<(), (BlockId, PartitionError)>) + Send>;

/// Work on each block of a batch.
pub enum Pass {
    /// Blocks for which no payload comes (any more) are computed from the sums that the store has of them.
    Compute(Arc<PartitionJob>, Vec<BlockId>),
    /// Payloads that were kept where they lie, in memory of this machine, are added or computed with. The closure knows
    /// them.
    Gather(Box<dyn Fn(BlockId) + Send + Sync>, Vec<BlockId>),
    /// What a concluded plan has added up is added to the sums of the plans before.
    Merge(Merge),
}

/// Does work on many blocks, of any number of models, beside the caller.
pub trait Executor: Send + Sync {
    /// Does a batch, and then says so. Returns at once.
    fn execute(&self, batch: Batch);

    /// Runs other work that takes its time, on a thread. Returns at once.
    fn spawn(&self, work: Box<dyn FnOnce() + Send>);

    /// Does so many pieces of work on the threads, and returns when all are done.
    fn for_each(&self, count: usize, work: &(dyn Fn(usize) + Sync));

    /// The number of threads.
    fn threads(&self) -> usize;
}

/// Threads, with the kernels of this machine's CPU.
pub struct Cpu(rayon::ThreadPool);

impl Cpu {
    /// So many threads.
    ///
    /// # Errors
    /// When the system has none.
    pub fn start(threads: usize) -> io::Result<Arc<dyn Executor>> {
        let pool =
            rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("reduce-{i}"));
        Ok(Arc::new(Cpu(pool.build().map_err(io::Error::other)?)))
    }
}

impl Executor for Cpu {
    fn execute(&self, Batch { pass, done, .. }: Batch) {
        self.0.spawn(move || {
            let outcome = pass.run();
            done(outcome);
        });
    }

    fn spawn(&self, work: Box<dyn FnOnce() + Send>) {
        self.0.spawn(work);
    }

    fn for_each(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        self.0.install(|| (0..count).into_par_iter().for_each(work));
    }

    fn threads(&self) -> usize {
        self.0.current_num_threads()
    }
}

impl Pass {
    /// Does it in this thread and those of its pool.
    fn run(self) -> Result<(), (BlockId, PartitionError)> {
        match self {
            Pass::Compute(job, blocks) => blocks
                .into_par_iter()
                .try_for_each(|block| job.finish(block, None).map(drop).map_err(|error| (block, error))),
            Pass::Gather(gather, blocks) => {
                blocks.into_par_iter().for_each(gather);
                Ok(())
            }
            Pass::Merge(merge) => {
                const AT_ONCE: usize = 16;
                let all = merge.len();
                (0..all.div_ceil(AT_ONCE)).into_par_iter().for_each(|part| {
                    let start = part * AT_ONCE;
                    merge.run(start..(start + AT_ONCE).min(all));
                });
                Ok(())
            }
        }
    }
}
