"""Steps whose gradient is clipped, by its norm over the whole model or element by element, or scaled, as
docs/use/reducers.md promises it under "Clipping and scales"."""

import errno
import math
from functools import partial

import numpy as np
import pytest
from filetools import BLOCK, Threads, array, eventually, f32, fails, ship_mapped, write_safetensors

SIZE = 5 * BLOCK + 1236
COUNT = SIZE // 4

pytestmark = pytest.mark.also_on_network


def clipped(gradient, clip_norm):
    """As torch.nn.utils.clip_grad_norm_ does it, in double precision; and the norm."""
    norm = math.sqrt(math.fsum(np.square(gradient.astype("f8"))))
    return gradient * min(1.0, clip_norm / (norm + 1e-6)), norm


@pytest.mark.parametrize("reducer, aggregation", [("sgd", "mean"), ("adam", "sum"), ("sum", "mean")])
def test_gradients_are_clipped_by_their_global_norm(start_mount, reducer, aggregation):
    """Two learners, against NumPy: below the limit, far above it, and where most of the model is not written."""
    clip_norm, rate = 200.0, 0.1
    mount = start_mount(
        size=SIZE, block_size=BLOCK, reducer=reducer, aggregation=aggregation, clip_norm=clip_norm, learning_rate=rate,
        learners=2, timeout=200,
    )  # fmt: skip
    mount.join(*"ab")
    generator = np.random.RandomState(5)
    weights, m, v = np.zeros(COUNT), np.zeros(COUNT), np.zeros(COUNT)
    for step, (scale, first) in enumerate([(0.1, 0), (30.0, 0), (1.0, COUNT - 900), (1e-30, 0)], 1):
        pair = (scale * generator.standard_normal((2, COUNT - first))).astype("<f4")
        for name, part in zip("ab", pair):
            mount.contribute(part, offset=4 * first, learner=name)
        total = np.zeros(COUNT)
        total[first:] = pair.astype("f8").sum(axis=0) / (2 if (aggregation, reducer != "sum") == ("mean", True) else 1)
        g, norm = clipped(total, clip_norm)
        assert (norm > clip_norm) == (scale == 30.0)
        if reducer == "sum":
            weights = weights + g
        elif reducer == "sgd":
            weights = weights - rate * g
        else:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            weights = weights - rate * m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        mount.catch_up()
        np.testing.assert_allclose(array(mount.model / "weights"), weights, rtol=2e-5, atol=2e-6)
        assert eventually(lambda: mount.status()["version"] == step)
        assert mount.status()["gradient_norm"] == pytest.approx(norm, rel=1e-6)
    mount.control("clip_norm", 0)
    for name in "ab":
        mount.contribute(f32(1), learner=name)
    mount.catch_up()
    assert mount.status()["gradient_norm"] is None


@pytest.mark.parametrize("mapped", [False, True], ids=["written", "mapped"])
def test_a_frozen_tensor_is_not_in_the_norm(start_mount, tmp_path, mapped):
    """Nor is one that is not reduced. Halves are added up in full before they are measured."""
    tensors = {
        "a": ("F32", (40_000,), bytes(160_000)),
        "b": ("BF16", (50_000,), bytes(100_000)),
        "c": ("F64", (3_000,), bytes(24_000)),
        "ids": ("I32", (500,), bytes(2_000)),
    }
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    mount = start_mount(model=path, block_size=BLOCK, reducer="sgd", learning_rate=1, clip_norm=1, frozen="b")
    part = np.full(40_000, 3, "<f4").tobytes() + np.full(50_000, 0x4040, "<u2").tobytes()
    part += np.full(3_000, 4, "<f8").tobytes() + np.full(500, 7, "<i4").tobytes()
    for frozen, norm in [("b", math.sqrt(9 * 40_000 + 16 * 3_000)), (None, math.sqrt(9 * 90_000 + 16 * 3_000))]:
        if frozen is None:
            (mount.model / "control" / "frozen").write_text("")
        before = np.load(mount.model / "tensors" / "a.npy")[-1]
        if mapped:
            ship_mapped(mount.model, part)
        else:
            mount.contribute(part)
        mount.catch_up()
        assert mount.status()["gradient_norm"] == pytest.approx(norm, rel=1e-12)
        change = np.load(mount.model / "tensors" / "a.npy") - before
        np.testing.assert_allclose(change, -3 / (norm + 1e-6), rtol=1e-5)
    assert (np.load(mount.model / "tensors" / "ids.npy") == 0).all()


def test_clip_norm_is_refused_where_nothing_is_added_up(start_mount):
    mount = start_mount(size=SIZE, reducer="sgd", clip_norm=2.5)
    fails(errno.EINVAL, mount.control, "reducer", "assign")
    assert "clip_norm (2.5) is for gradients, and reducer assign takes none" in mount.stderr()
    mount.control("clip_norm", 0)
    mount.control("reducer", "assign")
    fails(errno.EINVAL, mount.control, "clip_norm", 1)
    for value in ("-1", "nan", "inf", "much"):
        fails(errno.EINVAL, mount.control, "clip_norm", value)
    assert mount.control("clip_norm") == "0"
    for name, value, default in [("clip_value", 0.5, 0), ("loss_scale", 8, 1)]:
        fails(errno.EINVAL, mount.control, name, value)
        mount.control("reducer", "sum")
        mount.control(name, value)
        fails(errno.EINVAL, mount.control, "reducer", "assign")
        mount.control(name, default)
        mount.control("reducer", "assign")


