"""The synchronous part of scripts/bench-stall: how much of a step's computing, pushing and pulling overlaps.

Hosts of network namespaces have links that are slow, so that the wire is the limit. One has the shard, the others have
a mount each, with one learner or several. The reducer is `sum`, and a model has 256 blocks.

  serial    the learner computes nothing, writes all, and its open pulls (on-demand): a push alone, then a pull alone
  short     it computes for 0.3 of the longer one, in chunks of a block that are written one by one; versions are pulled at once
  long      the same, but it computes for 1.3 of the longer one
  whole     the same as long, but all is written after computing
"""

import json
import statistics
import sys
from pathlib import Path

from machine import say

WORK = Path(__file__).resolve().parent / "overlap_work.py"
RATE = 400e6
BLOCK, BLOCKS = 64 << 10, 256
CHUNKS = 256
SHORT, LONG = 0.3, 1.3
# Much longer than a run takes.
DEADLINE = 120.0
# (learners, hosts)
CASES = ((1, 1), (4, 1), (4, 2), (4, 4))


class Job:
    """A model with learners on the hosts."""

    def __init__(self, cluster, hosts, name, learners):
        self.hosts = hosts
        cluster.create(
            name, "--size", str(BLOCKS * BLOCK), "--block-size", str(BLOCK), "--reducer", "sum",
            "--learners", str(learners), "--pull", "on-demand",
        )  # fmt: skip
        mounts = [(host, cluster.mount(host) / name) for host in hosts.names[1:]]
        self.learners = [(*mounts[at % len(mounts)], f"l{at}") for at in range(learners)]
        for host, mount, learner in self.learners:
            (hosts.root(host) / str(mount / "learners" / learner).lstrip("/")).mkdir()

    def set(self, name, value):
        """Changes a setting."""
        host, mount, _ = self.learners[0]
        (self.hosts.root(host) / str(mount / "control" / name).lstrip("/")).write_text(value)

    def run(self, chunks, compute, steps):
        """Medians of each part over the steps of all learners."""
        running = []
        for host, mount, learner in self.learners:
            words = [mount / "learners" / learner, BLOCKS * BLOCK, chunks, compute, steps]
            running.append(self.hosts.start(host, [sys.executable, WORK, *words], name=f"{host}-{learner}"))
        found = [step for of in running for step in json.loads(of.finish(DEADLINE).splitlines()[-1])]
        return {what: statistics.median(step[what] for step in found) for what in found[0]}


def measure(binary, quiet, quick):
    """{(learners, hosts): {what: medians}}."""
    from netns import Cluster, Hosts, Link

    steps, found = 5 if quick else 9, {}
    for learners, on in CASES[:1] if quick else CASES:
        names = ["shard", *(f"host{at + 1}" for at in range(on))]
        with Hosts(names, Link(rate=RATE)) as hosts:
            cluster = Cluster(hosts, binary)
            cluster.shard("shard")
            job = Job(cluster, hosts, "model", learners)
            quiet.wait()
            serial = job.run(1, 0.0, steps)
            longer = max(serial["end"], serial["open"])
            runs = {"serial": serial}
            for pull in ("eager", "adaptive"):
                job.set("pull", pull)
                for name, chunks, compute in (("short", CHUNKS, SHORT), ("long", CHUNKS, LONG), ("whole", 1, LONG)):
                    if pull == "adaptive" and name != "long":
                        continue
                    runs[f"{name}-{pull}"] = job.run(chunks, compute * longer, steps)
            hosts.check()
            found[learners, on] = runs
            say(f"{learners} learners on {on} hosts")
    return found


def figures(found):
    """What the benchmark reports of it."""
    from report import Figure, milliseconds, ratio

    rows = []
    worst = max(found.values(), key=lambda runs: runs["short-eager"]["step"] / _longer(runs))
    step, longer = worst["short-eager"]["step"], _longer(worst)
    rows.append(ratio("overlap_step_ratio", step / longer, 1.05, milliseconds(step), milliseconds(longer), op="<="))
    serial = worst["short-eager"]["compute"] + worst["serial"]["end"] + worst["serial"]["open"]
    rows.append(ratio("overlap_step_vs_serial", step / serial, None, milliseconds(step), milliseconds(serial), op="<="))
    for name, run, target in (
        ("stall_share_eager", "long-eager", 0.01),
        ("stall_share_adaptive", "long-adaptive", 0.01),
        ("stall_share_eager_written_whole", "whole-eager", None),
    ):
        share = max((runs[run]["end"] + runs[run]["open"]) / runs[run]["step"] for runs in found.values())
        end, opened, write = (max(runs[run][what] for runs in found.values()) for what in ("end", "open", "write"))
        words = f"fsync {milliseconds(end)}, open {milliseconds(opened)}; write(2) {milliseconds(write)}"
        rows.append(Figure(name, share, "share", target, "<=", f"{share:.1%}", words))
    return rows


def _longer(runs):
    return max(runs["serial"]["end"], runs["serial"]["open"])
