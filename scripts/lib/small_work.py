"""The learner of scripts/bench-small, as a process: `small_work.py GRADIENTS WEIGHTS WAY`.

A step contributes gradients of ones, and reads the weights that hold them. `stored`: the gradients are stored into the
mapped file, and fsync contributes them. `written`: open, write and close do. It reads a number of steps from each line,
and answers with the seconds that each of them took. It has one thread and imports nothing that starts others, so what it
waits for is the mount.
"""

import array
import json
import mmap
import os
import sys
import time


class Stored:
    """Gradients in the mapped file."""

    def __init__(self, path, data):
        self.data = data
        self.file = os.open(path, os.O_RDWR | os.O_DIRECT)
        self.memory = mmap.mmap(self.file, len(data))

    def contribute(self):
        """One step's gradients."""
        self.memory[:] = self.data
        os.fsync(self.file)


class Written:
    """Gradients by write(2)."""

    def __init__(self, path, data):
        self.path, self.data = path, data

    def contribute(self):
        """One step's gradients."""
        file = os.open(self.path, os.O_WRONLY)
        try:
            if os.write(file, self.data) != len(self.data):
                raise AssertionError("short write of gradients")
        finally:
            os.close(file)


def read(path, into):
    """The weights that this program's last contribution is in."""
    file = os.open(path, os.O_RDONLY)
    try:
        if os.preadv(file, [into], 0) != len(into):
            raise AssertionError("short read of weights")
    finally:
        os.close(file)


def main():
    """Does steps until it is asked for no more."""
    gradients, weights, way = sys.argv[1:]
    size = os.stat(weights).st_size
    ones, values = array.array("f", [1.0] * (size // 4)), array.array("f", bytes(size))
    learner = {"stored": Stored, "written": Written}[way](gradients, ones.tobytes())
    into = memoryview(values).cast("B")
    read(weights, into)
    # Everything so far is in the weights, whoever has contributed it.
    total = values[0]
    print(json.dumps([]), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            learner.contribute()
            read(weights, into)
            times.append(time.perf_counter() - begin)
            total += 1.0
            if not values[0] == values[-1] == total:
                raise AssertionError(f"wrong weights: {values[0]} and {values[-1]} after {total:.0f} contributions")
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
