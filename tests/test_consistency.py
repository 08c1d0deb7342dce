"""Jobs whose versions need a quorum, wait for the late, have bounded staleness, or add up in a fixed order; as
docs/use/semantics.md promises them. sync and async are in test_jobs.py."""

import contextlib
import errno
import mmap
import os
import random
import threading
import time

import numpy as np
import pytest
from filetools import Threads, array, eventually, filled, impatient, raises, takes

BLOCK = 64 << 10
SIZE = 2 * BLOCK + 1236
PART = BLOCK // 4  # Elements of a block.


pytestmark = pytest.mark.also_on_network


@pytest.fixture
def mounted(start_mount):
    def start(**options):
        return start_mount(**{"size": SIZE, "block_size": BLOCK, "reducer": "sum", "timeout": 20, **options})

    return start


def joined(mount, names):
    for name in names:
        mount.join(name)
    return mount


def only(mount):
    mount.catch_up()
    values = array(mount.model / "weights")
    assert (values == values[0]).all()
    return values[0]


def give(mount, value, learner):
    mount.contribute(filled(mount, value), learner=learner)


@contextlib.contextmanager
def gradients(mount, learner):
    fd = os.open(mount.place(learner) / "gradients", os.O_RDWR | os.O_DIRECT)
    try:
        yield fd
    finally:
        os.close(fd)


def test_quorum_waits_for_k(mounted):
    mount = joined(mounted(consistency="quorum(2)", learners=3), "abc")
    give(mount, 1, "a")
    assert mount.version() == 0
    give(mount, 10, "b")
    assert mount.version() == 1 and only(mount) == 11
    give(mount, 100, "c")  # It is late, and counts in the next.
    assert mount.version() == 1
    give(mount, 1, "a")
    assert mount.version() == 2 and only(mount) == 112


def test_quorum_waits_for_k__and_counts_a_learner_once(mounted):
    mount = joined(mounted(consistency="quorum(2)", learners=2, timeout=1), "ab")
    give(mount, 1, "a")
    with takes(0.9, 5), raises(errno.ETIMEDOUT):
        give(mount, 1, "a")
    with takes(0.9, 5), raises(errno.ETIMEDOUT):
        array(mount.place("a") / "weights")
    give(mount, 10, "b")
    assert mount.version() == 1 and only(mount) == 11


def test_quorum_waits_for_k__or_for_all_if_they_are_fewer(mounted):
    mount = joined(mounted(consistency="quorum(5)", learners=3), "abc")
    give(mount, 1, "a")
    give(mount, 10, "b")
    assert mount.version() == 0
    mount.leave("c")
    eventually(lambda: mount.version() == 1)
    assert only(mount) == 11


def test_quorum_waits_for_k__and_for_no_joiner(mounted):
    mount = joined(mounted(consistency="quorum(3)", learners=2), "ab")
    give(mount, 1, "a")
    mount.join("c")
    give(mount, 10, "b")
    assert mount.version() == 1 and only(mount) == 11
    give(mount, 1, "a")
    give(mount, 10, "b")
    assert mount.version() == 1, "now three of them count"
    give(mount, 100, "c")
    assert mount.version() == 2 and only(mount) == 122


def test_quorum_waits_for_k__not_for_one_that_writes(mounted):
    mount = joined(mounted(consistency="quorum(1)", learners=2), "ab")
    with gradients(mount, "a") as slow:
        os.pwrite(slow, filled(mount, 100)[:PART], 0)
        for step in range(1, 6):
            give(mount, 1, "b")
            assert mount.version() == step
        os.pwrite(slow, filled(mount, 100)[PART:], BLOCK)
        os.fsync(slow)
    assert mount.version() == 6 and only(mount) == 105, "what is late counts all the same"


def test_quorum_waits_for_k__also_of_what_is_mapped(mounted, way):
    mount = joined(mounted(consistency="quorum(2)", learners=3, **way), "abc")
    with gradients(mount, "a") as fd, mmap.mmap(fd, SIZE) as memory:
        memory[:] = filled(mount, 1).tobytes()
        os.fsync(fd)
        memory[:] = bytes(SIZE)  # The memory is the program's again.
        assert mount.version() == 0
        give(mount, 10, "b")
        assert mount.version() == 1 and only(mount) == 11


