"""When mounts pull versions, and which version an open waits for, as docs/use/several-hosts.md promises."""

import errno
import os
import threading
import time

import numpy as np
import pytest
from filetools import BLOCK, Threads, array, eventually, fails, filled, raises

SIZE = 16 * BLOCK
MIB = 1 << 20
NOTHING = {"versions": 0, "ms": 0}


def behind(mount):
    """How far a mount says that it is behind."""
    return mount.status()["pull"]["behind"]


def opened_at_once(path):
    """A file of weights by an open that does not wait."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        return np.frombuffer(file.readall(), "<f4")


@pytest.mark.also_on_network
def test_async_opens_wait_only_if_read_own_step_is_true__whatever_the_consistency_is(start_mount):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", timeout=200, learners=2)
    a, ones, threads = mount.join("a"), filled(mount, 1), Threads()
    mount.join("b")
    assert mount.control("read_own_step") == "auto"
    mount.contribute(ones, learner="a")
    fails(errno.EAGAIN, opened_at_once, a / "weights")
    assert mount.control("read_own_step", "false") == "false"
    assert (array(a / "weights") == 0).all()
    assert mount.control("read_own_step", "true") == "true"
    waiting = threads.start(array, a / "weights")
    time.sleep(0.05)
    assert not waiting.done()
    mount.contribute(ones, learner="b")
    assert (waiting.result(300) == 2).all()


def test_async_opens_wait_only_if_read_own_step_is_true(cluster):
    """A step is in a version, whose blocks do not get to the mount."""
    one = cluster(0)
    proxy = one.proxy()
    one.add_shard(proxy=proxy)
    one.create("m", size=SIZE, block_size=BLOCK, reducer="sum", consistency="async", timeout=200)
    mount, threads = one.mount(), Threads()
    a, ones = mount.join("a"), filled(mount, 1)
    mount.join("b")
    mount.contribute(ones, learner="a")
    eventually(lambda: (array(a / "weights") == 1).all())
    is_held = threading.Event()

    def hold(connection, direction, data):
        while is_held.is_set() and (connection.role, direction) == ("data", "down"):
            time.sleep(0.01)
        return data

    proxy.rule = hold
    is_held.set()
    assert behind(mount) == NOTHING
    mount.contribute(ones, learner="a")
    late = eventually(lambda: (told := behind(mount))["ms"] and told)
    assert late["versions"] == 1 and eventually(lambda: behind(mount)["ms"] > late["ms"])
    assert (array(a / "weights") == 1).all() and (opened_at_once(a / "weights") == 1).all()
    mount.control("read_own_step", "true")
    fails(errno.EAGAIN, opened_at_once, a / "weights")
    waiting = threads.start(array, a / "weights")
    time.sleep(0.05)
    assert not waiting.done()
    is_held.clear()
    assert (waiting.result(300) == 2).all()
    assert behind(mount) == NOTHING


def test_a_mount_that_pulls_on_demand_pulls_what_is_opened(cluster):
    one = cluster(1, size=SIZE, block_size=BLOCK, reducer="sum", timeout=5, pull="on-demand")
    trains, reads = one.mount(transport="tcp"), one.mount(transport="tcp")
    ones = filled(trains, 1)
    pulled = reads.status()["pull"]
    assert pulled["policy"] == "on-demand"
    for _ in range(5):
        trains.contribute(ones)
    # It knows of the version, and has not pulled it.
    eventually(lambda: reads.seen() == 5)
    assert reads.status()["version"] == 5
    time.sleep(0.1)
    assert reads.status()["pull"]["pulls"] == pulled["pulls"]
    assert reads.status()["pull"]["behind"]["versions"] == 5
    assert (array(reads.model / "weights") == 5).all()
    assert (array(reads.model / "weights") == 5).all()
    assert reads.status()["pull"]["pulls"] == pulled["pulls"] + 1
    # An open waits no longer than for the timeout, and one that must not wait does not.
    trains.contribute(ones)
    eventually(lambda: reads.seen() == 6)
    reads.control("timeout", "0.3")
    one.shards[0].pause()
    try:
        fails(errno.EAGAIN, opened_at_once, reads.model / "weights")
        fails(errno.ETIMEDOUT, os.open, reads.model / "weights", os.O_RDONLY)
    finally:
        one.shards[0].resume()
    assert (array(reads.model / "weights") == 6).all()
    # With another policy it catches up by itself.
    reads.control("pull", "eager")
    trains.contribute(ones)
    eventually(lambda: reads.status()["pull"]["pulls"] == pulled["pulls"] + 3)
    assert (opened_at_once(reads.model / "weights") == 7).all()


def test_an_adaptive_mount_pulls_just_before_an_open(cluster):
    """Versions come out many times as often as weights are opened."""
    one = cluster(1, size=8 * MIB, reducer="sum", consistency="async", timeout=200)
    trains, reads, threads = one.mount(transport="tcp"), one.mount(transport="tcp"), Threads()
    ones, is_over, times = filled(trains, 1), [], []

    def train():
        while not is_over:
            trains.contribute(ones)
            time.sleep(0.01)

    def opens(count):
        """Opens weights so often, in a steady rhythm; how many versions came out, and were pulled."""
        before, newest = reads.status()["pull"]["pulls"], trains.status()["contributions"]
        begin = time.monotonic()
        for at in range(count):
            time.sleep(max(0, begin + 0.4 * at - time.monotonic()))
            started = time.monotonic()
            array(reads.model / "weights")
            times.append((started, time.monotonic()))
        return trains.status()["contributions"] - newest, reads.status()["pull"]["pulls"] - before

    training = threads.start(train)
    assert reads.status()["pull"]["policy"] == "adaptive"
    opens(6)
    came, pulled = opens(10)
    status = reads.status()["pull"]
    assert 2 * pulled <= came and pulled <= 25, f"{came} versions, {pulled} pulled; {status}"
    least = min(after[0] - before[1] for before, after in zip(times, times[1:]))
    most = max(after[1] - before[0] for before, after in zip(times, times[1:]))
    # An open that finds no newer version is none of these: now and then two intervals count as one.
    assert least <= status["open_interval_seconds"] <= 2 * most and status["seconds"] > 0, (status, times)
    assert status["bubble_seconds"] < status["open_interval_seconds"], status
    reads.control("pull", "eager")
    came, eagerly = opens(4)
    assert eagerly > 2 * pulled / 10 * 4, f"{came} versions, {eagerly} pulled, {pulled} in ten opens before"
    # Without opens it does not fall behind for good.
    reads.control("pull", "adaptive")
    is_over.append(True)
    training.result(300)
    eventually(lambda: reads.seen() == trains.status()["contributions"], deadline=20)


def test_an_open_without_rhythm_shows_the_newest_version_that_is_known(cluster):
    """Checkpoints of an asynchronous job hold all that the mount knows of, and after the last one nothing is missing."""
    one = cluster(1, size=8 * MIB, reducer="sum", consistency="async", timeout=20)
    trains, reads = one.mount(transport="tcp"), one.mount(transport="tcp")
    trains.join("a")
    ones, steps = filled(trains, 1), 0

    def trains_for(seconds):
        nonlocal steps
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            trains.contribute(ones, learner="a")
            steps += 1
        eventually(lambda: reads.status()["contributions"] == steps)

    # Less than one open a second is no rhythm that pulls are timed by.
    for _ in range(4):
        trains_for(1.5)
        assert (array(reads.model / "weights") == steps).all()
    trains_for(0.5)
    trains.leave("a")
    for mount in (trains, reads):
        eventually(lambda: mount.seen() == steps)
        assert behind(mount) == NOTHING


def test_blocks_come_back_while_others_are_still_written(cluster):
    one = cluster(2, size=64 * BLOCK, block_size=BLOCK, reducer="sum", timeout=200)
    mount = one.mount(transport="tcp")
    ones, pulled = filled(mount, 1).tobytes(), lambda: mount.status()["payload"]["pulled_bytes"]

    def write_some(gradients, values, before):
        gradients.write(values[: 40 * BLOCK])
        # A mount sends four blocks of a shard together, so it may keep three.
        eventually(lambda: pulled() >= before + 34 * BLOCK)

    for step in range(1, 4):
        before = pulled()
        with open(mount.model / "gradients", "wb", buffering=0) as gradients:
            write_some(gradients, ones, before)
            # What is here already is of no version yet.
            assert mount.seen() == step - 1
            assert (array(mount.model / "weights") == step - 1).all()
            gradients.write(ones[40 * BLOCK :])
        assert (array(mount.model / "weights") == step).all()
        assert pulled() == before + 64 * BLOCK, "no block comes twice"
    # A contribution that is refused counts nowhere, and what has come for it is not shown.
    with raises(errno.EINVAL):
        with open(mount.model / "gradients", "wb", buffering=0) as gradients:
            write_some(gradients, filled(mount, 7).tobytes(), pulled())
            gradients.write(filled(mount, np.nan).tobytes()[: 24 * BLOCK])
    mount.contribute(np.frombuffer(ones, "<f4"))
    assert (array(mount.model / "weights") == 4).all()


def test_blocks_come_to_a_mount_that_only_reads(cluster):
    one = cluster(2, size=64 * BLOCK, block_size=BLOCK, reducer="sum", timeout=200)
    trains, reads = one.mount(transport="tcp"), one.mount(transport="tcp")
    ones, pulled = filled(trains, 1).tobytes(), lambda: reads.status()["payload"]["pulled_bytes"]
    for step in range(1, 4):
        eventually(lambda: reads.seen() == step - 1)
        before = pulled()
        with open(trains.model / "gradients", "wb", buffering=0) as gradients:
            gradients.write(ones[: 40 * BLOCK])
            eventually(lambda: pulled() >= before + 34 * BLOCK)
            assert reads.seen() == step - 1 and (array(reads.model / "weights") == step - 1).all()
            gradients.write(ones[40 * BLOCK :])
        eventually(lambda: reads.seen() == step)
        assert (array(reads.model / "weights") == step).all()
        assert pulled() == before + 64 * BLOCK, "no block comes twice"
