"""Throughput against block size over a network, for scripts/bench-net: measured, as a table and drawn.

Pipelined: a model of many blocks is pushed and pulled with as many blocks on their way as fit. Synchronous: a model
of one block is, so that each block waits for the one before, with all that a push has to do besides (grant, plan,
conclusion). Blocks are 64 KiB to 4 MiB: there are no others.
"""

import csv
import statistics
from contextlib import ExitStack

import net_gradfs
from machine import MIB

SIZES = [64 << shift << 10 for shift in range(7)]
MODEL = 64 * MIB
ROUNDS = {"pipelined": 9, "synchronous": 60}
WARM_UP = 4
WHATS = ("push", "pull")


def _measure(binaries, quiet):
    """{(what, way): [GB/s at each of SIZES]}."""
    found = {(what, way): [] for way in ROUNDS for what in WHATS}
    for block in SIZES:
        with ExitStack() as stack:
            ways = {
                "pipelined": net_gradfs.library(stack, binaries, MODEL, 1, block_size=block),
                "synchronous": net_gradfs.library(stack, binaries, block, 1, block_size=block),
            }
            for way, gradfs in ways.items():
                rates = {what: [] for what in WHATS}
                for turn in range(WARM_UP + ROUNDS[way]):
                    if turn == WARM_UP:
                        quiet.wait()
                    for what in WHATS:
                        took = gradfs.round(what)
                        if turn >= WARM_UP:
                            rates[what].append(took.bytes / took.seconds / 1e9)
                gradfs.check()
                for what in WHATS:
                    found[what, way].append(statistics.median(rates[what]))
    return found


def chart(binaries, path, quiet):
    """Writes `path` with .csv, .svg and .png at its end; gives those paths."""
    import chart as drawing

    found = _measure(binaries, quiet)
    path = path.with_suffix("") if path.suffix in (".csv", ".svg", ".png") else path
    path.parent.mkdir(parents=True, exist_ok=True)
    table = path.with_suffix(".csv")
    with open(table, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["block_kib", *(f"{what}_{way}_gb_per_s" for what, way in found)])
        for index, size in enumerate(SIZES):
            rows.writerow([size >> 10, *(f"{values[index]:.3f}" for values in found.values())])
    return [table, *drawing.draw_network(found, SIZES, path)]
