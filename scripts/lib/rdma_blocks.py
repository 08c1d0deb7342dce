"""Push and pull against the size of the model's blocks by RDMA, by either placement, and over TCP, for
scripts/bench-rdma: the races of net_blocks.py with a smaller model, in the virtual machine.
"""

import net_blocks
import rdma_race
from machine import MIB, say

# dynamic: the shard fetches blocks. static: learners place them. Pulls are the same with both.
TRANSPORTS = ("tcp", "dynamic", "static")
# The slow machine has time for 16 blocks of up to 512 KiB on their way, of larger ones for as many as there are.
WAYS = {"pipelined": net_blocks.Way(8 * MIB, 5, 0, 1), "sync": net_blocks.Way(None, 5, 0, 2)}
SLOTS = 16
# Slots that a shard grants to a connection, and how many a learner has.
GRANTED, CONNECTIONS = 8, 2
# Rings and directories, at most.
RINGS = 8


class Quiet:
    """Nothing else runs in the machine: it only tells how far it is."""

    def __init__(self, rounds):
        self.rounds = rounds
        self.begun = 0

    def wait(self):
        """A round begins."""
        self.begun += 1
        say(f"round {self.begun} of {self.rounds}")


def _arena(name, size, slots):
    """MiB that a shard needs for such blocks, and its options."""
    placed = GRANTED * CONNECTIONS * size if name == "static" else 0
    fetched = 2 * size * slots
    return RINGS + -(-(placed + fetched) // MIB)


def measure(job):
    """[[what, transport, way, {size: MB/s}]], medians."""

    def start(stack, name, size, model):
        slots = min(SLOTS, max(1, model // size))
        more = ["--rdma-slots", slots, "--rdma-arena", f"{_arena(name, size, slots)}MiB"]
        return rdma_race.start(stack, name, job, model, size, more)[0]

    found = {}
    for name, way in WAYS.items():
        say(f"throughput against block size, {name}")
        found[name] = net_blocks.race(TRANSPORTS, start, way, Quiet(net_blocks.WARM_UP + way.rounds))
    series = net_blocks.medians(found, TRANSPORTS)
    return [[*key, {size: rate * 1e3 for size, rate in rates.items()}] for key, rates in series.items()]
