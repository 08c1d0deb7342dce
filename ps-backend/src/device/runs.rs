//! Elements that follow one another in all arrays, have one type, and are computed alike: a kernel takes them at once.

use std::ops::Range;
use std::sync::Arc;

use libmodelio::bytes::kernels::Wire;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::tensor_steps::Treatment;
use smallvec::SmallVec;

/// The most words of a run. Between two copies a device pauses for some microseconds, so longer runs are faster.
pub(super) const MAX_WORDS: usize = 2 << 20;
/// The least words of a run that is cut. The first run's copy to the device and the last one's from it overlap with
/// nothing, so there should be many runs.
const MIN_WORDS: usize = 128 << 10;
/// The number of runs that a batch is cut into, if they do not become too short or too long.
const WANTED: usize = 16;

/// The work on a run.
#[derive(Clone, Debug)]
pub enum Does {
    /// The next weights are computed from these sums, whose words lie where those of the arrays do, and are copied to
    /// the version.
    Reduce {
        /// The optimizer's step, and the group.
        of: Treatment,
        /// Whether the state is set to zero first.
        anew: bool,
        /// The sums, in their order.
        sums: SmallVec<[Arc<Mapping>; 2]>,
    },
    /// The version's weights are taken over.
    Adopt,
}

impl Does {
    fn equals(&self, other: &Does) -> bool {
        match (self, other) {
            (Does::Reduce { of, anew, sums }, Does::Reduce { of: other, anew: other_anew, sums: others }) => {
                let same = |(sum, other)| Arc::ptr_eq(sum, other);
                (of, anew) == (other, other_anew)
                    && sums.len() == others.len()
                    && sums.iter().zip(others).all(same)
            }
            (Does::Adopt, Does::Adopt) => true,
            _ => false,
        }
    }
}

/// A run of elements.
#[derive(Clone, Debug)]
pub struct Run {
    /// The type of the elements.
    pub wire: Wire,
    /// The work on them.
    pub does: Does,
    /// Their places in arrays of words.
    pub words: Range<usize>,
    /// Their place in a version.
    pub bytes: Range<usize>,
}

/// The runs of some blocks.
#[derive(Debug)]
pub struct Runs {
    runs: Vec<Run>,
    /// The most words of each.
    most: usize,
}

impl Runs {
    /// No runs yet. About so many words are to come.
    pub fn new(words: usize) -> Runs {
        // No F64 is cut in two.
        let most = (words / WANTED).next_multiple_of(2).clamp(MIN_WORDS, MAX_WORDS);
        Runs { runs: Vec::new(), most }
    }

    /// Adds elements, whose first word and first byte are these, to the last run if they continue it, and as new runs.
    pub fn push(&mut self, wire: Wire, does: &Does, mut words: Range<usize>, mut byte: usize) {
        let per_word = wire.size() / wire.words();
        while !words.is_empty() {
            let most = self.most;
            let continues = self.runs.last_mut().filter(|last| {
                last.wire == wire
                    && last.words.end == words.start
                    && last.bytes.end == byte
                    && last.words.len() < most
                    && last.does.equals(does)
            });
            let room = most - continues.as_ref().map_or(0, |last| last.words.len());
            let count = words.len().min(room);
            let (end, byte_end) = (words.start + count, byte + count * per_word);
            match continues {
                Some(last) => (last.words.end, last.bytes.end) = (end, byte_end),
                None => self.runs.push(Run {
                    wire,
                    does: does.clone(),
                    words: words.start..end,
                    bytes: byte..byte_end,
                }),
            }
            (words.start, byte) = (end, byte_end);
        }
    }

    /// The runs, in the order in which they were added.
    pub fn all(&self) -> &[Run] {
        &self.runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum() -> Arc<Mapping> {
        Arc::new(Mapping::anonymous(4096).unwrap())
    }

    fn reduce(t: u64, sums: &[&Arc<Mapping>]) -> Does {
        let of = Treatment { t, ..Treatment::default() };
        Does::Reduce { of, anew: false, sums: sums.iter().map(|sum| Arc::clone(sum)).collect() }
    }

    fn shape(runs: &Runs) -> Vec<(Range<usize>, Range<usize>)> {
        runs.all().iter().map(|run| (run.words.clone(), run.bytes.clone())).collect()
    }

    #[test]
    fn blocks_that_follow_one_another_are_one_run() {
        let (one, two) = (sum(), sum());
        let mut runs = Runs::new(0);
        runs.push(Wire::F32, &reduce(1, &[&one]), 0..100, 0);
        runs.push(Wire::F32, &reduce(1, &[&one]), 100..250, 400);
        assert_eq!(shape(&runs), [(0..250, 0..1_000)]);
        // Another step, another sum, another type, a gap in either place: each is a run of its own.
        runs.push(Wire::F32, &reduce(2, &[&one]), 250..260, 1_000);
        runs.push(Wire::F32, &reduce(2, &[&two]), 260..270, 1_040);
        runs.push(Wire::F32, &reduce(2, &[&two, &one]), 270..280, 1_080);
        runs.push(Wire::BF16, &reduce(2, &[&two, &one]), 280..290, 1_120);
        runs.push(Wire::BF16, &reduce(2, &[&two, &one]), 290..300, 1_144);
        runs.push(Wire::BF16, &reduce(2, &[&two, &one]), 301..311, 1_164);
        runs.push(Wire::BF16, &Does::Adopt, 311..321, 1_184);
        assert_eq!(runs.all().len(), 8);
        assert_eq!(shape(&runs)[7], (311..321, 1_184..1_204));
    }

    #[test]
    fn no_run_is_longer_than_a_lane_has_room_for() {
        let mut runs = Runs::new(100 * MAX_WORDS);
        runs.push(Wire::F64, &Does::Adopt, 6..6 + 2 * MAX_WORDS + 2, 24);
        runs.push(Wire::F64, &Does::Adopt, 8 + 2 * MAX_WORDS..8 + 3 * MAX_WORDS, 32 + 8 * MAX_WORDS);
        let lengths: Vec<_> = runs.all().iter().map(|run| (run.words.len(), run.bytes.len())).collect();
        assert_eq!(
            lengths,
            [(MAX_WORDS, 4 * MAX_WORDS), (MAX_WORDS, 4 * MAX_WORDS), (MAX_WORDS, 4 * MAX_WORDS), (2, 8)]
        );
        assert!(runs.all().windows(2).all(|pair| pair[0].words.end == pair[1].words.start));
        // A small batch is cut, too, so that copies overlap.
        let mut runs = Runs::new(4 << 20);
        runs.push(Wire::F32, &Does::Adopt, 0..4 << 20, 0);
        assert_eq!(runs.all().len(), WANTED);
        let mut runs = Runs::new(1 << 10);
        runs.push(Wire::F32, &Does::Adopt, 0..1 << 10, 0);
        assert_eq!(runs.all().len(), 1);
    }
}
