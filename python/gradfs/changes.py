"""What differs between two versions of a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

from . import arrays, first_file
from .arrays import View
from .errors import Refused, explained
from .layout import Layout
from .places import Place, Version

_INDICES, _VALUES = ".indices", ".values"


class Change(NamedTuple):
    """The elements of a tensor that differ: their numbers in the flat tensor, and their new values."""

    indices: View
    values: View


@final
class Changes(Mapping[str, Change]):
    """The elements of `version` that differ from those of the version `base`, by tensors' names.

    Tensors that are equal in both are left out. The memory is this process's own.
    """

    is_whole = False
    """Tells it from `Weights`, which have all tensors."""

    def __init__(self, layout: Layout, about: Version, base: int, file: memoryview) -> None:
        self.layout, self.base = layout, base
        self.version, self.epoch, self.meta = about
        doing = f"changes of version {self.version} since {base}"
        try:
            self._changes = dict(_parsed(layout, first_file.views(file)))
        except Refused as error:
            raise Refused(f"{doing}: {error}") from None

    def __getitem__(self, name: str) -> Change:
        return self._changes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._changes)

    def __len__(self) -> int:
        return len(self._changes)

    def copy_to(self, out: Mapping[str, Any]) -> None:
        """Makes writable arrays that have the values of `base` those of `version`.

        Nothing is written unless all of them fit.
        """
        for name, described in arrays.targets(self.layout, out):
            if name in self._changes:
                arrays.put(*self._changes[name], described)

    def close(self) -> None:
        """Does nothing: these hold no version. It is here for what `Weights` need."""


def since(place: Place, model: str, layout: Layout, version: int, base: int) -> Changes | None:
    """What changed from one version to another, or None if the mount cannot tell, or so much that it does not."""
    with explained("changes", model):
        try:
            about, file = place.changes(model, version, base)
        except OSError:
            # Whole weights say the same. The mount itself may have gone, though.
            place.read(os.path.join(model, "version"))
            return None
    return Changes(layout, about, base, file)


def _parsed(layout: Layout, views: dict[str, View]) -> Iterator[tuple[str, Change]]:
    for key, indices in views.items():
        if not key.endswith(_INDICES):
            if not key.endswith(_VALUES) or key[: -len(_VALUES)] + _INDICES not in views:
                raise Refused(f"{key}: there are no indices for it")
            continue
        name = key[: -len(_INDICES)]
        tensor, values = layout.get(name), views.get(name + _VALUES)
        if tensor is None or values is None:
            lacks = "the model has no such tensor" if tensor is None else "there are no values for it"
            raise Refused(f"{name}: {lacks}")
        if indices.dtype not in ("I32", "I64") or values.dtype != tensor.dtype:
            raise Refused(f"{name}: {indices.dtype} for {values.dtype}, where the model has {tensor.dtype}")
        if len(indices.shape) != 1 or indices.shape != values.shape:
            raise Refused(f"{name}: indices are {list(indices.shape)}, and values {list(values.shape)}")
        numbers = indices.numpy()
        if numbers.size and not (0 <= numbers.min() and numbers.max() < tensor.size):
            raise Refused(f"{name}: an index is not within the tensor's {tensor.size} elements")
        yield name, Change(indices, values)
