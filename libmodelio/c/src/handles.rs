//! Handles: numbers that stand for what a process has open.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Once};

use nix::errno::Errno;
use nix::unistd::getpid;
use parking_lot::RwLock;

use crate::outcome::{Failure, Outcome, done};

/// What is open: a model, weights, a learner, a publication or a queue. A number is given once in the life of a process.
pub(crate) type Handle = i64;

type Kept = Arc<dyn Open>;

/// What a handle stands for.
pub(crate) trait Open: Any + Send + Sync {
    /// Its handle was closed, while others may still use it.
    fn closed(&self) {}
}

/// The process that uses the library; 0 before the first use.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Refuses a process that was forked from the one that uses the library: it has none of the library's threads, and their
/// locks may be taken for ever.
pub(crate) fn check_process() -> Outcome<()> {
    let own = getpid().as_raw();
    match OWNER.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed) {
        Err(owner) if owner != own => {
            let why = format!(
                "process {own} was forked from {owner}, which uses the library: it can after exec alone"
            );
            Err(Failure::new(Errno::EBADF, why))
        }
        _ => Ok(()),
    }
}

/// The most handles that are open at a time.
const MAX_HANDLES: usize = 1 << 16;

struct Table {
    next: Handle,
    open: BTreeMap<Handle, Kept>,
}

static HANDLES: RwLock<Table> = RwLock::new(Table { next: 1, open: BTreeMap::new() });

/// A program that exits leaves its jobs: else others would wait until the leases of its learners are over.
extern "C" fn close_all() {
    if check_process().is_ok() {
        let open = std::mem::take(&mut HANDLES.write().open);
        open.values().for_each(|kept| kept.closed());
    }
}

/// Opens a handle.
pub(crate) fn open<T: Open>(what: T) -> Outcome<Handle> {
    check_process()?;
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
    table.open.insert(handle, Arc::new(what));
    Ok(handle)
}

fn any(handle: Handle) -> Outcome<Kept> {
    check_process()?;
    let wrong = || Failure::new(Errno::EBADF, format!("handle {handle} is not open"));
    HANDLES.read().open.get(&handle).cloned().ok_or_else(wrong)
}

fn as_any(kept: Kept) -> Arc<dyn Any + Send + Sync> {
    kept
}

/// What a handle of one kind stands for.
pub(crate) fn get<T: Open>(handle: Handle, kind: &str) -> Outcome<Arc<T>> {
    as_any(any(handle)?)
        .downcast()
        .map_err(|_| Failure::new(Errno::EBADF, format!("handle {handle} is no {kind}")))
}

/// What a handle of one of two kinds stands for.
pub(crate) fn either<A: Open, B: Open>(handle: Handle, kinds: &str) -> Outcome<Result<Arc<A>, Arc<B>>> {
    match as_any(any(handle)?).downcast() {
        Ok(one) => Ok(Ok(one)),
        Err(other) => match other.downcast() {
            Ok(other) => Ok(Err(other)),
            Err(_) => Err(Failure::new(Errno::EBADF, format!("handle {handle} is no {kinds}"))),
        },
    }
}

/// Closes a handle. A learner leaves its job, and what it has not committed does not count; so it is with a publication.
/// A queue cancels its requests, whose callbacks are called, ends the waits of other threads, and returns when the kernel
/// has let go of their memory; a mount that hangs can hold that up. A model stays connected until its learners, weights
/// and publications are closed, too. A program that exits closes all.
///
/// Returns 0, or -EBADF.
#[unsafe(no_mangle)]
pub extern "C" fn modelio_close(handle: Handle) -> c_int {
    done(any(handle).map(|kept| {
        HANDLES.write().open.remove(&handle);
        kept.closed();
    }))
}
