"""Measures how much faster contributions are that cross a network in a smaller form (control/wire).

Two hosts of network namespaces have links of 1 Gbit/s. One has the shard, the other one has a mount with a learner,
which contributes all of an fp32 model of random numbers, and then opens and reads the next version (reducer sum, pull
on-demand). A push is the time from the first write to the end of fsync, and a step is a push and a pull. Forms take
turns. A figure is the median of all turns, as a ratio to that of `full`. Weights always come in full.
"""

from machine import MIB, say
from netns import Cluster, Hosts, Link
from report import times

RATE = 1e9
FORMS = ("full", "bf16", "fp16", "int8", "fp8", "topk(0.01)")
# What a push should take, at most.
TARGETS = {"int8": 0.35}
# Much longer than a run takes.
DEADLINE = 600.0


def run(bench):
    size, rounds = (16 * MIB, 5) if bench.quick else (64 * MIB, 9)
    gradfs = bench.gradfs()
    with Hosts(["shard", "learner"], Link(rate=RATE)) as hosts:
        cluster = Cluster.of(hosts, gradfs, "--size", size, "--reducer", "sum", "--pull", "on-demand")
        path = cluster.mount("learner", "--transport", "tcp") / "model"
        say(f"{size // MIB} MiB over links of {hosts.link}")
        found = hosts.work("learner", "hosts.py", "wire", path, rounds, *FORMS).found(DEADLINE)
        hosts.check()
    figures = []
    for form in FORMS[1:]:
        for part in ("push", "step"):
            target = TARGETS.get(form) if part == "push" else None
            name = f"{form.split('(')[0]}_wire_{part}_ratio"
            figures.append(times(name, found[form][part], found["full"][part], target, "<="))
    return figures
