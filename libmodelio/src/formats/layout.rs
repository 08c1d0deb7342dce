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
