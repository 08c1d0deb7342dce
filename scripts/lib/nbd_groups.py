"""The groups of cells of scripts/bench-nbd: what is served, what is asked for, and what must hold afterwards.

A group is a context: it starts gradfs and nbdkit, fills both, and gives {side: function}. The function runs a cell and
gives GiB/s. When the context ends, the bytes of both are checked.
"""

import statistics
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import exp, log

import daemons
import nbd_client
from machine import MIB, Failed, say
from nbd_client import ELEMENT, Cell
from work_read import pattern

SIDES = ("gradfs", "nbdkit")
# Allocators and threads a connection of nbdkit that are tried; 16 threads is what it has if nothing is said.
KITS = (("malloc", 1), ("malloc", 2), ("malloc", 4), ("malloc", 16), ("sparse", 1), ("sparse", 16))
# Taken where no time is for a trial. Only sparse with one thread is as fast, and each has won trials.
USUAL_KIT = KITS[0]
# Of a model that sums, besides what fio writes. The script writes it to end a step.
TAIL = 4096
STEP_DEADLINE = 30.0
# Whole writes before the first measurement: gradfs takes a version's memory in each of the first ones.
WARM_UP = {"gradfs": 4, "nbdkit": 1}
WHOLE = Cell("fio", MIB, 16, 1, flush=True)


def grid(client, sizes, depths, connections):
    """All combinations."""
    return [Cell(client, size, depth, count) for size in sizes for depth in depths for count in connections]


KIB_256, MIB_4 = 256 << 10, 4 * MIB
FIO = grid("fio", (KIB_256, MIB, MIB_4), (1, 16), (1, 4))
FIO_QUICK = [Cell("fio", KIB_256, 16, 4), Cell("fio", MIB, 1, 1)]
COPY = grid("nbdcopy", (KIB_256, MIB, MIB_4), (16,), (1, 4))
COPY_QUICK = [Cell("nbdcopy", KIB_256, 16, 1), Cell("nbdcopy", MIB_4, 16, 4)]
TRIAL = [Cell("fio", KIB_256, 16, 1), Cell("fio", MIB, 1, 1), Cell("fio", MIB, 16, 4)]


@dataclass
class Plan:
    """How much is measured, and with what."""

    quick: bool
    binary: object
    work: object
    quiet: object

    @property
    def size(self):
        """Bytes of each device."""
        return (256 if self.quick else 512) * MIB

    @property
    def rounds(self):
        """Of each cell."""
        return 5 if self.quick else 9

    @property
    def milliseconds(self):
        """Of a run that goes over the device again and again."""
        return 120 if self.quick else 300

    @property
    def writes(self):
        """Cells of both groups that write."""
        return [*(FIO_QUICK if self.quick else FIO), WHOLE]

    @property
    def reads(self):
        """Cells of the group that reads."""
        return [*FIO_QUICK, *COPY_QUICK] if self.quick else [*FIO, *COPY]

    @cached_property
    def kit_for_reads(self):
        """The settings of nbdkit that read fastest."""
        return self._fastest("nbd-read")

    @cached_property
    def kit_for_writes(self):
        """The settings of nbdkit that take writes fastest."""
        return self._fastest("nbd-write")

    def _fastest(self, job):
        if self.quick:
            return USUAL_KIT
        say(f"looking for the settings of nbdkit that are fastest with {job}")
        with ExitStack() as stack:
            uris = {}
            for allocator, threads in KITS:
                directory = self.work / f"trial-{job}-{allocator}-{threads}"
                uri = stack.enter_context(daemons.nbdkit(directory, self.size, allocator, threads))
                nbd_client.write_once(uri, WHOLE, self.size)
                uris[allocator, threads] = uri
            sides = {
                kit: lambda cell, uri=uri: nbd_client.again_and_again(job, uri, cell, self.size, self.milliseconds)
                for kit, uri in uris.items()
            }
            rates = race(sides, TRIAL, 5, self.quiet)
        means = {kit: mean([rates[cell][kit] for cell in TRIAL]) for kit in KITS}
        best = max(means, key=means.get)
        words = ", ".join(f"{allocator}/{threads} {rate:.2f}" for (allocator, threads), rate in means.items())
        say(f"GiB/s by allocator and threads: {words}; nbdkit gets {best[0]}/{best[1]}")
        return best

    def nbdkit(self, name, kit):
        """One for a group."""
        return daemons.nbdkit(self.work / f"{name}-nbdkit", self.size, *kit)

    @contextmanager
    def gradfs(self, name, size, dtype, *options):
        """One for a group; gives the model's directory, and a function that makes the URI of an export."""
        socket = self.work / f"{name}.sock"
        options = [*options, "--nbd", socket]
        with daemons.gradfs(self.binary, self.work / name, size, *options, dtype=dtype) as model:
            yield model, lambda export: f"nbd+unix:///{export}?socket={socket}"


def mean(values):
    """The geometric one."""
    return exp(statistics.fmean(map(log, values)))


def race(sides, cells, rounds, quiet):
    """All sides take turns in each cell, and cells in each round; {cell: {side: GiB/s}}, medians."""
    found = {cell: {side: [] for side in sides} for cell in cells}
    for _ in range(rounds):
        for cell in cells:
            for side, run in sides.items():
                quiet.wait()
                found[cell][side].append(run(cell))
    return {cell: {side: statistics.median(rates) for side, rates in by.items()} for cell, by in found.items()}


