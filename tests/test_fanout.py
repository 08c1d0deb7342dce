"""Mounts that pull versions from each other: what docs/operate/network.md promises of relays."""

import os
import signal
import socket
import threading

import ml_dtypes
import numpy as np
import pytest
from conftest import pause
from filetools import BLOCK, eventually
from patience import Limit
from safetensors.numpy import save_file
from test_metrics import ANY, Metrics
from wire import HEADER_BYTES, PROTOCOL, body, frame

BF16 = ml_dtypes.bfloat16
ELEMENTS = 60 * BLOCK // 2 + 1000
SIZE = 2 * ELEMENTS
LEASE = 120


@pytest.fixture
def job(cluster, tmp_path):
    """Makes a model of bf16 on some shards, a mount that writes it, and mounts that pull from each other."""

    def start(shards=1, relays=4, **options):
        values = np.random.default_rng(1).standard_normal(ELEMENTS).astype(BF16)
        save_file({"a": values}, tmp_path / "m.safetensors")
        one = cluster(shards)
        one.create("m", model=tmp_path / "m.safetensors", block_size=BLOCK, reducer="assign", lease=LEASE, pull="eager", **options)
        return one, one.mount(transport="tcp"), [one.mount(transport="tcp", via="auto") for _ in range(relays)]

    return start


def via(mount):
    return mount.status()["via"]


def chain(mounts):
    """The mounts in the order in which a version goes through them. Waits until there is such an order."""
    found = []

    def is_chain():
        told = {via(mount)["listens"]: (mount, via(mount)) for mount in mounts}
        next_of = {of["relay"]: mount for mount, of in told.values() if of["relay"] is None or of["connected"]}
        found[:] = [next_of[None]] if None in next_of else []
        while found and (following := next_of.get(via(found[-1])["listens"])) and following not in found:
            found.append(following)
        return len(found) == len(mounts)

    eventually(is_chain)
    return found


