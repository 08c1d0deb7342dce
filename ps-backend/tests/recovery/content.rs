//! What a version is made of.

/// A learner, and the number that it gives a contribution. Each learner counts from 1 on.
pub(super) type Contribution = (u8, u32);

/// Contributions in order. One that counts twice is there twice.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Content(Vec<Contribution>);

impl Content {
    pub(super) fn add(&mut self, of: Contribution) {
        let at = self.0.partition_point(|there| *there <= of);
        self.0.insert(at, of);
    }

    pub(super) fn has(&self, of: Contribution) -> bool {
        self.0.binary_search(&of).is_ok()
    }

    pub(super) fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// The number of a learner's last contribution, or 0.
    pub(super) fn last_of(&self, learner: u8) -> u32 {
        let end = self.0.partition_point(|(of, _)| *of <= learner);
        self.0[..end].last().filter(|(of, _)| *of == learner).map_or(0, |(_, number)| *number)
    }

    /// What another one has besides.
    pub(super) fn lacks(&self, other: &Content) -> Vec<Contribution> {
        let mut here = self.0.iter().peekable();
        let is_missing = |of: &&Contribution| {
            while here.next_if(|there| there < of).is_some() {}
            here.next_if_eq(of).is_none()
        };
        other.0.iter().filter(is_missing).copied().collect()
    }

    /// Each contribution counts once, and none is left out before a learner's last one.
    pub(super) fn check(&self) {
        let mut before = (0, 0);
        for &(learner, number) in &self.0 {
            let last = if before.0 == learner { before.1 } else { 0 };
            assert!(number != last, "contribution {number} of learner {learner} counts twice");
            assert!(number == last + 1, "learner {learner} has {number} after {last}");
            before = (learner, number);
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let number = |(learner, number): &Contribution| u32::from(*learner) << 24 | number;
        self.0.iter().flat_map(|of| number(of).to_be_bytes()).collect()
    }

    pub(super) fn decode(bytes: &[u8]) -> Content {
        let of = |chunk: &[u8; 4]| (chunk[0], u32::from_be_bytes(*chunk) & 0xff_ffff);
        Content(bytes.as_chunks().0.iter().map(of).collect())
    }
}
