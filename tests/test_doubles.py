"""F64 tensors: their versions, sums and optimizer state are doubles, in one process and over the network."""

import numpy as np
import pytest
from filetools import write_safetensors

COUNT = 30_001
FINE = 1 + 1e-12  # as fp32 it is 1


@pytest.fixture
def model(tmp_path):
    """Doubles, with floats and bf16 behind them in the same block."""
    path = tmp_path / "m.safetensors"
    doubles = np.full(COUNT, FINE, "<f8")
    floats = np.full(33, 2, "<f4")
    halves = np.full(7, 0x3F80, "<u2")
    write_safetensors(path, {
        "d": ("F64", (COUNT,), doubles.tobytes()),
        "f": ("F32", (33,), floats.tobytes()),
        "h": ("BF16", (7,), halves.tobytes()),
    })
    return path


def parts(data):
    doubles = np.frombuffer(data[: 8 * COUNT], "<f8")
    return doubles, np.frombuffer(data[8 * COUNT : 8 * COUNT + 132], "<f4"), np.frombuffer(data[8 * COUNT + 132 :], "<u2")


def gradient(value):
    return np.full(COUNT, value, "<f8").tobytes() + np.full(33, 1, "<f4").tobytes() + np.full(7, 0x3F80, "<u2").tobytes()


def train(mounts, steps=3):
    """Two learners, whose doubles add up to 3e-12."""
    for name, mount in zip("ab", mounts, strict=True):
        mount.join(name)
    for _ in range(steps):
        for name, mount, value in zip("ab", mounts, (1e-12, 2e-12), strict=True):
            mount.contribute(gradient(value), learner=name)
    for mount in mounts:
        mount.catch_up()
        doubles, floats, halves = parts(mount.weights())
        np.testing.assert_allclose(doubles - 1, 1e-12 + steps * 3e-12, rtol=1e-3)
        assert (floats == 2 + 2 * steps).all() and (halves == 0x40E0).all(), "1 + 2 * 3 is 7"
        assert (np.load(mount.model / "tensors/d.npy") == doubles).all()


def test_f64_models_train_in_double_precision(start_mount, model):
    mount = start_mount(model=model, reducer="sum", learners=2)
    assert "never trained" not in mount.stderr()
    assert (parts(mount.weights())[0] == FINE).all()
    train([mount, mount])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_f64_models_train_in_double_precision__on_a_network(cluster, model, transport):
    one = cluster(2, model=model, reducer="sum", learners=2, block_size="64KiB")
    train([one.mount(transport=transport) for _ in "ab"])
