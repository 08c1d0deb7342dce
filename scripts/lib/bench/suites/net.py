"""Measures training over a network, side by side in one run, with loopback for the network.

Ratios are of medians, larger is better (CPU and memory: smaller).

  gradfs   `gradfs shard` processes, a model by `gradfs create`, learners by the library, each a process of its own
  unchecked the same with `--checksum off` at both ends
  memory   the same over memory that learners and shards share
  together the same with all learners in one process, which adds their contributions up before they cross
  written  learners on files of `gradfs mount`: one write(2) of all gradients, one read(2) of all weights
  mapped   the same with gradients in the mapped file already
  sockets  bare blocking sockets that move the same bytes with the same adds, and nothing else
  sendfile the same with sendfile(2) in place of send(2): over loopback one copy of two
  stream   gRPC (C++), streams of 1 MiB chunks
  unary    gRPC (C++), a call for each tensor of up to 64 MiB, as TensorFlow has it
  add      a STREAM-like add, new[i] = old[i] + gradients[i], in one process's memory, and no transport at all
  rss      memory of a shard with 32 learners, over that with one: with one a shard takes no sum, with many two
  mounts   a step of 64 MiB through mounts over TCP against one of the library, both with a copy of the weights to a buffer
           of the program's own
  redis    publications on one mount that are read on another, both over TCP, against SET and GET in Redis
           (lib/bench/parts/publish.py)

push: every learner's gradients are added to the weights, and that is acknowledged. pull: every learner has the
weights. step: one after the other, with everybody's gradients in everybody's weights. A mount pulls by itself, so it
has no pull. A GB is 10^9 bytes moved for one learner in one direction; CPU time is that of all processes, in the
kernel or not.

shm_push_vs_stream_add is a push of `memory` against `add`. With one learner and the reducer `sum`, a shard makes the
next version in one pass: it reads the gradient from the learner's memory and the old weight, and writes the new
weight to another buffer, past the caches. So `add` is new[i] = old[i] + gradients[i] over three arrays, and the
arrays of weights change places after each round. That is three bytes moved for each one pushed. new[i] +=
gradients[i] moves as many and is a little faster, but a shard cannot do that: the old version stays whole for its
readers. `add` has what a shard has: AVX-512 or AVX, streaming stores, huge pages, memory that was touched before, and
two threads. A shard adds in one thread for each of the learner's two connections, and the learner's own threads touch
no payload.

--chart measures throughput besides (lib/bench/parts/blocks.py). Two figures say what the worst block size from 256 KiB on
has of the best one's throughput.

With --against, an older binary has contenders of its own beside each of gradfs's; what they are compared with is the same
for both. Its learners by the library are the bench_learner in examples/ beside it, or this tree's where there is none. Every
job is then done in 7 passes with processes of their own, and a second table has new/old for each figure, larger is better,
with its interval of 95%, and the geometric mean of them all, in which figures that are made of the same measurements count
once.
"""

import itertools
import statistics
from contextlib import ExitStack
from functools import partial

from machine import GIB, MIB, Failed, available_memory, require, require_memory, say
from report import Figure, milliseconds, ratio, table, times

from bench import baselines, jobs
from bench.against import NEW, OLD, PASSES, named, sides
from bench.parts import blocks, publish

# Contenders of gradfs, and what their ratios against sockets are called after it, if they have any.
KINDS = {"gradfs": "", "unchecked": "_unchecked", "memory": None, "together": "_1process", "written": "_mount"}
KINDS["mapped"] = "_mount_mapped"
BASELINES = ("sockets", "sendfile", "stream", "unary", "add")
PARTS = (*KINDS, *BASELINES, "rss", "mounts", "redis")
AGAINST = "bench_net_vs_old"
CHART = "draw network.svg, .png and .csv there: throughput against block size, 3 minutes more"
# Rounds before those that count: shards and clients take version buffers until then, and the kernel their pages.
WARM_UP = 2
WHATS = ("push", "pull", "step")
# The figures that have targets are of this job; others carry its name.
NAMED = (64 * MIB, 1, 1)
# Ratios: the name, the contender, with what it is compared (the fastest counts), what they do, whether it is CPU time that is
# compared, and the target.
SOCKETS, TARGETS = ("sockets", "sendfile"), {"gradfs": 0.9, "unchecked": 0.95}
RATIOS = [
    (f"tcp_{what}_vs_sockets{kind}", name, SOCKETS, what, False, TARGETS.get(name))
    for name, kind in KINDS.items()
    if kind is not None
    for what in WHATS
]
RATIOS += [
    ("tcp_step_cpu_vs_sockets", "gradfs", SOCKETS, "step", True, 1.15),
    ("shm_push_vs_stream_add", "memory", ("add",), "push", False, 0.9),
    ("tcp_step_vs_grpc", "gradfs", ("stream",), "step", False, 2.5),
    ("tcp_step_vs_grpc_unary", "gradfs", ("unary",), "step", False, 6.0),
]
# Of the part rss: the most learners, and the most memory.
MANY, RSS_SIZE, RSS_BLOCK, RSS_STEPS, RSS_TARGET = 32, 16 * MIB, 256 << 10, 4, 1.05
# Of the part mounts: how gradients go in, the figure, and its target. Gradients are stored anew before each step where they
# have to be, so what a mount adds is the kernel, and the daemon between the program and the library.
MOUNTS = {"mapped": ("mount_tcp_step_vs_library", 1.15), "written": ("mount_tcp_written_step_vs_library", 1.5)}


