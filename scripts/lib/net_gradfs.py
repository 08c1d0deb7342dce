"""gradfs itself in scripts/bench-net and scripts/bench-rdma: shards and models as users start them, and learners of three kinds.

The library's learners are processes of fs-daemon/examples/bench_learner.rs, those of a mount are processes that use
its files. Both obey the same lines as the baselines' and are asked for the same rounds.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import daemons
from machine import Failed
from net_baselines import ROUND_DEADLINE, START_DEADLINE, STOP_DEADLINE, Measurement, Process

MODEL = "model"
FILES = Path(__file__).resolve().parent / "net_files.py"


def cpu_seconds(pid):
    """Of a process with all threads that it has and had, to the nanosecond."""
    # The clock that clock_getcpuclockid(3) names, which Python does not have.
    scheduled = 2
    return time.clock_gettime(~pid << 3 | scheduled)


def resident_bytes(pid):
    """Memory that a process has, without what of it is shared with nobody but could be dropped."""
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def _environment():
    # The settings of whoever runs this are not what is measured.
    return {name: value for name, value in os.environ.items() if not name.startswith("GRADFS_")}


class Shard:
    """A process `gradfs shard`, from when it is ready."""

    def __init__(self, gradfs, directory, registry=None, listen="127.0.0.1", options=()):
        self.log = directory / f"shard-{time.monotonic_ns()}.log"
        command = [gradfs, "shard", "--listen", f"{listen}:0", "--insecure", *options]
        command += ["--registry", registry] if registry else []
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
                preexec_fn=daemons.end_with_parent,
            )
        give_up = time.monotonic() + START_DEADLINE
        while "ready" not in (said := self.log.read_text(errors="replace")):
            if self._process.poll() is not None:
                raise Failed(f"gradfs shard ended with {self._process.returncode}: {said.strip()}")
            if time.monotonic() > give_up:
                self.stop()
                raise Failed(f"gradfs shard is not ready: {said.strip()}")
            time.sleep(0.01)
        self.address = said.split(" listens on ")[1].split(",")[0].strip()

    @property
    def pid(self):
        """Of the process."""
        return self._process.pid

    def stop(self):
        """Ends it, kindly first."""
        self._process.terminate()
        try:
            self._process.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_DEADLINE)


class Cluster:
    """Shards with one blank fp32 model. Use as a context manager."""

    def __init__(
        self, gradfs, size, learners, shards=1, block_size=None, listen="127.0.0.1", shard_options=(), lease=None,
        reducer="sum",
    ):  # fmt: skip
        self._gradfs = gradfs
        self._stack = ExitStack()
        try:
            directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gradfs-bench-")))
            self.directory = directory
            self.shards = []
            for _ in range(shards):
                registry = self.shards[0].address if self.shards else None
                shard = Shard(gradfs, directory, registry, listen, shard_options)
                self._stack.callback(shard.stop)
                self.shards.append(shard)
            self.registry = self.shards[0].address
            command = [gradfs, "create", MODEL, "--size", size, "--dtype", "f32", "--registry", self.registry]
            command += ["--shards", shards, "--reducer", reducer, "--learners", learners]
            command += ["--block-size", block_size] if block_size else []
            command += ["--lease", lease] if lease is not None else []
            done = subprocess.run(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=_environment(),
                timeout=START_DEADLINE,
                check=False,
            )
            if done.returncode:
                raise Failed(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def payload(self):
        """What the shards have counted of payload."""
        command = list(map(str, [self._gradfs, "status", "--registry", self.registry, "--json"]))
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=START_DEADLINE)
        if done.returncode:
            raise Failed(f"{' '.join(command)}: {done.stderr.strip()}")
        counts = [model["payload"] for shard in json.loads(done.stdout)["shards"] for model in shard["models"]]
        return {name: sum(count[name] for count in counts) for name in counts[0]}

    def shard_pids(self):
        """Of the shards' processes."""
        return [shard.pid for shard in self.shards]


class Gradfs:
    """Learners of a cluster, asked for rounds as a Rival of net_baselines is. Use as a context manager."""

    def __init__(self, cluster, commands, daemon_pids=()):
        """`commands` start the learners; the CPU time of `daemon_pids` counts besides that of shards and learners."""
        self.cluster = cluster
        self.pids = [*cluster.shard_pids(), *daemon_pids]
        self.pushes = 0
        self.learners = []
        try:
            give_up = time.monotonic() + START_DEADLINE
            for command in commands:
                self.learners.append(Process(command, {}))
            self.hellos = [learner.answer("ready", give_up) for learner in self.learners]
        except BaseException:
            self.stop()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Ends the learners."""
        for learner in self.learners:
            learner.close()
        give_up = time.monotonic() + STOP_DEADLINE
        for learner in self.learners:
            learner.end(give_up)

    def round(self, what):
        """Has every learner do `what`; gives a Measurement."""
        give_up = time.monotonic() + ROUND_DEADLINE
        before = sum(map(cpu_seconds, self.pids))
        for learner in self.learners:
            learner.tell(f"round {what}")
        answers = [learner.answer(what, give_up) for learner in self.learners]
        self.pushes += what in ("push", "step", "read_step")
        return Measurement(
            sum(answer["bytes"] for answer in answers),
            max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers),
            sum(answer["cpu_seconds"] for answer in answers) + sum(map(cpu_seconds, self.pids)) - before,
        )

    def payload(self):
        """What the learners' processes have pushed, pulled and copied of payload, all in all."""
        give_up = time.monotonic() + ROUND_DEADLINE
        for learner in self.learners:
            learner.tell("payload")
        return [learner.answer("payload", give_up) for learner in self.learners]

    def check(self):
        """Ends the run unless the weights of every learner are right; the last round must have been a pull or step."""
        give_up = time.monotonic() + ROUND_DEADLINE
        for learner in self.learners:
            learner.tell(f"check {self.pushes}")
        for learner in self.learners:
            learner.answer("check", give_up)


def library(
    stack, binaries, size, learners, shards=1, block_size=None, processes=None, options=(), shard_options=()
):  # fmt: skip
    """Learners by the library, each a process, or all of them in as many `processes`."""
    gradfs, program = binaries
    cluster = stack.enter_context(
        Cluster(gradfs, size, learners, shards, block_size, shard_options=shard_options)
    )
    processes = processes or learners
    here = learners // processes
    common = ["--registry", cluster.registry, "--model", MODEL, "--learners", learners, "--here", here, *options]
    commands = [[program, "--rank", index * here, *common] for index in range(processes)]
    return stack.enter_context(Gradfs(cluster, commands))


def mount(stack, gradfs, size, learners, shards, way, options=()):
    """Learners by files of one mount, each a process; `way` is `written` or `mapped`."""
    cluster = stack.enter_context(Cluster(gradfs, size, learners, shards))
    mountpoint = cluster.directory / "mount"
    daemon = stack.enter_context(daemons.network_mount(gradfs, mountpoint, cluster.registry, MODEL, *options))
    common = ["--model", mountpoint / MODEL, "--learners", learners, "--way", way]
    commands = [[sys.executable, FILES, "--rank", rank, *common] for rank in range(learners)]
    return stack.enter_context(Gradfs(cluster, commands, [daemon.pid]))
