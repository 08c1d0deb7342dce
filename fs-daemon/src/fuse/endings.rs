//! Which close ends what. Pure: events of the kernel in, decisions out. One rule serves `gradients`, `device`, `weights`,
//! `publish`, `weight` and `control/*`.
//!
//! The kernel sends these requests (Linux 6.18; fh: open file; A, B: lock owners, one a process; T: its thread). Truncation
//! comes as a SETATTR that names no open file.
//!
//! | program | requests |
//! |---|---|
//! | shell, `echo x > f` | OPEN T, SETATTR 0 T, FLUSH A (after dup2), WRITE A, FLUSH A, RELEASE |
//! | shell, `: > f` | OPEN T, SETATTR 0 T, FLUSH A, FLUSH A, RELEASE |
//! | shell, `echo x >> f` | OPEN T, FLUSH A, WRITE A at the size that stat(2) shows, FLUSH A, RELEASE |
//! | `exec 3>f; echo x >&3; exec 3>&-` | OPEN T, SETATTR 0 T, WRITE A, FLUSH A, FLUSH A once or twice, RELEASE |
//! | `{ echo x; cat y; } > f` | OPEN T, SETATTR 0 T, FLUSH A, WRITE A, FLUSH B of a child, WRITE B, FLUSH B, FLUSH A, RELEASE |
//! | `cp y f`, Python's `open(f, "wb")` | OPEN T, SETATTR 0 T, WRITE A, FLUSH A, RELEASE |
//! | `cp y f`, y ends in a hole | as above, and before FLUSH A: SETATTR of the size, of fh |
//! | `dd of=f` | OPEN T, SETATTR 0 T, FLUSH A, WRITE A, FLUSH A, RELEASE |
//! | NumPy, two `a.tofile(f)` | OPEN T, SETATTR 0 T, WRITE A, FLUSH A (a dup), WRITE A, FLUSH A, FLUSH A, RELEASE |
//! | a child while `f` is open (fork, posix_spawn) | between WRITE A and FLUSH A: FLUSH B |
//! | `subprocess.run(…, stdout=f)` | OPEN T, SETATTR 0 T, FLUSH B, WRITE B, FLUSH B, FLUSH A, RELEASE |
//! | `np.memmap(f)`, its `flush()` | OPEN T, FLUSH A, for msync WRITE of pages and FSYNC T, WRITE of other stores, FLUSH A, RELEASE |
//! | the same with O_DIRECT, by passthrough | OPEN T, LOOKUP T twice, OPEN T, FLUSH A, nothing for msync, FLUSH A, RELEASE |
//! | SIGKILL in mid-write | OPEN T, SETATTR 0 T, WRITE A, FLUSH A from the dying thread, RELEASE |
//! | truncate(2), ftruncate(2) to 0 | SETATTR 0 T; SETATTR 0 of fh |
//!
//! From a process in another PID namespace all is the same, but T is 0. A lock owner is a number for the table of
//! descriptors: fork makes a new one, exec keeps it, and a later process may get the number of one that has ended.
//!
//! So FLUSH alone says little. It comes for each descriptor, whoever has it.

/// Who closes a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closer {
    /// The process that owns the open file, by its own will or because it exits.
    Owner,
    /// Another process, to which the descriptor was handed down.
    Other,
    /// A process that a signal kills, or the kernel in its place.
    Dying,
}

/// What the close of a descriptor means for the open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtClose {
    /// Nothing: another close, fsync, or RELEASE ends what was written.
    Nothing,
    /// What was written ends, and the close reports how.
    Ends,
    /// This may have been the last descriptor. What becomes of what was written is known at RELEASE, once its program is
    /// gone.
    Waits,
}

/// Decides a close. `is_pending`: something was written, refused or emptied since the last end. A close before that changes
/// nothing, ends nothing and reports nothing. `has_duplicate`: the owner has more descriptors of the inode than it has
/// other open files there.
pub fn at_close(
    is_pending: bool,
    closer: impl FnOnce() -> Closer,
    has_duplicate: impl FnOnce(Closer) -> bool,
) -> AtClose {
    if !is_pending {
        return AtClose::Nothing;
    }
    match closer() {
        Closer::Dying => AtClose::Waits,
        closer => match (has_duplicate(closer), closer) {
            (true, _) => AtClose::Nothing,
            (false, Closer::Owner) => AtClose::Ends,
            // Whoever opened it has closed it: this may be the last one.
            (false, _) => AtClose::Waits,
        },
    }
}

