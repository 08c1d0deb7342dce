"""Connections of a cluster that are damaged, slow or lost, as docs/operate/cluster.md promises it."""

import threading
import time

import numpy as np
import pytest
from filetools import BLOCK, Threads, array, eventually, give, only, takes
from test_cluster_failures import begun, in_a_block, once, proxied


@pytest.mark.parametrize("way, harm", [("up", "reset"), ("down", "cut short"), ("up", "spoil"), ("down", "spoil")])
def test_damage_on_the_way_is_repaired(cluster, way, harm):
    """A connection that is reset in mid-block, or brings a wrong byte: noticed, and repaired by a new one."""
    one, proxies = proxied(cluster)
    mount = begun(one)

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


@pytest.mark.parametrize("role, way", [("control", "up"), ("control", "down"), ("coordinator", "up"), ("coordinator", "down")])
def test_damage_on_the_way_is_repaired__of_messages(cluster, role, way):
    """The end that finds the damage ends the connection, and does nothing else: no request takes it for its answer."""
    one, proxies = proxied(cluster)
    mount = begun(one)

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


@pytest.mark.parametrize("way, crumbs, one", [("up", True, True), ("down", False, False)], ids=["crumbs", "silence"])
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
