//! The file `layout`: the tensors of a model, as text.

use std::fmt::Write as _;

use crate::vocabulary::layout::Tensor;

/// The tensors in the order of `weights`. A line has a name, an element type, a shape, and the offset of the
/// first byte, with tabs between them. Control characters and backslashes in names are escaped with a backslash.
pub fn layout_text(tensors: &[Tensor]) -> String {
    let mut text = String::new();
    for tensor in tensors {
        for c in tensor.name.chars() {
            match c {
                '\\' => text.push_str("\\\\"),
                c if c.is_control() => text.extend(c.escape_default()),
                c => text.push(c),
            }
        }
        let shape: Vec<String> = tensor.shape.iter().map(ToString::to_string).collect();
        let _ = writeln!(text, "\t{}\t[{}]\t{}", tensor.dtype, shape.join(","), tensor.bytes.start);
    }
    text
}

#[cfg(test)]
mod tests {
    use crate::vocabulary::layout::DType;

    use super::*;

    #[test]
    fn a_line_of_the_layout_has_four_fields_whatever_a_tensor_is_called() {
        let tensor = |name: &str, shape: &[usize], start| Tensor {
            name: name.into(),
            dtype: DType::parse("bf16").unwrap(),
            shape: shape.into(),
            bytes: start..start + 2,
        };
        let tensors = [tensor("a b", &[30, 1000], 0), tensor("x\ty\n\\z", &[], 60_000)];
        assert_eq!(layout_text(&tensors), "a b\tBF16\t[30,1000]\t0\nx\\ty\\n\\\\z\tBF16\t[]\t60000\n");
    }
}
