//! Files with a header of their own, written where raw bytes belong: known by their first bytes, and refused by name.

use super::error::{CallError, CallResult};

/// Refuses a model's first bytes that are a file's header instead of raw data.
///
/// # Errors
/// EINVAL with the file's kind.
pub fn refuse_header(offset: u64, data: &[u8]) -> CallResult<()> {
    let kind = match offset {
        0 if is_npy(data) => ".npy",
        0 if is_safetensors(data) => "safetensors",
        _ => return Ok(()),
    };
    Err(CallError::new(
        libc::EINVAL,
        format!(
            "this is a {kind} file with its header: write the array's raw bytes, at the offsets of weights"
        ),
    ))
}

/// Magic, a version there is, and the dictionary behind the header's length: no gradients begin like that.
fn is_npy(data: &[u8]) -> bool {
    let dictionary = |at: usize| data.get(at) == Some(&b'{');
    match data.strip_prefix(b"\x93NUMPY") {
        Some([1, 0, ..]) => dictionary(10),
        Some([2 | 3, 0, ..]) => dictionary(12),
        _ => false,
    }
}

/// The header's length, and JSON of it: an object with a quoted name first, printable as far as it is looked at.
fn is_safetensors(data: &[u8]) -> bool {
    const LONGEST_LINE: usize = 256;
    const LONGEST: u64 = 100_000_000;
    let Some((length, text)) = data.split_first_chunk() else { return false };
    let length = u64::from_le_bytes(*length);
    let text = &text[..text.len().min(LONGEST_LINE).min(length.min(LONGEST) as usize)];
    let is_text = |byte: &u8| (b' '..=b'~').contains(byte) || *byte >= 0x80;
    (2..=LONGEST).contains(&length) && text.len() >= 8 && text.starts_with(b"{\"") && text.iter().all(is_text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_with_headers_are_known_and_numbers_are_not() {
        let npy = |version: u8| [b"\x93NUMPY".as_slice(), &[version, 0, 118, 0], b"{'descr': '<f4'"].concat();
        assert!(is_npy(&npy(1)));
        assert!(!is_npy(&npy(9)) && !is_npy(&npy(2)) && !is_npy(b"\x93NUMPY"));
        let mut header = 60u64.to_le_bytes().to_vec();
        header.extend(br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}      "#);
        assert!(is_safetensors(&header));
        assert!(refuse_header(0, &header).is_err_and(|error| error.errno == libc::EINVAL));
        assert_eq!(refuse_header(4, &header), Ok(()), "elsewhere it is data");
        header[0..8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(!is_safetensors(&header), "no header is that long");
        for numbers in [vec![0; 64], vec![0xff; 64], 1.5f32.to_le_bytes().repeat(16)] {
            assert_eq!(refuse_header(0, &numbers), Ok(()));
        }
    }
}
