"""Learning rates that follow a schedule, as docs/use/reducers.md promises it under "Schedules"."""

import errno
import math

import numpy as np
import pytest
from filetools import BLOCK, array, eventually, fails

SIZE = 2 * BLOCK + 1236
PEAK, WARMUP, STEPS = 0.5, 3, 9
SETTINGS = {"size": SIZE, "block_size": BLOCK, "reducer": "sgd", "learning_rate": PEAK, "warmup": WARMUP}


def rate(schedule, step, floor=0.0):
    """transformers' get_..._schedule_with_warmup, and its end where it is over."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    progress = min(1, (step - WARMUP) / (STEPS - WARMUP))
    left = {"constant": 1, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[schedule]
    return PEAK if schedule == "constant" else floor + (PEAK - floor) * left


def shown(mount, version):
    """The learning rate in use at a version."""
    eventually(lambda: mount.status()["version"] == version)
    return mount.status()["learning_rate"]


def steps(mount, rates):
    """Makes versions of gradients of 1, each with its rate."""
    for expected in rates:
        version, before = mount.status()["version"], array(mount.model / "weights")
        assert shown(mount, version) == pytest.approx(expected, rel=1e-6, abs=1e-12)
        mount.contribute(np.ones(SIZE // 4, "<f4"))
        mount.catch_up()
        np.testing.assert_allclose(before - array(mount.model / "weights"), expected, rtol=1e-5, atol=1e-6)
        assert shown(mount, version + 1) is not None


@pytest.mark.also_on_network
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_follows_its_schedule(start_mount, schedule):
    """Up to its floor, and there it stays."""
    form = schedule if schedule == "constant" else f"{schedule}({STEPS})"
    mount = start_mount(**SETTINGS, schedule=form, learning_rate_floor=0.125)
    steps(mount, [rate(schedule, step, 0.125) for step in range(STEPS + 3)])
    assert mount.control("learning_rate") == "0.5"
    mount.control("reducer", "sum")
    assert mount.status()["learning_rate"] is None


@pytest.mark.also_on_network
def test_a_schedule_begins_when_it_is_set(start_mount):
    mount = start_mount(**{**SETTINGS, "warmup": 0})
    steps(mount, [PEAK] * 2)
    mount.control("warmup", WARMUP)
    mount.control("schedule", f"Linear({STEPS})")
    eventually(lambda: mount.control("schedule_start") == "2")
    steps(mount, [rate("linear", step) for step in range(4)])
    # It begins again where it is told to.
    mount.control("schedule_start", 6)
    steps(mount, [rate("linear", step) for step in range(2)])
    for name, value in [
        ("warmup", STEPS + 1), ("warmup", -1), ("schedule", "linear(2)"), ("schedule", "cosine"), ("schedule", "step(3)"),
        ("schedule", "linear(0)"), ("schedule_start", "soon"), ("learning_rate_floor", -1),
    ]:  # fmt: skip
        fails(errno.EINVAL, mount.control, name, value)
    assert f"warmup ({WARMUP}) is longer than schedule (linear(2))" in mount.stderr()
    assert mount.control("schedule") == f"linear({STEPS})" and mount.control("warmup") == str(WARMUP)


def test_a_schedule_goes_on_after_a_snapshot_and_a_move(start_mount, gradfs, cluster, tmp_path):
    first = start_mount(**SETTINGS)
    steps(first, [rate("constant", step) for step in range(2)])
    first.control("schedule", f"cosine({STEPS})")
    eventually(lambda: first.control("schedule_start") == "2")
    steps(first, [rate("cosine", step) for step in range(2)])
    done = gradfs("save", first.model, tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    first.kill()
    second = start_mount("--from", tmp_path / "saved", name="m")
    steps(second, [rate("cosine", step) for step in range(2, 4)])
    # The same schedule goes on. Another one begins, unless it is told where.
    for options, start in [
        ({"schedule": f"cosine({STEPS})"}, "2"), ({"schedule": "linear(50)"}, "4"),
        ({"schedule": "linear(50)", "schedule_start": 3}, "3"), ({"learning_rate": 1}, "2"),
    ]:  # fmt: skip
        other = start_mount("--from", tmp_path / "saved", name="m", **options)
        assert (other.control("schedule_start"), other.version()) == (start, 4)
    # On shards, whose coordinator changes.
    one = cluster(2)
    one.create("m", "--from", tmp_path / "saved")
    mount = one.mount()
    steps(mount, [rate("cosine", step) for step in range(2, 5)])
    done = one.run("drain", one.coordinator_shard("m").address)
    assert done.returncode == 0, done.stderr
    steps(mount, [rate("cosine", step) for step in range(5, 8)])
