"""Jobs whose versions need a quorum, wait for the late, have bounded staleness, or add up in a fixed order; as
docs/use/semantics.md promises them. sync and async are in test_jobs.py."""

import errno
import random
import time

import numpy as np
import pytest
from filetools import BLOCK, Threads, array, eventually, fails, filled, give, impatient, mounts, ship_mapped, takes

SIZE = 2 * BLOCK + 1236


pytestmark = pytest.mark.also_on_network


mounted = mounts(both=False, size=SIZE)


def joined(mount, names):
    mount.join(*names)
    return mount


def only(mount):
    mount.catch_up()
    values = array(mount.model / "weights")
    assert (values == values[0]).all()
    return values[0]


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
    fails(errno.EINVAL, mount.control, "consistency", "sync")
    fails(errno.EINVAL, mount.control, "reducer", "sum")
    mount.control("staleness_aware", "false")
    assert rate_of("b") is None and opened("b") == opened("a")


@pytest.mark.parametrize("s", [0, 2])
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
        ship_mapped(mount.place(name), values)

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

    first, *others = [run(seed, deterministic=True) for seed in range(3)]
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
    with impatient(mount), takes(0.35, 5):
        fails(errno.ETIMEDOUT, ship_mapped, mount.place("a"), filled(mount, 1))
    assert (mount.place("a") / "error").read_text().rstrip().endswith('not committed: "b"'), "who is waited for"
    waits = Threads().start(ship_mapped, mount.place("a"), filled(mount, 1))
    time.sleep(0.1)
    assert not waits.done()
    give(mount, 10, "b")
    waits.result(300)
    assert mount.version() == 1 and only(mount) == 11


@pytest.mark.one_process
def test_deterministic_is_bit_for_bit__only_where_all_are_waited_for(mounted, gradfs, mnt):
    mount = mounted(deterministic=True)
    fails(errno.EINVAL, mount.control, "consistency", "async")
    assert (mount.control("deterministic"), mount.control("consistency")) == ("true", "sync")
    done = gradfs("up", "--size", "1MiB", "--deterministic", "--consistency", "ssp(1)", mnt)
    assert done.returncode == 2 and "needs consistency sync" in done.stderr, done
