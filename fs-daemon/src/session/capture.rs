//! A snapshot of a model, as one stream of bytes; the job goes on.
//!
//! A snapshot takes as much memory as the model and its optimizer state, so one at a time is open of each model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::wire::DataKind;
use ps_backend::snapshot::{self, Copied, Head, SnapshotError, StreamHead};

use super::error::{CallError, CallResult};
use super::model::{Model, Snapshots};

/// Longest wait for the snapshot that is open: the kernel tells of a close a moment later.
const CLOSING: Duration = Duration::from_secs(1);

/// A snapshot that was taken, or the party that can take it.
pub struct Capture {
    head: Vec<u8>,
    kept: Option<(Copied, Vec<DataKind>)>,
    _only: Option<Arc<()>>,
}

impl Capture {
    /// Takes one. The job stands still as long as it takes to copy the model and what the optimizer keeps.
    ///
    /// # Errors
    /// EBUSY while another snapshot of the model is open, ENOMEM without memory for the copy, EIO and EAGAIN where it
    /// cannot be taken.
    pub fn open(model: &Model) -> CallResult<Capture> {
        let (head, kept, only) = match &model.snapshots {
            Snapshots::Registry(registry) => {
                let (registry, model) = (registry.clone(), model.name.clone());
                (StreamHead::Elsewhere { registry, model }, None, None)
            }
            Snapshots::Never(_) | Snapshots::PartOf(_) => {
                return Err(CallError::new(libc::EOPNOTSUPP, "a view has no snapshots: save its model"));
            }
            Snapshots::Here(shard) => {
                let only = only(model)?;
                let shard = shard.upgrade();
                let shard = shard.ok_or_else(|| CallError::new(libc::EIO, "the job is being stopped"))?;
                let (record, controls, copied) = shard.capture().map_err(failed)?;
                tracing::info!(model = model.name, version = %record.version, "a snapshot is read");
                let kinds = snapshot::kinds(&record).collect();
                let metadata = model.metadata.clone();
                let head = Head::new(&model.name, &model.layout, metadata, &controls, record);
                (StreamHead::Here(Box::new(head)), Some((copied, kinds)), Some(only))
            }
        };
        let head =
            snapshot::head_bytes(&head).map_err(|error| CallError::new(libc::EIO, error.to_string()))?;
        Ok(Capture { head, kept, _only: only })
    }

    /// At most `len` bytes from `offset` on, as many as one piece of memory has of them; empty at the end.
    pub fn part(&self, offset: u64, len: usize) -> &[u8] {
        let kept = self.kept.iter().flat_map(|(copied, kinds)| kinds.iter().map(|&what| copied.all(what)));
        let mut before = 0;
        for memory in std::iter::once(self.head.as_slice()).chain(kept) {
            let end = before + memory.len() as u64;
            if offset < end {
                let from = (offset - before) as usize;
                return &memory[from..memory.len().min(from.saturating_add(len))];
            }
            before = end;
        }
        &[]
    }

    /// `len` bytes from `offset` on, or as many as there are.
    pub fn read<R>(&self, offset: u64, len: usize, with: impl FnOnce(&[u8]) -> R) -> R {
        let first = self.part(offset, len);
        if first.len() == len || first.is_empty() {
            return with(first);
        }
        // A read across the end of one memory.
        let mut bytes = first.to_vec();
        loop {
            match self.part(offset + bytes.len() as u64, len - bytes.len()) {
                [] => return with(&bytes),
                more => bytes.extend_from_slice(more),
            }
        }
    }
}

/// Makes a new snapshot the only one of its model, once no other is open.
fn only(model: &Model) -> CallResult<Arc<()>> {
    let deadline = Instant::now() + CLOSING;
    loop {
        if let Some(only) = model.open_snapshot.take() {
            return Ok(only);
        }
        if Instant::now() >= deadline {
            let why = "a snapshot of this model is open: one at a time is in memory (gradfs save and every other program \
                       that reads the file take one)";
            return Err(CallError::new(libc::EBUSY, why));
        }
        std::thread::sleep(CLOSING / 100);
    }
}

fn failed(error: SnapshotError) -> CallError {
    let errno = match error {
        SnapshotError::Room { .. } => libc::ENOMEM,
        SnapshotError::Invalid(_) => libc::EAGAIN,
        _ => libc::EIO,
    };
    CallError::new(errno, error.to_string())
}
