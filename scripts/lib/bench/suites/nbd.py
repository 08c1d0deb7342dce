"""Measures exports of network block devices against nbdkit's RAM disk, side by side in one run.

Both are served on Unix sockets to the same clients and take turns, run by run. A figure is the ratio of two medians of
throughput, larger is better.

  reads   `model/weights`, by fio and by nbdcopy (into nothing), and the RAM disk with the same bytes
  assign  `model` with --dtype u8 --reducer assign, which is a disk, and the RAM disk; fio writes again and again, and
          does not flush
  sum     `model/gradients` with --reducer sum and fp32, and the RAM disk; each run of fio writes every byte once, as
          one contribution. Its FLUSH and the wait for the version come after the measured time

Cells are requests of 256 KiB, 1 MiB and 4 MiB, one and 16 on their way on each connection, one and four connections.
Each connection has a part of the device. nbdcopy always has 16. It takes no part in writes, because it would have to
read what it writes, and that would be measured as well. The mean of a group is the geometric one of its cells. "flush"
is one write of the whole device and a FLUSH in the measured time (1 MiB, 16, one connection); it is in no mean.

nbdkit gets its fastest settings: allocators and numbers of threads are tried first, for reads and for writes. --quick
takes `--threads 1` and allocator=malloc, which win most trials. Both sides' memory has been touched before the first
measurement.
"""

import statistics
import time
from contextlib import ExitStack, contextmanager
from functools import cache, partial

from machine import MIB, Failed, require, require_memory, say
from programs import Program, output_of
from report import gib_s, ratio

from bench import jobs
from bench.parts import nbd_client
from bench.parts.files import fill, pattern
from bench.parts.nbd_client import Cell

PARTS = ("reads", "assign", "sum")
# By part: the name of its figures, and the targets of the mean and of the worst cell.
NAMES = {"reads": ("nbd_read", 1.1, 0.95), "assign": ("nbd_assign_write", 1.1, 0.95), "sum": ("nbd_sum_write", 0.9, None)}
SIDES = ("gradfs", "nbdkit")
# Allocators and threads a connection of nbdkit that are tried; 16 threads is what it has if nothing is said. Where no time
# is for a trial, the first is taken. Only sparse with one thread is as fast, and each has won trials.
KITS = (("malloc", 1), ("malloc", 2), ("malloc", 4), ("malloc", 16), ("sparse", 1), ("sparse", 16))
# Of a model that sums, besides what fio writes. This program writes it to end a step.
TAIL = 4096
STEP_DEADLINE = 30.0

