"""Time limits of tests that hold on a busy machine.

Whatever a test waits for has HANGS seconds, however busy the machine is. Where a promise is about seconds, a Limit counts
those in which nothing else held the machine up: while some task waits for a core, a disk or memory (/proc/pressure), or the
host takes the cores away, the time may stand still, but is stretched at most tenfold.
"""

import os
import re
import time
from pathlib import Path

# What is not over by then never is.
HANGS = 300
# How much longer things take on the busiest machine that is borne with, and what one of them may take by itself.
STRETCHED = 10
MEANWHILE = 20


def held_up():
    """Seconds for which the machine has held somebody up since it began. Where the kernel does not tell, all of them."""
    try:
        some = [Path("/proc/pressure", what).read_text().splitlines()[0] for what in ("cpu", "io", "memory")]
    except OSError:
        return time.monotonic()
    stolen = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    pressure = sum(int(re.search(r"total=(\d+)", line)[1]) for line in some)
    return pressure / 1e6 + stolen / os.sysconf("SC_CLK_TCK")


class Limit:
    """So many seconds from now on, of a machine that is not busy."""

    def __init__(self, seconds):
        self.seconds = seconds
        self._begun, self._held_up = time.monotonic(), held_up()

    def taken(self):
        """Seconds that have passed."""
        return time.monotonic() - self._begun

    def over(self):
        taken = self.taken()
        if taken <= self.seconds:
            return False
        stretched = STRETCHED * self.seconds + MEANWHILE
        return taken > stretched or taken - (held_up() - self._held_up) > self.seconds
