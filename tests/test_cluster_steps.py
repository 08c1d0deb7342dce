"""One job on several mounts, as docs/use/semantics.md promises it "On a network"."""

import errno
import os
import random
import threading
import time

import numpy as np
import pytest
from filetools import BLOCK, Threads, array, eventually, fails, filled, give, impatient, only, raises, takes

# Not a multiple of the block, and blocks on every shard.
SIZE = 5 * BLOCK + 1236
ELEMENTS = SIZE // 4


@pytest.fixture(params=["tcp", "shm"])
def job(cluster, request):
    """A model on shards, and its mounts: `shards`, `mounts`, and the model's settings."""

    def start(shards=2, mounts=2, **settings):
        options = {"size": SIZE, "block_size": BLOCK, "reducer": "sum", "timeout": 20, "lease": 10, **settings}
        one = cluster(shards, **options)
        return one, [one.mount(transport=request.param) for _ in range(mounts)]

    return start


def test_mounts_share_a_job(job):
    """Sums go over all mounts. A learner that has committed a step reads it next. Versions are the same everywhere."""
    _, (a, b) = job(learners=2)
    a.join("a")
    b.join("b")
    threads, expected = Threads(), 0
    for step in range(1, 21):
        def one(mount, name, value):
            give(mount, value, name)
            return only(mount, name), mount.seen()

        shown = threads.run(lambda: one(a, "a", step), lambda: one(b, "b", 100))
        expected += step + 100
        assert shown == [(expected, step)] * 2
    assert a.weights() == b.weights() and a.version() == b.version() == 20


def test_versions_are_those_of_one_process(job, start_mount):
    """The same contributions in the same order give the same bytes, whatever the reducer."""
    for reducer in ("sum", "adamw", "nesterov"):
        settings = {"reducer": reducer, "learners": 2, "learning_rate": 0.1, "deterministic": True}
        _, (a, b) = job(**settings)
        alone = start_mount(size=SIZE, block_size=BLOCK, timeout=200, **settings)
        mounts = {"x": a, "y": b}
        generator, threads = np.random.RandomState(5), Threads()
        for name, mount in mounts.items():
            mount.join(name)
            alone.join(name)
        for _ in range(3):
            parts = {name: generator.standard_normal(ELEMENTS).astype("<f4") for name in "xy"}
            threads.run(
                *(lambda n=name: mounts[n].contribute(parts[n], learner=n) for name in "xy"),
                *(lambda n=name: alone.contribute(parts[n], learner=n) for name in "xy"),
            )
        np.testing.assert_allclose(*(np.frombuffer(m.weights(), "<f4") for m in (a, alone)), rtol=1e-6, atol=1e-7)
        assert a.weights() == b.weights()


