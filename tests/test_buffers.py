"""Averaged tensors, as docs/use/tensors.md promises them: buffers of a model, such as the running statistics of torch's
BatchNorm, of which learners write values."""

import errno
import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from filetools import BLOCK, eventually, fails, part_of, raises, write_safetensors

# As torch orders a model with BatchNorm; `running_var` begins in one block and ends in the next but one.
SHAPES = {"conv": 900, "bn.weight": 40, "bn.running_mean": 2000, "bn.running_var": 2 * BLOCK // 4 + 100, "head": 20_000}
RULE = "*.running_* reducer=average"
SETTINGS = {"block_size": BLOCK, "reducer": "sgd", "learning_rate": 1, "tensors": [RULE]}


@pytest.fixture
def model(tmp_path):
    def write(others=None):
        tensors = {name: ("F32", (count,), np.ones(count, "<f4").tobytes()) for name, count in SHAPES.items()}
        return write_safetensors(tmp_path / "model.safetensors", {**tensors, **(others or {})})

    return write


def contribution(values):
    """The bytes of each tensor with one value, where there is one: (offset, bytes)."""
    at, parts = 0, []
    for name, count in SHAPES.items():
        if name in values:
            parts.append((at, np.full(count, values[name], "<f4").tobytes()))
        at += 4 * count
    return parts


def contribute(mount, learner, values):
    with open(mount.place(learner) / "gradients", "wb", buffering=0) as file:
        for at, data in contribution(values):
            assert os.pwrite(file.fileno(), data, at) == len(data)


def joined(mount, names):
    """Learner -> its mount, once they have joined."""
    mount.join(*names)
    return dict.fromkeys(names, mount)


def step(mounts, values):
    """Contributions of several learners to one version, each on its mount: learner -> values."""
    with ThreadPoolExecutor(len(values)) as threads:
        list(threads.map(lambda name: contribute(mounts[name], name, values[name]), values))
    for mount in set(mounts.values()):
        mount.catch_up()


def weights(mount):
    """The value of each tensor, whose elements are all the same."""
    parts = np.split(np.frombuffer(mount.weights(), "<f4"), np.cumsum([*SHAPES.values()])[:-1])
    assert all((part == part[0]).all() for part in parts)
    return {name: float(part[0]) for name, part in zip(SHAPES, parts)}


def of(gradient, mean=None, var=None):
    """Gradients of the parameters, and values of the buffers, if they are written."""
    values = {"conv": gradient, "bn.weight": gradient, "head": gradient}
    buffers = {"bn.running_mean": mean, "bn.running_var": var}
    return values | {name: value for name, value in buffers.items() if value is not None}


def expect(mount, parameters, mean, var):
    want = of(parameters, mean, var)
    assert weights(mount) == pytest.approx(want, rel=1e-5)


WAYS = [{"aggregation": "sum"}, {"loss_scale": 8, "deterministic": True}, {"clip_value": 0.5, "consistency": "quorum(2)"}]


@pytest.mark.also_on_network
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_an_averaged_tensor_is_the_mean_of_what_learners_wrote(start_mount, model, settings):
    """Whatever becomes of gradients."""
    mount = start_mount(model=model(), learners=2, **{**SETTINGS, **settings})
    mounts = joined(mount, "ab")
    step(mounts, {"a": of(1, 3, 40), "b": of(1, 5, 8)})
    gradient = 2 if settings.get("aggregation") == "sum" else 1
    moved = min(gradient / settings.get("loss_scale", 1), settings.get("clip_value", 9))
    expect(mount, 1 - moved, 4, 24)
    step(mounts, {"a": of(0, -1, 0.25), "b": of(0, -2, 0.75)})
    expect(mount, 1 - moved, -1.5, 0.5)


@pytest.mark.also_on_network
@pytest.mark.parametrize("consistency", ["async", "ssp(1)"])
def test_an_averaged_tensor_is_the_mean_of_what_learners_wrote__one_a_version(start_mount, model, consistency):
    """That of the newest contribution, whatever its staleness."""
    settings = {**SETTINGS, "consistency": consistency, "staleness_aware": True, "learning_rate": 0}
    mount = start_mount(model=model(), learners=2, **settings)
    mounts, shown = joined(mount, "ab"), [1, 1]
    for version, (name, values) in enumerate([("a", (3, 40)), ("b", (5, 8)), ("a", (7, None)), ("b", (None, 9))], 1):
        step({name: mounts[name]}, {name: of(1, *values)})
        mount.wait_for_version(version)
        shown = [new or old for new, old in zip(values, shown)]
        expect(mount, 1, *shown)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("wire", ["full", "int8", "topk(0.01)"])
def test_an_averaged_tensor_is_the_mean_of_what_learners_wrote__on_several_mounts(cluster, model, transport, wire):
    """Lossy forms do not change values."""
    one = cluster(2)
    settings = {"wire": wire} if wire != "full" else {}
    one.create("m", model=model(), learners=3, **SETTINGS, **settings)
    mounts = {name: one.mount(transport=transport) for name in "ab"}
    mounts["c"] = mounts["b"]
    for name, mount in mounts.items():
        mount.join(name)
    for t in range(1, 4):
        values = {name: of(0, at * 1.37 + t, at * 100.3) for at, name in enumerate("abc")}
        step(mounts, values)
        for mount in mounts.values():
            expect(mount, 1, 1.37 + t, 100.3)


@pytest.mark.also_on_network
def test_values_of_averaged_tensors_count_by_their_weight(start_mount, model):
    mount = start_mount(model=model(), learners=3, **SETTINGS)
    mounts = {name: mount for name in "abc"}
    for name, weight in {"a": 3, "b": 1, "c": 0.5}.items():
        (mount.join(name) / "weight").write_text(f"{weight}\n")
    step(mounts, {"a": of(1, 3, 40), "b": of(1, 5, 8), "c": of(1, 5, 8)})
    expect(mount, 0, (9 + 5 + 2.5) / 4.5, (120 + 8 + 4) / 4.5)
    # And without the heaviest.
    step(mounts, {"a": of(0), "b": of(0, 3, 12), "c": of(0, 6, 3)})
    expect(mount, 0, 4, 9)


@pytest.mark.also_on_network
@pytest.mark.parametrize("settings", [{}, {"deterministic": True, "clip_norm": 100}])
def test_who_writes_nothing_of_an_averaged_tensor_does_not_count(start_mount, model, settings):
    mount = start_mount(model=model(), learners=3, **{**SETTINGS, **settings})
    mounts = joined(mount, "abc")
    for version, (values, mean, var) in enumerate([
        ({"a": of(0, 3, 40), "b": of(0), "c": of(0, 5, 8)}, 4, 24),
        ({"a": of(0), "b": of(0, 7), "c": of(0, None, 9)}, 7, 9),
        ({"a": of(0), "b": of(0), "c": of(0)}, 7, 9),
        ({"a": of(0, 1, 1), "b": of(0, 2, 2), "c": of(0, 6, 6)}, 3, 3),
        # Nothing but a buffer, and one that has no buffers at all.
        ({"a": {"bn.running_var": 5}, "b": {"head": 0}, "c": {"bn.running_var": 6}}, 3, 5.5),
    ]):  # fmt: skip
        step(mounts, values)
        expect(mount, 1, mean, var)
        assert mount.version() == version + 1


@pytest.mark.also_on_network
def test_a_part_of_an_averaged_tensor_is_refused(start_mount, model):
    mount = start_mount(model=model(), learners=1, **SETTINGS)
    (at, data), (_, other) = contribution(of(0, 3, 40))[2:4]
    # Some bytes of a block, and some blocks of the tensor.
    for part, end in [(data[: len(data) // 2], 0), (other[: BLOCK + 400], len(data))]:
        with raises(errno.EINVAL), open(mount.model / "gradients", "wb", buffering=0) as file:
            os.pwrite(file.fileno(), part, at + end)
            os.fsync(file.fileno())
        assert re.search(r'a part of tensor "bn.running_\w+" was written', mount.stderr())
    assert mount.version() == 0
    mount.contribute(data, offset=at)
    mount.catch_up()
    expect(mount, 1, 3, 1)
    # Of parameters, a part will do.
    mount.contribute(np.zeros(5, "<f4").tobytes())
    mount.catch_up()
    assert mount.version() == 2


@pytest.mark.also_on_network
def test_averaged_tensors_have_no_part_in_the_norm(start_mount, model):
    mount = start_mount(model=model(), learners=2, **{**SETTINGS, "clip_norm": 0.5, "clip_value": 0.25})
    mounts = joined(mount, "ab")
    step(mounts, {"a": of(1, 3000, 4000), "b": of(3, 5000, 8000)})
    norm = 2 * np.sqrt(sum(SHAPES[name] for name in of(1)))
    assert mount.status()["gradient_norm"] == pytest.approx(norm, rel=1e-6)
    expect(mount, 1 - 2 * 0.5 / norm, 4000, 6000)


@pytest.mark.also_on_network
def test_nan_in_an_averaged_tensor_is_judged_as_in_others(start_mount, model):
    mount = start_mount(model=model(), learners=1, **SETTINGS)
    with raises(errno.EINVAL):
        contribute(mount, None, of(0, float("nan"), 1))
    assert mount.version() == 0
    mount.control("nonfinite", "accept")
    contribute(mount, None, of(0, float("inf"), 2))
    mount.catch_up()
    expect(mount, 1, float("inf"), 2)
    # What was there before has no part in a mean.
    contribute(mount, None, of(0, 5, 2))
    mount.catch_up()
    expect(mount, 1, 5, 2)


@pytest.mark.also_on_network
def test_a_rule_that_averages_what_is_no_float_is_refused(start_mount, model):
    counter = ("I64", (), (7).to_bytes(8, "little"))
    mount = start_mount(model=model(others={"bn.num_batches_tracked": counter}), **{**SETTINGS, "tensors": []})
    fails(errno.EINVAL, mount.control, "tensors", "bn.* reducer=average")
    assert '"bn.num_batches_tracked", which is I64: a mean is of floats' in mount.stderr()
    for rules in ("bn.num* frozen\nbn.* reducer=average", RULE):
        mount.control("tensors", rules)


@pytest.mark.also_on_network
def test_a_buffer_that_one_learner_writes_is_assigned(start_mount, model):
    mount = start_mount(model=model(), learners=3, **SETTINGS)
    mounts = joined(mount, "abc")
    for value in (3.1, -7.3):
        step(mounts, {"a": of(0, value, value), "b": of(0), "c": of(0)})
        expect(mount, 1, np.float32(value), np.float32(value))


@pytest.mark.also_on_network
@pytest.mark.parametrize("settings", [{}, {"deterministic": True}], ids=str)
def test_the_averaged_tensors_stay_while_contributions_are_in(start_mount, model, settings):
    mount = start_mount(model=model(), learners=2, **SETTINGS, **settings)
    mount.join(*"ab")
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(contribute, mount, "a", of(0.5, 3, 4))
        eventually(lambda: mount.status()["committed_for_next_version"] == 1)
        for rules in ("", "bn.running_mean reducer=average", "bn.* frozen", "* weight_decay=0"):
            fails(errno.EINVAL, mount.control, "tensors", rules)
        fails(errno.EINVAL, mount.control, "frozen", "*_mean")
        assert "values of averaged tensors" in mount.stderr()
        # What averages the same tensors can be set.
        mount.control("tensors", f"{RULE}\nhead weight_decay=0")
        contribute(mount, "b", of(0.5, 5, 8))
        first.result()
    mount.catch_up()
    expect(mount, 0.5, 4, 6)
    with part_of(mount.place("a") / "gradients") as file:
        # A whole block would begin a plan.
        os.pwrite(file.fileno(), bytes(400), 0)
        mount.control("tensors", "bn.running_mean reducer=average\nbn.running_var frozen")
        with raises(errno.EACCES):
            os.fsync(file.fileno())
    assert "other tensors are averaged now than when the contribution was begun" in mount.stderr()
    mount.catch_up()
    step(dict.fromkeys("ab", mount), {"a": of(0.25, 1, 7), "b": of(0.25, 3, 9)})
    expect(mount, 0.25, 2, 6)


def test_rules_that_average_go_only_with_gradients(start_mount, model):
    mount = start_mount(model=model(), **{**SETTINGS, "clip_norm": 1, "loss_scale": 2})
    for reducer in ("diloco", "easgd", "assign"):
        fails(errno.EINVAL, mount.control, "reducer", reducer)
    mount.control("tensors", "")
    mount.control("clip_norm", "0")
    mount.control("loss_scale", "1")
    mount.control("reducer", "diloco")
    fails(errno.EINVAL, mount.control, "tensors", RULE)
    assert "reducer diloco is for whole models, and a rule in tensors has reducer=average" in mount.stderr()
    # Of whole models it is the same reducer.
    mount.control("reducer", "average")
    mount.control("tensors", RULE)
    contribute(mount, None, of(4, 3, 40))
    mount.catch_up()
    expect(mount, 4, 3, 40)


def test_averaged_tensors_go_on_after_a_snapshot(start_mount, gradfs, model, tmp_path):
    settings = {**SETTINGS, "reducer": "adamw", "learning_rate": 0}
    mount = start_mount(model=model(), learners=2, **settings)
    mounts = joined(mount, "ab")
    step(mounts, {"a": of(1, 3, 40), "b": of(1, 5, 8)})
    saved = gradfs("save", mount.model, tmp_path / "saved")
    assert saved.returncode == 0, saved.stderr
    again = start_mount("--from", tmp_path / "saved", name="m")
    expect(again, 1, 4, 24)
    assert again.control("tensors") == RULE
    step(joined(again, "ab"), {"a": of(1, 6, 4), "b": of(1)})
    expect(again, 1, 6, 4)
