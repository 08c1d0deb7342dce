"""gradfs as suites start it: daemons with mounts, shards on this host, and learners, who are asked for rounds in turn.

Learners by the library are processes of fs-daemon/examples/bench_learner.rs, and those of a mount are lib/work/learner.py.
They and the baselines of scripts/baselines obey the same lines (common.h there).
"""

import json
import random
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from programs import START_DEADLINE, STOP_DEADLINE, Peer, Program, environment, output_of

MODEL = "model"
WORK = Path(__file__).resolve().parents[1] / "work"
LEARNER = WORK / "learner.py"
# What a learner can be asked for that contributes nothing.
PULLS = ("pull", "newest", "get", "fetch")


def cpu_seconds(pid):
    """Of a process with all threads that it has and had, to the nanosecond."""
    # The clock that clock_getcpuclockid(3) names, which Python does not have.
    scheduled = 2
    return time.clock_gettime(~pid << 3 | scheduled)


@dataclass
class Measurement:
    """What a round took: from the first who began to the last who ended."""

    bytes: int
    seconds: float
    cpu_seconds: float


class Rival:
    """Learners that do the same at once. They end with `stack`; the CPU time of `pids` counts besides theirs.

    Where one of them `prepares`, none begins a round while another still does.
    """

    def __init__(self, stack, commands, pids=(), env=None, prepares=False):
        self.pids, self.pushes, self.peers, self.prepares = list(pids), 0, [], prepares
        stack.callback(self.stop)
        for command in commands:
            self.peers.append(Peer(command, env))
        for peer in self.peers:
            peer.answer("ready", START_DEADLINE)

    def stop(self):
        for peer in self.peers:
            peer.close()
        for peer in self.peers:
            peer.end()

    def ask(self, line, what):
        """Tells all of them a line; gives their answers."""
        for peer in self.peers:
            peer.tell(line)
        return [peer.answer(what) for peer in self.peers]

    def round(self, what):
        """Has every learner do `what`; gives a Measurement."""
        if self.prepares:
            self.ask("prepare", "prepare")
        before = sum(map(cpu_seconds, self.pids))
        answers = self.ask(f"round {what}", what)
        self.pushes += what not in PULLS
        return Measurement(
            sum(answer["bytes"] for answer in answers),
            max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers),
            sum(answer["cpu_seconds"] for answer in answers) + sum(map(cpu_seconds, self.pids)) - before,
        )

    def repeat(self, count, what="step"):
        """Has the only learner do so many; gives the seconds of each."""
        self.pushes += count
        return self.ask(f"repeat {count} {what}", what)[0]["seconds"]

    def check(self):
        """Ends the run unless what every learner has is right; the last round must have brought weights."""
        self.ask(f"check {self.pushes}", "check")


def turns(acts, count, warm_up=0, order="same", rivals=()):
    """Has each of {name: a call that gives numbers} take turns; gives {name: all numbers} without those of the warm-up.

    The order may `alternate`, or be `shuffled` for each turn; it is the same in every run. In the end, what `rivals` have
    must be right."""
    found, names, shuffle = {name: [] for name in acts}, list(acts), random.Random(0).shuffle
    for turn in range(warm_up + count):
        if order == "shuffled":
            shuffle(names)
        for name in reversed(names) if order == "alternate" and turn % 2 else names:
            numbers = acts[name]()
            if turn >= warm_up:
                found[name] += numbers
    for rival in rivals:
        rival.check()
    return found


def medians(found):
    return {name: statistics.median(numbers) for name, numbers in found.items()}


