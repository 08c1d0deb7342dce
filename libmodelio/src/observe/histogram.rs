//! Histograms: how often a value was at most so large. Threads add to one without a lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Bounds of durations, in nanoseconds: from 100 µs, below which nobody notices a wait, to 100 s.
const SECONDS: &[u64] = &[
    100_000,
    300_000,
    1_000_000,
    3_000_000,
    10_000_000,
    30_000_000,
    100_000_000,
    300_000_000,
    1_000_000_000,
    3_000_000_000,
    10_000_000_000,
    30_000_000_000,
    100_000_000_000,
];
/// Bounds of numbers of versions.
const VERSIONS: &[u64] = &[0, 1, 2, 4, 8, 16, 32, 64];

/// How often values were in which range.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [u64],
    /// The unit of the bounds is this part of the unit that people see.
    scale: f64,
    /// For each bound, the values up to it and above the one before. The last one counts the values above all bounds.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

/// The counts of a histogram at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    /// Each bound, and the number of values up to it.
    pub up_to: Vec<(f64, u64)>,
    /// The number of all values.
    pub count: u64,
    /// Their sum.
    pub sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [u64], scale: f64) -> Histogram {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, scale, counts, sum: AtomicU64::new(0) }
    }

    /// Of durations.
    pub fn of_seconds() -> Histogram {
        Histogram::new(SECONDS, 1e9)
    }

    /// Of numbers of versions.
    pub fn of_versions() -> Histogram {
        Histogram::new(VERSIONS, 1.0)
    }

    /// Adds a duration.
    pub fn took(&self, duration: Duration) {
        self.add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds a value, in the unit of the bounds.
    pub fn add(&self, value: u64) {
        let at = self.bounds.partition_point(|bound| *bound < value);
        self.counts[at].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// The counts. A value that is being added may be in them without being in the sum.
    pub fn read(&self) -> Counts {
        let mut count = 0;
        let mut counts = self.counts.iter().map(|of| {
            count += of.load(Ordering::Relaxed);
            count
        });
        let up_to = self.bounds.iter().map(|bound| *bound as f64 / self.scale).zip(&mut counts).collect();
        counts.for_each(drop);
        Counts { up_to, count, sum: self.sum.load(Ordering::Relaxed) as f64 / self.scale }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_counts_up_to_each_bound_that_it_does_not_exceed() {
        let histogram = Histogram::of_versions();
        assert_eq!(histogram.read().count, 0);
        for value in [0, 0, 1, 3, 4, 1000] {
            histogram.add(value);
        }
        let Counts { up_to, count, sum } = histogram.read();
        let counts: Vec<_> = up_to.iter().map(|(_, count)| *count).collect();
        assert_eq!(counts, [2, 3, 3, 5, 5, 5, 5, 5]);
        assert_eq!((up_to[3].0, count, sum), (4.0, 6, 1008.0));
    }

    #[test]
    fn durations_are_told_in_seconds() {
        let histogram = Histogram::of_seconds();
        histogram.took(Duration::from_millis(100));
        histogram.took(Duration::from_micros(100_001));
        let Counts { up_to, count, sum } = histogram.read();
        assert!(up_to.contains(&(0.1, 1)) && up_to.contains(&(0.3, 2)), "{up_to:?}");
        assert!(count == 2 && (sum - 0.200_001).abs() < 1e-9);
    }
}
