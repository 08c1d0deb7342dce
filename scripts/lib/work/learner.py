"""A learner on files of a mount, as a process: `learner.py DIRECTORY --way WAY [--rank N] [--learners N] [--pieces BYTES]`.

It obeys lines (scripts/baselines/common.h). `push` contributes the whole model from a buffer of its own, `pull` reads the
version with that into another buffer, and `step` is both. `prepare`, before the time of a round, stores the gradients
anew where they lie, as backpropagation does. `set_way WAY` goes on in another way, and `set_way WAY mmap` also copies
weights from a mapping. `glance` looks at two weights.

  written  open, write(2) and close
  stored   memcpy into the mapped file, and fsync
  mapped   the gradients are in the mapped file already; fsync
  synced   write(2) and fsync of a file that stays open

DIRECTORY is a learner's, or with --publish a model's: then `publish` makes a version of a buffer, whose first number is
another one each time, and `fetch` waits for the version after the last one, by poll(2), and reads it.

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


def pattern(at, count):
    """Small whole numbers, whose sums are exact in whatever order; those of learner N are N more."""
    return (numpy.arange(at, at + count) % PERIOD + 1).astype(numpy.float32)


def filled(values, more=0):
    """The array, with the pattern in it, piece by piece."""
    for at in range(0, len(values), PIECE):
        piece = values[at : at + PIECE]
        piece[:] = pattern(at, len(piece)) + more
    return values


def of_all(at, count, learners):
    """The sum of all learners' gradients there."""
    return pattern(at, count) * learners + learners * (learners - 1) // 2


def check_sums(values, learners, steps):
    """The array holds so many steps of all learners."""
    for at in range(0, len(values), PIECE):
        piece = values[at : at + PIECE]
        if not numpy.array_equal(piece, of_all(at, len(piece), learners) * numpy.float32(steps)):
            raise AssertionError(f"wrong sums of {steps} steps from element {at} on")


