"""A learner of scripts/bench-learning: it trains a digit classifier by files, by the policy that it is told.

The argument is a JSON object. A learner of gradients reads weights, and writes the gradient of a batch. One of models
reads weights, takes some steps of SGD by itself, and writes the weights that it has come to. Learner 0 looks after each
epoch at how many held-out digits the model finds, and prints all of that as one line of JSON at the end.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.dont_write_bytecode = True

import digits  # noqa: E402  Before NumPy, whose threads it limits.
import numpy  # noqa: E402

HIDDEN = 256


class Perceptron:
    """The perceptron of examples/, smaller: two hidden layers of 256."""

    def __init__(self):
        import make_digits_model
        import train_digits

        self._of = train_digits
        self._first = make_digits_model.initial_weights(hidden=HIDDEN)
        self.elements = sum(array.size for array in self._first.values())

    def initial(self):
        return numpy.concatenate([array.ravel() for array in self._first.values()])

    def _views(self, flat):
        views, at = {}, 0
        for name, array in self._first.items():
            views[name] = flat[at : at + array.size].reshape(array.shape)
            at += array.size
        return views

    def gradient(self, weights, images, labels):
        gradient = numpy.empty(self.elements, numpy.float32)
        self._of.backpropagate(self._views(weights), images, labels, self._views(gradient))
        return gradient

    def accuracy(self, weights, images, labels):
        return self._of.accuracy_of(self._views(weights), images, labels)


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


def read(path):
    """A version of the weights, by one open."""
    with open(path, "rb", buffering=0) as file:
        return numpy.frombuffer(file.readall(), numpy.float32)


def write(path, values):
    with open(path, "wb", buffering=0) as file:
        file.write(numpy.ascontiguousarray(values, numpy.float32))


def pushed(model):
    """Bytes that the mount has sent so far."""
    with open(model / "status.json") as file:
        return json.load(file)["payload"]["pushed_bytes"]


def shares(images, labels, case, epoch):
    """This learner's share of each batch of all learners."""
    order = numpy.random.default_rng([case["seed"], epoch]).permutation(len(images))
    of_all = case["batch"] * case["learners"]
    for start in range(0, len(order) - of_all + 1, of_all):
        mine = order[start + case["rank"] * case["batch"] :][: case["batch"]]
        yield images[mine], labels[mine]


def learn(model, case):
    """All epochs."""
    network = NETWORKS[case["network"]]()
    images, labels, test_images, test_labels = digits.load_data()
    directory = model / "learners" / f"learner{case['rank']}"
    directory.mkdir()
    inner, rate, curve, waiting = case["inner"], numpy.float32(case["rate"]), [], []
    begin, before = time.monotonic(), pushed(model)
    for epoch in range(case["epochs"]):
        for batch in shares(images, labels, case, epoch):
            if not inner:
                weights = read(directory / "weights")
                write(directory / "gradients", network.gradient(weights, *batch))
                continue
            waiting.append(batch)
            if len(waiting) == inner:
                weights = read(directory / "weights").copy()
                for one in waiting:
                    weights -= rate * network.gradient(weights, *one)
                write(directory / "gradients", weights)
                waiting.clear()
        if case["rank"] == 0:
            read(directory / "weights")
            seconds, sent = time.monotonic() - begin, pushed(model) - before
            accuracy = network.accuracy(read(model / "weights"), test_images, test_labels)
            curve.append((epoch + 1, sent, seconds, accuracy))
    directory.rmdir()
    print(json.dumps(curve))


if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    if case["what"] == "elements":
        print(NETWORKS[case["network"]]().elements)
    elif case["what"] == "initial":
        sys.stdout.buffer.write(NETWORKS[case["network"]]().initial().astype("<f4").tobytes())
    else:
        learn(Path(os.path.realpath(case["model"])), case)
