//! A patch for a slow link: compressed by zstd, behind a head that says its length.

use std::borrow::Cow;
use std::cell::RefCell;

use zstd::bulk::{Compressor, Decompressor};

use super::{HEAD, PatchError};

/// In place of the number of a form: the patch is compressed.
const PACKED: u8 = 3;
/// zstd's fastest level. Higher ones make patches no shorter.
const LEVEL: i32 = 1;

thread_local! {
    static PACKING: RefCell<Option<Compressor<'static>>> = const { RefCell::new(None) };
    static UNPACKING: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// The patch, compressed. None if that is no shorter, or there is no memory for it.
pub fn packed(patch: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![0; patch.len()];
    let (head, room) = out.split_first_chunk_mut::<HEAD>()?;
    head[1] = PACKED;
    head[4..8].copy_from_slice(&(patch.len() as u32).to_le_bytes());
    let len = PACKING.with_borrow_mut(|packing| {
        if packing.is_none() {
            *packing = Compressor::new(LEVEL).ok();
        }
        packing.as_mut()?.compress_to_buffer(patch, room).ok()
    })?;
    out.truncate(HEAD + len);
    Some(out)
}

/// The patch for a block of `len` bytes as it was before it was compressed, if it was.
///
/// # Errors
/// [`PatchError::Packed`].
pub(super) fn unpacked(patch: &[u8], len: usize) -> Result<Cow<'_, [u8]>, PatchError> {
    let Some((head, rest)) = patch.split_first_chunk::<HEAD>().filter(|(head, _)| head[1] == PACKED) else {
        return Ok(Cow::Borrowed(patch));
    };
    let size = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
    // A patch is shorter than its block.
    if size >= len {
        return Err(PatchError::Packed);
    }
    UNPACKING.with_borrow_mut(|unpacking| {
        if unpacking.is_none() {
            *unpacking = Decompressor::new().ok();
        }
        let plain = unpacking.as_mut().and_then(|unpacking| unpacking.decompress(rest, size).ok());
        plain.filter(|plain| plain.len() == size).map(Cow::Owned).ok_or(PatchError::Packed)
    })
}
