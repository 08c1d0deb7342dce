//! A value that is being written to a text file: kept until a close applies it.
//!
//! Pure. A value may come in pieces, one behind the other. Without a truncation, a write at the start replaces the present
//! value, as in sysfs, and one at its end goes on behind it (`>>`).

use std::borrow::Cow;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use libmodelio::vocabulary::controls::MAX_TEXT;

use crate::session::error::{CallError, CallResult};

/// The longest text that each piece has checked whole: a page, as in sysfs.
const SHORT: usize = 4096;

/// Bytes that all drafts of one mount hold at most. Whoever may write a setting may open it many times.
const MAX_BYTES_OF_DRAFTS: usize = 256 * MAX_TEXT;

/// Bytes that the drafts of one mount hold.
#[derive(Clone, Debug, Default)]
pub struct DraftRoom(Arc<AtomicUsize>);

/// The bytes that one draft holds of the room. Dropping gives them back.
#[derive(Debug, Default)]
struct Held {
    room: DraftRoom,
    bytes: usize,
}

impl Held {
    /// Holds so many bytes, if there is room.
    fn resize(&mut self, bytes: usize) -> bool {
        let (more, less) = (bytes.saturating_sub(self.bytes), self.bytes.saturating_sub(bytes));
        let held = self.room.0.fetch_add(more, Ordering::Relaxed) + more;
        let fits = more == 0 || held <= MAX_BYTES_OF_DRAFTS;
        self.room.0.fetch_sub(if fits { less } else { more }, Ordering::Relaxed);
        self.bytes = if fits { bytes } else { self.bytes };
        fits
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.resize(0);
    }
}

/// What was written since the last close that applied something.
#[derive(Debug, Default)]
pub struct Draft {
    bytes: Vec<u8>,
    state: DraftState,
    refused: Option<CallError>,
    held: Held,
}

/// Why a piece is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// It does not follow the others, or is too long.
    Piece,
    /// All drafts of the mount hold as much as they may.
    Room,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum DraftState {
    #[default]
    Untouched,
    /// It was truncated, and nothing was written since.
    Empty,
    Written,
}

impl Draft {
    /// One that takes its bytes of `room`.
    pub fn of(room: &DraftRoom) -> Draft {
        Draft { held: Held { room: room.clone(), bytes: 0 }, ..Draft::default() }
    }

    /// The file was truncated to nothing.
    pub fn empty(&mut self) {
        *self = Draft { state: DraftState::Empty, ..Draft::of(&self.held.room) };
    }

    /// Whether a close has something to apply, or a refusal to report.
    pub fn is_pending(&self) -> bool {
        self.state != DraftState::Untouched || self.refused.is_some()
    }

    /// Whether something was written, or refused.
    pub fn is_written(&self) -> bool {
        self.state == DraftState::Written || self.refused.is_some()
    }

    /// Takes a piece of a value of at most `longest` bytes. `present` is the value in force. Returns whether a line, and so
    /// maybe the value, ends there.
    ///
    /// # Errors
    /// If it cannot be taken. Then the others are kept no longer.
    pub fn write(
        &mut self,
        offset: u64,
        data: &[u8],
        longest: usize,
        present: impl FnOnce() -> String,
    ) -> Result<bool, NotTaken> {
        let mut bytes = match self.state {
            _ if offset == 0 => Vec::new(),
            DraftState::Untouched => present().into_bytes(),
            DraftState::Empty | DraftState::Written => mem::take(&mut self.bytes),
        };
        if offset != bytes.len() as u64 || bytes.len() + data.len() > longest {
            return Err(NotTaken::Piece);
        }
        if !self.held.resize(bytes.len() + data.len()) {
            return Err(NotTaken::Room);
        }
        bytes.extend_from_slice(data);
        (self.bytes, self.state) = (bytes, DraftState::Written);
        Ok(self.bytes.ends_with(b"\n"))
    }

