//! New weights in parts, as the history has them: which cells of the model each part has, which parts a plan publishes,
//! and whether its version is just these over the version before.

use std::collections::{BTreeMap, BTreeSet};

use libmodelio::vocabulary::ids::{ClientId, Version};
use libmodelio::vocabulary::meta::Meta;
use libmodelio::wire::{PartOf, Plan, SetOfParts};

use super::{Content, History, Planned, Uid, meta_of};
use crate::state::{Block, mix};

/// Elements that parts have or lack. A block is so many of them.
pub const CELLS: u32 = 8;

/// One part of new weights, as its client publishes it.
#[derive(Clone, Debug)]
pub struct PartRecord {
    pub client: ClientId,
    pub of: PartOf,
    /// In the model.
    pub cells: BTreeSet<u32>,
    /// It is NaN here.
    pub bad: Option<u32>,
    /// Its client says something of the version.
    pub says: bool,
    /// Why it is in no version.
    refused: Option<String>,
}

/// What has become of sets.
#[derive(Debug, Default)]
pub struct Sets {
    /// Those that are versions.
    pub made: u64,
    /// Blocks of these that have something of several parts.
    pub mixed: u64,
    /// Blocks of these of which some was left as it was.
    pub kept: u64,
    /// Cells that several parts had.
    pub overlaps: u64,
    /// Complete sets that were refused.
    pub refused: u64,
}

impl PartRecord {
    /// Which part of which set, what it has, where that is NaN, and whether something is said of it.
    pub fn new(
        client: ClientId,
        of: PartOf,
        (cells, bad): (BTreeSet<u32>, Option<u32>),
        says: bool,
    ) -> PartRecord {
        PartRecord { client, of, cells, bad, says, refused: None }
    }

    /// What its client says of the version.
    pub fn meta(&self, uid: Uid) -> Meta {
        if self.says { meta_of(uid) } else { Meta::default() }
    }

    /// Blocks of which it has something.
    pub fn blocks(&self) -> BTreeSet<u32> {
        self.cells.iter().map(|cell| cell / CELLS).collect()
    }
}

impl Content {
    /// The block of the next version where parts are laid over it: of each cell, whose it is, or zero.
    pub fn laid(&self, cells: &[Uid]) -> Content {
        let mut added = Vec::new();
        for &uid in cells.iter().filter(|uid| **uid != 0) {
            if !added.contains(&uid) {
                added.push(uid);
            }
        }
        Content::of(
            cells.iter().fold(mix(self.digest, 2), |digest, uid| mix(digest, u64::from(*uid))),
            &added,
        )
    }
}

impl Block {
    /// The block of the next version where some of it is written: the optimizer is not asked.
    pub fn written(&self, weights: Content) -> Block {
        let masters = weights.digest();
        Block { weights, state: crate::state::State { masters, ..self.state } }
    }
}

impl History {
    /// A program begins to publish a part.
    pub fn begins_part(&mut self, part: PartRecord) -> Uid {
        let uid = self.begins(None);
        self.record(uid).part = Some(part);
        uid
    }

    fn part(&self, uid: Uid) -> &PartRecord {
        self.records.get(&uid).and_then(|record| record.part.as_ref()).expect("a known part")
    }

    /// The parts of a plan that the coordinator sends to a shard: one whole set, and none besides.
    pub(super) fn parts_of(&mut self, plan: &Plan) -> Vec<Uid> {
        let Some(SetOfParts { all, parts }) = &plan.parts else { return Vec::new() };
        let uids: Vec<Uid> = parts.iter().map(|part| part.token as Uid).collect();
        let first = self.part(uids[0]).of.clone();
        assert_eq!(*all, first.all, "{plan:?} publishes {first:?}");
        assert_eq!(uids.len(), first.of as usize, "{plan:?} publishes {first:?}");
        for ((number, uid), sent) in (0..).zip(&uids).zip(parts) {
            let part = self.part(*uid);
            assert_eq!(part.of, PartOf { number, ..first.clone() }, "part {number} of {plan:?}");
            assert!(self.records[uid].offered, "{uid} was never asked for: {plan:?}");
            let blocks: BTreeSet<u32> = sent.blocks.iter().cloned().flatten().collect();
            assert_eq!((sent.client, blocks), (part.client, part.blocks()), "part {number} of {plan:?}");
        }
        let sources: BTreeSet<u32> =
            plan.sources.iter().flat_map(|source| source.blocks.iter().cloned().flatten()).collect();
        let has = |block: &u32| *all || uids.iter().any(|uid| self.part(*uid).blocks().contains(block));
        let blocks: BTreeSet<u32> = (0..self.blocks).filter(has).collect();
        assert_eq!(sources, blocks, "what is made of {plan:?}");
        // What shows of a part is in its blocks, if the plan makes a version.
        for block in blocks {
            for uid in self.laid_over(&uids, block).into_iter().filter(|uid| *uid != 0) {
                self.record(uid).blocks.insert(block);
            }
        }
        uids
    }

