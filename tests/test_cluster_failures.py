"""What the others see when a part of a cluster fails, as docs/operate/cluster.md promises it."""

import contextlib
import errno
import os
import signal
import threading
import time

import numpy as np
import pytest
from conftest import pause
from filetools import (
    BLOCK, Threads, array, eventually, finish, give, go, hear, killed, only, outcome, program, raises, shows, takes
)
from test_metrics import Metrics

SIZE = 8 * BLOCK + 1236
ELEMENTS = SIZE // 4
LEASE = 1


def model(one, name="m", **settings):
    options = {"size": SIZE, "block_size": BLOCK, "reducer": "sum", "timeout": 15, "lease": LEASE, **settings}
    one.create(name, **options)
    return one


def proxied(cluster, **settings):
    """A model on two shards, all of them behind proxies: the cluster, and the proxies."""
    one = cluster(0)
    proxies = []
    for _ in range(2):
        proxies.append(one.proxy())
        one.add_shard(proxy=proxies[-1])
    return model(one, **settings), proxies


def begun(one):
    """A mount whose own learner has made version 1."""
    mount = one.mount()
    give(mount, 1)
    assert only(mount) == 1
    return mount


def two(one):
    """Two mounts, of which one has joined as `a`, and the other one as `b`."""
    mounts = one.mount(), one.mount()
    for mount, name in zip(mounts, "ab"):
        mount.join(name)
    return mounts


def both(a, b, value):
    """A step of learner `a` on one mount, and of `b` on another."""
    Threads().run(lambda: give(a, value, "a"), lambda: give(b, value, "b"))


def hold(proxies, clients):
    for proxy in proxies:
        proxy.hold(lambda connection: connection.client in clients)


def release(proxies):
    for proxy in proxies:
        proxy.release()


@contextlib.contextmanager
def stays(mount, learner, joins=False):
    """The learner has its gradients open meanwhile: while nobody waits for it, no pause of the test ends its lease."""
    place = mount.join(learner) if joins else mount.place(learner)
    fd = os.open(place / "gradients", os.O_WRONLY)
    try:
        yield
    finally:
        os.close(fd)


def once(matches, harm):
    """A rule for a proxy that does harm to one piece of data; `harm(data)` is what goes on. And whether it has."""
    done = threading.Event()

    def rule(connection, direction, data):
        if not done.is_set() and matches(connection, direction, data):
            done.set()
            return harm(data)
        return data

    return rule, done


def in_a_block(way):
    """Data that is within the payload of a block on its way up or down."""
    return lambda connection, direction, data: (
        connection.role == "data" and direction == way and len(data) > 20_000 and connection.passed[way] > 0
    )


WRITER = """
fd = os.open(argv[0], os.O_WRONLY)
os.pwrite(fd, bytes([0, 0, 128, 66]) * 16384, 0)  # A block of 64.0.
say("written")
wait()
"""


def test_killed_writer_leaves_no_half_step_on_a_network(cluster):
    one = model(cluster(2), learners=2, lease=15)
    a, b = two(one)
    child = program(WRITER, a.place("a") / "gradients")
    hear(child)
    killed(child)
    eventually(lambda: "a" not in os.listdir(a.model / "learners"))
    give(b, 1, "b")
    assert only(b, "b") == 1, "the other goes on, and nothing of the killed one counts"


def test_a_killed_mount_holds_the_others_up_for_the_lease_alone(cluster):
    """Its learners are gone after it; it can be mounted again, and learn under the same names."""
    one = model(cluster(2), learners=2)
    a, b = two(one)
    both(a, b, 1)
    with stays(b, "b"):
        os.kill(a.pid, signal.SIGKILL)
        a.process.wait(300)
        with takes(0, LEASE + 2):
            give(b, 10, "b")
            assert only(b, "b") == 12
        again = one.mount()
        with stays(again, "a", joins=True):
            again.catch_up()
            assert only(again) == 12
            both(again, b, 100)
            assert only(again, "a") == only(b, "b") == 212


def test_a_mount_that_is_idle_for_longer_than_the_lease_stays(cluster):
    one = model(cluster(1))
    mount = one.mount()
    place = mount.join("a")
    fd = os.open(place / "gradients", os.O_WRONLY)
    time.sleep(2.5 * LEASE)
    os.write(fd, np.ones(ELEMENTS, "<f4").tobytes())
    os.close(fd)
    assert only(mount, "a") == 1


