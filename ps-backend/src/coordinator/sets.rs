//! New weights in parts: the parts of one set wait for each other, and become a version together.
//!
//! Pure. One set gathers at a time, so that parts of two steps never mix. Once all its parts have come, it is new weights as
//! any, and the next set may gather. A part that is taken back, or whose client is lost, may come again.

use std::collections::{BTreeMap, BTreeSet};

use libmodelio::vocabulary::block_ranges::{BlockRanges, MAX_RANGES};
use libmodelio::vocabulary::ids::ClientId;
use libmodelio::vocabulary::meta::Meta;
use libmodelio::vocabulary::shard_error::{SET_LACKS, ShardError};
use libmodelio::wire::{PartOf, PlanPart, SetOfParts};
use serde::{Deserialize, Serialize};

use super::tickets::Waiting;
use crate::core::Now;

/// So many missing parts are named.
const MAX_NAMED: usize = 8;

/// A part that has come.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) client: ClientId,
    pub(super) token: u64,
    pub(super) blocks: BlockRanges,
    pub(super) meta: Meta,
    pub(super) waiting: Waiting,
    pub(super) of: PartOf,
    /// It waits for the others until then.
    pub(super) deadline: Now,
}

/// All parts of a set.
pub(super) struct Complete {
    pub(super) set: SetOfParts,
    /// What the lowest part says that says something.
    pub(super) meta: Meta,
    pub(super) waiting: Vec<Waiting>,
    pub(super) deadline: Now,
}

/// The set that gathers: its parts by number.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Sets {
    parts: BTreeMap<u32, Part>,
}

impl Sets {
    /// A part comes. Returns the set if this is the last one.
    ///
    /// # Errors
    /// [`ShardError::Busy`] if another set gathers, or the part has come. [`ShardError::OutOfRange`] for one that cannot be.
    pub(super) fn come(&mut self, part: Part) -> Result<Option<Complete>, ShardError> {
        if !part.of.is_sound() {
            return Err(ShardError::OutOfRange);
        }
        if let Some(PartOf { set, of, all, .. }) = self.parts.values().next().map(|first| &first.of) {
            if part.of.set != *set {
                return Err(ShardError::Busy(format!(
                    "another set is being published: {}",
                    self.lacks(set, *of)
                )));
            }
            if (part.of.of, part.of.all) != (*of, *all) {
                let what =
                    |of: u32, all| format!("{of} parts{}", if all { " that must have all" } else { "" });
                let (is, got) = (what(*of, *all), what(part.of.of, part.of.all));
                return Err(ShardError::Busy(format!("set {set:?} is one of {is}, and this part of {got}")));
            }
        }
        let (number, of) = (part.of.number, part.of.of);
        if self.parts.contains_key(&number) {
            let set = &part.of.set;
            return Err(ShardError::Busy(format!(
                "part {number} of set {set:?} has come already, from another view"
            )));
        }
        let runs = self.parts.values().map(|part| part.blocks.len()).sum::<usize>() + part.blocks.len();
        if runs > MAX_RANGES {
            let why =
                format!("the parts of a set have at most {MAX_RANGES} runs of blocks, and these have more");
            return Err(ShardError::NotAllowed(why));
        }
        let all = part.of.all;
        self.parts.insert(number, part);
        if self.parts.len() < of as usize {
            return Ok(None);
        }
        let deadline = self.deadline().unwrap_or_default();
        let parts = std::mem::take(&mut self.parts);
        let meta = parts.values().find(|part| !part.meta.is_empty()).map(|part| part.meta.clone());
        let waiting = parts.values().map(|part| part.waiting).collect();
        let of = |Part { client, token, blocks, .. }| PlanPart { client, token, blocks };
        let set = SetOfParts { all, parts: parts.into_values().map(of).collect() };
        Ok(Some(Complete { set, meta: meta.unwrap_or_default(), waiting, deadline }))
    }

    /// A client takes a part back. Returns its request, if the part waits for others.
    pub(super) fn withdraw(&mut self, client: ClientId, token: u64) -> Option<Waiting> {
        let is_it = |part: &Part| (part.client, part.token) == (client, token);
        self.parts.extract_if(.., |_, part| is_it(part)).next().map(|(_, part)| part.waiting)
    }

    /// A client is lost, and its parts with it.
    pub(super) fn lose(&mut self, client: ClientId) {
        self.parts.retain(|_, part| part.client != client);
    }

    /// All requests that wait. The set is given up.
    pub(super) fn take_all(&mut self) -> Vec<Waiting> {
        std::mem::take(&mut self.parts).into_values().map(|part| part.waiting).collect()
    }

    /// When [`Self::take_late`] has some.
    pub(super) fn deadline(&self) -> Option<Now> {
        self.parts.values().map(|part| part.deadline).min()
    }

    /// The requests of a set whose deadline is over, and what they are told.
    pub(super) fn take_late(&mut self, now: Now) -> (Vec<Waiting>, ShardError) {
        let is_late = self.deadline().is_some_and(|deadline| deadline <= now);
        let first = self.parts.values().next().filter(|_| is_late).map(|first| &first.of);
        let Some(PartOf { set, of, .. }) = first else { return (Vec::new(), ShardError::Interrupted) };
        let why = ShardError::TimedOut(self.lacks(set, *of).into());
        (self.take_all(), why)
    }

