"""The rivals of scripts/bench-net: processes of scripts/baselines/, started once and asked for rounds in turn.

A rival has server processes, one for each shard, and learner processes. `round(what)` has all learners do the same
at once and gives what it took: from the first that began to the last that ended, and the CPU time of all of them.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from machine import ROOT, Failed, say

START_DEADLINE = 60.0
ROUND_DEADLINE = 120.0
STOP_DEADLINE = 5.0

# To a shard, that a learner by the library has by default.
CONNECTIONS = 2

BASELINES = ROOT / "scripts" / "baselines"

# An allocator that keeps what it has, on huge pages: gRPC allocates every byte that it receives.
_KEEP_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(128 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
}

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _end_with_parent():
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def available_memory():
    """Bytes that programs could have."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def require_grpc():
    """Installs the C++ library of gRPC and what compiles with it, where they are missing."""
    if Path("/usr/include/grpcpp/grpcpp.h").exists() and shutil.which("g++") and shutil.which("pkg-config"):
        return
    say("installing gRPC")
    packages = ("g++", "pkg-config", "libgrpc++-dev")
    command = [ROOT / "scripts" / "setup", *(f"package:{package}" for package in packages)]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=1800).returncode:
        raise Failed(f"needs gRPC: apt-get install {' '.join(packages)}")


def target():
    """Where rivals are built."""
    return ROOT / (os.environ.get("CARGO_TARGET_DIR") or "target/baselines")


def build(grpc=True, only_look=False):
    """Builds the rivals, or takes those there are; gives the directory of their binaries."""
    release = target() / "release"
    if only_look:
        names = ("sockets", "stream_add", "grpc") if grpc else ("sockets", "stream_add")
        if missing := [name for name in names if not (release / name).exists()]:
            raise Failed(f"not built in {release}: {', '.join(missing)}")
        return release
    say("building the baselines")
    _compile("cargo", "build", "--release", "--locked", "--bins", "--target-dir", target())
    source, binary = BASELINES / "grpc" / "main.cc", release / "grpc"
    if grpc and (not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime):
        flags = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "grpc++"], capture_output=True, text=True, check=True, timeout=60
        ).stdout.split()
        _compile("g++", "-O3", "-std=c++17", "-Wall", "-Wextra", "-o", binary, source, *flags, "-ldl")
    return release


def _compile(*command):
    try:
        done = subprocess.run(command, cwd=BASELINES, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=3600)
    except FileNotFoundError as error:
        raise Failed(f"{command[0]} is not on the PATH: run scripts/setup build") from error
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))} failed in {BASELINES}")


@dataclass
class Measurement:
    """What a round took."""

    bytes: int
    seconds: float
    cpu_seconds: float


class Process:
    """A program that is told lines and answers each with a line of JSON."""

    def __init__(self, command, environment):
        self.command = " ".join(map(str, command))
        self._unread = b""
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def tell(self, line):
        """Sends a line."""
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise Failed(f"{self.command}: has ended") from error

    def answer(self, what, give_up):
        """The next line, which must be about `what`; until `give_up` (time.monotonic) at the latest."""
        output = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([output], [], [], max(0.0, give_up - time.monotonic()))[0]:
                raise Failed(f"{self.command}: no answer about {what} in time")
            more = os.read(output, 65536)
            if not more:
                status = self._process.wait(STOP_DEADLINE)
                raise Failed(f"{self.command}: ended with {status} when asked about {what}")
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        found = json.loads(line)
        if found["what"] != what:
            raise Failed(f"{self.command}: answered {found} when asked about {what}")
        return found

    def close(self):
        """The end of its input is its end."""
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self, give_up):
        """Sees to it that it is gone."""
        try:
            self._process.wait(max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_DEADLINE)
        self._process.stdout.close()