def test_learners_of_one_mount_cross_the_network_once(cluster):
    """Their contributions are added up before they are sent."""
    one = cluster()
    proxy = one.proxy()
    shard = one.add_shard(proxy=proxy)
    one.create("m", size=16 * BLOCK, block_size=BLOCK, reducer="sum", learners=4, timeout=200, deterministic=True)
    mount = one.mount()
    blocks = one.partition(shard, "m")["blocks"]
    names = [f"l{i}" for i in range(4)]
    mount.join(*names)
    data = np.ones(16 * BLOCK // 4, "<f4")
    sent = lambda: sum(connection.passed["up"] for connection in proxy.connections)  # noqa: E731
    threads, before = Threads(), sent()
    for step in range(1, 4):
        threads.run(*(lambda n=name: mount.contribute(data, learner=n) for name in names))
        assert only(mount, names[0]) == 4 * step
    assert sent() - before < 1.1 * 3 * blocks * BLOCK, "four learners were not sent as one"
    assert one.coordinator("m")["contributions"] == 12


def test_a_mounts_own_learner_has_a_name_of_its_own(job):
    _, (a, b) = job(learners=2)
    threads = Threads()
    for mount in (a, b):
        os.close(os.open(mount.model / "gradients", os.O_WRONLY))
    threads.run(lambda: give(a, 1, None), lambda: give(b, 2, None))
    assert only(a) == only(b) == 3
    for mount in (a, b):
        assert os.listdir(mount.model / "learners") == [mount.own()]
    assert a.own() != b.own()


def test_a_name_is_used_once_in_all_mounts(job):
    _, (a, b) = job()
    a.join("x")
    fails(errno.EEXIST, b.join, "x")
    a.leave("x")
    b.join("x")


def test_quorum_waits_for_k_on_all_mounts(job):
    one, (a, b) = job(consistency="quorum(2)", learners=3)
    a.join("a"), a.join("b"), b.join("c")
    give(a, 1, "a")
    assert one.coordinator("m")["version"] == 0
    give(b, 10, "c")
    assert only(b, "c") == only(a, "a") == 11
    give(a, 100, "b")
    assert one.coordinator("m")["version"] == 1, "it was late, and counts in the next"
    give(a, 1, "a")
    assert only(a, "b") == 112


def test_grace_waits_a_little_for_the_late_on_all_mounts(job):
    one, (a, b) = job(consistency="grace(2, 2)", learners=3)
    a.join("a"), a.join("b"), b.join("c")
    time.sleep(0.5)
    give(a, 1, "a")
    give(b, 10, "c")
    assert one.coordinator("m")["version"] == 0, "the window is a second at least"
    give(a, 100, "b")
    assert only(b, "c") == only(a, "a") == 111
    give(a, 1, "a")
    give(b, 10, "c")
    eventually(lambda: one.coordinator("m")["version"] == 2)
    give(a, 100, "b")
    assert one.coordinator("m")["version"] == 2, "it was late, and counts in the next"


def test_ssp_bounds_the_lead_on_all_mounts(job):
    _, (a, b) = job(consistency="ssp(1)", learners=2)
    a.join("fast"), b.join("slow")
    give(a, 1, "fast")
    give(a, 1, "fast")
    with impatient(a, 0.5), takes(0.4, 5), raises(errno.ETIMEDOUT):
        give(a, 1, "fast")
    give(b, 10, "slow")
    give(a, 100, "fast")
    assert only(a, "fast") >= 102


def test_async_makes_a_version_a_contribution_on_all_mounts(job):
    one, (a, b) = job(consistency="async", learners=2)
    a.join("a"), b.join("b")
    threads = Threads()

    def learn(mount, name):
        for _ in range(15):
            give(mount, 1, name)

    threads.run(lambda: learn(a, "a"), lambda: learn(b, "b"))
    assert one.coordinator("m")["version"] == 30
    assert np.frombuffer(a.weights(), "<f4")[0] == 30 and a.weights() == b.weights()


def test_deterministic_is_bit_for_bit_on_all_mounts(job):
    """Four learners on two mounts, in whatever order they come."""
    ends, random_order = set(), random.Random(11)
    generator = np.random.RandomState(3)
    parts = [(generator.standard_normal(ELEMENTS) * 10.0**i).astype("<f4") for i in (0, 5, -4, 2)]
    for _ in range(3):
        one, (a, b) = job(learners=4, deterministic=True)
        places = [(a, "a"), (b, "b"), (a, "c"), (b, "d")]
        for mount, name in places:
            mount.join(name)
        threads = Threads()
        for _ in range(2):
            order = random_order.sample(range(4), 4)
            began = []
            for i in order:
                mount, name = places[i]
                began.append(threads.start(mount.contribute, parts[i], 0, name))
                time.sleep(0.01)  # So that they come in this order, about.
            for future in began:
                future.result(300)
        ends.add(a.weights())
        assert a.weights() == b.weights()
        one.clean_up()
    assert len(ends) == 1


def test_weights_written_on_one_mount_appear_whole_on_the_others(job):
    _, (a, b) = job(reducer="assign")
    stop, seen = threading.Event(), set()

    def watch():
        while not stop.is_set():
            seen.add(only(b))

    threads = Threads()
    watcher = threads.start(watch)
    for value in range(1, 21):
        with open(a.model / "weights", "wb") as file:
            file.write(filled(a, value).tobytes())
        assert only(a) == value, "whoever has written it reads it"
        if value % 5 == 0:
            eventually(lambda value=value: value in seen)
    eventually(lambda: only(b) == 20)
    stop.set()
    watcher.result(300)


def test_settings_changed_on_one_mount_show_on_the_others(job):
    one, (a, b) = job(reducer="sgd", learning_rate=1)
    a.control("learning_rate", 0.25)
    assert a.control("learning_rate") == "0.25", "at once on the same mount"
    eventually(lambda: b.control("learning_rate") == "0.25", deadline=2)
    give(b, -4, None)
    assert only(b) == 1
    for mount in (a, b):
        fails(errno.EINVAL, mount.control, "consistency", "quorum(x)")
    b.control("reducer", "sum")
    eventually(lambda: a.control("reducer") == "sum" == one.coordinator("m")["reducer"], deadline=2)


def test_two_models_of_one_registry_are_independent(job):
    one, (mount,) = job(mounts=1)
    one.create("n", size="64KiB", block_size=BLOCK, reducer="sum", shards=1)
    both, single = one.mount(models=["m", "n"]), one.mount(models=["n"])
    assert sorted(os.listdir(both.root)) == ["README", "m", "n"]
    assert sorted(os.listdir(single.root)) == ["README", "n"]
    single.contribute(np.ones(4, "<f4"))
    both.models[0].joinpath("gradients").write_bytes(np.full(ELEMENTS, 2, "<f4").tobytes())
    eventually(lambda: array(both.models[1] / "weights")[0] == 1)
    eventually(lambda: array(mount.model / "weights")[0] == 2)
    assert one.coordinator("m")["version"] == one.coordinator("n")["version"] == 1


def test_status_names_the_shards_and_the_transport(job, request):
    one, (mount,) = job(mounts=1)
    status = mount.status()
    assert {shard["address"] for shard in status["shards"]} == {shard.address for shard in one.shards}
    assert all(shard["connected"] for shard in status["shards"])
    assert sum(shard["blocks"] for shard in status["shards"]) == status["blocks"] == 6
    assert {shard["transport"] for shard in status["shards"]} == {request.node.callspec.params["job"]}
