"""scripts/lines: what counts as a line of the product, in crates made up for it."""

import re
import subprocess

import pytest
from conftest import REPOSITORY, ran

SCRIPT = REPOSITORY / "scripts/lines"


def lines(root, *arguments):
    """{row: its numbers} of what the script prints."""
    done = ran([SCRIPT, "--root", root, *arguments])
    assert done.returncode == 0, done.stderr
    rows = (re.split(r"  +", line) for line in done.stdout.splitlines())
    return {row[0]: row[1:] for row in rows if row[0]}


@pytest.fixture
def crate(tmp_path):
    """Writes files of a crate `one`; gives the directory above it."""

    def write(**sources):
        (tmp_path / "one/src").mkdir(parents=True, exist_ok=True)
        (tmp_path / "one/Cargo.toml").write_text('[package]\nname = "one"\n')
        for name, text in {"lib": "", **sources}.items():
            path = tmp_path / "one/src" / f"{name.replace('__', '/')}.rs"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def counted(crate, text):
    """How many lines of a file `it.rs` count."""
    return int(lines(crate(it=text))["one::it"][0])


TEXTS = [
    ("//! What it is.\n\n/// Does.\nfn f() {} // there\n", 1),
    ("/* one\n /* two */\n fn hidden() {}\n*/ fn f() {}\nfn g() {\n    /* a\n    comment */\n}\n", 3),
    ('const A: &str = "// no comment";\nconst B: &str = "/*";\nfn f() {}\n// */\n', 3),
    ('const A: &str = r#"" // "#;\n/* " */\nconst B: u8 = 1;\nconst C: &str = "a\n\n// of the string\n";\n', 5),
    ("const A: char = '\"'; // \"\nconst B: char = '\\'';\nfn f<'a>(x: &'a str) {} // '\n", 3),
    ("const A: &[u8] = b\"\\\"//\";\nconst B: u8 = b'\\\\';\n", 2),
]


def test_comments_and_blank_lines_do_not_count(crate):
    for text, count in TEXTS:
        assert counted(crate, text) == count, text


def test_what_is_there_for_tests_does_not_count(crate):
    tests = [
        "#[cfg(test)]\nmod tests {\n    fn f() {}\n}\n", "#[cfg(all(test, unix))]\npub(crate) mod more {\n    fn f() {}\n}\n",
        "#[test]\n#[should_panic]\nfn t() {\n    loop {}\n}\n", "#[cfg(test)]\nuse a::{b, c};\n",
        "#[cfg(test)]\nconst A: B = B {\n    c: [1; 2],\n};\n", "#[cfg(test)]\nimpl A {\n    fn f(x: [u8; 3]) {}\n}\n",
        "#[cfg(test)]\nconst fn f<A, B>() {\n}\n", "#[cfg(test)]\nmacro_rules! m {\n    () => {};\n}\n",
    ]  # fmt: skip
    assert counted(crate, "fn product() {\n}\n".join([*tests, ""])) == 2 * len(tests)
    for product in ("#[cfg(not(test))]", "#[cfg(any(test, unix))]", '#[cfg(feature = "test")]'):
        assert counted(crate, product + "\nfn f() {\n}\n") == 3, product


def test_test_only_parts_of_an_item_do_not_count(crate):
    assert counted(crate, "struct A {\n    #[cfg(test)]\n    a: Vec<B<u8, u8>>,\n    b: u8,\n}\n") == 3
    assert counted(crate, "fn f() {\n    #[cfg(test)]\n    g(|| {\n    });\n    h();\n}\n") == 3
    arms = "fn f() {\n    match a {\n        #[cfg(test)]\n        A => {\n        },\n        B => {}\n    }\n}\n"
    assert counted(crate, arms) == 5


def test_files_of_tests_do_not_count(crate):
    root = crate(
        lib="mod a;\n#[cfg(test)]\nmod strategies;\n",
        a="#[cfg(test)]\nmod simulator;\n#[cfg(test)]\nmod tests;\nfn f() {}\n",
        a__tests="fn t() {}\n",
        a__tests__more="fn t() {}\n",
        a__simulator__mod="fn t() {}\n",
        a__simulator__clock="fn t() {}\n",
        strategies="fn t() {}\n",
    )
    for directory in ("tests", "benches", "examples"):
        (root / "one" / directory).mkdir()
        (root / "one" / directory / "x.rs").write_text("fn main() {}\n")
    found = lines(root)
    assert found["one"] == ["2"]
    assert found["one::(root)"] == ["1"] and found["one::a"] == ["1"]
    assert "one::strategies" not in found
    assert found["files"] == ["2"]


def test_long_files_are_listed_and_the_median_is_of_all_lines(crate):
    found = lines(crate(lib="//\n" * 3, a="//\n" * 10, b="\n" * 501))
    assert found["one/src/b.rs"] == ["501"]
    assert "one/src/a.rs" not in found
    assert found["median length of a file"] == ["10"]
    assert found["files above 500 lines"] == ["1"]


def test_a_revision_and_the_difference_from_it(crate):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True, timeout=300)

    root = crate(a="fn f() {}\n", b="fn g() {}\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    crate(a="fn f() {}\nfn g() {}\nfn h() {}\n", c="fn i() {}\n")
    (root / "one/src/b.rs").unlink()
    assert lines(root, "HEAD")["one"] == ["2"]
    found = lines(root, "--against", "HEAD")
    assert found["one"] == found["all"] == ["4", "2", "+2"] and found["one::a"] == ["3", "1", "+2"]
    assert found["one::b"] == ["0", "1", "-1"] and found["one::c"] == ["1", "0", "+1"]
    assert lines(root, "HEAD", "--against", "HEAD")["all"] == ["2", "2", "+0"]


def test_a_source_that_is_none_is_named(crate):
    root = crate(a='const A: &str = "no end;\n')
    done = ran([SCRIPT, "--root", root])
    assert done.returncode == 1 and "one/src/a.rs: line 1: a string has no end" in done.stderr
