#!/usr/bin/env python3
"""Data-parallel training of a PyTorch model through plain files, without torch.distributed.

    make_digits_model.py digits.safetensors
    gradfs up digits.safetensors /mnt/job &
    train_torch.py /mnt/job/digits

The weights are loaded as any safetensors file is. The gradients are written where the tensors lie, from the last
layer to the first as autograd has them ready: a block goes on its way as soon as it is whole. The optimizer is
in the mount.
"""

import os

from digits import Clock, Layout, arguments, check, configure, epoch_batches, load_data, parse, report, \
    run_learners, share

import numpy as np
import torch
from safetensors.torch import load_file


class Perceptron(torch.nn.Module):
    """The model of make_digits_model.py: its parameters have the names of the tensors."""

    def __init__(self, layout):
        super().__init__()
        for name in ("layer1", "layer2", "layer3"):
            outputs, inputs = layout.tensors[f"{name}.weight"][1]
            setattr(self, name, torch.nn.Linear(inputs, outputs))

    def forward(self, images):
        hidden1 = torch.tanh(self.layer1(images))
        hidden2 = torch.tanh(self.layer2(hidden1))
        return self.layer3(hidden2)


def train(directory, layout, network, epochs, clock, on_epoch):
    """The learner in `directory`."""
    weights = directory / ".." / ".." / "weights.safetensors"

    def load_weights():
        # A learner's own `weights` can be opened when the version with its last step is there. No later one
        # can be before the next step is ours.
        open(directory / "weights", "rb").close()
        clock.lap("open")
        network.load_state_dict(load_file(weights))
        clock.lap("read")

    for epoch, batches in enumerate(epochs):
        for images, labels in batches:
            load_weights()
            network.zero_grad()
            torch.nn.functional.cross_entropy(network(images), labels).backward()
            clock.lap("compute")
            with open(directory / "gradients", "wb") as file:
                for name, parameter in reversed(list(network.named_parameters())):
                    os.pwrite(file.fileno(), parameter.grad.numpy(), layout.tensors[name][0])
                clock.lap("write")
            clock.lap("close")  # The close is our step: it says whether the gradients were taken.
            clock.steps += 1
            clock.bytes += 2 * layout.bytes
        load_weights()
        on_epoch(epoch)
        clock.lap("evaluate")


def tensors(images, labels):
    return torch.from_numpy(images), torch.from_numpy(labels)


def accuracy_of(network, images, labels):
    with torch.no_grad():
        return float((network(images).argmax(dim=1) == labels).float().mean())


def learner(job, rank):
    """One learner process, from joining to leaving; returns its clock."""
    torch.set_num_threads(1)
    train_images, train_labels, *test = load_data()
    test = tensors(*test)
    layout = Layout(job.model)
    network = Perceptron(layout)

    def epochs():
        for epoch in range(job.epochs):
            yield (tensors(share(images, rank, job.learners), share(labels, rank, job.learners))
                   for images, labels in epoch_batches(train_images, train_labels, job, epoch))

    def on_epoch(epoch):
        if rank == 0:
            print(f"epoch {epoch + 1:3}: test accuracy {accuracy_of(network, *test):.4f}", flush=True)

    directory = job.model / "learners" / f"learner{rank}"
    directory.mkdir()  # Joins the job.
    try:
        clock = Clock()
        train(directory, layout, network, epochs(), clock, on_epoch)
        return clock
    finally:
        directory.rmdir()  # Leaves it.


def train_alone(job, network):
    """The same training in this process: whole batches, PyTorch's own optimizer, no mount."""
    train_images, train_labels, _, _ = load_data()
    optimizer = torch.optim.SGD(network.parameters(), lr=job.lr)
    for epoch in range(job.epochs):
        for batch in epoch_batches(train_images, train_labels, job, epoch):
            images, labels = tensors(*batch)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()


def flat(layout, network):
    """The parameters of `network` as the flat array that `weights` is."""
    weights = np.empty(layout.elements, np.float32)
    for name, view in layout.views(weights).items():
        view[:] = network.state_dict()[name].numpy()
    return weights


def main():
    job = parse(arguments("Trains a PyTorch digit classifier through a gradfs mount."))
    layout = Layout(job.model)
    first = configure(job)
    alone, network = Perceptron(layout), Perceptron(layout)
    alone.load_state_dict(load_file(job.model / "weights.safetensors"))
    clocks = run_learners(learner, job)
    network.load_state_dict(load_file(job.model / "weights.safetensors"))
    last = int((job.model / "version").read_text())
    accuracy = accuracy_of(network, *tensors(*load_data()[2:]))
    report(clocks, accuracy, last)
    if job.check:
        train_alone(job, alone)
        check(job, layout, flat(layout, network), flat(layout, alone), accuracy, last - first)


if __name__ == "__main__":
    main()
