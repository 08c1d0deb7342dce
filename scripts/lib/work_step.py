"""Learners: one synchronous step, in which everybody's gradients end up in everybody's weights.

Through the mount (write, close, open, read), and the same by hand with NumPy over shared memory.
"""

import functools
import mmap
import os

import numpy

from work_race import race

# Elements of a reduction by hand that stay in a core's own cache.
PIECE = 65536


@functools.lru_cache(maxsize=4)
def gradients(rank, size):
    """A learner's gradients: small whole numbers, so that sums are exact in whatever order."""
    return (numpy.arange(size // 4) % 97 + (rank + 1)).astype(numpy.float32)


@functools.lru_cache(maxsize=2)
def total(count, size):
    """The sum of everybody's gradients."""
    added = numpy.zeros(size // 4, numpy.float32)
    for rank in range(count):
        added += gradients(rank, size)
    return added


class Learner:
    """A learner of a job, whose directory is `directory`; it may be used in several ways in turn."""

    def __init__(self, member, directory, size):
        self.directory = directory
        self.size = size
        self.gradients = gradients(member.rank, size)
        self.weights = numpy.ones_like(self.gradients)
        self.total = total(member.count, size)
        self.steps = 0
        self._mapping = None

    def map_gradients(self):
        """The file `gradients` and an array that is its memory, the same ones every time."""
        if self._mapping is None:
            file = os.open(f"{self.directory}/gradients", os.O_RDWR | os.O_DIRECT)
            self._mapping = file, numpy.frombuffer(mmap.mmap(file, self.size), numpy.float32)
        return self._mapping

    def read_weights(self, into_buffer):
        """Copies the newest version, by read(2) or from a mapping, to the buffer that is always the same."""
        file = os.open(f"{self.directory}/weights", os.O_RDONLY)
        try:
            if into_buffer:
                if os.preadv(file, [self.weights], 0) != self.size:
                    raise AssertionError("short read of weights")
                return
            with mmap.mmap(file, self.size, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
                numpy.copyto(self.weights, numpy.frombuffer(mapping, numpy.float32))
        finally:
            os.close(file)

    def check(self, _):
        """The weights hold every contribution exactly once."""
        right = self.total * numpy.float32(self.steps)
        if not numpy.array_equal(self.weights, right):
            wrong = numpy.flatnonzero(self.weights != right)
            raise AssertionError(f"wrong weights after {self.steps} steps: {len(wrong)} elements from {wrong[0]}")


class Written:
    """Gradients by one write(2); weights by read(2), or else mapped and copied."""

    def __init__(self, learner, into_buffer):
        self.learner = learner
        self.into_buffer = into_buffer
        self.check = learner.check

    def prepare(self):
        """Nothing to do."""

    def step(self):
        """Contributes and reads the version that contains it."""
        learner = self.learner
        data = memoryview(learner.gradients).cast("B")
        file = os.open(f"{learner.directory}/gradients", os.O_WRONLY)
        try:
            if os.write(file, data) != learner.size:
                raise AssertionError("short write of gradients")
        finally:
            os.close(file)
        learner.read_weights(self.into_buffer)
        learner.steps += 1


class Mapped:
    """Gradients that are in the file's memory already, as those of a framework that was given it."""

    def __init__(self, learner):
        self.learner = learner
        self.file, self.memory = learner.map_gradients()
        self.check = learner.check

    def prepare(self):
        """Puts the gradients there, as backpropagation would."""
        numpy.copyto(self.memory, self.learner.gradients)

    def step(self):
        """Contributes and reads the version that contains it."""
        os.fsync(self.file)
        self.learner.read_weights(into_buffer=False)
        self.learner.steps += 1


class Stored(Mapped):
    """Gradients by memcpy into the mapped file."""

    def prepare(self):
        """Nothing to do."""

    def step(self):
        """Contributes and reads the version that contains it."""
        numpy.copyto(self.memory, self.learner.gradients)
        super().step()


# The ways to contribute from a buffer of one's own: what a race is between, and reported as one contender.
WRITTEN = {"write, read": True, "write, mmap": False}
STORED = "store, mmap"
WAYS = (*WRITTEN, STORED)


def mount(member, directories, size):
    """The ways through the mount, as contenders by name. The learner is the same in every task."""
    directory = directories[member.rank]
    if directory not in member.kept:
        member.kept[directory] = Learner(member, directory, size)
    learner = member.kept[directory]
    ways = {way: Written(learner, into_buffer) for way, into_buffer in WRITTEN.items()}
    return {**ways, STORED: Stored(learner), "mapped": Mapped(learner)}


def mounts(member, directories, size):
    """The ways through each of several mounts, {name: learners' directories}; names are pairs of a way and a mount's.

    A way through one mount is followed by the same through the next."""
    found = {name: mount(member, of_it, size) for name, of_it in directories.items()}
    return {(way, name): found[name][way] for way in (*WAYS, "mapped") for name in found}


def forget(member, directories):
    """Closes the files below a mount that is about to go."""
    learner = member.kept.pop(directories[member.rank], None)
    if learner and learner._mapping:
        os.close(learner._mapping[0])


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
    """Races the mounts against shared memory."""
    contenders = {**mounts(member, directories, size), "hand": ByHand(member, path, size)}
    return race(member, contenders, **arguments)