@contextmanager
def reads(plan):
    """A version of a model, and a RAM disk with the same bytes."""
    kit = plan.kit_for_reads
    with plan.gradfs("reads", plan.size, "f32", "--reducer", "sum") as (model, uri_of):
        with open(model / "gradients", "wb", buffering=0) as file:
            for index in range(plan.size // MIB):
                file.write(pattern(index).tobytes())
        number = (model / "version").read_text().strip()
        with plan.nbdkit("reads", kit) as baseline:
            nbd_client.copy(uri_of("model/weights"), baseline)
            # nbdcopy has several connections only where the server says that they see the same (CAN_MULTI_CONN). An
            # export of a numbered version says so, and has the same bytes.
            uris = {
                "gradfs": {"fio": uri_of("model/weights"), "nbdcopy": uri_of(f"model@{number}")},
                "nbdkit": {"fio": baseline, "nbdcopy": baseline},
            }

            def run(side, cell):
                uri = uris[side][cell.client]
                if cell.client == "nbdcopy":
                    return nbd_client.copy_out(uri, cell, plan.size, plan.milliseconds)
                return nbd_client.again_and_again("nbd-read", uri, cell, plan.size, plan.milliseconds)

            sides = {side: lambda cell, side=side: run(side, cell) for side in SIDES}
            for cell in plan.reads[:1] if plan.quick else plan.reads:
                for side in SIDES:
                    sides[side](cell)
            yield sides
            for side in SIDES:
                nbd_client.check(uris[side]["fio"], plan.size, pattern)


@contextmanager
def assign(plan):
    """A model of bytes that is a disk, and a RAM disk."""
    kit = plan.kit_for_writes
    with (
        plan.gradfs("assign", plan.size, "u8", "--reducer", "assign") as (model, uri_of),
        plan.nbdkit("assign", kit) as baseline,
    ):
        uris = {"gradfs": uri_of("model"), "nbdkit": baseline}

        def run(side, cell):
            uri, before = uris[side], (model / "version").read_text()
            if cell.flush:
                return nbd_client.write_once(uri, cell, plan.size)
            rate = nbd_client.again_and_again("nbd-write", uri, cell, plan.size, plan.milliseconds)
            # The end of the last connection publishes what was written, which must not be done in nbdkit's turn.
            give_up = time.monotonic() + STEP_DEADLINE
            while side == "gradfs" and (model / "version").read_text() == before:
                if time.monotonic() > give_up:
                    raise Failed("no version has what was written to the disk")
                time.sleep(0.002)
            return rate

        for side in SIDES:
            for _ in range(WARM_UP[side]):
                run(side, WHOLE)
        yield {side: lambda cell, side=side: run(side, cell) for side in SIDES}
        for uri in uris.values():
            nbd_client.check(uri, plan.size, lambda _: ELEMENT)


class Steps:
    """Contributions to a model that sums.

    All connections write as one learner, and a FLUSH of any of them ends the step of all. fio would flush at the end of
    each job, or not at all. It closes connections without NBD_CMD_DISC, which drops what they have written. So fio does
    not flush here. At the gate, where all jobs have written and none has gone, a connection of the script's own writes
    the last bytes of the model, which are not fio's, and flushes. So a step is one contribution and makes one version.
    This FLUSH is not in the measured time. Only one connection could have it there (cell "flush").
    """

    def __init__(self, model, uri, size, gate, handle):
        self.model = model
        self.uri = uri
        self.size = size
        self.gate = gate
        self.handle = handle
        self.count = 0

    def run(self, cell):
        """One contribution; returns when there is a version with it."""
        if cell.flush:
            rate = nbd_client.write_once(self.uri, cell, self.size)
        else:
            rate = self.gate.write(self.uri, cell, self.size, self._end)
        self.count += 1
        self._await_version()
        return rate

    def _end(self):
        self.handle.pwrite(ELEMENT.tobytes() * (TAIL // 4), self.size)
        self.handle.flush()

    def _await_version(self):
        give_up = time.monotonic() + STEP_DEADLINE
        while (version := int((self.model / "version").read_text())) != self.count:
            if version > self.count or time.monotonic() > give_up:
                raise Failed(f"version {version} after {self.count} contributions")
            time.sleep(0.002)


@contextmanager
def sums(plan):
    """A model that sums, and a RAM disk."""
    kit = plan.kit_for_writes
    directory = plan.work / "gate"
    directory.mkdir()
    gate = nbd_client.Gate(directory)
    with (
        plan.gradfs("sums", plan.size + TAIL, "f32", "--reducer", "sum") as (model, uri_of),
        plan.nbdkit("sums", kit) as baseline,
        nbd_client.connection(uri_of("model/gradients")) as handle,
    ):
        steps = Steps(model, uri_of("model/gradients"), plan.size, gate, handle)

        def to_nbdkit(cell):
            if cell.flush:
                return nbd_client.write_once(baseline, cell, plan.size)
            return gate.write(baseline, cell, plan.size, lambda: None)

        sides = {"gradfs": steps.run, "nbdkit": to_nbdkit}
        for side, run in sides.items():
            for _ in range(WARM_UP[side]):
                run(WHOLE)
        yield sides
        nbd_client.check(uri_of("model/weights"), plan.size, lambda _: steps.count * ELEMENT)
        nbd_client.check(baseline, plan.size, lambda _: ELEMENT)
