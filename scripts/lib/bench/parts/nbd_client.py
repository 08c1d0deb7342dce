"""Clients of network block devices, for the suite nbd: fio, nbdcopy, and libnbd to check bytes and end steps."""

import os
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy
from machine import GIB, MIB, Failed
from programs import output_of

from bench import fio

COPY_DEADLINE = 120.0
# How long connections wait for the last one to have written; they have as much to write and begin together.
GATE_DEADLINE = 5.0
# Of fio: to find out how fast the CPU's clock is takes longer than to start.
CLOCK = "--clocksource=clock_gettime"
# Each element that fio writes, as fio-jobs/nbd-write.inc has it.
ELEMENT = numpy.float32(2.0**-7)


@dataclass(frozen=True)
class Cell:
    """A way to ask: by which client, bytes a request, requests on their way on each connection, and connections."""

    client: str
    request: int
    depth: int
    connections: int
    # Whether a FLUSH ends the run, inside the measured time.
    flush: bool = False

    @property
    def name(self):
        size = f"{self.request // MIB}mib" if self.request >= MIB else f"{self.request >> 10}kib"
        return f"{self.client}_{size}_{self.depth}deep_{self.connections}conn"

    def parameters(self, uri, size):
        """What the jobs of fio-jobs/ need to know."""
        names = {"BS": self.request, "DEPTH": self.depth, "PARTS": self.connections, "PART": size // self.connections}
        return {"NBD_URI": uri, "FLUSH": str(int(self.flush)), **{name: str(value) for name, value in names.items()}}


def again_and_again(job, uri, cell, size, milliseconds):
    """fio for so long, after a quarter of that in which its buffers get their memory; GiB/s."""
    options = [CLOCK, "--time_based", f"--runtime={milliseconds}ms", f"--ramp_time={milliseconds // 4}ms"]
    return fio.rate(job, cell.parameters(uri, size), options=options)


def write_once(uri, cell, size, options=(), cwd="/tmp"):
    """fio writes each of `size` bytes once; GiB/s."""
    return fio.rate("nbd-write", cell.parameters(uri, size), size, [CLOCK, *options], cwd)


def copy_out(uri, cell, size, milliseconds):
    """nbdcopy reads all of it into nothing, as often as it has to for at least so long; GiB/s."""
    ways = f"--connections={cell.connections} --requests={cell.depth} --request-size={cell.request}"
    start, copies, took = time.monotonic(), 0, 0
    while took < milliseconds / 1000:
        copy(uri, "null:", *ways.split())
        copies += 1
        took = time.monotonic() - start
    return copies * size / GIB / took


def copy(source, target, *options):
    """nbdcopy from one to the other."""
    output_of("nbdcopy", *options, source, target, timeout=COPY_DEADLINE)


@contextmanager
def connection(uri):
    """An open connection of libnbd; says good-bye."""
    import nbd

    handle = nbd.NBD()
    handle.connect_uri(uri)
    yield handle
    handle.shutdown()


def check(uri, size, expected):
    """Ends the run unless MiB `index` of the export holds the fp32 numbers `expected(index)`."""
    with connection(uri) as handle:
        for index in range(size // MIB):
            if not numpy.all(numpy.frombuffer(handle.pread(MIB, index * MIB), numpy.float32) == expected(index)):
                raise Failed(f"{uri} has wrong bytes in MiB {index}")


class Gate:
    """Holds fio's connections when all have written, and before any is closed, until something has been done.

    fio has no barrier between its jobs, but runs a command for each (exec_postrun) after the job's time has been taken
    and before its connection is closed. That command says that it is there, and waits for a FIFO to be opened. So what
    is done at the gate disturbs no measurement.
    """

    def __init__(self, directory):
        directory.mkdir()
        self.directory, self.arrived, self.go = directory, directory / "arrived", directory / "go"
        os.mkfifo(self.arrived)
        os.mkfifo(self.go)

    def write(self, uri, cell, size, then):
        """As `write_once`; calls `then()` at the gate."""
        # fio adds a redirection to a file where it runs.
        options = [f"--exec_postrun=echo > {self.arrived}; : < {self.go}"]
        is_over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(self._hold, cell.connections, then, is_over)
            try:
                rate = write_once(uri, cell, size, options, self.directory)
            finally:
                is_over.set()
            held.result()
        return rate

    def _hold(self, count, then, is_over):
        """Waits for `count` connections, and lets them go. One that fails never comes, so the others wait not long."""
        arrived = os.open(self.arrived, os.O_RDWR)
        try:
            give_up = None
            while count > 0 and not is_over.is_set() and (give_up is None or time.monotonic() < give_up):
                if select.select([arrived], [], [], 0.2)[0]:
                    count -= os.read(arrived, 64).count(b"\n")
                    give_up = give_up or time.monotonic() + GATE_DEADLINE
            if count == 0:
                then()
        finally:
            # A FIFO that is open for both lets all through that wait or will come.
            opened = os.open(self.go, os.O_RDWR)
            is_over.wait(fio.DEADLINE)
            os.close(opened)
            os.close(arrived)
