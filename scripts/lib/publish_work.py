"""A program that publishes weights, or waits for them and reads them, as a process: `publish_work.py --help`.

It obeys lines as the learners of scripts/bench-net do (scripts/baselines/src/rounds.rs). `round publish` makes a version of
all bytes of a buffer; the first number is another one each time. `round fetch` waits for the version after the one that it
has, by poll(2), and reads all of it into a buffer. `check N`: the newest version is what the N-th publication has in its
buffer.
"""

import argparse
import ctypes
import json
import mmap
import os
import resource
import select
import sys
import time
from pathlib import Path

sys.dont_write_bytecode = True

import numpy  # noqa: E402

DEADLINE = 60.0


def buffer(size):
    """Memory on whole pages, huge ones where there are any, that was touched before."""
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    values = numpy.frombuffer(memory, numpy.float32)
    values[:] = numpy.arange(size // 4) % 97
    return memory, values


class Publisher:
    """Publications from a buffer of the program's own."""

    def __init__(self, model, way):
        self.path = model / "publish"
        self.way = way
        self.size = (model / "weights").stat().st_size
        self.memory, self.values = buffer(self.size)
        self.file = self.mapped = None
        if way in ("synced", "stored"):
            self.file = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        if way == "stored":
            self.mapped = mmap.mmap(self.file, self.size)
            # memmove copies without looking at each number.
            self.places = [ctypes.addressof(ctypes.c_char.from_buffer(of)) for of in (self.mapped, self.memory)]

    def prepare(self):
        """The next values are others."""
        self.values[0] += 1

    def publish(self):
        """Makes a version."""
        if self.way == "stored":
            ctypes.memmove(*self.places, self.size)
            os.fsync(self.file)
            return
        file = self.file if self.file is not None else os.open(self.path, os.O_WRONLY)
        if os.pwrite(file, self.memory, 0) != self.size:
            raise AssertionError("short write")
        if self.file is not None:
            os.fsync(file)
        else:
            os.close(file)


class Reader:
    """The newest version, in a buffer of the program's own."""

    def __init__(self, model):
        self.model = model
        self.memory, self.values = buffer((model / "weights").stat().st_size)
        self.file = os.open(model / "version", os.O_RDONLY)
        self.poll = select.poll()
        self.poll.register(self.file, select.POLLPRI)
        self.version = self._version()

    def _version(self):
        return int(os.pread(self.file, 32, 0))

    def fetch(self):
        """Waits for the next version, and reads it."""
        before = self.version
        while (version := self._version()) == before:
            if not self.poll.poll(DEADLINE * 1000):
                raise AssertionError(f"no version after {before}")
        self.version = version
        self.read()

    def read(self):
        """Reads all of the newest version."""
        file = os.open(self.model / "weights", os.O_RDONLY)
        if os.preadv(file, [self.memory], 0) != len(self.memory):
            raise AssertionError("short read")
        os.close(file)

    def check(self, publications):
        """It is what was published last."""
        self.read()
        right = (numpy.arange(len(self.values)) % 97).astype(numpy.float32)
        right[0] = publications
        if not numpy.array_equal(self.values, right):
            raise AssertionError(f"the weights are not those of publication {publications}: {self.values[:4]}")


def _tell(**fields):
    print(json.dumps(fields), flush=True)


def _cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main():
    """Does what it is asked for until it is asked for no more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="its directory below a mount")
    parser.add_argument("--way", choices=["written", "synced", "stored"], default="written", help="how weights go in")
    options = parser.parse_args()
    publisher, reader = Publisher(options.model, options.way), Reader(options.model)
    _tell(what="ready")
    for line in sys.stdin:
        request, _, argument = line.strip().partition(" ")
        if request == "round":
            if argument == "publish":
                publisher.prepare()
            else:
                _tell(what="waits")
            cpu, start = _cpu_seconds(), time.monotonic()
            {"publish": publisher.publish, "fetch": reader.fetch}[argument]()
            end, cpu = time.monotonic(), _cpu_seconds() - cpu
            _tell(what=argument, bytes=publisher.size, start=start, end=end, seconds=end - start, cpu_seconds=cpu)
        elif request == "check":
            reader.check(int(argument))
            _tell(what="check")
        else:
            raise SystemExit(f"unknown request {line!r}")


if __name__ == "__main__":
    main()
