"""The memory of one version: a descriptor with no file system in the way."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import final

from .errors import Closed, explained
from .places import Place

_lent: weakref.WeakSet[Memory] = weakref.WeakSet()


@final
class Memory:
    """The memory of a version, which stays unchanged until `close()` and counts as an open file until then.

    `close()` gives the memory back, and it is used again. It does not where somebody may still read it: a view
    is in use, or Python has forked the process meanwhile. Mappings and duplicates that the program has made of `fileno()`
    must be gone before. Whoever passes the descriptor on calls `detach()` first. Memory that was not given back is never
    used again, so it stays unchanged for whoever has it.
    """

    def __init__(self, place: Place, model: str, version: int | None = None) -> None:
        self._pid, self._is_shared, self._is_closed = os.getpid(), False, False
        _lent.add(self)
        with explained("memfd", model, words=False):
            self._loan = place.lend(model, version)
            self._file = self._loan.file
            self._end = weakref.finalize(self, os.close, self._file)
            self.version, self.epoch, self.size = self._loan.version, self._loan.epoch, self._loan.size
            """The version's number, the life of the model's name, and the bytes of the model."""
            self._mapping = mmap.mmap(self._file, self.size, prot=mmap.PROT_READ)

    def fileno(self) -> int:
        """The descriptor, for reading: it begins with the first byte of `weights`."""
        self._check()
        return self._file

    def view(self) -> memoryview:
        """All bytes, mapped and not copied."""
        self._check()
        return memoryview(self._mapping)

    def detach(self) -> int:
        """The descriptor, which is the caller's to close or to pass on. The memory is not given back."""
        self._check()
        self._end.detach()
        self._is_shared = True
        self.close()
        return self._file

    def close(self) -> None:
        """Gives the memory back, unless somebody may still read it."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(BufferError):
            self._mapping.close()
        self._end()
        # A fork that comes after this gets nothing of it.
        self._loan.end(self._mapping.closed and not self._is_shared and os.getpid() == self._pid)

    def _check(self) -> None:
        if self._is_closed:
            raise Closed(f"the memory of version {self.version} was closed")

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


def _forks() -> None:
    for memory in list(_lent):
        memory._is_shared = True


os.register_at_fork(before=_forks)
