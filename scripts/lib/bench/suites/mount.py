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
import sys
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy
from machine import GIB, MIB, Failed, require, require_memory, say
from report import Figure, gib_s, microseconds, milliseconds, ratio, times

from bench import baselines, fio, jobs
from bench.against import NEW, OLD, joined, middle, named, sides
from bench.parts import publish
from bench.parts.files import awake, fill, listing, new_version, pattern

PARTS = ("reads", "writes", "hand", "list", "gloo", "commit", "publish")
AGAINST = "bench_vs_old"
NEEDS = {"writes": "fio", "gloo": "torch", "publish": "redis-server"}
BLOCK, TENSORS, GLOO_SIZE = 256 << 10, 10_000, 64 * MIB
RIVALS = jobs.WORK / "rivals.py"
# The ways to contribute from a buffer of one's own: what a race is between, and reported as one contender. To write and to
# read the weights, to write and to copy them from a mapping, to store and to copy them so.
WRITTEN = {"write, read": "written", "write, mmap": "written mmap"}
WAYS = {**WRITTEN, "store, mmap": "stored mmap"}
ALL_WAYS = {**WAYS, "mapped": "mapped mmap"}
# Interfaces and pieces that gloo is tried with, and what a program gets that asks for nothing.
GLOO_WAYS = ("lo 1", "lo 2", "lo,lo 1", "lo,lo 2")
PLAIN = "plain 1"
# Commits of a turn, from which the others take over.
COMMITS = 50


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


def fastest(found, ways, sides):
    """The fastest of the ways through a mount, for all sides together."""
    return min(ways, key=lambda way: sum(statistics.median(found[way, side]) for side in sides))


def python(stack, *words, **options):
    """A rival of rivals.py, of one process for each list of words."""
    return jobs.Rival(stack, [[sys.executable, RIVALS, *of_one] for of_one in words], **options)


