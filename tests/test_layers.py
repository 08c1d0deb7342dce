"""scripts/layers: which arrows between the files of made-up crates it sees, and which it refuses."""

import textwrap

import pytest
from conftest import REPOSITORY, ran

SCRIPT = REPOSITORY / "scripts/layers"
LOW_AND_HIGH = '[one]\nlayers = ["low", "high", "self"]'


class Tree:
    """A directory of crates with a list of layers."""

    def __init__(self, root):
        self.root = root

    def crate(self, sources, name="one", manifest=""):
        """A crate of these files, by their paths below src; lib.rs declares all modules at its top."""
        tops = dict.fromkeys(path.split("/")[0].removesuffix(".rs") for path in sources)
        declared = "".join(f"mod {top};\n" for top in tops if top not in ("lib", "main"))
        root = {} if {"lib.rs", "main.rs"} & sources.keys() else {"lib.rs": declared}
        self.write(f"{name}/Cargo.toml", f'[package]\nname = "{name}"\n{manifest}')
        for path, text in {**root, **sources}.items():
            self.write(f"{name}/src/{path}", textwrap.dedent(text))

    def write(self, path, text):
        """A file."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def layers(self, *tables, crates=("one",)):
        """The list, of tables as text."""
        names = ", ".join(f'"{crate}"' for crate in crates)
        self.write("scripts/lib/layers.toml", "\n".join([f"crates = [{names}]", *tables]))

    def check(self, *arguments):
        """(exit status, what it prints, errors last)."""
        command = [SCRIPT, "--root", self.root, *arguments]
        done = ran(command)
        return done.returncode, done.stdout + done.stderr

    def passes(self, *arguments):
        """Whether nothing is wrong."""
        status, words = self.check(*arguments)
        assert status == 0, words

    def refuses(self, *words):
        """Whether the check fails and says these words."""
        status, said = self.check()
        assert status == 1, said
        for word in words:
            assert word in said, said


@pytest.fixture
def tree(tmp_path):
    tree = Tree(tmp_path)
    tree.layers(LOW_AND_HIGH)
    return tree


ARROWS = """
use crate::high::Thing;
use crate::{high::Thing};
use crate::{high::{Other, Thing as It}};
use super::{high::Thing};
use super::high::{self, Thing};
use super::high; fn f() { high::Thing; }
use crate::high as up; fn f() { up::Thing; }
use crate::high::*; fn f(t: Thing) {}
use crate::*; fn f() { high::Thing; }
pub(crate) use super::high::Thing;
fn f(x: crate::high::Thing) {}
fn f() -> Result<(), <super::high::Thing as A>::B> {}
mod inner { fn f() { super::super::high::Thing; } }
mod inner { use super::Thing; } use crate::high::Thing;
fn f() { use crate::high::Thing::*; }
fn f() { 'a'; "//"; crate::high::Thing }
macro_rules! m { () => { $crate::high::Thing } }
#[cfg(not(test))] use crate::high::Thing;
#[cfg(feature = "x")] use crate::high::Thing;
#[arg(value_parser = crate::high::Thing::parse)] struct A;
""".strip().splitlines()
NO_ARROWS = """
// use crate::high::Thing;
/// [`crate::high::Thing`]
const A: &str = "crate::high::Thing"; const B: &str = r#"use crate::high::Thing;"#;
pub(in crate::low) struct A;
#[cfg(test)] use crate::high::Thing;
#[cfg(test)] mod tests { use crate::high::Thing; }
#[cfg(all(test, unix))] mod tests { use crate::high::Thing; }
#[test] fn t() { crate::high::Thing; }
use std::high::Thing; use ::high::Thing; fn f() { other.high::<Thing>() }
""".strip().splitlines()


def snippets(tree, codes):
    """A crate with a file of each of these, all of them below `high`; the names of the files."""
    names = [f"low{number}" for number in range(len(codes))]
    tree.layers(f"[one]\nlayers = [{names}, 'high', 'self']")
    files = {f"{name}.rs": f"{code}\n" for name, code in zip(names, codes)}
    tree.crate({**files, "high.rs": "pub struct Thing;\npub struct Other;"})
    return names


def test_an_arrow_upwards_is_refused(tree):
    names = snippets(tree, ARROWS)
    tree.refuses(*(f"one/src/{name}.rs -> one/src/high.rs: " for name in names), "(in one, low0 is below high)")
    tree.passes("--circles")


def test_what_is_no_arrow_passes(tree):
    snippets(tree, NO_ARROWS)
    tree.passes()


def test_arrows_down_and_within_a_layer_pass(tree):
    tree.layers('[one]\nlayers = [["a", "b"], "c", "self"]')
    tree.crate({"a.rs": "use crate::b::B;", "b.rs": "pub struct B;", "c.rs": "use crate::{a, b::B}; fn f() { a::f() }"})
    tree.passes()


def test_files_of_tests_have_no_arrows(tree):
    tree.crate({
        "low.rs": "#[cfg(test)]\nmod tests;\n#[cfg(test)]\nmod sim;\npub struct Low;",
        "low/tests.rs": "mod more; use crate::high::Thing;",
        "low/tests/more.rs": "use crate::high::Thing;",
        "low/sim.rs": "use crate::high::Thing;",
        "high.rs": "use crate::low::Low; pub struct Thing;",
    })
    tree.passes()


def test_a_circle_is_refused_whatever_its_layers(tree):
    tree.layers('[one]\nlayers = [["a", "b", "c", "d"], "self"]')
    tree.crate({
        "a.rs": "use crate::b::B; pub struct A;",
        "b.rs": "pub struct B; fn f() { super::c::f() }",
        "c.rs": "use crate::a::A; pub fn f() {}",
        "d.rs": "use crate::a::A;",
    })
    tree.refuses(
        "one: 3 files use each other in a circle",
        "one/src/a.rs -> one/src/b.rs: B",
        "one/src/b.rs -> one/src/c.rs: f",
        "one/src/c.rs -> one/src/a.rs: A",
    )
    status, said = tree.check("--circles")
    assert status == 1 and "d.rs" not in said


def test_a_child_is_a_part_of_its_parent(tree):
    tree.layers('[one]\nlayers = ["a", "self"]', '["one::a"]\nlayers = ["b", "self"]')
    for use in ("use b::B;", "pub use b::B; fn g(b: B) {}", "fn g() { b::f() }"):
        tree.crate({
            "a.rs": f"mod b; pub struct A; pub struct Other; {use}",
            "a/b.rs": "mod c; use super::A; impl A {} pub struct B; pub fn f() { c::f() }",
            "a/b/c.rs": "use crate::a::{A, b::B}; impl A {} fn f(b: super::B, o: super::super::Other) {}",
        })
        tree.passes()


def test_children_of_one_parent_are_no_parts_of_each_other(tree):
    tree.layers('[one]\nlayers = ["a", "self"]', '["one::a"]\nlayers = ["b", "c", "self"]')
    sources = {"a.rs": "mod b; mod c; pub struct A;", "a/c.rs": "use super::A; pub struct C;"}
    tree.crate({**sources, "a/b.rs": "use super::c::C;"})
    tree.refuses("one/src/a/b.rs -> one/src/a/c.rs: C (in one::a, b is below c)")
    tree.crate({**sources, "a/b.rs": "use super::c::C; pub struct B;", "a/c.rs": "use super::b::B; pub struct C;"})
    tree.refuses("one: 2 files use each other in a circle")


def test_a_parent_that_uses_what_it_re_exports_is_judged(tree):
    tree.layers('[one]\nlayers = ["a", "self"]', '["one::a"]\nlayers = ["self", "b"]')
    for code in ("fn g(b: B) {}", "fn g() { f() }", "fn g() { b::f() }", "fn g() { B::new() }"):
        sources = {"a.rs": f"mod b; pub use b::{{B, f}}; pub struct A; {code}"}
        tree.crate({**sources, "a/b.rs": "use super::A; pub struct B; pub fn f() {}"})
        tree.refuses("one/src/a.rs -> one/src/a/b.rs: ", "(in one::a, self is below b)")


def test_a_circle_by_way_of_a_child_is_refused(tree):
    tree.layers('[one]\nlayers = [["a", "x"], "self"]')
    tree.crate({
        "a.rs": "mod b; use b::B; pub struct A;",
        "a/b.rs": "use crate::x::X; pub struct B;",
        "x.rs": "use crate::a::A; pub struct X;",
    })
    tree.refuses("one: 3 files use each other in a circle")


def test_a_module_that_uses_the_file_of_its_crate_is_judged(tree):
    tree.layers('[one]\nlayers = ["a", "self"]')
    tree.crate({"lib.rs": "mod a; pub struct Root;", "a.rs": "use crate::Root;"})
    tree.refuses("one/src/a.rs -> one/src/lib.rs: Root (in one, a is below self)")
    tree.crate({"lib.rs": "mod a; pub struct Root; fn f() { a::f() }", "a.rs": "use crate::Root; pub fn f() {}"})
    tree.refuses("one: 2 files use each other in a circle")


def test_declarations_and_re_exports_of_a_parent_are_no_arrows(tree):
    tree.layers('[one]\nlayers = ["a", "self"]', '["one::a"]\nlayers = ["self", ["b", "c"]]')
    tree.crate({
        "a/mod.rs": "mod b; mod c; pub use b::B; pub use self::c::C; pub(crate) use b::f; pub struct A;",
        "a/b.rs": "use super::{A, C}; pub struct B; pub fn f() {}",
        "a/c.rs": "pub struct C; impl super::A {}",
    })
    tree.passes()


def test_a_re_export_leads_to_the_file_that_defines(tree):
    sources = {
        "low.rs": "use crate::high::{Thing, Made}; pub struct Low;",
        "high/mod.rs": "mod thing; mod other; pub use thing::{Inner as Thing, Made}; pub use other::*;",
        "high/thing.rs": "pub struct Inner; id!(Made);",
        "high/other.rs": "pub fn other() {}",
    }
    tree.crate(sources)
    tree.refuses("one/src/low.rs -> one/src/high/thing.rs: Inner, Made")
    tree.crate({**sources, "low.rs": "use crate::high; fn f() { high::other() }"})
    tree.refuses("one/src/low.rs -> one/src/high/other.rs: other")
    # A lower module's item may come by way of a higher module.
    tree.crate({**sources, "low.rs": "use crate::high::Low; pub mod base;", "low/base.rs": "pub struct Low;"})
    tree.write("one/src/high/mod.rs", "pub use crate::low::base::Low; mod thing; mod other;")
    tree.passes()


def test_layers_within_a_module(tree):
    tree.layers('[one]\nlayers = ["client", "self"]', '["one::client"]\nlayers = ["core", "paths", ["job", "self"]]')
    sources = {
        "client/mod.rs": "mod core; mod job; mod paths; fn f() { job::f() }",
        "client/core.rs": "pub struct Core;",
        "client/paths/mod.rs": "mod deep; pub struct Paths;",
        "client/paths/deep.rs": "use crate::client::core::Core;",
        "client/job.rs": "use super::{core::Core, paths::Paths}; pub fn f() {}",
    }
    tree.crate(sources)
    tree.passes()
    tree.crate({**sources, "client/paths/deep.rs": "use crate::client::job::f;"})
    tree.refuses("one/src/client/paths/deep.rs -> one/src/client/job.rs: f (in one::client, paths is below job)")


def test_a_module_may_be_in_another_layer_than_its_parent(tree):
    tree.layers('[one]\nlayers = ["a::low", "b", "a", "self"]')
    sources = {"a.rs": "pub mod low; use crate::b::B;", "b.rs": "use crate::a::low::f; pub struct B;"}
    tree.crate({**sources, "a/low.rs": "pub fn f() {}"})
    tree.passes()
    tree.crate({"a.rs": "pub mod low;", "a/low.rs": "use crate::b::B;", "b.rs": "pub struct B;"})
    tree.refuses("a::low is below b")


def test_an_arrow_that_is_allowed_passes_while_it_is_there(tree):
    tree.layers(LOW_AND_HIGH + '\nallow = ["low -> high"]')
    tree.crate({"low.rs": "use crate::high::Thing;", "high.rs": "pub struct Thing;"})
    tree.passes()
    tree.crate({"low.rs": "", "high.rs": ""})
    tree.refuses("one allows low -> high, and no file needs that")


def test_every_file_is_in_a_layer_and_every_entry_has_a_file(tree):
    tree.crate({"low.rs": "", "high.rs": "", "new.rs": ""})
    tree.refuses("one/src/new.rs is in no layer of one")
    tree.crate({"low.rs": "", "lib.rs": "mod low;"})
    tree.refuses("one has the module high, and no file is in it")
    tree.layers(LOW_AND_HIGH, '["one::gone"]\nlayers = ["a"]')
    tree.refuses("one::gone is no module")


def test_crates_use_each_other_in_order(tree):
    tables = '[one]\nlayers = ["a", "self"]', '["two-b"]\nlayers = ["b", "self"]'
    tree.layers(*tables, crates=("one", "two-b"))
    dependency = '[dependencies]\n{} = {{ path = "../x" }}\n'
    tree.crate({"a.rs": "pub struct A;"})
    tree.crate({"b.rs": "use one::a::A;"}, name="two-b", manifest=dependency.format("one"))
    tree.passes()
    tree.layers(*tables, crates=("two-b", "one"))
    tree.refuses("two-b/src/b.rs -> one: A (two-b is below one)", "two-b/Cargo.toml -> one (two-b is below one)")


def test_a_program_beside_a_library_uses_it(tree):
    tree.layers('[one]\nlayers = ["self", "a"]')
    tree.crate({"lib.rs": "pub mod a;", "a.rs": "pub fn f() {}", "main.rs": "use one::a::f;"})
    tree.refuses("one/src/main.rs -> one/src/a.rs: f (in one, self is below a)")


def test_a_list_that_is_wrong_is_refused(tree):
    tree.crate({"low.rs": ""})
    for table, complaint in [
        ("[one]\nlayers = ['low', 'low']", "one has low twice"),
        ("[one]\nlayer = ['low']", "one has layer; there are layers and allow"),
        ("[one]\nallow = ['low']", "which is not of the form"),
        ("[other]\nlayers = ['low']", "other is of no crate"),
        ("['one::low']\nlayers = ['self']", "one has no layers"),
        ("[one", "layers.toml: "),
    ]:
        tree.layers(table)
        tree.refuses(complaint)


def test_a_module_without_a_file_is_named(tree):
    tree.crate({"low.rs": "mod gone;", "high.rs": ""})
    tree.refuses("one/src/low.rs: there is no file of its module gone")
