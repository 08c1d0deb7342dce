"""scripts/docs: the pages of docs/ are whole, and what it refuses of made-up ones."""

import re
import subprocess

import pytest
from conftest import REPOSITORY

SCRIPT = REPOSITORY / "scripts/docs"
SUMMARY = "# Summary\n\n- [A](use/a.md)\n- [Promises](use/promises.md)\n- [B](internals/b.md)\n"
PAGE = """\
# A

## What counts

A contribution counts once. That is all.
<!-- tests: exactly_once, in_rust -->

- `stop`: nobody goes
  on.
  <!-- tests: another -->

See [below](#what-counts), [B](../internals/b.md#two-words) and `[no](link.md)`.
"""
PYTHON = "def test_exactly_once():\n    pass\n\n\ndef test_another__with_more():\n    pass\n"
RUST = "#[test]\n#[ignore]\nfn in_rust() {}\n"


def docs(root, *words):
    """(exit status, what it says)."""
    done = subprocess.run(
        [SCRIPT, "--root", root, "--no-book", *words], capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


class Tree:
    """A repository with two pages, and one test in Python and in Rust each."""

    def __init__(self, root):
        self.root = root
        subprocess.run(["git", "init", "-q", root], check=True, timeout=300)
        self.write("docs/SUMMARY.md", SUMMARY)
        self.write("docs/use/a.md", PAGE)
        self.write("docs/internals/b.md", "# B\n\n## Two words\n")
        self.write("tests/test_one.py", PYTHON)
        self.write("one/Cargo.toml", "")
        self.write("one/src/lib.rs", RUST)

    def write(self, path, text):
        """A file."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def replace(self, path, old, new):
        """Another text in its place."""
        text = (self.root / path).read_text()
        assert old in text
        self.write(path, text.replace(old, new))

    def passes(self, *words):
        """It is whole."""
        status, said = docs(self.root, *words)
        assert status == 0, said

    def refuses(self, *parts):
        """It is not, and all of these are said."""
        status, said = docs(self.root)
        assert status == 1, said
        for part in parts:
            assert part in said, said


@pytest.fixture
def tree(tmp_path):
    """A tree that is whole."""
    tree = Tree(tmp_path)
    tree.passes()
    return tree


def test_the_docs_are_whole():
    status, said = docs(REPOSITORY, "--check")
    assert status == 0, said


def test_the_page_of_promises_has_sentences_tests_and_files(tree):
    text = (tree.root / "docs/use/promises.md").read_text()
    assert "2 promises have 3 tests" in text
    assert "## A\n\n### What counts\n\nFrom [A](a.md#what-counts):\n\n- A contribution counts once.\n" in text
    assert "  - `tests/test_one.py`: `exactly_once`\n  - `one/src/lib.rs`: `in_rust`\n" in text
    assert "- `stop`: nobody goes on.\n  - `tests/test_one.py`: `another`\n" in text
    tree.passes("--check")


def test_a_page_of_promises_that_is_old_is_refused(tree):
    tree.replace("docs/use/a.md", "counts once", "counts twice")
    status, said = docs(tree.root, "--check")
    assert status == 1 and "docs/use/promises.md is not up to date" in said
    tree.passes()
    tree.passes("--check")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("exactly_once, in_rust", "", "docs/use/a.md:6: a promise without a test"),
        ("exactly_once, in_rust", "exactly_once, no_more", "docs/use/a.md:6: there is no test `no_more`"),
        ("tests: another", "tests: another, in_rust", "`in_rust` is named at docs/use/a.md:6, too"),
        ("A contribution counts once. That is all.\n", "", "docs/use/a.md:5: no sentence above"),
    ],
)
def test_a_promise_without_its_test_is_refused(tree, old, new, said):
    tree.replace("docs/use/a.md", old, new)
    tree.refuses(said)


def test_a_comment_without_an_end_is_refused(tree):
    tree.write("docs/use/a.md", "# A\n\nA promise.\n<!-- tests: exactly_once\n")
    tree.refuses("docs/use/a.md:4: the comment has no end")


def test_a_test_of_no_promise_is_refused(tree):
    tree.write("tests/test_two.py", "def test_more():\n    pass\n")
    tree.refuses("tests/test_two.py: test_more belongs to no promise")
    (tree.root / "tests/test_two.py").rename(tree.root / "tests/test_bad_words.py")
    tree.passes()


def test_a_function_that_is_no_test_is_refused(tree):
    tree.write("one/src/lib.rs", "fn in_rust() {}\n")
    tree.refuses("there is no test `in_rust`")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[x](c.md)", "c.md leads nowhere"),
        ("[x\ny](c.md)", "c.md leads nowhere"),
        ("[`x`](c.md)", "c.md leads nowhere"),
        ("![x](c.png)", "c.png leads nowhere"),
        ("[x](#nothing)", "#nothing: there is no such heading"),
        ("[x](../internals/b.md#two)", "there is no such heading"),
        ("[x](../../one/Cargo.toml)", "leads out of the book"),
        ("docs/use/c.md", "there is no docs/use/c.md"),
        ("`lm/client.rs`", "there is no libmodelio/src/client.rs"),
        ("`ps-backend/src/{lib,none}.rs`", "there is no ps-backend/src/none.rs"),
        ("x " * 70, "columns, 120 at most"),
    ],
)
def test_what_leads_nowhere_is_refused(tree, text, said):
    tree.write("docs/use/a.md", PAGE + f"\n{text}\n")
    tree.refuses(said)


@pytest.mark.parametrize("text", ["[x](https://example.com/c.md)", "`[x](c.md)`", "```\n[x](c.md)\n```", "| " + "x " * 70])
def test_what_is_no_link_passes(tree, text):
    tree.write("docs/use/a.md", PAGE + f"\n{text}\n")
    tree.passes()


def test_other_files_may_lead_everywhere_and_name_what_is_there(tree):
    tree.write("README.md", "[x](docs/use/a.md#what-counts) [y](one/src/lib.rs)\n")
    tree.passes()
    tree.write("README.md", "[x](docs/use/a.md#what)\n")
    tree.refuses("README.md:1: docs/use/a.md#what: there is no such heading")
    tree.write("README.md", "")
    tree.write("one/src/lib.rs", RUST + "// docs/use/c.md\n")
    tree.refuses("one/src/lib.rs:4: there is no docs/use/c.md")


def test_a_page_that_the_summary_lacks_is_refused(tree):
    tree.write("docs/operate/c.md", "# C\n")
    tree.refuses("docs/SUMMARY.md: operate/c.md is listed 0 times")


def test_a_folder_with_too_many_files_is_refused(tree):
    for number in range(16):
        tree.write(f"docs/figures/{number}.csv", "")
    tree.refuses("docs/figures: 16 files, 15 at most")


def test_a_page_that_is_too_long_is_refused(tree):
    tree.write("docs/SUMMARY.md", SUMMARY + "- [S](use/semantics.md)\n- [P](use/performance.md)\n")
    tree.write("docs/use/semantics.md", "# S\n" + "a\n" * 5000)
    tree.write("docs/use/performance.md", "# P\n" * 333)
    tree.refuses("docs/use/semantics.md: 5002 words, 5000 at most", "docs/use/performance.md: 333 lines, 332 at most")


def test_unsafe_code_is_where_the_architecture_says():
    section = (REPOSITORY / "docs/internals/architecture.md").read_text().split("## Unsafe code")[1]
    allowed, folder = set(), None
    for row in re.findall(r"^\| ?(.*?) ?\| (`.*?) \|", section.split("No other product code")[0], re.MULTILINE):
        folder = row[0].strip("`") or folder
        for name in re.findall(r"`(.+?)`", row[1]):
            before, _, rest = name.partition("{")
            choices, _, behind = rest.partition("}")
            allowed |= {f"{folder}{before}{choice}{behind}" for choice in choices.split(",")}
    holding = set()
    for path in REPOSITORY.glob("*/src/**/*.rs"):
        code = re.sub(r"//.*", "", path.read_text().split("#[cfg(test)]")[0])
        if "tests" not in path.with_suffix("").parts and re.search(r"\bunsafe\b", code):
            holding.add(path.relative_to(REPOSITORY).as_posix())
    folders = tuple(name for name in allowed if name.endswith("/"))
    assert {name for name in holding if not name.startswith(folders)} == allowed - set(folders)


def test_usage_is_told():
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "--no-book" in done.stdout
