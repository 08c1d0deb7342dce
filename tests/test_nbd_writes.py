"""Gradients by block devices (docs/use/nbd.md): a connection is a learner, and what ends a step there ends it as fsync does."""

import subprocess
import time
from subprocess import PIPE

import numpy as np
import pytest
from conftest import ran
from filetools import BLOCK, eventually
from test_nbd import CLIENTS, DISC, FLUSH, READ, TRIM, WRITE, ZEROES, Client, export, run, uri_of, opened, version

pytestmark = pytest.mark.also_on_network

BLOCKS = 5
SIZE = BLOCKS * BLOCK
FUA = 1


@pytest.fixture
def served(start_mount, tmp_path):
    path = tmp_path / "nbd.sock"
    return start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=1, nbd=path), path


def floats(value, count=SIZE // 4):
    return np.full(count, value, "<f4").tobytes()


def weights(mount):
    with open(mount.model / "weights", "rb") as file:
        return np.frombuffer(file.read(), "<f4")


def read(client):
    """The weights that a client reads; each has the same value."""
    errno, data = client.ask(READ, 0, SIZE)
    assert errno == 0, data
    values = set(np.frombuffer(data, "<f4").tolist())
    assert len(values) == 1, values
    return values.pop()


def write(client, value, start=0, end=SIZE, piece=SIZE, flags=0):
    """Writes a value into a range, in pieces."""
    for at in range(start, end, piece):
        data = floats(value, min(piece, end - at) // 4)
        assert client.ask(WRITE, at, len(data), payload=data, flags=flags) == (0, b""), at


def test_a_flush_ends_a_step_of_a_block_device(served):
    """In pieces of any length; and the connection then reads the version with its step."""
    mount, path = served
    device = opened(path, "model")
    for step, piece in enumerate([SIZE, BLOCK, BLOCK // 2 + 4, 3 * BLOCK], 1):
        write(device, 1.0, piece=piece)
        assert version(mount) == step - 1 and (weights(mount) == step - 1).all()
        assert device.ask(FLUSH) == (0, b"")
        assert read(device) == step
        eventually(lambda step=step: version(mount) == step)
    # Without a write there is nothing to end.
    assert device.ask(FLUSH) == (0, b"") and read(device) == 4 and version(mount) == 4
    # A write that says so ends the step, too.
    write(device, 2.0, end=SIZE - BLOCK)
    write(device, 2.0, start=SIZE - BLOCK, flags=FUA)
    assert read(device) == 6


def test_requests_behind_a_flush_belong_to_the_next_step(served):
    mount, path = served
    device = opened(path, "model")
    for cookie in range(10):
        device.send(WRITE, 0, SIZE, cookie=2 * cookie, payload=floats(1.0))
        device.send(FLUSH, cookie=2 * cookie + 1)
    for cookie in range(20):
        assert device.answer(expected=cookie) == (0, b"")
    assert read(device) == 10
    eventually(lambda: version(mount) == 10)


def test_a_disconnect_ends_a_step_and_a_lost_connection_drops_it(served):
    mount, path = served
    lost = opened(path, "model/gradients")
    write(lost, 100.0, end=2 * BLOCK)
    # In the middle of a payload.
    lost.send(WRITE, 2 * BLOCK, 2 * BLOCK, payload=floats(100.0, BLOCK // 4))
    lost.socket.close()
    polite = opened(path, "model/gradients")

    def writes():
        # Until it is known that the other one is gone, this joins in its contribution.
        return polite.ask(WRITE, 0, SIZE, payload=floats(1.0))[0] == 0

    eventually(writes)
    polite.send(DISC)
    eventually(lambda: version(mount) == 1)
    assert (weights(mount) == 1).all()
    # A lost connection takes nothing of others with it.
    taken, other = opened(path, "model"), opened(path, "model")
    write(taken, 1.0, end=BLOCK)
    write(other, 1.0, start=BLOCK)
    assert other.ask(FLUSH) == (0, b"") and read(other) == 2
    write(other, 1.0, end=BLOCK)
    taken.socket.close()
    time.sleep(0.5)
    write(other, 1.0, start=BLOCK)
    assert other.ask(FLUSH) == (0, b"") and read(other) == 3
    # Closed without a word, between requests.
    silent = opened(path, "model")
    write(silent, 100.0, end=BLOCK)
    silent.socket.close()
    again = opened(path, "model")
    eventually(lambda: again.ask(WRITE, 0, SIZE, payload=floats(1.0))[0] == 0)
    assert again.ask(FLUSH) == (0, b"") and read(again) == 4


def test_a_disconnect_ends_a_step_and_a_lost_connection_drops_it__and_so_does_one_with_a_refused_write(served):
    mount, path = served
    cut = opened(path, "model/gradients")
    write(cut, 100.0, end=2 * BLOCK)
    assert cut.ask(WRITE, 2 * BLOCK, SIZE, payload=floats(100.0))[0] != 0, "it leaves the model"
    cut.send(DISC)
    whole = opened(path, "model/gradients")
    eventually(lambda: whole.ask(WRITE, 0, SIZE, payload=floats(1.0))[0] == 0)
    # One that was repeated is forgotten, and a FLUSH says all there is to say.
    assert whole.ask(WRITE, 0, BLOCK, payload=floats(1.0, BLOCK // 4))[0] != 0, "it was sent"
    assert whole.ask(FLUSH) == (0, b"")
    write(whole, 1.0)
    whole.send(DISC)
    eventually(lambda: version(mount) == 2)
    assert (weights(mount) == 2).all()


def test_what_a_mount_refuses_a_block_device_refuses_with_the_reason(served):
    mount, path = served
    device, gradients = opened(path, "model"), opened(path, "model/gradients")
    assert gradients.ask(READ, 0, 4) == (1, b"gradients are write-only (read weights instead)")
    for client in (device, gradients):
        for words, errno in [((TRIM, 0, 4), 22), ((ZEROES, 0, 4), 22), ((77, 0, 4), 22), ((READ, SIZE, 4), 22)]:
            assert client.ask(*words)[0] == errno
        for start, count, errno in [(SIZE, 4, 28), (SIZE - 4, 8, 28), (2**64 - 4, 4, 28)]:
            got, why = client.ask(WRITE, start, count, payload=bytes(count))
            assert got == errno and b"are not in the export" in why
    write(device, 1.0, end=BLOCK)
    got, why = device.ask(WRITE, 0, 4, payload=floats(2.0, 1))
    assert got == 22 and why, "these bytes were sent already"
    assert device.ask(FLUSH) == (0, b"")
    # As on a mount, the write may be refused, and the end of the step is.
    device.ask(WRITE, 0, SIZE, payload=floats(np.nan))
    got, why = device.ask(FLUSH)
    assert got == 22 and b"NaN" in why
    assert device.ask(FLUSH) == (0, b"") and device.ask(READ, BLOCK, 4) == (0, bytes(4))
    write(device, 1.0)
    assert device.ask(FLUSH) == (0, b"")
    assert device.ask(READ, 0, BLOCK) == (0, floats(2.0, BLOCK // 4))


def test_learners_join_and_leave_with_their_connections(served):
    mount, path = served
    (mount.model / "control" / "learners").write_text("2")
    assert Client(path).option(6, b"\0\0\0\x16model/learners/.hidden\0\0")[0][0] == 2**31 + 6
    first, second = opened(path, "model/learners/a"), opened(path, "model/learners/b")
    names = lambda: sorted(path.name for path in (mount.model / "learners").iterdir())  # noqa: E731
    assert read(first) == read(second) == 0 and names() == [], "who looks joins nothing"
    for step in range(1, 4):
        write(first, 1.0)
        first.send(FLUSH)
        write(second, 2.0)
        second.send(FLUSH)
        assert first.answer() == (0, b"") and second.answer() == (0, b"")
        for client in (first, second):
            assert read(client) == 3.0 * step
        assert names() == ["a", "b"]
    # Another connection of the same learner keeps it, when it has written.
    again, idle = opened(path, "model/learners/a"), opened(path, "model/learners/b")
    write(again, 1.0, end=BLOCK)
    first.send(DISC)
    second.socket.close()
    eventually(lambda: names() == ["a"])
    again.send(DISC)
    eventually(lambda: names() == [])
    assert read(idle) == 9.0
    (mount.model / "control" / "learners").write_text("1")
    # A program on the mount keeps it, too, until it ends.
    third = opened(path, "model/learners/c")
    write(third, 1.0, end=BLOCK)
    gradients = mount.model / "learners" / "c" / "gradients"
    held = subprocess.Popen(["sh", "-c", 'exec 3>"$0"; echo open; read x', gradients], stdin=PIPE, stdout=PIPE)
    assert held.stdout.readline() == b"open\n"
    third.send(DISC)
    time.sleep(0.3)
    assert names() == ["c"]
    held.communicate(b"\n", timeout=10)
    eventually(lambda: names() == [])
    # One that was made on the mount stays.
    (mount.model / "learners" / "kept").mkdir()
    opened(path, "model/learners/kept").send(DISC)
    assert names() == ["kept"]


@pytest.mark.parametrize("name", ["mount", "kept"])
def test_learners_join_and_leave_with_their_connections__and_stay_for_linger(served, name):
    """The mount's own learner, and one that mkdir has made."""
    mount, path = served
    for setting, value in (("learners", 2), ("lease", 600), ("linger", 0.1)):
        mount.control(setting, value)
    if name == "kept":
        mount.join(name)
    client = opened(path, f"model/learners/{name}")
    mount.join("b")
    write(client, 1.0)
    client.send(FLUSH)
    mount.contribute(floats(1.0), learner="b")
    assert client.answer() == (0, b"")
    client.send(DISC)
    mount.contribute(floats(1.0), learner="b")
    with open(mount.place("b") / "weights", "rb") as file:
        assert set(np.frombuffer(file.read(), "<f4")) == {3.0}, "it has left: nobody waits for it"
    assert [path.name for path in (mount.model / "learners").iterdir()] == ["b"]


def test_who_looks_at_an_export_keeps_nobody_waiting(served):
    mount, path = served
    mount.join("a")
    looks = [opened(path, name) for name in ("model", "model/gradients", "model/learners/b", "model/learners/mount")]
    assert [read(client) for client in looks if client is not looks[1]] == [0] * 3
    for step in range(1, 4):
        mount.contribute(floats(1.0), learner="a")
        with open(mount.place("a") / "weights", "rb") as file:
            assert set(np.frombuffer(file.read(), "<f4")) == {step}
    assert all(client.ask(FLUSH) == (0, b"") for client in looks)
    assert [path.name for path in (mount.model / "learners").iterdir()] == ["a"]
    # Each of them joins with its first write, as one of the same name is one learner.
    for client in looks[1:3]:
        write(client, 1.0)
    eventually(lambda: len(list((mount.model / "learners").iterdir())) == 3)


@CLIENTS
def test_clients_that_others_wrote_contribute(served, tmp_path):
    mount, path = served
    data = tmp_path / "gradients"
    data.write_bytes(floats(1.0))
    uri = uri_of(mount)
    run("nbdcopy", "--flush", str(data), export(uri, "model/gradients"))
    eventually(lambda: version(mount) == 1)
    assert (weights(mount) == 1).all()
    options = f"driver=nbd,server.type=unix,server.path={path},export=model"
    run("qemu-io", "--image-opts", options, "-t", "none", "-c", f"write -s {data} 0 {SIZE}", "-c", "flush")
    eventually(lambda: version(mount) == 2)
    assert (weights(mount) == 2).all()
    bad = tmp_path / "bad"
    bad.write_bytes(floats(np.inf))
    refused = ran(["qemu-io", "--image-opts", options, "-t", "none", "-c", f"write -s {bad} 0 {SIZE}", "-c", "flush"])
    assert refused.returncode or "Invalid argument" in refused.stdout + refused.stderr
    assert version(mount) == 2 and (weights(mount) == 2).all()


def test_with_assign_a_block_device_takes_values(start_mount, tmp_path):
    path = tmp_path / "nbd.sock"
    start_mount(size=SIZE, block_size=BLOCK, reducer="assign", learners=1, nbd=path)
    device = opened(path, "model/learners/a")
    for value in (3.0, 5.0):
        write(device, value)
        assert device.ask(WRITE, 0, 4, payload=floats(1.0, 1))[0] == 22
        assert device.ask(FLUSH) == (0, b"") and read(device) == value
