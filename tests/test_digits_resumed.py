"""The digits are trained, killed whole and resumed from their store, as docs/operate/stores.md promises it."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ENDS_WITH_US, REPOSITORY
from filetools import BLOCK, eventually
from patience import HANGS
from test_buckets import bucket, server  # noqa: F401
from test_recovery import apart  # noqa: F401

EXAMPLES = REPOSITORY / "examples"
# Three learners, so that sums have an order.
LEARNERS, BATCH, STEPS_IN_EPOCH = 3, 48, 28
SETTINGS = {"reducer": "adam", "learning_rate": 0.001, "deterministic": True, "learners": LEARNERS, "block_size": BLOCK}
# Epochs of a training that is killed before.
ENDLESS = 1000
# The loop of the example, which finds out from the job at which step it is.
LEARNER = f"""
import sys
from argparse import Namespace
from pathlib import Path
import train_restored
model, rank, epochs = sys.argv[1:]
job = Namespace(model=Path(model), learners={LEARNERS}, batch={BATCH}, epochs=int(epochs), seed=0)
train_restored.learner(job, int(rank))
"""


class Training:
    """The digits on the shards of a cluster, with a mount, and with learners in processes of their own."""

    def __init__(self, one, environ, *args, epochs=ENDLESS, **options):
        self.one = one
        one.create("digits", *args, **options)
        self.mount = one.mount(models=["digits"])
        self.begun, self.learners = self.mount.version(), []
        command = [*ENDS_WITH_US, sys.executable, "-c", LEARNER, self.mount.model]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        for rank in range(LEARNERS):
            place = self.mount.place(f"learner{rank}")
            self.learners.append(subprocess.Popen([*map(str, command), str(rank), str(epochs)], env=environ, **pipes))
            # With `deterministic`, contributions are added in the order in which the learners have joined.
            eventually(lambda place=place: place.is_dir() or not self.lives())

    def lives(self):
        return all(learner.poll() is None for learner in self.learners)

    def ended(self):
        """Waits for the learners. Returns what they have said."""
        return [learner.communicate(timeout=HANGS)[0] for learner in self.learners]

    def durable(self):
        return int((self.mount.model / "durable_version").read_text() or -1)

    def kill_learners(self):
        for learner in self.learners:
            learner.kill()

    def killed_whole(self, steps, numbers):
        """kill -9 of every process, in any order, once so many steps have been made since it began, and some of them are in
        a snapshot. Returns the version that was seen last."""
        eventually(lambda: not self.lives() or (self.mount.seen() >= self.begun + steps and self.durable() > self.begun))
        seen = self.mount.seen()
        daemons = [self.one.table.process, self.mount, *self.one.shards]
        processes = [*(daemon.process for daemon in daemons), *self.learners]
        for number in numbers.permutation(len(processes)):
            processes[number].kill()
        assert {process.wait(HANGS) for process in processes} == {-9}, self.ended()
        self.ended()
        self.mount.kill()
        return seen


@pytest.fixture
def train(apart, tmp_path):  # noqa: F811
    """Begins a training on so many shards; without `from`, that of the untrained model."""
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    np.savez(tmp_path / "digits.npz", images=images, labels=labels)
    model = tmp_path / "digits.safetensors"
    make = [sys.executable, EXAMPLES / "make_digits_model.py", model, "--hidden", "128"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, timeout=HANGS)
    path = os.pathsep.join([str(EXAMPLES), str(REPOSITORY / "python"), os.environ.get("PYTHONPATH", "")])
    # With the data in a file, learners need no scikit-learn.
    environ = {**os.environ, "DIGITS_NPZ": str(tmp_path / "digits.npz"), "PYTHONPATH": path}
    begun = []

    def start(shards, *args, **options):
        given = options if args else {"model": model, **SETTINGS, **options}
        begun.append(Training(apart(shards), environ, *args, **given))
        return begun[-1]

    yield start
    for training in begun:
        training.kill_learners()


def check(train, gradfs, store, seed):
    """The training is killed on three shards, goes on on two, is killed there, and ends on four."""
    numbers = np.random.default_rng(seed)
    training, newest, epochs = train(3, snapshot_to=store, snapshot_every=3), 0, ENDLESS
    for shards in (2, 4):
        seen = training.killed_whole(int(numbers.integers(1, 40)), numbers)
        before, newest = newest, json.loads(gradfs("snapshots", store, "--json").stdout)[-1]["version"]
        print(f"killed at version {seen}, and resumed from version {newest}")
        assert newest > before
        if shards == 4:
            epochs = newest // STEPS_IN_EPOCH + 2
        training = train(shards, "--from", store, epochs=epochs)
        assert training.begun == newest
    said = training.ended()
    assert [re.findall(r"begins at step (\d+)", of) for of in said] == [[str(newest)]] * LEARNERS, said
    alone = train(1, epochs=epochs)
    alone.ended()
    assert training.mount.version() == alone.mount.version() == epochs * STEPS_IN_EPOCH
    assert training.mount.weights() == alone.mount.weights()


@pytest.mark.parametrize("seed", [1, 2])
def test_digits_killed_whole_and_resumed_from_a_directory_end_bit_equal(train, gradfs, tmp_path, seed):
    check(train, gradfs, tmp_path / "store", seed)


def test_digits_killed_whole_and_resumed_from_s3_end_bit_equal(bucket, train, gradfs):  # noqa: F811
    check(train, gradfs, bucket.url, 3)
