//! The work of a queue pair's device: fetching the peer's memory, and writing into that memory or into its ring.

use std::sync::Arc;

use rdma_sys as sys;

use super::{Chunk, Registration, RemoteMemory, Slot, VerbsError};
use modelio_base::transport::stream::{LentPayload, Target};

/// A work request.
#[derive(Debug)]
pub enum Work {
    /// Fetches memory of the peer's into a target.
    ReadTo {
        /// The place for the data.
        target: Target,
        /// The registration of that memory.
        registration: Arc<Registration>,
        /// The peer's memory.
        from: RemoteMemory,
        /// Whether the work waits for all earlier READs.
        fence: bool,
    },
    /// Fetches memory of the peer's into a slot.
    Read {
        /// The place for the data.
        slot: Slot,
        /// The number of bytes.
        len: usize,
        /// The peer's memory.
        from: RemoteMemory,
        /// Whether the work waits for all earlier READs.
        fence: bool,
    },
    /// Writes a payload into the peer's memory.
    Write {
        /// The payload.
        piece: LentPayload,
        /// The registration of that memory.
        registration: Arc<Registration>,
        /// The peer's memory.
        to: RemoteMemory,
    },
    /// Writes bytes of a chunk into the peer's ring, and announces them by `word`.
    Ring {
        /// The chunk that holds the bytes.
        chunk: Arc<Chunk>,
        /// The offset of the first byte.
        start: usize,
        /// The number of bytes. It may be 0 if there is a word.
        len: usize,
        /// The peer's memory.
        to: RemoteMemory,
        /// The word for the peer.
        word: Option<u32>,
    },
}

/// Finished work.
#[derive(Debug)]
pub struct Finished {
    /// The token that it was posted with.
    pub token: u64,
    /// The work, with its memory.
    pub work: Work,
}

/// The finished work of a queue pair.
pub type Done = Vec<Finished>;

impl Work {
    /// The device's address of the first byte, the length, and the registration.
    fn memory(&self) -> (u64, usize, &Arc<Registration>) {
        match self {
            Work::ReadTo { target, registration, .. } => {
                let (start, len) = target.raw();
                (start as u64, len, registration)
            }
            Work::Read { slot, len, .. } => (slot.address(), *len, slot.registration()),
            Work::Write { piece, registration, .. } => {
                let (start, len) = piece.raw();
                (start as u64, len, registration)
            }
            Work::Ring { chunk, start, len, .. } => {
                (chunk.address().wrapping_add(*start as u64), *len, chunk.local())
            }
        }
    }

    /// Checks that its memory is within its registration.
    pub(super) fn check(&self) -> Result<(), VerbsError> {
        let out = |offset: u64, len: usize, of: &'static str, all: usize| {
            Err(VerbsError::OutOfRange { offset, len, of, all: all as u64 })
        };
        match self {
            Work::Read { slot, len, .. } if *len > slot.len() => {
                return out(0, *len, "a slot", slot.len());
            }
            Work::Ring { chunk, start, len, .. }
                if start.checked_add(*len).is_none_or(|end| end > chunk.len()) =>
            {
                return out(*start as u64, *len, "a chunk", chunk.len());
            }
            _ => {}
        }
        let (start, len, registration) = self.memory();
        if !registration.holds(start, len) || u32::try_from(len).is_err() {
            let offset = start.wrapping_sub(registration.remote().address);
            return out(offset, len, "a registration", registration.len());
        }
        Ok(())
    }

    /// The work request for libibverbs, except for the list of its memory, which the caller sets.
    pub(super) fn request(&self, number: u64, report: bool, inline: u32) -> (sys::ibv_sge, sys::ibv_send_wr) {
        let (start, len, registration) = self.memory();
        let length = len as u32;
        let piece = sys::ibv_sge { addr: start, length, lkey: registration.local_key() };
        let (opcode, remote, fence, word) = match self {
            Work::ReadTo { from, fence, .. } | Work::Read { from, fence, .. } => {
                (sys::ibv_wr_opcode::IBV_WR_RDMA_READ, *from, *fence, None)
            }
            Work::Write { to, .. } => (sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE, *to, false, None),
            Work::Ring { to, word: None, .. } => (sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE, *to, false, None),
            Work::Ring { to, word: Some(word), .. } => {
                (sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM, *to, false, Some(*word))
            }
        };
        let mut flags = sys::ibv_send_flags(0);
        if report {
            flags |= sys::ibv_send_flags::IBV_SEND_SIGNALED;
        }
        if fence {
            flags |= sys::ibv_send_flags::IBV_SEND_FENCE;
        }
        if matches!(self, Work::Ring { .. }) && length > 0 && length <= inline {
            flags |= sys::ibv_send_flags::IBV_SEND_INLINE;
        }
        if word.is_some() {
            flags |= sys::ibv_send_flags::IBV_SEND_SOLICITED;
        }
        // SAFETY: all fields are numbers, pointers and unions of those, for which zero is valid.
        let mut request: sys::ibv_send_wr = unsafe { std::mem::zeroed() };
        request.wr_id = number;
        request.opcode = opcode;
        request.send_flags = flags.0;
        request.wr.rdma = sys::rdma_t { remote_addr: remote.address, rkey: remote.key };
        if let Some(word) = word {
            request.imm_data_invalidated_rkey_union.imm_data = word.to_be();
        }
        (piece, request)
    }
}
