"""The synchronous part of scripts/bench-stall: how much of a step's computing, pushing and pulling overlaps.

Hosts of network namespaces have links that are slow, so that the wire is the limit. One has the shard, the others have
a mount each, with one learner or several. The reducer is `sum`, and a model has 256 blocks (--quick: 128). There is one
connection for blocks, as docs/operate/network.md advises for links that are slow.

  serial    the learner computes nothing, writes all, and its open pulls (on-demand): a push alone, then a pull alone
  short     it computes for 0.3 of the wire's time, in chunks of a block that are contributed one by one;
            versions are pulled at once
  long      the same, but it computes for 1.3 of the wire's time
  whole     the same as long, but all is written after computing

There are three ways to contribute a chunk, and each has its own `short` and `long`:

  written    write(2), and fsync at the end
  fallocate  stores into the mapped file, fallocate(2) of what was stored, and fsync at the end
  library    no mount: the learners of a host are in one process, which offers blocks of their staging regions. It has a
             `serial` of its own

Before that, bare sockets send as many bytes as the model has, take as many, and do both at once: that is what the link
allows. The faster one of the first two, times the number of hosts, is the wire's time: each host sends its learners' sum
once, and all of them share the shard's link. `overlap_step_ratio` is a step of `short` divided by it.
"""

import json
import statistics
import sys
from pathlib import Path

from machine import say

WORK = Path(__file__).resolve().parent / "overlap_work.py"
SOCKETS = WORK.with_name("both_ways.py")
SOCKETS_PORT = 7000
RATE = 400e6
CONNECTIONS = "--connections", "1"
BLOCK, BLOCKS, QUICK_BLOCKS = 64 << 10, 256, 128
SHORT, LONG = 0.3, 1.3
# Much longer than a run takes.
DEADLINE = 120.0
# (learners, hosts)
CASES = ((1, 1), (4, 1), (4, 2), (4, 4))
WAYS = ("written", "fallocate", "library")


def _median(outputs):
    """Medians of each part over the steps of all learners."""
    found = [step for output in outputs for step in json.loads(output.splitlines()[-1])]
    return {what: statistics.median(step[what] for step in found) for what in found[0]}


def _create(cluster, name, blocks, learners):
    cluster.create(
        name, "--size", str(blocks * BLOCK), "--block-size", str(BLOCK), "--reducer", "sum",
        "--learners", str(learners), "--pull", "on-demand",
    )  # fmt: skip


class Library:
    """Learners by the library, a process on each host."""

    def __init__(self, cluster, hosts, program, blocks, learners):
        self.cluster, self.hosts, self.program, self.learners = cluster, hosts, program, learners
        self.blocks = blocks
        _create(cluster, "library", blocks, learners)

    def run(self, pull, chunks, compute, steps):
        """Medians of each part of a step."""
        from netns import PORT

        places, running = self.hosts.names[1:], []
        here = self.learners // len(places)
        for at, host in enumerate(places):
            words = ["--registry", f"{self.cluster.registry}:{PORT}", "--model", "library", "--pulls", pull]
            words += ["--rank", at * here, "--here", here, "--learners", self.learners]
            words += [*CONNECTIONS, "--overlap", steps, chunks, compute]
            running.append(self.hosts.start(host, [self.program, *words], name=f"the library on {host}"))
        return _median([of.finish(DEADLINE) for of in running])

    def remove(self):
        """Takes the model away, so that no mount has it."""
        self.cluster.command(self.hosts.names[0], "delete", "library")


class Job:
    """A model with learners on mounts of the hosts."""

    def __init__(self, cluster, hosts, blocks, learners):
        self.hosts, self.blocks = hosts, blocks
        _create(cluster, "model", blocks, learners)
        mounts = [(host, cluster.mount(host, *CONNECTIONS) / "model") for host in hosts.names[1:]]
        self.learners = [(*mounts[at % len(mounts)], f"l{at}") for at in range(learners)]
        for host, mount, learner in self.learners:
            (hosts.root(host) / str(mount / "learners" / learner).lstrip("/")).mkdir()

    def set(self, name, value):
        """Changes a setting."""
        host, mount, _ = self.learners[0]
        (self.hosts.root(host) / str(mount / "control" / name).lstrip("/")).write_text(value)

    def run(self, way, chunks, compute, steps):
        """Medians of each part over the steps of all learners."""
        running = []
        for host, mount, learner in self.learners:
            words = [mount / "learners" / learner, way, self.blocks * BLOCK, chunks, compute, steps]
            running.append(self.hosts.start(host, [sys.executable, WORK, *words], name=f"{host}-{learner}"))
        return _median([of.finish(DEADLINE) for of in running])


def _by_library(library, wire, quick, steps):
    """{(way, run): medians, the wire's time, and a push and a pull one after the other}."""
    serial = library.run("on-demand", 1, 0.0, steps)
    runs = {("library", "serial"): serial}
    for name, share in (("short", SHORT), ("long", LONG))[: 1 if quick else 2]:
        runs["library", name] = library.run("eager", library.blocks, share * wire, steps)
    return {run: found | {"wire": wire, "serial": serial["end"] + serial["open"]} for run, found in runs.items()}