class Cluster:
    """Shards on this host with one blank fp32 model; they end with `stack`."""

    def __init__(self, stack, gradfs, directory, size, shards=1, listen="127.0.0.1", options=(), **settings):
        """`settings` are those of `gradfs create`; `directory` is new, and the cluster's own."""
        self.gradfs, self.directory, self.shards, self.registry = gradfs, directory, [], None
        directory.mkdir(parents=True)
        for index in range(shards):
            command = [gradfs, "shard", "--listen", f"{listen}:0", "--insecure", *options]
            command += ["--registry", self.registry] if self.registry else []
            shard = stack.enter_context(Program(command, directory / f"shard{index}.log"))
            shard.wait_for("gradfs: ready")
            self.shards.append(shard)
            self.registry = self.registry or shard.said().split(" listens on ")[1].split(",")[0].strip()
        settings = {"reducer": "sum", "learners": 1, "shards": shards, **settings}
        named = {name.replace("_", "-"): value for name, value in settings.items() if value is not None}
        words = [word for name, value in named.items() for word in (f"--{name}", value)]
        self.command("create", MODEL, "--size", size, "--dtype", "f32", *words)

    def command(self, *words):
        """What `gradfs WORDS --registry …` says."""
        return output_of(self.gradfs, *words, "--registry", self.registry, env=environment())

    def pids(self):
        return [shard.pid for shard in self.shards]

    def payload(self):
        """What the shards have counted of payload."""
        shards = json.loads(self.command("status", "--json"))["shards"]
        counts = [model["payload"] for shard in shards for model in shard["models"]]
        return {name: sum(count[name] for count in counts) for name in counts[0]}

    def mount(self, stack, *options, name="mount"):
        """A mount of the model; gives its directory there, and the daemon."""
        mountpoint = self.directory / name
        command = [self.gradfs, "mount", mountpoint, MODEL, "--registry", self.registry, "--threads", 2, *options]
        daemon = stack.enter_context(mounted(command, mountpoint))
        return mountpoint / MODEL, daemon


def _is_mounted(path):
    with open("/proc/self/mounts") as lines:
        return any(line.split(" ")[1] == str(path) for line in lines)


@contextmanager
def mounted(command, mountpoint, says="gradfs: ready"):
    """A daemon for as long as the block lasts; enters it once there is its mount, and it has said so."""
    mountpoint.mkdir(parents=True)
    try:
        with Program(command, mountpoint.with_suffix(".log")) as daemon:
            daemon.wait_until(lambda: _is_mounted(mountpoint) and says in daemon.said())
            yield daemon
    finally:
        if _is_mounted(mountpoint):
            subprocess.run(["umount", "-l", mountpoint], timeout=STOP_DEADLINE, check=False)


@contextmanager
def up(gradfs, mountpoint, source, *options, dtype="f32"):
    """`gradfs up` with a blank model of so many bytes, or one from a file; gives its directory below the mount."""
    model = [source] if isinstance(source, Path) else ["--size", source, "--dtype", dtype]
    command = [gradfs, "up", "--name", MODEL, "--threads", 2, *options, *model, mountpoint]
    with mounted(command, mountpoint):
        yield mountpoint / MODEL


@contextmanager
def sink(binary, mountpoint, size, mode):
    """The filesystem to beat, with one file `gradients`; gives the directory it is in."""
    command = [binary, "--size", size, "--mode", mode, "--threads", 2, mountpoint]
    with mounted(command, mountpoint, says=""):
        yield mountpoint


def library(stack, cluster, program, learners=1, processes=None, options=()):
    """Learners by the library, each a process, or all of them in as many `processes`."""
    here = learners // (processes or learners)
    common = ["--registry", cluster.registry, "--model", MODEL, "--learners", learners, "--here", here, *options]
    commands = [[program, "--rank", rank, *common] for rank in range(0, learners, here)]
    return Rival(stack, commands, cluster.pids())


def on_files(stack, model, way, learners=1, pids=(), pieces=None):
    """Learners by files of a mount, each a process; `way` is one of lib/work/learner.py."""
    common = ["--way", way, "--learners", learners, *(["--pieces", pieces] if pieces else [])]
    places = [model / "learners" / f"bench{rank}" for rank in range(learners)]
    for place in places:
        place.mkdir()
    commands = [[sys.executable, LEARNER, place, "--rank", rank, *common] for rank, place in enumerate(places)]
    return Rival(stack, commands, pids, prepares=True)


def on_model(stack, model, way):
    """A learner that has not joined, by the files of the model itself."""
    return Rival(stack, [[sys.executable, LEARNER, model, "--way", way]], prepares=True)
