"""Measures what gradfs takes of memory for a model, in sizes of the model.

A model of fp32 is trained by learners of one mount, in `sync`: ten steps that are written and two that are mapped. What
counts is the anonymous and shared memory of the control group that holds the daemon and its learners, less the
anonymous memory of the learners, which is their arrays and their interpreters. A shard has a group of its own.

  up_sum, up_adam   gradfs up, one process, with these reducers
  shard_sum         gradfs shard, with a mount over TCP
  mount_tcp         that mount
  mount_shm         a mount on the host of the model's only shard, whose memory it shows
  ..._learner       what a second learner of the mount adds, without the sum of contributions: there is one for any number
                    of learners, and whether there is one at all is a matter of who comes first

Where no control group of memory can be made, the processes' own accounts are added up, and the output says so.
"""

import json
import time
from contextlib import ExitStack

from machine import MIB, require_memory, say
from memory_group import Processes, anonymous_bytes, group
from report import Figure, ratio

from bench import jobs

# What the figure may be with one learner, and what another one may add.
TARGETS = {"up_sum": 3.1, "up_adam": 5.1, "shard_sum": 3.1, "mount_tcp": 3.1, "mount_shm": 1.2}
PARTS = tuple(TARGETS)
ANOTHER, WITH_ANOTHER = 1.0, ("up_sum", "mount_tcp", "mount_shm")
WRITTEN, MAPPED, PIECE = 10, 2, 8 << 20
# Threads that take or give back memory beside a step have come to their end by then.
SETTLES = 1.0


class Run:
    """What is started and found: in groups of their own, gradfs and so many learners of one mount."""

    def __init__(self, stack, bench, gradfs, size, count, names):
        self.stack, self.size, self.count, self.is_exact = stack, size, count, True
        self.work = bench.work / "-".join([*names, str(count), str(time.monotonic_ns())])
        self.work.mkdir()
        self.groups, self.binaries = {}, {}
        for name in names:
            self.groups[name] = made = stack.enter_context(group(name))
            self.is_exact &= not isinstance(made, Processes)
            self.binaries[name] = made.starts(self.work / f"gradfs-{name}", gradfs)

    def train(self, model, name, is_sum):
        """All steps of learners in that group; what gradfs takes of the group then, in models."""
        rival = jobs.on_files(self.stack, model, "written", self.count, pieces=PIECE)
        for peer in rival.peers:
            self.groups[name].add(peer.process.pid)
        for number in range(WRITTEN + MAPPED):
            if number == WRITTEN:
                rival.ask("set_way mapped", "set_way")
            rival.round("step")
            if is_sum:
                rival.ask("glance", "glance")
        time.sleep(SETTLES)
        sums = json.loads((model / "status.json").read_text()).get("memory", {}).get("sums", 0)
        learners = sum(anonymous_bytes(peer.process.pid) for peer in rival.peers)
        return (self.groups[name].bytes() - learners - (sums if self.count > 1 else 0)) / self.size

    def up(self, reducer):
        options = ["--reducer", reducer, "--learners", self.count]
        mount = jobs.up(self.binaries["up"], self.work / "mount", self.size, *options)
        return {f"up_{reducer}": self.train(self.stack.enter_context(mount), "up", reducer == "sum")}

    def cluster(self, transport):
        cluster = jobs.Cluster(self.stack, self.binaries["shard"], self.work / "cluster", self.size, learners=self.count)
        cluster.gradfs = self.binaries["mount"]
        model, _ = cluster.mount(self.stack, "--transport", transport)
        found = {f"mount_{transport}": self.train(model, "mount", True)}
        return found | {"shard_sum" if transport == "tcp" else "shard_shm": self.groups["shard"].bytes() / self.size}


def run(bench):
    gradfs = bench.gradfs()
    size = (256 if bench.quick else 1024) * MIB
    require_memory(14 * size)
    found, exact = {}, True
    for count in (1, 2):
        wanted = {name for name in bench.only if count == 1 or name in WITH_ANOTHER}
        for names, start, gives in (
            (["up"], lambda run: run.up("sum"), {"up_sum"}),
            (["up"], lambda run: run.up("adam"), {"up_adam"}),
            (["shard", "mount"], lambda run: run.cluster("tcp"), {"shard_sum", "mount_tcp"}),
            (["shard", "mount"], lambda run: run.cluster("shm"), {"mount_shm"}),
        ):
            if gives & wanted:
                with ExitStack() as stack:
                    run = Run(stack, bench, gradfs.resolve(), size, count, names)
                    found |= {(name, count): value for name, value in start(run).items()}
                    exact &= run.is_exact
        say(f"{count} learner{'s' if count > 1 else ''}")
    if not exact:
        print("no control group of memory can be made: these are sums of what smaps_rollup says of the processes")
    figures = []
    # To a hundredth of the model, below which buffers and tables of the daemon begin.
    for (name, count), value in found.items():
        if count == 1:
            figures.append(ratio(f"memory_{name}", round(value, 2), TARGETS.get(name), op="<=", unit="models"))
        elif name in WITH_ANOTHER:
            before = found[name, 1]
            words = f"{before:.2f} and {value:.2f}"
            figures.append(Figure(f"memory_{name}_learner", round(value - before, 2), "models", ANOTHER, "<=", words))
    return figures
