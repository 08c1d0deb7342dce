//! What the status tells of a job's learners beside the job's own view: where they are, and how fast.

use std::collections::BTreeMap;
use std::time::Duration;

use libmodelio::observe::rate::StepRates;
use libmodelio::vocabulary::ids::{ClientId, LearnerId};

use crate::coordinator::CoordinatorCore;

/// One learner.
#[derive(Clone, Debug, Default)]
pub struct Sight {
    /// The address that its client connects from.
    pub host: Option<String>,
    /// Its steps a second over the last seconds.
    pub steps_per_second: Option<f64>,
}

/// All learners of a job.
#[derive(Debug, Default)]
pub(super) struct Sights {
    hosts: BTreeMap<ClientId, String>,
    rates: StepRates,
}

impl Sights {
    /// A client connects from `address`.
    pub(super) fn client_up(&mut self, client: ClientId, address: &str) {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        self.hosts.insert(client, host.trim_matches(['[', ']']).to_owned());
    }

    /// Looks at the learners' steps, and forgets clients that are not `connected`. To be called every second, or more
    /// often.
    pub(super) fn look(
        &mut self,
        now: Duration,
        core: &CoordinatorCore,
        connected: impl Fn(ClientId) -> bool,
    ) {
        let Sights { hosts, rates } = self;
        rates.sample(now, || {
            hosts.retain(|client, _| connected(*client));
            core.job().members(now).into_iter().map(|member| (member.learner, member.step))
        });
    }

    /// What is known of each learner.
    pub(super) fn of(&self, now: Duration, core: &CoordinatorCore) -> BTreeMap<LearnerId, Sight> {
        let clients: BTreeMap<LearnerId, ClientId> = core.clients_of_learners().collect();
        let sight = |learner, step| Sight {
            host: clients.get(&learner).and_then(|client| self.hosts.get(client)).cloned(),
            steps_per_second: self.rates.per_second(now, learner, step),
        };
        let members = core.job().members(now).into_iter();
        members.map(|member| (member.learner, sight(member.learner, member.step))).collect()
    }
}
