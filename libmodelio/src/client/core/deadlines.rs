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
        let pulling = self.pull.iter().filter(|pull| pull.decided).flat_map(|pull| &pull.partitions);
        let pulling = pulling.filter(|partition| !partition.missing.is_clear());
        let pulling = pulling.map(|partition| partition.retry.unwrap_or(partition.moved + REPEAT_AFTER));
        let fails = self.shortage_deadline();
        requests.chain(waits).chain(fails).chain(sending).chain(pulling).chain(self.pull_due()).min()
    }

    /// Time passes. The client handles deadlines and repeats messages.
    pub fn tick(&mut self, now: Now, actions: &mut Vec<Action>) {
        // A request that is given up here may leave another one, which the next call sends.
        self.tick_reach(now, actions);
        self.tick_requests(now, actions);
        for partition in self.owners.partitions() {
            self.tick_partition(partition, now, actions);
        }
        self.answer_waits(now, actions);
        self.start_pull(now, actions);
    }
}
