"""Training with one learner on the mount and one on a block device (docs/use/nbd.md)."""

import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY
from filetools import Threads
from test_nbd import FLUSH, READ, WRITE, Client

sys.path.insert(0, str(REPOSITORY / "examples"))

EPOCHS = 4


class Job:
    """The words of examples/train_digits.py."""

    def __init__(self, model):
        self.model = model
        self.learners, self.epochs, self.batch, self.lr, self.seed, self.mmap = 2, EPOCHS, 64, 0.1, 0, False


def learn_by_nbd(path, job, rank):
    """The loop of train_digits.train, with READ, WRITE and FLUSH of `<model>/learners/<id>`."""
    import digits
    import train_digits

    layout = digits.Layout(job.model)
    images, labels, *_ = digits.load_data()
    gradient = np.empty(layout.elements, np.float32)
    client = Client(path)
    client.go(f"{job.model.name}/learners/learner{rank}")
    steps = 0
    for epoch in range(job.epochs):
        for batch in digits.epoch_batches(images, labels, job, epoch):
            mine = [digits.share(part, rank, job.learners) for part in batch]
            errno, data = client.ask(READ, 0, layout.bytes)
            assert errno == 0, data
            weights = layout.views(np.frombuffer(data, np.float32))
            train_digits.backpropagate(weights, *mine, layout.views(gradient))
            assert client.ask(WRITE, 0, layout.bytes, payload=gradient.tobytes()) == (0, b"")
            assert client.ask(FLUSH) == (0, b"")
            steps += 1
    return steps


def test_a_learner_on_a_block_device_learns_as_one_on_the_mount(start_mount, tmp_path):
    pytest.importorskip("sklearn")
    import digits
    import make_digits_model
    import train_digits

    models = [tmp_path / "files.safetensors", tmp_path / "device.safetensors"]
    for model in models:
        make_digits_model.write_safetensors(model, make_digits_model.initial_weights(hidden=256))
    socket = tmp_path / "nbd.sock"
    mount = start_mount(model=models, nbd=socket)
    trained = []
    for name, other in [("files", train_digits.learner), ("device", lambda job, rank: learn_by_nbd(socket, job, rank))]:
        job = Job(Path(mount.root) / name)
        first = digits.configure(job)
        Threads().run(lambda: train_digits.learner(job, 0), lambda: other(job, 1))
        steps = EPOCHS * sum(1 for _ in digits.epoch_batches(*digits.load_data()[:2], job, 0))
        assert int((job.model / "version").read_text()) - first == steps
        trained.append((job.model / "weights").read_bytes())
    assert trained[0] == trained[1]
    layout = digits.Layout(mount.root / "device")
    weights = layout.views(np.frombuffer(trained[1], np.float32))
    assert train_digits.accuracy_of(weights, *digits.load_data()[2:]) > 0.9
