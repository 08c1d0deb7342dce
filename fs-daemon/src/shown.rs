//! Text of others as a terminal may show it. Names, addresses and reasons come from peers, who may put control characters
//! into them: these could hide lines, forge them, or change the terminal.

use std::borrow::Cow;

use serde_json::Value;

/// The text without control characters: each is shown as Rust writes it, as in `\\u{1b}` and `\\n`. So are characters that
/// change the order of others, or end a line.
pub fn shown(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unseen) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match is_unseen(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// All texts within a value, its keys included.
pub fn shown_within(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(shown(&text).into_owned()),
        Value::Array(values) => values.into_iter().map(shown_within).collect(),
        Value::Object(entries) => {
            entries.into_iter().map(|(key, value)| (shown(&key).into_owned(), shown_within(value))).collect()
        }
        plain => plain,
    }
}

fn is_unseen(c: char) -> bool {
    // The others are marks of direction, and separators of lines and paragraphs.
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text_of_strangers_is_shown_without_control_characters() {
        assert!(matches!(shown("node-1 été 模型"), Cow::Borrowed("node-1 été 模型")));
        let text = "a\u{1b}[2J\r\nb\u{7f}\u{9b}\u{202e}c\0";
        assert_eq!(shown(text), "a\\u{1b}[2J\\r\\nb\\u{7f}\\u{9b}\\u{202e}c\\u{0}");
        let value = json!({ "a\t": ["\u{1b}", 1, { "b": "x\ny" }], "c": null });
        assert_eq!(shown_within(value), json!({ "a\\t": ["\\u{1b}", 1, { "b": "x\\ny" }], "c": null }));
    }
}
