"""What gradfs is measured against, of scripts/baselines: processes that are started once and asked for rounds in turn.

A baseline has server processes, one for each shard, and learner processes. The numbers of connections and calls and the
sizes here were the fastest of those tried on two cores.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
from pathlib import Path

from machine import ROOT, existing, finished, require, say
from programs import START_DEADLINE, Peer, Program, end_with_parent, libc

from bench.jobs import Rival

SOURCES = ROOT / "scripts" / "baselines"
# The headers and libraries that a program needs besides the compiler.
NEEDS = {"grpc": ("pkg-config", "grpcpp/grpcpp.h"), "redis": ("hiredis/hiredis.h",)}
TENSOR = 64 << 20
# To a shard, that a learner by the library has by default.
CONNECTIONS = 2
SOCKET_BUFFER = 4 << 20
# An allocator that keeps what it has, on huge pages: gRPC allocates every byte that it receives.
KEEP_MEMORY = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0"}
KEEP_MEMORY |= {"MALLOC_TOP_PAD_": str(128 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}


def build(*names, only_look=False):
    """Compiles programs, or takes those there are; gives the directory they are in."""
    into = ROOT / (os.environ.get("CARGO_TARGET_DIR") or "target") / "baselines"
    if only_look:
        existing([into / name for name in names])
        return into
    into.mkdir(parents=True, exist_ok=True)
    for name in names:
        binary, source = into / name, SOURCES / f"{name}.cc"
        newest = max(path.stat().st_mtime for path in (source, SOURCES / "common.h"))
        if binary.exists() and binary.stat().st_mtime > newest:
            continue
        say(f"building the baseline {name}")
        require("g++", *NEEDS.get(name, ()))
        libraries = ["-lhiredis"] if name == "redis" else []
        if name == "grpc":
            words = ["pkg-config", "--cflags", "--libs", "grpc++"]
            libraries = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.split()
        finished("g++", "-O3", "-std=c++17", "-Wall", "-Wextra", "-o", binary, source, *libraries, "-ldl", "-pthread")
    return into


class Servers(Rival):
    """Learners of a program, and its servers, whose CPU time counts as well."""

    def __init__(self, stack, program, size, learners, shards, options, env=None):
        starts = [min(size, -(-size // 4096) * index // shards * 4096) for index in range(shards + 1)]
        common = ["--learners", learners, *options]
        servers, addresses = [], []
        for start, end in zip(starts, starts[1:]):
            server = Peer([program, "server", "--bytes", end - start, *common], env)
            stack.callback(server.end)
            servers.append(server.process.pid)
            addresses.append(server.answer("ready", START_DEADLINE)["address"])
        of = [program, "learner", "--bytes", size, *common]
        super().__init__(stack, [[*of, "--rank", rank, *addresses] for rank in range(learners)], servers, env)


def sockets(stack, binaries, size, learners, shards=1, connections=2):
    """Bare blocking sockets with send(2), and so many connections of each learner."""
    options = ["--connections", max(1, connections // shards), "--socket-buffer", 1 << 20]
    return Servers(stack, binaries / "sockets", size, learners, shards, options)


def sendfile(stack, binaries, size, learners, shards=1):
    """The same with sendfile(2), which spares loopback one of its two copies."""
    options = ["--send", "pages", "--connections", max(1, 2 // shards), "--socket-buffer", 4 << 20]
    return Servers(stack, binaries / "sockets", size, learners, shards, options)


def stream(stack, binaries, size, learners, shards=1):
    """gRPC with streams of 1 MiB chunks."""
    return Servers(stack, binaries / "grpc", size, learners, shards, ["--calls", max(1, 2 // shards)], KEEP_MEMORY)


def unary(stack, binaries, size, learners, shards=1):
    """gRPC with a call for each tensor, two at a time where there are two."""
    calls = min(max(1, 2 // shards), max(1, size // shards // TENSOR))
    options = ["--tensors", 1, "--chunk", TENSOR, "--calls", calls]
    return Servers(stack, binaries / "grpc", size, learners, shards, options, KEEP_MEMORY)


def add(stack, binaries, size, *_):
    """A STREAM-like add in the memory of one process, by as many threads as a shard has for one learner."""
    return Rival(stack, [[binaries / "stream_add", "--bytes", size, "--threads", CONNECTIONS]])


# A network namespace of one's own with loopback up, for programs that would otherwise have this machine's settings. The
# congestion control that a machine uses by default may cost loopback TCP half its speed (BBR does).

_CLONE_NEWNET, _SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x4000_0000, 0x8914, 0x1 | 0x40


def move():
    """Moves this process to a new namespace with Reno; False where that is not permitted."""
    if libc.unshare(_CLONE_NEWNET):
        return False
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP_RUNNING))
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    return True


def join(pid):
    """Moves this process to the namespace of another one."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


class Redis:
    """A server that keeps nothing on disk; it ends with `stack`. `directory` is new.

    Its allocator keeps memory that was freed, on huge pages: values of 64 MiB are set three times as fast with that. It
    runs in a namespace of its own where that is permitted, and clients by TCP join it there. Threads for its I/O
    (io-threads) gained nothing.
    """

    def __init__(self, stack, binaries, directory):
        directory.mkdir(parents=True)
        self._client, self._path = binaries / "redis", directory / "socket"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = ["redis-server", "--bind", "127.0.0.1", "--port", self._port, "--unixsocket", self._path, "--dir", directory]
        command += ["--save", "", "--appendonly", "no", "--disable-thp", "no"]
        keep = {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always,metadata_thp:auto"}
        server = Program(command, directory / "log", env=keep, prepare=lambda: (end_with_parent(), move()))
        stack.enter_context(server).wait_until(self._path.exists)
        theirs, ours = (os.readlink(f"/proc/{pid}/ns/net") for pid in (server.pid, "self"))
        self._enter = [] if theirs == ours else ["nsenter", f"--net=/proc/{server.pid}/ns/net"]

    def client(self, stack, over, size, way="direct"):
        """A client by `unix` or `tcp` (redis.cc), whose value has so many bytes; sockets have the fastest buffers."""
        where = ["--unix", self._path] if over == "unix" else ["--port", self._port]
        command = [*([] if over == "unix" else self._enter), self._client, *where, "--way", way]
        return Rival(stack, [[*command, "--key", f"{over}-{way}", "--bytes", size, "--socket-buffer", SOCKET_BUFFER]])
