"""Gradients written to a mount on a network against the size of a write, for scripts/bench-net.

A run is one contribution of the whole model by fio (fio-jobs/), with the fsync that returns when it counts. Mounts of
either transport live through the whole race. Weights are not read here: a mount has them in this host's memory by
then, so a read does not touch the network.
"""

import os
import random
import statistics
import struct
from contextlib import ExitStack, contextmanager

import daemons
import fio
import net_gradfs
from machine import GIB, MIB, Failed

SIZES = [16 << shift << 10 for shift in range(0, 11, 2)]
TRANSPORTS = ("tcp", "shm")
JOBS = {"pipelined": "gradients-write-libaio", "sync": "gradients-write-psync"}
MODEL = 256 * MIB
ROUNDS = 9
WARM_UP = 4
# Of all mounts and shards: staging, versions at either end, a shard's sums; and fio's buffers.
MEMORY = (len(TRANSPORTS) * 11 + 1) * MODEL + GIB
# Each element of a contribution, as fio-jobs/gradients-write.inc has it.
ELEMENT = 2.0**-7


class _Mount:
    """A model's directory below a mount of its own."""

    def __init__(self, directory):
        self.directory = directory
        self.runs = 0

    def run(self, job, size):
        """One contribution; GB/s."""
        rate = fio.run(job, self.directory, f"{size >> 10}k", MODEL)
        self.runs += 1
        # The open waits for the version, so that its way here is nobody else's burden.
        with open(self.directory / "weights", "rb"):
            return rate * GIB / 1e9

    def check(self):
        """Ends the run unless the weights have every contribution once."""
        right = struct.pack("<f", self.runs * ELEMENT) * (MIB // 4)
        with open(self.directory / "weights", "rb") as file:
            if os.fstat(file.fileno()).st_size != MODEL or any(file.read(MIB) != right for _ in range(MODEL // MIB)):
                raise Failed(f"wrong weights in {self.directory} after {self.runs} contributions")


@contextmanager
def _mount(gradfs, transport):
    with net_gradfs.Cluster(gradfs, MODEL, 1) as cluster:
        mountpoint, model = cluster.directory / "mount", net_gradfs.MODEL
        with daemons.network_mount(gradfs, mountpoint, cluster.registry, model, "--transport", transport):
            yield _Mount(mountpoint / model)


def measure(gradfs, quiet):
    """{("write", transport, way): {size: GB/s}}, medians."""
    rates = {(size, transport, way): [] for size in SIZES for transport in TRANSPORTS for way in JOBS}
    with ExitStack() as stack:
        mounts = {transport: stack.enter_context(_mount(gradfs, transport)) for transport in TRANSPORTS}
        for mount in mounts.values():
            for _ in range(WARM_UP):
                mount.run(JOBS["pipelined"], MIB)
        # The order differs from round to round, and is the same in every run.
        shuffle = random.Random(0).shuffle
        order = list(rates)
        for _ in range(ROUNDS):
            shuffle(order)
            for size, transport, way in order:
                quiet.wait()
                rates[size, transport, way].append(mounts[transport].run(JOBS[way], size))
        for mount in mounts.values():
            mount.check()
    return {
        ("write", transport, way): {size: statistics.median(rates[size, transport, way]) for size in SIZES}
        for transport in TRANSPORTS
        for way in JOBS
    }
