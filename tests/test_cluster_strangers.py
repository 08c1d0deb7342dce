"""What strangers within a trusted network can take of a shard and a registry: docs/operate/network.md has the limits in
numbers.
Everything here comes from loopback, as in a cluster on one host."""

import json
import os
import resource
import socket
import time
from contextlib import ExitStack

import numpy as np
import pytest
from cluster import Shard, run
from filetools import BLOCK, eventually, takes
from wire import PROTOCOL, REGISTRY, ROLES, Peer, body, field, frame, varint

NOBODY = 65534
# As docs/operate/network.md says.
STRANGE, GREETED, SHARDS, THREADS, OWN = 64, 512, 1024, 8, 256
ESCAPE = "\x1b[2J"


def connect(address, source="127.0.0.1"):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10, source_address=(source, 0))


def admin(address):
    peer = Peer(address)
    assert peer.greet("admin").name == "Welcome"
    return peer


def registry(peer, what, *fields, request=1, payload=b""):
    return peer.request("Registry", varint(REGISTRY[what]) + field(fields), payload=payload, request=request)


def announcement(address, host="h", lease_ms=3_600_000):
    return (0, address, host, False, "", lease_ms, False)


def is_over(one):
    """Whether the other end has hung up."""
    one.setblocking(False)
    try:
        return one.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_silent_connections_of_one_address_give_way_to_others(cluster):
    """Of those that have not greeted, the newest stay. One that greets is served at once."""
    one = cluster(1)
    address = one.registry
    elsewhere = connect(address, "127.0.0.2")
    crowd = [connect(address) for _ in range(3 * STRANGE)]
    eventually(lambda: sum(map(is_over, crowd)) >= 2 * STRANGE)
    assert not is_over(elsewhere)
    with admin(address) as peer:
        assert peer.request("Status", epoch=0).name == "Text"
    for connection in [*crowd, elsewhere]:
        connection.close()


