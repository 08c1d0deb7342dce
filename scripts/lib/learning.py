"""The cases of scripts/bench-learning, and how they are run: a shard, a mount over TCP, and learners on its files."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import daemons
from machine import Failed, say
from net_gradfs import MODEL, Cluster

WORK = Path(__file__).resolve().parent / "learning_work.py"
BLOCK = 64 << 10
ACCURACY = 0.95
DEADLINE = 600


@dataclass
class Case:
    """A way to train. `batch` is each learner's; `inner` are its own steps for each contribution, 0 of gradients."""

    learners: int
    batch: int
    rate: float
    inner: int = 0
    settings: dict = field(default_factory=dict)


# Images of all learners together, where methods are compared at an equal batch.
EQUAL = 64
NUMBERS = (1, 2, 4)
SYNC = {"reducer": "sgd"}
SMA = {"reducer": "sma", "momentum": 0.9}
DILOCO = {"reducer": "diloco", "learning_rate": 0.7, "momentum": 0.9}

# (batch of each learner, rate) of `sync` and `sma` with 1, 2 and 4 learners: at an equal batch, and at each one's best.
# Of the rates and batches of learning_search.py, those that take the fewest epochs; among these the longest batch.
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


def cases_of(network):
    """The ways of a network, by name."""
    found = {}
    for method in METHODS:
        for learners, (batch, rate) in zip(NUMBERS, TUNED[network][method]):
            if method.startswith("sync"):
                case = Case(learners, batch, rate, 0, {**SYNC, "learning_rate": rate})
            else:
                case = Case(learners, batch, rate, 1, SMA)
            found[f"{method}_{learners}"] = case
    of_sync = found["sync_2"]
    slower = {**SYNC, "learning_rate": 0.1}
    found["async"] = Case(2, 32, 0.1, 0, {**slower, "consistency": "async"})
    found["ssp"] = Case(2, 32, 0.1, 0, {**slower, "consistency": "ssp(2)"})
    found["diloco"] = Case(2, 32, 0.1, 10, DILOCO)
    found["sync_int8"] = replace(of_sync, settings={**of_sync.settings, "wire": "int8"})
    found["diloco_int8"] = Case(2, 32, 0.1, 10, {**DILOCO, "wire": "int8"})
    return found


NAMES = tuple(cases_of("perceptron"))


def _ask(what, network):
    """What the learner program says of a network, as bytes. None if it cannot be made here."""
    command = [sys.executable, str(WORK), json.dumps({"what": what, "network": network})]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        say(f"{network} is left out: {' '.join(last)}")
        return None
    return done.stdout


def _digits(directory):
    """The data as a file, so that learners need not load scikit-learn."""
    try:
        import numpy
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Failed(f"{error}: scripts/setup test installs it") from error
    images, labels = load_digits(return_X_y=True)
    numpy.savez(directory / "digits.npz", images=images, labels=labels)
    return directory / "digits.npz"


def run(binary, network, name, epochs, seed=0):
    """[(epoch, bytes sent, seconds, accuracy)] of one training. None if the network cannot be made here."""
    case = cases_of(network)[name]
    elements = _ask("elements", network)
    if elements is None:
        return None
    with Cluster(binary, 4 * int(elements), learners=case.learners, block_size=BLOCK) as cluster:
        mountpoint = cluster.directory / "mount"
        data = _digits(cluster.directory)
        with daemons.network_mount(binary, mountpoint, cluster.registry, MODEL, "--transport", "tcp"):
            model = mountpoint / MODEL
            (model / "weights").write_bytes(_ask("initial", network))
            for setting, value in case.settings.items():
                (model / "control" / setting).write_text(f"{value}\n")
            of_all = {
                "what": "learn", "network": network, "model": str(model), "learners": case.learners, "batch": case.batch,
                "rate": case.rate, "inner": case.inner, "epochs": epochs, "seed": seed,
            }  # fmt: skip
            environment = {**os.environ, "DIGITS_NPZ": str(data)}
            learners = [
                subprocess.Popen(
                    [sys.executable, str(WORK), json.dumps({**of_all, "rank": rank})], env=environment,
                    stdout=subprocess.PIPE, text=True, preexec_fn=daemons.end_with_parent,
                )
                for rank in range(case.learners)
            ]  # fmt: skip
            try:
                said = [learner.communicate(timeout=DEADLINE)[0] for learner in learners]
            finally:
                [learner.kill() for learner in learners if learner.poll() is None]
            if any(learner.returncode for learner in learners):
                raise Failed(f"a learner of {network}, {name} has failed; what it said is above")
            return json.loads(said[0].splitlines()[-1])


def seconds_to(curve, accuracy=ACCURACY):
    """The time at the end of that epoch; of all epochs if there is none."""
    return curve[min(epochs_to(curve, accuracy), len(curve)) - 1][2]


def epochs_to(curve, accuracy=ACCURACY):
    """The first epoch with the accuracy; one more than all if there is none."""
    return next((epoch for epoch, _, _, found in curve if found >= accuracy), len(curve) + 1)