    /// What the set lacks, in words.
    fn lacks(&self, set: &str, of: u32) -> String {
        let missing: BTreeSet<u32> = (0..of).filter(|number| !self.parts.contains_key(number)).collect();
        let named: Vec<String> = missing.iter().take(MAX_NAMED).map(u32::to_string).collect();
        let more = missing.len().saturating_sub(MAX_NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let parts = if missing.len() == 1 { "part" } else { "parts" };
        format!("{SET_LACKS}{set:?} lacks {parts} {}{more} of {of}", named.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordinator::requests::Requests;

    const LATER: Now = Now::from_secs(60);

    /// A part of set `name`, whose client has the part's number. Its token is 7.
    fn part(name: &str, number: u32, of: u32) -> Part {
        let client = ClientId(number.into());
        let of = PartOf { set: name.into(), number, of, all: false };
        let blocks = std::iter::once(number..number + 1).collect();
        let waiting = (client, Requests::new(0).opens(u64::from(number) + 1));
        Part { client, token: 7, blocks, meta: Meta::default(), waiting, of, deadline: LATER }
    }

    fn refusal(sets: &mut Sets, part: Part) -> String {
        match sets.come(part) {
            Err(ShardError::Busy(why)) => why,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("it was taken"),
        }
    }

    fn clients(waiting: &[Waiting]) -> Vec<u64> {
        waiting.iter().map(|(client, _)| client.0).collect()
    }

    #[test]
    fn a_set_is_complete_with_its_last_part() {
        let mut sets = Sets::default();
        let said = |number, text: &str| {
            let mut part = part("a", number, 3);
            part.meta.add([("step", text)]).unwrap();
            part
        };
        assert!(sets.come(said(2, "two")).unwrap().is_none());
        assert!(sets.come(part("a", 0, 3)).unwrap().is_none());
        assert_eq!(sets.deadline(), Some(LATER));
        let Complete { set, meta, waiting, deadline } =
            sets.come(Part { deadline: Now::from_secs(9), ..said(1, "one") }).unwrap().unwrap();
        let of = |part: &PlanPart| (part.client.0, part.token, part.blocks.clone());
        let expected: Vec<_> =
            (0..3u32).map(|at| (u64::from(at), 7, std::iter::once(at..at + 1).collect())).collect();
        assert_eq!(set.parts.iter().map(of).collect::<Vec<_>>(), expected, "by number, however they came");
        assert_eq!((clients(&waiting), deadline), (vec![0, 1, 2], Now::from_secs(9)));
        assert_eq!(meta.get("step"), Some("one"), "the lowest part that says something");
        assert_eq!(sets.deadline(), None);
        assert!(sets.come(part("b", 0, 2)).unwrap().is_none(), "the next set gathers");
    }

    #[test]
    fn parts_of_two_sets_never_mix() {
        let mut sets = Sets::default();
        assert!(sets.come(part("step-1", 0, 12)).unwrap().is_none());
        let why = refusal(&mut sets, part("step-2", 1, 12));
        assert!(why.contains("set \"step-1\" lacks parts 1, 2, 3, 4, 5, 6, 7, 8 and 3 more of 12"), "{why}");
        let why = refusal(&mut sets, part("step-1", 1, 11));
        assert!(why.contains("12 parts, and this part of 11 parts"), "{why}");
        let all = PartOf { all: true, ..part("step-1", 1, 12).of };
        let why = refusal(&mut sets, Part { of: all, ..part("step-1", 1, 12) });
        assert!(why.contains("12 parts that must have all"), "{why}");
        assert!(
            refusal(&mut sets, part("step-1", 0, 12)).contains("part 0 of set \"step-1\" has come already")
        );
        for unsound in [part("", 0, 2), part("a/b", 0, 2), part("a", 2, 2), part("a", 0, 4097)] {
            assert!(matches!(sets.come(unsound), Err(ShardError::OutOfRange)));
        }
        let long = (0..MAX_RANGES as u32).map(|at| 2 * at..2 * at + 1).collect();
        let long = Part { blocks: long, ..part("step-1", 1, 12) };
        assert!(matches!(sets.come(long), Err(ShardError::NotAllowed(_))));
    }

    #[test]
    fn a_late_set_fails_for_all_and_names_what_it_lacks() {
        let mut sets = Sets::default();
        sets.come(part("a", 3, 4)).unwrap();
        sets.come(Part { deadline: LATER / 2, ..part("a", 1, 4) }).unwrap();
        assert!(sets.take_late(LATER / 2 - Now::from_millis(1)).0.is_empty());
        let (waiting, why) = sets.take_late(LATER / 2);
        assert_eq!(clients(&waiting), [1, 3]);
        assert_eq!(why, ShardError::TimedOut("set \"a\" lacks parts 0, 2 of 4".into()));
        assert!(sets.deadline().is_none() && sets.take_late(LATER).0.is_empty());
    }

    #[test]
    fn a_part_that_is_taken_back_or_lost_is_missed_and_may_come_again() {
        let mut sets = Sets::default();
        (0..2).for_each(|number| assert!(sets.come(part("a", number, 3)).unwrap().is_none()));
        assert_eq!(sets.withdraw(ClientId(0), 8), None, "another name");
        assert_eq!(sets.withdraw(ClientId(0), 7), Some(part("a", 0, 3).waiting));
        sets.lose(ClientId(1));
        assert!(sets.come(part("a", 2, 3)).unwrap().is_none());
        assert!(sets.take_late(LATER).1.to_string().contains("lacks parts 0, 1 of 3"));
        // The others wait as long as they would without it.
        sets.take_all();
        sets.come(Part { deadline: LATER / 2, ..part("a", 0, 3) }).unwrap();
        sets.come(part("a", 1, 3)).unwrap();
        sets.withdraw(ClientId(0), 7);
        assert_eq!(sets.deadline(), Some(LATER));
        assert_eq!(clients(&sets.take_all()), [1]);
        // When none is left, another set may gather.
        sets.come(part("a", 0, 2)).unwrap();
        sets.lose(ClientId(0));
        assert!(sets.come(part("b", 1, 2)).unwrap().is_none());
    }
}