def values_of(version):
    """A hundredth of the first version's values have changed with each version."""
    values = np.random.default_rng(1).standard_normal(ELEMENTS).astype(BF16)
    bits = values.view("<u2")
    for number in range(1, version + 1):
        bits[np.random.default_rng(number).integers(ELEMENTS, size=ELEMENTS // 100)] ^= 1
    return values


def publish(mount, version):
    data = values_of(version).tobytes()
    fd = os.open(mount.model / "publish", os.O_WRONLY)
    assert os.write(fd, data) == len(data)
    os.close(fd)


def shows(mounts, version):
    for mount in mounts:
        eventually(lambda: mount.seen() == version)
        assert (mount.model / "weights").read_bytes() == values_of(version).tobytes(), (mount.pid, version)


def sent(one):
    """Bytes that all shards have sent to mounts."""
    return sum(one.partition(shard, "m")["payload"]["pulled_bytes"] for shard in one.shards)


def replaced(mounts):
    """Most bytes that mounts took from shards, though they had a relay."""
    return BLOCK * sum(via(mount)["blocks_from_shards_instead"] for mount in mounts)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_shard_sends_a_version_once_to_mounts_that_pull_from_each_other(job, shards):
    one, writes, mounts = job(shards, delta="off")
    ordered = chain(mounts)
    before, versions = sent(one), 10
    for version in range(1, versions + 1):
        publish(writes, version)
        shows(mounts, version)
    instead = replaced(mounts)
    # The mount that has published shows its own buffer.
    assert sent(one) - before <= versions * SIZE + instead
    for mount in ordered[:-1]:
        assert via(mount)["relayed_bytes"] + instead >= versions * SIZE and via(mount)["followers"]
    assert via(ordered[-1])["relayed_bytes"] == 0


def test_what_has_changed_goes_through_all_mounts_that_pull_from_each_other(job):
    one, writes, mounts = job(2)
    ordered = chain(mounts)
    publish(writes, 1)
    shows(mounts, 1)
    before, instead, versions = sent(one), replaced(mounts), 10
    relayed = [via(mount)["relayed_bytes"] for mount in ordered]
    patched = [mount.status()["payload"]["pull_patched_bytes"] for mount in ordered]
    for version in range(2, versions + 2):
        publish(writes, version)
        shows(mounts, version)
    instead = replaced(mounts) - instead
    assert sent(one) - before <= 0.2 * versions * SIZE + instead
    for mount, bytes_before, patched_before in zip(ordered, relayed, patched):
        assert via(mount)["relayed_bytes"] - bytes_before <= 0.2 * versions * SIZE + instead
        assert mount.status()["payload"]["pull_patched_bytes"] - patched_before >= 0.9 * versions * SIZE


@pytest.mark.parametrize("dies", ["killed", "silent"])
def test_a_relay_that_dies_in_the_middle_of_a_version_is_passed_by(job, dies):
    one, writes, mounts = job(2)
    first, middle, last, end = chain(mounts)
    publish(writes, 1)
    shows(mounts, 1)
    # It takes requests, and sends nothing.
    pause(middle.pid)
    others, limit = [first, last, end], Limit(LEASE)
    publish(writes, 2)
    shows([first], 2)
    assert last.seen() in (1, 2) and end.seen() in (1, 2)
    if dies == "killed":
        middle.process.kill()
    shows(others, 2)
    assert not limit.over(), "before the lease"
    assert replaced(others) > 0
    if dies == "killed":
        chain(others)
    else:
        # It is no relay of others until it is heard of again.
        eventually(lambda: via(last)["relay"] != via(first)["relay"])
        middle.process.send_signal(signal.SIGCONT)
        shows([middle], 2)
    for version in (3, 4):
        publish(writes, version)
        shows(others, version)


@pytest.mark.parametrize("answer", ["refuses", "welcomes"])
def test_a_relay_with_an_older_release_is_passed_by(job, answer):
    one, writes, _ = job(relays=0)
    older = PROTOCOL - 1
    answers = {"refuses": body("Refused", 1, older, PROTOCOL), "welcomes": body("Welcome", older, 0, 1, 10_000)}
    greeted, listener = [], socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                greeted.append(peer.recv(HEADER_BYTES))
                peer.sendall(frame(answers[answer], epoch=1))
                peer.settimeout(5)
                while peer.recv(4096):
                    pass

    threading.Thread(target=serve, daemon=True).start()
    mount = one.mount(transport="tcp", via="127.0.0.1:%d" % listener.getsockname()[1])
    eventually(lambda: len(greeted) > 1)
    for version in (1, 2, 3):
        publish(writes, version)
        shows([mount], version)
    assert not via(mount)["connected"] and via(mount)["listens"] is None
    assert f"{older}" in mount.stderr() and "protocol" in mount.stderr(), mount.stderr()
    listener.close()


def test_a_mount_that_shows_a_shards_memory_serves_others(job):
    one, writes, _ = job(relays=0)
    shows_memory = one.mount(transport="shm", via="auto")
    others = [one.mount(transport="tcp", via=via(shows_memory)["listens"]) for _ in range(2)]
    eventually(lambda: all(via(mount)["connected"] for mount in others))
    for version in range(1, 9):
        publish(writes, version)
        if version % 4 == 0:
            shows([shows_memory, *others], version)
    relayed = via(shows_memory)["relayed_bytes"]
    assert relayed > 0 and not via(shows_memory)["connected"]


def test_a_mount_pulls_from_the_one_that_it_is_told_by_hand(job):
    one, writes, [first] = job(relays=1)
    second = one.mount(transport="tcp", via=via(first)["listens"], via_listen="127.0.0.1:0")
    third = one.mount(transport="tcp", via=via(second)["listens"])
    mounts = [first, second, third]
    eventually(lambda: via(second)["connected"] and via(third)["connected"])
    before = sent(one)
    for version in (1, 2, 3):
        publish(writes, version)
        shows(mounts, version)
    assert sent(one) - before <= 3 * SIZE + replaced(mounts)
    assert via(first)["relay"] is None and via(third)["listens"] is None
    first.stop()
    publish(writes, 4)
    shows(mounts[1:], 4)


def test_mounts_of_one_zone_pull_from_each_other(job):
    one, writes, _ = job(relays=0)
    mounts = [one.mount(transport="tcp", via="auto", zone=zone) for zone in "abab"]
    ordered = chain(mounts)
    zones = ["abab"[mounts.index(mount)] for mount in ordered]
    assert zones in (["a", "a", "b", "b"], ["b", "b", "a", "a"])


def test_an_address_for_other_mounts_that_other_hosts_reach_must_be_meant(job, tmp_path):
    one, _, _ = job(relays=0)
    (tmp_path / "mnt").mkdir()
    done = one.run("mount", tmp_path / "mnt", "--via", "auto", "--via-listen", "0.0.0.0:0")
    assert done.returncode == 1 and "no authentication" in done.stderr and "--insecure" in done.stderr
    taken = socket.create_server(("127.0.0.1", 0))
    done = one.run("mount", tmp_path / "mnt", "--via", "auto", "--via-listen", "127.0.0.1:%d" % taken.getsockname()[1])
    assert done.returncode == 1 and "cannot pull from this one" in done.stderr, done.stderr
    assert not os.path.ismount(tmp_path / "mnt")
    mount = one.mount(transport="tcp", via="auto", via_listen="0.0.0.0:0", insecure=True)
    assert via(mount)["listens"].startswith("127.0.0.1:")


def test_the_status_shows_the_chain(job):
    one, _, mounts = job(relays=3)
    ordered = [via(mount)["listens"] for mount in chain(mounts)]
    shown = f"versions go shards -> {' -> '.join(ordered)}\n"
    eventually(lambda: shown in one.run("status").stdout)
    relays = one.coordinator("m")["relays"]
    assert [relay["address"] for relay in relays] == ordered
    assert [relay["via"] for relay in relays] == [None, *ordered[:-1]]


def test_metrics_tell_of_relays(job):
    _, writes, mounts = job(relays=0)
    one = writes.cluster
    mounts = [one.mount(transport="tcp", via="auto", metrics=ANY) for _ in range(2)]
    ordered = chain(mounts)
    publish(writes, 1)
    shows(mounts, 1)
    for mount in ordered:
        status, seen = via(mount), Metrics(mount)
        assert seen("gradfs_relay_connected", model="m") == status["connected"] == (mount is ordered[1])
        assert seen("gradfs_relay_followers", model="m") == len(status["followers"])
        assert seen("gradfs_relayed_bytes_total", model="m") == status["relayed_bytes"]
        assert seen("gradfs_relay_replaced_blocks_total", model="m") == status["blocks_from_shards_instead"]
    assert "via" not in writes.status()
