#!/usr/bin/env python3
"""Data-parallel training of a PyTorch model through plain files, without torch.distributed.

    make_digits_model.py digits.safetensors
    gradfs up digits.safetensors /mnt/job &
    train_torch.py /mnt/job/digits

The parameters are loaded from a safetensors file. The gradients are written where the tensors lie, from the last
layer to the first as autograd has them ready: a block goes on its way as soon as it is whole. The optimizer is
in the mount.

With `make_digits_model.py digits.safetensors --convolutional` the model has BatchNorm. Of its running means and variances,
each learner writes its own values, and a rule has the mount average them.
"""

import contextlib
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


class Convolutions(torch.nn.Module):
    """The model of make_digits_model.py --convolutional."""

    def __init__(self, layout):
        super().__init__()
        for number in (1, 2):
            outputs, inputs, *size = layout.tensors[f"convolution{number}.weight"][1]
            setattr(self, f"convolution{number}", torch.nn.Conv2d(inputs, outputs, size, padding=1, bias=False))
            setattr(self, f"norm{number}", torch.nn.BatchNorm2d(outputs))
        outputs, inputs = layout.tensors["output.weight"][1]
        self.output = torch.nn.Linear(inputs, outputs)

    def forward(self, images):
        hidden1 = torch.relu(self.norm1(self.convolution1(images.reshape(-1, 1, 8, 8))))
        hidden2 = torch.relu(self.norm2(self.convolution2(hidden1)))
        return self.output(torch.nn.functional.max_pool2d(hidden2, 2).flatten(1))


def network_of(layout):
    """The network whose tensors the model has, untrained."""
    return Convolutions(layout) if "convolution1.weight" in layout.tensors else Perceptron(layout)


RULE = "*.running_* reducer=average"


def running(network):
    """The buffers that are averaged."""
    return [(name, buffer) for name, buffer in network.named_buffers() if ".running_" in name]


def load(network, weights):
    """Loads parameters and running statistics from a safetensors file."""
    tensors = load_file(weights)
    with torch.no_grad():
        for name, tensor in [*network.named_parameters(), *running(network)]:
            tensor.copy_(tensors[name])


@contextlib.contextmanager
def step(path):
    """The file to write a step's gradients to. If an exception passes through, nothing of the step counts."""
    with open(path, "wb") as file:
        try:
            yield file
        except BaseException:
            file.truncate(0)
            raise


def train(directory, layout, network, epochs, clock, on_epoch):
    """The learner in `directory`."""
    weights = directory / ".." / ".." / "weights.safetensors"

    def load_weights():
        # A learner's own `weights` can be opened when the version with its last step is there. No later one
        # can be before the next step is ours.
        open(directory / "weights", "rb").close()
        clock.lap("open")
        load(network, weights)
        clock.lap("read")

    for epoch, batches in enumerate(epochs):
        for images, labels in batches:
            load_weights()
            network.zero_grad()
            torch.nn.functional.cross_entropy(network(images), labels).backward()
            clock.lap("compute")
            with step(directory / "gradients") as file:
                for name, buffer in running(network):
                    os.pwrite(file.fileno(), buffer.numpy(), layout.tensors[name][0])
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
    network.eval()
    with torch.no_grad():
        accuracy = float((network(images).argmax(dim=1) == labels).float().mean())
    network.train()
    return accuracy


def learner(job, rank):
    """One learner process, from joining to leaving; returns its clock and its network's accuracy."""
    torch.set_num_threads(1)
    train_images, train_labels, *test = load_data()
    test = tensors(*test)
    layout = Layout(job.model)
    network = network_of(layout)

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
        return clock, accuracy_of(network, *test)
    finally:
        directory.rmdir()  # Leaves it.


def train_alone(job, network, backwards=False):
    """The same training in this process: the learners' shares one after the other, PyTorch's own optimizer, no mount.
    Backwards, each share's images come in the opposite order: the sums are the same, but for how they are rounded."""
    train_images, train_labels, _, _ = load_data()
    optimizer = torch.optim.SGD(network.parameters(), lr=job.lr)
    for epoch in range(job.epochs):
        for batch in epoch_batches(train_images, train_labels, job, epoch):
            optimizer.zero_grad()
            for rank in range(job.learners):
                images, labels = tensors(*(share(part, rank, job.learners) for part in batch))
                if backwards:
                    images, labels = images.flip(0), labels.flip(0)
                (torch.nn.functional.cross_entropy(network(images), labels) / job.learners).backward()
            optimizer.step()


def flat(layout, network):
    """The parameters of `network` as the flat array that `weights` is; zero where there is no parameter."""
    weights = np.zeros(layout.elements, np.float32)
    views = layout.views(weights)
    for name, parameter in network.named_parameters():
        views[name][:] = parameter.detach().numpy()
    return weights


def main():
    job = parse(arguments("Trains a PyTorch digit classifier through a gradfs mount."))
    layout = Layout(job.model)
    first = configure(job)
    alone, backwards, trained = (network_of(layout) for _ in range(3))
    if running(trained):
        (job.model / "control" / "tensors").write_text(RULE)
    for network in (alone, backwards):
        load(network, job.model / "weights.safetensors")
    clocks, accuracies = zip(*run_learners(learner, job))
    load(trained, job.model / "weights.safetensors")
    last = int((job.model / "version").read_text())
    report(clocks, accuracies[0], last)
    if job.check:
        train_alone(job, alone)
        train_alone(job, backwards, backwards=True)
        weights = [flat(layout, network) for network in (trained, alone, backwards)]
        check(job, layout, *weights[:2], accuracies[0], last - first, reordered=weights[2])


if __name__ == "__main__":
    main()
