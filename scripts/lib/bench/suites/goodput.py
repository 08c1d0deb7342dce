"""Measures how much of their computing time a thousand learners spend on what counts, by consistency.

The decisions are those of the real core of a job. Learners are simulated: they compute contributions of 50 steps, whose
times are log-normal; 5 % are slow by 2 to 4 times; three die while a contribution is computed, are noticed after 60 s,
and come back. No byte is sent. Goodput is the computing time behind the contributions that versions have, as a share of
the time that learners were in the job.

  goodput_grace        with grace(800, 0.1): a version waits for 800, and then for the others a tenth as long
  goodput_quorum       with quorum(800)
  goodput_sync         with sync

Learners go on with their next contribution when the last one is taken. The table also shows runs in which they wait for
the version that has it.
"""

import json
from statistics import mean

from programs import output_of
from report import ratio, table

QUICK = "fewer and shorter runs: below 20 s once it is built"
# The part of a figure's name, the consistency, and the target of its goodput.
CONSISTENCIES = [("grace", "grace(800, 0.1)", 0.88), ("quorum", "quorum(800)", None), ("sync", "sync", None)]
LONGEST = 600


def row(consistency, overlaps, runs):
    """A row of the table."""
    goodputs = [run["goodput"] for run in runs]
    means = [mean(run[name] for run in runs) for name in ("contributions_a_version", "seconds_a_version", "cpu_seconds")]
    return [
        consistency,
        "the next contribution" if overlaps else "the version",
        f"{mean(goodputs):.3f} ({min(goodputs):.3f} to {max(goodputs):.3f})",
        *(f"{means[0]:.0f}", f"{means[1]:.1f} s", f"{means[2]:.2f} s"),
    ]


def run(bench):
    (program,), seeds = bench.binaries("goodput"), "1,2" if bench.quick else "1,2,3,4,5"
    consistencies = ";".join(consistency for _, consistency, _ in CONSISTENCIES)
    words = ["--consistencies", consistencies, "--seeds", seeds, "--contributions", 25 if bench.quick else 60]
    found = [json.loads(line) for line in output_of(program, *words, timeout=LONGEST).splitlines()]
    rows, figures = [], []
    for name, consistency, target in CONSISTENCIES:
        for overlaps in (True, False):
            runs = [one for one in found if (one["consistency"], one["overlaps"]) == (consistency, overlaps)]
            rows.append(row(consistency, overlaps, runs))
            if overlaps:
                least = min(one["goodput"] for one in runs)
                figures.append(ratio(f"goodput_{name}", least, target, f"{least:.3f}", "1"))
    print(f"seeds {seeds}")
    print(table(["consistency", "goes on with", "goodput", "contributions", "a version", "CPU"], rows))
    return figures
