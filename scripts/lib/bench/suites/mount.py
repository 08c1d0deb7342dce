"""Measures files of `gradfs up` against what they must be compared with, side by side in one run.

Each figure is the ratio of two medians, larger is better, or smaller where the target says <=.

  reads   weights through the mount and the same file on tmpfs: read(2) by one and two processes, mmap. "huge" is a tmpfs
          with huge pages, where this program may mount one
  writes  a whole contribution (fio, AIO, 16 x 1 MiB in flight, commit included) and the same written to
          a FUSE filesystem (examples/bench_sink.rs) that only copies it, with memcpy or with streaming
          stores, or only drops it
  hand    a synchronous step of two learners through the mount and by hand with NumPy in shared memory
  list    `ls -l tensors/` of a new version of a model of 10,000 tensors, and of as many files on tmpfs
  gloo    the same for two and four learners and an all_reduce of torch.distributed with gloo, in the
          fastest way it can be had (own network namespace, interfaces, pieces) and, "plain", as it comes
  commit  the median latency of a commit of one block, written and synced by one process; compared with nothing.
          "awake" is the same while processes of the idle class keep the cores from halting
  publish whole new weights of 1, 4 and 64 MiB, and SET of as many bytes in Redis (lib/bench/parts/publish.py)

A step is: every learner writes its gradients from a buffer of its own, ends its contribution, opens weights, and
has them in another buffer. It writes with write(2) and close, or with memcpy into the mapped file and fsync; it
reads with read(2), or with memcpy from a mapping. The fastest of these ways is what counts, and "written" is the
fastest with write(2). In a "mapped" step the gradients are in the mapped file already, as all_reduce has
them in its tensor.

With --against, an older binary takes part in everything beside the one that is built here; what they are compared with
is the same for both. Everything is then done in 7 passes with processes of their own. The table above has the medians
of the passes, and a second table has new/old for each figure, larger is better, with its interval of 95%, and the
geometric mean of them all, in which figures that are made of the same measurements count once. The latency of a commit is
new minus old there, and not in the mean. Publications are of the new binary alone.
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy
from machine import GIB, MIB, Failed, require, require_memory, say
from report import Figure, gib_s, microseconds, milliseconds, ratio, times

from bench import baselines, fio, jobs
from bench.against import NEW, OLD, joined, middle, named
from bench.parts import publish
from bench.parts.files import awake, commits, listing, pattern, read
from bench.parts.steps import GLOO_WAYS, PLAIN, WAYS, WRITTEN, connect_gloo, forget, mount_and_gloo, mount_and_hand
from bench.team import Team, durations, median

PARTS = ("reads", "writes", "hand", "list", "gloo", "commit", "publish")
AGAINST = "bench_vs_old"
NEEDS = {"writes": "fio", "gloo": "torch", "publish": "redis-server"}
BLOCK, TENSORS, GLOO_SIZE = 256 << 10, 10_000, 64 * MIB


class Plan:
    """How much is measured."""

    def __init__(self, quick, both):
        # Both binaries' models have to be in memory at once.
        self.size = (128 if quick else 512 if both else 1024) * MIB
        self.hand_size = (64 if quick else 256) * MIB
        # Of each pass. Two of them have either binary first once.
        self.rounds = 2 if both else 5 if quick else 9
        self.write_warm_up = 1 if quick or both else 4
        self.gloo = self.rounds if quick or both else 21
        self.gloo_trial = 1 if quick or both else 7
        self.commits = 6 if both else 20 if quick else 40
        # Sinks to compare with; the one with streaming stores is for those who look closer.
        self.sinks = ("copy", "discard") if quick else ("copy", "stream", "discard")


@contextmanager
def on_tmpfs(where="/dev/shm"):
    """A file that has no name, so that nothing of it stays whatever happens; gives a path to open it by."""
    file = os.open(where, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)


@contextmanager
def on_huge_tmpfs():
    """The same on a tmpfs with huge pages; gives None, and says why, where that cannot be mounted."""
    with tempfile.TemporaryDirectory(prefix="gradfs-huge-") as where:
        command = ["mount", "-t", "tmpfs", "-o", "huge=always", "tmpfs", where]
        mounted = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if mounted.returncode:
            print(f"without tmpfs with huge pages: {mounted.stderr.strip()}")
            yield None
            return
        try:
            with on_tmpfs(where) as path:
                yield path
        finally:
            subprocess.run(["umount", where], stdin=subprocess.DEVNULL, check=True)


def write_tensors(path, count):
    """A safetensors file of so many tensors with a number each, called as those of a deep network are."""
    names = [f"layers.{i // 10}.block.{i % 10}.weight" for i in range(count)]
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * count))


def fastest(results, ways, sides):
    """The fastest of the ways through a mount, for all sides together."""
    return min(ways, key=lambda way: sum(median(results, (way, side)) for side in sides))


class Pass:
    """One pass: what it starts and finds."""

    def __init__(self, bench, plan, binaries, sink_binary, work, team):
        """`binaries` are those of gradfs, by their sides."""
        self.plan, self.binaries, self.sink_binary, self.work = plan, binaries, sink_binary, work
        self.quiet, self.team, self.figures, self.comparisons = bench.quiet, team, [], []
        work.mkdir()

    def run(self, parts):
        if {"reads", "writes"} & parts:
            self.reads_and_writes(parts)
        for part in ("hand", "list"):
            if part in parts:
                getattr(self, part)()
        if "gloo" in parts:
            self.gloo(2, 1.2)
            self.gloo(4, 1.5)
        if "commit" in parts:
            self.commit()

    @contextmanager
    def mounts(self, name, source, *options):
        """A context with a model of so many bytes, or from a file, of each side; gives {side: its directory}."""
        with ExitStack() as stack:
            yield {
                side: stack.enter_context(jobs.up(binary, self.work / f"{name}-{side}", source, *options))
                for side, binary in self.binaries.items()
            }

    def race(self, warm_up, rounds):
        """The arguments of every race."""
        alternate = len(self.binaries) > 1
        return {"rounds": rounds, "warm_up": warm_up, "patience": self.quiet.patience, "alternate": alternate}

    def compared(self, names, rounds, words, **options):
        """Notes what the rounds of each side found of the figures that are made of them, as Comparison has it."""
        if OLD in self.binaries:
            self.comparisons.append((names, rounds, words, options))

    def reads_and_writes(self, parts):
        """Both parts use the same models, whose weights are a known pattern."""
        with self.mounts("sum", self.plan.size, "--reducer", "sum") as models:
            with on_tmpfs() as copy:
                for model in models.values():
                    self.fill(model, copy)
                if "reads" in parts:
                    with on_huge_tmpfs() as huge:
                        if huge:
                            shutil.copyfile(copy, huge)
                        self.reads(models, {"tmpfs": copy} | ({"huge tmpfs": huge} if huge else {}))
            if "writes" in parts:
                self.writes(models)

    def fill(self, model, copy):
        """Contributes the pattern, verifies the version made of it, and copies that."""
        count = self.plan.size // MIB
        with open(model / "gradients", "wb", buffering=0) as file:
            for index in range(count):
                file.write(pattern(index).tobytes())
        with open(model / "weights", "rb") as source, open(copy, "wb") as target:
            for index in range(count):
                piece = source.read(MIB)
                if not numpy.array_equal(numpy.frombuffer(piece, numpy.float32), pattern(index)):
                    raise Failed(f"the first version is wrong in MiB {index}: not what was contributed to zeros")
                target.write(piece)

    def reads(self, models, copies):
        """The mount against copies on tmpfs."""
        paths = {**{side: str(model / "weights") for side, model in models.items()}, **copies}
        for name, how, count in (
            ("mount_read_vs_{}_1job", "read", 1),
            ("mount_read_vs_{}_2jobs", "read", 2),
            ("mount_mmap_read_vs_{}", "mmap", 1),
        ):
            say(f"reading weights: {how}, {count} process{'es' if count > 1 else ''}")
            results = self.team.run(read, count, 600, paths=paths, how=how, **self.race(1, self.plan.rounds))
            rates = {side: self.plan.size * count / GIB / median(results, side) for side in (NEW, *copies)}
            names = {copy: name.format(copy.replace(" ", "_")) for copy in copies}
            for copy, called in names.items():
                target = 0.95 if copy == "tmpfs" else None
                self.figures.append(ratio(called, rates[NEW] / rates[copy], target, gib_s(rates[NEW]), gib_s(rates[copy])))
            self.compared(list(names.values()), {side: durations(results, side) for side in models}, milliseconds)

    def writes(self, models):
        """Contributions to `sum` and `adam` against the sinks."""
        plan, rates = self.plan, {}
        with ExitStack() as stack:
            sinks = {
                mode: stack.enter_context(jobs.sink(self.sink_binary, self.work / mode, plan.size, mode))
                for mode in plan.sinks
            }
            # Those that are compared most are neighbours.
            places = {"copy": sinks.pop("copy"), **{named("sum", side): model for side, model in models.items()}}
            adams = stack.enter_context(self.mounts("adam", plan.size, "--reducer", "adam", "--learning-rate", "0.01"))
            places |= {named("adam", side): model for side, model in adams.items()} | sinks
            order, turns = list(places.items()), plan.write_warm_up + plan.rounds
            for turn in range(turns):
                say(f"writing gradients: round {turn + 1} of {turns}")
                for name, place in order:
                    self.quiet.wait()
                    rate = fio.run("gradients-write-libaio", place, "1m", plan.size)
                    if turn >= plan.write_warm_up:
                        rates.setdefault(name, []).append(rate)
                if len(models) > 1:
                    order.reverse()
            self.verify_writes(places, turns)
        medians = {name: statistics.median(values) for name, values in rates.items()}
        names = {"sum": [], "adam": []}
        for name, ours, other, target in (
            ("gradients_sum_vs_copy_sink", "sum", "copy", 0.75),
            ("gradients_adam_vs_copy_sink", "adam", "copy", 0.4),
            ("gradients_sum_vs_stream_sink", "sum", "stream", None),
            ("gradients_sum_vs_discard_sink", "sum", "discard", None),
        ):
            if other in medians:
                value = medians[ours] / medians[other]
                self.figures.append(ratio(name, value, target, gib_s(medians[ours]), gib_s(medians[other])))
                names[ours].append(name)
        for ours, called in names.items():
            self.compared(called, {side: rates[named(ours, side)] for side in models}, gib_s, less=False)

    def verify_writes(self, places, count):
        """Every contribution is in the weights, exactly once."""
        step = numpy.float32(2.0**-7)
        checks = {
            "sum": lambda index, piece: numpy.array_equal(piece, pattern(index) + step * count),
            # A gradient that never changes moves Adam by the learning rate a step.
            "adam": lambda _, piece: numpy.allclose(piece, -0.01 * count, rtol=1e-3),
        }
        for name, right in ((name, checks[name.split(",")[0]]) for name in places if name.split(",")[0] in checks):
            with open(places[name] / "weights", "rb") as file:
                for index in range(self.plan.size // MIB):
                    if not right(index, numpy.frombuffer(file.read(MIB), numpy.float32)):
                        raise Failed(f"{name}: the weights after {count} contributions are wrong in MiB {index}")
        for name in {"copy", "stream"} & set(places):
            with open(places[name] / "gradients", "rb", buffering=0) as file:
                file.seek(self.plan.size - MIB)
                if set(numpy.frombuffer(file.read(MIB), numpy.float32)) != {step}:
                    raise Failed(f"{name}: the sink does not hold what was written")

    @contextmanager
    def learners(self, name, size, count):
        """A synchronous job of `count` learners of each side that sums; gives {side: the learners' directories}."""
        with self.mounts(name, size, "--reducer", "sum", "--learners", count) as models:
            found = {side: [str(path) for path in jobs.joined(model, count)] for side, model in models.items()}
            yield found
            self.team.run(forget, count, 60, jobs=found)

    def steps_compared(self, names, results, way, of_sides):
        """Notes what a step took each side."""
        self.compared(names, {side: durations(results, (way, side)) for side in of_sides}, milliseconds)

    def hand(self):
        """A step of two learners against NumPy in shared memory."""
        size = self.plan.hand_size
        say(f"steps of 2 learners with {size // MIB} MiB, by hand and through the mount")
        with self.learners("hand", size, 2) as of_sides, on_tmpfs() as path:
            os.truncate(path, 3 * size)
            task = {"directories": of_sides, "path": path, "size": size, **self.race(2, self.plan.rounds)}
            results = self.team.run(mount_and_hand, 2, 900, **task)
        for kind, ways in (("", WAYS), ("written_", WRITTEN), ("mapped_", ["mapped"])):
            way, name = fastest(results, ways, of_sides), f"{kind}step_vs_numpy_shm"
            self.figures.append(times(name, median(results, (way, NEW)), median(results, "hand")))
            self.steps_compared([name], results, way, of_sides)

    def list(self):
        """A listing against one of files on tmpfs."""
        say(f"listing {TENSORS} tensors")
        source = self.work / "tensors.safetensors"
        write_tensors(source, TENSORS)
        with (
            self.mounts("list", source, "--reducer", "sum") as models,
            tempfile.TemporaryDirectory(prefix="gradfs-bench-", dir="/dev/shm") as copy,
        ):
            for name in os.listdir(models[NEW] / "tensors"):
                Path(copy, name).write_bytes(bytes(4))
            task = {"models": models, "copy": copy, "tensors": TENSORS, **self.race(1, self.plan.rounds)}
            results = self.team.run(listing, 1, 300, **task)
        name = "ls_tensors_vs_tmpfs"
        self.figures.append(times(name, median(results, NEW), median(results, "tmpfs"), 4, "<="))
        self.compared([name], {side: durations(results, side) for side in models}, milliseconds)

    def commit(self):
        """Small commits, one after the other."""
        say(f"commits of one block of {BLOCK >> 10} KiB")
        for name, keep in (("commit_p50_us", nullcontext), ("commit_awake_p50_us", awake)):
            with self.mounts(name, BLOCK, "--reducer", "sum") as models, keep():
                (rounds,) = self.team.run(commits, 1, 300, models=models, **self.race(4, self.plan.commits))
            micros = {side: [took * 1e6 for one in found for took in one] for side, found in rounds.items()}
            ours = statistics.median(micros[NEW])
            self.figures.append(Figure(name, ours, "us", ours=microseconds(ours)))
            self.compared([name], micros, microseconds, difference=True, unit="us")

    def gloo(self, count, target):
        """The fastest ways of both sides are found first, and then raced."""
        what = f"steps of {count} learners with {GLOO_SIZE // MIB} MiB"
        with self.learners(f"gloo{count}", GLOO_SIZE, count) as of_sides:

            def race(ways, warm_up, rounds):
                task = {"directories": of_sides, "size": GLOO_SIZE, "ways": ways, **self.race(warm_up, rounds)}
                return self.team.run(mount_and_gloo, count, 900, **task)

            say(f"{what}: looking for the fastest ways")
            trial = race([*((way, side) for way in WAYS for side in of_sides), *GLOO_WAYS], 1, self.plan.gloo_trial)
            ours, written = fastest(trial, WAYS, of_sides), fastest(trial, WRITTEN, of_sides)
            other = min(GLOO_WAYS, key=lambda way: median(trial, way))
            say(f"{what}: {ours}; all_reduce over {other[0]}, pieces of 1/{other[1]}")
            through = [(way, side) for way in (ours, written, "mapped") for side in of_sides]
            results = race(list(dict.fromkeys([*through, other, PLAIN])), 2, self.plan.gloo)
        name = f"step_vs_gloo_{count}learners"
        plain = f"step_vs_plain_gloo_{count}learners"
        for called, goal, way, baseline in (
            (name, target, ours, other),
            (f"written_{name}", None, written, other),
            (plain, None, ours, PLAIN),
            (f"mapped_{name}", None, "mapped", other),
        ):
            self.figures.append(times(called, median(results, (way, NEW)), median(results, baseline), goal))
        self.steps_compared([name, plain], results, ours, of_sides)
        self.steps_compared([f"written_{name}"], results, written, of_sides)
        self.steps_compared([f"mapped_{name}"], results, "mapped", of_sides)


def run(bench):
    plan, both = Plan(bench.quick, bench.against), bool(bench.against)
    require(*(NEEDS[part] for part in PARTS if part in bench.only and part in NEEDS))
    # The models' versions, Adam's moments, mapped gradients, two sinks and a copy on tmpfs.
    large = bool({"reads", "writes"} & bench.only)
    require_memory((25 if both else 14) * plan.size if large else (6 if both else 4) * GIB)
    gradfs, sink = bench.gradfs("bench_sink")
    binaries, passes = bench.sides(gradfs), []
    if "publish" in bench.only:
        redis = baselines.build("redis", only_look=bench.only_look)
    team = Team(bench.stack, 4)
    if "gloo" in bench.only:
        say("connecting gloo")
        if not team.run(connect_gloo, 4, 300, directory=bench.work, counts=(2, 4)):
            say("note: no network namespace of its own, so gloo runs with this machine's congestion control")
    for number in range(bench.passes):
        if both:
            say(f"pass {number + 1} of {bench.passes}")
        order = dict(reversed(binaries.items())) if number % 2 else binaries
        passes.append(Pass(bench, plan, order, sink, bench.work / str(number), team))
        passes[-1].run(bench.only)
    figures = middle([one.figures for one in passes])
    if both:
        bench.comparisons += joined([one.comparisons for one in passes])
    if "publish" in bench.only:
        figures += publish.on_one_host(bench, gradfs, redis)
    return figures