def test_greeted_connections_of_one_address_leave_places_to_others(cluster):
    one = cluster(1, size=BLOCK, block_size=BLOCK, reducer="sum")
    mount = one.mount(transport="tcp")
    with ExitStack() as stack:
        refused = None
        for _ in range(GREETED + 1):
            peer = stack.enter_context(Peer(one.registry))
            answer = peer.greet("admin")
            if answer.name == "Refused":
                refused = answer
                break
        assert refused is not None and f"{GREETED} connections already" in refused.fields[1], refused
        # Those that are there go on, and so does another address.
        mount.contribute(np.ones(BLOCK // 4, "<f4"))
        hello = frame(body("Hello", PROTOCOL, ROLES["admin"], "", 0, 1))
        other = connect(one.registry, "127.0.0.2")
        other.sendall(hello)
        assert other.recv(1 << 12)[:2] == b"GF" and not is_over(other)
        other.close()
    eventually(lambda: run("status", "--registry", one.registry).returncode == 0)


@pytest.mark.parametrize("most", [400, 700])
def test_connections_leave_descriptors_to_the_process(cluster, most):
    """256, or half of them, if there are few. The mount that is there goes on, and takes memory for versions."""
    one = cluster(1, size=BLOCK, block_size=BLOCK, reducer="sum")
    mount = one.mount()
    pid, left = one.shards[0].pid, most - min(OWN, most // 2)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
    crowd = []
    try:
        for _ in range(most):
            peer = Peer(one.registry)
            crowd.append(peer)
            peer.say("Hello", PROTOCOL, ROLES["admin"], "", 0, 1, epoch=0)
        eventually(lambda: "connections are not accepted" in one.shards[0].stderr())
        for _ in range(3):
            mount.contribute(np.ones(BLOCK // 4, "<f4"))
        assert left - 20 <= descriptors(pid) <= left + 20
    finally:
        for peer in crowd:
            peer.socket.close()
    eventually(lambda: run("status", "--registry", one.registry).returncode == 0)


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid):
    return len(os.listdir(f"/proc/{pid}/task"))


def test_requests_that_wait_share_a_few_threads_and_jobs_go_on(cluster):
    """Snapshots of a model whose other shard does not answer: each of these waits for that."""
    one = cluster(2, size=4 * BLOCK, block_size=BLOCK, reducer="sum")
    coordinator = one.coordinator_shard("m")
    others = [f"other{number}" for number in range(4)]
    for name in others:
        one.create(name, size=BLOCK, block_size=BLOCK, reducer="sum", shards=1)
    silent = next(shard for shard in one.shards if shard is not coordinator)
    mount = one.mount(models=[next(name for name in others if one.coordinator_shard(name) is coordinator)])
    known = one.partition(coordinator, "m")
    before = threads(coordinator.pid)
    with silent.paused():
        peers = [admin(coordinator.address) for _ in range(20)]
        requests = b"".join(
            frame(body("Capture", "m", known["generation"], known["epoch"]), request=number) for number in range(1, 101)
        )
        for peer in peers:
            peer.send(requests)
        # Abandoning what is not there waits for nobody, and has threads left.
        with admin(coordinator.address) as peer:
            assert peer.request("Abandon", 4711, 1).name == "Done"
        assert threads(coordinator.pid) <= before + 2 * THREADS
        with takes(0, 5):
            mount.contribute(np.ones(BLOCK // 4, "<f4"))
        for peer in peers:
            peer.socket.close()
    eventually(lambda: threads(coordinator.pid) <= before + 2, deadline=40)


def test_an_abandoned_attempt_ends_no_other(cluster):
    one = cluster(2, size=BLOCK, block_size=BLOCK, reducer="sum", shards=1)
    mount = one.mount()
    mount.contribute(np.ones(BLOCK // 4, "<f4"))
    here = one.coordinator_shard("m")
    there = next(shard for shard in one.shards if shard is not here)
    generation = one.partition(here, "m")["generation"]
    with admin(there.address) as peer:
        for number, attempt in enumerate([2**64 - 1, 2**63, 1], 1):
            assert peer.request("Abandon", generation, attempt, request=number).name == "Done"
    done = run("drain", here.number, "--registry", one.registry, "--timeout", 20)
    assert done.returncode == 0, done.stderr
    mount.contribute(np.ones(BLOCK // 4, "<f4"))


def test_invented_shards_leave_numbers_to_others(cluster):
    one = cluster(1)
    with admin(one.registry) as peer:
        for number in range(1, SHARDS + 10):
            answer = registry(peer, "Announce", *announcement(f"127.0.0.1:{number}"), request=number)
            assert answer.name == "Registered", answer
    shard = one.add_shard()
    with admin(one.registry) as peer:
        listed = registry(peer, "Shards").fields
    status = {entry["address"] for entry in shards_of(listed)}
    assert {one.registry, shard.address} <= status and len(status) <= SHARDS


def shards_of(reading):
    """The records in the registry's answer."""
    assert reading.number() == 1  # Shards
    for _ in range(reading.number()):
        shard, address, host = reading.number(), reading.text(), reading.text()
        reading.at += 1
        reading.text()
        yield {"shard": shard, "address": address, "host": host}


def test_control_characters_of_strangers_reach_no_terminal(cluster):
    """Not by names and addresses."""
    one = cluster(1)
    with admin(one.registry) as peer:
        for number, fields in enumerate(
            [announcement(f"a{ESCAPE}b:1"), announcement("127.0.0.1:1", host=f"h\nshard 7 at x{ESCAPE}")], 1
        ):
            answer = registry(peer, "Announce", *fields, request=number)
            assert answer.name == "Refused" and "control character" in answer.fields[1], answer
    with admin(one.registry) as peer:
        answer = registry(peer, "Model", f"m{ESCAPE}\n")
        assert answer.name == "Refused", answer
    with Peer(one.registry) as peer:
        answer = peer.greet("control", f"m{ESCAPE}\nERROR forged", 1)
        assert answer.name == "Refused", answer
    eventually(lambda: "turned away" in one.shards[0].stderr())
    said = one.shards[0].stderr()
    assert "\x1b" not in said and "\nERROR" not in said, said


def test_a_listener_that_other_hosts_reach_demands_insecure():
    done = run("shard", "--listen", "0.0.0.0:0", "--advertise", "localhost:0")
    assert done.returncode == 1 and "no authentication" in done.stderr and "--insecure" in done.stderr, done
    done = run("registry", "--listen", "0.0.0.0:0")
    assert done.returncode == 1 and "--insecure" in done.stderr, done
    for command, *more in [("shard", "--advertise", "127.0.0.1:0"), ("registry",)]:
        with Shard("--insecure", *more, listen="0.0.0.0:0", command=command) as shard:
            assert "there is no authentication" in shard.stdout()
    with Shard() as shard:
        assert "authentication" not in shard.stdout()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_user_of_the_host_leaves_shared_memory_to_others(cluster):
    """Connections of user nobody to the shard's socket: root's mount has shared memory nevertheless."""
    one = cluster(1, size=BLOCK, block_size=BLOCK, reducer="sum")
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            crowd = []
            for _ in range(600):
                one_more = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                one_more.connect(f"\0gradfs/{one.registry}")
                crowd.append(one_more)
            os.write(told, b"x")
            time.sleep(60)
        finally:
            os._exit(0)
    try:
        os.close(told)
        assert os.read(ready, 1) == b"x"
        (seen,) = one.mount().status()["shards"]
        assert seen["transport"] == "shm", json.dumps(seen)
    finally:
        os.close(ready)
        os.kill(child, 9)
        os.waitpid(child, 0)
