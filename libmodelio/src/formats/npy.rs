//! Headers of NumPy's `.npy` format, in front of a tensor's bytes as they lie in the model.

use std::fmt::Write;

use safetensors::Dtype;

use crate::vocabulary::layout::{DType, Tensor};

/// `.npy` data begins at a multiple of this, so that it can be mapped and used in place.
const ALIGNMENT: usize = 64;
const MAGIC: &[u8] = b"\x93NUMPY";

/// A complete `.npy` header for `tensor`: little-endian, C order, length a multiple of 64 bytes.
///
/// Format version 1.0, or 2.0 where the shape needs more than 64 KiB. Types that NumPy does not have are
/// described by size: bfloat16 as `V2` and 8-bit floats as `V1`, to be viewed as one of `ml_dtypes`; packed
/// types (less than a byte an element) as a single dimension of plain bytes.
pub fn npy_header(tensor: &Tensor) -> Vec<u8> {
    let (descr, shape) = match descr(tensor.dtype) {
        Some(descr) => (descr, shape_tuple(&tensor.shape)),
        None => ("|u1", format!("({},)", tensor.bytes.end - tensor.bytes.start)),
    };
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    // Version 1.0 has two bytes for the length of the rest, 2.0 has four.
    let (version, fixed) = match padded(MAGIC.len() + 4, &dict) {
        total if total - (MAGIC.len() + 4) <= usize::from(u16::MAX) => (1, MAGIC.len() + 4),
        _ => (2, MAGIC.len() + 6),
    };
    let total = padded(fixed, &dict);
    let mut header = Vec::with_capacity(total);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&[version, 0]);
    header.extend_from_slice(&(total - fixed).to_le_bytes()[..fixed - MAGIC.len() - 2]);
    header.extend_from_slice(dict.as_bytes());
    header.resize(total - 1, b' ');
    header.push(b'\n');
    header
}

/// Length of a header with `fixed` bytes in front of `dict` and a newline at its end.
fn padded(fixed: usize, dict: &str) -> usize {
    (fixed + dict.len() + 1).next_multiple_of(ALIGNMENT)
}

/// The shape as Python writes a tuple: `()`, `(3,)`, `(3, 4)`.
fn shape_tuple(shape: &[usize]) -> String {
    let mut tuple = String::from("(");
    for (i, dim) in shape.iter().enumerate() {
        let separator = if i == 0 { "" } else { " " };
        // Writing to a string cannot fail.
        let _ = write!(tuple, "{separator}{dim},");
    }
    if shape.len() > 1 {
        tuple.pop();
    }
    tuple.push(')');
    tuple
}

/// NumPy's name of a type; `None` where its elements are no whole bytes.
fn descr(dtype: DType) -> Option<&'static str> {
    Some(match Dtype::from(dtype) {
        Dtype::F32 => "<f4",
        Dtype::F16 => "<f2",
        Dtype::BF16 => "<V2",
        Dtype::F64 => "<f8",
        Dtype::C64 => "<c8",
        Dtype::BOOL => "|b1",
        Dtype::U8 => "|u1",
        Dtype::I8 => "|i1",
        Dtype::U16 => "<u2",
        Dtype::I16 => "<i2",
        Dtype::U32 => "<u4",
        Dtype::I32 => "<i4",
        Dtype::U64 => "<u8",
        Dtype::I64 => "<i8",
        other if other.bitsize() == 8 => "|V1",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(dtype: Dtype, shape: &[usize], bytes: u64) -> Vec<u8> {
        let dtype = DType::from(dtype);
        npy_header(&Tensor { name: "t".into(), dtype, shape: shape.to_vec(), bytes: 100..100 + bytes })
    }

    /// The dictionary of a version 1.0 header, after checking its frame.
    fn dict(header: &[u8]) -> &str {
        assert_eq!(header[..8], *b"\x93NUMPY\x01\x00");
        assert_eq!(usize::from(u16::from_le_bytes([header[8], header[9]])), header.len() - 10);
        assert_eq!(header.len() % 64, 0);
        assert_eq!(header.last(), Some(&b'\n'));
        std::str::from_utf8(&header[10..]).unwrap().trim_end()
    }

    #[test]
    fn a_matrix_as_numpy_itself_writes_it() {
        let mut expected = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
        expected.extend(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }");
        expected.resize(127, b' ');
        expected.push(b'\n');
        assert_eq!(header(Dtype::F32, &[3, 4], 48), expected);
    }

    #[test]
    fn shapes() {
        for (shape, tuple) in
            [(&[][..], "()"), (&[7], "(7,)"), (&[0], "(0,)"), (&[1, 2], "(1, 2)"), (&[1, 2, 3], "(1, 2, 3)")]
        {
            let header = header(Dtype::I64, shape, 0);
            assert_eq!(
                dict(&header),
                format!("{{'descr': '<i8', 'fortran_order': False, 'shape': {tuple}, }}")
            );
        }
    }

    #[test]
    fn every_type_has_a_description() {
        for (dtype, descr) in [
            (Dtype::F16, "<f2"),
            (Dtype::BF16, "<V2"),
            (Dtype::F64, "<f8"),
            (Dtype::C64, "<c8"),
            (Dtype::BOOL, "|b1"),
            (Dtype::I8, "|i1"),
            (Dtype::U16, "<u2"),
            (Dtype::U32, "<u4"),
            (Dtype::U64, "<u8"),
            (Dtype::F8_E4M3, "|V1"),
            (Dtype::F8_E5M2FNUZ, "|V1"),
        ] {
            let header = header(dtype, &[2], 2 * dtype.bitsize() as u64 / 8);
            assert!(dict(&header).starts_with(&format!("{{'descr': '{descr}', ")), "{dtype}");
        }
    }

    #[test]
    fn packed_types_are_bytes() {
        let expected = "{'descr': '|u1', 'fortran_order': False, 'shape': (6,), }";
        assert_eq!(dict(&header(Dtype::F4, &[3, 4], 6)), expected);
        assert_eq!(dict(&header(Dtype::F6_E2M3, &[8], 6)), expected);
    }

    #[test]
    fn version_2_where_version_1_cannot_hold_it() {
        // "1, " is three bytes a dimension: these straddle the limit of 65,535.
        for dimensions in 21_780..21_840 {
            let header = header(Dtype::U8, &vec![1; dimensions], 1);
            assert_eq!((header.len() % 64, header.last()), (0, Some(&b'\n')));
            let (len, start) = match header[6] {
                1 => (u32::from(u16::from_le_bytes([header[8], header[9]])), 10),
                _ => (u32::from_le_bytes([header[8], header[9], header[10], header[11]]), 12),
            };
            assert_eq!(len as usize, header.len() - start);
            assert_eq!(header[start..].iter().filter(|&&byte| byte == b'1').count(), dimensions + 1);
        }
        assert_eq!(header(Dtype::U8, &[1; 21_780], 1)[6..8], [1, 0]);
        assert_eq!(header(Dtype::U8, &[1; 21_839], 1)[6..8], [2, 0]);
    }
}
