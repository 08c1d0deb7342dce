"""Where shards are met: over IPv6, and on a Unix socket whose name another process has taken."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from cluster import Cluster, Shard
from conftest import MountFailed
from filetools import BLOCK, Threads, array, takes

NOBODY = 65534
# Binds the name of a shard's socket and listens; then, by its argument, answers nothing or hangs up on all.
SQUATTER = """
import socket, sys
name, way = sys.argv[1:]
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(chr(0) + name)
listener.listen(128)
print("listens", flush=True)
kept = []
while True:
    near, _ = listener.accept()
    kept.append(near) if way == "mute" else near.close()
"""


@contextlib.contextmanager
def squatter(address, way="mute", user=None):
    """A process that has taken the name of the socket of a shard at this address."""
    command = [sys.executable, "-c", SQUATTER, f"gradfs/{address}", way]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, user=user, cwd="/")
    try:
        assert process.stdout.readline() == "listens\n"
        yield process
    finally:
        process.kill()
        process.wait(300)


def trains(mount, steps=2):
    for step in range(1, steps + 1):
        mount.contribute(np.ones(3 * BLOCK // 4, "<f4"))
        assert (array(mount.model / "weights") == step).all()


@pytest.mark.parametrize("way, user", [("mute", None), ("rude", None), ("mute", NOBODY)], ids=["mute", "rude", "foreign"])
def test_a_process_that_has_taken_a_shards_name_keeps_no_mount_out(cluster, address, way, user):
    """With `--transport auto` its mounts use TCP, and say why; with `shm` they say why they cannot mount."""
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    one = cluster(0)
    reason = f"user {NOBODY} has bound" if user else "no answer within" if way == "mute" else "hangs up"
    with squatter(address, way, user):
        shard = one.add_shard(listen=address)
        assert "no shm on this host" in shard.stdout()
        one.create("m", size=3 * BLOCK, block_size=BLOCK, reducer="sum")
        with takes(0, 12):
            mount = one.mount(transport="auto")
            trains(mount)
        (seen,) = mount.status()["shards"]
        assert seen["transport"] == "tcp" and reason in seen["not_shm_because"], seen
        assert "using TCP" in mount.stderr() and reason in mount.stderr(), mount.stderr()
        with takes(0, 15), pytest.raises(MountFailed) as failed:
            one.mount(transport="shm")
        assert reason in str(failed.value), failed.value


def test_a_shard_that_is_stopped_for_a_moment_is_waited_for(cluster):
    """Who does not answer at once may be the shard itself: then blocks go through shared memory after all."""
    one = cluster(2, size=3 * BLOCK, block_size=BLOCK, reducer="sum", lease=30)
    (other,) = [shard for shard in one.shards if shard.address != one.registry]
    threads = Threads()
    other.pause()
    mounting = threads.start(lambda: one.mount(transport="auto"))
    # Once is waited for 2 s.
    time.sleep(2.7)
    assert not mounting.done()
    other.resume()
    mount = mounting.result(300)
    trains(mount)
    assert {shard["transport"] for shard in mount.status()["shards"]} == {"shm"}


@pytest.fixture
def over_ipv6():
    """A cluster whose registry, of its own, and shards are at addresses of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as why:
        pytest.skip(f"this host has no ::1: {why}")
    one = Cluster(0)
    try:
        one.shards.append(Shard(command="registry", listen="[::1]:0"))
        one.registry = one.shards[0].address
        for _ in range(2):
            one.add_shard(listen="[::1]:0")
        yield one
    finally:
        one.clean_up()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_cluster_over_ipv6(over_ipv6, transport):
    one = over_ipv6
    assert all(shard.address.startswith("[::1]:") for shard in one.shards)
    one.create("m", size=3 * BLOCK, block_size=BLOCK, reducer="sum", shards=2)
    mounts = [one.mount(transport=transport) for _ in range(2)]
    trains(mounts[0])
    mounts[1].catch_up()
    assert (array(mounts[1].model / "weights") == 2).all()
    seen = mounts[0].status()["shards"]
    assert {shard["address"] for shard in seen} == {shard.address for shard in one.shards[1:]}
    assert {shard["transport"] for shard in seen} == {transport}
    shown = one.status()
    assert {shard["address"] for shard in shown["shards"]} >= {shard.address for shard in one.shards[1:]}
    assert "[::1]" in one.run("status").stdout
