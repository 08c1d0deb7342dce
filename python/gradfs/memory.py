"""The memory of one version, lent by the mount: a descriptor with no file system in the way."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import weakref
from typing import final

from .errors import Closed, GradfsError, Timeout, explained, named

# The mount answers at once, unless it is stopped.
_PATIENCE = 30.0
_lent: weakref.WeakSet[Memory] = weakref.WeakSet()


@final
class Memory:
    """The memory of a version, which stays unchanged until `close()` and counts as an open file until then.

    `close()` gives the memory back, and the mount uses it again. It does not where somebody may still read it: a view
    is in use, or Python has forked the process meanwhile. Mappings and duplicates that the program has made of `fileno()`
    must be gone before. Whoever passes the descriptor on calls `detach()` first. Memory that was not given back is never
    used again, so it stays unchanged for whoever has it.
    """

    def __init__(self, model: str, version: int | None = None) -> None:
        self._pid, self._is_shared, self._is_closed = os.getpid(), False, False
        _lent.add(self)
        with explained("memfd", model, words=False):
            self._mount, answer, self._file = _borrow(model, "newest" if version is None else int(version))
            self._end = weakref.finalize(self, os.close, self._file)
            self.version, self.epoch, self.size = map(int, answer.split())
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
        with contextlib.suppress(OSError), self._mount:
            if self._mapping.closed and not self._is_shared and os.getpid() == self._pid:
                self._mount.send(b"done")

    def _check(self) -> None:
        if self._is_closed:
            raise Closed(f"the memory of version {self.version} was closed")

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


def _borrow(model: str, version: int | str) -> tuple[socket.socket, str, int]:
    at, key = os.getxattr(os.path.join(model, "weights"), "user.gradfs.memory").decode().split()
    mount = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        mount.settimeout(_PATIENCE)
        mount.connect(f"\0{at}")
        mount.send(f"{key} {version}".encode())
        answer, control, *_ = mount.recvmsg(4096, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
        if not control:
            _, number, words = (answer or b"error: 5 the mount has hung up").decode().strip().split(" ", 2)
            raise named(f"memfd: {words}", int(number))
        return mount, answer.decode(), int.from_bytes(control[0][2][:4], sys.byteorder)
    except BaseException as error:
        mount.close()
        if isinstance(error, ConnectionRefusedError):
            raise GradfsError("memfd: the mount is in another network namespace, or has ended", error.errno) from error
        if isinstance(error, socket.timeout):  # Python 3.9 has no other name for it.
            raise Timeout(f"memfd: no answer of the mount within {_PATIENCE} s") from error
        raise


def _forks() -> None:
    for memory in list(_lent):
        memory._is_shared = True


os.register_at_fork(before=_forks)
