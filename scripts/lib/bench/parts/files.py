"""What files of the suites mount and nbd are filled with, and listings and cores that stay awake, of the suite mount."""

import os
import subprocess
import time
from contextlib import contextmanager

import numpy
from machine import MIB, Failed
from programs import end_with_parent

# The pattern that files are filled with: fp32 numbers that repeat at no power of two.
PERIOD = 251
_COUNT = MIB // 4
_PATTERN = (numpy.arange(_COUNT + PERIOD) % PERIOD).astype(numpy.float32)


def pattern(index):
    """MiB `index` of the pattern."""
    first = index * _COUNT % PERIOD
    return _PATTERN[first : first + _COUNT]


def fill(model, count):
    """Contributes so many MiB of the pattern."""
    with open(model / "gradients", "wb", buffering=0) as file:
        for index in range(count):
            file.write(pattern(index).tobytes())


def new_version(model):
    """Contributes four bytes to a model."""
    before = os.stat(model / "tensors").st_ino
    (model / "gradients").write_bytes(bytes(4))
    if os.stat(model / "tensors").st_ino == before:
        raise Failed("a contribution has made no version")


def listing(path, count):
    """The seconds of one `ls -l` of so many files, by the path of the directory, as in a shell."""
    start = time.monotonic()
    shown = subprocess.run(["ls", "-l", path], stdout=subprocess.PIPE, timeout=120, check=True).stdout
    took = time.monotonic() - start
    if (lines := shown.count(b"\n")) != count + 1:
        raise Failed(f"{path}: ls -l has {lines} lines, not {count + 1}")
    return took


@contextmanager
def awake():
    """Keeps the cores from halting: to wake one takes longer than all that a small commit does, in a virtual machine."""
    spinning = []
    try:
        for core in os.sched_getaffinity(0):
            # It takes the time of a core that nobody else wants.
            command = ["chrt", "--idle", "0", "taskset", "--cpu-list", str(core), "sh", "-c", "while :; do :; done"]
            spinning.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent))
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