def test_quorum_waits_for_k__whoever_comes_and_goes(mounted):
    names, steps = [f"l{i}" for i in range(5)], 20
    mount = joined(mounted(consistency="quorum(3)", learners=5), names)

    def learn(name):
        for step in range(steps):
            give(mount, 1, name)
            if step % 4 == 0:
                array(mount.place(name) / "weights")
        mount.leave(name)

    Threads().run(*(lambda name=name: learn(name) for name in names))
    eventually(lambda: only(mount) == steps * len(names))
    contributions = steps * len(names)
    # At least three each, but for what the last two give.
    assert steps <= mount.version() <= contributions // 3 + 2 * steps


def test_grace_waits_a_little_for_the_late(mounted):
    mount = joined(mounted(consistency="grace(2, 10)", learners=3), "abc")
    time.sleep(0.3)
    give(mount, 1, "a")
    give(mount, 10, "b")
    # The window is ten times the time of the step: at least 3 s.
    assert mount.version() == 0
    with takes(0, 2):
        give(mount, 100, "c")
        eventually(lambda: mount.version() == 1)
    assert only(mount) == 111
    status = eventually(lambda: (now := mount.status())["version"] == 1 and now)
    assert 3 <= status["grace_window_seconds"] <= 10 and status["contributions_of_newest_version"] == 3, status


def test_grace_waits_a_little_for_the_late__but_not_for_long(mounted):
    mount = joined(mounted(consistency="grace(2, 0.5)", learners=3), "abc")
    time.sleep(0.6)
    give(mount, 1, "a")
    give(mount, 10, "b")
    with takes(0.2, 5):
        eventually(lambda: mount.version() == 1)
    assert only(mount) == 11
    eventually(lambda: mount.status()["contributions_of_newest_version"] == 2)
    give(mount, 100, "c")  # It is late, and counts in the next.
    give(mount, 1, "a")
    eventually(lambda: mount.version() == 2)
    assert only(mount) == 112


def test_grace_waits_a_little_for_the_late__unless_they_leave(mounted):
    mount = joined(mounted(consistency="grace(2, 10)", learners=3), "abc")
    time.sleep(0.3)
    with gradients(mount, "c") as slow:
        os.pwrite(slow, filled(mount, 100)[:PART], 0)
        give(mount, 1, "a")
        give(mount, 10, "b")
        assert mount.version() == 0
        with takes(0, 2):
            mount.leave("c")
            eventually(lambda: mount.version() == 1)
        with raises(errno.ENOTCONN):
            os.fsync(slow)
    assert only(mount) == 11


def test_grace_waits_a_little_for_the_late__whoever_comes_and_goes(mounted):
    names, steps = [f"l{i}" for i in range(5)], 20
    mount = joined(mounted(consistency="grace(3, 0.5)", learners=5), names)

    def learn(name):
        for step in range(steps):
            give(mount, 1, name)
            if step % 4 == 0:
                array(mount.place(name) / "weights")
        mount.leave(name)

    Threads().run(*(lambda name=name: learn(name) for name in names))
    eventually(lambda: only(mount) == steps * len(names))


