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
from filetools import BLOCK, Threads, array, eventually, finish, go, hear, outcome, program, raises, shows, takes
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


def give(mount, value, learner=None):
    mount.contribute(np.full(ELEMENTS, value, "<f4"), learner=learner)


def only(mount, learner=None):
    values = array(mount.place(learner) / "weights")
    assert (values == values[0]).all(), f"torn: {sorted(set(values.tolist()))}"
    return values[0]


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
    a, b = one.mount(), one.mount()
    a.join("a"), b.join("b")
    child = program(WRITER, a.place("a") / "gradients")
    hear(child)
    child.kill()
    child.communicate(timeout=300)
    eventually(lambda: "a" not in os.listdir(a.model / "learners"))
    give(b, 1, "b")
    assert only(b, "b") == 1, "the other goes on, and nothing of the killed one counts"


def test_a_killed_mount_holds_the_others_up_for_the_lease_alone(cluster):
    """Its learners are gone after it; it can be mounted again, and learn under the same names."""
    one = model(cluster(2), learners=2)
    a, b = one.mount(), one.mount()
    a.join("a"), b.join("b")
    Threads().run(lambda: give(a, 1, "a"), lambda: give(b, 1, "b"))
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
            Threads().run(lambda: give(again, 100, "a"), lambda: give(b, 100, "b"))
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


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("harm", ["reset", "spoil", "cut short"])
def test_damage_on_the_way_is_repaired(cluster, way, harm):
    """A connection that is reset in mid-block, or brings a wrong byte: noticed, and repaired by a new one."""
    one, proxies = proxied(cluster)
    mount = one.mount()
    give(mount, 1)
    assert only(mount) == 1

    def spoil(data):
        return data[:-7] + bytes([data[-7] ^ 0x10]) + data[-6:]

    harms = {"reset": lambda data: None, "spoil": spoil, "cut short": lambda data: data[: len(data) // 2]}
    rules = [once(in_a_block(way), harms[harm]) for _ in proxies]
    for proxy, (rule, _) in zip(proxies, rules):
        proxy.rule = rule
    with takes(0, 8):
        give(mount, 10)
        assert only(mount) == 11
    assert all(done.is_set() for _, done in rules)
    if harm == "spoil":
        found = "refused by the shard: checksum of the " if way == "up" else "checksum of the "
        assert found in mount.stderr(), mount.stderr()
        assert any(found in shard.get("connection_lost_because", "") for shard in mount.status()["shards"])
    give(mount, 100)
    assert only(mount) == 111


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("role", ["control", "coordinator"])
def test_damage_on_the_way_is_repaired__of_messages(cluster, role, way):
    """The end that finds the damage ends the connection, and does nothing else: no request takes it for its answer."""
    one, proxies = proxied(cluster)
    mount = one.mount()
    give(mount, 1)
    assert only(mount) == 1

    def spoil(data):
        return data[:-1] + bytes([data[-1] ^ 0x10])

    rules = [once(lambda connection, direction, _: connection.role == role and direction == way, spoil) for _ in proxies]
    for proxy, (rule, _) in zip(proxies, rules):
        proxy.rule = rule
    with takes(0, 8):
        give(mount, 10)
        assert only(mount) == 11
    assert any(done.is_set() for _, done in rules)
    give(mount, 100)
    assert only(mount) == 111
    assert mount.status()["state"] == "running" and one.coordinator("m")["contributions"] == 3


class BlackHole:
    """A rule: of the next block, on connections that there are, the first part passes, and nothing more ever. With
    `crumbs`, what is short does: pings, and questions about the blocks. With `one`, that befalls one of the connections
    that blocks go over; else all over which some go at once."""

    AT_ONCE = 0.7
    LOST = 9_000  # At least, of the block that is cut: more than crumbs fill up before its connection is given up.

    def __init__(self, proxy, way, crumbs, one):
        self.way, self.crumbs, self.one = way, crumbs, one
        self.there = [connection for connection in list(proxy.connections) if connection.role == "data"]
        self.stuck, self.swallowed, self.since = [], 0, None
        self._lock = threading.Lock()

    def __call__(self, connection, direction, data):
        if direction != self.way or connection not in self.there:
            return data
        with self._lock:
            if connection in self.stuck:
                if self.crumbs and len(data) < 500:
                    return data
                self.swallowed += len(data)
                return b""
            over = self.stuck and (self.one or time.monotonic() > self.since + self.AT_ONCE)
            cut = self._cut(data) if in_a_block(self.way)(connection, direction, data) and not over else None
            if cut is not None:
                self.since = self.since or time.monotonic()
                self.stuck.append(connection)
                self.swallowed += len(data) - cut
                return data[:cut]
        return data

    def _cut(self, data):
        """A place in the payload of one block, all of whose elements are equal, with `LOST` of its bytes behind it."""
        for cut in range(1_000, len(data) - self.LOST, 1_000):
            around = data[cut - 100 : cut + self.LOST]
            if around[4:] == around[:-4]:
                return cut
        return None


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("crumbs", [False, True], ids=["silence", "crumbs"])
@pytest.mark.parametrize("one", [True, False], ids=["one", "all"])
def test_a_block_of_which_the_rest_never_comes_is_sent_again(cluster, way, crumbs, one):
    """Bytes are lost in the middle of a stream, by a relay that does not say so. What follows them, pings too, is taken
    for the rest of the block: such a connection is never silent, and yet is replaced soon."""
    world, proxies = proxied(cluster)
    mount = world.mount()
    give(mount, 1)
    assert only(mount) == 1
    holes = [BlackHole(proxy, way, crumbs, one) for proxy in proxies]
    for proxy, hole in zip(proxies, holes):
        proxy.rule = hole
    with takes(2, 5.5):
        give(mount, 10)
        assert only(mount) == 11
    assert all(hole.stuck and hole.swallowed for hole in holes)
    log = mount.stderr() + "".join(shard.stderr() for shard in world.shards)
    assert ", and then not " in log or "closed by the peer" in log, log
    give(mount, 100)
    assert only(mount) == 111


def test_a_slow_connection_lives(cluster):
    """A block takes longer than a peer may be silent, both ways: nobody takes it for lost as long as it moves on."""
    size, rate, piece = 8 * BLOCK, 40_000, 2_000
    one = cluster(0)
    proxy = one.proxy()
    one.add_shard(proxy=proxy)
    one.create("m", size=size, block_size=size, reducer="sum", timeout=120, lease=60)
    mount = one.mount()

    def blocks():
        return [connection for connection in proxy.connections if connection.role == "data"]

    # The model has one block, so there is one.
    eventually(lambda: len(blocks()) == 1)
    there = blocks()

    def slow(connection, direction, data):
        if connection.role != "data":
            return data
        sink = connection.far if direction == "up" else connection.near
        for start in range(0, len(data), piece):
            sink.sendall(data[start : start + piece])
            connection.passed[direction] += len(data[start : start + piece])
            time.sleep(piece / rate)
        return b""

    proxy.rule = slow
    with takes(2 * size / rate - 2, 100):
        mount.contribute(np.ones(size // 4, "<f4"))
        assert array(mount.model / "weights")[-1] == 1
    assert blocks() == there, "a connection was given up"
    assert one.coordinator("m")["contributions"] == 1


def test_delay_is_no_failure(cluster):
    one, proxies = proxied(cluster)
    mount = one.mount()

    def late(connection, direction, data):
        time.sleep(0.02)
        return data

    for proxy in proxies:
        proxy.rule = late
    for step in range(1, 4):
        give(mount, 1)
        assert only(mount) == step


@pytest.mark.parametrize("role", ["control", "data", "coordinator"])
def test_connections_that_are_lost_again_and_again_lose_nothing(cluster, role):
    one, proxies = proxied(cluster, lease=5)
    mount = one.mount()
    stop = threading.Event()

    def disturb():
        while not stop.wait(0.15):
            for proxy in proxies:
                proxy.reset(lambda connection: connection.role == role)

    threads = Threads()
    disturber = threads.start(disturb)
    try:
        for step in range(1, 11):
            give(mount, 1)
            assert only(mount) == step
            time.sleep(0.03)
    finally:
        stop.set()
        disturber.result(300)
    assert one.coordinator("m")["contributions"] == 10


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
    weights = mount.model / "weights"

    def write(value):
        return outcome(weights.write_bytes, np.full(size // 4, value, "<f4").tobytes())

    assert write(1) == "done"
    for value, shard in enumerate(one.shards, 2):
        shard.pause()
        with takes(0.5, 4):
            assert write(10 * value) == "ETIMEDOUT"
        assert only(mount) in (1, value - 1)
        shard.resume()
        eventually(lambda value=value: write(value) == "done", deadline=10)
        assert only(mount) == value
        eventually(lambda value=value: only(other) == value)
    mount.join("a")
    mount.contribute(np.full(size // 4, 7, "<f4"), learner="a")
    assert only(mount, "a") == 7, "contributions are taken as well"


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


def test_delete_cuts_off_whoever_uses_it__also_of_a_job_that_has_failed(cluster):
    one = model(cluster(2), shards=2, timeout=200, lease=30)
    mount = one.mount()
    give(mount, 1)
    assert only(mount) == 1
    victim = next(shard for shard in one.shards if shard is not one.coordinator_shard("m"))
    victim.kill()
    one.add_shard(listen=victim.address)
    has_failed(mount, deadline=15)
    assert "waiting for shard" not in one.run("status").stdout and mount.status()["waits_for_shards"] == []
    eventually(lambda: one.run("delete", "m").returncode == 0, deadline=20)
    model(one)
    # The mount shows the new model of the name.
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


def test_a_killed_coordinator_is_an_error_and_no_hang__of_a_job_that_has_failed(cluster):
    one = model(cluster(3), timeout=200)
    mounts = one.mount(), one.mount()
    give(mounts[0], 1)
    for mount in mounts:
        eventually(lambda mount=mount: only(mount) == 1)
    coordinator = one.coordinator_shard("m")
    lost = next(shard for shard in one.shards[1:] if shard is not coordinator)
    lost.kill()
    one.add_shard(listen=lost.address)
    for mount in mounts:
        has_failed(mount, deadline=20)
    coordinator.kill()
    for mount in mounts:
        eventually(lambda mount=mount: not all(shard["connected"] for shard in mount.status()["shards"]))
        has_failed(mount)
        with takes(0, 1), raises(errno.EIO):
            mount.control("learning_rate", 0.5)
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
    """Also what waits already; also once there is another model of the name."""
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
    coordinator.kill()
    one.add_shard(listen=coordinator.address)
    with takes(0, 12):
        assert waiting.result(300) == "EIO"
        for mount in mounts:
            has_failed(mount, deadline=10)
    # The registry may have to hear of the model first, from the shard that still has a partition of it.
    eventually(lambda: one.run("delete", "m").returncode == 0, deadline=20)
    model(one)
    again = one.mount()
    again.contribute(np.ones(1, "<f4"))
    for mount in mounts:
        eventually(lambda mount=mount: mount.model.exists() and mount.seen() == 1, deadline=20)
        assert mount.stop() == 0


def test_a_coordinator_that_comes_back_empty_has_failed_the_job_on_all_mounts__also_beside_a_failed_write(cluster):
    """The file of the write stays open. Its error is not that of later calls of the learner."""
    one = model(cluster(2), timeout=1, lease=30)
    mount = one.mount()
    give(mount, 1)
    assert only(mount) == 1
    fd = os.open(mount.model / "gradients", os.O_WRONLY)
    os.pwrite(fd, bytes(4), 0)
    assert outcome(os.pwrite, fd, bytes(4), os.stat(fd).st_size) == "EFBIG"
    coordinator = one.coordinator_shard("m")
    coordinator.kill()
    one.add_shard(listen=coordinator.address)
    has_failed(mount, deadline=15)
    assert outcome(os.close, fd) == "EFBIG", "what was refused here is said where it ends"


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
    threads.run(lambda: give(a, 1, "a"), lambda: give(b, 1, "b"))
    for proxy in proxies:
        proxy.hold(lambda connection: connection.client in of_a)
    waiting = [threads.start(give, a, 10, "a"), threads.start(give, b, 10, "b")]
    time.sleep(0.6)
    assert not any(future.done() for future in waiting[:1])
    for proxy in proxies:
        proxy.release()
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
    threads.run(lambda: give(a, 1, "a"), lambda: give(b, 1, "b"))
    with stays(b, "b"):
        for proxy in proxies:
            proxy.hold(lambda connection: connection.client in of_a)
        with takes(0, LEASE + 3):
            give(b, 10, "b")
            assert only(b, "b") == 12
        for proxy in proxies:
            proxy.release()
        eventually(lambda: "a" not in os.listdir(a.model / "learners"), deadline=10)
        assert a.weights() == b.weights()
        a.join("a")
        threads.run(lambda: give(a, 100, "a"), lambda: give(b, 100, "b"))
        assert only(a, "a") == only(b, "b") == 212


def test_below_min_learners_the_job_stops_on_all_mounts(cluster):
    one = model(cluster(2), learners=2, min_learners=2, lease=15)
    a, b = one.mount(), one.mount()
    a.join("a"), b.join("b")
    threads = Threads()
    threads.run(lambda: give(a, 1, "a"), lambda: give(b, 1, "b"))
    a.leave("a")
    eventually(lambda: b.status()["state"] == "stopped", deadline=3)
    with takes(0, 2), raises(errno.ECANCELED):
        give(b, 1, "b")
    # Nobody on this mount waits for it.
    eventually(lambda: only(a) == 2, deadline=3)
    a.join("a")
    eventually(lambda: b.status()["state"] != "stopped", deadline=3)
    threads.run(lambda: give(a, 1, "a"), lambda: give(b, 1, "b"))
    assert only(b, "b") == 4


def test_a_reader_that_is_cut_off_keeps_its_version_and_catches_up(cluster):
    one, proxies = proxied(cluster)
    a = one.mount()
    give(a, 1)
    before = {client for proxy in proxies for client in proxy.clients()}
    reader = one.mount()
    held = {client for proxy in proxies for client in proxy.clients()} - before
    eventually(lambda: only(reader) == 1, deadline=3)
    for proxy in proxies:
        proxy.hold(lambda connection: connection.client in held)
    give(a, 1)
    assert only(a) == 2 and only(reader) == 1
    for proxy in proxies:
        proxy.release()
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
        for proxy in proxies:
            proxy.hold(lambda connection: connection.client in its)

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
        assert array(b.place("b") / "weights")[0] == 1
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
    one = model(cluster(2), learners=2, timeout=200, lease=0)
    a, b = one.mount(), one.mount()
    a.join("slow"), b.join("b")
    began = time.time()
    give(b, 1, "b")
    for mount in (a, b):
        (late,) = eventually(lambda mount=mount: mount.status()["waits_for_learners"])
        assert late["id"] == "slow" and began - 1 < late["since_unix_seconds"] < time.time() - 4
    shown = one.run("status")
    assert "m: waiting for" in shown.stdout and "s for learners: slow" in shown.stdout and shown.returncode == 0
    (job,) = one.status()["jobs"]
    assert job["waits_for_learners"]["learners"] == ["slow"]
    coordinator = one.coordinator_shard("m")
    for log in (a.stderr, b.stderr, coordinator.stderr):
        eventually(lambda log=log: log().count("learners have been waiting for") == 1)
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
    mount = one.mount()
    give(mount, 1)
    assert only(mount) == 1
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
