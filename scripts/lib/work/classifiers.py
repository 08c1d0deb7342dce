"""Learners that train classifiers of scikit-learn's digits by files, as programs: `classifiers.py TASK ARGUMENTS`.

  digits        a learner of examples/, one a program (scripts/netns-cluster, tests)
  digits-check  holds what was trained against the same training in this process, as examples/train_digits.py --check does
  slow          a learner of examples/ that also sleeps: the seconds of each open of weights with the accuracy of what it
                showed, and its stall share (the suite stall)
  way           a learner by the policy that it is told (the suite learning), elements and initial: about its network

Each says what it found as JSON in its last line.
"""

import json
import os
import sys
import time
from itertools import chain, count, islice
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
sys.dont_write_bytecode = True

import digits as shared  # noqa: E402  Before NumPy, whose threads it limits.
import numpy  # noqa: E402
import train_digits  # noqa: E402
from tasks import main, say, task  # noqa: E402

HIDDEN = 256
CHUNK, BATCH = 64 << 10, 64


def real(path):
    return Path(os.path.realpath(path))


# A training that learners of examples/ share.
JOB = {"learners": 2, "epochs": 25, "batch": BATCH, "lr": 0.1, "seed": 0}


@task(("model", real), rank=0, mmap=False, **JOB)
def digits(options):
    """One learner of the training."""
    clock = train_digits.learner(options, options.rank)
    say({"steps": clock.steps, "seconds": sum(clock.seconds.values()), "laps": clock.seconds})


