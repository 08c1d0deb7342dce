"""Readers, listings and small commits of the suite mount, in a team."""

import mmap
import os
import struct
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy
from machine import MIB, Failed, Quiet
from programs import end_with_parent

from bench.team import Contender, race

# The pattern that files are filled with: fp32 numbers that repeat at no power of two.
PERIOD = 251
_COUNT = MIB // 4
_PATTERN = (numpy.arange(_COUNT + PERIOD) % PERIOD).astype(numpy.float32)
# Commits of a round, from which the others take over, and each element of one: sums of it are exact for longer than this runs.
COMMITS, ELEMENT = 50, 2.0**-7


def pattern(index):
    """MiB `index` of the pattern."""
    first = index * _COUNT % PERIOD
    return _PATTERN[first : first + _COUNT]


class ByRead(Contender):
    """preadv(2), 1 MiB at a time, into one buffer."""

    def __init__(self, path):
        self.path, self.size = path, os.stat(path).st_size
        self.buffer = mmap.mmap(-1, MIB)
        self.buffer.write(bytes(MIB))

    def step(self):
        into, file = [self.buffer], os.open(self.path, os.O_RDONLY)
        try:
            for offset in range(0, self.size, MIB):
                if os.preadv(file, into, offset) != MIB:
                    raise AssertionError(f"{self.path}: short read at {offset}")
        finally:
            os.close(file)

    def check(self, _):
        if not numpy.array_equal(numpy.frombuffer(self.buffer, numpy.float32), pattern(self.size // MIB - 1)):
            raise AssertionError(f"{self.path}: wrong bytes read")


class ByMapping(ByRead):
    """A new mapping each time, every byte of it touched."""

    def step(self):
        file = os.open(self.path, os.O_RDONLY)
        try:
            with mmap.mmap(file, self.size, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
                self.sum = int(numpy.frombuffer(mapping, numpy.uint64).sum())
        finally:
            os.close(file)

    def check(self, _):
        pieces = (pattern(index).copy().view(numpy.uint64).sum() for index in range(self.size // MIB))
        if self.sum != sum(map(int, pieces)) % 2**64:
            raise AssertionError(f"{self.path}: wrong bytes mapped")


def read(member, paths, how, **arguments):
    """Races the files {name: path} against each other."""
    kind = {"read": ByRead, "mmap": ByMapping}[how]
    return race(member, {name: kind(path) for name, path in paths.items()}, **arguments)


class Listing(Contender):
    """One `ls -l`, by the path of the directory, as in a shell; of a version that the kernel knows nothing of."""

    def __init__(self, path, count, model=None):
        self.path, self.count, self.model = path, count, model

    def prepare(self):
        """Makes a new version."""
        if self.model is None:
            return
        before = os.stat(self.path).st_ino
        (self.model / "gradients").write_bytes(bytes(4))
        if os.stat(self.path).st_ino == before:
            raise Failed("a contribution has made no version")

    def step(self):
        self.shown = subprocess.run(["ls", "-l", self.path], stdout=subprocess.PIPE, timeout=120, check=True).stdout

    def check(self, _):
        if (lines := self.shown.count(b"\n")) != self.count + 1:
            raise AssertionError(f"{self.path}: ls -l has {lines} lines, not {self.count + 1}")


def listing(member, models, copy, tensors, **arguments):
    """Races the `tensors/` of so many of {name: model}, each time of a new version, against the directory `copy`."""
    fresh = {name: Listing(model / "tensors", tensors, model) for name, model in models.items()}
    return race(member, {**fresh, "tmpfs": Listing(copy, tensors)}, **arguments)


# Takes the time of a core that nobody else wants.
_SPIN = """import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
while True:
    pass
"""


@contextmanager
def awake():
    """Keeps the cores from halting: to wake one takes longer than all that a small commit does, in a virtual machine."""
    spinning = []
    try:
        for core in os.sched_getaffinity(0):
            command = [sys.executable, "-c", _SPIN, str(core)]
            spinning.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent))
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


class Committer:
    """One learner of a model that is one block."""

    def __init__(self, model):
        self.model, self.commits = model, 0
        self.data = struct.pack("<f", ELEMENT) * (os.stat(model / "weights").st_size // 4)
        self.file = os.open(model / "gradients", os.O_WRONLY)

    def round(self):
        """What each commit took, in seconds."""
        took, file, data = [], self.file, self.data
        for _ in range(COMMITS):
            start = time.perf_counter_ns()
            written = os.pwrite(file, data, 0)
            os.fsync(file)
            took.append((time.perf_counter_ns() - start) / 1e9)
            if written != len(data):
                raise AssertionError("short write of gradients")
        self.commits += COMMITS
        return took

    def finish(self):
        """Every commit is in the weights, exactly once."""
        os.close(self.file)
        if (self.model / "weights").read_bytes() != struct.pack("<f", ELEMENT * self.commits) * (len(self.data) // 4):
            raise AssertionError(f"wrong weights after {self.commits} commits")


def commits(member, models, rounds, warm_up, patience, alternate):
    """{name: [seconds of each commit of a round, …]} for {name: model}; the models take turns."""
    quiet = Quiet(patience) if patience else None
    committers = {name: Committer(model) for name, model in models.items()}
    times = {name: [] for name in models}
    for turn in range(warm_up + rounds):
        if quiet:
            quiet.wait()
        order = list(committers.items())
        for name, committer in reversed(order) if alternate and turn % 2 else order:
            took = committer.round()
            if turn >= warm_up:
                times[name].append(took)
    for committer in committers.values():
        committer.finish()
    return times