def _by_mounts(job, wire, quick, steps):
    """The same of the ways through mounts."""
    serial = job.run("written", 1, 0.0, steps)
    runs = {("written", "serial"): serial}

    def run(way, name, share, chunks=job.blocks):
        runs[way, name] = job.run(way, chunks, share * wire, steps)

    job.set("pull", "eager")
    for way in WAYS[:2]:
        run(way, "short", SHORT)
        if way == "written" or not quick:
            run(way, "long", LONG)
    if not quick:
        run("written", "whole", LONG, chunks=1)
    job.set("pull", "adaptive")
    run("written", "long-adaptive", LONG)
    return {run: found | {"wire": wire, "serial": serial["end"] + serial["open"]} for run, found in runs.items()}


def _by_sockets(hosts, blocks, rounds):
    """{(way, run): seconds of bare sockets between the shard's host and another one}."""
    size, (shard, host) = blocks * BLOCK, hosts.names[:2]
    server = hosts.start(shard, [sys.executable, SOCKETS, "serve", SOCKETS_PORT, size], name="bare sockets")
    server.wait_for("ready")
    words = ["ask", hosts.address(shard), SOCKETS_PORT, size, rounds]
    asked = hosts.start(host, [sys.executable, SOCKETS, *words], name=f"bare sockets on {host}").finish(DEADLINE)
    server.finish(DEADLINE)
    found = json.loads(asked.splitlines()[-1])
    return {("sockets", "both"): found | {"wire": min(found["push"], found["pull"])}}


def measure(binary, learner, quiet, quick):
    """{(learners, hosts): {(way, run): medians}}; `learner` is the program of the library's learners, if there is one."""
    from netns import Cluster, Hosts, Link

    steps, found, alone = 5 if quick else 9, {}, None
    blocks = QUICK_BLOCKS if quick else BLOCKS
    for learners, on in CASES[:1] if quick else CASES:
        names = ["shard", *(f"host{at + 1}" for at in range(on))]
        with Hosts(names, Link(rate=RATE)) as hosts:
            cluster, runs = Cluster(hosts, binary), {}
            cluster.shard("shard")
            quiet.wait()
            if alone is None:
                runs |= _by_sockets(hosts, blocks, steps)
                alone = runs["sockets", "both"]["wire"]
            wire = alone * on
            if learner:
                library = Library(cluster, hosts, learner, blocks, learners)
                runs |= _by_library(library, wire, quick, steps)
                library.remove()
            runs |= _by_mounts(Job(cluster, hosts, blocks, learners), wire, quick, steps)
            hosts.check()
            found[learners, on] = runs
            say(f"learners: {learners}, hosts: {on}")
    return found


def figures(found):
    """What the benchmark reports of it: of each figure the worst case."""
    from report import Figure, milliseconds, ratio

    def runs_of(way, name):
        return [(case, runs[way, name]) for case, runs in found.items() if (way, name) in runs]

    rows, worst = [], {}
    for way in WAYS:
        if not (shorts := runs_of(way, "short")):
            continue
        (learners, on), run = max(shorts, key=lambda of: of[1]["step"] / of[1]["wire"])
        words = f"{milliseconds(run['step'])} ({learners} on {on})", milliseconds(run["wire"])
        rows.append(ratio(f"overlap_step_ratio_{way}", run["step"] / run["wire"], None, *words))
        worst[way] = rows[-1], run
    row, run = max(worst.values(), key=lambda of: of[0].value)
    serial = run["compute"] + run["serial"]
    rows = [
        ratio("overlap_step_ratio", row.value, 1.05, row.ours, row.other, op="<="),
        ratio("overlap_step_vs_serial", run["step"] / serial, None, row.ours, milliseconds(serial)),
        *rows,
    ]
    for _, run in runs_of("sockets", "both"):
        both, alone = milliseconds(run["both"]), milliseconds(run["wire"])
        rows.append(ratio("both_ways_vs_alone_sockets", run["both"] / run["wire"], None, both, alone))
    for name, (way, run), target in (
        ("stall_share_eager", ("written", "long"), 0.01),
        ("stall_share_adaptive", ("written", "long-adaptive"), 0.01),
        ("stall_share_eager_fallocate", ("fallocate", "long"), None),
        ("stall_share_eager_library", ("library", "long"), None),
        ("stall_share_eager_written_whole", ("written", "whole"), None),
    ):
        if not (runs := [of for _, of in runs_of(way, run)]):
            continue
        share = max((of["end"] + of["open"]) / of["step"] for of in runs)
        end, opened, write = (max(of[what] for of in runs) for what in ("end", "open", "write"))
        words = f"end {milliseconds(end)}, open {milliseconds(opened)}; chunks {milliseconds(write)}"
        rows.append(Figure(name, share, "share", target, "<=" if target else None, f"{share:.1%}", words))
    return rows
