//! Filling a view of a model that this process does not hold. Its shards are asked for what the plan reads, ahead of the
//! filling.

use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

use libmodelio::admin::AdminError;
use libmodelio::bytes::mmap::trim_heap;
use libmodelio::client::{Job, PartsError, PartsPeers};
use libmodelio::view::{self, Source, ViewPlan};
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::strided::Strided;

use crate::session::error::{CallError, CallResult};

/// Bytes that are asked for at once. As many may wait to be used, and as many are being used.
const AT_ONCE: u64 = 4 << 20;

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

/// Fills a view of this version. Each batch has until a deadline.
///
/// # Errors
/// ESTALE if the version is gone, ETIMEDOUT, EIO, EAGAIN.
pub(super) fn fill(
    job: &Job,
    version: Version,
    plan: &ViewPlan,
    out: &mut [u8],
    deadline: &(dyn Fn() -> Instant + Sync),
) -> CallResult<()> {
    let outcome = std::thread::scope(|scope| {
        let (sender, batches) = mpsc::sync_channel(1);
        let read = move || {
            let (mut peers, mut reads) =
                (PartsPeers::default(), view::reads(plan).flatten().flat_map(cut).peekable());
            while reads.peek().is_some() {
                let (mut parts, mut bytes) = (Vec::new(), 0);
                while bytes < AT_ONCE
                    && let Some(part) = reads.next()
                {
                    bytes += part.run * part.count;
                    parts.push(part);
                }
                let mut batch = vec![0; bytes as usize];
                let read = job.read_parts_by(&mut peers, version, &parts, &mut batch, deadline());
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

/// One long piece is several.
fn cut(part: Strided) -> impl Iterator<Item = Strided> {
    let is_long = part.count == 1 && part.run > AT_ONCE;
    let (end, step) = (part.start + part.run, AT_ONCE as usize);
    let cuts = (part.start..end).step_by(step).filter(move |_| is_long);
    let cuts = cuts.map(move |start| Strided::contiguous(start..end.min(start + AT_ONCE)));
    Some(part).filter(|_| !is_long).into_iter().chain(cuts)
}

pub(in crate::session) fn explained(error: PartsError) -> CallError {
    let errno = match &error {
        PartsError::Gone(_) => libc::ESTALE,
        PartsError::NotYet(_) | PartsError::Moving | PartsError::Asking(AdminError::TimedOut { .. }) => {
            libc::ETIMEDOUT
        }
        PartsError::Thread(_) => libc::EAGAIN,
        PartsError::Asking(_) | PartsError::Outside | PartsError::Room { .. } => libc::EIO,
    };
    CallError::new(errno, error.to_string())
}
