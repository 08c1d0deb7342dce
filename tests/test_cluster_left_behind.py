"""What strangers leave behind in a shard: bounded, whatever they say and however often they come."""

import contextlib
import os
import socket

from cluster import Cluster
from filetools import eventually
from strangers import BLOCKS
from test_cluster_bad_input import NO_META, NO_PLAN
from wire import Peer

MIB = 1 << 20
CONNECTIONS = 800
# Of those from one address, so many stay until they greet.
KEPT = 64
# Of one that says nothing, in what the shard keeps for it, kernel memory apart.
EACH = 12 << 10


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


def test_what_strangers_leave_behind_is_bounded__idle_connections():
    cluster = Cluster(1)
    try:
        shard = cluster.shards[0]
        host, port = shard.address.rsplit(":", 1)

        def crowd():
            before = connections(shard.pid)
            peers = [socket.create_connection((host, int(port)), timeout=5) for _ in range(CONNECTIONS)]
            eventually(lambda: connections(shard.pid) == before + KEPT)
            most = rss(shard.pid)
            for peer in peers:
                peer.close()
            eventually(lambda: connections(shard.pid) <= before)
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
                peer.say("Assign", number, [(0, BLOCKS)], 60_000, NO_PLAN, NO_META, request=number, epoch=partition["epoch"])
            answers = [peer.hear_of("Refused") for _ in range(4)]
            assert {answer.fields[0] for answer in answers} == {"out of memory"}, answers
            assert "64" in answers[0].fields[1] and [answer.request for answer in answers] == [66, 67, 68, 69]
    finally:
        cluster.clean_up()
