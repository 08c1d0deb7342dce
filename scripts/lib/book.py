"""The pages of docs/, their links and anchors, and their form."""

import re
import subprocess
from urllib.parse import unquote, urlsplit

MOST_FILES = 15
WIDTH = 120
# What a page may have at most: words of prose, or lines.
MOST_WORDS = {"use/semantics.md": 5000}
MOST_LINES = {"use/performance.md": 332}

_FENCE = re.compile(r"^ *```")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")
_CODE = re.compile(r"`([^`]*)`")
_HEADING = re.compile(r"^#+ +(.*?) *$")
# A file of docs/ that any text names.
_SOURCE = re.compile(r"`((?:fd|lm|mb|ps|fs-daemon|gradfs-rdma|libmodelio|modelio-base|ps-backend)/[\w./{},-]+)`")
# As docs/internals/architecture.md abbreviates them.
_SHORT = {"fd": "fs-daemon/src", "lm": "libmodelio/src", "mb": "modelio-base/src", "ps": "ps-backend/src"}
_NAMED = re.compile(r"\bdocs/[\w./-]+\.(?:md|png|svg|csv|toml)\b")


def anchor(heading):
    """The anchor of a heading, as mdBook and code hosts make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    kept = "".join(letter for letter in text.strip().lower() if letter.isalnum() or letter in "_- ")
    return kept.replace(" ", "-")


def prose(text):
    """(number, line) of all lines outside of code."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            yield number, line


def anchors(text):
    """The anchors of a page. The second of the same name has -1 behind it."""
    found, seen = set(), {}
    for _, line in prose(text):
        if title := _HEADING.match(line):
            name = anchor(title[1])
            seen[name] = seen.get(name, -1) + 1
            found.add(f"{name}-{seen[name]}" if seen[name] else name)
    return found


def links(text):
    """(number, target) of all links, also of those that go over the end of a line."""
    kept = dict(prose(text))
    plain = "\n".join(kept.get(number, "") for number in range(1, len(text.splitlines()) + 1))
    plain = _CODE.sub(lambda code: "`" + re.sub(r"[^\n]", "x", code[1]) + "`", plain)
    for link in _LINK.finditer(plain):
        yield plain.count("\n", 0, link.start(1)) + 1, link[1]


def pages(docs):
    """The pages that docs/SUMMARY.md lists, in their order."""
    return [target for _, target in links((docs / "SUMMARY.md").read_text())]


def link_faults(root, sources):
    """Links of Markdown files that lead nowhere. A page of the book may lead to no file outside of it."""
    docs = root / "docs"
    for source in sources:
        for number, target in links(source.read_text()):
            place = f"{source.relative_to(root)}:{number}"
            parts = urlsplit(target)
            if parts.scheme:
                continue
            path = (source.parent / unquote(parts.path)).resolve() if parts.path else source
            if not path.exists():
                yield f"{place}: {target} leads nowhere"
            elif source.is_relative_to(docs) and not path.is_relative_to(docs):
                yield f"{place}: {target} leads out of the book"
            elif parts.fragment and path.suffix == ".md" and parts.fragment not in anchors(path.read_text()):
                yield f"{place}: {target}: there is no such heading"


def summary_faults(docs):
    """Pages that the summary lacks, names twice, or that are not there."""
    listed = pages(docs)
    there = sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md") if path.name != "SUMMARY.md")
    for page in there:
        if listed.count(page) != 1:
            yield f"docs/SUMMARY.md: {page} is listed {listed.count(page)} times"
    for page in listed:
        if page not in there:
            yield f"docs/SUMMARY.md: there is no {page}"


def form_faults(docs, generated):
    """Folders with too many files, pages that are too long, and lines that are too wide."""
    for folder in [docs, *(path for path in docs.rglob("*") if path.is_dir())]:
        count = sum(path.is_file() for path in folder.iterdir())
        if count > MOST_FILES:
            yield f"docs/{folder.relative_to(docs)}: {count} files, {MOST_FILES} at most"
    for path in sorted(docs.rglob("*.md")):
        page = str(path.relative_to(docs))
        text = path.read_text()
        words = len(_COMMENT.sub("", text).split())
        if words > MOST_WORDS.get(page, words):
            yield f"docs/{page}: {words} words, {MOST_WORDS[page]} at most"
        count = len(text.splitlines())
        if count > MOST_LINES.get(page, count):
            yield f"docs/{page}: {count} lines, {MOST_LINES[page]} at most"
        for number, line in prose(text):
            if len(line) > WIDTH and not line.startswith("|") and page not in generated:
                yield f"docs/{page}:{number}: {len(line)} columns, {WIDTH} at most: wrap it; a row of a table may be longer"


def _spelled_out(name):
    """The source files of a name: `a/{b,c}.rs` is two."""
    head, rest = name.split("/", 1)
    before, brace, behind = f"{_SHORT.get(head, head)}/{rest}".partition("{")
    choices, _, end = behind.partition("}")
    return [f"{before}{choice}{end}" for choice in choices.split(",")] if brace else [before]


def named_faults(root, files):
    """Files that others name, and that are not there: of docs/, and in Markdown of sources. The tests of this name made-up
    ones."""
    for path in files:
        if path.name == "test_docs.py":
            continue
        try:
            text = path.read_text()
        except (UnicodeDecodeError, OSError):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            sources = _SOURCE.findall(line) if path.suffix == ".md" else ()
            for name in [*_NAMED.findall(line), *(one for name in sources for one in _spelled_out(name))]:
                if not (root / name).exists():
                    yield f"{path.relative_to(root)}:{number}: there is no {name}"


def tracked(root):
    """All files of the repository that git knows or would know."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    return [path for name in names if name and (path := root / name).is_file()]
