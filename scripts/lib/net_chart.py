"""The chart of scripts/bench-net: throughput against size, over TCP and shared memory, synchronous and pipelined."""

import csv

import net_blocks
import net_writes
from machine import GIB, Failed, say
from net_baselines import available_memory
from report import ratio, table

# Blocks from this size on must be about as fast as the best size there is.
LEAST, TARGET = 256 << 10, 0.95


def require_room():
    """Ends the run where the chart's models have no room."""
    needed = max(net_blocks.MEMORY, net_writes.MEMORY)
    if (free := available_memory()) < needed:
        raise Failed(f"--chart needs {needed / GIB:.1f} GiB of free memory and has {free / GIB:.1f}: leave it out")


def _words(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _worst_and_best(values):
    """(ratio, worst size from LEAST on, best size of all)."""
    worst = min((size for size in values if size >= LEAST), key=values.get)
    best = max(values, key=values.get)
    return values[worst] / values[best], worst, best


def _figures(series):
    """The ratios, by transport: of pushes and pulls, if there are any, the one that suffers most from its block size."""
    figures = []
    for transport in net_blocks.TRANSPORTS:
        whats = [what for what in net_blocks.WHATS if (what, transport, "pipelined") in series]
        found = {what: _worst_and_best(series[what, transport, "pipelined"]) for what in whats}
        what = min(found, key=lambda what: found[what][0])
        value, *sizes = found[what]
        words = [f"{what} {series[what, transport, 'pipelined'][size]:.2f} GB/s ({_words(size)})" for size in sizes]
        figures.append(ratio(f"{transport}_blocks_256kib_to_4mib_vs_best", value, TARGET, *words))
    return figures


def _rows(series, decimals):
    """A header and a row for each size; empty where nothing is of that size."""
    sizes = sorted({size for values in series.values() for size in values})
    header = ["_".join(key) for key in series]
    rows = [[f"{values[size]:.{decimals}f}" if size in values else "" for values in series.values()] for size in sizes]
    return sizes, header, rows


def _show(series):
    for title, whats in (("size of a block", net_blocks.WHATS), ("size of a write", ("write",))):
        chosen = {key: values for key, values in series.items() if key[0] in whats}
        sizes, header, rows = _rows(chosen, 2)
        print(f"\n{title}, GB/s")
        print(table(["", *header], [[_words(size), *row] for size, row in zip(sizes, rows)]), flush=True)


def chart(binaries, path, quiet):
    """Writes `path` with .csv, .svg and .png at its end, and shows the same as text; gives the figures."""
    import chart as drawing

    say("throughput against block size")
    series = net_blocks.measure(binaries, quiet)
    # Through shared memory nothing is pulled: the client shows the shard's memory.
    series = {key: values for key, values in series.items() if key[:2] != ("pull", "shm")}
    say("throughput against the size of a write")
    series.update(net_writes.measure(binaries[0], quiet))
    _show(series)
    path = path.with_suffix("") if path.suffix in (".csv", ".svg", ".png") else path
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".csv")
    with open(written, "w", newline="") as file:
        sizes, header, rows = _rows(series, 3)
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["size_kib", *(f"{name}_gb_per_s" for name in header)])
        lines.writerows([size >> 10, *row] for size, row in zip(sizes, rows))
    for drawn in (written, *drawing.draw_network(series, path)):
        say(f"wrote {drawn}")
    return _figures(series)
