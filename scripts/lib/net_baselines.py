"""The rivals of scripts/bench-net: processes of scripts/baselines/, started once and asked for rounds in turn.

A rival has server processes, one for each shard, and learner processes. `round(what)` has all learners do the same
at once and gives what it took: from the first that began to the last that ended, and the CPU time of all of them.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from machine import ROOT, Failed, say

START_DEADLINE = 60.0
ROUND_DEADLINE = 120.0
STOP_DEADLINE = 5.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _end_with_parent():
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def build(only_look=False):
    """Builds the rivals, or takes those there are; gives the directory of their binaries."""
    target = ROOT / (os.environ.get("CARGO_TARGET_DIR") or "target/baselines")
    release = target / "release"
    if only_look:
        if missing := [name for name in ("sockets", "grpc", "copy") if not (release / name).exists()]:
            raise Failed(f"not built in {release}: {', '.join(missing)}")
        return release
    command = ["cargo", "build", "--release", "--locked", "--bins", "--target-dir", target]
    say("building the baselines")
    where = ROOT / "scripts" / "baselines"
    try:
        done = subprocess.run(command, cwd=where, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=3600)
    except FileNotFoundError as error:
        raise Failed("cargo is not on the PATH: install Rust from https://rustup.rs") from error
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))} failed in {where}")
    return release


@dataclass
class Measurement:
    """What a round took."""

    bytes: int
    seconds: float
    cpu_seconds: float


class Process:
    """A program that is told lines and answers each with a line of JSON."""

    def __init__(self, *command):
        self.command = " ".join(map(str, command))
        self._unread = b""
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
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

    def end(self):
        """Sees to it that it is gone."""
        try:
            self._process.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_DEADLINE)
        self._process.stdout.close()


class Rival:
    """Servers and learners of one kind. Use as a context manager."""

    def __init__(self, name, servers, learner, learners):
        """`servers` are command lines; `learner(rank, addresses)` gives those of the `learners` learners."""
        self.name = name
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
        process = Process(*command)
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
        for process in self._all:
            process.end()

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
        self.pushes += what in ("push", "step")
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


def sockets(binaries, size, learners, shards=1, options=(), name="sockets"):
    """Bare blocking sockets."""
    common = ["--learners", learners, *options]
    return Rival(
        name,
        [[binaries / "sockets", "server", "--bytes", _part(size, index, shards), *common] for index in range(shards)],
        lambda rank, servers: [binaries / "sockets", "learner", "--bytes", size, "--rank", rank, *common, *servers],
        learners,
    )


def copy(binaries, size, options=(), name="memcpy"):
    """One memcpy into memory that another process has."""
    server = [binaries / "copy", "server", "--bytes", size]
    return Rival(name, [server], lambda _, paths: [binaries / "copy", "learner", *options, *paths], 1)


def grpc(binaries, size, learners, shards=1, options=(), name="grpc"):
    """gRPC with tonic."""
    common = ["--learners", learners, *options]
    return Rival(
        name,
        [[binaries / "grpc", "server", "--bytes", _part(size, index, shards), *common] for index in range(shards)],
        lambda rank, servers: [binaries / "grpc", "learner", "--bytes", size, "--rank", rank, *common, *servers],
        learners,
    )
