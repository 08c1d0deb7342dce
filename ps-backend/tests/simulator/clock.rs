//! The clock of each process: it begins anywhere, runs a little faster or slower than the others, and jumps forward.
//!
//! Cores ask for monotonic time (`Instant` in production), so no clock goes back. Cores know no wall time. Time crosses
//! processes at one place: a coordinator that is taken over goes on from where the frozen one stopped (`HandOver`'s
//! `now`). All else is compared on the clock it was read from.

use crate::moving::Moving;
use crate::world::{Event, Node, Now, World};

const MILLION: u64 = 1_000_000;

#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// It showed `shown` at this moment of the world,
    since: Now,
    shown: Now,
    /// and shows so much more for each second from then on, in millionths of a second.
    rate: u64,
}

fn nanos(time: Now) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Clock {
    /// Its time at this moment of the world.
    fn at(&self, world: Now) -> Now {
        let passed = nanos(world.saturating_sub(self.since));
        self.shown + Now::from_nanos(passed / MILLION * self.rate + passed % MILLION * self.rate / MILLION)
    }

    /// The first moment of the world at which it shows at least this.
    fn when(&self, shown: Now) -> Now {
        let left = u128::from(nanos(shown.saturating_sub(self.shown)));
        let wait = (left * u128::from(MILLION)).div_ceil(u128::from(self.rate));
        self.since + Now::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX))
    }
}

impl World {
    /// The process at `node` starts, with a clock that shows this now.
    pub fn starts_clock(&mut self, node: Node, shown: Now) {
        let drift = self.settings.drift;
        let rate = MILLION - drift + self.rng.u64(0..=2 * drift);
        self.clocks.insert(node, Clock { since: self.now, shown, rate });
    }

    /// What time it is there.
    pub fn clock(&self, node: Node) -> Now {
        self.clocks[&self.process(node)].at(self.now)
    }

    /// When the clock there shows this.
    pub fn when(&self, node: Node, shown: Now) -> Now {
        self.clocks[&self.process(node)].when(shown)
    }

    /// The clock there jumps forward.
    pub fn jump(&mut self, node: Node, by: Now) {
        let (node, now) = (self.process(node), self.now);
        let Some(clock) = self.clocks.get_mut(&node) else { return };
        *clock = Clock { since: now, shown: clock.at(now) + by, ..*clock };
        if let Node::Partition(partition) = node {
            self.jumped += 1;
            self.silence_jumps(partition, by);
        }
        self.arm(node);
        // A mover looks at the clock ten times a second at least.
        for of in self.moves.of_coordinator(node) {
            self.after(Now::from_millis(100), Event::Moves(Moving::Tick(of)));
        }
    }
}
