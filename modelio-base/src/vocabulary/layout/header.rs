//! The header that safetensors puts in front of a model's flat range.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

use super::Tensor;

/// Largest header that readers of safetensors accept, in bytes.
pub const MAX_HEADER_BYTES: usize = 100_000_000;

/// Bytes of the header's length in front of it.
pub const PREFIX: usize = 8;
/// Data begins at a multiple of this: a cache line, and enough for any vector load.
const ALIGNMENT: usize = 64;

/// The header of a safetensors file whose data is the flat range of a model with these tensors, as it is.
///
/// Its length, that is the offset of the data in the file, is a multiple of 64 bytes. An empty
/// `metadata` is left out. Readers accept [`MAX_HEADER_BYTES`]; the layout leaves 1 MiB of that to
/// `metadata`.
pub fn header_bytes(tensors: &[Tensor], metadata: &BTreeMap<String, String>) -> Vec<u8> {
    let mut json = String::from("{");
    if !metadata.is_empty() {
        json.push_str("\"__metadata__\":{");
        for (key, value) in metadata {
            push_json_string(&mut json, key);
            json.push(':');
            push_json_string(&mut json, value);
            json.push(',');
        }
        json.pop();
        json.push_str("},");
    }
    for tensor in tensors {
        push_json_string(&mut json, &tensor.name);
        let (dtype, shape) = (tensor.dtype, &tensor.shape);
        let Range { start, end } = tensor.bytes;
        // Writing to a string cannot fail; a list of numbers looks in JSON as in Rust.
        let _ =
            write!(json, ":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{start},{end}]}},");
    }
    json.pop();
    json.push('}');
    let total = (PREFIX + json.len()).next_multiple_of(ALIGNMENT);
    let mut bytes = Vec::with_capacity(total);
    bytes.extend_from_slice(&((total - PREFIX) as u64).to_le_bytes());
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(total, b' ');
    bytes
}

fn push_json_string(json: &mut String, text: &str) {
    let _ = write!(json, "{}", serde_json::Value::from(text));
}
