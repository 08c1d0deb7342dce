"""Where a model is: in a mount, as files, or on a network (`network`). Both answer to the same names."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from .lending import MountLoan

if TYPE_CHECKING:
    from .lives import Life

# Seconds that one call of poll waits, before it is looked whether the model was restored.
_LONGEST_POLL = 1.0
# What an error says if a contribution that was to be taken back counts.
COUNTS = "counts after all"


class Version(NamedTuple):
    """A version's number, the life of the model that it is of, and what its publisher has said of it."""

    version: int
    epoch: int
    meta: dict[str, str]


class Sink(Protocol):
    """Something that is being written, and counts when it is committed."""

    def write(self, buffers: list[memoryview], at: int) -> int:
        """Writes from the byte `at` on, and returns how many bytes were taken."""

    def describe(self, meta: Mapping[str, str]) -> None:
        """Says something of the version that it makes."""

    def commit(self, done: list[None]) -> None:
        """Ends it. `done` gets an entry in the same moment in which it counts."""

    def take_back(self) -> None:
        """Takes back what was written, so that nothing of it counts."""

    def close(self) -> None:
        """Gives it up."""


class Loan(Protocol):
    """The memory of a version, until it is given back. Who lets go of it without that may still read it."""

    file: int
    version: int
    epoch: int
    size: int

    def end(self, gives_back: bool) -> None:
        """Ends it. Memory that is not given back is never used again."""


class Place(Protocol):
    """A model's place. Paths begin with that of the model. Errors are `OSError`."""

    def read(self, path: str) -> str:
        """The text of a small file."""

    def write(self, path: str, text: str) -> None:
        """Writes one."""

    def names(self, path: str) -> list[str]:
        """The names in a directory."""

    def wait(self, model: str, newer_than: int | None, timeout: float | None, life: Life) -> tuple[int, bool]:
        """Waits for a version newer than this, or than the newest now. Gives the newest, and whether that is newer.

        Raises RolledBack if the `life` is over.
        """

    def about(self, model: str) -> Version | None:
        """The newest version. None if there is none, or no version of another life can come in its place."""

    def restoration(self, model: str) -> tuple[Version, int]:
        """The newest version of a model that was restored, also without a mount, and how often it was."""

    def map(self, path: str, size: int, copies: bool) -> tuple[Version, memoryview]:
        """The version that `weights` shows, and its bytes. They may be changed, for this process alone.

        Who only `copies` them lets go of them soon, and changes nothing.
        """

    def changes(self, model: str, version: int, base: int) -> tuple[Version, memoryview]:
        """A version, and the file of what differs in it from another one. ENOENT if one of them is not known."""

    def lend(self, model: str, version: int | None) -> Loan:
        """Borrows the memory of a version, or of the newest. The descriptor is the caller's."""

    def sink(self, path: str, life: Life) -> Sink:
        """Begins to write `gradients` or `publish`. Raises RolledBack if the `life` is over."""

    def join(self, path: str) -> None:
        """Makes a learner."""

    def leave(self, path: str) -> None:
        """Takes it out of the job."""

    def touch(self, path: str) -> None:
        """Says that the learner works."""


class _File:
    """A file that is written."""

    def __init__(self, path: str, life: Life) -> None:
        # Without O_TRUNC, a contribution may be a part of the model.
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            life.check(os.path.basename(path), self._file)
        except BaseException:
            self.close()
            raise

    def write(self, buffers: list[memoryview], at: int) -> int:
        return os.pwritev(self._file, buffers, at)

    def describe(self, meta: Mapping[str, str]) -> None:
        for name, text in meta.items():
            os.setxattr(self._file, f"user.{name}", text.encode())

    def commit(self, done: list[None]) -> None:
        # All of it in C, so that no exception of a signal comes between the success and its record.
        done.extend(map(os.fsync, (self._file,)))

    def take_back(self) -> None:
        try:
            os.ftruncate(self._file, 0)
        except OSError:
            raise
        except BaseException:
            # A signal's exception waits until that is done.
            os.ftruncate(self._file, 0)
            raise

    def close(self) -> None:
        os.close(self._file)


class Files:
    """A mount."""

    def read(self, path: str) -> str:
        with open(path, encoding="utf-8") as file:
            return file.read()

    def write(self, path: str, text: str) -> None:
        file = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            data = text.encode()
            while data:
                data = data[os.write(file, data) :]
            os.fsync(file)
        except BaseException:
            # The close would fail, too, and is not to hide the reason.
            with contextlib.suppress(OSError):
                os.close(file)
            raise
        os.close(file)

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def wait(self, model: str, newer_than: int | None, timeout: float | None, life: Life) -> tuple[int, bool]:
        deadline = None if timeout is None else time.monotonic() + timeout
        file = os.open(os.path.join(model, "version"), os.O_RDONLY | os.O_CLOEXEC)
        try:
            life.check("version", file)
            poll = select.poll()
            poll.register(file, select.POLLIN)
            while True:
                version = int(os.pread(file, 32, 0))
                if newer_than is None:
                    newer_than = version
                left = _LONGEST_POLL if deadline is None else deadline - time.monotonic()
                if version > newer_than or left <= 0:
                    return version, version > newer_than
                poll.poll(min(left, _LONGEST_POLL) * 1000 + 1)
                life.look()
        finally:
            os.close(file)

    def about(self, model: str) -> Version | None:
        with contextlib.suppress(OSError):
            return Version(**json.loads(os.getxattr(os.path.join(model, "weights"), "user.gradfs.about")))
        return None

    def restoration(self, model: str) -> tuple[Version, int]:
        restored = json.loads(self.read(os.path.join(model, "status.json"))).get("restored", 0)
        return self.about(model) or Version(-1, 0, {}), restored

    def map(self, path: str, size: int, copies: bool) -> tuple[Version, memoryview]:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            about = json.loads(os.getxattr(file, "user.gradfs.about"))
            return Version(**about), memoryview(mapped(file, size, mmap.mmap))
        finally:
            os.close(file)

    def changes(self, model: str, version: int, base: int) -> tuple[Version, memoryview]:
        directory = os.path.join(model, "versions", str(version))
        with open(os.path.join(directory, f"changes-since-{base}.safetensors"), "rb") as file:
            about = json.loads(os.getxattr(os.path.join(directory, "weights"), "user.gradfs.about"))
            return Version(**about), memoryview(bytearray(file.read()))

    def lend(self, model: str, version: int | None) -> Loan:
        return MountLoan(model, version)

    def sink(self, path: str, life: Life) -> Sink:
        return _File(path, life)

    def join(self, path: str) -> None:
        os.mkdir(path)
        try:
            # The job knows from an open of `weights` which process uses the learner, and waits longer for it.
            os.close(os.open(os.path.join(path, "weights"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except BaseException:
            with contextlib.suppress(OSError):
                os.rmdir(path)
            raise

    def leave(self, path: str) -> None:
        os.rmdir(path)

    def touch(self, path: str) -> None:
        os.utime(path)


_Memory = TypeVar("_Memory", bound=mmap.mmap)


def mapped(file: int, size: int, kind: type[_Memory]) -> _Memory:
    """A private mapping, which may be written as torch and DLPack demand."""
    # From Python 3.13 on, the mapping need not keep a descriptor.
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return kind(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, **options)
