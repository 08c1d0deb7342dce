//! The mapping of a learner's gradients, and its blocks that travel before the fsync because their program has declared
//! them final.
//!
//! The next commit ships either what was written or the mapping. So nothing is final while a written contribution is open,
//! and a write drops the blocks that were sent ahead. The commit of the mapping takes them over, and sends the rest.
//!
//! Such blocks lie in memory that the program can still change. So all paths read them by the rules of lent memory: what a
//! socket carries is copied before its checksum is made, and a shard that reads in place checks afterwards whether the
//! loan stands. If their plan is dropped, they count nowhere, whenever they are read.

use std::time::Duration;

use parking_lot::MutexGuard;

use super::{ContributeError, Contributor, ContributorState};
use crate::bytes::region::Region;
use crate::tracker::WriteRefused;
use crate::vocabulary::weight::Weight;

impl Contributor {
    /// The region that programs map through `gradients`.
    pub fn mapped(&self) -> &Region {
        self.mapped.region()
    }

    /// Stores bytes that a program has put into its mapping of `gradients`.
    ///
    /// # Errors
    /// [`WriteRefused::PastEnd`].
    pub fn store_mapped(&self, offset: u64, data: &[u8]) -> Result<(), WriteRefused> {
        self.mapped.store(offset, data)
    }

    /// Reads the mapped region. Bytes past its end are left as they are.
    pub fn load_mapped(&self, offset: u64, bytes: &mut [u8]) {
        self.mapped.load(offset, bytes);
    }

    /// The program has stored these bytes of the mapping for the next commit, and does not change them before it. Blocks
    /// that are covered as a whole are sent at once where the path allows. It does not wait for anything.
    ///
    /// Nothing is done unless `may_send`. If this client does not know the next step, nothing is sent before the commit.
    ///
    /// # Errors
    /// [`ContributeError::Refused`], [`ContributeError::Busy`] and [`ContributeError::Writing`], with nothing changed. If
    /// the contribution cannot be opened, nothing is final any more.
    pub fn declare_final(&self, offset: u64, len: u64, may_send: bool) -> Result<(), ContributeError> {
        let (size, end) = (self.layout.size(), offset.saturating_add(len));
        if end > size {
            return Err(WriteRefused::PastEnd { offset, end, size }.into());
        }
        let mut guard = self.settled();
        let state = &mut *guard;
        if state.committing {
            return Err(ContributeError::Busy);
        }
        if state.step.is_some() {
            return Err(ContributeError::Writing);
        }
        // Where a payload is made of the mapping, that is done at fsync.
        if !may_send || self.job.content().is_weights() || state.models.weight != Weight::ONE {
            return Ok(());
        }
        let finals = &mut state.finals;
        finals.add(&self.layout, offset..end);
        if !finals.has_due() {
            return Ok(());
        }
        if finals.step().is_none() {
            // The state is locked during this call, as when a write opens a contribution.
            match self.job.open_known(self.learner, Duration::ZERO) {
                Ok(Some(opening)) => finals.opened(opening.step),
                Ok(None) => return Ok(()),
                Err(error) => {
                    finals.clear();
                    return Err(error.into());
                }
            }
        }
        if let Some(step) = finals.step() {
            let due = finals.take_due();
            self.job.are_final(self.learner, step, &due, self.mapped.region());
        }
        Ok(())
    }

    /// Nothing of the mapping is final any more. Blocks that were sent ahead are dropped, unless they are being committed.
    pub fn forget_final(&self) {
        drop(self.without_finals());
    }

    /// Locks the state, with nothing of the mapping final unless it is being committed.
    pub(super) fn without_finals(&self) -> MutexGuard<'_, ContributorState> {
        let mut state = self.settled();
        if !state.committing && state.finals.clear().is_some() {
            (state.committing, state.aborting) = (true, true);
            drop(state);
            self.send_abort();
            state = self.state.lock();
            (state.committing, state.aborting) = (false, false);
            self.idle.notify_all();
        }
        state
    }
}
