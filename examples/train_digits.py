#!/usr/bin/env python3
"""Data-parallel training through plain files: read weights, compute, write gradients. NumPy is all it needs.

    make_digits_model.py digits.safetensors
    gradfs up digits.safetensors /mnt/job &
    train_digits.py /mnt/job/digits

Each learner is a process of its own and works on its share of every batch. What it knows of the others is in
the weights it reads: the mount averages the gradients and takes the optimizer's step, and a learner's next
open waits until its last step is in.
"""

import contextlib
import itertools
import mmap
import os

from digits import Clock, Layout, arguments, check, configure, epoch_batches, load_data, parse, report, \
    run_learners, share

import numpy as np


@contextlib.contextmanager
def step(path):
    """The file to write a step's gradients to. If an exception passes through, nothing of the step counts."""
    with open(path, "wb") as file:
        try:
            yield file
        except BaseException:
            file.truncate(0)
            raise


def train(directory, layout, epochs, clock, on_epoch):
    """The learner in `directory`, with read(2) and write(2)."""
    weights = np.empty(layout.elements, np.float32)
    gradient = np.empty(layout.elements, np.float32)

    def read_weights():
        with open(f"{directory}/weights", "rb") as file:  # Waits for the version with our last step.
            clock.lap("open")
            file.readinto(weights)
        clock.lap("read")
        return layout.views(weights)

    for epoch, batches in enumerate(epochs):
        for images, labels in batches:
            backpropagate(read_weights(), images, labels, layout.views(gradient))
            clock.lap("compute")
            with step(f"{directory}/gradients") as file:
                file.write(gradient)
                clock.lap("write")
            clock.lap("close")  # The close is our step: it says whether the gradients were taken.
            clock.steps += 1
            clock.bytes += 2 * layout.bytes
        on_epoch(epoch, read_weights())
        clock.lap("evaluate")


def train_mapped(directory, layout, epochs, clock, on_epoch):
    """The learner in `directory`, with mmap(2): no byte is copied by it, and fsync(2) is its step."""
    # With O_DIRECT the mapping is the staging memory itself.
    file = os.open(f"{directory}/gradients", os.O_RDWR | os.O_DIRECT)
    gradient = np.frombuffer(mmap.mmap(file, layout.bytes), np.float32)

    def map_weights():
        with open(f"{directory}/weights", "rb") as weights:  # Waits for the version with our last step.
            mapping = mmap.mmap(weights.fileno(), layout.bytes, prot=mmap.PROT_READ)
        clock.lap("open")
        return layout.views(np.frombuffer(mapping, np.float32))

    for epoch, batches in enumerate(epochs):
        for images, labels in batches:
            backpropagate(map_weights(), images, labels, layout.views(gradient))
            clock.lap("compute")
            os.fsync(file)
            clock.lap("fsync")
            clock.steps += 1
            clock.bytes += 2 * layout.bytes
        on_epoch(epoch, map_weights())
        clock.lap("evaluate")


def forward(weights, images):
    """Activations of the hidden layers, and the probability of each digit."""
    hidden1 = np.tanh(images @ weights["layer1.weight"].T + weights["layer1.bias"])
    hidden2 = np.tanh(hidden1 @ weights["layer2.weight"].T + weights["layer2.bias"])
    scores = hidden2 @ weights["layer3.weight"].T + weights["layer3.bias"]
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden1, hidden2, exponentials / exponentials.sum(axis=1, keepdims=True)


def backpropagate(weights, images, labels, gradient):
    """Puts the gradient of the mean cross-entropy into the arrays of `gradient`."""
    hidden1, hidden2, error = forward(weights, images)
    error[np.arange(len(labels)), labels] -= 1
    error /= np.float32(len(labels))
    for name, inputs in (("layer3", hidden2), ("layer2", hidden1), ("layer1", images)):
        np.matmul(error.T, inputs, out=gradient[f"{name}.weight"])
        np.sum(error, axis=0, out=gradient[f"{name}.bias"])
        if name != "layer1":
            error = (error @ weights[f"{name}.weight"]) * (1 - inputs * inputs)


def accuracy_of(weights, images, labels):
    return float((forward(weights, images)[2].argmax(axis=1) == labels).mean())


def learner(job, rank):
    """One learner process, from joining to leaving; returns its clock."""
    train_images, train_labels, test_images, test_labels = load_data()
    layout = Layout(job.model)

    def epochs():
        for epoch in range(job.epochs):
            yield ((share(images, rank, job.learners), share(labels, rank, job.learners))
                   for images, labels in epoch_batches(train_images, train_labels, job, epoch))

    def on_epoch(epoch, weights):
        if rank == 0:
            accuracy = accuracy_of(weights, test_images, test_labels)
            print(f"epoch {epoch + 1:3}: test accuracy {accuracy:.4f}", flush=True)

    directory = job.model / "learners" / f"learner{rank}"
    directory.mkdir()  # Joins the job.
    try:
        clock = Clock()
        (train_mapped if job.mmap else train)(directory, layout, epochs(), clock, on_epoch)
        return clock
    finally:
        directory.rmdir()  # Leaves it.


def train_alone(job, layout, weights, first=0):
    """The same training in this process from step `first` on, with whole batches and no mount."""
    train_images, train_labels, _, _ = load_data()
    weights, gradient = weights.copy(), np.empty_like(weights)
    batches = (batch for epoch in range(job.epochs) for batch in epoch_batches(train_images, train_labels, job, epoch))
    for images, labels in itertools.islice(batches, first, None):
        backpropagate(layout.views(weights), images, labels, layout.views(gradient))
        weights -= np.float32(job.lr) * gradient
    return weights


def main():
    parser = arguments("Trains a digit classifier through a gradfs mount, with plain file calls.")
    parser.add_argument("--mmap", action="store_true", help="map weights and gradients instead of read and write")
    job = parse(parser)
    layout = Layout(job.model)
    first = configure(job)
    initial = np.fromfile(job.model / "weights", np.float32)
    clocks = run_learners(learner, job)
    # Anyone may look at the outcome, learner or not.
    trained = np.fromfile(job.model / "weights", np.float32)
    last = int((job.model / "version").read_text())
    accuracy = accuracy_of(layout.views(trained), *load_data()[2:])
    report(clocks, accuracy, last)
    if job.check:
        check(job, layout, trained, train_alone(job, layout, initial), accuracy, last - first)


if __name__ == "__main__":
    main()