class Pass:
    """One pass: what it starts and finds."""

    def __init__(self, plan, binaries, sink_binary, work, gloos):
        """`binaries` are those of gradfs, by their sides; `gloos` are rivals by the number of their learners."""
        self.plan, self.binaries, self.sink_binary, self.work = plan, binaries, sink_binary, work
        self.gloos, self.figures, self.comparisons = gloos, [], []
        work.mkdir()

    def run(self, parts):
        if {"reads", "writes"} & parts:
            self.reads_and_writes(parts)
        for part in ("hand", "list", "gloo", "commit"):
            if part in parts:
                getattr(self, part)()

    @contextmanager
    def mounts(self, name, source, *options):
        """A context with a model of so many bytes, or from a file, of each side; gives {side: its directory}."""
        with ExitStack() as stack:
            yield {
                side: stack.enter_context(jobs.up(binary, self.work / f"{name}-{side}", source, *options))
                for side, binary in self.binaries.items()
            }

    def turns(self, acts, rounds, warm_up, rivals=()):
        """As jobs.turns has it; of two binaries, either comes first once."""
        order = "alternate" if len(self.binaries) > 1 else "same"
        return jobs.turns(acts, rounds, warm_up, order, rivals)

    def race(self, contenders, rounds, warm_up):
        """The seconds of steps in turn, of {name: (a rival, its way)}; in the end, what all of them have is right."""

        def step(rival, way):
            if way:
                rival.ask(f"set_way {way}", "set_way")
            return [rival.round("step").seconds]

        acts = {name: partial(step, *of) for name, of in contenders.items()}
        return self.turns(acts, rounds, warm_up, {rival for rival, _ in contenders.values()})

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
        fill(model, count)
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
            with ExitStack() as stack:
                rivals = {of: (python(stack, *[[how, path]] * count), None) for of, path in paths.items()}
                found = self.race(rivals, self.plan.rounds, 1)
            rates = {of: self.plan.size * count / GIB / seconds for of, seconds in jobs.medians(found).items()}
            names = {copy: name.format(copy.replace(" ", "_")) for copy in copies}
            for copy, called in names.items():
                target = 0.95 if copy == "tmpfs" else None
                self.figures.append(ratio(called, rates[NEW] / rates[copy], target, gib_s(rates[NEW]), gib_s(rates[copy])))
            self.compared(list(names.values()), {side: found[side] for side in models}, milliseconds)

    def writes(self, models):
        """Contributions to `sum` and `adam` against the sinks."""
        plan = self.plan
        with ExitStack() as stack:
            sinks = {
                mode: stack.enter_context(jobs.sink(self.sink_binary, self.work / mode, plan.size, mode))
                for mode in plan.sinks
            }
            # Those that are compared most are neighbours.
            places = {"copy": sinks.pop("copy"), **{named("sum", side): model for side, model in models.items()}}
            adams = stack.enter_context(self.mounts("adam", plan.size, "--reducer", "adam", "--learning-rate", "0.01"))
            places |= {named("adam", side): model for side, model in adams.items()} | sinks
            say("writing gradients")
            acts = {
                name: lambda place=place: [fio.run("gradients-write-libaio", place, "1m", plan.size)]
                for name, place in places.items()
            }
            rates = self.turns(acts, plan.rounds, plan.write_warm_up)
            self.verify_writes(places, plan.write_warm_up + plan.rounds)
        medians = jobs.medians(rates)
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
        """A synchronous job of `count` learners of each side that sums; gives {(way, side): (the learners, the way)}."""
        with self.mounts(name, size, "--reducer", "sum", "--learners", count) as models, ExitStack() as stack:
            rivals = {side: jobs.on_files(stack, model, "written", count) for side, model in models.items()}
            yield {(name, side): (rival, way) for name, way in ALL_WAYS.items() for side, rival in rivals.items()}

    def steps_compared(self, names, found, way):
        """Notes what a step took each side."""
        self.compared(names, {side: found[way, side] for side in self.binaries}, milliseconds)

    def hand(self):
        """A step of two learners against NumPy in shared memory."""
        size = self.plan.hand_size
        say(f"steps of 2 learners with {size // MIB} MiB, by hand and through the mount")
        with self.learners("hand", size, 2) as through, on_tmpfs() as path, ExitStack() as stack:
            os.truncate(path, 3 * size)
            for rank in range(2):
                os.mkfifo(self.work / f"meeting{rank}")
            hand = python(stack, *(["hand", path, self.work, rank] for rank in range(2)))
            found = self.race({**through, "hand": (hand, None)}, self.plan.rounds, 2)
        medians = jobs.medians(found)
        for kind, ways in (("", WAYS), ("written_", WRITTEN), ("mapped_", ["mapped"])):
            way, name = fastest(found, ways, self.binaries), f"{kind}step_vs_numpy_shm"
            self.figures.append(times(name, medians[way, NEW], medians["hand"]))
            self.steps_compared([name], found, way)

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

            def fresh(model):
                new_version(model)
                return [listing(model / "tensors", TENSORS)]

            acts = {side: partial(fresh, model) for side, model in models.items()}
            found = self.turns({**acts, "tmpfs": lambda: [listing(copy, TENSORS)]}, self.plan.rounds, 1)
        name, medians = "ls_tensors_vs_tmpfs", jobs.medians(found)
        self.figures.append(times(name, medians[NEW], medians["tmpfs"], 4, "<="))
        self.compared([name], {side: found[side] for side in models}, milliseconds)

    def commit(self):
        """Small commits, one after the other."""
        say(f"commits of one block of {BLOCK >> 10} KiB")
        for name, keep in (("commit_p50_us", nullcontext), ("commit_awake_p50_us", awake)):
            with self.mounts(name, BLOCK, "--reducer", "sum") as models, ExitStack() as stack, keep():
                rivals = {side: python(stack, ["commit", model]) for side, model in models.items()}
                acts = {side: partial(rival.repeat, COMMITS, "commit") for side, rival in rivals.items()}
                found = self.turns(acts, self.plan.commits, 4, rivals.values())
            micros = {side: [took * 1e6 for took in found[side]] for side in models}
            ours = statistics.median(micros[NEW])
            self.figures.append(Figure(name, ours, "us", ours=microseconds(ours)))
            self.compared([name], micros, microseconds, difference=True, unit="us")

    def gloo(self):
        for count, target in ((2, 1.2), (4, 1.5)):
            self.steps_of_gloo(count, target)

    def steps_of_gloo(self, count, target):
        """The fastest ways of both sides are found first, and then raced."""
        what = f"steps of {count} learners with {GLOO_SIZE // MIB} MiB"
        with self.learners(f"gloo{count}", GLOO_SIZE, count) as through:
            everything = {**through, **{way: (self.gloos[count], way) for way in (*GLOO_WAYS, PLAIN)}}

            def race(names, rounds, warm_up):
                return self.race({name: everything[name] for name in names}, rounds, warm_up)

            say(f"{what}: looking for the fastest ways")
            trial = race([*((way, side) for way in WAYS for side in self.binaries), *GLOO_WAYS], self.plan.gloo_trial, 1)
            ours, written = (fastest(trial, ways, self.binaries) for ways in (WAYS, WRITTEN))
            other = min(GLOO_WAYS, key=lambda way: statistics.median(trial[way]))
            say(f"{what}: {ours}; all_reduce over {other.replace(' ', ', pieces of 1/')}")
            names = [(way, side) for way in (ours, written, "mapped") for side in self.binaries]
            found = race(list(dict.fromkeys([*names, other, PLAIN])), self.plan.gloo, 2)
        medians = jobs.medians(found)
        name = f"step_vs_gloo_{count}learners"
        plain = f"step_vs_plain_gloo_{count}learners"
        for called, goal, way, baseline in (
            (name, target, ours, other),
            (f"written_{name}", None, written, other),
            (plain, None, ours, PLAIN),
            (f"mapped_{name}", None, "mapped", other),
        ):
            self.figures.append(times(called, medians[way, NEW], medians[baseline], goal))
        for names, way in (([name, plain], ours), ([f"written_{name}"], written), ([f"mapped_{name}"], "mapped")):
            self.steps_compared(names, found, way)


def run(bench):
    plan, both = Plan(bench.quick, bench.against), bool(bench.against)
    require(*(NEEDS[part] for part in PARTS if part in bench.only and part in NEEDS))
    # The models' versions, Adam's moments, mapped gradients, two sinks and a copy on tmpfs.
    large = bool({"reads", "writes"} & bench.only)
    require_memory((25 if both else 14) * plan.size if large else (6 if both else 4) * GIB)
    gradfs, sink = bench.gradfs("bench_sink")
    binaries, passes = sides(gradfs, bench.against), []
    if "publish" in bench.only:
        redis = baselines.build("redis", only_look=bench.only_look)
    gloos = {}
    for count in (2, 4) if "gloo" in bench.only else ():
        place = bench.work / f"gloo{count}"
        place.mkdir()
        gloos[count] = python(bench.stack, *(["gloo", place, rank, count, GLOO_SIZE] for rank in range(count)), prepares=True)
    for number in range(bench.passes):
        if both:
            say(f"pass {number + 1} of {bench.passes}")
        order = dict(reversed(binaries.items())) if number % 2 else binaries
        passes.append(Pass(plan, order, sink, bench.work / str(number), gloos))
        passes[-1].run(bench.only)
    figures = middle([one.figures for one in passes])
    if both:
        bench.comparisons += joined([one.comparisons for one in passes])
    if "publish" in bench.only:
        figures += publish.on_one_host(bench, gradfs, redis)
    return figures
