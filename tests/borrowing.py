"""Borrowing the memory of versions, as docs/use/memory.md describes it. Only the standard library is used here."""

import os
import socket

import pytest

PATIENCE = 300


def where(model):
    """The socket's address, and the key."""
    name, key = os.getxattr(model / "weights", "user.gradfs.memory").decode().split()
    return f"\0{name}", key


def ask(address, request):
    """A connection on which this was asked, the answer, and the descriptor."""
    mount = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mount.settimeout(PATIENCE)
    mount.connect(address)
    mount.send(request)
    answer, files, _, _ = socket.recv_fds(mount, 4096, 1)
    return mount, answer.decode(), files[0] if files else None


class Borrowed:
    """A loan. It is not given back unless `give_back` does so."""

    def __init__(self, model, version="newest"):
        address, key = where(model)
        self.mount, self.answer, self.file = ask(address, f"{key} {version}".encode())
        if self.file is None:
            self.mount.close()
            _, number, words = self.answer.split(" ", 2)
            raise OSError(int(number), words.strip())
        self.version, self.generation, self.size = map(int, self.answer.split())
        self.inode = os.fstat(self.file).st_ino

    def read(self):
        return os.pread(self.file, self.size + 1, 0)

    def give_back(self):
        """Returns when the mount knows."""
        self.close()
        self.mount.send(b"done")
        assert self.mount.recv(1) == b""
        self.mount.close()

    def vanish(self):
        """Ends the connection without a word, and keeps the descriptor."""
        self.mount.close()

    def close(self):
        os.close(self.file)


@pytest.fixture(params=["up", "shm", "tcp"])
def lends(request, start_mount, cluster):
    """Starts a mount of a sum: `gradfs up`, one that shows its shard's memory, or one of two shards over TCP."""

    def start(**options):
        options = {"reducer": "sum", "learners": 1, "timeout": 20, **options}
        if request.param == "up":
            return start_mount(**options)
        one = cluster(1 if request.param == "shm" else 2, **options)
        mount = one.mount(transport=request.param)
        assert {shard["transport"] for shard in mount.status()["shards"]} == {request.param}
        return mount

    return start
