"""Redis beside publications: SET and GET of a value as long as a model, by scripts/baselines/redis/main.c.

The client is what hiredis allows at its fastest: the value goes from where it lies, and comes to where it is wanted
(`direct`). `plain` is what hiredis does by itself, with a copy or two. The server runs in a network namespace of its own
with Reno where that is permitted, and clients by TCP join it there. Sockets have buffers of 4 MiB. Threads for its I/O
(io-threads) gained nothing.
"""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import daemons
import machine
import net_baselines
import own_network

SOCKET_BUFFER = 4 << 20
SOURCE = net_baselines.BASELINES / "redis" / "main.c"


def require():
    """Installs Redis, and what its client is made with, where they are missing."""
    machine.require(["redis-server"])
    if Path("/usr/include/hiredis/hiredis.h").exists() and shutil.which("cc"):
        return
    command = [machine.ROOT / "scripts" / "setup", "package:gcc", "package:libc6-dev", "package:libhiredis-dev"]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=1800).returncode:
        raise machine.Failed("needs hiredis: apt-get install gcc libc6-dev libhiredis-dev")


def build(only_look):
    """Compiles the client, or takes the one that is there; gives its path."""
    binary = net_baselines.target() / "release" / "redis"
    if only_look:
        if not binary.exists():
            raise machine.Failed(f"not built: {binary}")
    elif not binary.exists() or binary.stat().st_mtime < SOURCE.stat().st_mtime:
        binary.parent.mkdir(parents=True, exist_ok=True)
        command = ["cc", "-O3", "-Wall", "-Wextra", "-o", binary, SOURCE, "-lhiredis"]
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=300).returncode:
            raise machine.Failed(f"{SOURCE} does not compile")
    return binary


class Server:
    """A server, and its clients. They end with it."""

    def __init__(self, program, process, path, port):
        self._program, self._path, self._port = program, path, port
        theirs, ours = (os.readlink(f"/proc/{pid}/ns/net") for pid in (process.pid, "self"))
        self._enter = [] if theirs == ours else ["nsenter", f"--net=/proc/{process.pid}/ns/net"]

    def client(self, stack, over, size, way="direct"):
        """A client by `unix` or `tcp`, whose value has so many bytes."""
        where = ["--unix", self._path] if over == "unix" else ["--port", self._port]
        command = [*([] if over == "unix" else self._enter), self._program, *where, "--way", way]
        command += ["--key", f"{over}-{way}", "--bytes", size, "--socket-buffer", SOCKET_BUFFER]
        return stack.enter_context(net_baselines.Rival([], lambda *_: command, 1))


def _free_port():
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        return any_socket.getsockname()[1]


@contextmanager
def server(program, directory):
    """A Server; `directory` is new."""
    port = _free_port()
    with daemons.redis(directory, port, own_network.move) as (process, path):
        yield Server(program, process, path, port)
