"""Runs the jobs of fio-jobs/ over block sizes on a mount of its own: throughput against block size.

Each point is the median of several runs that read or contribute the whole model: a run of a write job is one contribution,
its commit included.
"""

from machine import MIB, require, require_memory, say
from report import Figure, table

from bench import fio, jobs

CHART = "draw fio.svg, .png and .csv there"
SIZES = ("4k", "16k", "64k", "256k", "1m", "4m", "16m")
QUICK_SIZES = ("4k", "64k", "1m", "16m")
JOBS = tuple(
    f"{face}-{engine}" for face in ("weights-read", "gradients-write") for engine in ("psync", "libaio", "io_uring")
)


def run(bench):
    require("fio", *(["matplotlib"] if bench.chart else []))
    size = (256 if bench.quick else 1024) * MIB
    sizes, runs = (QUICK_SIZES, 1) if bench.quick else (SIZES, 3)
    require_memory(6 * size)
    with jobs.up(bench.gradfs(), bench.work / "mount", size, "--reducer", "sum") as model:
        say("warming up: every buffer is used once")
        for _ in range(4):
            fio.run("gradients-write-libaio", model, "1m", size)
        say(f"{len(sizes)} block sizes: {runs} rounds")
        acts = {
            (job, block): lambda job=job, block=block: [fio.run(job, model, block, size)] for block in sizes for job in JOBS
        }  # fmt: skip
        points = jobs.medians(jobs.turns(acts, runs))
    print(table(["GiB/s", *sizes], [[job, *(f"{points[job, block]:.2f}" for block in sizes)] for job in JOBS]))
    if bench.chart:
        from bench import chart

        path = bench.chart_path("fio")
        lines = [",".join([job, *(f"{points[job, block]:.4f}" for block in sizes)]) for job in JOBS]
        path.with_suffix(".csv").write_text("\n".join(["job," + ",".join(sizes), *lines]) + "\n")
        for drawn in chart.draw_jobs(points, f"a model of {size // MIB} MiB", path):
            say(f"drew {drawn}")
    return [
        Figure(f"{job.replace('-', '_')}_{block}_gib_s", value, "GiB/s") for (job, block), value in points.items()
    ]  # fmt: skip
