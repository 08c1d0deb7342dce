//! Log lines that say whom jobs wait for: one line a wait, for learners and for shards.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use libmodelio::client::JobStatus;
use libmodelio::vocabulary::ids::ShardId;
use libmodelio::vocabulary::phase::JobPhase;

use super::model::Model;

/// How often it is looked whether there is something to say.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A report about a model that still holds.
#[derive(Default)]
struct Said {
    learners: bool,
    shards: BTreeSet<ShardId>,
}

/// The report about each model, by its name.
#[derive(Default)]
pub struct WaitLog {
    checked: Option<Instant>,
    of: BTreeMap<String, Said>,
}

impl WaitLog {
    /// Looks, if it is time to.
    pub fn check<'a>(&mut self, models: impl Iterator<Item = &'a Model>) {
        let now = Instant::now();
        if self.checked.is_some_and(|at| now.duration_since(at) < CHECK_INTERVAL) {
            return;
        }
        self.checked = Some(now);
        for model in models {
            for line in self.of.entry(model.name.clone()).or_default().news(&model.job.status()) {
                tracing::warn!(model = model.name, "{line}");
            }
        }
    }
}

impl Said {
    /// The new lines for the log.
    fn news(&mut self, status: &JobStatus) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some((late, waited)) = &status.late
            && !self.learners
        {
            lines.push(format!("learners have been waiting for {} s for {late}", waited.as_secs()));
        }
        self.learners = status.late.is_some();
        let away =
            |shard: &libmodelio::client::ShardView| shard.away.filter(|_| status.state == JobPhase::Waiting);
        self.shards
            .retain(|known| status.shards.iter().any(|shard| shard.shard == *known && away(shard).is_some()));
        for shard in &status.shards {
            if let Some(gone) = away(shard)
                && self.shards.insert(shard.shard)
            {
                let (address, why) = (shard.address.as_deref().unwrap_or_default(), shard.lost.as_deref());
                lines.push(format!(
                    "waiting for shard {} at {address}, which has not been reached for {} s: {}",
                    shard.shard,
                    gone.as_secs(),
                    why.unwrap_or("the shard that coordinates the job does not reach it")
                ));
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use libmodelio::client::ShardView;
    use libmodelio::vocabulary::ids::Version;
    use libmodelio::vocabulary::members::WaitedFor;
    use libmodelio::vocabulary::transport_kind::TransportKind;

    use super::*;

    fn status(late: &[&str], away: &[u16]) -> JobStatus {
        let shard = |number: u16| ShardView {
            shard: ShardId(number),
            address: Some(format!("node{number}:7070")),
            transport: TransportKind::Tcp,
            checksum: None,
            coding: None,
            full_because: None,
            blocks: 1,
            no_memory: None,
            no_rdma: None,
            lost: Some("connection refused".into()),
            connected: false,
            away: away.contains(&number).then_some(Duration::from_millis(2300)),
        };
        let names: Vec<String> = late.iter().map(|name| (*name).to_owned()).collect();
        JobStatus {
            state: if away.is_empty() { JobPhase::Running } else { JobPhase::Waiting },
            late: (!names.is_empty())
                .then_some((WaitedFor { learners: names, more: 0 }, Duration::from_millis(5400))),
            version: Version(0),
            members: Vec::new(),
            committed: 0,
            contributions: 0,
            norm: None,
            newest_of: 0,
            grace_window: None,
            rate: None,
            blocks_on_arrival: 0,
            buffers: (0, 0),
            versions: Vec::new(),
            pull: None,
            shards: (1..=3).map(shard).collect(),
        }
    }

    #[test]
    fn a_wait_is_said_once() {
        let mut said = Said::default();
        assert!(said.news(&status(&[], &[])).is_empty());
        let line =
            "waiting for shard 2 at node2:7070, which has not been reached for 2 s: connection refused";
        assert_eq!(
            said.news(&status(&["a", "b"], &[2])),
            ["learners have been waiting for 5 s for a, b", line]
        );
        assert!(said.news(&status(&["b"], &[2])).is_empty(), "the same waits");
        assert_eq!(said.news(&status(&["b"], &[2, 3])).len(), 1);
        assert!(said.news(&status(&[], &[])).is_empty());
        assert_eq!(said.news(&status(&["b"], &[2])).len(), 2, "others");
    }
}
