"""One version of a model, mapped into this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from . import arrays
from .arrays import View
from .errors import Closed, explained
from .layout import Layout
from .lives import Life
from .places import Place

__all__ = ["View", "Weights"]


@final
class Weights(Mapping[str, View]):
    """The tensors of one version by name. No byte is copied until somebody writes, and writes are this process's own.

    A version stays in memory as long as something refers to it: these weights until `close()`, and each view, array or
    tensor that came from them. `close()` lets go of the first alone, so views may be used after it.
    """

    is_whole = True
    """Tells them from `Changes`, which have the elements alone that differ."""

    def __init__(
        self,
        place: Place,
        path: str,
        layout: Layout,
        model: str,
        learner: str | None = None,
        copies: bool = False,
        life: Life | None = None,
    ) -> None:
        self.layout = layout
        self._memory: memoryview | None
        with explained("weights", model, learner, life=life):
            about, self._memory = place.map(path, layout.nbytes, copies)
        self.version = about.version
        """The number of the version."""
        self.epoch = about.epoch
        """The life of the model that this is a version of. A restored job begins another one, and goes on counting."""
        self.meta = about.meta
        """What the publisher has said of the version, as texts by name. Of a version that learners made it is nothing."""

    def __getitem__(self, name: str) -> View:
        if self._memory is None:
            raise Closed(f"the weights of version {self.version} were closed")
        tensor = self.layout[name]
        return View(tensor, self._memory[tensor.offset : tensor.offset + tensor.nbytes])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def numpy(self) -> dict[str, Any]:
        """All tensors as NumPy arrays over the mapping."""
        return {name: view.numpy() for name, view in self.items()}

    def torch(self) -> dict[str, Any]:
        """All tensors as torch tensors over the mapping: a state_dict."""
        return {name: view.torch() for name, view in self.items()}

    def copy_to(self, out: Mapping[str, Any]) -> None:
        """Copies tensors into writable arrays of the same names. Nothing is written unless all of them fit."""
        for name, described in arrays.targets(self.layout, out):
            arrays.copy(self[name], described)

    def close(self) -> None:
        """Lets go of the version. Views that are in use keep it."""
        self._memory = None

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Weights of version {self.version}: {len(self)} tensors>"
