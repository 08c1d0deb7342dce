//! The reason, in words, why the last call of a learner failed: the contents of its `error` and
//! `user.gradfs.error`.

use parking_lot::Mutex;

use super::error::CallError;

/// The text of the last refusal of a learner's calls.
///
/// A program that fails closes its files on the way out, and such a close may succeed. So the text stays until a
/// contribution has been taken in which no call was refused.
#[derive(Default)]
pub struct LastRefusal(Mutex<Last>);

#[derive(Default)]
struct Last {
    text: Option<String>,
    /// Some call of the open contribution was refused.
    in_open: bool,
}

impl LastRefusal {
    /// A call was refused. `is_open`: the contribution that it was part of goes on.
    pub fn note(&self, error: &CallError, is_open: bool) {
        if !error.is_quiet() {
            *self.0.lock() = Last { text: Some(error.message.clone()), in_open: is_open };
        }
    }

    /// A contribution ended without a refusal of its end. `taken`: something was written.
    pub fn ended(&self, taken: bool) {
        let mut last = self.0.lock();
        if taken && !last.in_open {
            last.text = None;
        }
        last.in_open = false;
    }

    /// The text, if there is one.
    pub fn text(&self) -> Option<String> {
        self.0.lock().text.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_stays_until_a_contribution_without_one() {
        let last = LastRefusal::default();
        let refused = CallError::new(libc::EFBIG, "too long");
        last.note(&refused, true);
        last.ended(true);
        assert_eq!(last.text().as_deref(), Some("too long"), "its program has only closed the file");
        last.ended(false);
        assert!(last.text().is_some(), "nothing was taken");
        last.ended(true);
        assert_eq!(last.text(), None);
        last.note(&refused, false);
        last.ended(true);
        assert_eq!(last.text(), None, "the refusal was the end of its contribution");
        last.note(&CallError::not_found(), false);
        assert_eq!(last.text(), None, "of no interest");
    }
}
