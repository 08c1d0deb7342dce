"""The chart of the suite net: throughput against size, synchronous and pipelined, over TCP and over shared memory.

Pushes and pulls are against the size of the model's blocks (64 KiB to 4 MiB: there are no others). Pipelined: a model of many
blocks is pushed and pulled with as many blocks on their way as fit. Synchronous: a model of one block is, so that each
block waits for the one before, with all that a push has to do besides (grant, plan, conclusion).

write(2) of gradients to a mount, with the fsync that returns when they count, is against the size of a write (16 KiB to 16
MiB, by fio). Weights of a mount are read from this host's memory, not the network, so they are not in it.

Every size and transport is a cluster that lives through the whole race, so that slow moments of the machine hit all. The
order differs from round to round, and is the same in every run.
"""

import csv
import os
import statistics
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Optional

from machine import GIB, MIB, Failed, say
from report import ratio, size_words, table

from bench import fio, jobs
from bench.against import NEW

SIZES = [64 << shift << 10 for shift in range(7)]
WHATS = ("push", "pull")
TRANSPORTS = ("tcp", "shm")
# Rounds before, in which every buffer is used for the first time.
WARM_UP = 2


@dataclass(frozen=True)
class Way:
    """How a contender's turn goes: pushes and pulls that bring its memory and connections back, then those counted."""

    model: Optional[int]
    rounds: int
    before: int
    counted: int


# Without a model's size it is that of a block.
WAYS = {"pipelined": Way(64 * MIB, 25, 1, 2), "sync": Way(None, 11, 4, 8)}
# Of writes: a contribution of the whole model by a job of fio-jobs/, whose elements are these.
WRITE_SIZES = [16 << shift << 10 for shift in range(0, 11, 2)]
WRITES = {"pipelined": "gradients-write-libaio", "sync": "gradients-write-psync"}
WRITE_MODEL, WRITE_ROUNDS, WRITE_WARM_UP, ELEMENT = 256 * MIB, 9, 4, 2.0**-7
# Of all clusters at once: gradients or staging, versions at either end, a shard's sums; and fio's buffers. As found.
_MODELS = max(len(SIZES) * len(TRANSPORTS) * WAYS["pipelined"].model * 11, (len(TRANSPORTS) * 11 + 1) * WRITE_MODEL)
MEMORY = _MODELS + GIB
# Blocks from this size on must be about as fast as the best size there is.
LEAST, TARGET = 256 << 10, 0.95


def race(names, start, ways):
    """{(what, name, way): {size: GB/s}}, medians; `start(stack, name, size, model)` starts a contender, a jobs.Rival."""
    series = {}
    for way_name, way in ways.items():
        say(f"throughput against block size, {way_name}")
        with ExitStack() as stack:
            contenders = {(name, size): start(stack, name, size, way.model or size) for size in SIZES for name in names}
            acts = {of: partial(_rates, rival, way) for of, rival in contenders.items()}
            found = jobs.turns(acts, way.rounds, WARM_UP, "shuffled", contenders.values())
        for at, what in enumerate(WHATS):
            for name in names:
                rates = {size: statistics.median(rates[at] for rates in found[name, size]) for size in SIZES}
                series[what, name, way_name] = rates
    return series


def _rates(rival, way):
    """GB/s of each push and pull that is counted."""
    took = [[rival.round(what) for what in WHATS] for _ in range(way.before + way.counted)]
    return [[one.bytes / one.seconds / 1e9 for one in both] for both in took[way.before :]]