@task(("model", real), initial=Path(), **JOB)
def digits_check(options):
    """The last line comes only if nothing was missed."""
    layout = shared.Layout(options.model)
    with open(options.initial, "rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        initial = numpy.fromfile(file, numpy.float32)
    trained = numpy.fromfile(options.model / "weights", numpy.float32)
    version = int((options.model / "version").read_text())
    accuracy = train_digits.accuracy_of(layout.views(trained), *shared.load_data()[2:])
    print(f"version {version}, test accuracy {accuracy:.4f}")
    reference = train_digits.train_alone(options, layout, initial)
    # Ends this program with what was missed.
    shared.check(options, layout, trained, reference, accuracy, version)
    say({"accuracy": accuracy, "version": version})


def contribute(path, gradient, compute):
    """Computes (it sleeps) and writes, a chunk after each share of `compute`."""
    data, begin = memoryview(gradient).cast("B"), time.monotonic()
    file = os.open(path, os.O_WRONLY)
    try:
        for at in range(0, len(data), CHUNK):
            end = min(at + CHUNK, len(data))
            time.sleep(max(0.0, begin + compute * end / len(data) - time.monotonic()))
            os.pwrite(file, data[at:end], at)
        os.fsync(file)
    finally:
        os.close(file)


@task(("model", real), rank=0, steps=0, compute=0.0, **JOB)
def slow(options):
    """All steps; each computes for --compute seconds besides."""
    model, rank = options.model, options.rank
    images, labels, test_images, test_labels = shared.load_data()
    layout = shared.Layout(model)
    epochs = (shared.epoch_batches(images, labels, options, epoch) for epoch in count())
    directory = model / "learners" / f"learner{rank}"
    gradient, opened = numpy.empty(layout.elements, numpy.float32), []
    directory.mkdir()
    begin = time.monotonic()
    for batch in islice(chain.from_iterable(epochs), options.steps):
        weights = numpy.fromfile(directory / "weights", numpy.float32)
        opened.append((time.monotonic() - begin, weights))
        mine = (shared.share(part, rank, options.learners) for part in batch)
        train_digits.backpropagate(layout.views(weights), *mine, layout.views(gradient))
        contribute(directory / "gradients", gradient, options.compute)
    learners = json.loads((model / "status.json").read_text())["learners"]
    stall = next(one for one in learners if one["id"] == directory.name)["stall_share_since_join"]
    directory.rmdir()
    # Afterwards: it takes as long as a step.
    of = train_digits.accuracy_of
    curve = [(seconds, of(layout.views(weights), test_images, test_labels)) for seconds, weights in opened]
    say({"curve": curve if rank == 0 else [], "stall": stall})


class Perceptron:
    """The perceptron of examples/, smaller: two hidden layers of 256."""

    def __init__(self):
        import make_digits_model

        self._first = make_digits_model.initial_weights(hidden=HIDDEN)
        self.elements = sum(array.size for array in self._first.values())

    def initial(self):
        return numpy.concatenate([array.ravel() for array in self._first.values()])

    def _views(self, flat):
        parts = numpy.split(flat, numpy.cumsum([array.size for array in self._first.values()])[:-1])
        return {name: part.reshape(array.shape) for (name, array), part in zip(self._first.items(), parts)}

    def gradient(self, weights, images, labels):
        gradient = numpy.empty(self.elements, numpy.float32)
        train_digits.backpropagate(self._views(weights), images, labels, self._views(gradient))
        return gradient

    def accuracy(self, weights, images, labels):
        return train_digits.accuracy_of(self._views(weights), images, labels)


class LeNet:
    """LeNet for images of 8x8, in PyTorch: two convolutions, each with pooling, and three linear layers."""

    def __init__(self):
        import torch
        from torch import nn

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._torch = torch
        self._model = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip
        self._parameters = list(self._model.parameters())
        self.elements = sum(parameter.numel() for parameter in self._parameters)

    def initial(self):
        return self._torch.nn.utils.parameters_to_vector(self._parameters).detach().numpy()

    def _scores(self, weights, images):
        torch = self._torch
        torch.nn.utils.vector_to_parameters(torch.from_numpy(numpy.array(weights)), self._parameters)
        return self._model(torch.from_numpy(images.reshape(-1, 1, 8, 8)))

    def gradient(self, weights, images, labels):
        scores = self._scores(weights, images)
        loss = self._torch.nn.functional.cross_entropy(scores, self._torch.from_numpy(labels.astype("i8")))
        gradients = self._torch.autograd.grad(loss, self._parameters)
        return self._torch.cat([gradient.ravel() for gradient in gradients]).numpy()

    def accuracy(self, weights, images, labels):
        with self._torch.no_grad():
            return float((self._scores(weights, images).argmax(1).numpy() == labels).mean())


NETWORKS = {"perceptron": Perceptron, "lenet": LeNet}


@task(("model", real), ("case", json.loads))
def way(options):
    """All epochs of the case, a JSON object.

    A learner of gradients reads weights, and writes the gradient of a batch. One of models reads weights, takes some steps
    of SGD by itself, and writes the weights that it has come to. Learner 0 looks after each epoch at how many held-out
    digits the model finds.
    """
    case, model = options.case, options.model
    network = NETWORKS[case["network"]]()
    images, labels, test_images, test_labels = shared.load_data()
    directory = model / "learners" / f"learner{case['rank']}"
    directory.mkdir()

    def read(path):
        return numpy.fromfile(path, numpy.float32)

    def write(values):
        with open(directory / "gradients", "wb", buffering=0) as file:
            file.write(numpy.ascontiguousarray(values, numpy.float32))

    def pushed():
        # Bytes that the mount has sent so far.
        return json.loads((model / "status.json").read_text())["payload"]["pushed_bytes"]

    job = SimpleNamespace(batch=case["batch"] * case["learners"], seed=case["seed"])
    inner, rate, curve, waiting = case["inner"], numpy.float32(case["rate"]), [], []
    begin, before = time.monotonic(), pushed()
    for epoch in range(case["epochs"]):
        for of_all in shared.epoch_batches(images, labels, job, epoch):
            batch = [shared.share(part, case["rank"], case["learners"]) for part in of_all]
            if not inner:
                write(network.gradient(read(directory / "weights"), *batch))
                continue
            waiting.append(batch)
            if len(waiting) == inner:
                weights = read(directory / "weights")
                for one in waiting:
                    weights -= rate * network.gradient(weights, *one)
                write(weights)
                waiting.clear()
        if case["rank"] == 0:
            read(directory / "weights")
            seconds, sent = time.monotonic() - begin, pushed() - before
            accuracy = network.accuracy(read(model / "weights"), test_images, test_labels)
            curve.append((epoch + 1, sent, seconds, accuracy))
    directory.rmdir()
    say(curve)


@task(("model", real), "network")
def initial(options):
    """The network's first weights, as a file."""
    options.model.write_bytes(NETWORKS[options.network]().initial().astype("<f4").tobytes())


if __name__ == "__main__":
    main(__doc__)
