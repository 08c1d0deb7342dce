"""Rust source as tokens, and which of them are tests: for scripts/lines and scripts/layers.

The lexer knows what can hide other text: comments (nested ones too), strings (raw ones too), characters and lifetimes.
It does not parse: an item that is there for tests only ends where its braces or its semicolon end.
"""

import re
from dataclasses import dataclass

IDENT, LIFETIME, NUMBER, STRING, PUNCTUATION = "ident", "lifetime", "number", "string", "punctuation"

_TOKEN = re.compile(
    r"""
      (?P<space>\s+)
    | (?P<line_comment>//[^\n]*)
    | (?P<block_comment>/\*)
    | (?P<raw>(?:b|c)?r(?P<hashes>\#*)")
    | (?P<string>(?:b|c)?"(?:[^"\\]|\\.)*")
    | (?P<char>b?'(?:[^'\\\n]|\\(?:[^u]|u\{[0-9a-fA-F_]*\})|\\x[0-9a-fA-F]{2})')
    | (?P<lifetime>'(?:r\#)?[^\W\d]\w*)
    | (?P<ident>(?:r\#)?[^\W\d]\w*)
    | (?P<number>\d(?:\w|\.(?=\d))*)
    | (?P<punctuation>::|->|=>|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_EDGE = re.compile(r"/\*|\*/")
_OPENING, _CLOSING = {"{", "(", "["}, {"}", ")", "]"}

# An item that begins with one of these ends with a semicolon, whatever braces it has; any other may end with its braces.
_TO_SEMICOLON = {"use", "static", "type", "let", "extern"}
_WITH_BRACES = {"fn", "mod", "struct", "enum", "union", "trait", "impl", "macro_rules", "unsafe", "async"}
_BEFORE_ITEM = {"pub", "crate", "default"}


class NotRust(Exception):
    """Text that the lexer does not understand."""


@dataclass(frozen=True)
class Token:
    """A piece of code: its kind, its text, and the lines (from 1) that it begins and ends in."""

    kind: str
    text: str
    line: int
    end: int


def tokens(text):
    """The code of `text`, without comments and spaces."""
    found, at, line = [], 0, 1
    if text.startswith("#!") and not text.startswith("#!["):
        at = text.find("\n") if "\n" in text else len(text)
    while at < len(text):
        match = _TOKEN.match(text, at)
        kind, end = match.lastgroup, match.end()
        if kind == "block_comment":
            end = _comment_end(text, at, line)
        elif kind == "raw":
            closing = '"' + match["hashes"]
            end = text.find(closing, end)
            if end < 0:
                raise NotRust(f"line {line}: a raw string has no end")
            end += len(closing)
        elif kind == "punctuation" and text[at] == '"':
            raise NotRust(f"line {line}: a string has no end")
        piece = text[at:end]
        after = line + piece.count("\n")
        if kind not in ("space", "line_comment", "block_comment"):
            kind = STRING if kind in ("raw", "string", "char") else kind
            found.append(Token(kind, piece.removeprefix("r#") if kind == IDENT else piece, line, after))
        at, line = end, after
    return found


def _comment_end(text, at, line):
    depth = 0
    for edge in _COMMENT_EDGE.finditer(text, at):
        depth += 1 if edge[0] == "/*" else -1
        if depth == 0:
            return edge.end()
    raise NotRust(f"line {line}: a comment has no end")


def closing(code, at):
    """The index of what closes the bracket at `at`."""
    depth = 0
    for index in range(at, len(code)):
        if code[index].kind == PUNCTUATION:
            depth += (code[index].text in _OPENING) - (code[index].text in _CLOSING)
            if depth == 0:
                return index
    raise NotRust(f"line {code[at].line}: {code[at].text} is never closed")


def is_at(code, at, *texts):
    """Whether these texts are there, none of them in a string."""
    there = code[at : at + len(texts)]
    return [token.text for token in there] == list(texts) and all(token.kind != STRING for token in there)


def attribute(code, at):
    """(index of its bracket, index of what closes it, whether it is an inner one), or None."""
    if is_at(code, at, "#", "["):
        return at + 1, closing(code, at + 1), False
    if is_at(code, at, "#", "!", "["):
        return at + 2, closing(code, at + 2), True
    return None


def for_tests(code, first, last):
    """Whether the attribute between these brackets keeps something out of every build but that of tests."""
    inside = code[first + 1 : last]
    if [token.text for token in inside] in (["test"], ["bench"]):
        return True
    return is_at(inside, 0, "cfg", "(") and _needs_test(inside[2:-1])


def _needs_test(predicate):
    if len(predicate) == 1:
        return predicate[0].text == "test"
    if not is_at(predicate, 1, "(") or predicate[0].text not in ("all", "any"):
        return False
    parts, depth = [[]], 0
    for token in predicate[2:-1]:
        depth += (token.text in _OPENING) - (token.text in _CLOSING)
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    needs = [_needs_test(part) for part in parts if part]
    return any(needs) if predicate[0].text == "all" else bool(needs) and all(needs)


def without_tests(code):
    """(the code without what is there for tests only, the names of modules in files that are)."""
    kept, modules, at = [], [], 0
    while at < len(code):
        found = attribute(code, at)
        if not found:
            kept.append(code[at])
            at += 1
            continue
        first, last, inner = found
        if inner:
            if not kept and for_tests(code, first, last):
                return [], []
            kept += code[at : last + 1]
            at = last + 1
            continue
        start, tests = at, False
        while (found := attribute(code, at)) and not found[2]:
            tests |= for_tests(code, *found[:2])
            at = found[1] + 1
        if not tests:
            kept += code[start:at]
            continue
        end = _item_end(code, at)
        words = [token.text for token in code[at:end] if token.kind == IDENT]
        if "mod" in words and is_at(code, end - 1, ";"):
            modules.append(words[words.index("mod") + 1])
        at = end
    return kept, modules


def _item_end(code, at):
    """The index after the item, field, variant, arm or statement that begins at `at`."""
    word, index = _first_word(code, at)
    to_semicolon = word in _TO_SEMICOLON or (word == "const" and not is_at(code, index + 1, "fn"))
    if word == "extern" and "{" in [token.text for token in code[index + 1 : index + 3]]:
        to_semicolon = False
    item = to_semicolon or word in _WITH_BRACES or word == "const"
    angles, index = 0, at
    while index < len(code):
        token = code[index]
        if token.kind == PUNCTUATION:
            if token.text in _CLOSING:
                return index
            if token.text in _OPENING:
                index = closing(code, index)
                if token.text == "{" and not to_semicolon:
                    # An arm of a match, and a variant with fields, may be followed by a comma.
                    return index + 2 if not item and is_at(code, index + 1, ",") else index + 1
            elif token.text == ";":
                return index + 1
            elif token.text in "<>":
                angles += 1 if token.text == "<" else -1
            elif token.text == "," and not item and angles <= 0:
                return index + 1
        index += 1
    return index


def _first_word(code, at):
    """What the item is, and where it says so: visibility comes before."""
    while at < len(code) and code[at].text in _BEFORE_ITEM:
        at = closing(code, at + 1) + 1 if is_at(code, at + 1, "(") else at + 1
    return (code[at].text if at < len(code) else ""), at
