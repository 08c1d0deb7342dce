"""A learner of scripts/bench-memory, as a process: `memory_work.py DIRECTORY`.

DIRECTORY has its `gradients` and `weights`. It takes memory from the first line of its input on, so that whoever starts it
can put it into a group before. Then it does a step for each line of its input, `written` or `mapped`, and answers with
a line. In a written step open, write and close contribute ones; in a mapped step the ones are stored into the mapped file,
and fsync contributes them. Then it reads the weights. The mapping stays until the process ends.
"""

import array
import mmap
import os
import sys
from pathlib import Path

PIECE = 8 << 20


def main():
    """Does steps until it is asked for no more."""
    directory = Path(sys.argv[1])
    sys.stdin.readline()
    size = (directory / "weights").stat().st_size
    ones = memoryview(array.array("f", [1.0]) * (size // 4)).cast("B")
    values = memoryview(bytearray(size))
    file = memory = None
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "written":
            written = os.open(directory / "gradients", os.O_WRONLY)
            try:
                for at in range(0, size, PIECE):
                    os.write(written, ones[at : at + PIECE])
            finally:
                os.close(written)
        else:
            if memory is None:
                file = os.open(directory / "gradients", os.O_RDWR | os.O_DIRECT)
                memory = mmap.mmap(file, size)
            memory[:] = ones
            os.fsync(file)
        weights = os.open(directory / "weights", os.O_RDONLY)
        try:
            for at in range(0, size, PIECE):
                os.preadv(weights, [values[at : at + PIECE]], at)
        finally:
            os.close(weights)
        first, last = values.cast("f")[0], values.cast("f")[-1]
        print(first, last, flush=True)


if __name__ == "__main__":
    main()