class Case:
    """A job to measure; its suffix is for the names of ratios."""

    def __init__(self, size, learners, shards):
        self.job = self.size, self.learners, self.shards = size, learners, shards
        self.name = f"{size // MIB}mib_{learners}learners_{shards}shards"
        self.suffix = "" if self.job == NAMED else f"_{self.name}"
        self.words = f"{size // MIB} MiB, learners: {learners}, shards: {shards}"

    def memory(self, contenders):
        """Bytes that so many contenders need: gradients and versions a learner, a shard's versions and sums."""
        return contenders * self.size * (3 * self.learners + 4) + GIB


class Gradfs:
    """Starts jobs of gradfs: by side, `gradfs` and the program of learners by the library."""

    def __init__(self, bench):
        gradfs, learner = bench.gradfs("bench_learner")
        self.work, self.count = bench.work, 0
        self.binaries = {side: (binary, learner) for side, binary in sides(gradfs, bench.against).items()}
        if OLD in self.binaries:
            old = self.binaries[OLD][0]
            own = old.parent / "examples" / learner.name
            say(f"its learners are {own}" if own.exists() else "its learners by the library are of this tree")
            self.binaries[OLD] = old, own if own.exists() else learner

    def cluster(self, stack, side, size, shards=1, **settings):
        self.count += 1
        return jobs.Cluster(stack, self.binaries[side][0], self.work / f"cluster{self.count}", size, shards, **settings)

    def start(self, stack, side, kind, size, learners=1, shards=1, options=(), **settings):
        """The learners of a job."""
        off = ("--checksum", "off") if kind == "unchecked" else ()
        cluster = self.cluster(stack, side, size, shards, learners=learners, options=off, **settings)
        if kind in ("written", "mapped"):
            model, daemon = cluster.mount(stack, *options)
            return jobs.on_files(stack, model, kind, learners, [*cluster.pids(), daemon.pid])
        options = [*options, *off, *(["--shm"] if kind == "memory" else [])]
        program = self.binaries[side][1]
        return jobs.library(stack, cluster, program, learners, 1 if kind == "together" else None, options)

    def contenders(self, stack, case, chosen, quick):
        """{name: ({side: rival}, what they are asked for in turn)}."""
        found = {}
        for kind in [kind for kind in KINDS if kind in chosen]:
            rare = quick and kind not in ("gradfs", "together")
            if rare and case.learners > 1 or kind == "together" and case.learners == 1:
                continue
            # An older binary may not know the option.
            sides = [NEW] if kind == "unchecked" else self.binaries
            found[kind] = {side: self.start(stack, side, kind, *case.job) for side in sides}, WHATS
        return found


def baseline_contenders(stack, case, chosen, quick, binaries):
    """The same of what is measured against."""
    found = {}
    for name in [name for name in BASELINES if name in chosen]:
        if name == "add" and case.job[1:] != (1, 1) or name in ("stream", "unary") and quick and case.learners > 1:
            continue
        rival = getattr(baselines, name)(stack, binaries, *case.job)
        found[name] = {NEW: rival}, ("push",) if name == "add" else WHATS
    return found


def seconds_of(took):
    return took.seconds


def cpu_of(took):
    """CPU seconds for each GB that was moved."""
    return took.cpu_seconds / took.bytes * 1e9


def cpu_words(value):
    return f"{value * 1e3:.0f} ms/GB"


