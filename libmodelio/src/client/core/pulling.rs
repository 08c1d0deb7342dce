//! The blocks of a version that are missing, asked for and being received.

use std::ops::Range;

use fixedbitset::FixedBitSet;

use super::pull_times::PullReport;
use super::waits::{Awaits, Wait};
use super::{Action, ClientCore, Now};
use crate::vocabulary::block_map::PartitionIndex;
use crate::vocabulary::controls::{Consistency, NonFinite, PullPolicy};
use crate::vocabulary::ids::{BlockId, LearnerId, PlanId, Version};
use crate::wire::Message;

/// The number of blocks in one pull request.
pub const PULL_BLOCKS: usize = 4;

/// Whether a version comes as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whole {
    /// The caller must ask for this version.
    Ask(Version),
    /// Another connection asks for it, or has done so.
    Awaited,
    /// It comes in blocks.
    Not,
}

#[derive(Debug)]
pub(super) struct Pull {
    pub(super) version: Version,
    pub(super) partitions: Vec<Receiving>,
    pub(super) left: usize,
    /// There is no buffer for the version: all of them are held.
    pub(super) no_buffer: bool,
    /// The plan that makes the version, if the client follows it: shards send the blocks as they are computed.
    pub(super) follows: Option<PlanId>,
    /// The version exists. Otherwise it may come to nothing, and nothing of it is asked for by its number.
    pub(super) decided: bool,
    /// A shard has a newer version by now, and not this one.
    pub(super) is_gone: bool,
    /// The version that is shown, if shards may send what has changed since.
    pub(super) base: Option<Version>,
    /// A relay is asked for the blocks, and no shard.
    pub(super) by_relay: Option<ByRelay>,
}

/// The blocks of a pull that a relay is asked for.
#[derive(Debug)]
pub(super) struct ByRelay {
    /// The blocks that it was not asked for yet.
    pub(super) todo: FixedBitSet,
    /// When a block last came, or was first asked for.
    pub(super) moved: Now,
}

impl Pull {
    pub(super) fn new(version: Version, owned: &[FixedBitSet], follows: Option<PlanId>, now: Now) -> Pull {
        let receiving = |owned: &FixedBitSet| Receiving {
            missing: owned.clone(),
            asked: FixedBitSet::with_capacity(owned.len()),
            reserved: FixedBitSet::with_capacity(owned.len()),
            moved: now,
            retry: None,
            struggles: false,
            sends_ahead: false,
            has_lost: false,
        };
        let partitions: Vec<Receiving> = owned.iter().map(receiving).collect();
        let left = partitions.iter().map(|of| of.missing.count_ones(..)).sum();
        Pull {
            version,
            partitions,
            left,
            no_buffer: false,
            follows,
            decided: follows.is_none(),
            is_gone: false,
            base: None,
            by_relay: None,
        }
    }
}

#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) missing: FixedBitSet,
    /// The missing blocks that were asked for.
    pub(super) asked: FixedBitSet,
    /// The missing blocks that a connection is receiving.
    pub(super) reserved: FixedBitSet,
    pub(super) moved: Now,
    /// When to ask again. The shard did not have the version yet.
    pub(super) retry: Option<Now>,
    /// A block was lost, or the pull does not progress.
    pub(super) struggles: bool,
    /// The shard sends all its blocks of the version by itself. They need not be asked for.
    pub(super) sends_ahead: bool,
    /// A block that the shard has sent by itself may be lost. It sends no block twice.
    pub(super) has_lost: bool,
}

impl Receiving {
    /// Blocks that the shard has sent by itself may be lost.
    pub(super) fn loses_ahead(&mut self) {
        (self.sends_ahead, self.has_lost) = (false, true);
    }
}

