//! Blocks of a version that need not be read, because they are those of the version that is shown.

use std::time::{Duration, Instant};

use crate::vocabulary::block_ranges::{self, BlockRanges};
use crate::vocabulary::ids::{BlockId, Version};

/// The shard has this long to answer, once the version can be read.
const PATIENCE: Duration = Duration::from_secs(1);

/// What the client knows of a version's blocks that need not be read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Unchanged {
    /// Nothing, and no answer comes. All blocks are read.
    #[default]
    Unknown,
    /// The shard was asked what has changed since `base`. All blocks are read if it has not answered by `until`.
    Asked { base: Version, until: Option<Instant> },
    /// These blocks are those of `base`.
    Said { base: Version, blocks: BlockRanges },
}

impl Unchanged {
    /// The shard is asked what has changed since this version.
    pub(super) fn asked(base: Version) -> Unchanged {
        Unchanged::Asked { base, until: None }
    }

    /// The shard answers.
    pub(super) fn said(&mut self, base: Version, blocks: &BlockRanges) {
        if matches!(self, Unchanged::Asked { base: asked, .. } if *asked == base) {
            *self = match &blocks[..] {
                [] => Unchanged::Unknown,
                _ => Unchanged::Said { base, blocks: blocks.clone() },
            };
        }
    }

    /// The version can be read from now on.
    pub(super) fn can_be_read(&mut self, now: Instant) {
        if let Unchanged::Asked { until, .. } = self {
            until.get_or_insert(now + PATIENCE);
        }
    }

    /// Whether the answer is waited for. No block is read before.
    pub(super) fn is_awaited(&self) -> bool {
        matches!(self, Unchanged::Asked { .. })
    }

    /// When the answer is overdue, while it is waited for.
    pub(super) fn until(&self) -> Option<Instant> {
        match self {
            Unchanged::Asked { until, .. } => *until,
            Unchanged::Unknown | Unchanged::Said { .. } => None,
        }
    }

    /// Whether the answer is overdue. It is not waited for any longer then.
    pub(super) fn is_overdue(&mut self, now: Instant) -> bool {
        let is_overdue = self.until().is_some_and(|until| until <= now);
        if is_overdue {
            *self = Unchanged::Unknown;
        }
        is_overdue
    }

    /// The version that some blocks are the same in.
    pub(super) fn base(&self) -> Option<Version> {
        match self {
            Unchanged::Said { base, .. } => Some(*base),
            Unchanged::Unknown | Unchanged::Asked { .. } => None,
        }
    }

    /// Whether a block is the base's.
    pub(super) fn has(&self, block: BlockId) -> bool {
        matches!(self, Unchanged::Said { blocks, .. } if block_ranges::contains(blocks, block.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Version = Version(7);

    fn ranges(ranges: &[std::ops::Range<u32>]) -> BlockRanges {
        ranges.to_vec()
    }

    #[test]
    fn only_blocks_of_an_answer_that_was_asked_for_are_not_read() {
        let (now, answer) = (Instant::now(), ranges(&[1..3, 5..6]));
        let mut of = Unchanged::default();
        of.said(BASE, &answer);
        assert!(of == Unchanged::Unknown && !of.is_awaited());
        of = Unchanged::asked(BASE);
        of.said(Version(6), &answer);
        assert!(of.is_awaited() && of.base().is_none() && !of.has(BlockId(1)));
        of.said(BASE, &answer);
        assert!(!of.is_awaited() && of.base() == Some(BASE) && of.until().is_none());
        assert_eq!((0..7).filter(|block| of.has(BlockId(*block))).collect::<Vec<_>>(), [1, 2, 5]);
        // A second answer changes nothing.
        of.said(BASE, &ranges(&[0..3, 4..7]));
        assert!(!of.has(BlockId(0)) && !of.is_overdue(now + PATIENCE));
        // A shard that does not know the base says nothing of any block.
        of = Unchanged::asked(BASE);
        of.said(BASE, &BlockRanges::new());
        assert_eq!(of, Unchanged::Unknown);
    }

    #[test]
    fn an_answer_that_does_not_come_is_not_waited_for() {
        let now = Instant::now();
        let mut of = Unchanged::asked(BASE);
        // Before the version can be read, no time passes.
        assert!(of.until().is_none() && !of.is_overdue(now + 2 * PATIENCE));
        of.can_be_read(now);
        of.can_be_read(now + PATIENCE / 2);
        assert!(of.until() == Some(now + PATIENCE) && !of.is_overdue(now + PATIENCE / 2));
        assert!(of.is_awaited() && of.is_overdue(now + PATIENCE) && !of.is_awaited());
        of.said(BASE, &ranges(&[0..3, 4..7]));
        assert!(of == Unchanged::Unknown && !of.has(BlockId(0)));
    }
}
