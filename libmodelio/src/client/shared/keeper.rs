//! A client's deadlines: it opens missing connections, repeats requests and sends signs of life.

use std::time::{Duration, Instant};

use crate::client::core::Now;
use crate::client::shared::Shared;
use crate::timer::Timed;

impl Timed for Shared {
    fn check(&self) -> Option<Duration> {
        const IDLE: Duration = Duration::from_millis(200);
        /// The pause while the next version has no buffer: a buffer that was lent for new weights may have been
        /// dropped.
        const NO_BUFFER: Duration = Duration::from_millis(20);
        if self.lifetime.is_stopping() {
            return None;
        }
        let retry = match self.shards.local() {
            None => {
                self.inquire();
                self.add_spare();
                self.connect_missing()
            }
            Some(local) => {
                // The buffers that exist are all that there is memory for.
                while local.shard.shortage().is_some() && self.take_from_names() {}
                (!self.find_buffer(local)).then(|| Instant::now() + NO_BUFFER)
            }
        };
        let mut inner = self.inner.lock();
        // All deadlines are checked now, so nobody needs to raise the alarm meanwhile.
        inner.checks_at = Now::ZERO;
        // The pings of the connection take no account of leases.
        let alive = inner.lease().map(|lease| inner.alive_at + lease / 4);
        if alive.is_some_and(|at| at <= Instant::now()) {
            inner.alive_at = Instant::now();
            inner.peers.ping_coordinator();
        }
        if self.shards.reactor().is_some() {
            self.look_for_shards(&mut inner);
        }
        let now = self.now();
        let mut actions = Vec::new();
        inner.core.tick(now, &mut actions);
        self.act(inner, actions);
        let mut inner = self.inner.lock();
        let due = inner.core.next_deadline().map(|at| at.saturating_sub(now));
        let [retry, alive] = [retry, alive].map(|at| Some(at?.saturating_duration_since(Instant::now())));
        let pause = [due, retry, alive].into_iter().flatten().min().unwrap_or(IDLE);
        let pause = pause.clamp(Duration::from_millis(5), IDLE);
        inner.checks_at = self.now() + pause;
        Some(pause)
    }
}
