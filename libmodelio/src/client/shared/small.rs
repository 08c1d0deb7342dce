//! Small models: a contribution goes with its commit, and a version comes with the state that announces it. So a step
//! is one message each way.
//!
//! This module holds `unsafe`: it reads staged blocks, and writes the back buffer.

use std::sync::Arc;

use crate::client::peers::routes::{Route, overtaken};
use crate::client::shared::{Inner, Shared};
use crate::transport::stream::{Close, LentPayload};
use crate::transport::tally::Flow;
use crate::vocabulary::block_ranges::BlockRanges;
use crate::vocabulary::ids::BlockId;
use crate::wire::{JobState, MAX_SMALL_MODEL, Message};

impl Shared {
    /// Whether contributions go with their commits: the model is small, and its only shard coordinates it.
    pub(in crate::client) fn is_small(&self, inner: &Inner) -> bool {
        !self.shards.read_in_place()
            && self.layout.size() <= u64::from(MAX_SMALL_MODEL)
            && inner.peers.routes.partitions.len() == 1
    }

    /// The blocks that go with a commit, one behind the other, if all of them are whole.
    pub(in crate::client) fn blocks_with(&self, inner: &Inner, message: &Message) -> Option<LentPayload> {
        let Message::Commit { learner, step, blocks, partly: Some(partly), .. } = message else {
            return None;
        };
        if !self.is_small(inner) || blocks.is_empty() || partly.pieces() > 0 {
            return None;
        }
        let memory = inner.payloads.sources.get(&(*learner, *step))?.region.memory();
        let mut bytes = Vec::new();
        for range in extents(blocks, |block| self.layout.block_bytes(block)) {
            // SAFETY: blocks of a commit are whole, and nobody writes staged ones meanwhile. A program can store into
            // memory that it has mapped: then each byte is old or new, and the copy is what is checked and sent.
            bytes.extend_from_slice(unsafe { memory.bytes(range) });
        }
        self.accounts.tally.moved(Flow::Push, bytes.len());
        self.accounts.tally.copied(Flow::Push, bytes.len());
        let crc = self.options.checksum.of(&bytes);
        Some(LentPayload::shared(&Arc::new(bytes), crc))
    }

    /// The coordinator announces a version, and all bytes of it come along.
    ///
    /// # Errors
    /// If the connection was opened under a map that is no longer in force.
    pub(in crate::client) fn state_with_version(
        &self,
        route: &Route,
        state: JobState,
        bytes: &[u8],
    ) -> Result<(), Close> {
        let mut inner = self.inner.lock();
        if !inner.peers.is_in_force(route) {
            return Err(overtaken());
        }
        let (retain, max) = inner.bounds();
        let (now, mut actions) = (self.now(), Vec::new());
        let takes = bytes.len() as u64 == self.layout.size() && inner.core.takes_version(state.version);
        if takes {
            inner.versions.begin_back();
        }
        if takes && let Ok(Some(back)) = inner.versions.back(retain, max) {
            inner.versions.is_filled();
            // SAFETY: no connection is receiving, so the back buffer is this thread's as long as it has the lock.
            unsafe { back.memory().bytes_mut(0..bytes.len()) }.copy_from_slice(bytes);
            self.accounts.tally.moved(Flow::Pull, bytes.len());
            self.accounts.tally.copied(Flow::Pull, bytes.len());
            inner.core.brings(state.version);
        }
        inner.core.from_coordinator(0, Message::State(Box::new(state)), now, &mut actions);
        inner.core.brings_nothing();
        self.act(inner, actions);
        Ok(())
    }
}

/// The places of blocks.
fn extents(
    blocks: &BlockRanges,
    place: impl Fn(BlockId) -> std::ops::Range<u64>,
) -> impl Iterator<Item = std::ops::Range<usize>> {
    let blocks = blocks.iter().filter(|range| !range.is_empty());
    blocks.map(move |range| {
        let (first, last) = (place(BlockId(range.start)), place(BlockId(range.end - 1)));
        first.start as usize..last.end as usize
    })
}
