"""What the tests of engines share: a tiny checkpoint, a server that answers as it is told, and packages or doubles."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable

import pytest

# Seconds after which an interpreter that only imports hangs.
_HANGS = 120


class Package:
    """A package that may be installed. If it is not, its double of a release stands in for it, within `importable`."""

    def __init__(self, name: str, release: str) -> None:
        self.name, self._double = name, Path(__file__).parent / "doubles" / f"{name}-{release}"
        self.is_double = importlib.util.find_spec(name) is None
        self.id = f"double_of_{name}_{release}" if self.is_double else f"{name}_itself"

    @contextmanager
    def importable(self, *users: str) -> Iterator[Package]:
        """Has the package in `sys.path`. What is imported of a double, and modules that use it, are forgotten then."""
        if not self.is_double:
            yield self
            return
        sys.path.insert(0, str(self._double))
        try:
            yield self
        finally:
            sys.path.remove(str(self._double))
            for module in [one for one in sys.modules if one.split(".")[0] == self.name or one in users]:
                del sys.modules[module]

    def interfaces(self, *modules: str) -> tuple[Any, Any]:
        """What the double has of the interface, and what the package has of that. Skips if there is no package.

        All that is abstract in the package belongs to it.
        """
        if self.is_double:
            pytest.skip(f"{self.name} is not installed: its double is compared with nothing")
        code = f"import engines_support, json; print(json.dumps(engines_support.interface({modules!r})))"
        paths = os.pathsep.join([str(self._double), str(Path(__file__).parent)])
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths},
            check=True, timeout=_HANGS, capture_output=True, text=True,
        )  # fmt: skip
        of_double, real = json.loads(done.stdout), interface(modules)
        classes = {name.rpartition(".")[0] for name in of_double}
        abstract = {name for name, one in real.items() if one[:1] == [True] and name.rpartition(".")[0] in classes}
        return of_double, {name: real.get(name) for name in of_double.keys() | abstract}


def interface(modules: tuple[str, ...]) -> dict[str, Any]:
    """The parameters of all functions of some modules, and of their classes, and which of these are abstract."""
    found = {}
    for module in map(importlib.import_module, modules):
        for name, one in vars(module).items():
            if getattr(one, "__module__", None) != module.__name__ or name.startswith("_"):
                continue
            if inspect.isfunction(one):
                found[f"{module.__name__}.{name}"] = _parameters(one)
            for of in dir(one) if inspect.isclass(one) else ():
                member = getattr(one, of)
                if of == "__init__" or not of.startswith("_") and callable(member):
                    is_abstract = getattr(member, "__isabstractmethod__", False)
                    found[f"{module.__name__}.{name}.{of}"] = [is_abstract, *_parameters(member)]
    return found


def _parameters(function: Any) -> list[Any]:
    parameters = inspect.signature(function).parameters.values()
    return [[one.name, one.kind.name, one.default is not one.empty] for one in parameters]


def assert_implements(ours: type, interface: type) -> None:
    """All that is abstract is there, and takes all that the interface lets its callers pass."""
    assert issubclass(ours, interface) and interface.__abstractmethods__ and not inspect.isabstract(ours)
    for name in interface.__abstractmethods__:
        own, theirs = getattr(ours, name), getattr(interface, name)
        assert inspect.ismethod(own) == inspect.ismethod(theirs), f"{name}: of the class, or of an engine"
        is_async = inspect.iscoroutinefunction(own) or inspect.isasyncgenfunction(own)
        assert is_async == inspect.iscoroutinefunction(theirs), f"{name}: async"
        takes, passed = inspect.signature(own).parameters, inspect.signature(theirs).parameters
        keywords = any(one.kind is one.VAR_KEYWORD for one in passed.values())
        for of, one in passed.items():
            if one.kind is one.VAR_KEYWORD:
                continue
            assert of in takes and takes[of].kind is one.kind, f"{name}: {of}"
            assert one.default is one.empty or takes[of].default is not one.empty, f"{name}: {of} has no default"
        positional = [
            [of for of, one in which.items() if one.kind is not one.KEYWORD_ONLY] for which in (takes, passed)
        ]
        assert keywords or positional[0][: len(positional[1])] == positional[1], f"{name}: the order"
        needs = {of for of, one in takes.items() if one.default is one.empty and one.kind is not one.VAR_KEYWORD}
        assert keywords or needs <= set(passed), f"{name}: {needs - set(passed)} are passed by nobody"


def tiny_llama(to: Path, tied: bool = False) -> Any:
    """A Llama of two layers, saved to a directory."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied,
    )  # fmt: skip
    module = transformers.AutoModelForCausalLM.from_config(config).float()
    module.save_pretrained(to)
    return module


@contextmanager
def server(answer: Callable[[str, Any], tuple[int, Any]]) -> Iterator[str]:
    """An HTTP server, which answers POSTs with a status and JSON, and its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, told = answer(self.path, body)
            text = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_port}"
    finally:
        served.shutdown()
        thread.join(60)
        served.server_close()
