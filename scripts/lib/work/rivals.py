"""What files of `gradfs up` are raced with in the suite mount, as processes: `rivals.py TASK ARGUMENTS`.

They obey lines as learners do (learner.py). A `step` is:

  read FILE  all of it, by preadv(2), 1 MiB at a time, into one buffer
  mmap FILE  a new mapping of it, every byte of which is touched
  commit MODEL
             (not a step) a commit of all gradients, written and synced
  hand FILE DIRECTORY RANK
             a synchronous step of two learners with NumPy, over shared memory in the file
  gloo DIRECTORY RANK LEARNERS SIZE
             an all_reduce of torch.distributed with gloo; `set_way INTERFACES PIECES` says over which interfaces, and in how
             many pieces

gloo is made as fast as it can be on one machine: the processes move to a network namespace of their own with Reno where
they may. What is asked for as "plain" stays in the one that they were started in.
"""

import functools
import mmap
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.dont_write_bytecode = True

import learner  # noqa: E402
import numpy  # noqa: E402
from bench import baselines  # noqa: E402
from bench.parts.files import pattern  # noqa: E402
from machine import MIB  # noqa: E402

# Elements of a reduction by hand that stay in a core's own cache.
PIECE = 65536
DEADLINE = timedelta(seconds=120)
# Interfaces that gloo spreads its connections over.
INTERFACES = ("lo", "lo,lo")


class Read:
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
        return self.size

    def check(self, _):
        if not numpy.array_equal(numpy.frombuffer(self.buffer, numpy.float32), pattern(self.size // MIB - 1)):
            raise AssertionError(f"{self.path}: wrong bytes read")


class Mmap(Read):
    def step(self):
        file = os.open(self.path, os.O_RDONLY)
        try:
            with mmap.mmap(file, self.size, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
                self.sum = int(numpy.frombuffer(mapping, numpy.uint64).sum())
        finally:
            os.close(file)
        return self.size

    def check(self, _):
        pieces = (pattern(index).copy().view(numpy.uint64).sum() for index in range(self.size // MIB))
        if self.sum != sum(map(int, pieces)) % 2**64:
            raise AssertionError(f"{self.path}: wrong bytes mapped")


class Commit:
    """The gradients of a model that is one block; their file stays open."""

    def __init__(self, model):
        self.model, size = Path(model), os.stat(f"{model}/weights").st_size
        # Sums of it are exact for longer than this runs.
        self.data = numpy.full(size // 4, 2.0**-7, numpy.float32).tobytes()
        self.file = os.open(f"{model}/gradients", os.O_WRONLY)

    def prepare(self):
        """Nothing to do."""

    def commit(self):
        if os.pwrite(self.file, self.data, 0) != len(self.data):
            raise AssertionError("short write of gradients")
        os.fsync(self.file)

    def check(self, commits):
        """Every commit is in the weights, exactly once."""
        os.close(self.file)
        if set(numpy.fromfile(self.model / "weights", numpy.float32)) != {numpy.float32(int(commits) * 2.0**-7)}:
            raise AssertionError(f"wrong weights after {commits} commits")


class Hand:
    """The file has the weights, and then a slot for each learner's gradients. FIFOs of the directory tell who is as far."""

    def __init__(self, path, directory, rank):
        self.rank = int(rank)
        self.mine, self.theirs = (os.open(f"{directory}/meeting{of}", os.O_RDWR) for of in (self.rank, 1 - self.rank))
        with open(path, "r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
        shared = numpy.frombuffer(mapping, numpy.float32).reshape(3, -1)
        self.weights, self.slots = shared[0], shared[1:]
        self.gradients = learner.filled(numpy.empty_like(self.weights), self.rank)
        self.own = numpy.zeros_like(self.gradients)
        if self.rank == 0:
            shared[:] = 0
        # Both have each page at hand before the first step.
        self.meet()
        shared.sum()

    def meet(self):
        """Waits for the other one, who is one meeting ahead at most."""
        os.write(self.theirs, b".")
        os.read(self.mine, 1)

    def step(self):
        """Copies in, reduces a half, copies out."""
        numpy.copyto(self.slots[self.rank], self.gradients)
        self.meet()
        share = len(self.weights) // 2
        first = share * self.rank
        for start in range(first, first + share, PIECE):
            piece = slice(start, min(start + PIECE, first + share))
            for slot in self.slots:
                numpy.add(self.weights[piece], slot[piece], out=self.weights[piece])
        self.meet()
        numpy.copyto(self.own, self.weights)
        return self.gradients.nbytes

    def check(self, steps):
        learner.check_sums(self.own, 2, int(steps))


class Gloo:
    def __init__(self, directory, rank, learners, size):
        import torch
        from torch import distributed

        rank, self.learners, self.groups = int(rank), int(learners), {}
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = {"init_method": f"file://{directory}/store", "timeout": DEADLINE}
        distributed.init_process_group("gloo", rank=rank, world_size=self.learners, **store)
        self.groups["plain"] = distributed.new_group(timeout=DEADLINE)
        # Connections and gloo's threads stay in the namespace they were made in, later ones follow us. All go to that of the
        # first one, if it may have one.
        meeting = Path(directory, "network")
        if rank == 0:
            is_own = baselines.move()
            meeting.with_suffix(".new").write_text(str(os.getpid()) if is_own else "")
            meeting.with_suffix(".new").rename(meeting)
            if not is_own:
                print("no network namespace of its own: gloo has this machine's congestion control", file=sys.stderr)
        while not meeting.exists():
            time.sleep(0.01)
        if rank and (pid := meeting.read_text()):
            baselines.join(pid)
        for interfaces in INTERFACES:
            os.environ["GLOO_SOCKET_IFNAME"] = interfaces
            self.groups[interfaces] = distributed.new_group(timeout=DEADLINE)
        self.all_reduce = distributed.all_reduce
        self.gradients = torch.from_numpy(learner.filled(numpy.empty(int(size) // 4, numpy.float32), rank))
        self.tensor = torch.zeros_like(self.gradients)

    def set_way(self, interfaces, pieces):
        self.reduce = functools.partial(self.all_reduce, group=self.groups[interfaces])
        self.pieces = self.tensor.chunk(int(pieces))

    def prepare(self):
        """Puts the gradients where the sum will be: gloo reduces in place."""
        self.tensor.copy_(self.gradients)

    def step(self):
        if len(self.pieces) == 1:
            self.reduce(self.tensor)
        else:
            for work in [self.reduce(piece, async_op=True) for piece in self.pieces]:
                work.wait()
        return self.tensor.numpy().nbytes

    def check(self, _):
        learner.check_sums(self.tensor.numpy(), self.learners, 1)


if __name__ == "__main__":
    task, *words = sys.argv[1:]
    learner.obey(lambda: {"read": Read, "mmap": Mmap, "commit": Commit, "hand": Hand, "gloo": Gloo}[task](*words))
