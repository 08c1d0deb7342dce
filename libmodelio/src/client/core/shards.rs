//! Connections to shards, their messages, and the repetition of what is lost.

use super::{Action, ClientCore, Now, Outgoing, Pull, REPEAT_AFTER, RETRY};
use crate::vocabulary::block_map::PartitionIndex;
use crate::wire::{Message, Refusal};

impl ClientCore {
    /// A connection to a shard is open. If there was no other one, whatever was on its way before may be lost.
    pub fn shard_up(&mut self, partition: PartitionIndex, now: Now, actions: &mut Vec<Action>) {
        if !self.owners.set_up(partition, true) {
            self.check_partition(partition, now, actions);
        }
        actions.push(Action::Wake(partition));
    }

    /// No connection to the shard is open.
    pub fn shard_down(&mut self, partition: PartitionIndex) {
        self.owners.set_up(partition, false);
    }

    /// One of several connections to a shard has ended. The client finds and repeats what was on it.
    pub fn check_partition(&mut self, partition: PartitionIndex, now: Now, actions: &mut Vec<Action>) {
        if let Some(outgoing) = &mut self.outgoing
            && outgoing.is_provisional()
        {
            // A provisional plan is checked when the coordinator has sealed it.
            outgoing.partitions[partition].struggles = true;
        } else if let Some(outgoing) = &mut self.outgoing
            && !outgoing.partitions[partition].done
        {
            outgoing.partitions[partition].moved = now;
            outgoing.partitions[partition].struggles = true;
            actions.push(Action::ToShard(partition, Message::Probe { plan: outgoing.plan }));
        }
        if let Some(pull) = &mut self.pull {
            pull.partitions[partition].asked.clear();
            pull.partitions[partition].struggles = pull.decided;
            pull.partitions[partition].loses_ahead();
            actions.push(Action::Wake(partition));
        }
    }

    /// A message without payload from a shard.
    pub fn from_shard(
        &mut self,
        partition: PartitionIndex,
        message: Message,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        match message {
            Message::Missing { plan, blocks } => {
                let mut bits = self.owners.bits(&blocks);
                let of_plan = |outgoing: &&mut Outgoing| outgoing.plan == plan && !outgoing.is_provisional();
                let Some(outgoing) = self.outgoing.as_mut().filter(of_plan) else { return };
                // Another coordinator may have begun a plan with that number there.
                bits.intersect_with(&outgoing.blocks);
                let sending = &mut outgoing.partitions[partition];
                sending.done = bits.is_clear();
                sending.struggles |= !sending.done;
                sending.todo = &bits & &self.owners.owned()[partition];
                (sending.at, sending.round) = (0, true);
                sending.moved = now;
                actions.push(Action::Wake(partition));
            }
            Message::Refused(Refusal::NoVersion { wanted, newest }) => {
                let of_version = |pull: &&mut Pull| pull.version == wanted && pull.decided;
                let Some(pull) = self.pull.as_mut().filter(of_version) else { return };
                pull.is_gone |= newest > wanted;
                pull.partitions[partition].asked.clear();
                pull.partitions[partition].retry = Some(now + RETRY);
                // Until the state names a newer one, what belongs to that one besides its blocks is not known.
                self.restart_pull(now, actions);
            }
            _ => {}
        }
    }

    pub(super) fn tick_partition(&mut self, partition: PartitionIndex, now: Now, actions: &mut Vec<Action>) {
        if let Some(outgoing) = &mut self.outgoing {
            let sending = &mut outgoing.partitions[partition];
            if !sending.done && sending.moved + REPEAT_AFTER <= now {
                sending.moved = now;
                sending.struggles = true;
                // Only a block that was sent can be missing.
                if sending.todo.is_clear() {
                    actions.push(Action::ToShard(partition, Message::Probe { plan: outgoing.plan }));
                } else {
                    actions.push(Action::Wake(partition));
                }
            }
        }
        if let Some(pull) = self.pull.as_mut().filter(|pull| pull.decided && pull.by_relay.is_none()) {
            let receiving = &mut pull.partitions[partition];
            if receiving.retry.take_if(|at| *at <= now).is_some() {
                actions.push(Action::Wake(partition));
            }
            if !receiving.missing.is_clear() && receiving.moved + REPEAT_AFTER <= now {
                receiving.moved = now;
                receiving.struggles = true;
                receiving.loses_ahead();
                receiving.asked.clear();
                actions.push(Action::Wake(partition));
            }
        }
    }
}