def test_a_stopped_shard_holds_requests_up_until_their_deadlines(cluster):
    """Afterwards the job goes on; what timed out counts once or not at all."""
    one = model(cluster(2), timeout=0.7, lease=5)
    mount = one.mount()
    mount.join("a")
    give(mount, 1, "a")
    assert only(mount, "a") == 1
    for shard in one.shards:
        shard.pause()
        before = only(mount)
        with takes(0.5, 4):
            assert outcome(give, mount, 10, "a") in ("ETIMEDOUT", "EBUSY")
        assert only(mount) == before, "weights that are here stay readable"
        shard.resume()
        ends = []

        def taken():
            ends.append(outcome(give, mount, 100, "a"))
            return ends[-1] == "done"

        eventually(taken, deadline=10)
        give(mount, 1000, "a")
        now = eventually(lambda: (value := only(mount, "a")) > before + 1000 and value)
        # Of those that timed out, each may have been taken, once.
        tens, hundreds = divmod(now - before - 1100, 100)[::-1]
        assert tens in (0, 10) and 0 <= hundreds < len(ends), (before, now, ends)


def test_a_stopped_shard_holds_requests_up_until_their_deadlines__also_writes_of_new_weights(cluster):
    # More than the buffers between a mount and a shard can hold.
    size = 16 << 20
    one = model(cluster(2), size=size, timeout=0.7, lease=5, reducer="assign")
    mount, other = one.mount(), one.mount()
    write = lambda value: outcome((mount.model / "weights").write_bytes, np.full(size // 4, value, "<f4").tobytes())  # noqa: E731
    assert write(1) == "done"
    for value, shard in enumerate(one.shards, 2):
        with shard.paused(), takes(0.5, 4):
            assert write(10 * value) == "ETIMEDOUT"
        assert only(mount) in (1, value - 1)
        eventually(lambda value=value: write(value) == "done", deadline=10)
        assert only(mount) == value
        eventually(lambda value=value: only(other) == value)


def test_a_shard_that_was_stopped_for_longer_than_the_lease_lets_nobody_go(cluster):
    one = model(cluster(2), timeout=200)
    mount = one.mount()
    place = mount.join("a")
    give(mount, 1, "a")
    assert only(mount, "a") == 1
    fd = os.open(place / "gradients", os.O_WRONLY)
    for shard in one.shards:
        shard.pause()
    time.sleep(1.5 * LEASE)
    for shard in one.shards:
        shard.resume()
    os.write(fd, np.ones(ELEMENTS, "<f4").tobytes())
    os.close(fd)
    assert only(mount, "a") == 2


def test_a_killed_shard_is_an_error_and_no_hang(cluster):
    """Models that it has no partition of go on."""
    one = model(cluster(3), shards=3, timeout=1, lease=15)
    one.create("n", size=BLOCK, block_size=BLOCK, reducer="sum", shards=1)
    mount = one.mount(models=["m"])
    other = one.mount(models=["n"])
    mount.join("a")
    give(mount, 1, "a")
    assert only(mount, "a") == 1
    asked = ((shard, one.ask(shard)["models"]) for shard in one.shards)
    victim = next(shard for shard, models in asked if not models[0]["coordinator"] and len(models) == 1)
    victim.kill()
    with takes(0, 4):
        assert outcome(give, mount, 1, "a") in ("ETIMEDOUT", "EIO")
    with takes(0, 2):
        assert only(mount) == 1
    other.contribute(np.ones(4, "<f4"))
    assert array(other.model / "weights")[0] == 1
    status = mount.status()
    lost = [shard for shard in status["shards"] if not shard["connected"]]
    assert [shard["address"] for shard in lost] == [victim.address]
    shown = one.run("status").stdout
    assert f"shard {victim.number}" in shown and "unreachable" in shown or "cannot be reached" in shown, shown
    # A new one at the same address has none of its blocks, and says so: the job has failed.
    one.add_shard(listen=victim.address)
    eventually(lambda: outcome(give, mount, 1, "a") == "EIO", deadline=10)
    assert only(mount) == 1
    # The coordinator tells of the job's state now and then.
    eventually(lambda: mount.status()["state"] == "failed", deadline=5)
    assert "waiting for shard" not in one.run("status").stdout and mount.status()["waits_for_shards"] == []
    # It is deleted as others are, and the mount shows the new model of the name.
    eventually(lambda: one.run("delete", "m").returncode == 0, deadline=20)
    model(one)
    eventually(lambda: shows(mount.model, 0), deadline=20)
    give(mount, 1)
    assert mount.stop() == 0


def test_a_killed_coordinator_is_an_error_and_no_hang(cluster):
    one = model(cluster(2), timeout=1)
    mount = one.mount()
    give(mount, 1)
    # A taken step may be in no version that is here, and an open would wait for it in vain.
    assert only(mount) == 1
    one.coordinator_shard("m").kill()
    with takes(0, 4):
        assert outcome(give, mount, 1) in ("ETIMEDOUT", "EIO")
    with takes(0, 4):
        assert outcome(mount.join, "x") in ("ETIMEDOUT", "EIO")
        assert outcome(mount.control, "learning_rate", 1) in ("ETIMEDOUT", "EIO")
    assert array(mount.model / "weights")[0] == 1
    with takes(0, 8):
        assert mount.stop() == 0


def has_failed(mount, **waits):
    eventually(lambda: mount.status()["state"] == "failed", **waits)
    with takes(0, 1), raises(errno.EIO):
        give(mount, 1)
    with takes(0, 1), raises(errno.EIO):
        mount.join("y")
    assert array(mount.model / "weights")[0] == 1, "weights that are here stay readable"


@pytest.mark.parametrize("registry", ["in it", "elsewhere"])
def test_a_coordinator_that_comes_back_empty_has_failed_the_job_on_all_mounts(cluster, registry):
    """Also what waits already, and beside a failed write; also once there is another model of the name."""
    one = model(cluster(2), timeout=200, lease=30, learners=2)
    mounts = one.mount(), one.mount()
    for mount, name in zip(mounts, "ab"):
        mount.join(name)
    Threads().run(*(lambda mount=mount, name=name: give(mount, 0.5, name) for mount, name in zip(mounts, "ab")))
    for mount in mounts:
        eventually(lambda mount=mount: only(mount) == 1)
    coordinator = one.coordinator_shard("m")
    if registry == "elsewhere":
        one.run("drain", coordinator.number)
        coordinator = one.coordinator_shard("m")
    assert (coordinator.address == one.registry) == (registry == "in it")
    give(mounts[0], 1, "a")
    waiting = Threads().start(outcome, array, mounts[0].place("a") / "weights")
    time.sleep(0.3)
    fd = os.open(mounts[1].model / "gradients", os.O_WRONLY)
    assert outcome(os.pwrite, fd, bytes(4), SIZE) == "EFBIG"
    coordinator.kill()
    one.add_shard(listen=coordinator.address)
    with takes(0, 12):
        assert waiting.result(300) == "EIO"
        for mount in mounts:
            has_failed(mount, deadline=10)
    assert outcome(os.close, fd) == "EFBIG", "what was refused here is said where it ends"
    # The registry may have to hear of the model first, from the shard that still has a partition of it.
    eventually(lambda: one.run("delete", "m").returncode == 0, deadline=20)
    model(one)
    again = one.mount()
    again.contribute(np.ones(1, "<f4"))
    for mount in mounts:
        eventually(lambda mount=mount: mount.model.exists() and mount.seen() == 1, deadline=20)
        assert mount.stop() == 0


def test_a_coordinator_that_comes_back_empty_has_failed_the_job_on_all_mounts__also_where_it_was_never_met(cluster):
    one = model(cluster(2), shards=1, timeout=200, lease=30)
    away, other = one.mount(), one.mount()
    give(away, 1)
    for mount in (away, other):
        eventually(lambda mount=mount: only(mount) == 1)
    pause(away.pid)
    done = one.run("drain", one.coordinator_shard("m").number)
    assert done.returncode == 0, done.stderr
    coordinator = one.coordinator_shard("m")
    coordinator.kill()
    one.add_shard(listen=coordinator.address)
    has_failed(other, deadline=10)
    os.kill(away.pid, signal.SIGCONT)
    has_failed(away, deadline=15)


def test_a_partition_that_heals_loses_nothing(cluster):
    """Shorter than the lease: as if it had been slow. The other mount waits for it."""
    one, proxies = proxied(cluster, learners=2, lease=4)
    a = one.mount()
    of_a = proxies[0].clients()
    b = one.mount()
    a.join("a"), b.join("b")
    threads = Threads()
    both(a, b, 1)
    hold(proxies, of_a)
    waiting = [threads.start(give, a, 10, "a"), threads.start(give, b, 10, "b")]
    time.sleep(0.6)
    assert not any(future.done() for future in waiting[:1])
    release(proxies)
    for future in waiting:
        future.result(300)
    assert only(a, "a") == only(b, "b") == 22


def test_a_partition_for_longer_than_the_lease_excludes(cluster):
    """The others go on. A learner that comes back gets the error that it is out of the job, and joins again."""
    one, proxies = proxied(cluster, learners=2, timeout=3)
    a = one.mount()
    of_a = proxies[0].clients()
    b = one.mount()
    a.join("a"), b.join("b")
    threads = Threads()
    both(a, b, 1)
    with stays(b, "b"):
        hold(proxies, of_a)
        with takes(0, LEASE + 3):
            give(b, 10, "b")
            assert only(b, "b") == 12
        release(proxies)
        eventually(lambda: "a" not in os.listdir(a.model / "learners"), deadline=10)
        assert a.weights() == b.weights()
        a.join("a")
        both(a, b, 100)
        assert only(a, "a") == only(b, "b") == 212


def test_below_min_learners_the_job_stops_on_all_mounts(cluster):
    one = model(cluster(2), learners=2, min_learners=2, lease=15)
    a, b = two(one)
    threads = Threads()
    both(a, b, 1)
    a.leave("a")
    eventually(lambda: b.status()["state"] == "stopped", deadline=3)
    with takes(0, 2), raises(errno.ECANCELED):
        give(b, 1, "b")
    # Nobody on this mount waits for it.
    eventually(lambda: only(a) == 2, deadline=3)
    a.join("a")
    eventually(lambda: b.status()["state"] != "stopped", deadline=3)
    both(a, b, 1)
    assert only(b, "b") == 4


def test_a_reader_that_is_cut_off_keeps_its_version_and_catches_up(cluster):
    one, proxies = proxied(cluster)
    a = one.mount()
    give(a, 1)
    before = {client for proxy in proxies for client in proxy.clients()}
    reader = one.mount()
    held = {client for proxy in proxies for client in proxy.clients()} - before
    eventually(lambda: only(reader) == 1, deadline=3)
    hold(proxies, held)
    give(a, 1)
    assert only(a) == 2 and only(reader) == 1
    release(proxies)
    eventually(lambda: only(reader) == 2, deadline=6)


def test_learners_that_end_while_the_network_is_down_leave(cluster):
    """The daemon ends in good time, too."""
    one, proxies = proxied(cluster, timeout=1, lease=15)
    mount = one.mount()
    child = program("fd = os.open(argv[0], os.O_WRONLY)\nsay('open')\nwait()", mount.join("a") / "gradients")
    hear(child)
    for proxy in proxies:
        proxy.hold()
    with takes(0.5, 4):
        assert outcome(give, mount, 1, "a") == "ETIMEDOUT"
    finish(child)
    with takes(0, 10):
        assert mount.stop() == 0


def test_a_learner_whose_last_process_exits_leaves_after_linger__for_other_mounts_too(cluster):
    one = model(cluster(2), learners=2, timeout=200, lease=20, linger=1)
    a, b = one.mount(), one.mount()
    b.join("b")
    child = program(WRITER, a.join("a") / "gradients")
    hear(child)
    go(child)
    finish(child)
    give(b, 1, "b")
    assert array(b.place("b") / "weights")[0] == 65, "what it left open counts"
    with takes(0.5, 6):
        give(b, 1, "b")
        assert array(b.place("b") / "weights")[0] == 66
    eventually(lambda: "a" not in os.listdir(a.model / "learners"))


def cut_off(one, proxies):
    """A mount of which nothing comes through: the mount, and what lets it through again."""
    before = {client for proxy in proxies for client in proxy.clients()}
    mount = one.mount()
    its = {client for proxy in proxies for client in proxy.clients()} - before

    def cut():
        hold(proxies, its)

    def mend():
        for proxy in proxies:
            proxy.reset(lambda connection: connection.client in its)
            proxy.release()

    return mount, cut, mend


def test_a_learner_whose_last_process_exits_leaves_after_linger__also_while_its_mount_is_cut_off(cluster):
    one, proxies = proxied(cluster, learners=2, timeout=200, lease=20, linger=1)
    b = one.mount()
    a, cut, mend = cut_off(one, proxies)
    a.join("a"), b.join("b")
    child = program("fd = os.open(argv[0], os.O_WRONLY)\nsay('open')\nwait()", a.place("a") / "gradients")
    hear(child)
    cut()
    finish(child)
    time.sleep(0.5)
    mend()
    give(b, 1, "b")
    with takes(0, 6):
        assert only(b, "b") == 1
    eventually(lambda: "a" not in os.listdir(a.model / "learners"))


def test_leases_expire__but_not_of_a_learner_that_was_opened_while_its_mount_was_cut_off(cluster):
    one, proxies = proxied(cluster, lease=2)
    a, cut, mend = cut_off(one, proxies)
    a.join("a")
    cut()
    fd = os.open(a.place("a") / "gradients", os.O_WRONLY)
    time.sleep(0.3)
    mend()
    time.sleep(4)
    assert a.place("a").exists()
    os.write(fd, np.ones(ELEMENTS, "<f4").tobytes())
    os.close(fd)
    assert only(a, "a") == 1


def test_after_5_s_of_waiting_it_is_said_who_is_waited_for__on_all_mounts_and_by_the_command(cluster):
    """Those who have not joined are counted, and then the others are named."""
    one = model(cluster(2), learners=2, timeout=200, lease=0)
    mounts = a, b = one.mount(), one.mount()
    b.join("b")
    give(b, 1, "b")
    for mount in mounts:
        eventually(lambda mount=mount: mount.status()["waits_for_more_learners"] == 1)
    eventually(lambda: "s for 1 more to join (control/learners)" in b.stderr())
    a.join("slow")
    for mount in mounts:
        (late,) = eventually(lambda mount=mount: mount.status()["waits_for_learners"])
        assert late["id"] == "slow" and mount.status()["waits_for_more_learners"] == 0
    shown = one.run("status")
    assert "m: waiting for" in shown.stdout and "s for learners: slow" in shown.stdout and shown.returncode == 0
    (job,) = one.status()["jobs"]
    assert job["waits_for_learners"]["learners"] == ["slow"]
    for log in (a.stderr, b.stderr, one.coordinator_shard("m").stderr):
        eventually(lambda log=log: log().count("s for slow") == 1)
    give(a, 1, "slow")
    eventually(lambda: b.status()["waits_for_learners"] == [])
    assert only(b, "b") == 2


@pytest.mark.parametrize("which", ["the coordinator", "another"])
def test_a_job_that_waits_for_a_shard_says_for_which_and_since_when(cluster, which):
    one = model(cluster(3), shards=3, timeout=200, lease=30)
    mount, before = one.mount(metrics="127.0.0.1:0"), time.time()
    give(mount, 1)
    assert only(mount) == 1 and one.run("status").returncode == 0
    assert mount.status()["waits_for_shards"] == []
    # The first one is the registry.
    (first,) = [s for s in one.shards if s.address == one.registry]
    if which == "the coordinator" and one.coordinator_shard("m") is first:
        done = one.run("drain", first.number)
        assert done.returncode == 0, done.stderr
        eventually(lambda: only(mount) == 1)
    coordinator = one.coordinator_shard("m")
    victim = coordinator if which == "the coordinator" else next(s for s in one.shards if s not in (first, coordinator))
    began = time.time()
    victim.kill()
    (away,) = eventually(lambda: mount.status()["waits_for_shards"], deadline=6)
    assert mount.status()["state"] == "waiting"
    assert (away["id"], away["address"]) == (victim.number, victim.address)
    assert before < away["since_unix_seconds"] < time.time() and "refused" in away["because"]
    assert time.time() - began > 1.9
    eventually(lambda: one.run("status").returncode == 3, deadline=6)
    said = f"m: waiting for shard {victim.number} at {victim.address}, not reached for "
    assert said in one.run("status").stdout
    (job,) = one.status()["jobs"]
    assert job["state"] == "waiting" and job["waits_for_shards"][0]["shard"] == victim.number
    assert 1 < job["waits_for_shards"][0]["seconds"] < time.time() - before + 1
    scraped = Metrics(mount)
    assert 2 <= scraped("gradfs_shard_unreachable_seconds", model="m", shard=victim.number) < time.time() - before + 1
    others = [value for labels, value in scraped.all("gradfs_shard_unreachable_seconds")]
    assert sorted(others)[:-1] == [0] * (len(others) - 1)
    logs = [mount.stderr] + ([coordinator.stderr] if victim is not coordinator else [])
    for log in logs:
        eventually(lambda log=log: "which has not been reached for " in log())
    time.sleep(1.5)
    for log in logs:
        assert log().count("which has not been reached for ") == 1, log()


@pytest.mark.parametrize("which", [0, 1])
def test_a_job_that_waits_for_a_shard_goes_on_when_it_is_there_again(cluster, which):
    one, proxies = proxied(cluster, timeout=200, lease=30)
    mount = begun(one)
    target, proxies[which].target = proxies[which].target, "127.0.0.1:1"
    proxies[which].reset()
    eventually(lambda: mount.status()["state"] == "waiting", deadline=6)
    assert [shard["id"] for shard in mount.status()["waits_for_shards"]] == [one.shards[which].number]
    waiting = Threads().start(give, mount, 10)
    time.sleep(0.5)
    assert not waiting.done()
    proxies[which].target = target
    waiting.result(300)
    eventually(lambda: mount.status()["state"] == "running")
    assert mount.status()["waits_for_shards"] == [] and only(mount) == 11
    eventually(lambda: one.run("status").returncode == 0)