class Race:
    """What rounds of contenders in turn took: {(contender, what): [Measurement]}."""

    def __init__(self):
        self.found = {}

    def run(self, contenders, rounds, order):
        """Every contender does everything it is asked for, round after round; both sides of one are neighbours.

        A mount pulls what was pushed by itself. Its own pull or step comes next and waits for that, so that no other side
        is measured meanwhile.
        """

        def act(rival, whats):
            return [(what, rival.round(what)) for what in whats]

        sides = {(name, side): (rival, whats) for name, (of, whats) in contenders.items() for side, rival in of.items()}
        acts = {of: partial(act, *asked) for of, asked in sides.items()}
        rivals = [rival for rival, _ in sides.values()]
        for (name, side), took in jobs.turns(acts, rounds, WARM_UP, order, rivals).items():
            for what, one in took:
                if what != "pull" or name not in ("written", "mapped"):
                    self.found.setdefault((named(name, side), what), []).append(one)

    def seconds(self, name, what):
        return statistics.median(map(seconds_of, self.found[name, what]))

    def cpu(self, name, what):
        return statistics.median(map(cpu_of, self.found[name, what]))

    def rate(self, name, what):
        """GB/s."""
        return self.found[name, what][0].bytes / self.seconds(name, what) / 1e9

    def measured(self):
        """(name, what) of all that was measured, but for the old side."""
        old = {named(name, OLD) for name, _ in self.found}
        return [(name, what) for name, what in self.found if name not in old]

    def passes(self, name, what, value):
        """[[value of a round]] of each pass."""
        found = [value(took) for took in self.found[name, what]]
        length = len(found) // PASSES
        return [found[start : start + length] for start in range(0, len(found), length)]


def figures_of(case, race):
    """Bare figures, and the ratios between baselines."""
    figures = []
    for name, what in race.measured():
        figures.append(Figure(f"{name}_{what}_{case.name}_ms", race.seconds(name, what) * 1e3, "ms"))
        figures.append(Figure(f"{name}_{what}_{case.name}_cpu_ms_per_gb", race.cpu(name, what) * 1e3, "ms/GB"))
    for ours in ("sockets", "sendfile"):
        for other in ("stream", "unary"):
            if (ours, "step") in race.found and (other, "step") in race.found:
                value = race.seconds(other, "step") / race.seconds(ours, "step")
                figures.append(Figure(f"{ours}_vs_grpc_{other}_{case.name}", value, "ratio"))
    return figures


def ratios_of(case, race):
    """gradfs against the baselines of the same run."""
    figures = []
    for key, ours, others, what, is_cpu, target in RATIOS:
        others = [name for name in others if (name, what) in race.found]
        if not others or (ours, what) not in race.found:
            continue
        pair = ours, min(others, key=lambda name: race.seconds(name, what))
        if is_cpu:
            values, words = [race.cpu(name, what) for name in pair], [cpu_words(race.cpu(name, what)) for name in pair]
        else:
            values, words = [1 / race.seconds(name, what) for name in pair], [f"{race.rate(name, what):.2f} GB/s" for name in pair]
        words[1] += f" ({pair[1]})"
        target, op = None if case.suffix else target, "<=" if is_cpu else ">="
        figures.append(ratio(key + case.suffix, values[0] / values[1], target, *words, op))
    return figures


def compare(bench, case, race, ratios):
    """How the sides compare; `ratios` are the names of those that were found of this case."""
    for name, what in race.measured():
        old = named(name, OLD)
        if (old, what) not in race.found:
            continue
        for unit, is_cpu, value, words in (("ms", False, seconds_of, milliseconds), ("cpu_ms_per_gb", True, cpu_of, cpu_words)):
            also = [key + case.suffix for key, *of in RATIOS if (of[0], of[2], of[3]) == (name, what, is_cpu)]
            names = [f"{name}_{what}_{case.name}_{unit}", *(key for key in also if key in ratios)]
            bench.compare(names, *(race.passes(side, what, value) for side in (name, old)), words)


def show(case, race):
    """The table of a case."""
    rows = []
    for of in race.found:
        times = f"{race.seconds(*of) * 1e3:.1f}", f"{race.rate(*of):.2f}", f"{race.cpu(*of) * 1e3:.0f}"
        rows.append([" ".join(of), *times])
    print(f"\n{case.words}\n{table(['', 'ms', 'GB/s', 'CPU ms/GB'], rows)}", flush=True)


