//! How many free buffers nobody needs. Pure.
//!
//! A buffer that is used in every step is kept: its pages cost more than a step. One that was used once, because a reader
//! held an old version for longer, goes when some versions were made without it.

/// A free buffer of whoever makes versions goes when this many were made without it.
pub const UNUSED_FOR: u32 = 4;

/// Counts free buffers that are not used.
#[derive(Debug, Default)]
pub struct Surplus {
    /// The least number of buffers that were free since the last count. None if no buffer was taken since then.
    least: Option<usize>,
    versions: u32,
}

impl Surplus {
    /// A buffer was taken, and `left` are free still.
    pub fn taken(&mut self, left: usize) {
        self.least = Some(self.least.map_or(left, |least| least.min(left)));
    }

    /// A version was made, and `free` buffers are free. Returns how many of them are to go, which `versions` were made
    /// without.
    pub fn made(&mut self, free: usize, versions: u32) -> usize {
        self.versions += 1;
        if self.versions < versions {
            return 0;
        }
        self.versions = 0;
        self.least.take().unwrap_or(0).min(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_that_each_version_uses_is_kept() {
        let mut surplus = Surplus::default();
        for _ in 0..3 * UNUSED_FOR {
            surplus.taken(0);
            assert_eq!(surplus.made(1, UNUSED_FOR), 0);
        }
    }

    #[test]
    fn a_buffer_goes_when_versions_were_made_without_it() {
        let mut surplus = Surplus::default();
        let gone: usize = (0..UNUSED_FOR)
            .map(|version| {
                surplus.taken(if version == 1 { 1 } else { 2 });
                surplus.made(2, UNUSED_FOR)
            })
            .sum();
        assert_eq!(gone, 1, "the other one was used once");
        surplus.taken(1);
        assert_eq!((0..UNUSED_FOR).map(|_| surplus.made(1, UNUSED_FOR)).sum::<usize>(), 1);
    }
}
