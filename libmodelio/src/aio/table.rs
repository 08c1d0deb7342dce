//! The requests of a queue, cut into pieces that are kept at depth. It has no clock and moves no byte.
//!
//! A request's pieces begin in the order of its bytes. A synchronisation begins when all earlier requests of its file
//! have ended, and later ones of the file wait for it: it ends what was submitted before, and nothing else.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use nix::errno::Errno;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads into the memory. It ends early at the end of the file.
    Read,
    /// Writes the memory.
    Write,
    /// What fsync(2) does: it commits what was written to a learner.
    Sync,
}

/// A piece that is to begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Of this request.
    pub ticket: u64,
    pub file: usize,
    pub op: Op,
    /// In the file.
    pub offset: u64,
    /// In the request's memory.
    pub start: usize,
    pub len: usize,
    pub deadline: Instant,
    /// It was cancelled before, and not by the caller.
    pub is_second: bool,
}

#[derive(Debug)]
struct Pending<B> {
    file: usize,
    op: Op,
    offset: u64,
    memory: B,
    len: usize,
    /// Where the next piece begins.
    next: usize,
    flying: usize,
    has_begun: bool,
    /// Where the file ends, as seen from the memory's beginning.
    end: usize,
    failed: Option<Errno>,
    deadline: Instant,
}

impl<B> Pending<B> {
    fn has_begun_all(&self) -> bool {
        self.next >= self.end || self.failed.is_some()
    }

    fn fail(&mut self, errno: Errno) {
        self.failed.get_or_insert(errno);
    }
}

/// The outcome of a request: the bytes that were read or written from its beginning on.
pub(super) struct Finished<B> {
    pub ticket: u64,
    pub result: Result<usize, Errno>,
    pub memory: B,
}

/// The requests of a file, in their order.
#[derive(Debug, Default)]
struct Order {
    /// Those with pieces that have not begun.
    waiting: VecDeque<u64>,
    /// The number of those that have begun and are not over.
    begun: usize,
    /// A synchronisation is one of them.
    is_syncing: bool,
    /// Why a write has failed since the last synchronisation. The next one fails so, and does nothing: what was written
    /// lacks something.
    failed: Option<Errno>,
}

/// The requests, and the pieces in flight by their slots.
pub(super) struct Table<B> {
    piece: usize,
    requests: BTreeMap<u64, Pending<B>>,
    /// The order of each file's requests.
    orders: BTreeMap<usize, Order>,
    /// The deadlines of those that have not failed.
    deadlines: BTreeSet<(Instant, u64)>,
    slots: Vec<Option<Piece>>,
    free: Vec<usize>,
    next: u64,
    finished: VecDeque<Finished<B>>,
}

impl<B> Table<B> {
    /// For `depth` pieces in flight, of `piece` bytes at most.
    pub(super) fn new(depth: usize, piece: usize) -> Table<B> {
        let (slots, free) = ((0..depth).map(|_| None).collect(), (0..depth).rev().collect());
        let (requests, orders, finished) = Default::default();
        let (deadlines, next) = (BTreeSet::new(), 1);
        Table { piece, requests, orders, deadlines, slots, free, next, finished }
    }

    /// Takes a request, and returns its ticket.
    pub(super) fn submit(
        &mut self,
        (file, op, offset): (usize, Op, u64),
        memory: B,
        len: usize,
        deadline: Instant,
    ) -> u64 {
        let ticket = self.next;
        self.next += 1;
        // A synchronisation is a piece without bytes.
        let end = if op == Op::Sync { 1 } else { len };
        let (next, flying, has_begun, failed) = (0, 0, false, None);
        let pending =
            Pending { file, op, offset, memory, len, next, flying, has_begun, end, failed, deadline };
        self.requests.insert(ticket, pending);
        self.deadlines.insert((deadline, ticket));
        self.orders.entry(file).or_default().waiting.push_back(ticket);
        self.end_if_done(ticket);
        ticket
    }

    /// The number of requests that have not been taken by [`Self::take`].
    pub(super) fn len(&self) -> usize {
        self.requests.len() + self.finished.len()
    }

    /// Whether a request of this file is not over.
    pub(super) fn uses(&self, file: usize) -> bool {
        self.orders.get(&file).is_some_and(|order| order.begun > 0 || !order.waiting.is_empty())
    }

    /// The file of this number is another one now.
    pub(super) fn forget(&mut self, file: usize) {
        self.orders.remove(&file);
    }

