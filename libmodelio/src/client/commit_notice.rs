//! What a contribution holds when it ends.

use fixedbitset::FixedBitSet;

use crate::bytes::region::Region;
use crate::vocabulary::groups::Contents;
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::partly::PartlyWritten;
use crate::vocabulary::shard_error::ShardError;
use crate::vocabulary::weight::Weight;

/// The content of a contribution at its end.
#[derive(Clone, Debug)]
pub struct CommitNotice {
    /// The blocks that were sent. Others count as zero.
    pub sent: FixedBitSet,
    /// The sent blocks that are read from `staging`.
    pub deferred: FixedBitSet,
    /// The deferred blocks that were never offered whole. They have not been searched for NaN and Inf.
    pub unchecked: FixedBitSet,
    /// The tensors of which something was written, by number. Others stay as they are, unless another learner has
    /// written them.
    pub tensors: FixedBitSet,
    /// The written ranges of partly written blocks; the rest is zero. `None` if there are more than
    /// [`MAX_PIECES`](crate::vocabulary::partly::MAX_PIECES) pieces. Then the contribution cannot be one of values.
    pub partly: Option<PartlyWritten>,
    /// Its contents.
    pub contents: Contents,
    /// How much it counts beside others: its payload is multiplied by that.
    pub weight: Weight,
    /// The learner's staging region.
    pub staging: Region,
    /// Whether the staging memory stays untouched until the learner opens its next contribution. Then the shard may
    /// read it later. False if a program has it mapped.
    pub lendable: bool,
}

impl CommitNotice {
    /// A contribution of the whole model, in `staging`.
    pub fn whole(layout: &ModelLayout, staging: Region, lendable: bool) -> CommitNotice {
        let all = |len: usize| {
            let mut all = FixedBitSet::with_capacity(len);
            all.insert_range(..);
            all
        };
        let blocks = all(layout.blocks() as usize);
        CommitNotice {
            sent: blocks.clone(),
            deferred: blocks.clone(),
            unchecked: blocks,
            tensors: all(layout.tensors().len()),
            partly: Some(PartlyWritten::default()),
            contents: Contents::default(),
            weight: Weight::ONE,
            staging,
            lendable,
        }
    }

    /// Checks that the shard can use it without harm.
    ///
    /// # Errors
    /// [`ShardError::OutOfRange`] when it names blocks or tensors that `layout` does not have, when a set exceeds the
    /// set that should contain it, or when the staging region is shorter than the model.
    pub fn check(&self, layout: &ModelLayout) -> Result<(), ShardError> {
        let blocks = layout.blocks() as usize;
        let fits = [&self.sent, &self.deferred, &self.unchecked].iter().all(|set| set.len() == blocks)
            && self.deferred.is_subset(&self.sent)
            && self.unchecked.is_subset(&self.deferred)
            && self.tensors.len() == layout.tensors().len()
            && self.partly.as_ref().is_none_or(|partly| partly.check(layout.blocks()).is_ok())
            && self.staging.memory().len() as u64 >= layout.size();
        if fits { Ok(()) } else { Err(ShardError::OutOfRange) }
    }
}
