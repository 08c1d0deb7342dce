//! Memory of versions that is lent to connections of followers. It is not written again while they read it.

use std::sync::Arc;

use super::Versions;
use crate::bytes::mmap::Mapping;
use crate::client::patching::Step;
use crate::transport::stream::Guard;
use crate::vocabulary::ids::Version;

/// A version's memory, which connections may send from.
pub(in crate::client) struct Lent {
    pub(in crate::client) memory: Arc<Mapping>,
    /// Keeps the memory unchanged while it lives.
    pub(in crate::client) guard: Guard,
    /// What the version has changed in the one before, if it was pulled so.
    pub(in crate::client) step: Option<Arc<Step>>,
}

impl Versions {
    /// Nothing of a version is in the back buffer yet. If connections may read what was there before, another buffer
    /// takes its place.
    pub(in crate::client) fn begin_back(&mut self) {
        let was_sent = std::mem::take(&mut self.back_is_sent);
        if was_sent && self.back.as_ref().is_some_and(|back| Arc::strong_count(back.memory()) > 1) {
            self.is_filled();
            self.back = None;
        }
    }

    /// The memory of a version that is shown, or of the one in the back buffer, to be sent to a client that has `base`.
    pub(in crate::client) fn lend(
        &mut self,
        version: Version,
        is_back: bool,
        base: Option<Version>,
    ) -> Option<Lent> {
        let (region, hold, step) = if is_back {
            self.back_is_sent = true;
            (self.back.as_ref()?, None, self.patches.now().map(|now| now.pulled()))
        } else {
            let shown = self.shown.get_mut(&version)?;
            shown.is_sent = true;
            (&shown.buffer, shown.hold.clone(), self.patches.step(version))
        };
        let memory = Arc::clone(region.memory());
        let guard = hold.unwrap_or_else(|| Arc::clone(&memory) as Guard);
        Some(Lent { memory, guard, step: step.filter(|step| Some(step.base()) == base).cloned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the next version goes.
    fn place(versions: &mut Versions) -> *const Mapping {
        Arc::as_ptr(versions.back(0, 4).unwrap().unwrap().memory())
    }

    #[test]
    fn memory_that_a_follower_is_sent_from_is_not_written_again() {
        for holds in [false, true] {
            let mut versions = Versions::new(4096);
            place(&mut versions);
            versions.publish(Version(1));
            let lent = versions.lend(Version(1), false, None).unwrap();
            let of_first = Arc::as_ptr(&lent.memory);
            let lent = Some(lent).filter(|_| holds);
            place(&mut versions);
            versions.publish(Version(2));
            assert_eq!(place(&mut versions) == of_first, !holds, "version 1 is gone");
            drop(lent);
        }
    }

    #[test]
    fn what_a_follower_is_sent_of_a_version_that_is_given_up_is_not_written_again() {
        for holds in [false, true] {
            let mut versions = Versions::new(4096);
            let before = place(&mut versions);
            assert!(versions.lend(Version(1), false, None).is_none(), "it is not shown");
            let lent = versions.lend(Version(1), true, None).filter(|_| holds);
            drop(versions.take_untouched());
            versions.begin_back();
            assert_eq!(place(&mut versions) == before, !holds);
            drop(lent);
            // The same buffer serves the same version, once it has begun.
            let again = place(&mut versions);
            versions.begin_back();
            assert_eq!(place(&mut versions), again);
        }
    }
}
