"""Measures how long learners wait for the network, and how old the weights are that they read.

  sync       computing, pushing and pulling of one to four learners, and how much of it overlaps (lib/bench/parts/overlap.py)
  async      what follows here, by policy of pulling (control/pull)
  publish    the time until another host has new weights
  digits     the time until a classifier is trained (lib/bench/parts/digits.py); with --chart it is drawn: digits.svg and .png
  timelines  only a chart: what a learner and its mount do in a few steps, stall.svg and .png (lib/bench/parts/timelines.py)

async: two hosts of network namespaces have links that are slow, so that the wire is the limit. One has the shard, and a
trainer that makes a version every 40 ms. The other one has the learner that is measured. Consistency is async. The
learner opens weights, computes (it sleeps, for 0.4 to 0.8 s, with a jitter of 20%, drifting from one end to the other
and back), and contributes 4 KiB to a model of 1 MiB in blocks of 64 KiB. A pull takes about a tenth of that. The age of
weights is the time from the contribution that made the version to its open. `staleness_adaptive_vs_after_push` and
`..._vs_eager` are ratios of these ages. Policies take turns, several steps at a time.

  adaptive    pull is adaptive
  after-push  pull is on-demand, and a thread of the learner opens weights right after each contribution, beside the
              computation, which goes on with the weights that were opened so before
  eager       each version is pulled
  on-demand   the open pulls, and the learner waits
  whole       pull is adaptive, and the learner contributes the whole model, so its commit waits for 1 MiB on the link

publish: three hosts have links of 400 Mbit/s. One has the shard. A program on the second one writes 16 MiB to `publish` in
pieces of 256 KiB, and a program on the third one waits for the version and reads all of it. The time from the first write
until it is read is compared with the time that the bytes take on one link, by its rate.

  at once  the pieces are written one right after the other
  in step  each piece is written 5 ms after the one before, as a program does that computes them
"""

import statistics

from machine import MIB, Failed, require, say
from netns import Cluster, Hosts, Link
from report import Figure, times

from bench.parts import digits, overlap, timelines

PARTS = ("sync", "async", "publish", "digits", "timelines")
USUAL = {True: ("sync", "async"), False: PARTS[:4]}
CHART = "draw digits.svg and .png there, or stall.svg and .png with --only timelines"
QUICK = "fewer cases, shorter turns, and only sync and async: below 45 s once it is built"
# A block that is written in part travels as a whole.
BLOCK, RATE = 64 << 10, 200e6
POLICIES = ("adaptive", "after-push", "eager", "on-demand", "whole")
# Those whose stall has a target.
TARGETS, QUICK_POLICIES = POLICIES[:2], POLICIES[:3]
ROUNDS = 5
# Much longer than a turn takes.
DEADLINE = 120.0
# Of publications.
SIZE, PIECE, PUBLISH_RATE, PAUSES = 16 * MIB, 256 << 10, 400e6, {"at_once": 0.0, "in_step": 0.005}


def asynchronous(bench, gradfs):
    policies, steps = (QUICK_POLICIES, 2) if bench.quick else (POLICIES, 16)
    found = {policy: [] for policy in policies}
    with Hosts(["shard", "learner"], Link(rate=RATE)) as hosts:
        words = ["--size", MIB, "--block-size", BLOCK, "--reducer", "sum", "--consistency", "async"]
        cluster = Cluster.of(hosts, gradfs, *words, mounts=hosts.names)
        say(f"links of {hosts.link}")
        made = hosts.scratch / "times"
        trainer = hosts.work("shard", "hosts.py", "train", cluster.model("shard"), made)
        trainer.wait_for("trains")
        for turn in range(ROUNDS):
            for policy in policies:
                words = [cluster.model("learner"), made, policy, steps, turn * steps, ROUNDS * steps]
                found[policy].append(hosts.work("learner", "hosts.py", "stall", *words).found(DEADLINE))
            hosts.check()
            say(f"turn {turn + 1} of {ROUNDS}")
        trainer.stop()

    def median(policy, what):
        return statistics.median(turn[what] for turn in found[policy])

    figures = []
    for policy in policies:
        target = 0.01 if policy in TARGETS else None
        share, words = median(policy, "stall"), f"{median(policy, 'pulls'):.1f} pulls a step"
        name = f"stall_share_async_{policy.replace('-', '_')}"
        figures.append(Figure(name, share, "share", target, "<=", f"{share:.1%}", words))
    ages = {policy: median(policy, "age") for policy in policies}
    for policy, target in (("after-push", 0.5), ("eager", None)):
        name = f"staleness_adaptive_vs_{policy.replace('-', '_')}"
        figures.append(times(name, ages["adaptive"], ages[policy], target, "<="))
    return figures


def publications(bench, gradfs):
    found, version = {pace: [] for pace in PAUSES}, 0
    with Hosts(["shard", "from", "to"], Link(rate=PUBLISH_RATE)) as hosts:
        cluster = Cluster.of(hosts, gradfs, "--size", SIZE, "--reducer", "assign")
        sends, reads = (cluster.mount(host, "--transport", "tcp") / "model" for host in ("from", "to"))
        say(f"publications over links of {hosts.link}")
        for _ in range(3 if bench.quick else 7):
            for pace, pause in PAUSES.items():
                version += 1
                reader = hosts.work("to", "hosts.py", "await", reads, version)
                reader.wait_for("waits")
                words = [sends, SIZE, PIECE, pause, version]
                begin = hosts.work("from", "hosts.py", "publish", *words).found(DEADLINE)["at"]
                found[pace].append(reader.found(DEADLINE)["at"] - begin)
        hosts.check()
    wire = SIZE * 8 / PUBLISH_RATE
    return [
        times(f"publish_over_link_{pace}_vs_wire", statistics.median(seconds), wire, op="<=")
        for pace, seconds in found.items()
    ]  # fmt: skip


def check(parser, options):
    if "timelines" in options.only and not options.chart:
        parser.error("--only timelines is a chart: give --chart DIR")


def run(bench):
    require(*(["sklearn"] if "digits" in bench.only else []), *(["matplotlib"] if bench.chart else []))
    gradfs, learner, figures = bench.gradfs(), None, []
    if "sync" in bench.only:
        try:
            (learner,) = bench.binaries("bench_learner")
        except Failed as error:
            say(f"without learners by the library: {error}")
        figures += overlap.figures(overlap.measure(gradfs, learner, bench.quick))
    if "async" in bench.only:
        figures += asynchronous(bench, gradfs)
    if "publish" in bench.only:
        figures += publications(bench, gradfs)
    if "digits" in bench.only:
        found = digits.measure(gradfs, 1 if bench.quick else digits.ROUNDS)
        figures += digits.figures(found)
        if bench.chart:
            digits.draw(found, bench.chart_path("digits"))
    if "timelines" in bench.only:
        timelines.draw(gradfs, bench.chart_path("stall"))
    return figures
