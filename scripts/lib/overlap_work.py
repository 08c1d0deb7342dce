"""What runs on the hosts of scripts/bench-stall for synchronous jobs: a learner that computes (it sleeps), contributes and
opens the new weights.

It prints one line of JSON: the seconds of each step, of which so many were spent computing, in handing chunks
over (`write`), in fsync or close, and in open.
"""

import json
import mmap
import os
import sys
import time

# The first steps fill buffers and are not measured.
WARM = 2


class Written:
    """Chunks by write(2)."""

    def __init__(self, learner, data):
        self.learner, self.data, self.file = learner, data, None

    def begin(self):
        """A step."""
        self.file = os.open(f"{self.learner}/gradients", os.O_WRONLY)

    def chunk(self, start, end):
        """These bytes are computed."""
        os.pwrite(self.file, self.data[start:end], start)

    def end(self):
        """Of the contribution."""
        os.fsync(self.file)
        os.close(self.file)


class Fallocate:
    """Chunks that are stored into the mapped file, and are final then."""

    def __init__(self, learner, data):
        self.data, self.file = data, os.open(f"{learner}/gradients", os.O_RDWR | os.O_DIRECT)
        self.memory = mmap.mmap(self.file, len(data))

    def begin(self):
        """A step."""

    def chunk(self, start, end):
        """These bytes are computed."""
        self.memory[start:end] = self.data[start:end]
        os.posix_fallocate(self.file, start, end - start)

    def end(self):
        """Of the contribution."""
        os.fsync(self.file)


def step(way, learner, size, chunks, compute):
    """One step in equal chunks, each after its share of `compute`: the seconds of each of its parts."""
    began = time.monotonic()
    way.begin()
    computed = written = 0.0
    for chunk in range(chunks):
        begin = time.monotonic()
        time.sleep(compute / chunks)
        slept = time.monotonic()
        way.chunk(size * chunk // chunks, size * (chunk + 1) // chunks)
        computed, written = computed + slept - begin, written + time.monotonic() - slept
    begin = time.monotonic()
    way.end()
    ended = time.monotonic()
    os.close(os.open(f"{learner}/weights", os.O_RDONLY))
    over = time.monotonic()
    return {"step": over - began, "compute": computed, "write": written, "end": ended - begin, "open": over - ended}


def learn(learner, how, size, chunks, compute, steps):
    """Some steps, after a few that are not measured."""
    found = []
    way = {"written": Written, "fallocate": Fallocate}[how](learner, memoryview(bytes(size)))
    print("ready", flush=True)
    for number in range(WARM + steps):
        parts = step(way, learner, size, chunks, compute)
        if number >= WARM:
            found.append(parts)
    print(json.dumps(found))


if __name__ == "__main__":
    path, way_in, *words = sys.argv[1:]
    learn(path, way_in, int(words[0]), int(words[1]), float(words[2]), int(words[3]))
