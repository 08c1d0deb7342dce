"""Trains digit classifiers by each way of learning together: accuracy against epochs, bytes and time.

A shard and a mount on this host, over TCP. Two networks on scikit-learn's digits: a perceptron (NumPy), and a LeNet
(PyTorch, left out where that is not installed). The ways:

  sync_1, _2, _4  learners' gradients, every version has those of all
  sma_1, _2, _4   learners' replicas, averaged by synchronous model averaging
  sync_best_1, ..., sma_best_1, ...   the same, each with the batch that suits it best
  async, ssp      2 learners' gradients of 32 images, each makes a version
  diloco          2 learners' models after 10 steps each
  sync_int8, diloco_int8   the same with int8 on the wire

All learners of sync and sma together have 64 images a step. Those of the best have what TUNED in
lib/bench/suites/learning.py says.

`epochs` is the first after which the model finds 95% of the held-out digits, and the time is that until its end.
`learning_sma_vs_sync_...` are ratios of sma to sync with as many learners: of epochs and of time, at the equal batch and
at each method's best. `learning_sma_vs_sync_NETWORK` is the one of epochs with 4 learners at their best.
"""

import itertools
import json
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace

from machine import Failed, require, say
from programs import Program, output_of
from report import Figure, ratio

from bench import jobs
from bench.parts.digits import ACCURACY, data_file

CHART = "draw learning.svg and .png there; of all parts"
QUICK = "four ways of one network: below 45 s once it is built"
WORK = jobs.WORK / "classifiers.py"
BLOCK, DEADLINE = 64 << 10, 600
NUMBERS = (1, 2, 4)
SYNC = {"reducer": "sgd"}
SMA = {"reducer": "sma", "momentum": 0.9}
DILOCO = {"reducer": "diloco", "learning_rate": 0.7, "momentum": 0.9}
# (batch of each learner, rate) of `sync` and `sma` with 1, 2 and 4 learners: at an equal batch, and at each one's best.
# Of rates of 0.05 to 0.8 and batches of 16 to 256 images of all learners (each twice the one before), those that took the
# fewest epochs, in three trainings each without files; among these the longest batch.
TUNED = {
    "perceptron": {
        "sync": ((64, 0.4), (32, 0.4), (16, 0.4)),
        "sma": ((64, 0.2), (32, 0.2), (16, 0.4)),
        "sync_best": ((32, 0.2), (16, 0.2), (8, 0.2)),
        "sma_best": ((32, 0.2), (16, 0.2), (8, 0.2)),
    },
    "lenet": {
        "sync": ((64, 0.4), (32, 0.4), (16, 0.4)),
        "sma": ((64, 0.2), (32, 0.4), (16, 0.4)),
        "sync_best": ((16, 0.2), (8, 0.2), (4, 0.2)),
        "sma_best": ((16, 0.2), (8, 0.2), (8, 0.2)),
    },
}
METHODS = tuple(TUNED["perceptron"])
EPOCHS, SEEDS = 30, 3


@dataclass
class Case:
    """A way to train. `batch` is each learner's; `inner` are its own steps for each contribution, 0 of gradients."""

    learners: int
    batch: int
    rate: float
    inner: int = 0
    settings: dict = field(default_factory=dict)


def cases_of(network):
    """The ways of a network, by name."""
    found = {}
    for method in METHODS:
        for learners, (batch, rate) in zip(NUMBERS, TUNED[network][method]):
            syncs = method.startswith("sync")
            settings = {**SYNC, "learning_rate": rate} if syncs else SMA
            found[f"{method}_{learners}"] = Case(learners, batch, rate, 0 if syncs else 1, settings)
    of_sync = found["sync_2"]
    for name, consistency in (("async", "async"), ("ssp", "ssp(2)")):
        found[name] = Case(2, 32, 0.1, 0, {**SYNC, "learning_rate": 0.1, "consistency": consistency})
    found["diloco"] = Case(2, 32, 0.1, 10, DILOCO)
    found["sync_int8"] = replace(of_sync, settings={**of_sync.settings, "wire": "int8"})
    found["diloco_int8"] = Case(2, 32, 0.1, 10, {**DILOCO, "wire": "int8"})
    return found


PARTS = tuple(cases_of("perceptron"))
USUAL = {True: ("sync_4", "sma_4", "sync_best_4", "sma_best_4")}


