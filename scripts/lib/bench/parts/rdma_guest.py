#!/usr/bin/python3
"""The part of the suite rdma that runs in the virtual machine: reads /share/job.json, writes /share/result.json."""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.dont_write_bytecode = True

from bench import jobs  # noqa: E402
from bench.parts import blocks  # noqa: E402
from machine import MIB, Failed, main, say  # noqa: E402
from programs import Program, output_of  # noqa: E402
from report import Figure  # noqa: E402

SHARE = Path("/share")
WARM_UP, ROUNDS = 1, 5
# One whose contribution goes into the sum, and one whose contribution makes the version, too.
LEARNERS = 2
# Until a shard has nothing left to do of the push before.
SETTLED = 0.3
RATE_TARGET, CPU_TARGET = 0.9, 0.05
# Rings and what is looked at of directories: payload of learners lies elsewhere.
LEARNERS_ARENA = 8
# perftest: two ways to be told of what is done, each of them the faster one at times: seldom, and each time.
PERFTEST = {"seldom": (), "each": ("-Q", "1")}
PERFTEST_PORT, DEADLINE = 18515, 60.0
# Of the chart. dynamic: the shard fetches blocks. static: learners place them. Pulls are the same with both. The slow
# machine has time for 16 blocks of up to 512 KiB on their way, of larger ones for as many as there are. A shard grants so
# many slots to a connection, and a learner has so many; rings and directories take so many MiB, at most.
TRANSPORTS = ("tcp", "dynamic", "static")
WAYS = {"pipelined": blocks.Way(8 * MIB, 5, 0, 1), "sync": blocks.Way(None, 5, 0, 2)}
SLOTS, GRANTED, CONNECTIONS, RINGS = 16, 8, 2, 8


def _listens():
    if os.environ["RDMA_PROVIDER"] == "siw":
        said = output_of("rdma", "resource", "show", "cm_id", timeout=DEADLINE)
        return f":{PERFTEST_PORT} " in said and "LISTEN" in said
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
    return any(words[1].endswith(f":{PERFTEST_PORT:04X}") and words[3] == "0A" for words in lines)


def perftest(program, way, block, depth, count):
    """MB/s of so many blocks, as the program says it: a server and a client for each round."""
    command = [program, "-s", block, "-t", depth, "-n", max(count, depth, 5), "-F", *PERFTEST[way]]
    by_cm = os.environ["RDMA_PROVIDER"] == "siw"
    command += ["-R"] if by_cm else ["-d", os.environ["RDMA_DEVICE"], "-x", os.environ["RDMA_GID_INDEX"]]
    with tempfile.TemporaryDirectory() as scratch:
        server = Program(command, Path(scratch, "log"))
        try:
            server.wait_until(_listens, DEADLINE)
            said = output_of(*command, os.environ["HOST_ADDRESS"], timeout=DEADLINE)
            server.finish(DEADLINE)
        finally:
            server.stop()
    # Size, blocks, the most and the average MiB/s.
    for words in map(str.split, said.splitlines()):
        if len(words) >= 4 and words[0] == str(block):
            return float(words[3]) * MIB / 1e6
    raise Failed(f"{server.name} says nothing of its rate:\n{said}")


class Contender:
    """A shard with a model, and its learners, each a Rival of its own; and one that only pulls, where it is asked for."""

    def __init__(self, stack, name, job, size, block, more=(), learners=1, reads=False):
        shard, learner = ["--rdma", "off"], []
        if name != "tcp":
            shard = ["--rdma", "on", *more]
            learner = ["--rdma", "--arena-mib", LEARNERS_ARENA]
        if name in ("static", "dynamic"):
            shard += ["--rdma-placement", name]
            learner += ["--placement", name]
        place = Path(tempfile.mkdtemp(prefix="gradfs-bench-")) / name
        # Between two rounds of a learner others have theirs, and the machine is slow: leases do not end.
        settings = {"learners": learners, "block_size": block, "lease": 0}
        address = os.environ["HOST_ADDRESS"]
        self.cluster = jobs.Cluster(stack, job["gradfs"], place, size, 1, address, shard, **settings)
        common = [job["learner"], "--registry", self.cluster.registry, "--model", jobs.MODEL, "--learners", learners]
        starts = [["--rank", rank] for rank in range(learners)] + ([["--here", 0]] if reads else [])
        self.clients = [jobs.Rival(stack, [[*common, *start, *learner]], self.cluster.pids()) for start in starts]

    def check(self):
        for client in self.clients:
            client.pushes = self.clients[0].pushes
            client.check()

    def copies(self, name, flow):
        """Bytes that CPUs have copied at both ends, for each byte of payload that went."""
        clients = [count for client in self.clients for count in client.ask("payload", "payload")]
        moved = sum(one[f"{flow}ed_bytes"] for one in clients)
        if moved == 0:
            raise Failed(f"{name}: nothing was counted as {flow}ed")
        return sum(one[f"{flow}_copied_bytes"] for one in [self.cluster.payload(), *clients]) / moved


