//! Who sends what was granted. A client that pings, and sends nothing for the lease and the time that it takes to
//! replace a connection, is given up: its pings say that its connection lives, and not that its contribution comes.
//!
//! A shard that lacks payloads answers each repeated start of the plan by how many blocks it lacks of whom, and says of
//! a plan that is dropped who has sent nothing. So a shard that is stopped, or has not begun the plan, blames nobody.

use std::collections::BTreeMap;

use libmodelio::vocabulary::block_map::PartitionIndex;
use libmodelio::vocabulary::ids::ClientId;

use super::REPEAT;
use crate::core::Now;

/// Within this time, a connection on which a block does not move on is replaced, and the block is sent again: a third
/// of the silence for which a connection lives, and a little.
pub(super) const SENT_AGAIN: Now = Now::from_secs(4);

/// What shards lack of one client, and for how long that has not become less. A plan that takes the place of a dropped
/// one is no progress: else a job whose learners come and go would wait for a silent client without end.
#[derive(Debug, Default)]
struct Lacks {
    blocks: BTreeMap<PartitionIndex, u32>,
    idle: Now,
    said: Option<Now>,
}

/// The progress of a plan, by the clients that its shards wait for.
#[derive(Debug, Default)]
pub(super) struct Progress {
    clients: BTreeMap<ClientId, Lacks>,
    begun: Now,
}

impl Progress {
    /// Another plan begins.
    pub(super) fn begin(&mut self, now: Now) {
        self.begun = now;
        for known in self.clients.values_mut() {
            known.blocks.clear();
            known.said = None;
        }
    }

    /// A client is there no more, or all that it was granted has come.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.clients.remove(&client);
    }

    /// A shard lacks so many blocks of these clients, and none of the others.
    pub(super) fn lacks(&mut self, partition: PartitionIndex, clients: &[(ClientId, u32)], now: Now) {
        for &(client, blocks) in clients {
            let known = self.clients.entry(client).or_default();
            let before = known.blocks.insert(partition, blocks);
            let since = known.said.replace(now).unwrap_or(now);
            // A shard that is stopped says nothing. What has come by then is still to be read.
            known.idle += now.saturating_sub(since).min(REPEAT);
            if before.is_some_and(|before| blocks < before) {
                known.idle = Now::ZERO;
            }
        }
        for (client, known) in &mut self.clients {
            let is_lacked = clients.iter().any(|(lacked, _)| lacked == client);
            if !is_lacked && known.blocks.remove(&partition).is_some() {
                known.idle = Now::ZERO;
            }
        }
    }

    /// A shard drops a plan, and names the clients whose blocks it wanted: with their number if none has come, else
    /// with 0. So plans that are dropped one after the other hide nobody, however short they are.
    pub(super) fn dropped(&mut self, partition: PartitionIndex, clients: &[(ClientId, u32)], now: Now) {
        for &(client, blocks) in clients {
            let known = self.clients.entry(client).or_default();
            if blocks == 0 {
                known.idle = Now::ZERO;
                continue;
            }
            let since = known.said.replace(now).unwrap_or(self.begun);
            known.idle += now.saturating_sub(since).min(REPEAT);
            known.blocks.insert(partition, blocks);
        }
    }

    /// A client that has sent nothing for so long.
    pub(super) fn stuck(&self, long: Now) -> Option<ClientId> {
        let is_stuck = |known: &Lacks| !known.blocks.is_empty() && known.idle >= long;
        self.clients.iter().find(|(_, known)| is_stuck(known)).map(|(&client, _)| client)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: ClientId = ClientId(1);
    const LEASE: Now = Now::from_secs(5);

    /// A report of a shard every half second, and who is stuck after each.
    fn reports(reports: &[&[(ClientId, u32)]]) -> Vec<Option<ClientId>> {
        let mut progress = Progress::default();
        let mut now = Now::from_secs(100);
        let said = reports.iter().map(|clients| {
            now += REPEAT;
            progress.lacks(0, clients, now);
            progress.stuck(LEASE)
        });
        said.collect()
    }

    #[test]
    fn a_client_is_stuck_when_the_same_is_lacking_for_the_lease() {
        let said = reports(&[[(ONE, 3)].as_slice(); 12]);
        assert_eq!(said.iter().position(Option::is_some), Some(10), "{said:?}");
        let moves = [[(ONE, 4)].as_slice(), &[(ONE, 3)], &[(ONE, 2)], &[(ONE, 1)]];
        let slow: Vec<_> = moves.iter().flat_map(|report| [*report; 9]).collect();
        assert!(reports(&slow).iter().all(Option::is_none));
        let nothing: &[(ClientId, u32)] = &[];
        let done: Vec<_> = [[[(ONE, 1)].as_slice(); 9], [nothing; 9]].concat();
        assert!(reports(&done).iter().all(Option::is_none));
    }

    #[test]
    fn a_client_is_stuck_also_if_plans_are_dropped_meanwhile() {
        let (mut progress, mut now, mut reports) = (Progress::default(), Now::from_secs(1), 0);
        while progress.stuck(LEASE).is_none() {
            assert!(reports < 20, "it is never stuck");
            if reports % 4 == 0 {
                progress.begin(now);
            }
            progress.lacks(0, &[(ONE, 3 + reports % 4 / 2)], now);
            (now, reports) = (now + REPEAT, reports + 1);
        }
        progress.begin(now);
        progress.lacks(0, &[(ONE, 3)], now);
        progress.lacks(0, &[(ONE, 2)], now + REPEAT);
        assert_eq!(progress.stuck(LEASE), None, "it sends");
    }

    #[test]
    fn a_client_is_stuck_also_if_no_plan_lives_until_a_shard_is_asked() {
        const TWO: ClientId = ClientId(2);
        let short = REPEAT / 5;
        let (mut progress, mut now, mut plans) = (Progress::default(), Now::from_secs(1), 0);
        while progress.stuck(LEASE).is_none() {
            assert!(plans < 60, "it is never stuck");
            progress.begin(now);
            now += short;
            // Both send nothing to shard 0. Shard 1 wants blocks of the second one alone, and gets some.
            progress.dropped(0, &[(ONE, 3), (TWO, 3)], now);
            progress.dropped(1, &[(TWO, 0)], now);
            plans += 1;
        }
        assert_eq!((progress.stuck(LEASE), plans), (Some(ONE), 50));
    }

    #[test]
    fn a_shard_that_was_stopped_blames_nobody_for_that_time() {
        let mut progress = Progress::default();
        let mut now = Now::from_secs(1);
        progress.lacks(0, &[(ONE, 3)], now);
        now = Now::from_secs(3600);
        for _ in 0..10 {
            assert_eq!(progress.stuck(LEASE), None);
            progress.lacks(0, &[(ONE, 3)], now);
            now += REPEAT;
        }
        assert_eq!(progress.stuck(LEASE), Some(ONE));
    }
}