impl ClientCore {
    /// Begins to pull the newest version, unless it is shown or being pulled, or is here already. If it is shown, and a
    /// plan that the client can follow makes the next one, begins to pull that.
    pub(super) fn start_pull(&mut self, now: Now, actions: &mut Vec<Action>) {
        if self.can_follow() && self.is_wanted_ahead(now) {
            self.follow(now, actions);
        }
        if !self.can_pull() {
            return;
        }
        if self.buffers.are_none() {
            self.buffers.fill_with_own();
            return actions.push(Action::Pulled(self.state.version));
        }
        self.pull_times.is_behind(now);
        if self.buffers.has_brought(self.state.version) {
            self.buffers.fill();
            self.pull_times.began(now);
            return actions.push(Action::Pulled(self.state.version));
        }
        if let Some(token) = self.own_weights() {
            self.buffers.fill_with_own();
            return actions.push(Action::Own(self.state.version, token));
        }
        if !self.is_wanted(now) {
            return;
        }
        self.pull_times.began(now);
        let pull = Pull::new(self.state.version, self.owners.owned(), None, now);
        let mut all = self.owners.no_blocks();
        all.insert_range(..);
        let by_relay = self.owners.relay.is_up.then_some(ByRelay { todo: all, moved: now });
        match by_relay {
            Some(_) => actions.push(Action::Relay),
            None => actions.extend(self.owners.partitions().map(Action::Wake)),
        }
        self.pull = Some(Pull { base: self.base(), by_relay, ..pull });
    }

    /// If the version that is pulled is gone, and a newer one is known, begins with that.
    pub(super) fn restart_pull(&mut self, now: Now, actions: &mut Vec<Action>) {
        let newest = self.state.version;
        if self.pull.take_if(|pull| pull.is_gone && pull.version < newest).is_some() {
            self.start_pull(now, actions);
        }
    }

    /// If the version exists and all its blocks are here, it is to be shown.
    pub(super) fn show_if_complete(&mut self, actions: &mut Vec<Action>) -> bool {
        let all = |pull: &mut Pull| pull.left == 0 && pull.decided;
        let complete = if !self.buffers.is_received() { self.pull.take_if(all) } else { None };
        let Some(Pull { version, .. }) = complete else { return false };
        self.buffers.fill();
        actions.push(Action::Pulled(version));
        true
    }

    /// Whether the back buffer can be filled at once with this version, which the client has not asked for.
    pub fn takes_version(&self, version: Version) -> bool {
        let is_idle = self.pull.is_none() && self.buffers.is_idle() && !self.buffers.are_none();
        is_idle && self.buffers.shown().is_none_or(|shown| version > shown) && self.state.sequence != 0
    }

    /// The back buffer has all of this version, which the next state announces. [`Self::brings_nothing`] must follow.
    pub fn brings(&mut self, version: Version) {
        self.buffers.set_brought(Some(version));
    }

    /// Nothing has come with the states after this.
    pub fn brings_nothing(&mut self) {
        self.buffers.set_brought(None);
    }

    /// New weights of this token, which are about to be sent, stay unchanged in memory that can be shown. If they are
    /// all of a version, that is not pulled.
    pub fn can_show(&mut self, token: u64) {
        self.weights.can_show(token);
    }

    /// The new weights that the newest version consists of, byte for byte, if their memory is still here and can be
    /// shown.
    fn own_weights(&self) -> Option<u64> {
        let token = self.state.own_weights.filter(|token| self.weights.is_showable(*token))?;
        let is_whole = self.weights.published(token)?.count_ones(..) == self.owners.blocks();
        // A NaN may have other bits in the version.
        (is_whole && self.state.controls.nonfinite == NonFinite::Reject).then_some(token)
    }

    /// Whether there is a newer version than the one that is shown, and nothing is being pulled.
    pub(super) fn can_pull(&self) -> bool {
        let is_shown = self.buffers.shown().is_some_and(|shown| self.state.version <= shown);
        self.pull.is_none() && self.buffers.is_idle() && self.state.sequence != 0 && !is_shown
    }

    /// When to pull the newest version, if that is not yet due.
    pub fn pull_due(&self) -> Option<Now> {
        let waits = self.pull_policy() == PullPolicy::Adaptive && (self.can_pull() || self.can_follow());
        waits.then(|| self.due())
    }

    pub(super) fn due(&self) -> Now {
        // Without learners no newer version comes.
        if self.state.members == 0 { Now::ZERO } else { self.pull_times.due() }
    }

    /// A program opens the version that is shown, as this learner or as none.
    pub fn version_opened(&mut self, learner: Option<LearnerId>, now: Now) {
        let known = learner.and_then(|learner| self.learners.get(&learner));
        match known {
            Some(known) => self.pull_times.opened(learner, known.committed.0, now),
            None => self.pull_times.opened(None, self.version().0, now),
        }
    }

    /// How long pulls take, and how often versions are opened.
    pub fn pull_report(&self) -> (PullPolicy, PullReport) {
        (self.pull_policy(), self.pull_times.report())
    }