def resident(bench, gradfs):
    """Memory of a shard with many learners, over what it takes with one."""
    say(f"memory of a shard with 1 and with {MANY} learners")

    def after_steps(side, learners):
        with ExitStack() as stack:
            cluster = gradfs.cluster(stack, side, RSS_SIZE, learners=learners, block_size=RSS_BLOCK)
            rival = jobs.library(stack, cluster, gradfs.binaries[side][1], learners)
            for _ in range(RSS_STEPS):
                rival.round("step")
            rival.check()
            with open(f"/proc/{cluster.pids()[0]}/status") as lines:
                return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

    found, order = {side: [] for side in gradfs.binaries}, list(gradfs.binaries)
    for _ in range(bench.passes):
        for side in order:
            found[side].append([after_steps(side, learners) for learners in (MANY, 1)])
        order.reverse()
    ratios = {side: [many / one for many, one in rounds] for side, rounds in found.items()}
    name = f"shard_rss_{MANY}_vs_1_learners"
    words = [f"{statistics.median(taken) / MIB:.1f} MiB" for taken in zip(*found[NEW])]
    if OLD in ratios:
        bench.compare([name], *([[value] for value in ratios[side]] for side in (NEW, OLD)), "{:.3f}".format)
    return [ratio(name, statistics.median(ratios[NEW]), RSS_TARGET, *words, "<=")]


def mounts(bench, gradfs):
    """A step through mounts over TCP, with a copy of the weights, against one of the library."""
    say("mounts over TCP and the library")
    size = NAMED[0]
    with ExitStack() as stack:
        contenders = {"library": gradfs.start(stack, NEW, "gradfs", size)}
        for way in MOUNTS:
            contenders[way] = gradfs.start(stack, NEW, way, size, options=("--transport", "tcp"))
        acts = {name: lambda one=one: [one.round("read_step").seconds] for name, one in contenders.items()}
        medians = jobs.medians(jobs.turns(acts, 9 if bench.quick else 25, 3, rivals=contenders.values()))
    return [times(name, medians[way], medians["library"], target, "<=") for way, (name, target) in MOUNTS.items()]


def check(parser, options):
    if options.against and not options.only & set(KINDS):
        parser.error(f"--against is of {', '.join(KINDS)}")
    if options.against and options.chart:
        parser.error("--chart is of one binary: leave out --against")


def run(bench):
    only = bench.only
    chosen = only & {*KINDS, *BASELINES}
    grid = ((64,), (1, 2), (1,)) if bench.quick else ((64, 512), (1, 2, 4), (1, 2))
    cases = [Case(size * MIB, learners, shards) for size, learners, shards in itertools.product(*grid)]
    if bench.chart:
        require("fio", "matplotlib")
        require_memory(blocks.MEMORY, "leave --chart out")
    contenders = len(chosen) + (len(chosen & set(KINDS)) if bench.against else 0)
    for case in [case for case in cases if case.memory(contenders) > available_memory()]:
        say(f"{case.words}: left out, it needs {case.memory(contenders) / GIB:.0f} GiB of free memory")
        cases.remove(case)
    if not chosen:
        cases = []
    elif not cases:
        raise Failed("not enough memory for any of it")
    needed = {"sockets": {"sockets", "sendfile"}, "grpc": {"stream", "unary"}, "stream_add": {"add"}, "redis": {"redis"}}
    gradfs = Gradfs(bench) if only - set(BASELINES) else None
    binaries = baselines.build(*(name for name in needed if needed[name] & only), only_look=bench.only_look)
    figures, ratios = [], []
    rounds = 2 if bench.against else 7 if bench.quick else 9
    for case in cases:
        race, order = Race(), "alternate" if bench.against else "same"
        for number in range(bench.passes):
            with ExitStack() as stack:
                say(f"{case.words}: {rounds} rounds" + (f" of pass {number + 1}" if bench.against else ""))
                started = gradfs.contenders(stack, case, chosen, bench.quick) if gradfs else {}
                started |= baseline_contenders(stack, case, chosen, bench.quick, binaries)
                race.run(started, rounds, order)
            if gradfs:
                # The side that started last starts first.
                gradfs.binaries = dict(reversed(gradfs.binaries.items()))
        if race.found:
            show(case, race)
        figures += figures_of(case, race)
        found = ratios_of(case, race)
        ratios += found
        compare(bench, case, race, {figure.name for figure in found})
    if "rss" in only:
        ratios += resident(bench, gradfs)
    if "mounts" in only:
        ratios += mounts(bench, gradfs)
    if "redis" in only:
        ratios += publish.over_tcp(bench, gradfs.binaries[NEW][0], binaries)
    if bench.chart:
        ratios += blocks.chart(bench, gradfs)
    return [*ratios, *figures]