@pytest.mark.parametrize("reducer", ["sgd", "sum", "momentum"])
def test_elements_of_a_gradient_are_clipped(start_mount, reducer):
    """Also after the norm, which is measured before. NaN stays NaN."""
    mount = start_mount(
        size=SIZE, block_size=BLOCK, reducer=reducer, clip_value=0.25, learning_rate=1, learners=2, weight_decay=0.5,
        momentum=0, nonfinite="accept", timeout=20,
    )  # fmt: skip
    mount.join(*"ab")
    generator = np.random.RandomState(3)
    weights = np.zeros(COUNT)
    for clip_norm in (0, 50):
        mount.control("clip_norm", clip_norm)
        pair = generator.standard_normal((2, COUNT)).astype("<f4")
        pair[:, 9] = np.nan if clip_norm == 0 else 0
        for name, part in zip("ab", pair):
            mount.contribute(part, learner=name)
        total = pair.astype("f8").sum(axis=0) / (1 if reducer == "sum" else 2)
        norm = None
        if clip_norm:
            total, norm = clipped(total, clip_norm)
            assert norm > clip_norm and (np.abs(total) > 0.25).any()
        g = np.where(np.isnan(total), np.nan, np.clip(total, -0.25, 0.25))
        weights = weights + g if reducer == "sum" else weights - (g + 0.5 * weights)
        mount.catch_up()
        np.testing.assert_allclose(array(mount.model / "weights"), weights, rtol=2e-5, atol=2e-6)
        assert mount.status()["gradient_norm"] == (pytest.approx(norm, rel=1e-6) if clip_norm else None)
    assert np.isnan(weights[9]) and not np.isnan(weights[:9]).any()


def test_gradients_are_divided_by_the_loss_scale(start_mount):
    """Two runs end with the same bits. What overflows by its factor is refused."""
    ends = []
    for scale in (1, 4096):
        mount = start_mount(
            size=SIZE, block_size=BLOCK, dtype="f16", reducer="adam", loss_scale=scale, clip_norm=0.25,
            clip_value=0.0005, learners=2, timeout=200,
        )  # fmt: skip
        generator = np.random.RandomState(4)
        mount.join(*"ab")
        norms = []
        for _ in range(3):
            for name in "ab":
                # So large that no bit of a plain gradient is lost in 16 bits.
                part = np.round(generator.standard_normal(SIZE // 2) * 8) / 4096
                mount.contribute((part * scale).astype("<f2"), learner=name)
            mount.catch_up()
            norms.append(mount.status()["gradient_norm"])
        ends.append((mount.weights("a"), norms))
        assert min(norms) > 0.25
    assert ends[0] == ends[1]
    fails(errno.EINVAL, mount.contribute, np.full(SIZE // 2, np.inf, "<f2"), learner="a")


def test_nan_is_judged_before_the_norm(start_mount):
    """Refused, it is in no norm. Accepted, it is in every element, as with torch; Inf makes zeros of the others."""
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sgd", learning_rate=1, clip_norm=1, learners=2)
    mount.join(*"ab")
    mount.contribute(np.full(COUNT, 2, "<f4"), learner="a")
    fails(errno.EINVAL, mount.contribute, np.full(COUNT, np.nan, "<f4"), learner="b")
    mount.contribute(np.full(COUNT, 0, "<f4"), learner="b")
    mount.catch_up()
    norm = math.sqrt(COUNT)
    assert mount.status()["gradient_norm"] == pytest.approx(norm, rel=1e-12)
    np.testing.assert_allclose(array(mount.model / "weights"), -1 / (norm + 1e-6), rtol=1e-6)
    mount.control("nonfinite", "accept")
    before = array(mount.model / "weights")
    for bad, others in [(np.inf, before), (np.nan, np.full(COUNT, np.nan))]:
        gradient = np.ones(COUNT, "<f4")
        gradient[7] = bad
        for name in "ab":
            mount.contribute(gradient, learner=name)
        mount.catch_up()
        got, others = array(mount.model / "weights"), others.copy()
        others[7] = np.nan
        np.testing.assert_array_equal(got, others)


@pytest.mark.one_process
def test_a_clipped_run_is_the_same_on_any_shards(start_mount, cluster):
    """Bit by bit, with `deterministic`; and on as many shards, however a contribution is cut."""
    settings = {
        "size": 7 * BLOCK + 1236, "block_size": BLOCK, "reducer": "adam", "learners": 2, "clip_norm": 3, "deterministic": True,
    }  # fmt: skip
    count = settings["size"] // 4

    def run(mount):
        mount.join("a")
        mount.join("b")
        generator, norms = np.random.RandomState(11), []
        for _ in range(4):
            scales = 10.0 ** generator.randint(-6, 6, (2, count))
            parts = (scales * generator.standard_normal((2, count))).astype("<f4")
            # On a network a commit of such a job waits for the others.
            Threads().run(*(partial(mount.contribute, part, learner=name) for name, part in zip("ab", parts)))
            mount.catch_up()
            norms.append(mount.status()["gradient_norm"])
        return norms, mount.weights("a")

    alone = run(start_mount(**settings))
    assert min(alone[0]) > 3
    for shards in (1, 2, 3):
        one = cluster(shards, **settings)
        assert run(one.mount()) == alone, f"{shards} shards"


@pytest.mark.one_process
def test_a_gradient_below_the_limit_is_not_changed(start_mount):
    ends = set()
    for options in ({}, {"clip_norm": 1e30}):
        mount = start_mount(size=SIZE, block_size=BLOCK, reducer="adam", learners=2, **options)
        generator = np.random.RandomState(2)
        mount.join(*"ab")
        for _ in range(3):
            for name in "ab":
                mount.contribute(generator.standard_normal(COUNT).astype("<f4"), learner=name)
        ends.add(mount.weights())
    assert len(ends) == 1
