//! Handles: numbers that stand for what a process has open.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Once};

use nix::errno::Errno;
use nix::unistd::{Pid, getpid};
use parking_lot::RwLock;

use crate::outcome::{Failure, Outcome, done};

/// What is open: a model, weights, a learner, a publication or a queue. A number is given once in the life of a process.
pub(crate) type Handle = i64;

type Kept = Arc<dyn Any + Send + Sync>;

/// The most handles that are open at a time.
const MAX_HANDLES: usize = 1 << 16;

struct Table {
    next: Handle,
    open: BTreeMap<Handle, (Pid, Kept)>,
}

static HANDLES: RwLock<Table> = RwLock::new(Table { next: 1, open: BTreeMap::new() });

/// A program that exits leaves its jobs: else others would wait until the leases of its learners are over.
extern "C" fn close_all() {
    let mut table = HANDLES.write();
    let own = std::mem::take(&mut table.open).into_values().filter(|(owner, _)| *owner == getpid());
    let own: Vec<Kept> = own.map(|(_, kept)| kept).collect();
    drop(table);
    drop(own);
}

/// Opens a handle.
pub(crate) fn open<T: Any + Send + Sync>(what: T) -> Outcome<Handle> {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // Without room for it, leases end for those who do not leave.
        // SAFETY: the function is there as long as the library, which cannot be unloaded.
        let _ = unsafe { libc::atexit(close_all) };
    });
    let mut table = HANDLES.write();
    if table.open.len() >= MAX_HANDLES {
        return Err(Failure::new(Errno::EMFILE, format!("{MAX_HANDLES} handles are open: close some")));
    }
    let handle = table.next;
    table.next += 1;
    table.open.insert(handle, (getpid(), Arc::new(what)));
    Ok(handle)
}

fn any(handle: Handle) -> Outcome<Kept> {
    let table = HANDLES.read();
    let wrong = || Failure::new(Errno::EBADF, format!("handle {handle} is not open"));
    let (owner, kept) = table.open.get(&handle).ok_or_else(wrong)?;
    if *owner != getpid() {
        let why = format!(
            "handle {handle} belongs to process {owner}, from which this one was forked: connect again"
        );
        return Err(Failure::new(Errno::EBADF, why));
    }
    Ok(Arc::clone(kept))
}

/// What a handle of one kind stands for.
pub(crate) fn get<T: Any + Send + Sync>(handle: Handle, kind: &str) -> Outcome<Arc<T>> {
    any(handle)?.downcast().map_err(|_| Failure::new(Errno::EBADF, format!("handle {handle} is no {kind}")))
}

/// What a handle of one of two kinds stands for.
pub(crate) fn either<A: Any + Send + Sync, B: Any + Send + Sync>(
    handle: Handle,
    kinds: &str,
) -> Outcome<Result<Arc<A>, Arc<B>>> {
    match any(handle)?.downcast() {
        Ok(one) => Ok(Ok(one)),
        Err(other) => match other.downcast() {
            Ok(other) => Ok(Err(other)),
            Err(_) => Err(Failure::new(Errno::EBADF, format!("handle {handle} is no {kinds}"))),
        },
    }
}

/// Closes a handle. A learner leaves its job, and what it has not committed does not count; so it is with a publication.
/// A queue cancels its requests, and returns when the kernel has let go of their memory. A model stays
/// connected until its learners, weights and publications are closed, too. Calls of other threads with the handle end as
/// usual.
///
/// Returns 0, or -EBADF.
#[unsafe(no_mangle)]
pub extern "C" fn modelio_close(handle: Handle) -> c_int {
    let closed = any(handle).map(|_| HANDLES.write().open.remove(&handle));
    // It is dropped here, without a lock.
    done(closed.map(drop))
}
