"""A learner of scripts/bench-net that uses the files of a mount, as a process: `net_files.py --help`.

It obeys the lines that the baselines' learners obey (scripts/baselines/src/rounds.rs). `push` contributes the whole
model, by write(2) and close or, for `mapped`, by fsync of gradients that are in the mapping already; `pull` reads the
version that contains it into a buffer of its own; `step` is both, and so is `read_step`. Before its time begins, the
gradients are stored anew where they lie, as backpropagation does.
"""

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy  # noqa: E402

import work_step  # noqa: E402


class Learner:
    """A learner of `count`, in a directory of its own below the model's."""

    def __init__(self, model, rank, count, way):
        self.directory = model / "learners" / f"bench{rank}"
        self.directory.mkdir()
        self.size = (model / "weights").stat().st_size
        self.rank, self.count, self.way = rank, count, way
        # What a Learner of work_step needs to know of its team.
        self.kept = {}
        self.learner = work_step.Learner(self, self.directory, self.size)
        self.computed = self.learner.gradients.copy()
        self.place = self.learner.map_gradients()[1] if way == "mapped" else self.learner.gradients
        self.prepare()

    def prepare(self):
        """Stores the gradients where they are contributed from."""
        numpy.copyto(self.place, self.computed)

    def push(self):
        """Contributes; returns when it is at the shards."""
        if self.way == "mapped":
            os.fsync(self.learner.map_gradients()[0])
            return
        data = memoryview(self.learner.gradients).cast("B")
        file = os.open(self.directory / "gradients", os.O_WRONLY)
        try:
            if os.write(file, data) != self.size:
                raise AssertionError("short write of gradients")
        finally:
            os.close(file)

    def pull(self):
        """The open waits for the version with the last contribution."""
        self.learner.read_weights(into_buffer=True)

    def round(self, what):
        """Gives the bytes that were moved."""
        whole = what in ("step", "read_step")
        for part in ("push", "pull") if whole else (what,):
            getattr(self, part)()
        return self.size * (2 if whole else 1)

    def check(self, pushes):
        """The weights hold every contribution exactly once."""
        self.learner.steps = pushes
        self.learner.check(None)


def _cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _tell(**fields):
    print(json.dumps(fields), flush=True)


def main():
    """Does what it is asked for until it is asked for no more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="its directory below the mount")
    parser.add_argument("--rank", type=int, required=True, help="which learner it is")
    parser.add_argument("--learners", type=int, required=True, help="in the job")
    parser.add_argument("--way", choices=["written", "mapped"], required=True, help="how gradients go in")
    options = parser.parse_args()
    learner = Learner(options.model, options.rank, options.learners, options.way)
    _tell(what="ready")
    for line in sys.stdin:
        request, _, argument = line.strip().partition(" ")
        if request == "round":
            learner.prepare()
            cpu, start = _cpu_seconds(), time.monotonic()
            count = learner.round(argument)
            end, cpu = time.monotonic(), _cpu_seconds() - cpu
            _tell(what=argument, bytes=count, start=start, end=end, seconds=end - start, cpu_seconds=cpu)
        elif request == "check":
            learner.check(int(argument))
            _tell(what="check")
        else:
            raise SystemExit(f"unknown request {line!r}")


if __name__ == "__main__":
    main()