class Files:
    """Bytes that go to `path` in a way, and weights that come from `source`."""

    def __init__(self, path, source, way="written", pieces=None):
        self.path, self.source, self.way = path, source, way
        self.size = os.stat(source).st_size
        self.pieces = pieces or self.size
        self.file = self.mapped = None
        self.by_mapping = False

    def set_way(self, way, reads="read"):
        self.way, self.by_mapping = way, reads == "mmap"

    def open(self):
        """What stays open; a way that is asked for later may be another one."""
        if self.way != "written" and self.file is None:
            self.file = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        if self.way in ("stored", "mapped") and self.mapped is None:
            self.mapped = numpy.frombuffer(mmap.mmap(self.file, self.size), numpy.float32)

    def give(self, values):
        """Contributes or publishes an array."""
        self.open()
        if self.way in ("stored", "mapped"):
            if self.way == "stored":
                numpy.copyto(self.mapped, values)
            os.fsync(self.file)
            return
        data, stays = memoryview(values).cast("B"), self.way == "synced"
        file = self.file if stays else os.open(self.path, os.O_WRONLY)
        try:
            for at in range(0, self.size, self.pieces):
                piece = data[at : at + self.pieces]
                if os.pwrite(file, piece, at) != len(piece):
                    raise AssertionError("short write")
        finally:
            os.fsync(file) if stays else os.close(file)

    def take(self, values):
        """Reads the newest version into an array, or copies it from a mapping; an open waits for one's own contribution."""
        file, data = os.open(self.source, os.O_RDONLY), memoryview(values).cast("B")
        try:
            if self.by_mapping:
                with mmap.mmap(file, self.size, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
                    numpy.copyto(values, numpy.frombuffer(mapping, numpy.float32))
                return
            for at in range(0, self.size, self.pieces):
                piece = data[at : at + self.pieces]
                if os.preadv(file, [piece], at) != len(piece):
                    raise AssertionError("short read")
        finally:
            os.close(file)


class Learner(Files):
    """A learner of several."""

    def __init__(self, directory, rank, learners, way="written", pieces=None):
        super().__init__(directory / "gradients", directory / "weights", way, pieces)
        self.gradients = filled(numpy.empty(self.size // 4, numpy.float32), rank)
        self.weights = numpy.ones_like(self.gradients)
        self.take(self.weights)
        # Everything so far is in the weights, whoever has contributed it.
        self.before, self.steps, self.learners = self.weights[[0, -1]].copy(), 0, learners

    def prepare(self):
        self.open()
        if self.way == "mapped":
            numpy.copyto(self.mapped, self.gradients)
        elif self.way == "written":
            self.gradients *= 1

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
        ends = [of_all(at, 1, self.learners)[0] for at in (0, len(self.weights) - 1)]
        right = self.before + self.steps * numpy.array(ends)
        if not numpy.array_equal(self.weights[[0, -1]], right):
            raise AssertionError(f"wrong weights: {self.weights[[0, -1]]}, not {right}, after {self.steps} contributions")

    def check(self, pushes):
        """All weights are; there were none before."""
        check_sums(self.weights, self.learners, int(pushes))


class Publisher(Files):
    """Versions that are made, or waited for. The buffer is on huge pages, where there are any."""

    def __init__(self, model, way):
        super().__init__(model / "publish", model / "weights", way)
        memory = mmap.mmap(-1, self.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = filled(numpy.frombuffer(memory, numpy.float32))
        self.version_file = os.open(model / "version", os.O_RDONLY)
        self.poll = select.poll()
        self.poll.register(self.version_file, select.POLLPRI)
        self.version = self.now()

    def now(self):
        return int(os.pread(self.version_file, 32, 0))

    def publish(self):
        self.buffer[0] += 1
        self.give(self.buffer)
        return self.size

    def fetch(self):
        tell(what="waits")
        while (version := self.now()) == self.version:
            if not self.poll.poll(DEADLINE * 1000):
                raise AssertionError(f"no version after {version}")
        self.version = version
        self.take(self.buffer)
        return self.size

    def check(self, publications):
        """The newest version is what was published last."""
        self.take(self.buffer)
        right = filled(numpy.empty_like(self.buffer))
        right[0] += int(publications)
        if not numpy.array_equal(self.buffer, right):
            raise AssertionError(f"these weights are not of publication {publications}: {self.buffer[:4]}")


def import_numpy():
    global numpy
    import numpy


def tell(**fields):
    print(json.dumps(fields), flush=True)


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(one, what):
    """Does `what`; tells what it took."""
    cpu, start = cpu_seconds(), time.monotonic()
    moved = getattr(one, what)()
    end = time.monotonic()
    tell(what=what, bytes=moved, start=start, end=end, seconds=end - start, cpu_seconds=cpu_seconds() - cpu)


def repeated(one, what):
    """The seconds of one of many."""
    one.prepare()
    start = time.monotonic()
    getattr(one, what)()
    seconds = time.monotonic() - start
    if what == "step":
        one.glance()
    return seconds


def obey(make):
    """Does what lines of the input ask for, and answers each. Who does it is made at the first one."""
    tell(what="ready")
    one = None
    for line in sys.stdin:
        one = one or make()
        request, *words = line.split()
        if request == "round":
            timed(one, *words)
        elif request == "repeat":
            count, what = words
            tell(what=what, seconds=[repeated(one, what) for _ in range(int(count))])
        else:
            getattr(one, request)(*words)
            tell(what=request)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--way", choices=["written", "stored", "mapped", "synced"], default="written")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--pieces", type=int, help="bytes of a call [default: all]")
    parser.add_argument("--publish", action="store_true")
    options = parser.parse_args()

    def make():
        import_numpy()
        if options.publish:
            return Publisher(options.directory, options.way)
        return Learner(options.directory, options.rank, options.learners, options.way, options.pieces)

    obey(make)


if __name__ == "__main__":
    main()
else:
    import_numpy()