    /// The bytes to check when the last `len` are new. A short text is checked whole, for its lines may contradict each
    /// other. A long one has empty lines in the place of those that were checked: errors have the number of their line.
    pub fn unchecked(&self, len: usize) -> Cow<'_, [u8]> {
        if self.bytes.len() <= SHORT {
            return Cow::Borrowed(&self.bytes);
        }
        let (known, _) = self.bytes.split_at(self.bytes.len().saturating_sub(len));
        let known = known.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let (known, new) = self.bytes.split_at(known);
        let lines = known.iter().filter(|byte| **byte == b'\n');
        Cow::Owned(lines.chain(new).copied().collect())
    }

    /// All that was written.
    pub fn whole(&self) -> &[u8] {
        &self.bytes
    }

    /// A write was refused: the next close fails with this error.
    pub fn refuse(&mut self, error: &CallError) {
        self.refused.get_or_insert_with(|| error.clone());
    }

    /// Takes the value that is to be applied. None if nothing was written.
    ///
    /// # Errors
    /// The first refusal.
    pub fn take(&mut self) -> Option<CallResult<Vec<u8>>> {
        let fresh = Draft::of(&self.held.room);
        let Draft { bytes, state, refused, .. } = mem::replace(self, fresh);
        match refused {
            Some(error) => Some(Err(error)),
            None => (state != DraftState::Untouched).then_some(Ok(bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(draft: &mut Draft, offset: u64, data: &[u8]) -> Result<Vec<u8>, NotTaken> {
        let ends = draft.write(offset, data, MAX_TEXT, || "old\n".to_owned())?;
        assert_eq!(ends, draft.bytes.ends_with(b"\n"));
        Ok(draft.bytes.clone())
    }

    #[test]
    fn each_line_of_a_long_text_is_checked_once() {
        let mut draft = Draft::default();
        let (line, mut checked, mut at) = (b"layer.weight frozen\n", 0, 0);
        while at + line.len() <= MAX_TEXT {
            // Lines come in two pieces each.
            for part in [&line[..9], &line[9..]] {
                write(&mut draft, at as u64, part).unwrap();
                at += part.len();
            }
            let unchecked = draft.unchecked(line.len() - 9);
            let lines = |text: &[u8]| text.iter().filter(|byte| **byte == b'\n').count();
            assert_eq!(lines(&unchecked), at / line.len(), "errors have the number of the line");
            assert!(unchecked.ends_with(line));
            if at > SHORT {
                checked += unchecked.trim_ascii_start().len();
            } else {
                assert_eq!(unchecked, draft.bytes, "a short text is checked whole");
            }
        }
        assert_eq!(checked, (at / line.len() - SHORT / line.len()) * (line.len()));
    }

    #[test]
    fn a_value_comes_in_pieces_and_is_taken_once() {
        let mut draft = Draft::default();
        assert!(draft.take().is_none() && !draft.is_pending());
        assert_eq!(write(&mut draft, 0, b"0.2").unwrap(), b"0.2");
        assert_eq!(write(&mut draft, 3, b"5\n").unwrap(), b"0.25\n");
        assert_eq!(draft.take(), Some(Ok(b"0.25\n".to_vec())));
        assert!(!draft.is_pending() && draft.take().is_none());
    }

    #[test]
    fn an_emptied_value_is_empty_unless_one_is_written() {
        let mut draft = Draft::default();
        draft.empty();
        assert!(draft.is_pending() && !draft.is_written());
        assert_eq!(draft.take(), Some(Ok(vec![])));
        draft.empty();
        assert_eq!(write(&mut draft, 0, b"x").unwrap(), b"x");
        assert!(draft.is_written());
        draft.empty();
        assert_eq!(draft.take(), Some(Ok(vec![])), "it was truncated again");
    }

    #[test]
    fn a_value_is_appended_to_the_present_one_or_replaces_it() {
        let mut draft = Draft::default();
        assert_eq!(write(&mut draft, 4, b"new\n").unwrap(), b"old\nnew\n");
        draft = Draft::default();
        assert_eq!(write(&mut draft, 0, b"n").unwrap(), b"n");
        draft = Draft::default();
        assert!(write(&mut draft, 5, b"n").is_err(), "a hole");
        assert!(write(&mut draft, 2, b"n").is_err(), "in the middle");
        draft.empty();
        assert!(write(&mut draft, 1, b"n").is_err() && write(&mut draft, 0, &[b'x'; MAX_TEXT + 1]).is_err());
    }

    #[test]
    fn all_drafts_together_hold_what_they_may() {
        let room = DraftRoom::default();
        let (mut drafts, long) = (Vec::new(), vec![b'x'; MAX_TEXT]);
        for _ in 0..MAX_BYTES_OF_DRAFTS / MAX_TEXT {
            let mut draft = Draft::of(&room);
            write(&mut draft, 0, &long).unwrap();
            write(&mut draft, 0, &long).unwrap();
            drafts.push(draft);
        }
        let mut more = Draft::of(&room);
        assert_eq!(write(&mut more, 0, b"x"), Err(NotTaken::Room));
        drafts[0].empty();
        assert!(write(&mut more, 0, &long).is_ok());
        assert!(drafts[1].take().is_some());
        drafts.pop();
        for draft in &mut drafts[..2] {
            write(draft, 0, &long).unwrap();
        }
        drop((drafts, more));
        assert_eq!(room.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_refusal_is_what_the_next_close_reports() {
        let mut draft = Draft::default();
        let error = |text: &str| CallError::new(libc::EINVAL, text);
        assert!(write(&mut draft, 0, b"x\n").is_ok());
        draft.refuse(&error("first"));
        draft.refuse(&error("second"));
        assert!(write(&mut draft, 0, b"y\n").is_ok());
        assert_eq!(draft.take(), Some(Err(error("first"))));
        assert!(draft.take().is_none());
    }
}
