"""The page of what the Python package has for its users, of its docstrings."""

import ast
import textwrap

GENERATED = "use/languages/api.md"
# Each module that users import from, and what they are said to find there.
MODULES = {"gradfs": "gradfs", "gradfs.engines": "gradfs/engines", "gradfs.torch": "gradfs/torch"}
_HEAD = """# Python reference

What programs call, with its docstrings. [The Python package](python.md) explains it.
"""


def page(root):
    """The page, in Markdown."""
    parts = [_HEAD]
    for name, folder in MODULES.items():
        directory = root / "python" / folder
        exported, found = _exported(directory / "__init__.py"), {}
        for file in sorted(directory.glob("*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in exported:
                    found[node.name] = node
        parts.append(f"## {name}\n")
        parts += [_entry(found[one], 3) for one in sorted(found, key=lambda one: (one[0].isupper(), one.lower()))]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _exported(file):
    """The names in `__all__`."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def _entry(node, depth):
    """A class with its methods, or a function."""
    is_class = isinstance(node, ast.ClassDef)
    signature = f"class {node.name}" if is_class else f"{node.name}({ast.unparse(node.args)})"
    if is_class and node.bases:
        signature += f"({', '.join(map(ast.unparse, node.bases))})"
    is_value = not is_class and any(ast.unparse(one).endswith("property") for one in node.decorator_list)
    if is_value:
        signature = node.name
    if not is_class and node.returns is not None:
        signature += f" -> {ast.unparse(node.returns)}"
    said = ast.get_docstring(node) or ""
    lines = [f"{'#' * depth} {node.name}\n", f"```text\n{_wrapped(signature)}\n```\n", f"{said}\n" if said else ""]
    if is_class:
        inner = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
        # Of forms that are typed apart, the last has the text. A setter says nothing.
        inner = [one for one in inner if not {"overload"} & {ast.unparse(of) for of in one.decorator_list}]
        inner = [one for one in inner if not any(ast.unparse(of).endswith(".setter") for of in one.decorator_list)]
        lines += [_entry(one, depth + 1) for one in inner if ast.get_docstring(one)]
    return "\n".join(line for line in lines if line)


def _wrapped(signature):
    return textwrap.fill(signature, 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
