"""The modules of a Rust crate and what each file takes from which other, for scripts/layers.

Names are followed to the file that defines them: through `use`, with another name or for everything there is (`*`), and
through re-exports. What a macro defines counts as defined in the module that it is asked of. What is only there for tests
is left out. Methods are not seen: a call of one names no file.
"""

from dataclasses import dataclass, field
from pathlib import Path

from machine import Failed
from rust_source import IDENT, LIFETIME, STRING, NotRust, attribute, closing, is_at, tokens, without_tests

_ITEMS = {"fn", "struct", "enum", "union", "trait", "type", "const", "static"}
_PATH_STARTS = {"crate", "self", "super"}
# Words that are no names; after some of them a path may begin.
_WORDS = {
    "as", "async", "await", "break", "const", "continue", "dyn", "else", "enum", "extern", "false", "fn", "for", "if",
    "impl", "in", "let", "loop", "match", "mod", "move", "mut", "pub", "ref", "return", "static", "struct", "trait",
    "true", "type", "unsafe", "use", "where", "while", "Self",
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    """A `use`: the path, the name that it gets here (None for `*`), and whether others may take it from here."""

    path: tuple
    name: str | None
    shared: bool


@dataclass(eq=False)
class Module:
    """A module, in a file of its own or within one."""

    file: Path
    path: tuple
    parent: "Module | None"
    crate: "Crate"
    modules: dict = field(default_factory=dict)
    items: set = field(default_factory=set)
    imports: list = field(default_factory=list)
    paths: set = field(default_factory=set)

    def root(self):
        """The outermost module."""
        return self.parent.root() if self.parent else self

    def around(self):
        """The modules that it is within, from the closest to the outermost."""
        return [self.parent, *self.parent.around()] if self.parent else []

    def is_below(self, other):
        """Whether `other` is this module, or has it within."""
        return self is other or (self.parent is not None and self.parent.is_below(other))


@dataclass
class Crate:
    """A crate below the directory `root`: every module that is compiled into it, but for tests."""

    name: str
    root: Path
    modules: list = field(default_factory=list)

    def __post_init__(self):
        self.roots = {}
        for kind in ("lib", "main"):
            path = self.root / self.name / "src" / f"{kind}.rs"
            if path.exists():
                self.roots[kind] = self._read(path, (), None)
        if not self.roots:
            raise Failed(f"{self.name} has neither src/lib.rs nor src/main.rs")

    @property
    def ident(self):
        """Its name in paths."""
        return self.name.replace("-", "_")

    def _read(self, file, path, parent):
        try:
            code, _ = without_tests(tokens(file.read_text()))
        except NotRust as error:
            raise Failed(f"{file.relative_to(self.root)}: {error}") from error
        home = file.parent if file.stem in ("lib", "main", "mod") else file.with_suffix("")
        return self._module(code, file, path, parent, home)

    def _module(self, code, file, path, parent, home):
        module = Module(file.relative_to(self.root), path, parent, self)
        self.modules.append(module)
        at = depth = 0
        elsewhere = None
        while at < len(code):
            token, following = code[at], code[at + 1].text if at + 1 < len(code) else ""
            if (found := attribute(code, at)) and is_at(code, found[0] + 1, "path", "="):
                elsewhere, at = code[found[0] + 3].text.strip('"'), found[1] + 1
                continue
            if token.kind in (STRING, LIFETIME):
                at += 1
                continue
            if token.text == "mod" and is_at(code, at + 2, ";"):
                inner = self._file(file, home, following, elsewhere)
                module.modules[following] = self._read(inner, (*path, following), module)
                elsewhere, at = None, at + 3
            elif token.text == "mod" and is_at(code, at + 2, "{"):
                end = closing(code, at + 2)
                within = code[at + 3 : end]
                module.modules[following] = self._module(within, file, (*path, following), module, home / following)
                at = end + 1
            elif token.text == "use" and following != "<":
                end = next(index for index in range(at, len(code)) if code[index].text == ";")
                shared = at > 0 and (code[at - 1].text == "pub" or is_at(code, at - 1, ")"))
                module.imports += [Import(*found, shared) for found in _use(code[at + 1 : end])]
                at = end + 1
            elif token.text == "pub" and following == "(" and _is_visibility(code, at + 2):
                at = closing(code, at + 1) + 1
            elif token.text == "macro_rules":
                if depth == 0:
                    module.items.add(code[at + 2].text)
                at += 3
            elif token.text in _ITEMS and token.kind == IDENT:
                if depth == 0 and code[at + 1].kind == IDENT and following not in _WORDS:
                    module.items.add(following)
                at += 2 if code[at + 1].kind == IDENT and following not in _WORDS else 1
            elif token.kind == IDENT and token.text not in _WORDS:
                at = self._path(module, code, at)
            else:
                depth += (token.text in ("{", "(", "[")) - (token.text in ("}", ")", "]"))
                at += 1
        return module

    def _file(self, file, home, name, elsewhere):
        if elsewhere:
            return file.parent / elsewhere
        for path in (home / f"{name}.rs", home / name / "mod.rs"):
            if path.exists():
                return path
        raise Failed(f"{file.relative_to(self.root)}: there is no file of its module {name}")

    @staticmethod
    def _path(module, code, at):
        """Notes the path that begins there; gives the index after it."""
        before = code[at - 1].text if at and code[at - 1].kind != STRING else ""
        path = [code[at].text]
        end = at + 1
        while is_at(code, end, "::") and end + 1 < len(code) and code[end + 1].kind == IDENT:
            path.append(code[end + 1].text)
            end += 2
        following = code[end].text if end < len(code) else ""
        if before in (".", "::") or (len(path) == 1 and (following == ":" or path[0] in _PATH_STARTS)):
            return end
        # A name in small letters could be a variable, unless it is called.
        if len(path) > 1 or path[0] != path[0].lower() or following in ("(", "!", "::"):
            module.paths.add(tuple(path))
        return end


def _is_visibility(code, at):
    return code[at].text in ("crate", "super", "self", "in")


def _use(code):
    """[(path, name or None)] of a `use`, without that word and the semicolon."""
    found = []

    def tree(at, prefix):
        path = list(prefix)
        if is_at(code, at, "::"):
            # From the outside: `use ::name`.
            path.append("")
            at += 1
        while at < len(code):
            text = code[at].text
            if text == "{":
                end = closing(code, at)
                at += 1
                while at < end:
                    at = tree(at, path)
                    if is_at(code, at, ","):
                        at += 1
                return end + 1
            if text == "*":
                found.append((tuple(path), None))
                return at + 1
            if text == "self" and path:
                at += 1
            else:
                path.append(text)
                at += 1
            if not is_at(code, at, "::"):
                name = path[-1]
                if is_at(code, at, "as"):
                    name, at = code[at + 1].text, at + 2
                found.append((tuple(path), name))
                return at
            at += 1
        return at

    tree(0, ())
    return found


@dataclass(frozen=True)
class Target:
    """What a path leads to: something that a module defines, or the module itself (no name), or another crate."""

    module: Module | None
    name: str | None
    crate: str | None = None


class Names:
    """Follows paths. `crates` are all there are, by the names that they have in paths."""

    def __init__(self, crates):
        self.crates = {crate.ident: crate for crate in crates}

    def follow(self, module, path, seen=frozenset()):
        """The Targets of a path that a module's code has; none if it leads out of all crates."""
        first, rest = path[0], path[1:]
        if first == "crate":
            return self._within(module.root(), rest, seen, True)
        if first == "self":
            return self._within(module, rest, seen, True)
        if first == "super":
            # A path with more of them than there are modules does not compile.
            return self.follow(module.parent, ("self", *rest), seen) if module.parent else []
        if found := self._within(module, path, seen, False):
            return found
        crate = self.crates.get(first)
        if crate is None:
            return []
        library = crate.roots.get("lib")
        if crate is module.crate and library and module.root() is not library:
            return self._within(library, rest, seen, True)
        return [Target(None, rest[-1] if rest else None, crate.name)] if crate is not module.crate else []

    def _within(self, module, path, seen, certain):
        """Follows a path from a module; where it is `certain` to lead somewhere there, an unknown name is its own."""
        if not path:
            return [Target(module, None)]
        name, rest = path[0], path[1:]
        if name == "super" and module.parent:
            return self._within(module.parent, rest, seen, certain)
        if rest and name in module.modules:
            return self._within(module.modules[name], rest, seen, True)
        found = [Target(module, name)] if name in module.items else []
        if name in module.modules:
            found.append(Target(module.modules[name], None))
        if (module, name) not in seen:
            seen = seen | {(module, name)}
            for one in module.imports:
                if one.name == name:
                    found += self._follow_import(module, one.path, rest, seen)
            if not any(target.name or target.crate for target in found):
                found += self._through_globs(module, path, seen)
        return found or ([Target(module, name)] if certain else [])

    def _follow_import(self, module, path, rest, seen):
        return self.follow(module, path + rest if path else rest, seen)

    def _through_globs(self, module, path, seen):
        found = []
        for one in module.imports:
            if one.name is None and (not one.path or one.path[0] != ""):
                for target in self.follow(module, one.path, seen) if one.path else []:
                    if target.module and target.name is None and target.module is not module:
                        found += self._within(target.module, path, seen, False)
        return found

    def used(self, module):
        """[(Target, name)] of everything that the module's code takes from modules and crates, itself included."""
        found = []
        for one in module.imports:
            for target in self.follow(module, one.path) if one.path else []:
                # What a parent shows of its children it does not use by that.
                shown = one.shared and target.module and target.module.is_below(module)
                if not shown:
                    found.append(target)
        for path in module.paths:
            if path[0] in _WORDS:
                continue
            found += self.follow(module, path)
        # A module by itself is no more than a way to what is in it.
        return [target for target in found if target.crate or target.name is not None]


@dataclass
class Arrows:
    """What files take: {(file, file): names} within a crate, and {(file, crate): names} of other crates."""

    within: dict
    without: dict


def arrows(crate, names):
    """The Arrows of a crate.

    A module is an inner part of those that it is within: what it takes from their files is no arrow. The crate's own file
    is not among these, for what is shared by a crate's modules belongs below them.
    """
    within, without = {}, {}
    for module in crate.modules:
        own = {module.file, *(outer.file for outer in module.around() if outer.parent)}
        for target in names.used(module):
            if target.crate:
                without.setdefault((module.file, target.crate), set()).add(target.name or target.crate)
            elif target.module.file not in own:
                within.setdefault((module.file, target.module.file), set()).add(target.name)
    return Arrows(within, without)


def circles(pairs):
    """The circles among (from, to): lists of those that are reached from each other, in order (Tarjan)."""
    following = {}
    for start, end in pairs:
        following.setdefault(start, []).append(end)
    number, low, stack, on_stack, found = {}, {}, [], set(), []
    for start in sorted(following):
        if start in number:
            continue
        work = [(start, iter(sorted(following[start])))]
        number[start] = low[start] = len(number)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in number:
                    number[other] = low[other] = len(number)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(sorted(following.get(other, ())))))
                    break
                if other in on_stack:
                    low[node] = min(low[node], number[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    members = []
                    while True:
                        members.append(stack.pop())
                        on_stack.discard(members[-1])
                        if members[-1] == node:
                            break
                    if len(members) > 1:
                        found.append(sorted(members))
    return found
