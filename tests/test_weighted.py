"""How much a contribution counts, as docs/use/semantics.md promises it under "How much a contribution counts"."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from filetools import BLOCK, array, fails, opened, raises, ship_mapped

SIZE = 2 * BLOCK + 1236
COUNT = SIZE // 4


def gradient(seed):
    return np.random.default_rng(seed).uniform(-1, 1, COUNT).astype("<f4")


def weigh(mount, learner, weight):
    (mount.place(learner) / "weight").write_text(f"{weight}\n")


def step(mount, data):
    with ThreadPoolExecutor(len(data)) as threads:
        list(threads.map(lambda of: mount.contribute(of[1], learner=of[0]), data.items()))
    array(mount.place(next(iter(data))) / "weights")


@pytest.mark.also_on_network
@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"clip_norm": 0.5}, {"reducer": "adam"}])
def test_contributions_count_by_their_weight(start_mount, settings):
    """The mean is the weighted one, as if each learner had contributed as often."""
    mount = start_mount(size=SIZE, block_size=BLOCK, learners=3, **{"reducer": "sgd", "learning_rate": 1, **settings})
    weights, want = {"a": 3, "b": 1, "c": 0.5}, np.zeros(COUNT)
    for learner, weight in weights.items():
        mount.join(learner)
        weigh(mount, learner, weight)
        assert (mount.place(learner) / "weight").read_text() == f"{weight}\n"
    first, second = np.zeros(COUNT), np.zeros(COUNT)
    for t in range(1, 5):
        data = {learner: gradient(10 * t + at) for at, learner in enumerate(weights)}
        step(mount, data)
        mean = sum(weights[learner] * data[learner].astype("f8") for learner in weights) / 4.5
        if "clip_norm" in settings:
            norm = np.linalg.norm(mean)
            assert mount.status()["gradient_norm"] == pytest.approx(norm, rel=1e-5)
            mean *= min(1, 0.5 / (norm + 1e-6))
        if settings.get("reducer") == "adam":
            first, second = 0.9 * first + 0.1 * mean, 0.999 * second + 0.001 * mean**2
            mean = first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
        want -= mean
        np.testing.assert_allclose(array(mount.model / "weights"), want, atol=1e-4)


@pytest.mark.also_on_network
@pytest.mark.parametrize("reducer", ["average", "sum"])
def test_models_and_sums_count_by_their_weight(start_mount, reducer):
    mount = start_mount(size=SIZE, block_size=BLOCK, learners=2, reducer=reducer)
    for learner, weight in [("a", 100), ("b", 300)]:
        mount.join(learner)
        weigh(mount, learner, weight)
    data = {"a": gradient(1), "b": gradient(2)}
    step(mount, data)
    total = 100 * data["a"].astype("f8") + 300 * data["b"].astype("f8")
    want = total / 400 if reducer == "average" else total
    np.testing.assert_allclose(array(mount.model / "weights"), want, rtol=1e-5, atol=1e-5)


@pytest.mark.also_on_network
def test_models_and_sums_count_by_their_weight__of_large_halves(start_mount):
    """What is not written of a model is no change, whatever the weight."""
    mount = start_mount(size=SIZE, block_size=BLOCK, dtype="f16", reducer="average")
    large = np.full(SIZE // 2, 60_000, "<f2")
    (mount.model / "weights").write_bytes(large.tobytes())
    mount.wait_for_version(1)
    place = mount.join("a")
    weigh(mount, "a", 2)
    (place / "weights").read_bytes()
    large[:100] = 60_032
    mount.contribute(large[:100], learner="a")
    assert (place / "weights").read_bytes() == large.tobytes()


@pytest.mark.also_on_network
def test_a_weight_counts_from_the_next_contribution(start_mount):
    """Written in pieces, whole, in part or mapped."""
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum")
    place, want = mount.join("a"), np.zeros(COUNT)
    with open(place / "gradients", "wb", buffering=0) as file:
        file.write(gradient(1)[: COUNT // 2])
        weigh(mount, "a", 4)
        file.write(gradient(1)[COUNT // 2 :])
    want += gradient(1)
    np.testing.assert_allclose(array(place / "weights"), want, atol=1e-5)
    data = gradient(2).tobytes()
    with open(place / "gradients", "wb", buffering=0) as file:
        for at in range(0, SIZE, 10_000):
            file.write(data[at : at + 10_000])
    want += 4 * gradient(2)
    np.testing.assert_allclose(array(place / "weights"), want, atol=1e-5)
    mount.contribute(gradient(3)[100:200], offset=400, learner="a")
    want[100:200] += 4 * gradient(3)[100:200]
    np.testing.assert_allclose(array(place / "weights"), want, atol=1e-5)
    ship_mapped(place, gradient(4), declares=True)
    want += 4 * gradient(4)
    np.testing.assert_allclose(array(place / "weights"), want, atol=1e-5)
    weigh(mount, "a", 1)
    mount.contribute(gradient(5), learner="a")
    np.testing.assert_allclose(array(place / "weights"), want + gradient(5), atol=1e-5)


def test_wrong_weights_are_refused(start_mount):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sgd")
    place = mount.join("a")
    for text in ("0", "-1", "1e-40", "nan", "inf", "1e16", "many", ""):
        with raises(errno.EINVAL), opened(place / "weight", os.O_WRONLY | os.O_TRUNC) as fd:
            os.write(fd, text.encode())
    assert (place / "weight").read_text() == "1\n"
    assert "is not a number from 1e-15" in (place / "error").read_text()
    weigh(mount, "a", 2)
    for reducer in ("assign", "easgd", "sma"):
        mount.control("reducer", reducer)
        with raises(errno.EACCES, errno.EINVAL):
            mount.contribute(gradient(1), learner="a")
        assert "of weight 1 alone" in (place / "error").read_text()
        fails(errno.EINVAL, weigh, mount, "a", 3)
    # What does not fit in the model's type is not taken.
    mount.control("reducer", "sgd")
    weigh(mount, "a", 1e15)
    fails(errno.EINVAL, mount.contribute, np.full(COUNT, 1e30, "<f4"), learner="a")
