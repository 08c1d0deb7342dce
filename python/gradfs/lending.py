"""Memory of a version that a mount lends: the descriptor comes over a socket, which stays open for as long as the loan."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from .errors import GradfsError, Timeout, named

# The mount answers at once, unless it is stopped.
_PATIENCE = 30.0


class MountLoan:
    """The memory of a version of a mount."""

    def __init__(self, model: str, version: int | None) -> None:
        at, key = os.getxattr(os.path.join(model, "weights"), "user.gradfs.memory").decode().split()
        self._mount = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._mount.settimeout(_PATIENCE)
            self._mount.connect(f"\0{at}")
            self._mount.send(f"{key} {'newest' if version is None else int(version)}".encode())
            answer, control, *_ = self._mount.recvmsg(4096, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
            if not control:
                _, number, words = (answer or b"error: 5 the mount has hung up").decode().strip().split(" ", 2)
                raise named(f"memfd: {words}", int(number))
            self.file = int.from_bytes(control[0][2][:4], sys.byteorder)
            self.version, self.epoch, self.size = map(int, answer.decode().split())
        except BaseException as error:
            self._mount.close()
            if isinstance(error, ConnectionRefusedError):
                words = "memfd: the mount is in another network namespace, or has ended"
                raise GradfsError(words, error.errno) from error
            if isinstance(error, socket.timeout):  # Python 3.9 has no other name for it.
                raise Timeout(f"memfd: no answer of the mount within {_PATIENCE} s") from error
            raise

    def end(self, gives_back: bool) -> None:
        with contextlib.suppress(OSError), self._mount:
            if gives_back:
                self._mount.send(b"done")
