//! The clients' shares of each block, if values are replaced: each byte gets the value of the highest learner that
//! has written it. Pure.

use std::collections::BTreeMap;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::ids::{BlockId, ClientId, LearnerId};
use libmodelio::vocabulary::partly::PartlyWritten;
use libmodelio::vocabulary::ranges;

/// The written values of one learner.
#[derive(Clone, Debug)]
pub(super) struct Values<'a> {
    pub(super) learner: LearnerId,
    /// The client that sends them. None if they were sent before.
    pub(super) sender: Option<ClientId>,
    pub(super) sent: &'a FixedBitSet,
    pub(super) partly: Option<&'a PartlyWritten>,
}

/// The values of one client that count.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Share {
    pub(super) blocks: FixedBitSet,
    /// The ranges that count, of blocks that do not count as a whole.
    pub(super) partly: PartlyWritten,
}

/// The share of each client. No byte is in two shares.
pub(super) fn shares(mut values: Vec<Values<'_>>) -> BTreeMap<ClientId, Share> {
    values.sort_by_key(|of| std::cmp::Reverse(of.learner));
    let mut shares = BTreeMap::<ClientId, Share>::new();
    let mut pieces = BTreeMap::<(ClientId, usize), Vec<_>>::new();
    // The values of higher learners.
    let mut whole = FixedBitSet::new();
    let mut partly = BTreeMap::<usize, Vec<_>>::new();
    for Values { sender, sent, partly: own, .. } in values {
        whole.grow(sent.len());
        let mut rest = sent.clone();
        rest.difference_with(&whole);
        let in_part = own.into_iter().flat_map(PartlyWritten::blocks).map(|(block, _)| block.index());
        let mut cut: Vec<usize> = in_part.chain(partly.keys().copied()).collect();
        cut.retain(|&block| rest.contains(block));
        cut.sort_unstable();
        cut.dedup();
        for block in cut {
            rest.set(block, false);
            let written = own.and_then(|own| own.of(BlockId(block as u32)));
            let all = std::slice::from_ref(&(0..u32::MAX));
            let before = partly.entry(block).or_default();
            if let Some(sender) = sender {
                let counts = pieces.entry((sender, block)).or_default();
                let left = ranges::without(written.unwrap_or(all), before);
                left.into_iter().for_each(|range| ranges::insert(counts, range));
            }
            match written {
                Some(written) => written.iter().for_each(|range| ranges::insert(before, range.clone())),
                None => {
                    partly.remove(&block);
                    whole.insert(block);
                }
            }
        }
        if let Some(sender) = sender {
            let share = shares.entry(sender).or_default();
            share.blocks.grow(sent.len());
            share.blocks.union_with(&rest);
        }
        whole.union_with(&rest);
    }
    for ((sender, block), counts) in pieces.into_iter().filter(|(_, counts)| !counts.is_empty()) {
        let share = shares.entry(sender).or_default();
        share.blocks.insert(block);
        if counts[..] != *std::slice::from_ref(&(0..u32::MAX)) {
            share.partly.insert(BlockId(block as u32), counts);
        }
    }
    shares
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // lists of ranges that happen to have one
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCKS: usize = 4;
    const BYTES: u32 = 12;

    /// Whether each byte of each block is written.
    type Bytes = [[bool; BYTES as usize]; BLOCKS];

    fn written(bytes: &Bytes) -> (FixedBitSet, PartlyWritten) {
        let (mut sent, mut partly) = (FixedBitSet::with_capacity(BLOCKS), PartlyWritten::default());
        for (block, bytes) in bytes.iter().enumerate().filter(|(_, bytes)| bytes.contains(&true)) {
            sent.insert(block);
            let mut ranges = Vec::new();
            let ones = (0..BYTES).filter(|&at| bytes[at as usize]);
            ones.for_each(|at| ranges::insert(&mut ranges, at..at + 1));
            if ranges != [0..BYTES] {
                partly.insert(BlockId(block as u32), ranges);
            }
        }
        (sent, partly)
    }

    /// The block is written as a whole, in part, or not at all.
    fn block() -> impl Strategy<Value = [bool; BYTES as usize]> {
        prop_oneof![Just([true; 12]), Just([false; 12]), any::<[bool; 12]>()]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_was_not_written_takes_no_part_in_assign(
            learners in prop::collection::vec((prop::array::uniform4(block()), 0..4u64), 1..6),
        ) {
            // The first client's values were sent before.
            let client = |of: u64| (of > 0).then_some(ClientId(of));
            let sets: Vec<_> = learners.iter().map(|(bytes, _)| written(bytes)).collect();
            let of = |((number, (_, by)), (sent, partly)): ((usize, &(Bytes, u64)), _)| Values {
                learner: LearnerId(number as u32),
                sender: client(*by),
                sent,
                partly: Some(partly),
            };
            let mut values: Vec<_> =
                learners.iter().enumerate().zip(sets.iter().map(|(sent, partly)| (sent, partly))).map(of).collect();
            values.rotate_left(learners.len() / 2);
            let shares = shares(values);
            for (sender, share) in &shares {
                prop_assert_eq!(share.partly.check(BLOCKS as u32), Ok(()), "{:?}", sender);
            }
            for block in 0..BLOCKS {
                for at in 0..BYTES {
                    let last = learners.iter().rfind(|(bytes, _)| bytes[block][at as usize]);
                    let counts = |share: &Share| {
                        share.blocks.contains(block)
                            && share
                                .partly
                                .of(BlockId(block as u32))
                                .is_none_or(|ranges| ranges.iter().any(|range| range.contains(&at)))
                    };
                    let whose: Vec<_> = shares.iter().filter(|(_, of)| counts(of)).map(|(sender, _)| *sender).collect();
                    let expected: Vec<_> = last.and_then(|(_, by)| client(*by)).into_iter().collect();
                    prop_assert_eq!(whose, expected, "block {}, byte {}", block, at);
                }
            }
        }
    }
}