    /// Keeps the memory of all requests for ever: the kernel may still use it.
    pub(super) fn leak(&mut self) {
        std::mem::take(&mut self.requests).into_values().for_each(|pending| std::mem::forget(pending.memory));
    }

    /// The memory of a request that is not over.
    pub(super) fn memory(&self, ticket: u64) -> Option<&B> {
        self.requests.get(&ticket).map(|pending| &pending.memory)
    }

    /// The next piece to begin, with its slot, while there is room.
    pub(super) fn begin(&mut self) -> Option<(usize, Piece)> {
        self.fail_syncs();
        if self.free.is_empty() {
            return None;
        }
        let heads = self.orders.values().filter_map(|order| Some((*order.waiting.front()?, order)));
        let ticket =
            heads.filter(|(ticket, order)| self.may_begin(*ticket, order)).map(|(ticket, _)| ticket).min()?;
        let (most, slot) = (self.piece, self.free.pop()?);
        let pending = self.requests.get_mut(&ticket)?;
        let order = self.orders.get_mut(&pending.file)?;
        let (start, is_sync) = (pending.next, pending.op == Op::Sync);
        let len = if is_sync { 0 } else { most.min(pending.end - start) };
        pending.next += len.max(usize::from(is_sync));
        pending.flying += 1;
        order.begun += usize::from(!std::mem::replace(&mut pending.has_begun, true));
        order.is_syncing |= is_sync;
        if pending.has_begun_all() {
            order.waiting.pop_front();
        }
        let offset = pending.offset + start as u64;
        let (file, op, deadline) = (pending.file, pending.op, pending.deadline);
        let piece = Piece { ticket, file, op, offset, start, len, deadline, is_second: false };
        self.slots[slot] = Some(piece.clone());
        Some((slot, piece))
    }

    /// Ends synchronisations that are due after a write has failed.
    fn fail_syncs(&mut self) {
        let due = |order: &Order| Some((*order.waiting.front().filter(|_| order.begun == 0)?, order.failed?));
        let failed: Vec<(u64, Errno)> = self.orders.values().filter_map(due).collect();
        for (ticket, errno) in failed {
            if self.requests.get(&ticket).is_some_and(|pending| pending.op == Op::Sync) {
                self.give_up(ticket, errno);
            }
        }
    }

    fn may_begin(&self, ticket: u64, order: &Order) -> bool {
        let is_sync = self.requests.get(&ticket).is_some_and(|pending| pending.op == Op::Sync);
        !order.is_syncing && (!is_sync || order.begun == 0)
    }

    /// The piece in `slot` has ended. Returns what is left of it, which is to begin in the same slot.
    pub(super) fn ended(&mut self, slot: usize, result: Result<usize, Errno>) -> Option<Piece> {
        let piece = self.slots.get_mut(slot)?.take()?;
        let pending = self.requests.get_mut(&piece.ticket)?;
        let rest = |done: usize| {
            let (offset, start) = (piece.offset + done as u64, piece.start + done);
            Piece { offset, start, len: piece.len - done, ..piece.clone() }
        };
        let again = match result {
            Ok(0) if piece.op == Op::Read && piece.len > 0 => {
                pending.end = pending.end.min(piece.start);
                None
            }
            Ok(0) if piece.len > 0 => {
                pending.fail(Errno::EIO);
                None
            }
            Ok(done) if done < piece.len => Some(rest(done)),
            Ok(_) => None,
            // The thread that had submitted it may have ended: then the kernel cancels it. But a job may say so, too.
            Err(Errno::ECANCELED) if piece.op != Op::Sync && !piece.is_second => {
                Some(Piece { is_second: true, ..rest(0) })
            }
            Err(Errno::EINTR) if piece.op != Op::Sync => Some(rest(0)),
            Err(errno) => {
                pending.fail(errno);
                None
            }
        };
        if let Some(again) = again.filter(|_| pending.failed.is_none()) {
            self.slots[slot] = Some(again.clone());
            return Some(again);
        }
        pending.flying -= 1;
        self.free.push(slot);
        self.end_if_done(piece.ticket);
        None
    }

    /// No piece of the request begins any more.
    fn stop(&mut self, ticket: u64, file: usize) {
        let order = self.orders.get_mut(&file);
        if let Some(Order { waiting, .. }) = order
            && let Ok(at) = waiting.binary_search(&ticket)
        {
            waiting.remove(at);
        }
    }