def test_stale_contributions_have_a_smaller_learning_rate(mounted):
    """Numbers are exact: the rate is 3/4, and gradients are 1."""
    settings = {"reducer": "sgd", "learning_rate": 0.75, "read_own_step": "true", "staleness_aware": True}
    mount = joined(mounted(consistency="async", learners=2, **settings), "ab")

    def opened(name):
        values = array(mount.place(name) / "weights")
        assert (values == values[0]).all()
        return -values[0]

    def rate_of(name):
        version = mount.status()["version"]
        give(mount, 1, name)
        status = eventually(lambda: (now := mount.status())["version"] == version + 1 and now)
        return status["stale_learning_rate"]

    assert opened("a") == opened("b") == 0
    for step in range(3):
        assert opened("b") == 0.75 * step and rate_of("b") == 0.75
    assert rate_of("a") == 0.25, "three versions were made since it opened the first"
    assert opened("a") == opened("b") == 2.5
    assert [rate_of("b") for _ in range(3)] == [0.75, 0.75, 0.375], "one version is no more than none"
    mount.join("c")
    assert [rate_of("c"), rate_of("c")] == [0.75, 0.75], "it begins with the version at which it joined"
    assert rate_of("a") == 0.75 / 5
    assert opened("a") == np.float32(2.5 + 4 * 0.75 + 0.375) + np.float32(0.15)
    with raises(errno.EINVAL):
        mount.control("consistency", "sync")
    with raises(errno.EINVAL):
        mount.control("reducer", "sum")
    mount.control("staleness_aware", "false")
    assert rate_of("b") is None and opened("b") == opened("a")


@pytest.mark.parametrize("s", [0, 1, 3])
def test_ssp_bounds_the_lead(mounted, s):
    mount = joined(mounted(consistency=f"ssp({s})", learners=3), "abc")
    for step in range(s + 1):
        give(mount, 1, "a")
        assert mount.version() == step + 1 and only(mount) == step + 1
    ahead = Threads().start(give, mount, 1, "a")
    give(mount, 10, "b")
    time.sleep(0.2)
    assert not ahead.done() and mount.version() == s + 2, "c is still more than s steps behind"
    give(mount, 100, "c")
    ahead.result(300)
    assert mount.version() == s + 4 and only(mount) == s + 112


def test_ssp_bounds_the_lead__until_the_timeout(mounted):
    mount = joined(mounted(consistency="ssp(0)", learners=2, timeout=1), "ab")
    give(mount, 1, "a")
    with gradients(mount, "a") as fd:
        os.pwrite(fd, filled(mount, 1), 0)
        for _ in range(2):
            with takes(0.9, 5), raises(errno.ETIMEDOUT):
                os.fsync(fd)
        assert mount.version() == 1
        give(mount, 10, "b")
        os.fsync(fd)
    assert mount.version() == 3 and only(mount) == 12


def test_ssp_bounds_the_lead__until_the_slowest_leaves(mounted):
    mount = joined(mounted(consistency="ssp(0)", learners=2), "ab")
    give(mount, 1, "a")
    ahead = Threads().start(give, mount, 1, "a")
    time.sleep(0.1)
    assert not ahead.done()
    mount.leave("b")
    ahead.result(300)
    assert mount.version() == 2 and only(mount) == 2


def test_ssp_bounds_the_lead__of_a_joiner_from_where_the_slowest_is(mounted):
    mount = joined(mounted(consistency="ssp(1)", learners=1, timeout=1), "a")
    for _ in range(10):
        give(mount, 1, "a")
    mount.join("b")
    for name in "abba":  # The ten before count for neither.
        give(mount, 1, name)
    give(mount, 1, "a")
    give(mount, 1, "a")
    with raises(errno.ETIMEDOUT):
        give(mount, 1, "a")
    assert only(mount) == 16


