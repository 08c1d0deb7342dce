"""Small commits: one block of gradients and the fsync that makes it count, one after the other in one process."""

import os
import struct
import subprocess
import sys
import time
from contextlib import contextmanager

from daemons import end_with_parent
from machine import Quiet

# Of a round, from which the others take over.
COMMITS = 50
# Each element of a contribution: sums of it are exact for longer than this runs.
ELEMENT = 2.0**-7


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
        self.model = model
        self.size = os.stat(model / "weights").st_size
        self.data = struct.pack("<f", ELEMENT) * (self.size // 4)
        self.file = os.open(model / "gradients", os.O_WRONLY)
        self.commits = 0

    def round(self):
        """What each commit took, in seconds."""
        took, file, data = [], self.file, self.data
        for _ in range(COMMITS):
            start = time.perf_counter_ns()
            written = os.pwrite(file, data, 0)
            os.fsync(file)
            took.append((time.perf_counter_ns() - start) / 1e9)
            if written != self.size:
                raise AssertionError("short write of gradients")
        self.commits += COMMITS
        return took

    def finish(self):
        """Every commit is in the weights, exactly once."""
        os.close(self.file)
        with open(self.model / "weights", "rb") as file:
            if file.read() != struct.pack("<f", ELEMENT * self.commits) * (self.size // 4):
                raise AssertionError(f"wrong weights after {self.commits} commits")


def commits(member, models, rounds, warm_up, patience, alternate):
    """Gives {name: [seconds of each commit of a round, …]} for {name: model}; the models take turns."""
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
