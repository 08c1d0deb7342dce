//! Files with a header of their own, written where raw bytes belong: known by their first bytes, and refused by name.
//!
//! Numbers must not be taken for a header. So each kind is known by eight checked bytes at least, which random bytes have
//! with a chance below 2^-40.

use super::error::{CallError, CallResult};

/// Whether bytes are the first of a kind of files.
type IsOne = fn(&[u8]) -> bool;

/// The kinds of files, and how they are known.
const KINDS: [(&str, IsOne); 5] = [
    (".npy file", is_npy),
    ("safetensors file", is_safetensors),
    ("zip archive (torch.save and np.savez write one)", is_zip),
    ("pickle", is_pickle),
    ("gzip file", is_gzip),
];

/// Refuses a model's first bytes that are a file's header instead of raw data.
///
/// # Errors
/// EINVAL with the file's kind.
pub fn refuse_header(offset: u64, data: &[u8]) -> CallResult<()> {
    let kind = KINDS.iter().find(|(_, is_one)| offset == 0 && is_one(data));
    let Some((kind, _)) = kind else { return Ok(()) };
    Err(CallError::new(
        libc::EINVAL,
        format!("this is a {kind} with its header: write the array's raw bytes, at the offsets of weights"),
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
    const MAX_LINE: usize = 256;
    const MAX_HEADER: u64 = 100_000_000;
    let Some((length, text)) = data.split_first_chunk() else { return false };
    let length = u64::from_le_bytes(*length);
    let text = &text[..text.len().min(MAX_LINE).min(length.min(MAX_HEADER) as usize)];
    let is_text = |byte: &u8| (b' '..=b'~').contains(byte) || *byte >= 0x80;
    (2..=MAX_HEADER).contains(&length)
        && text.len() >= 8
        && text.starts_with(b"{\"")
        && text.iter().all(is_text)
}

/// A local file header: its magic, a version up to 6.3, no encryption, and a method that libraries write.
fn is_zip(data: &[u8]) -> bool {
    match data {
        [b'P', b'K', 3, 4, version, 0, flags, high, method, 0, ..] => {
            *version <= 63 && flags & 0x41 == 0 && high & !8 == 0 && [0, 8, 12, 14].contains(method)
        }
        _ => false,
    }
}

/// The header of protocol 4 and 5 with its first frame and opcode; the magic number of `torch.save`'s old format; or in
/// protocol 2 and 3 the name of a module.
fn is_pickle(data: &[u8]) -> bool {
    const TORCH: &[u8] = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
    const OPCODES: &[u8] = b"()]}KMJGNcX\x8c\x8a\x8e\x8f\x96";
    match data {
        [0x80, 4 | 5, 0x95, _, _, _, 0, 0, 0, 0, 0, opcode, ..] => OPCODES.contains(opcode),
        [0x80, 2 | 3, 0x8a, ..] => data[2..].starts_with(TORCH),
        [0x80, 2 | 3, b'c', name @ ..] => {
            let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"._".contains(byte);
            name.iter().position(|byte| !is_name(byte)).is_some_and(|end| end >= 7 && name[end] == b'\n')
        }
        _ => false,
    }
}

/// The fixed header, a time since 1999 or none, a name that is text, and the beginning of a deflated block.
fn is_gzip(data: &[u8]) -> bool {
    let Some(([0x1f, 0x8b, 8, flags, time @ .., extra, system], rest)) = data.split_first_chunk::<10>()
    else {
        return false;
    };
    let is_time = *time == [0; 4] || (0x38..0x80).contains(&time[3]);
    let block = match flags {
        0 => Some(rest),
        8 => {
            let is_text = |byte: &u8| (b' '..=b'~').contains(byte) || *byte >= 0x80;
            let end = rest.iter().position(|byte| !is_text(byte));
            end.filter(|&end| end > 0 && rest[end] == 0).map(|end| &rest[end + 1..])
        }
        _ => None,
    };
    is_time
        && [0, 2, 4].contains(extra)
        && [0, 3, 7, 11, 255].contains(system)
        && block.is_some_and(is_deflated)
}

/// A first block of deflate that large files have: a stored one whose length stands there twice, or one whose code of
/// code lengths is complete.
fn is_deflated(data: &[u8]) -> bool {
    /// The widths of the header of a block with codes of its own.
    const HEADER: usize = 17;
    let bit = |at: usize| data.get(at / 8).map(|byte| u32::from(byte >> (at % 8) & 1));
    let number = |at: usize, width: usize| (0..width).try_fold(0, |sum, i| Some(sum | bit(at + i)? << i));
    match number(1, 2) {
        Some(0) => number(8, 16).zip(number(24, 16)).is_some_and(|(length, not)| length == not ^ 0xffff),
        Some(2) => {
            let Some(((literals, distances), lengths)) = number(3, 5).zip(number(8, 5)).zip(number(13, 4))
            else {
                return false;
            };
            let width = |i: usize| number(HEADER + 3 * i, 3);
            // In units of the longest code, of 7 bits.
            let share = |of: u32| if of == 0 { 0 } else { 128 >> of };
            let sum = (0..lengths as usize + 4).try_fold(0, |sum, i| Some(sum + share(width(i)?)));
            literals <= 29 && distances <= 29 && sum == Some(128)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random bytes by a generator with a fixed seed.
    struct Dice(u64);

    impl Dice {
        fn next(&mut self) -> u64 {
            // SplitMix64.
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        }

        /// About normal, with deviation 1.
        fn normal(&mut self) -> f64 {
            (0..12).map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64).sum::<f64>() - 6.0
        }
    }

    fn zip() -> Vec<u8> {
        [b"PK\x03\x04\x00\x00\x08\x08\x00\x00".as_slice(), &[0; 16], b"\x10\0\x12\0archive/data.pkl"].concat()
    }

    const PICKLES: [&[u8]; 4] = [
        b"\x80\x04\x95\x8c\x00\x00\x00\x00\x00\x00\x00\x8c\x15numpy.core.multiarray",
        b"\x80\x05\x95\x8c\x01\x00\x00\x00\x00\x00\x00}\x94",
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00",
    ];
    /// Python's `gzip.compress` of normal numbers, and the same with a name and a stored block.
    const GZIP: &[u8] =
        b"\x1f\x8b\x08\x00\xc8\xbc\x08\x6b\x02\xff\x1c\x97\x87\x3b\xd6\xff\x17\x87\x93\x8c\xcc\xc8\x4a\x19";
    const STORED: [u8; 25] = *b"\x1f\x8b\x08\x08\x10\x20\x30\x66\x00\x03g.bin\x00\x01\x04\x00\xfb\xff1234";

    fn npy(version: u8) -> Vec<u8> {
        [b"\x93NUMPY".as_slice(), &[version, 0, 118, 0], b"{'descr': '<f4'"].concat()
    }

    fn safetensors() -> Vec<u8> {
        let text = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}      "#;
        [60u64.to_le_bytes().as_slice(), text].concat()
    }

    #[test]
    fn archives_and_pickles_are_known() {
        assert!(is_zip(&zip()));
        assert!(PICKLES.iter().all(|data| is_pickle(data)));
        assert!(is_gzip(GZIP));
        assert!(is_gzip(&STORED));
        assert!(!is_gzip(&GZIP[..12]), "too short to tell");
        let mut wrong = STORED;
        wrong[18] ^= 1;
        assert!(!is_gzip(&wrong), "the length of the stored block");
    }

    /// The share of byte strings that pass each check of a header is the chance for uniform bytes.
    #[test]
    fn random_numbers_are_no_header() {
        let mut dice = Dice(37);
        // One changed byte of each header that is checked makes it none, with the chance that its place has.
        let chance = |header: &[u8], is_one: IsOne| -> f64 {
            let passing = |at: usize| {
                let mut changed = header.to_vec();
                let passes = |value: &u8| {
                    changed[at] = *value;
                    is_one(&changed)
                };
                (0..=255).filter(passes).count() as f64
            };
            (0..header.len()).map(|at| (passing(at) / 256.0).log2()).sum()
        };
        let others: [(&[u8], IsOne); 5] = [
            (&npy(1), is_npy),
            (&safetensors(), is_safetensors),
            (&zip(), is_zip),
            (GZIP, is_gzip),
            (&STORED, is_gzip),
        ];
        for (header, is_one) in PICKLES.map(|header| (header, is_pickle as IsOne)).into_iter().chain(others) {
            let chance = chance(header, is_one);
            assert!(chance < -40.0, "2^{chance}: {header:02x?}");
        }
        for round in 0..20_000 {
            let scale = f64::powi(10.0, (round % 13) - 8);
            let mut bytes = [[0u8; 64]; 6];
            bytes[0].fill_with(|| dice.next() as u8);
            for i in 0..8 {
                bytes[1][i * 8..][..8].copy_from_slice(&(dice.normal() * scale).to_le_bytes());
            }
            for i in 0..16 {
                bytes[2][i * 4..][..4].copy_from_slice(&((dice.normal() * scale) as f32).to_le_bytes());
            }
            for i in 0..32 {
                let value = dice.normal() * scale;
                let bf16 = (value as f32).to_bits() >> 16;
                bytes[3][i * 2..][..2].copy_from_slice(&(bf16 as u16).to_le_bytes());
                // Of f16: sign and mantissa at random, and exponents around that of the scale.
                let exponent = (value.abs().log2() + 15.0).clamp(0.0, 30.0) as u16;
                let f16 = (dice.next() as u16 & 0x83ff) | exponent << 10;
                bytes[4][i * 2..][..2].copy_from_slice(&f16.to_le_bytes());
            }
            // Of 8 bits: sign, and small exponents most of all.
            bytes[5].fill_with(|| (dice.next() as u8 & 0x80) | (dice.normal().abs() * 24.0) as u8);
            for data in &bytes {
                assert_eq!(refuse_header(0, data), Ok(()), "{data:02x?}");
            }
        }
    }

    #[test]
    fn files_with_headers_are_known_and_numbers_are_not() {
        assert!(is_npy(&npy(1)));
        assert!(!is_npy(&npy(9)) && !is_npy(&npy(2)) && !is_npy(b"\x93NUMPY"));
        let mut header = safetensors();
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
