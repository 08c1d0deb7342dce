"""Where the tensors of a model lie in its bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .errors import Refused

# The bits of an element. The names are those of the file `layout`, and of safetensors.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "C64": 64,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


class Tensor(NamedTuple):
    """A tensor of a model: `offset` and `nbytes` are bytes of `weights` and of `gradients`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return elements(self.shape)


class Layout(Mapping[str, Tensor]):
    """The tensors of a model by name, in the order in which they lie. `nbytes` is the model's size."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self.nbytes = max((tensor.offset + tensor.nbytes for tensor in tensors), default=0)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads the text of the file `layout`."""
        return cls([_tensor(line) for line in text.split("\n") if line])

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<Layout of {len(self)} tensors, {self.nbytes} bytes>"


def elements(shape: tuple[int, ...]) -> int:
    """The number of elements of a shape."""
    count = 1
    for length in shape:
        count *= length
    return count


def _tensor(line: str) -> Tensor:
    try:
        name, dtype, lengths, offset = line.split("\t")
        shape = tuple(int(length) for length in lengths[1:-1].split(",") if length)
        nbytes = (elements(shape) * BITS[dtype] + 7) // 8
        return Tensor(_unescaped(name), dtype, shape, int(offset), nbytes)
    except (KeyError, ValueError) as error:
        raise Refused(f"layout: {line!r} is no tensor that this release knows") from error


def _unescaped(text: str) -> str:
    """A name without the backslashes that stand before control characters and backslashes."""
    if "\\" not in text:
        return text
    escape = re.compile(r"\\(?:u\{([0-9a-f]+)\}|(.))")
    letters = {"t": "\t", "n": "\n", "r": "\r"}
    return escape.sub(lambda at: chr(int(at[1], 16)) if at[1] else letters.get(at[2], at[2]), text)
