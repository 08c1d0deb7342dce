//! Who writes new weights at once. Of two who do, the one that is done first is published. The other is told so: its program
//! may know nothing of a second one.

use std::collections::BTreeMap;

use libmodelio::vocabulary::ids::{ClientId, Version};
use libmodelio::vocabulary::shard_error::ShardError;

/// New weights: the client that writes them, and its token for them.
pub(super) type Written = (ClientId, u64);

/// The most that are remembered. Programs may begin weights and never end them: of those, a client's oldest is forgotten.
const MOST: usize = 1024;

/// New weights that are being written, each with those that were done since it was begun.
#[derive(Debug, Default)]
pub(super) struct WeightWriters(BTreeMap<Written, Option<Written>>);

impl WeightWriters {
    /// A client has begun new weights.
    pub(super) fn begin(&mut self, written: Written) {
        if self.0.len() >= MOST {
            self.0.pop_first();
        }
        self.0.insert(written, None);
    }

    /// New weights are to be published, at a job of this version.
    ///
    /// # Errors
    /// [`ShardError::Busy`] if others were done while they were written. The next try is not refused.
    pub(super) fn publish(&mut self, written: Written, newest: Version) -> Result<(), ShardError> {
        self.publish_set(&[written], newest)
    }

    /// As [`Self::publish`], for parts that are published together.
    ///
    /// # Errors
    /// [`ShardError::Busy`] if others were done while one of them waited.
    pub(super) fn publish_set(&mut self, parts: &[Written], newest: Version) -> Result<(), ShardError> {
        let first = parts.iter().map(|part| (part, self.0.remove(part).flatten()));
        // All of them are over.
        let first: Vec<_> = first.filter_map(|(part, first)| Some((part.0, first?.0))).collect();
        if let Some((ours, client)) = first.first() {
            let whose = if client == ours { "this mount" } else { "another mount" };
            return Err(ShardError::Busy(format!(
                "a program of {whose} (client {client} in its status.json) has published other weights while these were \
                 written, and the newest version is {newest}: write them again to replace those"
            )));
        }
        self.0.values_mut().for_each(|other| *other = other.or(parts.first().copied()));
        Ok(())
    }

    /// New weights are not to be published.
    pub(super) fn withdraw(&mut self, written: Written) {
        self.0.remove(&written);
        self.0.values_mut().for_each(|other| *other = other.filter(|other| *other != written));
    }

    /// A client has gone, and with it what it has not published.
    pub(super) fn leave(&mut self, client: ClientId) {
        self.0.retain(|(of, _), _| *of != client);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Written = (ClientId(1), 7);
    const B: Written = (ClientId(2), 7);

    fn writing(all: &[Written]) -> WeightWriters {
        let mut writers = WeightWriters::default();
        all.iter().for_each(|written| writers.begin(*written));
        writers
    }

    #[test]
    fn of_two_that_write_at_once_the_later_is_refused_once() {
        let mut writers = writing(&[A, B]);
        writers.publish(B, Version(3)).unwrap();
        let why = writers.publish(A, Version(4)).unwrap_err().to_string();
        assert!(why.contains("another mount (client 2 in") && why.contains("version is 4"), "{why}");
        writers.publish(A, Version(4)).unwrap();
    }

    #[test]
    fn a_set_of_parts_and_other_weights_are_two_that_write_at_once() {
        const PART: Written = (ClientId(3), 7);
        let mut writers = writing(&[A, B, PART]);
        writers.publish_set(&[A, PART], Version(3)).unwrap();
        writers.publish(B, Version(4)).unwrap_err();
        let mut writers = writing(&[A, B, PART]);
        writers.publish(B, Version(3)).unwrap();
        let why = writers.publish_set(&[A, PART], Version(4)).unwrap_err().to_string();
        assert!(why.contains("client 2"), "{why}");
        writers.publish_set(&[A, PART], Version(4)).unwrap();
    }

    #[test]
    fn weights_that_are_begun_when_others_are_done_are_published_after_them() {
        let mut writers = writing(&[A]);
        writers.publish(A, Version(3)).unwrap();
        writers.begin(B);
        writers.publish(B, Version(3)).unwrap();
        writers.begin(B);
        writers.publish(B, Version(4)).unwrap();
    }

    #[test]
    fn weights_that_are_never_ended_keep_no_others_from_being_watched() {
        let mut writers = WeightWriters::default();
        (0..2 * MOST as u64).for_each(|token| writers.begin((A.0, token)));
        assert_eq!(writers.0.len(), MOST);
        writers.begin(B);
        writers.publish((A.0, 2 * MOST as u64 - 1), Version(3)).unwrap();
        writers.publish(B, Version(3)).unwrap_err();
    }

    #[test]
    fn what_is_withdrawn_or_gone_is_in_nobodys_way() {
        let mut writers = writing(&[A, B]);
        writers.publish(A, Version(3)).unwrap();
        writers.withdraw(A);
        writers.publish(B, Version(3)).unwrap();
        let mut writers = writing(&[A, B]);
        writers.leave(A.0);
        assert_eq!(writers.0.len(), 1);
    }
}