def train(bench, gradfs, network, name, epochs, seed):
    """[(epoch, bytes sent, seconds, accuracy)] of one training."""
    case, first = cases_of(network)[name], bench.work / network
    work = bench.work / f"{network}-{name}-{seed}"
    with ExitStack() as stack:
        size = first.stat().st_size
        cluster = jobs.Cluster(stack, gradfs, work, size, learners=case.learners, block_size=BLOCK)
        model, _ = cluster.mount(stack, "--transport", "tcp")
        (model / "weights").write_bytes(first.read_bytes())
        for setting, value in case.settings.items():
            (model / "control" / setting).write_text(f"{value}\n")
        of_all, running = {**asdict(case), "network": network, "epochs": epochs, "seed": seed}, []
        for rank in range(case.learners):
            command = [sys.executable, WORK, "way", model, json.dumps({**of_all, "rank": rank})]
            env = {"DIGITS_NPZ": str(bench.work / "digits.npz")}
            running.append(Program(command, work / f"learner{rank}.log", f"a learner of {network}, {name}", env))
            stack.callback(running[-1].stop)
        return [learner.found(DEADLINE) for learner in running][0]


def measure(bench, gradfs):
    """{network: {way: [curves]}}."""
    found, (epochs, seeds) = {}, (8, 1) if bench.quick else (EPOCHS, SEEDS)
    data_file(bench.work)
    for network in ("perceptron",) if bench.quick else tuple(TUNED):
        try:
            output_of(sys.executable, WORK, "initial", bench.work / network, network)
        except Failed as why:
            say(f"{network} is left out: {str(why).splitlines()[-1]}")
            continue
        for name in [name for name in PARTS if name in bench.only]:
            curves = found.setdefault(network, {}).setdefault(name, [])
            for seed in range(seeds):
                curves.append(train(bench, gradfs, network, name, epochs, seed))
            say(f"{network}, {name}: {curves[0][-1][3]:.3f} after {epochs} epochs")
    return found


def epochs_to(curve):
    """The first epoch with the accuracy; one more than all if there is none."""
    return next((epoch for epoch, _, _, found in curve if found >= ACCURACY), len(curve) + 1)


def seconds_to(curve):
    """The time at the end of that epoch; of all epochs if there is none."""
    return curve[min(epochs_to(curve), len(curve)) - 1][2]


def figures_of(network, ways):
    """The figures of a network."""
    epochs = {name: statistics.median(map(epochs_to, curves)) for name, curves in ways.items()}
    seconds = {name: statistics.median(map(seconds_to, curves)) for name, curves in ways.items()}
    cases, whole, figures = cases_of(network), f"learning_sma_vs_sync_{network}", []
    for name, curves in ways.items():
        last = statistics.median(curve[-1][3] for curve in curves)
        sent, each = (statistics.median(curve[-1][at] / curve[-1][0] for curve in curves) for at in (1, 2))
        case = cases[name]
        words = (
            f"{epochs[name]:g} epochs, {seconds[name]:.2f} s; {case.learners} x {case.batch}",
            f"{sent / 1e6:.2f} MB and {each:.2f} s an epoch; {last:.3f} at the end",
        )
        figures.append(Figure(f"learning_epochs_{network}_{name}", epochs[name], "epochs", None, None, *words))
    for kind, learners in itertools.product(("", "_best"), NUMBERS):
        sma, sync = pair = [f"{method}{kind}_{learners}" for method in ("sma", "sync")]
        if not set(pair) <= epochs.keys():
            continue
        of = [f"{epochs[name]:g} epochs" for name in pair]
        figures.append(ratio(f"{whole}{kind}_{learners}", epochs[sma] / epochs[sync], None, *of))
        if (kind, learners) == ("_best", NUMBERS[-1]):
            figures.append(ratio(whole, epochs[sma] / epochs[sync], 1.0, *of, "<="))
        of = [f"{seconds[name]:.2f} s" for name in pair]
        figures.append(ratio(f"{whole}{kind}_{learners}_time", seconds[sma] / seconds[sync], None, *of))
    return figures


def draw(bench, found):
    from bench import chart

    def middle(curves):
        return tuple(statistics.median(map(of, curves)) for of in (epochs_to, seconds_to))

    picture = {}
    for network, ways in found.items():
        by_learners = {method: [middle(ways[f"{method}_{count}"]) for count in NUMBERS] for method in METHODS}
        curves = {name: ways[name][0] for name in ("sync_2", "sma_2", *PARTS[len(METHODS) * len(NUMBERS) :])}
        picture[network] = by_learners, curves
    for path in chart.draw_learning(picture, NUMBERS, bench.chart_path("learning"), ACCURACY):
        say(f"drew {path}")


def check(parser, options):
    if options.chart and options.only != set(PARTS):
        parser.error("--chart is of all ways: leave out --quick and --only")


def run(bench):
    require("sklearn", *(["matplotlib"] if bench.chart else []))
    found = measure(bench, bench.gradfs())
    if bench.chart:
        draw(bench, found)
    return [figure for network, ways in found.items() for figure in figures_of(network, ways)]
