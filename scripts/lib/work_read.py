"""Readers: the whole of a file, by read(2) into a reused buffer or by a fresh mapping."""

import mmap
import os

import numpy

from machine import MIB
from work_race import race

# The pattern that files are filled with: fp32 numbers that repeat at no power of two.
PERIOD = 251
_COUNT = MIB // 4
_PATTERN = (numpy.arange(_COUNT + PERIOD) % PERIOD).astype(numpy.float32)


def pattern(index):
    """MiB `index` of the pattern."""
    first = index * _COUNT % PERIOD
    return _PATTERN[first : first + _COUNT]


class ByRead:
    """preadv(2), 1 MiB at a time, into one buffer."""

    def __init__(self, path):
        self.path = path
        self.size = os.stat(path).st_size
        self.buffer = mmap.mmap(-1, MIB)
        self.buffer.write(bytes(MIB))

    def prepare(self):
        """Nothing to do."""

    def step(self):
        """Reads it all."""
        into = [self.buffer]
        file = os.open(self.path, os.O_RDONLY)
        try:
            for offset in range(0, self.size, MIB):
                if os.preadv(file, into, offset) != MIB:
                    raise AssertionError(f"{self.path}: short read at {offset}")
        finally:
            os.close(file)

    def check(self, _):
        """What was read last is right."""
        if not numpy.array_equal(numpy.frombuffer(self.buffer, numpy.float32), pattern(self.size // MIB - 1)):
            raise AssertionError(f"{self.path}: wrong bytes read")


class ByMapping:
    """A new mapping each time, every byte of it touched."""

    def __init__(self, path):
        self.path = path
        self.size = os.stat(path).st_size
        self.sum = None

    def prepare(self):
        """Nothing to do."""

    def step(self):
        """Maps, adds up, unmaps."""
        file = os.open(self.path, os.O_RDONLY)
        try:
            with mmap.mmap(file, self.size, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
                self.sum = int(numpy.frombuffer(mapping, numpy.uint64).sum())
        finally:
            os.close(file)

    def check(self, _):
        """The sum is right."""
        pieces = (pattern(index).copy().view(numpy.uint64).sum() for index in range(self.size // MIB))
        if self.sum != sum(map(int, pieces)) % 2**64:
            raise AssertionError(f"{self.path}: wrong bytes mapped")


def read(member, paths, how, **arguments):
    """Races the files `paths` ({name: path}) against each other."""
    kind = {"read": ByRead, "mmap": ByMapping}[how]
    return race(member, {name: kind(path) for name, path in paths.items()}, **arguments)