class _Mount:
    """A model's directory below a mount of its own."""

    def __init__(self, stack, gradfs, transport):
        cluster = gradfs.cluster(stack, NEW, WRITE_MODEL)
        self.directory, self.runs = cluster.mount(stack, "--transport", transport)[0], 0

    def run(self, job, size):
        """One contribution; GB/s."""
        rate = fio.run(job, self.directory, f"{size >> 10}k", WRITE_MODEL)
        self.runs += 1
        # The open waits for the version, so that its way here is nobody else's burden.
        with open(self.directory / "weights", "rb"):
            return rate * GIB / 1e9

    def check(self):
        """Ends the run unless the weights have every contribution once."""
        right = struct.pack("<f", self.runs * ELEMENT) * (MIB // 4)
        with open(self.directory / "weights", "rb") as file:
            if os.fstat(file.fileno()).st_size != WRITE_MODEL or any(
                file.read(MIB) != right for _ in range(WRITE_MODEL // MIB)
            ):
                raise Failed(f"wrong weights in {self.directory} after {self.runs} contributions")


def _writes(bench, gradfs):
    """{("write", transport, way): {size: GB/s}}, medians."""
    say("throughput against the size of a write")
    with ExitStack() as stack:
        mounts = {transport: _Mount(stack, gradfs, transport) for transport in TRANSPORTS}
        for mount in mounts.values():
            for _ in range(WRITE_WARM_UP):
                mount.run(WRITES["pipelined"], MIB)
        acts = {
            (transport, way, size): lambda mount=mount, job=job, size=size: [mount.run(job, size)]
            for size in WRITE_SIZES
            for transport, mount in mounts.items()
            for way, job in WRITES.items()
        }
        found = jobs.medians(jobs.turns(acts, WRITE_ROUNDS, 0, "shuffled", mounts.values()))
    return {
        ("write", transport, way): {size: found[transport, way, size] for size in WRITE_SIZES}
        for transport in TRANSPORTS
        for way in WRITES
    }


def _worst_and_best(values):
    """(ratio, worst size from LEAST on, best size of all)."""
    worst = min((size for size in values if size >= LEAST), key=values.get)
    best = max(values, key=values.get)
    return values[worst] / values[best], worst, best


def _figures(series):
    """The ratios, by transport: of pushes and pulls, if there are any, the one that suffers most from its block size."""
    for transport in TRANSPORTS:
        of = {what: series[what, transport, "pipelined"] for what in WHATS if (what, transport, "pipelined") in series}
        found = {what: _worst_and_best(values) for what, values in of.items()}
        what = min(found, key=lambda what: found[what][0])
        value, *sizes = found[what]
        words = [f"{what} {of[what][size]:.2f} GB/s ({size_words(size)})" for size in sizes]
        yield ratio(f"{transport}_blocks_256kib_to_4mib_vs_best", value, TARGET, *words)


def show_and_keep(series, path, unit, decimals, draw):
    """Shows {key: {size: rate}} as tables, and writes `path`.csv and what `draw(path)` gives."""
    for title, whats in (("size of a block", WHATS), ("size of a write", ("write",))):
        if chosen := {key: values for key, values in series.items() if key[0] in whats}:
            rows = [[size_words(size), *cells] for size, *cells in _rows(chosen, decimals - 1)]
            print(f"\n{title}, {unit}\n{table(['', *map('_'.join, chosen)], rows)}", flush=True)
    written = path.with_suffix(".csv")
    with open(written, "w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        name = unit.lower().replace("/s", "_per_s")
        lines.writerow(["size_kib", *(f"{'_'.join(key)}_{name}" for key in series)])
        lines.writerows([size >> 10, *cells] for size, *cells in _rows(series, decimals))
    for drawn in (written, *draw(path)):
        say(f"wrote {drawn}")


def _rows(series, decimals):
    """A row for each size; empty where nothing is of that size."""
    for size in sorted({size for values in series.values() for size in values}):
        yield size, *(f"{values[size]:.{decimals}f}" if size in values else "" for values in series.values())


def chart(bench, gradfs):
    """Draws, and shows the same as text; gives the figures."""
    from bench import chart

    def start(stack, transport, size, model):
        kind = "memory" if transport == "shm" else "gradfs"
        return gradfs.start(stack, NEW, kind, model, block_size=size)

    series = race(TRANSPORTS, start, WAYS)
    # Through shared memory nothing is pulled: the client shows the shard's memory.
    series = {key: values for key, values in series.items() if key[:2] != ("pull", "shm")}
    series |= _writes(bench, gradfs)
    show_and_keep(series, bench.chart_path("network"), "GB/s", 3, lambda path: chart.draw_network(series, path))
    return list(_figures(series))
