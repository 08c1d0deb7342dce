#!/usr/bin/python3
"""The part of scripts/bench-rdma that runs in the virtual machine: reads /share/job.json, writes /share/result.json."""

import json
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.dont_write_bytecode = True

import net_gradfs  # noqa: E402
import rdma_perftest  # noqa: E402
from machine import Failed, main, say  # noqa: E402
from report import Figure  # noqa: E402

SHARE = Path("/share")
WARM_UP = 1
# One whose contribution goes into the sum, and one whose contribution makes the version, too.
LEARNERS = 2
# Until a shard has nothing left to do of the push before.
SETTLED = 0.3
RATE_TARGET, CPU_TARGET = 0.9, 0.05
# Rings and what is looked at of directories: payload of learners lies elsewhere.
LEARNERS_ARENA = 8


def options_of(name, job):
    """Of a shard, and of learners."""
    if name == "tcp":
        return ["--rdma", "off"], []
    shard, learner = ["--rdma", "on"], ["--rdma", "--arena-mib", LEARNERS_ARENA]
    if name in ("static", "dynamic"):
        shard += ["--rdma-placement", name]
        learner += ["--placement", name]
    return [*shard, *job["shard_options"]], [*learner, *job["learner_options"]]


def start(stack, name, job, size, block, more=(), learners=1):
    """A shard with a model, and its learners, each a net_gradfs.Gradfs of its own."""
    shard, learner = options_of(name, job)
    address = os.environ["HOST_ADDRESS"]
    shard = [*shard, *more] if name != "tcp" else shard
    # Between two rounds of a learner others have theirs, and the machine is slow.
    cluster = net_gradfs.Cluster(job["gradfs"], size, learners, 1, block, address, shard, lease=0)
    cluster = stack.enter_context(cluster)
    common = [job["learner"], "--registry", cluster.registry, "--model", net_gradfs.MODEL, "--learners", learners]
    commands = [[*common, "--rank", rank, *learner] for rank in range(learners)]
    return [stack.enter_context(net_gradfs.Gradfs(cluster, [command])) for command in commands]


def reader(stack, name, job, cluster):
    """A process that only pulls."""
    _, options = options_of(name, job)
    command = [job["learner"], "--registry", cluster.registry, "--model", net_gradfs.MODEL, "--here", 0]
    command += ["--learners", LEARNERS, *options]
    return stack.enter_context(net_gradfs.Gradfs(cluster, [command]))


