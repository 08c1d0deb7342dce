"""Forms in which contributions cross a network (control/wire), as docs/use/several-hosts.md promises."""

import errno

import numpy as np
import pytest
from filetools import BLOCK, Threads, array, eventually, fails, filled

SIZE = 16 * BLOCK
FORMS = {"full": 1.0, "bf16": 0.5, "fp16": 0.5, "int8": 0.26, "fp8": 0.26, "topk(0.01)": 0.021}


def numbers(size, seed):
    return np.random.default_rng(seed).standard_normal(size // 4, np.float32)


def over_tcp(cluster, **options):
    """A mount of a model that is read and written over TCP."""
    one = cluster(1, block_size=BLOCK, timeout=200, **{"size": SIZE, "reducer": "sum", **options})
    return one.mount(transport="tcp")


def form(mount):
    """What status.json says: the form, and why it is another one than the setting names."""
    shard = mount.status()["shards"][0]
    return shard["wire"], shard.get("wire_full_because")


def test_contributions_cross_the_network_in_the_form_that_wire_names(cluster):
    mount = over_tcp(cluster)
    assert mount.control("wire") == "full"
    pushed = lambda: mount.status()["payload"]["pushed_bytes"]  # noqa: E731
    for name, share in FORMS.items():
        assert mount.control("wire", name) == name
        assert form(mount) == (name, None)
        before = pushed()
        mount.contribute(numbers(SIZE, 1))
        assert share * 0.7 < (pushed() - before) / SIZE <= share, name
    assert mount.control("wire", "TopK(0.250)") == "topk(0.25)"
    for bad in ("int4", "topk", "topk(0)", "topk(-1)", "topk(1.1)", "topk(nan)", "8"):
        fails(errno.EINVAL, mount.control, "wire", bad)
    assert mount.control("wire") == "topk(0.25)"


@pytest.mark.parametrize("name", list(FORMS)[1:])
def test_what_a_form_loses_comes_with_the_next_contributions(cluster, name):
    mount = over_tcp(cluster, wire=name, learners=2)
    learners, exact = ("a", "b"), np.zeros(SIZE // 4)
    mount.join(*learners)
    threads = Threads()

    def step(*contributions):
        done = [threads.start(mount.contribute, data, 0, of) for of, data in zip(learners, contributions)]
        for each in done:
            each.result(300)
        return array(mount.model / "learners" / "a" / "weights")

    for seed in range(0, 6, 2):
        data = numbers(SIZE, seed), numbers(SIZE, seed + 1)
        exact += sum(part.astype(np.float64) for part in data)
        weights = step(*data)
    # The error is that of one contribution, and not the sum of all.
    off = np.abs(weights - exact).max()
    bounds = {"bf16": 0.04, "fp16": 0.005, "int8": 0.04, "fp8": 0.4, "topk(0.01)": 40}
    assert 0 < off < bounds[name], off
    zeros = filled(mount, 0)
    # Of each block, topk(0.01) brings a hundredth in a step.
    for _ in range(102 if name == "topk(0.01)" else 12):
        weights = step(zeros, zeros)
    assert np.abs(weights - exact).max() < 1e-4


def test_what_a_form_loses_comes_with_the_next_contributions__of_the_same_unit(cluster):
    """What is left of gradients is nothing under another reducer, or with another loss scale."""
    mount = over_tcp(cluster, wire="topk(0.01)", reducer="sgd", learning_rate=1)
    for name, value in [("loss_scale", 1024), ("reducer", "sum")]:
        mount.contribute(numbers(SIZE, 1))
        mount.control(name, value)
        before = array(mount.model / "weights")
        mount.contribute(filled(mount, 0))
        assert (array(mount.model / "weights") == before).all(), name


def test_training_in_a_smaller_form_ends_where_training_in_full_does(cluster):
    """The mean of noisy gradients of a quadratic; the noise is the same in all runs."""
    target = numbers(SIZE, 9)

    def train(name):
        mount = over_tcp(cluster, wire=name, reducer="sgd", learning_rate=0.2)
        learner = mount.join("a")
        for step in range(40):
            gradient = array(learner / "weights") - target + numbers(SIZE, 100 + step)
            mount.contribute(gradient.astype("<f4"), learner="a")
        return float(np.square(array(learner / "weights") - target).mean())

    full = train("full")
    for name in ("bf16", "int8", "fp8"):
        assert train(name) == pytest.approx(full, rel=0.02), name
    assert train("topk(0.25)") < 8 * full


def test_the_memory_of_residuals_goes_with_the_form(cluster):
    mount = over_tcp(cluster)
    residuals = lambda: mount.status()["memory"]["residuals"]  # noqa: E731
    mount.contribute(numbers(SIZE, 1))
    assert residuals() == 0
    mount.control("wire", "int8")
    mount.contribute(numbers(SIZE, 1))
    mount.contribute(numbers(SIZE, 2))
    assert residuals() == 2 * SIZE
    mount.control("wire", "full")
    eventually(lambda: residuals() == 0)
    before = array(mount.model / "weights")
    mount.contribute(filled(mount, 1))
    mount.catch_up()
    assert (array(mount.model / "weights") == before + 1).all()


def test_a_form_that_has_no_effect_says_so(cluster, start_mount):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", wire="int8")
    assert form(mount) == ("full", "the shard is in this process")
    eventually(lambda: "control/wire (int8) has no effect" in mount.stderr())
    mount.contribute(numbers(SIZE, 1))
    mount.catch_up()
    assert (array(mount.model / "weights") == numbers(SIZE, 1)).all()
    one = cluster(1, size=SIZE, block_size=BLOCK, reducer="sum", wire="int8")
    assert form(one.mount(transport="shm")) == ("full", "contributions go through shared memory")
    small = over_tcp(cluster, size=BLOCK, wire="int8")
    assert form(small) == ("full", "contributions to so small a model go with their commits")
    values = over_tcp(cluster, reducer="assign", wire="int8")
    assert form(values) == ("full", "reducer assign takes values as they are")
    doubles = over_tcp(cluster, dtype="f64", wire="int8")
    assert form(doubles) == ("full", "the model has no tensor of fp32 or a narrower type")


@pytest.mark.parametrize("name", list(FORMS)[1:])
def test_nan_in_a_smaller_form_is_refused_or_stays_nan(cluster, name):
    mount = over_tcp(cluster, wire=name)
    bad = filled(mount, 1)
    bad[3] = np.inf
    fails(errno.EINVAL, mount.contribute, bad)
    mount.control("nonfinite", "accept")
    mount.contribute(bad)
    mount.catch_up()
    weights = array(mount.model / "weights")
    # With int8 and fp8 the elements that have their scale in common share its fate.
    assert np.isnan(weights[3]) and np.isfinite(weights[256:]).all()
