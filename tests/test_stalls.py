"""What learners wait for, as status.json and the metrics show it; docs/operate/metrics.md says what counts."""

import os
import time

import numpy as np
import pytest
from filetools import BLOCK, Threads, array, close, eventually, filled
from test_metrics import ANY, Metrics

SIZE = 8 * BLOCK
PAUSE = 0.4
STEPS = 3


def of_learner(mount, name):
    """What status.json shows of one learner."""
    (learner,) = [one for one in mount.status()["learners"] if one["id"] == name]
    return learner


def step(mount, name, pause, times=1):
    """Steps of a learner that computes for so long, contributes, and opens the weights with its own step in them."""
    for _ in range(times):
        time.sleep(pause)
        mount.contribute(filled(mount, 1), learner=name)
        array(mount.place(name) / "weights")


def has_steps(mount, wanted):
    """The metrics, once the steps of all learners have ended."""
    return eventually(lambda: (seen := Metrics(mount))("gradfs_stall_seconds_count", model=mount.model.name) == wanted and seen)


@pytest.mark.also_on_network
def test_stall_is_the_time_that_a_learner_waits_for_others(start_mount):
    mount, threads = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2, metrics=ANY), Threads()
    mount.join("fast", "slow")
    assert of_learner(mount, "fast")["stall_seconds"] < 0.05 and of_learner(mount, "fast")["staleness"] is None
    threads.run(lambda: step(mount, "fast", 0, STEPS), lambda: step(mount, "slow", PAUSE, STEPS))
    fast, slow = of_learner(mount, "fast"), of_learner(mount, "slow")
    assert 0.8 * PAUSE * STEPS < fast["stall_seconds"] < PAUSE * STEPS + 1, fast
    assert slow["stall_seconds"] < 0.4 * PAUSE * STEPS, slow
    # Its first step has no wait in it: that comes with the open after the commit.
    assert fast["stall_share"] > 0.5 and fast["stall_share_since_join"] > 0.5, fast
    assert slow["stall_share"] < 0.4 and slow["stall_share_since_join"] < 0.4, slow
    assert fast["staleness"] == slow["staleness"] == {"versions": 0, "ms": 0}


@pytest.mark.also_on_network
def test_a_stall_shows_while_it_lasts(start_mount):
    mount, threads = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=200), Threads()
    mount.join("fast", "slow")
    waits = threads.start(lambda: step(mount, "fast", 0))
    eventually(lambda: of_learner(mount, "fast")["stall_seconds"] > 0.3)
    before = of_learner(mount, "fast")["stall_seconds"]
    # Two threads of one learner that wait at the same time wait once.
    others = [threads.start(array, mount.place("fast") / "weights") for _ in range(3)]
    time.sleep(0.5)
    now = of_learner(mount, "fast")
    assert before + 0.4 < now["stall_seconds"] < before + 1 and now["stall_share"] > 0.3, now
    assert of_learner(mount, "slow")["stall_seconds"] == 0
    mount.contribute(filled(mount, 1), learner="slow")
    for one in (waits, *others):
        one.result(300)
    at_end = of_learner(mount, "fast")["stall_seconds"]
    time.sleep(0.2)
    assert of_learner(mount, "fast")["stall_seconds"] == at_end


def test_staleness_is_of_the_newest_version_that_the_mount_knows(cluster):
    one = cluster(1, size=SIZE, block_size=BLOCK, reducer="sum", consistency="async", timeout=200)
    mount, ones = one.mount(transport="tcp", metrics=ANY), np.ones(SIZE // 4, "<f4")
    reads = mount.join("reads")
    writes = mount.join("writes")
    array(reads / "weights")
    assert of_learner(mount, "reads")["staleness"] == {"versions": 0, "ms": 0}
    # The mount hears of versions, and cannot pull them.
    held = [os.open(reads / "weights", os.O_RDONLY)]
    mount.control("retain", 0)
    mount.control("max_versions", 3)
    try:
        for version in range(1, 6):
            mount.contribute(ones, learner="writes")
            mount.wait_for_version(version)
            held.append(os.open(writes / "weights", os.O_RDONLY))
        for _ in range(4):
            mount.contribute(ones, learner="writes")
        eventually(lambda: one.coordinator("m")["contributions"] == 9)
        time.sleep(0.3)
        array(reads / "weights")
        staleness = of_learner(mount, "reads")["staleness"]
        assert staleness["versions"] == 4 and 250 < staleness["ms"] < 5000, staleness
    finally:
        close(*held)
    seen = Metrics(mount)
    assert seen("gradfs_staleness_versions_sum", model="m") >= 4
    assert seen("gradfs_staleness_versions_bucket", model="m", le="0") >= 3
    eventually(lambda: (array(reads / "weights") == 9).all())
    array(reads / "weights")
    assert of_learner(mount, "reads")["staleness"]["versions"] == 0


def test_rates_are_of_the_last_seconds(cluster):
    one = cluster(1, size="8MiB", reducer="sum", timeout=200)
    mount = one.mount(transport="tcp")
    assert mount.status()["push_gb_per_s"] == 0
    ones, began = filled(mount, 1), time.monotonic()
    while time.monotonic() - began < 2:
        mount.contribute(ones)
        array(mount.model / "weights")
    status, took = mount.status(), time.monotonic() - began
    wanted = status["payload"]["pushed_bytes"] / 1e9 / took
    assert wanted / 3 < status["push_gb_per_s"] < wanted * 3, status["payload"]
    assert status["pull_gb_per_s"] > 0


@pytest.mark.parametrize("transport", [pytest.param("in one process", marks=pytest.mark.one_process), "tcp", "shm"])
def test_phases_tell_what_a_step_waits_for(cluster, start_mount, transport):
    settings = {"size": SIZE, "block_size": BLOCK, "reducer": "sum", "learners": 2, "timeout": 200}
    if transport == "in one process":
        mount = shard = start_mount(**settings, metrics=ANY)
        quick = ("reduce", "conclude")
    else:
        one = cluster(0)
        shard = one.add_shard("--metrics", ANY)
        one.create("m", **settings)
        mount, quick = one.mount(transport=transport, metrics=ANY), ("wire", "conclude")
    threads = Threads()
    mount.join("fast", "slow")
    threads.run(lambda: step(mount, "fast", 0, STEPS), lambda: step(mount, "slow", PAUSE, STEPS))
    assert ("push_gb_per_s" in mount.status()) == (shard is not mount)
    seen, of_shard, model = has_steps(mount, 2 * STEPS), Metrics(shard), mount.model.name
    of_phase = lambda phase, what: seen(f"gradfs_phase_seconds_{what}", model=model, phase=phase)  # noqa: E731
    for phase in quick:
        assert of_phase(phase, "count") == STEPS and of_phase(phase, "sum") < 0.4 * PAUSE * STEPS, phase
    for phase in ("staging", "open", "others"):
        assert of_phase(phase, "count") == 2 * STEPS, phase
    assert 0.8 * PAUSE * STEPS < of_phase("others", "sum") < PAUSE * STEPS + 1
    assert of_phase("staging", "sum") < 0.4 * PAUSE * STEPS
    if shard is mount:
        assert 0.8 * PAUSE * (STEPS - 1) < of_phase("open", "sum") < PAUSE * STEPS + 1
    else:
        # Version 0, too, was pulled.
        assert of_phase("pull", "count") == STEPS + 1
    assert of_shard("gradfs_phase_seconds_count", model=model, phase="reduce") == STEPS
    assert of_shard("gradfs_phase_seconds_sum", model=model, phase="reduce") < 0.4 * PAUSE * STEPS
