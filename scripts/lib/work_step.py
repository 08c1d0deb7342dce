"""Learners: one synchronous step, in which everybody's gradients end up in everybody's weights.

Through the mount (write, close, open, read), and the same by hand with NumPy over shared memory.
"""

import mmap
import os

import numpy

from machine import MIB
from work_race import race

# Elements of a reduction by hand that stay in a core's own cache.
PIECE = 65536


def gradients(rank, size):
    """A learner's gradients: small whole numbers, so that sums are exact in whatever order."""
    return (numpy.arange(size // 4) % 97 + (rank + 1)).astype(numpy.float32)


def total(count, size):
    """The sum of everybody's gradients."""
    return sum((gradients(rank, size) for rank in range(count)), numpy.zeros(size // 4, numpy.float32))


class Mount:
    """The learner whose directory is `directory`."""

    def __init__(self, member, directory, size):
        self.directory = directory
        self.gradients = gradients(member.rank, size)
        self.weights = numpy.zeros_like(self.gradients)
        self.total = total(member.count, size)

    def prepare(self):
        """Nothing to do."""

    def step(self):
        """Contributes and reads the version that contains it."""
        data = memoryview(self.gradients).cast("B")
        file = os.open(f"{self.directory}/gradients", os.O_WRONLY)
        try:
            for offset in range(0, len(data), MIB):
                if os.pwrite(file, data[offset : offset + MIB], offset) != MIB:
                    raise AssertionError(f"short write at {offset}")
        finally:
            os.close(file)
        with open(f"{self.directory}/weights", "rb", buffering=0) as file:
            if file.readinto(self.weights) != len(data):
                raise AssertionError("short read of weights")

    def check(self, steps):
        """The weights hold every contribution exactly once."""
        if not numpy.array_equal(self.weights, self.total * numpy.float32(steps)):
            wrong = numpy.flatnonzero(self.weights != self.total * numpy.float32(steps))
            raise AssertionError(f"wrong weights after {steps} steps: {len(wrong)} elements from {wrong[0]}")


class ByHand:
    """Shared memory in the file `path`: the weights, then a slot for each member's gradients."""

    def __init__(self, member, path, size):
        self.member = member
        self.gradients = gradients(member.rank, size)
        self.own = numpy.zeros_like(self.gradients)
        self.total = total(member.count, size)
        with open(path, "r+b") as file:
            mapping = mmap.mmap(file.fileno(), size * (1 + member.count))
        shared = numpy.frombuffer(mapping, numpy.float32).reshape(1 + member.count, -1)
        self.weights, self.slots = shared[0], shared[1:]
        if member.rank == 0:
            shared[:] = 0
        # Everybody has each page at hand before the first step.
        member.meet()
        shared.sum()

    def prepare(self):
        """Nothing to do."""

    def step(self):
        """Copies in, reduces a share, copies out."""
        numpy.copyto(self.slots[self.member.rank], self.gradients)
        self.member.meet()
        share = len(self.weights) // self.member.count
        first = share * self.member.rank
        for start in range(first, first + share, PIECE):
            piece = slice(start, min(start + PIECE, first + share))
            for slot in self.slots:
                numpy.add(self.weights[piece], slot[piece], out=self.weights[piece])
        self.member.meet()
        numpy.copyto(self.own, self.weights)

    def check(self, steps):
        """As for the mount."""
        if not numpy.array_equal(self.own, self.total * numpy.float32(steps)):
            raise AssertionError(f"wrong weights by hand after {steps} steps")


def mount_and_hand(member, directories, path, size, **arguments):
    """Races the mount against shared memory."""
    contenders = {
        "mount": Mount(member, directories[member.rank], size),
        "hand": ByHand(member, path, size),
    }
    return race(member, contenders, **arguments)