class Rival:
    """Servers and learners of one kind. Use as a context manager."""

    def __init__(self, servers, learner, learners, environment=None):
        """`servers` are command lines; `learner(rank, addresses)` gives those of the `learners` learners."""
        self._environment = environment or {}
        self.pushes = 0
        self._all = []
        try:
            give_up = time.monotonic() + START_DEADLINE
            self.servers = [self._start(command) for command in servers]
            addresses = [server.answer("ready", give_up)["address"] for server in self.servers]
            self.learners = [self._start(learner(rank, addresses)) for rank in range(learners)]
            for process in self.learners:
                process.answer("ready", give_up)
        except BaseException:
            self.stop()
            raise

    def _start(self, command):
        process = Process(command, self._environment)
        self._all.append(process)
        return process

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Ends its processes."""
        for process in self._all:
            process.close()
        give_up = time.monotonic() + STOP_DEADLINE
        for process in self._all:
            process.end(give_up)

    def _servers_cpu(self):
        give_up = time.monotonic() + ROUND_DEADLINE
        for server in self.servers:
            server.tell("usage")
        return sum(server.answer("usage", give_up)["cpu_seconds"] for server in self.servers)

    def round(self, what):
        """Has every learner do `what`; gives a Measurement."""
        give_up = time.monotonic() + ROUND_DEADLINE
        before = self._servers_cpu()
        for learner in self.learners:
            learner.tell(f"round {what}")
        answers = [learner.answer(what, give_up) for learner in self.learners]
        self.pushes += what != "pull"
        return Measurement(
            sum(answer["bytes"] for answer in answers),
            max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers),
            sum(answer["cpu_seconds"] for answer in answers) + self._servers_cpu() - before,
        )

    def check(self):
        """Ends the run unless every learner's last pull was right; the last round must have been a pull or step."""
        give_up = time.monotonic() + ROUND_DEADLINE
        for learner in self.learners:
            learner.tell(f"check {self.pushes}")
        for learner in self.learners:
            learner.answer("check", give_up)


def _part(size, index, count):
    """Bytes of shard `index` of `count`: whole pages, as the learners divide them."""
    pages = -(-size // 4096)
    return min(size, pages * (index + 1) // count * 4096) - min(size, pages * index // count * 4096)


def _rival(program, size, learners, shards, options, environment=None):
    common = ["--learners", learners, *options]
    return Rival(
        [[program, "server", "--bytes", _part(size, index, shards), *common] for index in range(shards)],
        lambda rank, servers: [program, "learner", "--bytes", size, "--rank", rank, *common, *servers],
        learners,
        environment,
    )


# The numbers of connections and calls and the sizes below were the fastest of those tried on two cores.


def sockets(binaries, size, learners, shards=1, connections=2):
    """Bare blocking sockets with send(2), and so many connections of each learner."""
    options = ["--connections", max(1, connections // shards), "--socket-buffer", 1 << 20]
    return _rival(binaries / "sockets", size, learners, shards, options)


def sendfile(binaries, size, learners, shards=1):
    """The same with sendfile(2), which spares loopback one of its two copies."""
    options = ["--send", "pages", "--connections", max(1, 2 // shards), "--socket-buffer", 4 << 20]
    return _rival(binaries / "sockets", size, learners, shards, options)


def grpc_stream(binaries, size, learners, shards=1):
    """gRPC with streams of 1 MiB chunks."""
    options = ["--calls", max(1, 2 // shards)]
    return _rival(binaries / "grpc", size, learners, shards, options, _KEEP_MEMORY)


def grpc_unary(binaries, size, learners, shards=1, tensor=64 << 20):
    """gRPC with a call for each tensor, two at a time where there are two."""
    calls = min(max(1, 2 // shards), max(1, size // shards // tensor))
    options = ["--tensors", 1, "--chunk", tensor, "--calls", calls]
    return _rival(binaries / "grpc", size, learners, shards, options, _KEEP_MEMORY)


def stream_add(binaries, size):
    """A STREAM-like add in the memory of one process, by as many threads as a shard has for one learner."""
    program = binaries / "stream_add"
    return Rival([], lambda *_: [program, "--bytes", size, "--threads", CONNECTIONS], 1)