    fn end_if_done(&mut self, ticket: u64) {
        let Some(pending) = self.requests.get(&ticket).filter(|pending| pending.has_begun_all()) else {
            return;
        };
        let (file, is_over) = (pending.file, pending.flying == 0);
        self.stop(ticket, file);
        let Some(pending) = self.requests.get(&ticket).filter(|_| is_over) else { return };
        let done = if pending.op == Op::Sync { 0 } else { pending.end.min(pending.len) };
        let failed = pending.failed;
        let result = failed.map_or(Ok(done), Err);
        self.deadlines.remove(&(pending.deadline, ticket));
        let Some(Pending { memory, op, has_begun, .. }) = self.requests.remove(&ticket) else { return };
        if let Some(order) = self.orders.get_mut(&file) {
            order.begun -= usize::from(has_begun);
            order.is_syncing &= !(op == Op::Sync && has_begun);
            match op {
                Op::Write => order.failed = order.failed.or(failed),
                Op::Sync => order.failed = None,
                Op::Read => {}
            }
            if order.waiting.is_empty() && order.begun == 0 && order.failed.is_none() {
                self.orders.remove(&file);
            }
        }
        self.finished.push_back(Finished { ticket, result, memory });
    }

    /// Ends a request with `errno` unless it is over. Returns its pieces in flight with their slots, which the caller
    /// cancels: the request is over when they are.
    pub(super) fn give_up(&mut self, ticket: u64, errno: Errno) -> Vec<(usize, Piece)> {
        let Some(pending) = self.requests.get_mut(&ticket) else { return Vec::new() };
        pending.fail(errno);
        self.deadlines.remove(&(pending.deadline, ticket));
        self.end_if_done(ticket);
        let flying = self.slots.iter().enumerate().filter_map(|(slot, piece)| Some((slot, piece.clone()?)));
        flying.filter(|(_, piece)| piece.ticket == ticket).collect()
    }

