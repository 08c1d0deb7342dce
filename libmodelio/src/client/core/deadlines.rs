//! The passing of time.

use super::{Action, ClientCore, Now, REPEAT_AFTER};

impl ClientCore {
    /// The latest moment for the next [`Self::tick`].
    pub fn next_deadline(&self) -> Option<Now> {
        let requests = self.requests.iter().flat_map(|(_, request)| {
            let again = request.sent.filter(|_| self.coordination.is_up()).map(|sent| sent + REPEAT_AFTER);
            [Some(request.deadline), again].into_iter().flatten()
        });
        let waits = self.waits.waiting().map(|wait| wait.deadline);
        let sending = self.outgoing.iter().flat_map(|outgoing| &outgoing.partitions);
        let sending =
            sending.filter(|partition| !partition.done).map(|partition| partition.moved + REPEAT_AFTER);
        let by_shards = self.pull.iter().filter(|pull| pull.decided && pull.by_relay.is_none());
        let pulling = by_shards.flat_map(|pull| &pull.partitions);
        let pulling = pulling.filter(|partition| !partition.missing.is_clear());
        let pulling = pulling.map(|partition| partition.retry.unwrap_or(partition.moved + REPEAT_AFTER));
        let others = [self.shortage_deadline(), self.relay_deadline(), self.pull_due()].into_iter().flatten();
        requests.chain(waits).chain(sending).chain(pulling).chain(others).min()
    }

    /// Time passes. The client handles deadlines and repeats messages.
    pub fn tick(&mut self, now: Now, actions: &mut Vec<Action>) {
        // A request that is given up here may leave another one, which the next call sends.
        self.tick_reach(now, actions);
        self.tick_requests(now, actions);
        for partition in self.owners.partitions() {
            self.tick_partition(partition, now, actions);
        }
        self.tick_relay(now, actions);
        self.answer_waits(now, actions);
        self.start_pull(now, actions);
    }
}