def test_ssp_bounds_the_lead__and_the_age_of_what_is_read(mounted):
    """Learners of random pace, each with an element of its own that counts its steps."""
    s, steps, names = 1, 25, ["a", "b", "c", "d"]
    mount = joined(mounted(consistency=f"ssp({s})", learners=len(names)), names)
    begun = dict.fromkeys(names, 0)
    lock = threading.Lock()

    def learn(at, name):
        chance = random.Random(name)
        one = np.zeros(SIZE // 4, "<f4")
        one[at] = 1
        for step in range(1, steps + 1):
            with lock:
                begun[name] = step
            mount.contribute(one, learner=name)
            with lock:
                slowest = min(begun.values())
            assert step <= slowest + s + 1, f"{name} at {step}: {begun}"
            seen = array(mount.place(name) / "weights")[: len(names)]
            assert seen[at] == step and seen.min() >= step - s - 1, f"{name} at {step} sees {seen}"
            time.sleep(chance.choice([0, 0, 0, 0.02]))

    Threads().run(*(lambda at=at, name=name: learn(at, name) for at, name in enumerate(names)))
    assert mount.version() == steps * len(names)
    assert (array(mount.model / "weights")[: len(names)] == steps).all()


NAMES = ["a", "b", "c", "d"]
STEPS = 3


def contributions(mount, step):
    """One a learner, whose sum depends on the order in which they are added up."""
    noise = np.random.default_rng(step)
    count = SIZE // 4
    return [(noise.standard_normal(count) * 10.0 ** noise.integers(-4, 5, count)).astype("<f4") for _ in NAMES]


def trained(mount, order, pauses):
    """The weights after some steps to which the learners come in a random order; a and c map, b and d write."""
    threads = Threads()

    def learn(name, values):
        if name in "bd":
            return mount.contribute(values, learner=name)
        with gradients(mount, name) as fd, mmap.mmap(fd, SIZE) as memory:
            memory[:] = values.tobytes()
            os.fsync(fd)

    for step in range(STEPS):
        futures = []
        for at in order.sample(range(len(NAMES)), len(NAMES)):
            futures.append(threads.start(learn, NAMES[at], contributions(mount, step)[at]))
            time.sleep(order.choice(pauses))
        for future in futures:
            future.result(300)
    assert mount.version() == STEPS
    return mount.weights()


def test_deterministic_is_bit_for_bit(mounted, way):
    def run(seed, **options):
        mount = joined(mounted(learners=len(NAMES), reducer="adam", **options, **way), NAMES)
        assert mount.control("deterministic") == "true"
        weights = trained(mount, random.Random(seed), [0, 0.03, 0.1])
        mount.stop()
        return weights

    first, *others = [run(seed, deterministic=True) for seed in range(4)]
    assert all(other == first for other in others)


def test_deterministic_is_bit_for_bit__in_the_order_of_learners(mounted):
    expected, other = np.zeros(SIZE // 4, "<f4"), np.zeros(SIZE // 4, "<f4")
    mount = joined(mounted(learners=len(NAMES), deterministic=True), NAMES)
    for step in range(STEPS):
        parts = contributions(mount, step)
        expected = expected + (((parts[0] + parts[1]) + parts[2]) + parts[3])
        other = other + (((parts[3] + parts[2]) + parts[1]) + parts[0])
    assert expected.tobytes() != other.tobytes(), "the order makes a difference"
    assert trained(mount, random.Random(1), [0, 0.05]) == expected.tobytes()


def test_deterministic_is_bit_for_bit__so_what_is_mapped_waits_for_its_version(mounted, way):
    mount = joined(mounted(learners=2, deterministic=True, **way), "ab")
    with gradients(mount, "a") as fd, mmap.mmap(fd, SIZE) as memory:
        memory[:] = filled(mount, 1).tobytes()
        with impatient(mount), takes(0.35, 5), raises(errno.ETIMEDOUT):
            os.fsync(fd)
        waits = Threads().start(os.fsync, fd)
        time.sleep(0.1)
        assert not waits.done()
        give(mount, 10, "b")
        waits.result(300)
        assert mount.version() == 1 and only(mount) == 11


def test_deterministic_is_bit_for_bit__only_where_all_are_waited_for(mounted, gradfs, tmp_path):
    mount = mounted(deterministic=True)
    for other in ("async", "quorum(2)", "ssp(1)"):
        with raises(errno.EINVAL):
            mount.control("consistency", other)
    mount.control("deterministic", "false")
    mount.control("consistency", "quorum(2)")
    with raises(errno.EINVAL):
        mount.control("deterministic", "true")
    assert (mount.control("deterministic"), mount.control("consistency")) == ("false", "quorum(2)")
    done = gradfs("up", "--size", "1MiB", "--deterministic", "--consistency", "ssp(1)", tmp_path)
    assert done.returncode == 2 and "needs consistency sync" in done.stderr, done