    /// Whether the policy, or a request that waits, needs a newer version than the one that is shown.
    pub(super) fn is_wanted(&mut self, now: Now) -> bool {
        let newer = |wait: &Wait| match wait.awaits {
            Awaits::Version(version) | Awaits::Reachable(version) => version > self.version(),
            Awaits::Step(learner) => {
                self.learners.get(&learner).is_some_and(|known| known.state.published_in > self.version())
            }
        };
        let is_asked = self.owners.relay.wanted > self.version();
        if self.buffers.shown().is_none() || is_asked || self.waits.waiting().any(newer) {
            return true;
        }
        match self.pull_policy() {
            PullPolicy::Eager => true,
            PullPolicy::OnDemand => false,
            PullPolicy::Adaptive => {
                self.pull_times.forget_gone(now);
                self.due() <= now
            }
        }
    }

    /// Whether all buffers for the version that is being pulled are held.
    pub fn set_no_buffer(&mut self, no_buffer: bool) {
        if let Some(pull) = &mut self.pull {
            pull.no_buffer = no_buffer;
        }
    }

    /// The version that is being pulled. None if it does not exist yet.
    pub fn pulling(&self) -> Option<Version> {
        self.pull.as_ref().filter(|pull| pull.decided).map(|pull| pull.version)
    }

    /// The next request for blocks of a shard, while fewer than `window` blocks are on their way from it.
    pub fn next_pull(&mut self, partition: PartitionIndex, window: usize, now: Now) -> Option<Message> {
        let base = self.pulled_base();
        let pull = self.pull.as_mut().filter(|pull| pull.decided && pull.by_relay.is_none())?;
        let receiving = &mut pull.partitions[partition];
        let under_way = receiving.asked.count_ones(..);
        if under_way >= window || receiving.retry.is_some() || receiving.sends_ahead {
            return None;
        }
        let count = PULL_BLOCKS.min(window - under_way);
        let asked: Vec<usize> = receiving.missing.difference(&receiving.asked).take(count).collect();
        let (&first, &last) = (asked.first()?, asked.last()?);
        // A range over blocks that have come would bring those again.
        let gap = |pair: &[usize]| {
            let between = &self.owners.owned()[partition];
            (pair[0] + 1..pair[1]).any(|block| between.contains(block))
        };
        let last = asked.windows(2).find(|pair| gap(pair)).map_or(last, |pair| pair[0]);
        asked.into_iter().take_while(|&block| block <= last).for_each(|block| receiving.asked.insert(block));
        receiving.moved = now;
        let blocks = first as u32..last as u32 + 1;
        Some(Message::Pull { version: pull.version, blocks, base })
    }

    /// The version since which what has changed of the pulled one may be sent.
    pub(super) fn pulled_base(&self) -> Option<Version> {
        let base = self.pull.as_ref().and_then(|pull| pull.base);
        base.filter(|base| self.buffers.shown() == Some(*base))
    }

    /// The version since which shards may send what has changed.
    fn base(&self) -> Option<Version> {
        self.buffers.shown().filter(|_| self.state.controls.delta)
    }

    /// The version since which shards may send what has changed of this one.
    pub fn base_of(&self, version: Version) -> Option<Version> {
        self.pulled_base().filter(|_| self.pull.as_ref().is_some_and(|pull| pull.version == version))
    }

    /// A patch has not made the shard's block: the rest of this version is pulled whole.
    pub fn pulls_whole(&mut self, version: Version, actions: &mut Vec<Action>) {
        let Some(pull) = self.pull.as_mut().filter(|pull| pull.version == version) else { return };
        if pull.base.take().is_none() {
            return;
        }
        // The client takes no more patches, so it asks again for the blocks that are on their way as such.
        pull.by_relay = None;
        for receiving in &mut pull.partitions {
            receiving.loses_ahead();
            receiving.asked.intersect_with(&receiving.reserved);
        }
        actions.extend(self.owners.partitions().map(Action::Wake));
    }

