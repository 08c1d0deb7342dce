//! Pulling from a relay: another client that has the blocks of a version, or gets them just now, in place of the shards.
//!
//! Only pulls go by a relay. A version is asked of it once the state names the version, and what comes is taken as from a
//! shard. A relay that is gone, silent or behind is left: the shards are asked for the rest of the version. Of one that
//! the coordinator has named, the coordinator is told then, unless it was only behind.

use std::sync::Arc;
use std::time::Duration;

use super::{Action, ClientCore, Now, PULL_BLOCKS};
use crate::vocabulary::ids::{BlockId, Version};
use crate::wire::{Message, Refusal};

/// A relay that sends nothing for so long is left.
const STALLED: Duration = Duration::from_millis(1000);
/// And for so much longer with each relay before it. The first client behind a stalled one leaves it first, and those
/// behind that one go on.
const STALLED_MORE: Duration = Duration::from_millis(250);
const STALLED_MOST: Duration = Duration::from_millis(3000);

/// The relay that a client pulls from, and its followers.
#[derive(Debug, Default)]
pub(super) struct Relay {
    /// The message by which the client becomes a relay, if the coordinator names the relay to pull from.
    pub(super) offer: Option<Message>,
    /// The address of the relay, if there is one.
    address: Option<Arc<str>>,
    /// The number of relays before this client.
    depth: u32,
    /// The relay is connected: the next version is pulled from it.
    pub(super) is_up: bool,
    /// The newest version that followers have asked for.
    pub(super) wanted: Version,
    /// Blocks that were taken from the shards in place of the relay.
    replaced: u64,
}

impl Relay {
    fn patience(&self) -> Duration {
        STALLED.saturating_add(STALLED_MORE.saturating_mul(self.depth)).min(STALLED_MOST)
    }
}

impl ClientCore {
    /// Pulls by relays that the coordinator names, which is told this `offer`, or by the one at `address`.
    pub fn by_relays(mut self, offer: Option<Message>, address: Option<String>) -> ClientCore {
        let address = address.map(Arc::from);
        self.owners.relay = Relay { offer, address, ..Relay::default() };
        self
    }

    /// The address of the relay to be connected to.
    pub fn relay_address(&self) -> Option<&Arc<str>> {
        self.owners.relay.address.as_ref()
    }

    /// The blocks that were taken from the shards in place of the relay.
    pub fn replaced_relay(&self) -> u64 {
        self.owners.relay.replaced
    }

    /// The coordinator names a relay.
    pub(super) fn pulls_via(
        &mut self,
        address: Option<String>,
        depth: u32,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let relay = &mut self.owners.relay;
        if relay.offer.is_none() {
            return;
        }
        relay.depth = depth;
        if relay.address.as_deref() != address.as_deref() {
            (relay.address, relay.is_up) = (address.map(Arc::from), false);
            self.leave_relay(now, actions);
            actions.push(Action::Relay);
        }
    }

    /// A connection to the relay is open.
    pub fn relay_up(&mut self) {
        self.owners.relay.is_up = true;
    }

    /// A connection to the relay has ended, or does not come about.
    pub fn relay_down(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.owners.relay.is_up = false;
        self.relay_fails(now, actions);
    }

    fn relay_fails(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.leave_relay(now, actions);
        let relay = &mut self.owners.relay;
        if relay.offer.is_some()
            && let Some(address) = relay.address.take()
        {
            relay.is_up = false;
            self.notify(Message::RelayFailed { address: address.to_string() }, actions);
            actions.push(Action::Relay);
        }
    }

    /// The rest of the version comes from the shards.
    fn leave_relay(&mut self, now: Now, actions: &mut Vec<Action>) {
        let Some(pull) = &mut self.pull else { return };
        if pull.by_relay.take().is_none() {
            return;
        }
        pull.partitions.iter_mut().for_each(|receiving| receiving.moved = now);
        let left = pull.left as u64;
        self.owners.relay.replaced += left;
        actions.extend(self.owners.partitions().map(Action::Wake));
    }

    /// A message without payload from the relay.
    pub fn from_relay(&mut self, message: &Message, now: Now, actions: &mut Vec<Action>) {
        let pulled = self.pulling();
        if let Message::Refused(Refusal::NoVersion { wanted, .. }) = message
            && pulled == Some(*wanted)
        {
            self.leave_relay(now, actions);
        }
    }

    /// The next request for blocks of the relay, while fewer than `window` blocks are on their way.
    pub fn next_of_relay(&mut self, window: usize, now: Now) -> Option<Message> {
        let base = self.pulled_base();
        let pull = self.pull.as_mut().filter(|pull| pull.decided)?;
        let by_relay = pull.by_relay.as_mut()?;
        let under_way = pull.left.saturating_sub(by_relay.todo.count_ones(..));
        let first = by_relay.todo.minimum().filter(|_| under_way < window)?;
        let most = PULL_BLOCKS.min(window - under_way);
        let last = (first..first + most).take_while(|&block| by_relay.todo.contains(block)).last()?;
        by_relay.todo.remove_range(first..last + 1);
        by_relay.moved = now;
        Some(Message::Pull { version: pull.version, blocks: first as u32..last as u32 + 1, base })
    }

    /// When a relay that sends nothing is left.
    pub(super) fn relay_deadline(&self) -> Option<Now> {
        let pull = self.pull.as_ref().filter(|pull| pull.decided)?;
        Some(pull.by_relay.as_ref()?.moved + self.owners.relay.patience())
    }

    pub(super) fn tick_relay(&mut self, now: Now, actions: &mut Vec<Action>) {
        if self.relay_deadline().is_none_or(|due| due > now) {
            return;
        }
        match &mut self.pull {
            // Nothing is asked of it meanwhile.
            Some(super::Pull { no_buffer: true, by_relay: Some(by_relay), .. }) => by_relay.moved = now,
            _ => self.relay_fails(now, actions),
        }
    }

    /// A follower asks for this version, which is not here.
    pub fn follower_wants(&mut self, version: Version, now: Now, actions: &mut Vec<Action>) {
        // Nobody but the coordinator says how far the job is.
        let version = version.min(self.state.version.next());
        let relay = &mut self.owners.relay;
        if version > relay.wanted {
            relay.wanted = version;
            self.start_pull(now, actions);
        }
    }

    /// Whether this block of the version that is being pulled is in the back buffer, and stays.
    pub fn has_pulled(&self, version: Version, block: BlockId) -> bool {
        let pull = self.pull.as_ref().filter(|pull| pull.decided && pull.version == version);
        let (Some(pull), Some(partition)) = (pull, self.owners.of(block)) else { return false };
        !pull.partitions[partition].missing.contains(block.index())
    }

    /// Whether no block of the pulled version is in the back buffer yet.
    pub fn has_pulled_none(&self) -> bool {
        self.pull.as_ref().is_none_or(|pull| pull.left == self.owners.blocks())
    }
}