class Plan:
    """How much is measured, and with what."""

    def __init__(self, bench, gradfs):
        def grid(client, depths):
            sizes = (256 << 10, MIB, 4 * MIB)
            return [Cell(client, size, depth, count) for size in sizes for depth in depths for count in (1, 4)]

        self.quick, self.gradfs_binary, self.work = bench.quick, gradfs, bench.work
        self.size = (256 if bench.quick else 512) * MIB
        self.rounds = 5 if bench.quick else 9
        # Of a run that goes over the device again and again.
        self.milliseconds = 120 if bench.quick else 300
        self.whole = Cell("fio", MIB, 16, 1, flush=True)
        self.trial = [Cell("fio", 256 << 10, 16, 1), Cell("fio", MIB, 1, 1), Cell("fio", MIB, 16, 4)]
        by_fio, by_copy = grid("fio", (1, 16)), grid("nbdcopy", (16,))
        if bench.quick:
            by_fio = [Cell("fio", 256 << 10, 16, 4), Cell("fio", MIB, 1, 1)]
            by_copy = [Cell("nbdcopy", 256 << 10, 16, 1), Cell("nbdcopy", 4 * MIB, 16, 4)]
        self.cells = {"reads": [*by_fio, *by_copy], "assign": [*by_fio, self.whole]}
        self.cells["sum"] = self.cells["assign"]

    @cache
    def kit(self, job):
        """The settings of nbdkit that are fastest with a job."""
        if self.quick:
            return KITS[0]
        say(f"looking for the settings of nbdkit that are fastest with {job}")
        with ExitStack() as stack:
            uris = {kit: stack.enter_context(self.nbdkit(f"trial-{job}-{kit[0]}-{kit[1]}", kit)) for kit in KITS}
            for uri in uris.values():
                nbd_client.write_once(uri, self.whole, self.size)
            run = lambda kit, cell: nbd_client.again_and_again(job, uris[kit], cell, self.size, self.milliseconds)  # noqa: E731
            rates = self.race({kit: partial(run, kit) for kit in KITS}, self.trial, 5)
        means = {kit: statistics.geometric_mean(rates[cell][kit] for cell in self.trial) for kit in KITS}
        best = max(means, key=means.get)
        words = ", ".join(f"{allocator}/{threads} {rate:.2f}" for (allocator, threads), rate in means.items())
        say(f"GiB/s by allocator and threads: {words}; nbdkit gets {best[0]}/{best[1]}")
        return best

    @contextmanager
    def nbdkit(self, name, kit):
        """A RAM disk; gives its URI."""
        directory = self.work / name
        directory.mkdir()
        socket, ready = directory / "socket", directory / "pid"
        command = ["nbdkit", "--foreground", "--unix", socket, "--pidfile", ready, "--threads", kit[1]]
        with Program([*command, "memory", self.size, f"allocator={kit[0]}"], directory / "log") as program:
            program.wait_until(ready.exists)
            yield f"nbd+unix:///?socket={socket}"

    @contextmanager
    def both(self, name, job, size, dtype, reducer):
        """A model and a RAM disk; gives the model's directory, a function that makes URIs of its exports, and the disk's URI."""
        kit, socket = self.kit(job), self.work / f"{name}.sock"
        options = ["--reducer", reducer, "--nbd", socket]
        with (
            jobs.up(self.gradfs_binary, self.work / name, size, *options, dtype=dtype) as model,
            self.nbdkit(f"{name}-nbdkit", kit) as disk,
        ):
            yield model, lambda export: f"nbd+unix:///{export}?socket={socket}", disk

    def warm_up(self, run):
        """Whole writes before the first measurement: gradfs takes a version's memory in each of the first ones."""
        for side in [*["gradfs"] * 4, "nbdkit"]:
            run(side, self.whole)

    def race(self, sides, cells, rounds):
        """All sides take turns in each cell, and cells in each round; {cell: {side: GiB/s}}, medians."""
        acts = {(cell, side): lambda cell=cell, run=run: [run(cell)] for cell in cells for side, run in sides.items()}
        medians = jobs.medians(jobs.turns(acts, rounds))
        return {cell: {side: medians[cell, side] for side in sides} for cell in cells}


# A group is a context: it starts gradfs and nbdkit, fills both, and gives {side: function}. The function runs a cell and
# gives GiB/s. When the context ends, the bytes of both are checked.