    /// Of each cell of a block, the lowest part that has it, or zero.
    fn laid_over(&self, uids: &[Uid], block: u32) -> Vec<Uid> {
        let whose = |cell| uids.iter().copied().find(|uid| self.part(*uid).cells.contains(&cell));
        (block * CELLS..(block + 1) * CELLS).map(|cell| whose(cell).unwrap_or_default()).collect()
    }

    /// A version of parts: all of one set, of each cell what the lowest part has, everything else as it was.
    pub(super) fn check_laid(
        &mut self,
        version: Version,
        planned: &Planned,
        (before, after): (&[Block], &[Block]),
        meta: &Meta,
    ) {
        let uids = &planned.parts;
        let says = uids.iter().find(|uid| self.part(**uid).says);
        let said = says.map(|uid| meta_of(*uid)).unwrap_or_default();
        assert_eq!(*meta, said, "the metadata of version {version}, of parts {uids:?}");
        let all = self.part(uids[0]).of.all;
        for ((block, before), after) in (0..).zip(before).zip(after) {
            let cells = self.laid_over(uids, block);
            assert!(!all || !cells.contains(&0), "version {version} has no part of some of block {block}");
            let is_bad = |(cell, uid): (u32, &Uid)| *uid != 0 && self.part(*uid).bad == Some(cell);
            let bad = (block * CELLS..).zip(&cells).any(is_bad);
            assert!(!bad || !self.reject, "block {block} of version {version} holds NaN");
            let is_of_some = all || uids.iter().any(|uid| self.part(*uid).blocks().contains(&block));
            let expected = match is_of_some {
                true => before.written(before.weights.laid(&cells)),
                false => before.assigned(None),
            };
            assert_eq!(*after, expected, "block {block} of version {version}, of parts {uids:?}");
            let whose: BTreeSet<Uid> = cells.iter().copied().collect();
            self.sets.kept += u64::from(is_of_some && whose.contains(&0));
            self.sets.mixed += u64::from(whose.iter().filter(|uid| **uid != 0).count() > 1);
        }
        let mut times = BTreeMap::<u32, u32>::new();
        uids.iter()
            .flat_map(|uid| &self.part(*uid).cells)
            .for_each(|cell| *times.entry(*cell).or_default() += 1);
        self.sets.overlaps += times.values().filter(|times| **times > 1).count() as u64;
        self.sets.made += 1;
        for uid in planned.parts.clone() {
            self.goes_in(uid, version);
        }
    }

    /// A part was refused. All parts of a set that was complete, and has made no version, are told the same.
    pub fn part_refused(&mut self, uid: Uid, why: String) {
        self.refused(uid, &why);
        let of = self.plans.values().find(|planned| planned.parts.contains(&uid));
        let Some(others) = of.map(|planned| planned.parts.clone()) else { return };
        let told: Vec<&String> = others.iter().filter_map(|of| self.part(*of).refused.as_ref()).collect();
        let differs = told.iter().find(|before| **before != &why);
        assert_eq!(differs, None, "part {uid} of {others:?} is refused: {why}");
        self.sets.refused += u64::from(told.is_empty());
        let acknowledged = others.iter().find(|of| self.records[of].outcome == super::Outcome::Acknowledged);
        assert_eq!(acknowledged, None, "part {uid} of {others:?} is refused: {why}");
        self.record(uid).part.iter_mut().for_each(|part| part.refused = Some(why.clone()));
    }
}