class Race:
    """Contenders' rounds in turn, and what was found: {name: [values]}."""

    def __init__(self, stack, job):
        self.job = job
        self.found = {}
        self.units = {}
        self.counting = False
        self.ends = {}
        self.readers = {}
        for name in job["contenders"]:
            self.ends[name] = start(stack, name, job, job["size"], job["block"], learners=LEARNERS)
            if name in ("rdma", "tcp"):
                self.readers[name] = reader(stack, name, job, self.ends[name][0].cluster)
        self.turns = [lambda name=name: self.gradfs(name) for name in self.ends]
        for program in ("ib_write_bw", "ib_read_bw"):
            self.turns += [lambda p=program, w=way: self.perftest(p, w) for way in rdma_perftest.WAYS]

    def add(self, name, value, unit):
        if self.counting:
            self.found.setdefault(name, []).append(value)
            self.units[name] = unit

    def perftest(self, program, way):
        job = self.job
        value = rdma_perftest.rate(program, way, job["block"], job["depth"], job["size"] // job["block"])
        self.add(f"{program}, {way}", value, "MB/s")

    def gradfs(self, name):
        first, last = self.ends[name]
        for end, what, key in (first, "push", "push"), (last, "push", "last push"), (first, "pull", "pull"):
            took = end.round(what)
            self.add(f"{name} {key}", took.bytes / took.seconds / 1e6, "MB/s")
        last.round("pull")
        if name in self.readers:
            time.sleep(SETTLED)
            [shard] = first.cluster.shard_pids()
            before = net_gradfs.cpu_seconds(shard)
            moved = self.readers[name].round("newest").bytes
            took = net_gradfs.cpu_seconds(shard) - before
            self.add(f"{name} shard's CPU of pulls", took / moved * 1e12, "ms/GB")

    def run(self, rounds, seconds):
        """So many rounds at least, and as many as begin within the time."""
        # The order differs from round to round, and is the same in every run.
        shuffle = random.Random(0).shuffle
        enough = time.monotonic() + seconds
        turn = 0
        while turn < WARM_UP + rounds or time.monotonic() < enough:
            self.counting = turn >= WARM_UP
            say(f"round {turn} of {rounds} or more" if self.counting else "a round to warm up")
            shuffle(self.turns)
            for do in self.turns:
                do()
            turn += 1
        for name, ends in self.ends.items():
            for end in self.all(name):
                end.pushes = ends[0].pushes
                end.check()

    def all(self, name):
        """All clients of a contender."""
        return [*self.ends[name], *filter(None, [self.readers.get(name)])]

    def median(self, name):
        return statistics.median(self.found[name])

    def best(self, program):
        """The faster way of a program of perftest."""
        return max((f"{program}, {way}" for way in rdma_perftest.WAYS), key=self.median)

    def copies(self, name, flow):
        """Bytes that CPUs have copied at both ends, for each byte of payload that went."""
        shards = self.ends[name][0].cluster.payload()
        clients = [count for client in self.all(name) for count in client.payload()]
        moved = sum(one[f"{flow}ed_bytes"] for one in clients)
        copied = sum(one[f"{flow}_copied_bytes"] for one in [shards, *clients])
        if moved == 0:
            raise Failed(f"{name}: nothing was counted as {flow}ed")
        return copied / moved


def figures_of(race):
    """What has a target, and what is told besides."""

    def rate(key, ours, program, target=None):
        bare = race.best(program)
        words = f"{race.median(ours):.1f} MB/s", f"{race.median(bare):.1f} MB/s ({bare})"
        return Figure(key, race.median(ours) / race.median(bare), "ratio", target, target and ">=", *words)

    def copied(name, flow, target=None):
        value = race.copies(name, flow)
        key, op = f"{name}_{flow}_cpu_copies_per_byte", None if target is None else "<="
        return Figure(key, value, "copies/byte", target, op, f"{value:.4f}", f"a byte {flow}ed, in user space")

    cpu, tcp = (race.median(f"{name} shard's CPU of pulls") for name in ("rdma", "tcp"))
    figures = [
        rate("rdma_push_vs_ib_write_bw", "rdma push", "ib_write_bw", RATE_TARGET),
        rate("rdma_pull_vs_ib_read_bw", "rdma pull", "ib_read_bw", RATE_TARGET),
        copied("rdma", "pull", 0),
        copied("rdma", "push", 0),
        Figure(
            "rdma_pull_shard_cpu_vs_tcp", cpu / tcp, "ratio", CPU_TARGET, "<=", f"{cpu:.0f} ms/GB", f"{tcp:.0f} ms/GB (TCP)"
        ),
        rate("rdma_last_push_vs_ib_write_bw", "rdma last push", "ib_write_bw"),
        copied("tcp", "pull"),
        copied("tcp", "push"),
    ]
    for name, program in ("static", "ib_write_bw"), ("dynamic", "ib_read_bw"):
        if name in race.ends:
            figures.append(rate(f"rdma_push_{name}_vs_{program}", f"{name} push", program))
    for name in race.found:
        key = name.replace("'s", "").replace(",", "").replace(" ", "_").lower()
        figures.append(Figure(key, race.median(name), race.units[name]))
    return figures


def run():
    """Measures what the job asks for."""
    job = json.loads((SHARE / "job.json").read_text())
    result = {}
    with ExitStack() as stack:
        say("shards and learners start")
        race = Race(stack, job)
        race.run(job["rounds"], job["seconds"])
        result["figures"] = [asdict(figure) for figure in figures_of(race)]
        result["measured"] = {
            name: {"median": race.median(name), "all": values, "unit": race.units[name]}
            for name, values in race.found.items()
        }
    if job["chart"]:
        import rdma_blocks

        result["series"] = rdma_blocks.measure(job)
    (SHARE / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main("scripts/bench-rdma", run))