/// The process that owns an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The process that opened it.
    Process(u32),
    /// That process cannot be seen. The lock owner of the first WRITE or FLUSH stands for it.
    Lock(Option<u64>),
}

impl Owner {
    /// WRITE or FLUSH comes with this lock owner.
    pub fn note(&mut self, lock: u64) {
        if let Owner::Lock(owner @ None) = self {
            *owner = Some(lock);
        }
    }

    /// Whether FLUSH of process `caller`, if that can be seen, with this lock owner is the owner's. `has_ended`: the owner
    /// is gone, and whoever has the file is its owner now.
    pub fn closes(&self, caller: Option<u32>, lock: u64, has_ended: impl FnOnce() -> bool) -> Closer {
        let is_owner = match *self {
            Owner::Process(owner) => caller == Some(owner) || has_ended(),
            Owner::Lock(owner) => owner == Some(lock),
        };
        if is_owner { Closer::Owner } else { Closer::Other }
    }
}

/// An open file, as far as it matters for a truncation that names none.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Its number: later opens have higher ones.
    pub fh: u64,
    /// The thread that opened it, 0 if that cannot be seen.
    pub opener: u32,
    /// It was opened to write.
    pub is_writable: bool,
    /// Something was written to it.
    pub is_written: bool,
}

/// The open file of the inode that a SETATTR of thread `tid` truncates: that of its O_TRUNC. It is the newest that the
/// thread opened to write, and wrote nothing to.
pub fn truncated(of_inode: impl Iterator<Item = Candidate>, tid: u32) -> Option<u64> {
    let is_its = |one: &Candidate| one.is_writable && !one.is_written && one.opener == tid;
    of_inode.filter(is_its).map(|one| one.fh).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(is_pending: bool, closer: Closer, has_duplicate: bool) -> AtClose {
        at_close(is_pending, || closer, |_| has_duplicate)
    }

    #[test]
    fn a_close_before_any_write_ends_nothing() {
        for closer in [Closer::Owner, Closer::Other, Closer::Dying] {
            let never = |_| -> bool { panic!("nobody needs to know") };
            assert_eq!(at_close(false, || closer, never), AtClose::Nothing);
        }
    }

    #[test]
    fn the_last_close_of_the_owner_ends_what_was_written() {
        assert_eq!(close(true, Closer::Owner, true), AtClose::Nothing, "NumPy closes its dup");
        assert_eq!(close(true, Closer::Owner, false), AtClose::Ends);
        assert_eq!(close(true, Closer::Other, true), AtClose::Nothing, "a child");
        assert_eq!(
            close(true, Closer::Other, false),
            AtClose::Waits,
            "a child that the owner has left the file to"
        );
        assert_eq!(close(true, Closer::Dying, false), AtClose::Waits);
    }

    #[test]
    fn a_process_that_is_seen_owns_what_it_opened() {
        let mut owner = Owner::Process(7);
        owner.note(1);
        let lives = || false;
        assert_eq!(owner.closes(Some(7), 2, lives), Closer::Owner);
        assert_eq!(owner.closes(Some(8), 1, lives), Closer::Other);
        assert_eq!(owner.closes(None, 1, lives), Closer::Other, "of another namespace");
        assert_eq!(owner.closes(Some(8), 1, || true), Closer::Owner, "it has outlived the opener");
    }

    #[test]
    fn the_first_lock_owner_stands_for_a_process_that_is_not_seen() {
        let mut owner = Owner::Lock(None);
        assert_eq!(owner.closes(None, 1, || false), Closer::Other);
        owner.note(1);
        owner.note(2);
        assert_eq!(owner.closes(None, 1, || false), Closer::Owner);
        assert_eq!(owner.closes(None, 2, || false), Closer::Other, "a child");
    }

    #[test]
    fn a_truncation_is_of_the_threads_newest_open_that_nothing_was_written_to() {
        let file = |fh, opener| Candidate { fh, opener, is_writable: true, is_written: false };
        let reads = Candidate { is_writable: false, ..file(9, 7) };
        let written = Candidate { is_written: true, ..file(8, 7) };
        let all = [file(1, 7), written, file(5, 7), reads, file(6, 4)];
        assert_eq!(truncated(all.into_iter(), 7), Some(5));
        assert_eq!(truncated(all.into_iter(), 3), None, "truncate(2) by path");
    }
}
