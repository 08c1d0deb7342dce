//! Filling a view of a model that this process does not hold. Its shards are asked for what the plan reads, ahead of the
//! filling.

use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

use libmodelio::admin::AdminError;
use libmodelio::bytes::mmap::trim_heap;
use libmodelio::client::{Job, PartsError, PartsPeers};
use libmodelio::view::{self, Source, Tile, ViewPlan};
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::strided::Strided;

use crate::session::error::{CallError, CallResult};

/// Bytes that are asked for at once. As many may wait to be used, and as many are being used.
const AT_ONCE: usize = 4 << 20;

/// What the plan reads, one batch after the other, in its order.
struct Ahead {
    batches: Receiver<Result<Vec<u8>, PartsError>>,
    batch: Vec<u8>,
    /// Bytes of the batch that were used.
    used: usize,
}

impl Source for Ahead {
    type Error = CallError;

    fn read(&mut self, _: &[Strided], mut out: &mut [u8]) -> CallResult<()> {
        while !out.is_empty() {
            if self.used == self.batch.len() {
                let next =
                    self.batches.recv().map_err(|_| CallError::new(libc::EIO, "the reading has ended"))?;
                (self.batch, self.used) = (next.map_err(explained)?, 0);
            }
            let ready = &self.batch[self.used..];
            let len = ready.len().min(out.len());
            let (now, later) = out.split_at_mut(len);
            now.copy_from_slice(&ready[..len]);
            (out, self.used) = (later, self.used + len);
        }
        Ok(())
    }
}

/// Fills a view of this version. Shards send what has changed since an older one, of which this is the view. Each batch has
/// until a deadline.
///
/// # Errors
/// ESTALE if the version is gone, ETIMEDOUT, EIO, EAGAIN.
pub(super) fn fill(
    job: &Job,
    (version, before): (Version, Option<(Version, &[u8])>),
    plan: &ViewPlan,
    out: &mut [u8],
    deadline: &(dyn Fn() -> Instant + Sync),
) -> CallResult<()> {
    let outcome = std::thread::scope(|scope| {
        let (sender, batches) = mpsc::sync_channel(1);
        let read = move || {
            let (mut peers, mut tiles) = (PartsPeers::default(), view::reads(plan).peekable());
            while let Some(first) = tiles.peek() {
                let base = before.filter(|_| first.is_kept());
                let is_alike = |tile: &Tile| before.is_none() || tile.is_kept() == base.is_some();
                let (mut parts, mut batch, mut bytes) = (Vec::new(), Vec::new(), 0);
                while bytes < AT_ONCE
                    && let Some(tile) = tiles.next_if(is_alike)
                {
                    bytes += tile.bytes() as usize;
                    base.inspect(|(_, before)| tile.recover(before, &mut batch));
                    parts.extend(tile.pieces);
                }
                batch.resize(bytes, 0);
                let versions = (version, base.map(|(base, _)| base));
                let read = job.read_parts_by(&mut peers, versions, &parts, &mut batch, deadline());
                let is_over = read.is_err();
                // The filling may have ended.
                if sender.send(read.map(|()| batch)).is_err() || is_over {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("gradfs-parts".into()).spawn_scoped(scope, read);
        thread.map_err(|error| CallError::new(libc::EAGAIN, format!("no thread to read with: {error}")))?;
        view::fill(plan, &mut Ahead { batches, batch: Vec::new(), used: 0 }, out)
    });
    // Batches come and go in several threads, each of which keeps what it has freed.
    trim_heap();
    outcome
}

pub(in crate::session) fn explained(error: PartsError) -> CallError {
    let errno = match &error {
        PartsError::Gone(_) => libc::ESTALE,
        PartsError::NotYet(_) | PartsError::Moving | PartsError::Asking(AdminError::TimedOut { .. }) => {
            libc::ETIMEDOUT
        }
        PartsError::Thread(_) => libc::EAGAIN,
        PartsError::Asking(_) | PartsError::NotPatched | PartsError::Outside | PartsError::Room { .. } => {
            libc::EIO
        }
    };
    CallError::new(errno, error.to_string())
}
