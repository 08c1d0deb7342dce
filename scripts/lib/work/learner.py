"""A learner on files of a mount, as a process: `learner.py DIRECTORY --way WAY [--rank N] [--learners N] [--pieces BYTES]`.

It obeys lines (scripts/baselines/common.h). `push` contributes the whole model from a buffer of its own, `pull` reads the
version with that into another buffer, and `step` is both. Before the time of a round begins, the gradients are stored
anew where they lie, as backpropagation does. Whatever else there is by then, `check N` adds N contributions to it.

  written  open, write(2) and close
  stored   memcpy into the mapped file, and fsync
  mapped   the gradients are in the mapped file already; fsync

DIRECTORY is a learner's, or with --publish a model's: then `publish` makes a version of a buffer, whose first number is
another one each time, and `fetch` waits for the version after the last one, by poll(2), and reads it. There is one way more:

  synced   write(2) and fsync of a file that stays open

Memory is taken from the first line on, so that whoever starts it can put it into a control group before.
"""

import argparse
import json
import mmap
import os
import resource
import select
import sys
import time
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"
PERIOD, PIECE, DEADLINE = 97, 1 << 18, 60.0


class Buffer:
    """Numbers on whole pages, huge ones where there are any, that were touched before."""

    def __init__(self, numpy, size, first):
        self.memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.values = numpy.frombuffer(self.memory, numpy.float32)
        for at in range(0, size // 4, PIECE):
            piece = self.values[at : at + PIECE]
            piece[:] = numpy.arange(at, at + len(piece)) % PERIOD + first


class Files:
    """Bytes that go to `path` in a way, and weights that come from `source`."""

    def __init__(self, options, path, source):
        import numpy

        self.numpy, self.path, self.source, self.way = numpy, path, source, options.way
        self.size = source.stat().st_size
        self.pieces = options.pieces or self.size
        self.file = self.mapped = None

    def prepare(self):
        """Before the time of a round begins."""

    def open(self):
        """What stays open; a way that is asked for later may be another one."""
        if self.way != "written" and self.file is None:
            self.file = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        if self.way in ("stored", "mapped") and self.mapped is None:
            self.mapped = self.numpy.frombuffer(mmap.mmap(self.file, self.size), self.numpy.float32)

    def give(self, buffer):
        """Contributes or publishes what is in the buffer."""
        self.open()
        if self.way in ("stored", "mapped"):
            if self.way == "stored":
                self.numpy.copyto(self.mapped, buffer.values)
            os.fsync(self.file)
            return
        file, data = self.file or os.open(self.path, os.O_WRONLY), memoryview(buffer.memory)
        for at in range(0, self.size, self.pieces):
            piece = data[at : at + self.pieces]
            if os.pwrite(file, piece, at) != len(piece):
                raise AssertionError("short write")
        os.fsync(file) if self.file else os.close(file)

    def take(self, buffer):
        """Reads the newest version; an open waits for one's own contribution."""
        file, data = os.open(self.source, os.O_RDONLY), memoryview(buffer.memory)
        for at in range(0, self.size, self.pieces):
            if os.preadv(file, [data[at : at + self.pieces]], at) != len(data[at : at + self.pieces]):
                raise AssertionError("short read")
        os.close(file)


class Learner(Files):
    """A learner of several, whose gradients are small whole numbers."""

    def __init__(self, options):
        super().__init__(options, options.directory / "gradients", options.directory / "weights")
        self.gradients, self.weights = (Buffer(self.numpy, self.size, options.rank + 1) for _ in range(2))
        self.take(self.weights)
        # Everything so far is in the weights, whoever has contributed it.
        self.steps, self.learners = 0, options.learners
        self.before = self.weights.values[0] - 0.0, self.weights.values[-1] - 0.0
        self.gradients_at_end = self.of_all(self.size // 4 - 1)

    def of_all(self, index):
        """The sum of all learners' gradients there."""
        return index % PERIOD * self.learners + self.learners * (self.learners + 1) // 2

    def prepare(self):
        self.open()
        if self.way == "mapped":
            self.numpy.copyto(self.mapped, self.gradients.values)
        elif self.way == "written":
            self.gradients.values *= 1

    def push(self):
        self.give(self.gradients)
        self.steps += 1
        return self.size

    def pull(self):
        self.take(self.weights)
        return self.size

    def step(self):
        return self.push() + self.pull()

    read_step = step

    def glance(self):
        """The first weight and the last one are right."""
        for at, before, each in ((0, self.before[0], self.of_all(0)), (-1, self.before[1], self.gradients_at_end)):
            if (found := self.weights.values[at]) != before + self.steps * each:
                raise AssertionError(f"wrong weights: {found} after {self.steps} contributions of {each} to {before}")

    def check(self, pushes):
        """All weights are; there were none before."""
        for at in range(0, self.size // 4, PIECE):
            piece = self.weights.values[at : at + PIECE]
            index = self.numpy.arange(at, at + len(piece))
            if not self.numpy.array_equal(piece, (self.of_all(index) * pushes).astype(self.numpy.float32)):
                raise AssertionError(f"wrong weights after {pushes} contributions from element {at} on")


class Publisher(Files):
    """Versions that are made, or waited for."""

    def __init__(self, options):
        super().__init__(options, options.directory / "publish", options.directory / "weights")
        self.buffer = Buffer(self.numpy, self.size, 0)
        self.version_file = os.open(options.directory / "version", os.O_RDONLY)
        self.poll = select.poll()
        self.poll.register(self.version_file, select.POLLPRI)
        self.version = self.now()

    def now(self):
        return int(os.pread(self.version_file, 32, 0))

    def publish(self):
        self.give(self.buffer)
        return self.size

    def fetch(self):
        while (version := self.now()) == self.version:
            if not self.poll.poll(DEADLINE * 1000):
                raise AssertionError(f"no version after {version}")
        self.version = version
        self.take(self.buffer)
        return self.size

    def glance(self):
        """Its reader looks."""

    def check(self, publications):
        """The newest version is what was published last."""
        self.take(self.buffer)
        right = (self.numpy.arange(self.size // 4) % PERIOD).astype(self.numpy.float32)
        right[0] = publications
        if not self.numpy.array_equal(self.buffer.values, right):
            raise AssertionError(f"these weights are not of publication {publications}: {self.buffer.values[:4]}")


def tell(**fields):
    print(json.dumps(fields), flush=True)


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rounds(one, what, count):
    """Does `what` so often; gives the bytes moved, and the begin, the end and the CPU time of each round."""
    moved, times = 0, []
    for _ in range(count):
        one.prepare()
        if what == "publish":
            one.buffer.values[0] += 1
        if what == "fetch":
            tell(what="waits")
        cpu, begin = cpu_seconds(), time.monotonic()
        moved += getattr(one, what)()
        times.append((begin, time.monotonic(), cpu_seconds() - cpu))
        if what == "step" and count > 1:
            one.glance()
    return moved, times


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--way", choices=["written", "stored", "mapped", "synced"], default="written")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--pieces", type=int, help="bytes of a call [default: all]")
    parser.add_argument("--publish", action="store_true")
    options = parser.parse_args()
    tell(what="ready")
    one = None
    for line in sys.stdin:
        one = one or (Publisher if options.publish else Learner)(options)
        request, *words = line.split()
        if request == "round":
            moved, [(start, end, cpu)] = rounds(one, words[0], 1)
            tell(what=words[0], bytes=moved, start=start, end=end, seconds=end - start, cpu_seconds=cpu)
        elif request == "repeat":
            tell(what=words[1], seconds=[end - start for start, end, _ in rounds(one, words[1], int(words[0]))[1]])
        elif request == "way":
            one.way = words[0]
            tell(what="way")
        elif request == "glance":
            one.glance()
            tell(what="glance")
        elif request == "check":
            one.check(int(words[0]))
            tell(what="check")
        else:
            raise SystemExit(f"unknown request {line!r}")


if __name__ == "__main__":
    main()