    /// Whether the pulled version comes as a whole, from a shard that has all blocks of the model. A caller that
    /// `asks` must send the request if the answer is [`Whole::Ask`].
    pub fn pull_whole(&mut self, asks: bool, now: Now) -> Whole {
        let pull = self.pull.as_mut().filter(|pull| pull.decided && pull.by_relay.is_none());
        let (1, Some(pull), false) = (self.owners.owned().len(), pull, self.buffers.is_received()) else {
            return Whole::Not;
        };
        let receiving = &mut pull.partitions[0];
        if pull.left < self.owners.blocks()
            || !(receiving.asked.is_clear() || receiving.asked == receiving.missing)
        {
            return Whole::Not;
        }
        if !asks || receiving.retry.is_some() || !receiving.asked.is_clear() {
            return Whole::Awaited;
        }
        receiving.asked.clone_from(&receiving.missing);
        receiving.moved = now;
        Whole::Ask(pull.version)
    }

    /// The number of blocks that a request asks a shard for.
    pub fn asked_in(&self, partition: PartitionIndex, blocks: &Range<u32>) -> usize {
        self.owners.owned()[partition].count_ones(blocks.start as usize..blocks.end as usize)
    }

    /// Reserves a block of a version for a connection. True if the block is wanted; then [`Self::end_reservation`]
    /// must follow. A reserved block is not wanted a second time: a broken second copy would overwrite part of the
    /// first.
    pub fn reserve(&mut self, version: Version, block: BlockId) -> bool {
        let partition = self.owners.of(block);
        let (Some(partition), Some(pull)) = (partition, &mut self.pull) else { return false };
        let receiving = &mut pull.partitions[partition];
        let wanted = pull.version == version
            && receiving.missing.contains(block.index())
            && !receiving.reserved.put(block.index());
        if wanted {
            self.buffers.reserve();
        }
        wanted
    }

    /// A block that was asked for is not on its way after all.
    pub fn not_asked(&mut self, version: Version, block: BlockId) {
        let partition = self.owners.of(block);
        if let (Some(partition), Some(pull)) = (partition, &mut self.pull)
            && pull.version == version
        {
            pull.partitions[partition].asked.set(block.index(), false);
        }
    }

    /// Ends a block's reservation. The block is in the buffer, or it was lost on its way (not `whole`).
    pub fn end_reservation(
        &mut self,
        version: Version,
        block: BlockId,
        whole: bool,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        self.buffers.end_reservation();
        let partition = self.owners.of(block);
        if let (Some(partition), Some(pull)) = (partition, &mut self.pull)
            && pull.version == version
        {
            let receiving = &mut pull.partitions[partition];
            receiving.moved = now;
            pull.by_relay.iter_mut().for_each(|by_relay| by_relay.moved = now);
            receiving.asked.set(block.index(), false);
            receiving.reserved.set(block.index(), false);
            if whole && receiving.missing.contains(block.index()) {
                receiving.missing.set(block.index(), false);
                pull.left -= 1;
            }
            if !whole && receiving.sends_ahead {
                receiving.loses_ahead();
            }
            // The connection that brought the block asks for more by itself.
            let is_asked = pull.decided && !receiving.sends_ahead && pull.by_relay.is_none();
            if receiving.asked.is_clear() && is_asked {
                actions.push(Action::Wake(partition));
            }
            if self.show_if_complete(actions) {
                return;
            }
        }
        self.start_pull(now, actions);
    }

    /// The pulled version is complete here without any transfer. False if it is not wanted.
    pub fn is_here(&mut self, version: Version, actions: &mut Vec<Action>) -> bool {
        let wanted =
            !self.buffers.is_received() && self.pull.take_if(|pull| pull.version == version).is_some();
        if wanted {
            self.buffers.fill();
            actions.push(Action::Pulled(version));
        }
        wanted
    }

    /// Begins to pull the version that the plan under way makes, before it is certain that the plan makes one.
    pub(super) fn follow(&mut self, now: Now, actions: &mut Vec<Action>) {
        let Some(plan) = self.followable() else { return };
        self.pull_times.began_ahead(now);
        let pull = Pull::new(self.state.version.next(), self.owners.owned(), Some(plan), now);
        self.pull = Some(Pull { base: self.base(), ..pull });
        actions.extend(self.owners.partitions().map(Action::Wake));
    }

    /// Whether the policy, or a request that waits, wants what is followed now.
    pub(super) fn is_wanted_ahead(&mut self, now: Now) -> bool {
        // Where learners wait for each other, no newer version can come meanwhile.
        let is_last = self.state.controls.consistency == Consistency::Sync
            && self.pull_policy() == PullPolicy::Adaptive
            && self.outgoing.as_ref().is_some_and(|outgoing| !outgoing.is_provisional());
        is_last || self.is_wanted(now)
    }
}