class Race:
    """Contenders' rounds in turn, and what was found: {name: ([values], unit)}."""

    def __init__(self, stack, job):
        self.job, self.found, self.counting, self.ends = job, {}, False, {}
        for name in job["contenders"]:
            of = {"learners": LEARNERS, "reads": name in ("rdma", "tcp")}
            self.ends[name] = Contender(stack, name, job, job["size"], job["block"], **of)
        self.turns = [lambda name=name: self.gradfs(name) for name in self.ends]
        for program in ("ib_write_bw", "ib_read_bw"):
            self.turns += [lambda p=program, w=way: self.perftest(p, w) for way in PERFTEST]

    def add(self, name, value, unit):
        if self.counting:
            self.found.setdefault(name, ([], unit))[0].append(value)

    def perftest(self, program, way):
        job = self.job
        value = perftest(program, way, job["block"], job["depth"], job["size"] // job["block"])
        self.add(f"{program}, {way}", value, "MB/s")

    def gradfs(self, name):
        first, last, *readers = self.ends[name].clients
        for end, what, key in (first, "push", "push"), (last, "push", "last push"), (first, "pull", "pull"):
            took = end.round(what)
            self.add(f"{name} {key}", took.bytes / took.seconds / 1e6, "MB/s")
        last.round("pull")
        for reader in readers:
            time.sleep(SETTLED)
            [shard] = self.ends[name].cluster.pids()
            before = jobs.cpu_seconds(shard)
            moved = reader.round("newest").bytes
            self.add(f"{name} shard's CPU of pulls", (jobs.cpu_seconds(shard) - before) / moved * 1e12, "ms/GB")

    def run(self, seconds):
        """So many rounds at least, and as many as begin within the time."""
        # The order differs from round to round, and is the same in every run.
        shuffle, enough, turn = random.Random(0).shuffle, time.monotonic() + seconds, 0
        while turn < WARM_UP + ROUNDS or time.monotonic() < enough:
            self.counting = turn >= WARM_UP
            say(f"round {turn} of {ROUNDS} or more" if self.counting else "a round to warm up")
            shuffle(self.turns)
            for do in self.turns:
                do()
            turn += 1
        for end in self.ends.values():
            end.check()

    def median(self, name):
        return statistics.median(self.found[name][0])

    def best(self, program):
        """The faster way of a program of perftest."""
        return max((f"{program}, {way}" for way in PERFTEST), key=self.median)


def figures_of(race):
    """What has a target, and what is told besides."""

    def rate(key, ours, program, target=None):
        bare = race.best(program)
        words = f"{race.median(ours):.1f} MB/s", f"{race.median(bare):.1f} MB/s ({bare})"
        return Figure(key, race.median(ours) / race.median(bare), "ratio", target, target and ">=", *words)

    def copied(name, flow, target=None):
        value = race.ends[name].copies(name, flow)
        key, op = f"{name}_{flow}_cpu_copies_per_byte", None if target is None else "<="
        return Figure(key, value, "copies/byte", target, op, f"{value:.4f}", f"a byte {flow}ed, in user space")

    cpu, tcp = (race.median(f"{name} shard's CPU of pulls") for name in ("rdma", "tcp"))
    words = f"{cpu:.0f} ms/GB", f"{tcp:.0f} ms/GB (TCP)"
    figures = [
        rate("rdma_push_vs_ib_write_bw", "rdma push", "ib_write_bw", RATE_TARGET),
        rate("rdma_pull_vs_ib_read_bw", "rdma pull", "ib_read_bw", RATE_TARGET),
        copied("rdma", "pull", 0),
        copied("rdma", "push", 0),
        Figure("rdma_pull_shard_cpu_vs_tcp", cpu / tcp, "ratio", CPU_TARGET, "<=", *words),
        rate("rdma_last_push_vs_ib_write_bw", "rdma last push", "ib_write_bw"),
        copied("tcp", "pull"),
        copied("tcp", "push"),
    ]
    for name, program in ("static", "ib_write_bw"), ("dynamic", "ib_read_bw"):
        if name in race.ends:
            figures.append(rate(f"rdma_push_{name}_vs_{program}", f"{name} push", program))
    for name, (_, unit) in race.found.items():
        key = name.replace("'s", "").replace(",", "").replace(" ", "_").lower()
        figures.append(Figure(key, race.median(name), unit))
    return figures


def by_block_size(job):
    """[[what, transport, way, {size: MB/s}]], medians: the races of blocks.py with a smaller model."""

    def start(stack, name, size, model):
        slots = min(SLOTS, max(1, model // size))
        placed = GRANTED * CONNECTIONS * size if name == "static" else 0
        arena = RINGS - (-(placed + 2 * size * slots) // MIB)
        return Contender(stack, name, job, model, size, ["--rdma-slots", slots, "--rdma-arena", f"{arena}MiB"]).clients[0]

    series = blocks.race(TRANSPORTS, start, WAYS)
    return [[*key, {size: rate * 1e3 for size, rate in rates.items()}] for key, rates in series.items()]


def run():
    """Measures what the job asks for."""
    job, result = json.loads((SHARE / "job.json").read_text()), {}
    with ExitStack() as stack:
        say("shards and learners start")
        race = Race(stack, job)
        race.run(job["seconds"])
        result["figures"] = [asdict(figure) for figure in figures_of(race)]
        result["measured"] = race.found
    if job["chart"]:
        result["series"] = by_block_size(job)
    (SHARE / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main("scripts/bench rdma", run))
