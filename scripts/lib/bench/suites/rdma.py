"""Measures RDMA against perftest and TCP, side by side in one run, in a virtual machine with RDMA in software.

  rdma      `gradfs shard --rdma on`, a model of it, and a learner by the library, as the settings come
  static    the same with --rdma-placement static: the learner writes blocks into slots of the shard
  dynamic   the same with --rdma-placement dynamic: the shard reads blocks where they lie
  tcp       the same over TCP
  ib_*_bw   perftest at the same size, depth and number of blocks, the faster of two ways to ask for completions

push: of the first of two learners, from the commit until its contribution is in the sum for good, the reduction
included; the last one's, which makes the version besides, is told apart. pull: from the request until the whole version
is there and known to be whole. Processor time of a shard is measured while a client that has no part
in the job pulls the newest version, and nobody pushes. Both go on for as many rounds as begin within a minute and a
half, or seven minutes, and five at least.

It is software that plays the device, on a machine that is emulated: figures compare ways to do a thing on the same
device, and say nothing of hardware. One virtual machine, both ends in it: with two, the packets' way between them would
be most of what is measured, and both processors would work for one end at a time.

--chart measures throughput besides, synchronous and pipelined, over TCP and RDMA, against the size of blocks (64 KiB to
4 MiB), and pushes by both placements. It takes what scripts/setup rdma rdma-vm installs, and runs that first where something
is missing.
"""

import json
import os
import statistics
import sys

from machine import MIB, ROOT, Failed, build, dist_directory, finished, require, say
from report import Figure, table

from bench.parts import rdma_guest

CHART = "draw rdma.svg, .png and .csv there: throughput against block size, ten minutes more"
QUICK = "fewer rounds, and not each placement apart: below three minutes once it is built"
KINDS = {"rxe": "soft-RoCE (rxe)", "siw": "soft-iWARP (siw)"}
NOTE = (
    "RDMA in software: {kind} in an emulated machine with two processors that both ends share; it says nothing of "
    "hardware.\nOne learner and one shard. Pipelined: 8 MiB with as many blocks on their way as fit; sync: a model of one "
    "block.\nFetched: the shard reads blocks (dynamic placement); placed: the learner writes them (static). "
    "Pulls are the same with both."
)


def built(bench):
    """Binaries with RDMA, in a directory of their own: those of the usual build stay as they are."""
    if bench.options.binary:
        return bench.binaries("gradfs", "bench_learner")
    os.environ["CARGO_TARGET_DIR"] = str(dist_directory().parent / "rdma")
    return build("gradfs", "bench_learner", only_look=bench.only_look, features=["rdma"])


def in_machine(job, provider, share, time_limit):
    """Runs the guest's part; gives what it has found."""
    sys.path.insert(0, str(ROOT / "scripts" / "lib" / "rdma-vm"))
    import image
    import runner
    from guest import Settings

    there = image.required()
    share.mkdir()
    (share / "job.json").write_text(json.dumps(job))
    settings = Settings(provider, 2, 4096 if job["chart"] else 1536, share)
    wish = runner.Wish(["/usr/bin/python3", rdma_guest.__file__], time_limit=time_limit, settings=settings)
    with runner.Pool(there) as pool:
        if status := pool.run(wish):
            raise Failed(f"the run in the virtual machine failed with status {status}: see above")
    return json.loads((share / "result.json").read_text())


def draw(found, bench):
    """The chart, and the same as text."""
    from bench import chart
    from bench.parts.blocks import show_and_keep

    series = {(what, name, way): {int(size): rate for size, rate in rates.items()} for what, name, way, rates in found}
    # Of pulls one line by RDMA is enough: it is the same way.
    shown = {
        (what, "rdma" if (what, name) == ("pull", "dynamic") else name, way): rates
        for (what, name, way), rates in series.items()
        if (what, name) != ("pull", "static")
    }
    note = NOTE.format(kind=KINDS[bench.options.provider])
    draws = lambda path: chart.draw_network(shown, path, note, "MB/s")  # noqa: E731
    show_and_keep(series, bench.chart_path("rdma"), "MB/s", 2, draws)


def options(parser):
    parser.add_argument("--provider", choices=KINDS, default="rxe", help="RDMA in software (%(default)s)")


def run(bench):
    options = bench.options
    require(*(["matplotlib"] if bench.chart else []))
    if not bench.only_look:
        say("scripts/setup rdma rdma-vm")
        finished("scripts/setup", "rdma", "rdma-vm", timeout=1800)
    gradfs, learner = map(str, built(bench))
    job = {"gradfs": gradfs, "learner": learner, "seconds": 90 if bench.quick else 400, "chart": bool(bench.chart)}
    job |= {"contenders": ["rdma", *([] if bench.quick else ["static", "dynamic"]), "tcp"]}
    job |= {"size": (12 if bench.quick else 16) * MIB, "block": 256 << 10, "depth": 16}
    say(f"starting a virtual machine with {options.provider}")
    found = in_machine(job, options.provider, bench.work / "share", 2400 if bench.chart else 900)
    rows = [
        [name, f"{statistics.median(values):.1f}", f"{min(values):.1f}–{max(values):.1f}", unit]
        for name, (values, unit) in found["measured"].items()
    ]
    print(table(["", "median", "range", ""], rows), flush=True)
    if bench.chart:
        draw(found["series"], bench)
    return [Figure(**figure) for figure in found["figures"]]
