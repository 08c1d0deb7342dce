//! Patterns of tensors' names: `*` stands for any text, `?` for one character, everything else for itself.

/// What each `*` of `pattern` stands for in `name`, as little as it can, the first one first. None if it does not match.
pub(super) fn captures(pattern: &str, name: &str) -> Option<Vec<String>> {
    let name: Vec<char> = name.chars().collect();
    let parts: Vec<Vec<char>> = pattern.split('*').map(|part| part.chars().collect()).collect();
    let fits = |part: &[char], at: usize| {
        let there = name.get(at..at + part.len());
        there.is_some_and(|there| part.iter().zip(there).all(|(of, c)| *of == '?' || of == c))
    };
    let (first, rest) = parts.split_first()?;
    let Some((last, middle)) = rest.split_last() else {
        return (fits(first, 0) && first.len() == name.len()).then(Vec::new);
    };
    let (mut at, mut captured) = (fits(first, 0).then_some(first.len())?, Vec::new());
    for part in middle {
        let found = (at..=name.len()).find(|&found| fits(part, found))?;
        captured.push(name[at..found].iter().collect());
        at = found + part.len();
    }
    let end = name.len().checked_sub(last.len()).filter(|&end| end >= at && fits(last, end))?;
    captured.push(name[at..end].iter().collect());
    Some(captured)
}

/// `pattern` with what its `*` stand for, in their order. None if there are more of them.
pub(super) fn filled(pattern: &str, captured: &[String]) -> Option<String> {
    let (mut captured, mut filled) = (captured.iter(), String::new());
    for c in pattern.chars() {
        match c {
            '*' => filled += captured.next()?,
            c => filled.push(c),
        }
    }
    Some(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_as_little_as_they_can_and_fill_other_names() {
        let of = |pattern, name| captures(pattern, name);
        let some = |texts: &[&str]| Some(texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>());
        assert_eq!(of("a.*.w", "a.12.w"), some(&["12"]));
        assert_eq!(of("a.*.*.w", "a.1.2.3.w"), some(&["1", "2.3"]));
        assert_eq!(of("*", ""), some(&[""]));
        assert_eq!(of("*a*", "bab a"), some(&["b", "b a"]));
        assert_eq!(of("a?c", "abc"), some(&[]));
        assert_eq!(of("a?c", "ac"), None);
        assert_eq!(of("ab*ba", "aba"), None, "no character is both");
        assert_eq!(of("é*", "éa"), some(&["a"]));
        assert_eq!(of("a", "ab"), None);
        let layer = of("a.*.*", "a.7.q").unwrap();
        assert_eq!(filled("b.*.c.*", &layer).as_deref(), Some("b.7.c.q"));
        assert_eq!(filled("b", &layer).as_deref(), Some("b"));
        assert_eq!(filled("***", &layer), None);
    }
}
