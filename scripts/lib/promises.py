"""The promises that pages of docs/ make, the tests that hold them, and the page that lists both.

A paragraph or list item of a page in docs/use or docs/operate is a promise if a comment with names of tests follows it:

    A contribution counts once.
    <!-- tests: exactly_once, a_second_close_changes_nothing -->

Its first sentence is the promise. A name is a Python test `test_<name>` with all of its variants `test_<name>__<variant>`,
one such variant, or a Rust test.
"""

import ast
import re
from dataclasses import dataclass

# The parts of the book that promise something.
PARTS = ("use", "operate")
GENERATED = "use/promises.md"

# Python tests of no promise: of scripts, of bad input of every kind, and of what one of the other tests promises.
WITHOUT_PROMISES = (
    "test_against.py",
    "test_bad_*.py",
    "test_chaos.py",
    "test_daemon_*.py",
    "test_docs.py",
    "test_fio_jobs.py",
    "test_leaks.py",
    "test_mountpoints.py",
    "test_namespaces.py",
    "test_nbd_digits.py",
    "test_netns.py",
    "test_plain_build.py",
    "test_rdma_*.py",
    "test_successors.py",
    "test_unprivileged.py",
)

_COMMENT = re.compile(r"^ *<!-- tests:")
_HEADING = re.compile(r"^(#+) (.*)")
_ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +")
_SENTENCE = re.compile(r".+?(?:[.!?]\)?(?=\s|$)|:$)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_ATTRIBUTE = re.compile(r"#\[test\]\s*(?:(?:#\[[^\]]*\]|//[^\n]*)\s*)*(?:pub )?fn (\w+)")
_FUNCTION = re.compile(r"^(?:pub )?fn (\w+)", re.MULTILINE)
_LISTED = re.compile(r"\b(\w+)(?=,|\s*\])")


class Wrong(Exception):
    """A page or a test that does not say what it must."""


@dataclass(frozen=True)
class Promise:
    """One sentence, and where it stands."""

    page: str
    heading: str
    line: int
    sentence: str
    tests: tuple


def promises(docs, pages):
    """All promises of `pages`, which are paths below the folder `docs`, in their order."""
    found = []
    for page in pages:
        if page.split("/")[0] in PARTS and page != GENERATED:
            found += _of_page(page, (docs / page).read_text())
    return found


def _of_page(page, text):
    lines, heading, number = text.splitlines(), "", 0
    while number < len(lines):
        line, at = lines[number], number + 1
        if title := _HEADING.match(line):
            heading = title[2]
        if _COMMENT.match(line):
            comment = line
            while "-->" not in comment:
                number += 1
                if number == len(lines):
                    raise Wrong(f"{page}:{at}: the comment has no end")
                comment += " " + lines[number]
            names = comment.split("tests:")[1].split("-->")[0].replace(",", " ").split()
            if not names:
                raise Wrong(f"{page}:{at}: a promise without a test")
            yield Promise(page, heading, at, _sentence(page, at, lines), tuple(names))
        number += 1


def _sentence(page, at, lines):
    """The first sentence of the paragraph or item that ends above line `at`."""
    block = []
    for line in reversed(lines[: at - 1]):
        if not line.strip() or line.startswith(("|", "#", "```")) or line.rstrip().endswith("-->"):
            break
        block.append(_ITEM.sub("", line).strip())
        if _ITEM.match(line):
            break
    text = _LINK.sub(r"\1", " ".join(reversed(block)))
    sentence = _SENTENCE.match(text)
    if not sentence:
        raise Wrong(f"{page}:{at}: no sentence above the names of its tests")
    return re.sub(r":$", ".", sentence[0])


@dataclass
class Tests:
    """Which tests there are, and in which files."""

    python: dict  # name without test_: [path]
    rust: dict  # name: [path]
    bound: set  # Python tests that a promise must have

    def files(self, name):
        """The files with a test of that name."""
        variants = [whole for whole in self.python if whole == name or whole.startswith(name + "__")]
        return sorted({path for whole in variants for path in self.python[whole]} | set(self.rust.get(name, ())))


def tests(root):
    """All tests of the repository at `root`."""
    free = {path for pattern in WITHOUT_PROMISES for path in (root / "tests").glob(pattern)}
    python, rust, bound = {}, {}, set()
    for path in sorted([*(root / "tests").rglob("test_*.py"), *(root / "python/tests").glob("test_*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = node.name.removeprefix("test_")
                python.setdefault(name, []).append(str(path.relative_to(root)))
                if path.parent == root / "tests" and path not in free:
                    bound.add(name)
    for path in sorted(path for crate in root.glob("*/Cargo.toml") for path in crate.parent.rglob("*.rs")):
        if "target" in path.relative_to(root).parts:
            continue
        text = path.read_text()
        named = set(_ATTRIBUTE.findall(text))
        if path.parent.name == "conformance" and (listing := path.parent / "main.rs").exists():
            named |= set(_FUNCTION.findall(text)) & set(_LISTED.findall(listing.read_text()))
        for name in named:
            rust.setdefault(name, []).append(str(path.relative_to(root)))
    return Tests(python, rust, bound)


def faults(made, there):
    """What is wrong between promises and tests, a line each."""
    first = {}
    for promise in made:
        for name in promise.tests:
            place = f"docs/{promise.page}:{promise.line}"
            if name in first:
                yield f"{place}: `{name}` is named at {first[name]}, too"
            first.setdefault(name, place)
            if not there.files(name):
                yield f"{place}: there is no test `{name}`, in Python or Rust"
    for name in sorted(there.bound):
        if name not in first and name.split("__")[0] not in first:
            yield (f"{there.python[name][0]}: test_{name} belongs to no promise: name it in a <!-- tests: --> of "
                   "docs/use or docs/operate, or its file in WITHOUT_PROMISES of scripts/lib/promises.py")


def page(docs, made, there, anchor):
    """The text of the generated page. `anchor` gives the anchor of a heading."""
    count = len({name for promise in made for name in promise.tests})
    lines = [
        "# Promises and their tests",
        "",
        "<!-- scripts/docs writes this page of the comments `tests:` in the others. -->",
        "",
        f"{len(made)} promises have {count} tests. A name of `tests/` is a Python test `test_<name>` with its variants",
        "`test_<name>__<variant>`; so is one of `python/tests/`; all other names are Rust tests.",
    ]
    where = title = None
    for promise in made:
        there_is = (promise.page, promise.heading)
        if where is None or where[0] != promise.page:
            title = (docs / promise.page).read_text().splitlines()[0].removeprefix("# ")
            lines += ["", f"## {title}"]
        if where != there_is:
            target = _from_here(promise.page)
            lines += ["", f"### {promise.heading}", "", f"From [{title}]({target}#{anchor(promise.heading)}):", ""]
        where = there_is
        lines += [f"- {promise.sentence}"]
        files = {}
        for name in promise.tests:
            files.setdefault(", ".join(f"`{path}`" for path in there.files(name)), []).append(f"`{name}`")
        lines += [f"  - {paths}: {', '.join(names)}" for paths, names in files.items()]
    return "\n".join(lines) + "\n"


def _from_here(page):
    part, name = page.split("/", 1)
    return name if part == GENERATED.split("/")[0] else f"../{part}/{name}"
