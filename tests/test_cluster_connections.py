"""Which connections a cluster's blocks go over, as docs/operate/cluster.md promises it."""

import numpy as np
from filetools import BLOCK, Threads, array, eventually, takes

SIZE = 64 * BLOCK
ELEMENTS = SIZE // 4


def pair(cluster):
    """A model of two learners on one shard behind a proxy, each learner with a mount of its own."""
    one = cluster(0)
    proxy = one.proxy()
    one.add_shard(proxy=proxy)
    one.create("m", size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=200, lease=15)
    mounts = [one.mount(), one.mount()]
    for mount, name in zip(mounts, "ab"):
        mount.join(name)
    return proxy, mounts


def step(mounts, total):
    gradients = np.ones(ELEMENTS, "<f4")
    give = [lambda mount=mount, name=name: mount.contribute(gradients, learner=name) for mount, name in zip(mounts, "ab")]
    Threads().run(*give)
    for mount, name in zip(mounts, "ab"):
        values = array(mount.place(name) / "weights")
        assert (values == total).all(), sorted(set(values.tolist()))


def of_blocks(proxy):
    """Connections for blocks, by client, with the bytes that went up."""
    found = {}
    for connection in list(proxy.connections):
        if connection.role == "data":
            found.setdefault(connection.client, []).append(connection)
    return found


def test_clients_of_one_shard_use_a_connection_each(cluster):
    """It has two threads; with two clients one connection of each is busy, and what both send is right."""
    proxy, mounts = pair(cluster)
    eventually(lambda: sorted(map(len, of_blocks(proxy).values())) == [2, 2])
    step(mounts, 2)
    before = {connection: connection.passed["up"] for of in of_blocks(proxy).values() for connection in of}
    for total in (4, 6, 8):
        step(mounts, total)
    for connections in of_blocks(proxy).values():
        sent = sorted(connection.passed["up"] - before[connection] for connection in connections)
        assert sent[0] < 4096 and sent[1] > 3 * SIZE, sent


def test_a_resting_connection_is_used_when_the_busy_one_hangs(cluster):
    """Nothing passes on the connections that are used any more, though they stay: the others do the work."""
    proxy, mounts = pair(cluster)
    eventually(lambda: sorted(map(len, of_blocks(proxy).values())) == [2, 2])
    step(mounts, 2)
    step(mounts, 4)
    busy = {max(of, key=lambda connection: connection.passed["up"]) for of in of_blocks(proxy).values()}
    assert len(busy) == 2
    proxy.hold(lambda connection: connection in busy)
    try:
        with takes(0, 6):
            step(mounts, 6)
    finally:
        proxy.release()
    step(mounts, 8)