    /// Gives up requests whose deadline has come. Returns the pieces to cancel.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<(usize, Piece)> {
        let mut pieces = Vec::new();
        while let Some(&(at, ticket)) = self.deadlines.first().filter(|(at, _)| *at <= now) {
            self.deadlines.remove(&(at, ticket));
            pieces.append(&mut self.give_up(ticket, Errno::ETIMEDOUT));
        }
        pieces
    }

    /// When [`Self::expire`] has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// The tickets of requests that are not over.
    pub(super) fn tickets(&self) -> Vec<u64> {
        self.requests.keys().copied().collect()
    }

    /// The number of requests that are over and not taken.
    pub(super) fn finished(&self) -> usize {
        self.finished.len()
    }

    /// Takes one that is over, in the order in which they ended.
    pub(super) fn take(&mut self) -> Option<Finished<B>> {
        self.finished.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn table(depth: usize) -> (Table<&'static str>, Instant) {
        (Table::new(depth, 4), Instant::now() + Duration::from_secs(9))
    }

    fn began(table: &mut Table<&'static str>) -> Vec<(usize, u64, usize)> {
        std::iter::from_fn(|| table.begin()).map(|(slot, piece)| (slot, piece.offset, piece.len)).collect()
    }

    fn taken(table: &mut Table<&'static str>) -> Vec<(&'static str, Result<usize, Errno>)> {
        std::iter::from_fn(|| table.take()).map(|finished| (finished.memory, finished.result)).collect()
    }

    #[test]
    fn a_request_is_cut_into_pieces_and_kept_at_depth() {
        let (mut table, later) = table(2);
        table.submit((0, Op::Read, 100), "a", 10, later);
        table.submit((0, Op::Read, 0), "b", 4, later);
        assert_eq!(began(&mut table), [(0, 100, 4), (1, 104, 4)]);
        assert_eq!(table.ended(1, Ok(4)), None);
        assert_eq!(began(&mut table), [(1, 108, 2)]);
        assert_eq!(table.ended(0, Ok(1)).map(|rest| (rest.offset, rest.start, rest.len)), Some((101, 1, 3)));
        assert_eq!((table.ended(0, Ok(3)), table.ended(1, Ok(2))), (None, None));
        assert_eq!(taken(&mut table), [("a", Ok(10))]);
        assert_eq!(began(&mut table), [(1, 0, 4)]);
        table.ended(1, Ok(4));
        assert_eq!((taken(&mut table), table.len()), (vec![("b", Ok(4))], 0));
    }

    #[test]
    fn a_read_ends_at_the_end_of_the_file_and_at_the_first_error() {
        let (mut table, later) = table(3);
        table.submit((0, Op::Read, 0), "short", 12, later);
        began(&mut table);
        table.ended(2, Ok(0));
        assert!(table.ended(1, Ok(3)).is_some());
        table.ended(1, Ok(0));
        table.ended(0, Ok(4));
        assert_eq!(taken(&mut table), [("short", Ok(7))]);
        table.submit((0, Op::Write, 0), "bad", 40, later);
        let slots = began(&mut table);
        table.ended(slots[0].0, Err(Errno::EFBIG));
        assert!(began(&mut table).is_empty(), "nothing more begins of it");
        assert!(table.ended(slots[1].0, Err(Errno::EINTR)).is_none());
        table.ended(slots[2].0, Err(Errno::EIO));
        assert_eq!(taken(&mut table), [("bad", Err(Errno::EFBIG))]);
    }

    #[test]
    fn a_sync_comes_after_what_was_submitted_before_it_and_before_the_rest() {
        let (mut table, later) = table(9);
        table.submit((0, Op::Write, 0), "one", 8, later);
        table.submit((0, Op::Sync, 0), "sync", 0, later);
        table.submit((0, Op::Write, 50), "two", 4, later);
        table.submit((1, Op::Write, 70), "other", 4, later);
        assert_eq!(began(&mut table), [(0, 0, 4), (1, 4, 4), (2, 70, 4)]);
        table.ended(0, Ok(4));
        assert!(began(&mut table).is_empty());
        table.ended(1, Ok(4));
        let slot = began(&mut table);
        assert_eq!(slot, [(1, 0, 0)]);
        table.ended(1, Ok(0));
        assert_eq!(began(&mut table), [(1, 50, 4)]);
        assert!(table.uses(1));
        table.ended(2, Ok(4));
        assert!(!table.uses(1));
        assert_eq!(taken(&mut table), [("one", Ok(8)), ("sync", Ok(0)), ("other", Ok(4))]);
    }

    #[test]
    fn a_sync_after_a_write_that_failed_fails_and_does_nothing() {
        let (mut table, later) = table(9);
        for op in [Op::Write, Op::Sync, Op::Write, Op::Sync] {
            table.submit((0, op, 0), "", 4, later);
        }
        assert_eq!(began(&mut table), [(0, 0, 4)]);
        table.ended(0, Err(Errno::ENOSPC));
        assert_eq!(began(&mut table), [(0, 0, 4)], "the second write");
        table.ended(0, Ok(4));
        let failed = Err(Errno::ENOSPC);
        assert_eq!(taken(&mut table), [("", failed), ("", failed), ("", Ok(4))]);
        assert_eq!(began(&mut table), [(0, 0, 0)]);
        table.ended(0, Ok(0));
        assert_eq!((taken(&mut table), table.uses(0)), (vec![("", Ok(0))], false));
    }

    #[test]
    fn a_piece_that_nobody_has_cancelled_begins_again() {
        let (mut table, later) = table(1);
        table.submit((0, Op::Read, 0), "", 4, later);
        began(&mut table);
        assert!(table.ended(0, Err(Errno::ECANCELED)).is_some());
        assert_eq!(table.ended(0, Ok(4)), None);
        assert_eq!(taken(&mut table), [("", Ok(4))]);
    }

    #[test]
    fn what_is_late_or_cancelled_ends_when_its_pieces_have() {
        let (mut table, later) = table(1);
        let soon = later - Duration::from_secs(8);
        let flying = table.submit((0, Op::Read, 0), "flying", 8, soon);
        table.submit((0, Op::Read, 0), "waiting", 8, soon);
        let kept = table.submit((0, Op::Read, 0), "kept", 0, later);
        assert_eq!((began(&mut table), table.deadline()), (vec![(0, 0, 4)], Some(soon)));
        assert_eq!(table.expire(soon).iter().map(|(slot, _)| *slot).collect::<Vec<_>>(), [0]);
        assert!(table.expire(soon).is_empty(), "once");
        assert_eq!(taken(&mut table), [("kept", Ok(0)), ("waiting", Err(Errno::ETIMEDOUT))]);
        assert_eq!((table.memory(flying), table.memory(kept)), (Some(&"flying"), None));
        table.ended(0, Err(Errno::ECANCELED));
        assert_eq!(taken(&mut table), [("flying", Err(Errno::ETIMEDOUT))]);
        let third = table.submit((0, Op::Read, 0), "third", 4, later);
        assert!(table.give_up(third, Errno::ECANCELED).is_empty() && table.tickets().is_empty());
        assert_eq!(taken(&mut table), [("third", Err(Errno::ECANCELED))]);
    }
}
