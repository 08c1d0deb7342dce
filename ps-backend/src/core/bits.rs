//! Sets of blocks from other processes. None takes more memory than its bytes did, and none has elements beyond its
//! end.

use fixedbitset::FixedBitSet;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

/// Bytes of one word of the set's memory.
const WORD: usize = size_of::<usize>();

/// Reads a serialised [`FixedBitSet`], and refuses any other bytes.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<FixedBitSet, D::Error> {
    let (length, data): (u64, &'de [u8]) = Deserialize::deserialize(from)?;
    let length = usize::try_from(length).map_err(D::Error::custom)?;
    if data.len() != length.div_ceil(8 * WORD) * WORD {
        return Err(D::Error::custom(format_args!("a set of {length} blocks in {} bytes", data.len())));
    }
    let words = data.chunks_exact(WORD).map(|word| word.try_into().map_or(0, usize::from_le_bytes));
    let set = FixedBitSet::with_capacity_and_blocks(length, words);
    match set.ones().next_back().is_none_or(|last| last < length) {
        true => Ok(set),
        false => Err(D::Error::custom("a set that holds blocks beyond its end")),
    }
}
