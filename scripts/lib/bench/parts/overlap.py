"""The synchronous part of the suite stall: how much of a step's computing, pushing and pulling overlaps.

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

import statistics

from machine import say
from netns import PORT, Cluster, Hosts, Link
from report import Figure, milliseconds, ratio, times

RATE = 400e6
CONNECTIONS = "--connections", "1"
BLOCK, BLOCKS, QUICK_BLOCKS = 64 << 10, 256, 128
SHORT, LONG = 0.3, 1.3
# Much longer than a run takes.
DEADLINE = 120.0
# (learners, hosts)
CASES = ((1, 1), (4, 1), (4, 2), (4, 4))
WAYS = ("written", "fallocate", "library")


class Job:
    """A case: hosts, and a model at a time with so many learners."""

    def __init__(self, hosts, binary, learners, quick):
        self.hosts, self.quick, self.learners, self.runs = hosts, quick, learners, {}
        self.blocks, self.steps = (QUICK_BLOCKS, 5) if quick else (BLOCKS, 9)
        self.size, self.places = self.blocks * BLOCK, hosts.names[1:]
        self.cluster = Cluster.of(hosts, binary)

    def create(self, name):
        words = ["--size", self.size, "--block-size", BLOCK, "--reducer", "sum", "--learners", self.learners]
        self.cluster.create(name, *words, "--pull", "on-demand")

    def done(self, name, programs):
        """Notes the medians of each part over the steps of all learners, whose programs say them last."""
        found = [step for program in programs for step in program.found(DEADLINE)]
        self.runs[name] = {what: statistics.median(step[what] for step in found) for what in found[0]}

    def by_sockets(self):
        """Bare sockets between the shard's host and another one; the wire's time."""
        server = self.hosts.work("shard", "hosts.py", "serve", self.size)
        server.wait_for("ready")
        words = [self.hosts.address("shard"), self.size, self.steps]
        found = self.hosts.work(self.places[0], "hosts.py", "ask", *words).found(DEADLINE)
        server.finish(DEADLINE)
        self.runs["sockets", "both"] = found
        return min(found["push"], found["pull"])

    def by_library(self, program, wire):
        """Learners by the library, a process on each host."""
        self.create("library")
        here = self.learners // len(self.places)
        shares = {"serial": 0.0, "short": SHORT} if self.quick else {"serial": 0.0, "short": SHORT, "long": LONG}
        for name, share in shares.items():
            running = []
            for at, host in enumerate(self.places):
                words = ["--registry", f"{self.cluster.registry}:{PORT}", "--model", "library", *CONNECTIONS]
                words += ["--rank", at * here, "--here", here, "--learners", self.learners]
                words += ["--pulls", "eager" if share else "on-demand"]
                words += ["--overlap", self.steps, self.blocks if share else 1, share * wire]
                running.append(self.hosts.start(host, [program, *words], name=f"the library on {host}"))
            self.done(("library", name), running)
        # So that no mount has it.
        self.cluster.command("shard", "delete", "library")

    def by_mounts(self, wire):
        """Learners on mounts of the hosts."""
        self.create("model")
        mounts = [(host, self.cluster.mount(host, *CONNECTIONS) / "model") for host in self.places]
        learners = [(*mounts[at % len(mounts)], f"l{at}") for at in range(self.learners)]
        for host, mount, learner in learners:
            self.hosts.path(host, mount / "learners" / learner).mkdir()

        def run(way, name, share, chunks=self.blocks):
            words = [way, self.size, chunks, share * wire, self.steps]
            of_all = [(host, mount / "learners" / learner) for host, mount, learner in learners]
            self.done((way, name), [self.hosts.work(host, "hosts.py", "overlap", own, *words) for host, own in of_all])

        def pull(policy):
            host, mount, _ = learners[0]
            self.hosts.path(host, mount / "control" / "pull").write_text(policy)

        run("written", "serial", 0.0, chunks=1)
        pull("eager")
        for way in WAYS[:2]:
            run(way, "short", SHORT)
            if way == "written" or not self.quick:
                run(way, "long", LONG)
        if not self.quick:
            run("written", "whole", LONG, chunks=1)
        pull("adaptive")
        run("written", "long-adaptive", LONG)


def measure(binary, learner, quick):
    """{(learners, hosts): {(way, run): medians}}; `learner` is the program of the library's learners, if there is one."""
    found, alone = {}, None
    for learners, on in CASES[:1] if quick else CASES:
        with Hosts(["shard", *(f"host{at + 1}" for at in range(on))], Link(rate=RATE)) as hosts:
            job = Job(hosts, binary, learners, quick)
            alone = alone or job.by_sockets()
            if learner:
                job.by_library(learner, alone * on)
            job.by_mounts(alone * on)
            hosts.check()
        for (way, _), run in job.runs.items():
            serial = job.runs.get(("library" if way == "library" else "written", "serial"))
            # A push and a pull one after the other.
            run |= {"wire": alone * on, "serial": serial["end"] + serial["open"]}
        found[learners, on] = job.runs
        say(f"learners: {learners}, hosts: {on}")
    return found


def figures(found):
    """Of each figure the worst case."""

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
        rows.append(times("both_ways_vs_alone_sockets", run["both"], run["wire"], op="<="))
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
