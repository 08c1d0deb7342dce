"""The chart of scripts/bench-rdma, on the host: throughput against block size, synchronous and pipelined, over TCP and by
RDMA in software.
"""

import csv

import chart as drawing
from machine import say
from report import table

KINDS = {"rxe": "soft-RoCE (rxe)", "siw": "soft-iWARP (siw)"}
NOTE = (
    "RDMA in software: {kind} in an emulated machine with two processors that both ends share; it says nothing of "
    "hardware.\nOne learner and one shard. Pipelined: 8 MiB with as many blocks on their way as fit; sync: a model of one "
    "block.\nFetched: the shard reads blocks (dynamic placement); placed: the learner writes them (static). "
    "Pulls are the same with both."
)


def _words(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def draw(found, path, provider):
    """Writes `path` with .csv, .svg and .png at its end, and shows the same as text."""
    series = {(what, name, way): {int(size): rate for size, rate in rates.items()} for what, name, way, rates in found}
    path = path.with_suffix("") if path.suffix in (".csv", ".svg", ".png") else path
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = sorted({size for rates in series.values() for size in rates})
    header = ["_".join(key) for key in series]
    rows = [[f"{rates[size]:.1f}" for rates in series.values()] for size in sizes]
    print("\nsize of a block, MB/s")
    print(table(["", *header], [[_words(size), *row] for size, row in zip(sizes, rows)]), flush=True)
    print()
    written = path.with_suffix(".csv")
    with open(written, "w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["size_kib", *(f"{name}_mb_per_s" for name in header)])
        lines.writerows([size >> 10, *row] for size, row in zip(sizes, rows))
    # Of pulls one line by RDMA is enough: it is the same way.
    shown = {
        (what, "rdma" if (what, name) == ("pull", "dynamic") else name, way): rates
        for (what, name, way), rates in series.items()
        if (what, name) != ("pull", "static")
    }
    for drawn in (written, *drawing.draw_network(shown, path, NOTE.format(kind=KINDS[provider]), "MB/s")):
        say(f"wrote {drawn}")
