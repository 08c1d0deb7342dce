"""Measures snapshots in a store on disk, going on from them, and how long a job stands still when processes die.

  store     a snapshot of weights and Adam's state against `dd oflag=direct bs=4M` of as many bytes, both synced, and
            against torch.save of the same tensors; and the bytes of a second snapshot of a job whose new weights have a
            hundredth of the blocks changed
  steps     steps of a learner while a snapshot is written, against steps without; the longest of them; and how long that
            snapshot takes, against `dd` while as many steps are made
  restore   `gradfs create --from` until a mount answers, against reading the files and against torch.load of the same
            tensors, of which every byte is touched. The kernel's cache is dropped before each
  recovery  from `kill -9` of a process until the next step of a learner is acknowledged: one of three shards, their
            coordinator, the registry, a mount that is started again, a learner in mid-step, a member of an etcd together
            with the coordinator, and all shards with the registry, counted from the start of the last one. A shard that
            is silent counts from its SIGSTOP. With --quick: coordinator, registry, and everything.
            Of a killed mount, the second step counts: it waits for control/lease, which is 5 s here

Contenders take turns. Each snapshot goes into a store of its own, so that it writes everything.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time

from bench import jobs
from machine import GIB, MIB, ROOT, Failed, own_python, require_memory, say
from programs import Program, environment, output_of
from report import Figure, times

# Ports of members of an etcd, which must be known before it starts.
sys.path.append(str(ROOT / "tests"))

from ports import free_address  # noqa: E402

PARTS = ("store", "steps", "restore", "recovery")
QUICK = "48 MiB in place of 1 GiB, and fewer turns: below 45 s once it is built"
DEADLINE = 300.0
# A job goes on so soon, after a kill or after the lease of a silent shard.
SOON, LEASE = 10, 10
# What is done with --quick, and what besides a kill in an etcd without.
QUICKLY = ("coordinator", "registry", "everything")
ALONE = ("shard", "coordinator", "registry", "mount", "learner", "everything", "silent_host")
# A learner that contributes one half.
HALF = """
import sys, time
with open(sys.argv[1], "wb", buffering=0) as file:
    file.write(bytes(int(sys.argv[2]) // 2))
    print("half", flush=True)
    time.sleep(300)
"""
# Weights and both of Adam's moments.
PARTS_OF_STATE = 3
BLOCK = 4 * MIB
TENSORS = """
import json, os, sys, time, torch
path, size, does = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if does == "save":
    state = {name: torch.randn(size // 4) for name in ("weights", "exp_avg", "exp_avg_sq")}
    begin = time.monotonic()
    torch.save(state, path)
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
else:
    begin = time.monotonic()
    state = torch.load(path, mmap=False)
    for tensor in state.values():
        tensor.view(torch.int32).max()
print(json.dumps(time.monotonic() - begin))
"""


def seconds_of(act):
    begin = time.monotonic()
    act()
    return time.monotonic() - begin


def forget_files():
    """Nothing that was read or written stays in memory."""
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3")


def seconds(value):
    return f"{value:.2f} s"


def sizes(bench):
    """Bytes of the weights, so that they and their state have 1 GiB together."""
    state = 48 * MIB if bench.quick else GIB
    size = state // PARTS_OF_STATE // BLOCK * BLOCK
    require_memory(12 * size)
    return size, size * PARTS_OF_STATE


def dd_of(path, size):
    words = ["if=/dev/zero", f"of={path}", "bs=4M", f"count={size // (4 * MIB)}", "oflag=direct", "conv=fsync"]
    return ["dd", *words, "status=none"]


def torch_takes(path, size, does):
    return json.loads(output_of(own_python(), "-c", TENSORS, path, size, does, timeout=DEADLINE))


def written(path, data):
    file = os.open(path, os.O_WRONLY)
    for at in range(0, len(data), MIB):
        os.write(file, data[at : at + MIB])
    os.close(file)


class Job:
    """A model with Adam on shards of this host, and its mount."""

    def __init__(self, bench, stack, gradfs, size, name, shards=1, **settings):
        self.cluster = jobs.Cluster(
            stack, gradfs, bench.work / name, size, shards=shards, reducer="adam", block_size=BLOCK, **settings
        )  # fmt: skip
        self.model, _ = self.cluster.mount(stack)
        self.gradient = memoryview(b"\0\0\x80\x3c" * (size // 4))

    def step(self):
        written(self.model / "gradients", self.gradient)

    def save(self, store):
        return self.cluster.command("snapshot", jobs.MODEL, "--to", store, "--wait")


def store(bench, gradfs):
    size, state = sizes(bench)
    turns = 2 if bench.quick else 5
    with contextlib.ExitStack() as stack:
        job = Job(bench, stack, gradfs, size, "store")
        say(f"snapshots of {state / MIB:.0f} MiB")
        found, zeros = {"ours": [], "dd": [], "torch": []}, bench.work / "dd"
        for turn in range(turns + 1):
            place = bench.work / f"store-{turn}"
            job.step()

            acts = {
                "ours": lambda place=place: seconds_of(lambda: job.save(place)),
                "dd": lambda: seconds_of(lambda: subprocess.run(dd_of(zeros, state), check=True, timeout=DEADLINE)),
                "torch": lambda: torch_takes(bench.work / "torch", size, "save"),
            }
            for name in acts if turn % 2 else reversed(acts):
                forget_files()
                took = acts[name]()
                # The first turn takes memory.
                if turn:
                    found[name].append(took)
            for left in (place, zeros):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    ours, dd, torch = (statistics.median(of) for of in found.values())
    return [
        times("snapshot_vs_dd", ours, dd, 0.85, words=seconds),
        times("snapshot_vs_torch_save", ours, torch, 1.2, words=seconds),
        incremental(bench, gradfs, size),
    ]


def incremental(bench, gradfs, size):
    """The bytes of a second snapshot by those of the first one."""
    import numpy

    with contextlib.ExitStack() as stack:
        settings = {"reducer": "assign", "block_size": BLOCK // 16}
        cluster = jobs.Cluster(stack, gradfs, bench.work / "assign", size, shards=2, **settings)
        model, _ = cluster.mount(stack)
        weights, place = numpy.random.default_rng(1).random(size // 4, dtype="f4"), bench.work / "assigned"
        found = []
        for _ in range(2):
            written(model / "publish", memoryview(weights).cast("B"))
            said = cluster.command("snapshot", jobs.MODEL, "--to", place, "--wait")
            found.append(int(said.rsplit(" of which ", 1)[1].split()[0]))
            # A hundredth of the blocks, at least one.
            weights[:: 100 * BLOCK // 64] += 1
    first, second = found
    return Figure("incremental_snapshot_bytes", second / first, "ratio", 0.05, "<=", f"{second} B", f"{first} B")


def steps(bench, gradfs):
    size, state = sizes(bench)
    turns = 2 if bench.quick else 5
    found = {"alone": [], "ours": [], "dd": []}
    took = {"ours": [], "dd": []}
    with contextlib.ExitStack() as stack:
        job = Job(bench, stack, gradfs, size, "steps", shards=2)
        say(f"steps while {state / MIB:.0f} MiB are written")
        for turn in range(turns + 1):
            place, zeros = bench.work / f"steps-{turn}", bench.work / "dd"
            saves = [gradfs, "snapshot", jobs.MODEL, "--to", place, "--wait", "--registry", job.cluster.registry]
            commands = {"ours": saves, "dd": dd_of(zeros, state)}
            for name in commands if turn % 2 else reversed(commands):
                alone, beside = [seconds_of(job.step) for _ in range(5)], []
                begin = time.monotonic()
                writing = Program(commands[name], bench.work / f"{name}.log")
                while writing.process.poll() is None:
                    beside.append(seconds_of(job.step))
                writing.finish(DEADLINE)
                if turn:
                    took[name].append(time.monotonic() - begin)
                    found["alone"] += alone
                    # The last step is beside it only in part.
                    found[name] += beside[:-1] or beside
            shutil.rmtree(place)
            zeros.unlink()
    alone, ours, dd = map(statistics.median, found.values())
    longest = max(found["ours"])
    return [
        times("step_during_snapshot_ratio", ours, alone, 1.1, "<="),
        times("step_during_dd_ratio", dd, alone, None, "<="),
        times("longest_step_during_snapshot", longest, alone, None, "<="),
        times("snapshot_vs_dd_with_steps", *map(statistics.median, took.values()), None, words=seconds),
    ]


def restore(bench, gradfs):
    size, state = sizes(bench)
    turns = 2 if bench.quick else 5
    place, saved = bench.work / "saved", bench.work / "tensors"
    with contextlib.ExitStack() as stack:
        job = Job(bench, stack, gradfs, size, "restore")
        job.step()
        job.save(place)
        cluster = job.cluster
        torch_takes(saved, size, "save")
        say(f"going on from {state / MIB:.0f} MiB")

        def read():
            for path in sorted(place.rglob("*")):
                if path.is_file():
                    with open(path, "rb", buffering=0) as file:
                        piece = bytearray(4 * MIB)
                        while file.readinto(piece):
                            pass

        def create(number):
            # The mount shows it by itself when it is there.
            name = f"again{number}"
            cluster.command("create", name, "--from", place)
            with contextlib.ExitStack() as own:
                mountpoint = bench.work / name
                command = [gradfs, "mount", mountpoint, name, "--registry", cluster.registry, "--threads", 2]
                own.enter_context(jobs.mounted(command, mountpoint))
                (mountpoint / name / "version").read_text()
                end = time.monotonic()
            cluster.command("delete", name)
            return end

        found = {"ours": [], "read": [], "torch": []}
        for turn in range(turns + 1):
            for name in found if turn % 2 else reversed(found):
                forget_files()
                begin = time.monotonic()
                match name:
                    case "ours":
                        took = create(turn) - begin
                    case "read":
                        took = seconds_of(read)
                    case _:
                        took = torch_takes(saved, size, "load")
                if turn:
                    found[name].append(took)
    ours, read_all, torch = (statistics.median(of) for of in found.values())
    return [
        times("restore_vs_read", ours, read_all, 0.7, words=seconds),
        times("restore_vs_torch_load", ours, torch, 1.2, words=seconds),
    ]


class Living:
    """Three shards and a registry of their own, in a process or in three members of an etcd. Processes are killed here, and
    started again."""

    def __init__(self, bench, gradfs, size, name, members=0):
        self.gradfs, self.work, self.size, self.shards, self.tables = gradfs, bench.work / name, size, [], []
        self.started, self.mountpoint, self.mount = 0, self.work / "mount", None
        self.work.mkdir()
        self.mountpoint.mkdir()
        self.peers, self.clients = ([free_address() for _ in range(members)] for _ in range(2))
        self.registry = "etcd://" + ",".join(self.clients)

    def __enter__(self):
        try:
            for member in range(len(self.clients)):
                self.tables.append(self.member(member))
            if not self.clients:
                self.tables = [self.table("127.0.0.1:0")]
                self.registry = self.address(self.tables[0])
            self.shards = [self.shard("127.0.0.1:0") for _ in range(3)]
            words = ["--size", self.size, "--reducer", "adam", "--block-size", BLOCK, "--shards", 3]
            self.command("create", jobs.MODEL, *words, "--snapshot-to", self.work / "store", "--snapshot-every", 0, "--lease", 5)
            self.show()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for program in [*self.shards, *self.tables, *filter(None, [self.mount])]:
            program.process.kill()
            program.process.wait()
        self.unmount()

    def unmount(self):
        subprocess.run(["umount", "-l", self.mountpoint], stderr=subprocess.DEVNULL, check=False)

    def program(self, *words):
        self.started += 1
        return Program(words, self.work / f"{self.started}.log")

    def start(self, *words):
        program = self.program(self.gradfs, *words)
        program.wait_for("gradfs: ready")
        return program

    def table(self, address):
        return self.start("registry", "--listen", address, "--registry-state", self.work / "state")

    def shard(self, address):
        return self.start("shard", "--listen", address, "--registry", self.registry)

    def show(self):
        self.mount = self.start("mount", self.mountpoint, jobs.MODEL, "--registry", self.registry, "--threads", 2)

    def member(self, number):
        client, peer = f"http://{self.clients[number]}", f"http://{self.peers[number]}"
        words = ["etcd", "--name", number, "--data-dir", self.work / f"etcd{number}", "--log-level", "error"]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        words += ["--initial-advertise-peer-urls", peer, "--initial-cluster"]
        return self.program(*words, ",".join(f"{of}=http://{at}" for of, at in enumerate(self.peers)))

    def address(self, program):
        return program.said().split("listens on ")[1].split(",")[0].split(";")[0].strip()

    def command(self, *words):
        return output_of(self.gradfs, *words, "--registry", self.registry, env=environment())

    def having(self, what):
        """The shards that have blocks, or the one that is the coordinator."""
        shards = json.loads(self.command("status", "--json"))["shards"]
        addresses = [of["address"] for of in shards if any(model[what] for model in of.get("models") or [])]
        return [shard for shard in self.shards if self.address(shard) in addresses]

    def kill(self, *programs):
        """Kills these; when that was."""
        for program in programs:
            program.process.kill()
        begin = time.monotonic()
        for program in programs:
            program.process.wait()
        return begin

    def replace(self, shard):
        self.shards[self.shards.index(shard)] = self.shard(self.address(shard))

    def harm(self, kind, turn):
        """Does it. When that was, and what heals it once the job has gone on."""
        (coordinator,) = self.having("coordinator")
        other = next(shard for shard in self.having("blocks") if shard is not coordinator)
        match kind:
            case "shard" | "coordinator":
                one = coordinator if kind == "coordinator" else other
                return self.kill(one), lambda: self.replace(one)
            case "silent_host":
                os.kill(other.pid, signal.SIGSTOP)
                return time.monotonic(), lambda: os.kill(other.pid, signal.SIGCONT)
            case "registry":
                return self.kill(self.tables[0]), lambda: self.tables.append(self.table(self.address(self.tables.pop())))
            case "mount":
                begin = self.kill(self.mount)
                self.unmount()
                self.show()
                return begin, nothing
            case "learner":
                learner = self.program(own_python(), "-c", HALF, self.mountpoint / jobs.MODEL / "gradients", self.size)
                learner.wait_for("half")
                return self.kill(learner), nothing
            case "etcd":
                number = turn % len(self.tables)
                begin = self.kill(self.tables[number], coordinator)
                self.tables[number] = self.member(number)
                return begin, lambda: self.replace(coordinator)
            case "everything":
                self.kill(*self.shards, *self.tables)
                self.tables = [self.table(self.address(self.tables[0]))]
                self.shards = [self.shard(self.address(shard)) for shard in self.shards]
                return time.monotonic(), nothing


def nothing():
    """There is nothing to be healed."""


def recovery(bench, gradfs):
    size, state = sizes(bench)
    say(f"killing processes of a job of {state / MIB:.0f} MiB")
    found = {}
    with Living(bench, gradfs, size, "recovery") as living:
        for kind in QUICKLY if bench.quick else ALONE:
            turns = 3 if kind in ("shard", "coordinator", "everything") and not bench.quick else 1
            found[kind] = [recovers(living, kind, turn) for turn in range(turns)]
    if not bench.quick and shutil.which("etcd"):
        with Living(bench, gradfs, size, "members", members=3) as living:
            found["etcd"] = [recovers(living, "etcd", turn) for turn in range(3)]
    for kind, took in found.items():
        say(f"{kind}: {', '.join(seconds(of) for of in took)}")
    silent = found.pop("silent_host", None)
    figures = [Figure(f"recovery_{kind}", max(took), "s", None, None) for kind, took in found.items()]
    worst = max(figure.value for figure in figures)
    figures.insert(0, Figure("recovery_seconds", worst, "s", SOON, "<=", seconds(worst)))
    if silent:
        figures.append(Figure("recovery_silent_host_seconds", *silent, "s", LEASE + SOON, "<=", seconds(*silent)))
    return figures


def recovers(living, kind, turn):
    """From the harm to the next step."""
    model, gradient = living.mountpoint / jobs.MODEL, memoryview(b"\0\0\x80\x3c" * (living.size // 4))
    written(model / "gradients", gradient)
    with open(model / "version") as version:
        os.fsync(version.fileno())
    begin, heals = living.harm(kind, turn)
    left = 2 if kind == "mount" else 1
    while left:
        try:
            written(model / "gradients", gradient)
            left -= 1
        except OSError as error:
            if time.monotonic() - begin > DEADLINE:
                raise Failed(f"{kind}: no step for {DEADLINE:.0f} s") from error
            time.sleep(0.01)
    took = time.monotonic() - begin
    heals()
    return took


def run(bench):
    gradfs, figures = bench.gradfs(), []
    for part in PARTS:
        if part in bench.only:
            figures += globals()[part](bench, gradfs)
    return figures
