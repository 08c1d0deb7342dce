"""Tensors that are written in a step and tensors that are not, as docs/use/tensors.md promises it.

The reference is torch's: an optimizer passes over parameters whose `grad` is None, and counts steps for each parameter.
"""

import errno
import os
import subprocess

import numpy as np
import pytest
from filetools import BLOCK, array, fails, mounts, ship_mapped, write_safetensors

pytestmark = pytest.mark.also_on_network
mounted = mounts()
RATE, DECAY, BETAS, EPSILON = 0.1, 0.01, (0.9, 0.999), 1e-8
# Several within a block, and one that ends in the middle of another.
SHAPES = {"embedding": (BLOCK // 4 + 700,), "norm.weight": (64,), "norm.running_mean": (64,), "head": (33, 100)}


class Torch:
    """Adam and SGD as torch has them, in double precision: `grads` has no entry where `grad` is None."""

    def __init__(self, reducer, weights):
        self.reducer = reducer
        self.weights = {name: value.astype("f8") for name, value in weights.items()}
        self.state = {}

    def step(self, grads):
        for name, gradient in grads.items():
            w = self.weights[name]
            if self.reducer == "adamw":
                g, w = gradient, w * (1 - RATE * DECAY)
            else:
                g = gradient + DECAY * w
            if self.reducer == "sgd":
                self.weights[name] = w - RATE * g
                continue
            t, m, v = self.state.get(name, (0, 0, 0))
            t, m, v = t + 1, BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
            self.state[name] = t, m, v
            m, v = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
            self.weights[name] = w - RATE * m / (np.sqrt(v) + EPSILON)


def random_weights(generator):
    return {name: generator.standard_normal(shape).astype("<f4") for name, shape in SHAPES.items()}


@pytest.fixture
def model(mounted, tmp_path):
    """Starts a mount of the tensors above; gives it with their weights and where each of them begins."""

    def start(**options):
        weights = random_weights(np.random.RandomState(1))
        path = tmp_path / "model.safetensors"
        write_safetensors(path, {name: ("F32", value.shape, value.tobytes()) for name, value in weights.items()})
        offsets, at = {}, 0
        for name, value in weights.items():
            offsets[name] = at
            at += value.nbytes
        options = {"learning_rate": RATE, "weight_decay": DECAY, **options}
        return mounted(size=None, model=path, **options), weights, offsets

    return start


def give(mount, offsets, grads, learner=None):
    """One contribution of these tensors and of nothing else."""
    fd = os.open(mount.place(learner) / "gradients", os.O_WRONLY)
    for name, gradient in grads.items():
        data = memoryview(np.ascontiguousarray(gradient)).cast("B")
        assert os.pwrite(fd, data, offsets[name]) == len(data)
    os.close(fd)


def tensor(mount, name):
    return np.load(mount.model / "tensors" / f"{name}.npy")


def gradients(generator, names):
    return {name: generator.standard_normal(SHAPES[name]).astype("<f4") for name in names}


@pytest.mark.parametrize("reducer", ["sgd", "adamw"])
def test_a_tensor_that_nobody_wrote_stays_as_it_is(model, reducer):
    mount, weights, offsets = model(reducer=reducer)
    reference, generator = Torch(reducer, weights), np.random.RandomState(2)
    trained = ["embedding", "norm.weight", "head"]
    for names in [trained, trained, ["head"], trained, ["embedding"], ["norm.weight", "head"]]:
        before = {name: tensor(mount, name) for name in SHAPES}
        grads = gradients(generator, names)
        give(mount, offsets, grads)
        reference.step(grads)
        for name in SHAPES:
            after = tensor(mount, name)
            assert (after.tobytes() == before[name].tobytes()) == (name not in names), name
            np.testing.assert_allclose(after, reference.weights[name], rtol=2e-5, atol=2e-6)
    assert tensor(mount, "norm.running_mean").tobytes() == weights["norm.running_mean"].tobytes()


def test_adam_counts_its_steps_per_tensor(model):
    """One that comes late is at its first step then, whoever writes it."""
    mount, weights, offsets = model(reducer="adam", learners=2)
    reference, generator = Torch("adam", weights), np.random.RandomState(3)
    mount.join(*"ab")
    for of_a, of_b in [(["head"], ["head"]), (["head"], []), (["norm.weight"], ["head"]), (["embedding"], ["embedding"])]:
        written = set(of_a) | set(of_b)
        total = {name: np.zeros(SHAPES[name]) for name in written}
        for learner, names in zip("ab", (of_a, of_b)):
            # Who has nothing else writes one element of what the other one writes.
            grads = gradients(generator, names) or {of_a[0]: np.zeros(1, "<f4")}
            give(mount, offsets, grads, learner)
            for name in names:
                total[name] += grads[name]
        reference.step({name: value / 2 for name, value in total.items()})
        mount.catch_up()
        for name in SHAPES:
            np.testing.assert_allclose(tensor(mount, name), reference.weights[name], rtol=2e-5, atol=2e-6)


def test_unwritten_parts_of_a_written_tensor_count_as_zero(model):
    mount, weights, offsets = model(reducer="sgd")
    reference = Torch("sgd", weights)
    part = np.zeros(SHAPES["embedding"])
    part[10:20] = 5
    fd = os.open(mount.model / "gradients", os.O_WRONLY)
    os.pwrite(fd, np.full(10, 5, "<f4").tobytes(), offsets["embedding"] + 40)
    os.close(fd)
    reference.step({"embedding": part})
    for name in SHAPES:
        np.testing.assert_allclose(tensor(mount, name), reference.weights[name], rtol=2e-6)
    assert array(mount.model / "weights").nbytes == sum(value.nbytes for value in weights.values())


def test_frozen_tensors_are_never_reduced(model):
    """Full-size writers and mappings leave them alone."""
    mount, weights, offsets = model(reducer="sgd", frozen=["*.running_*", "hea?"])
    assert mount.control("frozen") == "*.running_*\nhea?"
    fails(errno.EINVAL, mount.control, "frozen", "*.running_*\nbody")
    assert mount.control("frozen") == "*.running_*\nhea?", "a pattern that matches nothing changes nothing"
    reference, frozen = Torch("sgd", weights), {"norm.running_mean", "head"}
    size = sum(value.nbytes for value in weights.values())
    ones = {name: np.ones(shape) for name, shape in SHAPES.items()}
    mount.contribute(np.ones(size // 4, "<f4"))
    reference.step({name: ones[name] for name in SHAPES if name not in frozen})
    ship_mapped(mount.model, np.ones(size // 4, "<f4"))
    reference.step({name: ones[name] for name in SHAPES if name not in frozen})
    mount.catch_up()
    for name in SHAPES:
        if name in frozen:
            assert tensor(mount, name).tobytes() == weights[name].tobytes(), name
        np.testing.assert_allclose(tensor(mount, name), reference.weights[name], rtol=2e-5, atol=2e-6)
    mount.control("frozen", "\n")
    mount.contribute(np.ones(size // 4, "<f4"))
    mount.catch_up()
    assert (tensor(mount, "head") != weights["head"]).all()


def test_an_emptied_setting_is_empty(model):
    mount, *_ = model(reducer="sgd", frozen=["head"])
    frozen, rate = mount.model / "control" / "frozen", mount.model / "control" / "learning_rate"
    fails(errno.EINVAL, frozen.write_text, "nothing-like-that")
    assert mount.control("frozen") == "head", "a close after a refused write empties nothing"
    frozen.write_text("")
    assert mount.control("frozen") == ""
    before = mount.control("learning_rate")
    fails(errno.EINVAL, rate.write_text, "")
    assert mount.control("learning_rate") == before
    frozen.write_text("head\n")
    subprocess.run(["truncate", "-s", "0", frozen], check=True)
    assert mount.control("frozen") == ""


SIZE = 1 << 20


def initial():
    return np.random.RandomState(4).randint(0, 1000, SIZE // 4).astype("<f4")


@pytest.fixture
def values(mounted, tmp_path):
    """Starts a mount of one tensor whose contributions are values."""

    def start(**options):
        path = write_safetensors(tmp_path / "values.safetensors", {"w": ("F32", (SIZE // 4,), initial().tobytes())})
        return mounted(size=None, model=path, block_size=BLOCK, reducer="assign", **options)

    return start


def put(mount, ranges, value, learner=None):
    """One contribution of `value` in these bytes and nowhere else."""
    fd = os.open(mount.place(learner) / "gradients", os.O_WRONLY)
    for start, end in ranges:
        os.pwrite(fd, np.full((end - start) // 4, value, "<f4").tobytes(), start)
    os.close(fd)


def check(mount, expected):
    mount.catch_up()
    seen = array(mount.model / "weights")
    wrong = np.flatnonzero(seen != expected)
    assert wrong.size == 0, f"{wrong.size} elements, the first is {wrong[0]}: {seen[wrong[0]]}, not {expected[wrong[0]]}"


def test_what_was_not_written_takes_no_part_in_assign(values):
    mount = values()
    expected = initial()
    for step, written in enumerate([[(300_000, 301_024)], [(0, 4), (SIZE - 4, SIZE)], [(BLOCK, 2 * BLOCK + 8)]]):
        put(mount, written, -step - 1)
        for start, end in written:
            expected[start // 4 : end // 4] = -step - 1
        check(mount, expected)


OF_TWO = {
    # A run of exactly the half is taken for an array of a narrower type.
    "halves of a tensor": ([(0, SIZE // 2 - 4)], [(SIZE // 2 - 4, SIZE)]),
    "both, and neither": ([(100, 600), (5000, 6000)], [(400, 1000), (5500, 5600), (9000, 9004)]),
    "pieces of which others have the whole": ([(8, 16), (BLOCK, BLOCK + 4)], [(0, BLOCK)]),
    "comb": ([(at, at + 4) for at in range(0, 4000, 8)], [(at + 4, at + 8) for at in range(0, 4000, 16)]),
}


@pytest.mark.parametrize("of_a, of_b", OF_TWO.values(), ids=OF_TWO.keys())
def test_what_was_not_written_takes_no_part_in_assign__of_two_learners(values, of_a, of_b):
    """What one has written counts, what both have written is the second one's, whoever comes first."""
    mount = values(learners=2)
    mount.join(*"ab")
    for step, order in enumerate(["ab", "ba"]):
        expected = array(mount.model / "weights").copy()
        puts = {"a": (of_a, -1 - step), "b": (of_b, -11 - step)}
        for ranges, value in puts.values():
            for start, end in ranges:
                expected[start // 4 : end // 4] = value
        for learner in order:
            put(mount, *puts[learner], learner)
        check(mount, expected)


def test_values_in_too_many_pieces_are_refused(values):
    """As gradients they count; then they cannot become values any more."""
    most = 16384
    mount = values(learners=2)
    mount.join(*"ab")
    fd = os.open(mount.place("a") / "gradients", os.O_WRONLY)
    for piece in range(most + 1):
        os.pwrite(fd, bytes(4), 8 * piece)
    fails(errno.EINVAL, os.fsync, fd)
    assert "too many pieces" in (mount.place("a") / "error").read_text()
    os.close(fd)
    mount.control("reducer", "sum")
    put(mount, [(8 * piece, 8 * piece + 4) for piece in range(most + 1)], 1, "a")
    fails(errno.EINVAL, mount.control, "reducer", "assign")
    put(mount, [(0, 4)], 1, "b")
    expected = initial()
    expected[: 2 * most + 1 : 2] += 1
    expected[0] += 1
    check(mount, expected)
    mount.control("reducer", "assign")