@contextmanager
def reads(plan):
    """A version of a model, and a RAM disk with the same bytes."""
    with plan.both("reads", "nbd-read", plan.size, "f32", "sum") as (model, uri_of, baseline):
        fill(model, plan.size // MIB)
        number = (model / "version").read_text().strip()
        nbd_client.copy(uri_of("model/weights"), baseline)
        # nbdcopy has several connections only where the server says that they see the same (CAN_MULTI_CONN). An export
        # of a numbered version says so, and has the same bytes.
        uris = {
            "gradfs": {"fio": uri_of("model/weights"), "nbdcopy": uri_of(f"model@{number}")},
            "nbdkit": {"fio": baseline, "nbdcopy": baseline},
        }

        def run(side, cell):
            uri = uris[side][cell.client]
            if cell.client == "nbdcopy":
                return nbd_client.copy_out(uri, cell, plan.size, plan.milliseconds)
            return nbd_client.again_and_again("nbd-read", uri, cell, plan.size, plan.milliseconds)

        for cell in plan.cells["reads"][: 1 if plan.quick else None]:
            for side in SIDES:
                run(side, cell)
        yield {side: partial(run, side) for side in SIDES}
        for side in SIDES:
            nbd_client.check(uris[side]["fio"], plan.size, pattern)


def wait_for(model, is_there, why):
    """Returns when `is_there(version)`."""
    give_up = time.monotonic() + STEP_DEADLINE
    while not is_there(version := int((model / "version").read_text())):
        if time.monotonic() > give_up:
            raise Failed(f"version {version}: {why}")
        time.sleep(0.002)


@contextmanager
def assign(plan):
    """A model of bytes that is a disk, and a RAM disk."""
    with plan.both("assign", "nbd-write", plan.size, "u8", "assign") as (model, uri_of, baseline):
        uris = {"gradfs": uri_of("model"), "nbdkit": baseline}

        def run(side, cell):
            uri, before = uris[side], int((model / "version").read_text())
            if cell.flush:
                return nbd_client.write_once(uri, cell, plan.size)
            rate = nbd_client.again_and_again("nbd-write", uri, cell, plan.size, plan.milliseconds)
            # The end of the last connection publishes what was written, which must not be done in nbdkit's turn.
            if side == "gradfs":
                wait_for(model, lambda version: version != before, "none has what was written to the disk")
            return rate

        plan.warm_up(run)
        yield {side: partial(run, side) for side in SIDES}
        for uri in uris.values():
            nbd_client.check(uri, plan.size, lambda _: nbd_client.ELEMENT)


@contextmanager
def sums(plan):
    """A model that sums, and a RAM disk.

    All connections write as one learner, and a FLUSH of any of them ends the step of all. fio would flush at the end of
    each job, or not at all. It closes connections without NBD_CMD_DISC, which drops what they have written. So fio does
    not flush here. At the gate, where all jobs have written and none has gone, a connection of this program's own writes
    the last bytes of the model, which are not fio's, and flushes. So a step is one contribution and makes one version.
    This FLUSH is not in the measured time. Only one connection could have it there (cell "flush").
    """
    element, gate, count = nbd_client.ELEMENT, nbd_client.Gate(plan.work / "gate"), 0
    with (
        plan.both("sums", "nbd-write", plan.size + TAIL, "f32", "sum") as (model, uri_of, baseline),
        nbd_client.connection(uri_of("model/gradients")) as handle,
    ):
        uris = {"gradfs": uri_of("model/gradients"), "nbdkit": baseline}

        def end(side):
            if side == "gradfs":
                handle.pwrite(element.tobytes() * (TAIL // 4), plan.size)
                handle.flush()

        def run(side, cell):
            nonlocal count
            if cell.flush:
                rate = nbd_client.write_once(uris[side], cell, plan.size)
            else:
                rate = gate.write(uris[side], cell, plan.size, partial(end, side))
            if side == "gradfs":
                count += 1
                wait_for(model, lambda version: version == count, f"after {count} contributions")
            return rate

        plan.warm_up(run)
        yield {side: partial(run, side) for side in SIDES}
        nbd_client.check(uri_of("model/weights"), plan.size, lambda _: count * element)
        nbd_client.check(baseline, plan.size, lambda _: element)


def figures_of(part, rates):
    """The mean, the worst cell, and each cell."""
    key, target, least = NAMES[part]
    figures, values = [], {}
    for cell, by in rates.items():
        value = by["gradfs"] / by["nbdkit"]
        name = f"{key}_flush_vs_nbdkit" if cell.flush else f"{key}_{cell.name}_vs_nbdkit"
        figures.append(ratio(name, value, None, gib_s(by["gradfs"]), gib_s(by["nbdkit"])))
        if not cell.flush:
            values[cell.name] = value
    worst = min(values, key=values.get)
    mean = statistics.geometric_mean(values.values())
    figures.append(ratio(f"{key}_vs_nbdkit_min", values[worst], least, "", worst))
    return [*figures, ratio(f"{key}_vs_nbdkit", mean, target, "", f"mean of {len(values)}")]


def run(bench):
    require("fio", "nbdcopy", "nbdkit", "nbd")
    if "uri" not in output_of("fio", "--enghelp=nbd"):
        raise Failed("this fio has no ioengine nbd; Debian's has: apt-get install fio")
    plan, figures = Plan(bench, bench.gradfs()), []
    require_memory((8 if bench.quick else 12) * plan.size)
    for part, group in (("reads", reads), ("assign", assign), ("sum", sums)):
        if part in bench.only:
            with group(plan) as sides:
                say(f"{part}: {plan.rounds} rounds of {len(plan.cells[part])} cells")
                rates = plan.race(sides, plan.cells[part], plan.rounds)
            figures += figures_of(part, rates)
    return figures
