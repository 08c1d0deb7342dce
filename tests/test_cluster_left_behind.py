"""What strangers leave behind in a shard: bounded, whatever they say and however often they come."""

import contextlib
import os
import socket
import time

import pytest
from cluster import Cluster
from test_cluster_bad_input import BLOCKS, NO_PLAN, World
from wire import Peer

MIB = 1 << 20
CONNECTIONS = 800
# Of those from one address, so many stay until they greet.
KEPT = 64
# Of one that says nothing, in what the shard keeps for it, kernel memory apart.
EACH = 12 << 10


@pytest.fixture(scope="module")
def world():
    world = World()
    yield world
    world.end()


def rss(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))


def connections(pid):
    """Sockets that the process has."""
    count = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    return count


def until(true, deadline=300):
    end = time.monotonic() + deadline
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_strangers_leave_behind_is_bounded__idle_connections():
    cluster = Cluster(1)
    try:
        shard = cluster.shards[0]
        host, port = shard.address.rsplit(":", 1)

        def crowd():
            before = connections(shard.pid)
            peers = [socket.create_connection((host, int(port)), timeout=5) for _ in range(CONNECTIONS)]
            until(lambda: connections(shard.pid) == before + KEPT)
            most = rss(shard.pid)
            for peer in peers:
                peer.close()
            until(lambda: connections(shard.pid) <= before)
            return most

        started = rss(shard.pid)
        most = crowd()
        assert most - started < KEPT * EACH + 2 * MIB, (most - started) / KEPT
        left = rss(shard.pid)
        for _ in range(3):
            crowd()
        assert rss(shard.pid) - left < 2 * MIB, "each crowd leaves something"
    finally:
        cluster.clean_up()


def test_what_strangers_leave_behind_is_bounded__names(world):
    before = rss(world.coordinator.pid)
    asked = iter(range(1, 10_000))
    with world.peer("control") as peer:
        for at in range(40):
            answer = peer.request("Join", f"{at:0>1000000}", request=next(asked), epoch=world.epoch)
            assert answer.name == "Refused" and answer.fields[0] == "not allowed" and "64" in answer.fields[1]
        for name in ("", ".x", "a/b", "a b", "x" * 65):
            answer = peer.request("Join", name, request=next(asked), epoch=world.epoch)
            assert answer.fields[0] == "not allowed", name
        for name, value in [("x" * 65, "1"), ("learning_rate", "1" * 900_000), ("learning_rate", "y" * 60_000)]:
            answer = peer.request("SetControl", name, value, request=next(asked), epoch=world.epoch)
            assert answer.fields[0] == "Control" and len(answer.fields[1]) <= 1000
    assert rss(world.coordinator.pid) - before < 16 * MIB


def test_what_strangers_leave_behind_is_bounded__writes_of_weights():
    cluster = Cluster(1)
    try:
        cluster.create("m", size=BLOCKS * 65536, block_size=65536, reducer="assign")
        shard = cluster.shards[0]
        partition = cluster.partition(shard, "m")
        with Peer(shard.address) as peer:
            hello = ("m", partition["generation"])
            assert peer.greet("control", *hello, client=7, epoch=partition["epoch"]).name == "Welcome"
            # The first one is granted, and never sent.
            for number in range(1, 70):
                peer.say("Assign", number, [(0, BLOCKS)], 60_000, NO_PLAN, request=number, epoch=partition["epoch"])
            answers = [peer.hear_of("Refused") for _ in range(4)]
            assert {answer.fields[0] for answer in answers} == {"out of memory"}, answers
            assert "64" in answers[0].fields[1] and [answer.request for answer in answers] == [66, 67, 68, 69]
    finally:
        cluster.clean_up()
