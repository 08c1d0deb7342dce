"""How often the threads of a small job wait: what scripts/bench-small measures.

One learner on files of a mount, one shard, and a model of 64 KiB, so a step is nothing but messages and the hops of
threads. The kernel counts voluntary context switches of each thread (/proc/PID/task/TID/status).
"""

import json
import re
import statistics
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import daemons
from machine import Failed
from net_gradfs import MODEL, Cluster

LEARNER = Path(__file__).resolve().parent / "small_work.py"
SIZE = 64 << 10
TRANSPORTS, WAYS = ("tcp", "shm"), ("stored", "written")
# Memory of versions is taken meanwhile, and connections come about.
WARM_UP = 100
DEADLINE = 60


def switches_of(pids):
    """{(process, thread): voluntary context switches so far}, by names without numbers."""
    counts = Counter()
    for process, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                status = (task / "status").read_text()
            except OSError:
                # It has just ended.
                continue
            name = re.search(r"^Name:\t(.*)$", status, re.M)[1]
            count = re.search(r"^voluntary_ctxt_switches:\t(\d+)$", status, re.M)[1]
            counts[process, re.sub(r"-\d+$", "", name)] += int(count)
    return counts


@dataclass
class Steps:
    """What some steps took."""

    steps: int = 0
    switches: Counter = field(default_factory=Counter)
    seconds: list = field(default_factory=list)

    def a_step(self):
        """Voluntary context switches of all threads."""
        return sum(self.switches.values()) / self.steps

    def median(self):
        """Seconds of a step."""
        return statistics.median(self.seconds)


class Learner:
    """A process that does steps on files of a mount. Use as a context manager."""

    def __init__(self, model, way):
        command = [sys.executable, "-S", LEARNER, model / "gradients", model / "weights", way]
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=daemons.end_with_parent,
        )

    def __enter__(self):
        self._answer()
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self):
        """Of the process."""
        return self._process.pid

    def steps(self, count):
        """Does so many; gives the seconds of each."""
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise Failed("the learner has ended; what it said is above")
        return json.loads(line)


class Job:
    """A job under way: a shard, a mount, and a learner for each way to contribute, one at a time."""

    def __init__(self, model, pids):
        self.model, self.pids = model, pids

    def measure(self, way, steps):
        """Has a learner do steps, some more before that; gives Steps."""
        with Learner(self.model, way) as learner:
            learner.steps(WARM_UP)
            pids = {"learner": learner.pid, **self.pids}
            before = switches_of(pids)
            seconds = learner.steps(steps)
            after = switches_of(pids)
        after.subtract(before)
        return Steps(steps, after, seconds)


@contextmanager
def job(gradfs, transport, size=SIZE):
    """A Job over a transport."""
    with Cluster(gradfs, size, learners=1) as cluster:
        mountpoint = cluster.directory / "mount"
        options = ["--transport", transport]
        with daemons.network_mount(gradfs, mountpoint, cluster.registry, MODEL, *options) as daemon:
            yield Job(mountpoint / MODEL, {"mount": daemon.pid, "shard": cluster.shard_pids()[0]})
