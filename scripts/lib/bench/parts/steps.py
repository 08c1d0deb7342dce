"""Learners of the suite mount, in a team: one synchronous step, in which everybody's gradients end up in everybody's weights.

Through the mount (write, close, open, read), by hand with NumPy over shared memory, and by torch.distributed with gloo,
made as fast as it can be on one machine: the workers move to a network namespace of their own with Reno where they may.
There, one or two interfaces and tensors in one or several pieces are tried, and the fastest way is the one that counts.
"""

import functools
import mmap
import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy

from bench import baselines, jobs
from bench.team import Contender, race

sys.path.insert(0, str(jobs.WORK))
import learner  # noqa: E402

# Elements of a reduction by hand that stay in a core's own cache.
PIECE = 65536
DEADLINE = timedelta(seconds=120)
# Interfaces that gloo spreads its connections over, and pieces that a tensor is reduced in at a time; and what a program
# gets that asks for nothing.
INTERFACES = ("lo", "lo,lo")
GLOO_WAYS = [(interfaces, pieces) for interfaces in INTERFACES for pieces in (1, 2)]
PLAIN = ("plain", 1)


# The ways to contribute from a buffer of one's own: what a race is between, and reported as one contender. To write and to
# read the weights, to write and to copy them from a mapping, to store and to copy them so.
WRITTEN = {"write, read": ("written", False), "write, mmap": ("written", True)}
WAYS = {**WRITTEN, "store, mmap": ("stored", True)}
ALL_WAYS = {**WAYS, "mapped": ("mapped", True)}


@functools.lru_cache(maxsize=4)
def gradients(rank, size):
    return learner.filled(numpy.empty(size // 4, numpy.float32), rank)


@functools.lru_cache(maxsize=2)
def total(count, size):
    """The sum of everybody's gradients."""
    return sum(gradients(rank, size) for rank in range(count))


class Through(Contender):
    """A learner that goes through a mount in a way; it may be used in several ways in turn."""

    def __init__(self, one, way):
        self.learner, (self.way, self.by_mapping) = one, way

    def prepare(self):
        """Gradients may be in the file's memory already, as those of a framework that was given it."""
        self.learner.way = self.way
        if self.way == "mapped":
            self.learner.prepare()

    def step(self):
        """Contributes and reads the version that contains it."""
        self.learner.push()
        self.learner.take(self.learner.weights, self.by_mapping)

    def check(self, _):
        """The weights hold every contribution exactly once."""
        self.learner.check(self.learner.steps)


def mounts(member, directories, size):
    """The ways through each of several mounts, {side: learners' directories}, as {(way, side): contender}.

    The learner is the same in every task. A way through one mount is followed by the same through the next."""
    for of_it in directories.values():
        directory = of_it[member.rank]
        if directory not in member.kept:
            member.kept[directory] = learner.Learner(Path(directory), member.rank, member.count)
    return {
        (name, side): Through(member.kept[of_it[member.rank]], way)
        for name, way in ALL_WAYS.items()
        for side, of_it in directories.items()
    }


def forget(member, jobs):
    """Closes the files below mounts that are about to go."""
    for directories in jobs.values():
        if one := member.kept.pop(directories[member.rank], None):
            one.close()


class ByHand(Contender):
    """Shared memory in the file `path`: the weights, then a slot for each member's gradients."""

    def __init__(self, member, path, size):
        self.member = member
        self.gradients, self.total = gradients(member.rank, size), total(member.count, size)
        self.own = numpy.zeros_like(self.gradients)
        with open(path, "r+b") as file:
            mapping = mmap.mmap(file.fileno(), size * (1 + member.count))
        shared = numpy.frombuffer(mapping, numpy.float32).reshape(1 + member.count, -1)
        self.weights, self.slots = shared[0], shared[1:]
        if member.rank == 0:
            shared[:] = 0
        # Everybody has each page at hand before the first step.
        member.meet()
        shared.sum()

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
        if not numpy.array_equal(self.own, self.total * numpy.float32(steps)):
            raise AssertionError(f"wrong weights by hand after {steps} steps")


def mount_and_hand(member, directories, path, size, **arguments):
    """Races the mounts against shared memory."""
    return race(member, {**mounts(member, directories, size), "hand": ByHand(member, path, size)}, **arguments)


def connect_gloo(member, directory, counts):
    """Connects the members, once. `directory` is for the meeting; `counts` are the sizes of the groups."""
    import torch
    from torch import distributed

    def groups(name, interfaces):
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces
        for count in counts:
            member.kept[count, name] = distributed.new_group(list(range(count)), timeout=DEADLINE)

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = {"init_method": f"file://{directory}/store", "timeout": DEADLINE}
    distributed.init_process_group("gloo", rank=member.rank, world_size=member.count, **store)
    groups("plain", "lo")
    # Connections and gloo's threads stay in the namespace they were made in, later ones follow us. All members go to
    # that of the first one, if it may have one.
    meeting = directory / "network"
    if member.rank == 0:
        meeting.write_text(str(os.getpid()) if baselines.move() else "")
    member.meet()
    pid = meeting.read_text()
    if pid and member.rank:
        baselines.join(pid)
    member.meet()
    for interfaces in INTERFACES:
        groups(interfaces, interfaces)
    return bool(pid)


class Gloo(Contender):
    """all_reduce of this member's gradients in `pieces` at a time over `interfaces`."""

    def __init__(self, member, size, interfaces, pieces):
        import torch
        from torch import distributed

        self.reduce = functools.partial(distributed.all_reduce, group=member.kept[member.count, interfaces])
        self.gradients = torch.from_numpy(gradients(member.rank, size))
        self.tensor = torch.zeros_like(self.gradients)
        self.pieces = self.tensor.chunk(pieces)
        self.total = total(member.count, size)

    def prepare(self):
        """Puts the gradients where the sum will be: gloo reduces in place."""
        self.tensor.copy_(self.gradients)

    def step(self):
        """Everybody gets the sum."""
        if len(self.pieces) == 1:
            self.reduce(self.tensor)
            return
        for work in [self.reduce(piece, async_op=True) for piece in self.pieces]:
            work.wait()

    def check(self, _):
        if not numpy.array_equal(self.tensor.numpy(), self.total):
            raise AssertionError("gloo: wrong sum")


def mount_and_gloo(member, directories, size, ways, **arguments):
    """Races the mounts and gloo in the named `ways`: those of `mounts`, and GLOO_WAYS or PLAIN."""
    through_mount = mounts(member, directories, size)
    contenders = {way: through_mount.get(way) or Gloo(member, size, *way) for way in ways}
    return race(member, contenders, **arguments)
