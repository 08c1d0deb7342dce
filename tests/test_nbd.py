"""Models as network block devices (docs/use/nbd.md): with clients that others wrote, and with one that breaks the rules."""

import json
import os
import re
import shutil
import socket
import stat
import struct
import subprocess

import numpy as np
import pytest
from conftest import MountFailed
from filetools import BLOCK, takes

MIB = 1 << 20
SIZE = 5 * MIB + 4
CLIENTS = pytest.mark.skipif(
    os.environ.get("CI") != "true" and not all(map(shutil.which, ["nbdinfo", "nbdsh", "qemu-img", "fio"])),
    reason="no nbdinfo, nbdsh, qemu-img or fio (scripts/setup test)",
)
READ, WRITE, DISC, FLUSH, TRIM, CACHE, ZEROES, STATUS = range(8)


def uri_of(mount):
    said = re.search(r"^gradfs: block devices at (nbd\S+)$", mount.stdout(), re.MULTILINE)
    assert said, mount.stdout()
    return said[1]


def export(uri, name):
    """The URI of an export."""
    base, _, query = uri.partition("?")
    return base + ("" if base.endswith("///") else "/") + name + ("?" + query if query else "")


def run(*words, **options):
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=True, **options).stdout


@pytest.fixture
def served(start_mount, tmp_path):
    """A mount whose model has new weights in version 1, and its socket."""
    path = tmp_path / "a b.sock"
    mount = start_mount(size=str(SIZE), dtype="f32", reducer="assign", retain=3, nbd=str(path))
    publish(mount, 1)
    return mount, path


def publish(mount, seed):
    weights = np.random.default_rng(seed).standard_normal(SIZE // 4).astype("<f4")
    with open(mount.model / "weights", "wb") as file:
        file.write(weights.tobytes())
    return weights.tobytes()


class Client:
    """A client that sends whatever it is told to."""

    def __init__(self, address, structured=True, flags=3):
        self.socket = socket.socket(socket.AF_UNIX) if not isinstance(address, tuple) else socket.socket()
        self.socket.settimeout(10)
        self.socket.connect(address if isinstance(address, tuple) else str(address))
        assert self.get(18) == b"NBDMAGICIHAVEOPT\0\3"
        self.socket.sendall(struct.pack(">I", flags))
        self.structured = structured
        if structured:
            assert self.option(8) == [(1, b"")]

    def get(self, count):
        data = b""
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            if not piece:
                raise EOFError(f"{len(data)} bytes of {count}")
            data += piece
        return data

    def option(self, number, data=b""):
        self.socket.sendall(b"IHAVEOPT" + struct.pack(">II", number, len(data)) + data)
        answers = []
        while not answers or answers[-1][0] in (2, 3, 4):
            magic, of, kind, length = struct.unpack(">QIII", self.get(20))
            assert (magic, of) == (0x3E889045565A9, number)
            answers.append((kind, self.get(length)))
        return answers

    def go(self, name):
        data = struct.pack(">I", len(name)) + name.encode() + b"\0\0"
        *infos, (kind, message) = self.option(7, data)
        if kind != 1:
            raise LookupError(message.decode())
        [size, flags] = struct.unpack(">QH", infos[0][1][2:])
        return size, flags

    def send(self, command, offset=0, length=0, cookie=7, flags=0, payload=b"", magic=0x25609513):
        self.socket.sendall(struct.pack(">IHHQQI", magic, flags, command, cookie, offset, length) + payload)

    def answer(self, expected=None, length=0):
        """The error number and the data, or the message."""
        if not self.structured:
            magic, error, cookie = struct.unpack(">IIQ", self.get(16))
            assert magic == 0x67446698
            return error, self.get(length) if not error else b""
        magic, flags, kind, cookie, count = struct.unpack(">IHHQI", self.get(20))
        assert (magic, flags & 1) == (0x668E33EF, 1) and expected in (None, cookie)
        data = self.get(count)
        if kind == 0x8001:
            return struct.unpack(">I", data[:4])[0], data[6:]
        return 0, data[8:] if kind == 1 else data

    def ask(self, *words, **named):
        self.send(*words, **named)
        length = named.get("length", words[2] if len(words) > 2 else 0)
        return self.answer(length=length)


def opened(path, name="model"):
    client = Client(path)
    client.go(name)
    return client


def version(mount):
    return int((mount.model / "version").read_text())


@CLIENTS
def test_block_devices_have_the_bytes_of_weights(served, tmp_path):
    """libnbd's clients and qemu's read what the file has, of the newest version and of an older one."""
    mount, path = served
    first = (mount.model / "weights").read_bytes()
    second = publish(mount, 2)
    uri = uri_of(mount)
    listed = json.loads(run("nbdinfo", "--json", "--list", uri))["exports"]
    names = ["model", "model/weights", "model/weights@follow", "model/gradients", "model@0", "model@1", "model@2"]
    assert [one["export-name"] for one in listed] == names
    assert {one["export-size"] for one in listed} == {SIZE}
    assert [one["is_read_only"] for one in listed] == [False, True, True, False, True, True, True]
    assert [one["can_multi_conn"] for one in listed] == [True] + [False] * 3 + [True] * 3
    assert [one["can_fua"] for one in listed] == [True, False, False, True] + [False] * 3
    assert [one["can_trim"] and one["can_zero"] for one in listed] == [True] + [False] * 6
    assert listed[0]["block_size_minimum"] == 1 and listed[0]["contexts"] == ["base:allocation", "gradfs:version"]
    copy = tmp_path / "copy"
    for name, expected in [("", second), ("model/weights", second), ("model@2", second), ("model@1", first)]:
        run("nbdcopy", export(uri, name), str(copy))
        assert copy.read_bytes() == expected, name
    versions = json.loads(run("nbdinfo", "--json", "--map=gradfs:version", export(uri, "model@1")))
    assert [(one["offset"], one["length"], one["type"]) for one in versions] == [(0, SIZE, 1)]
    image = f"driver=nbd,server.type=unix,server.path={path},export=model/weights"
    copy.write_bytes(second)
    assert "identical" in run("qemu-img", "compare", "--image-opts", f"driver=raw,file.filename={copy}", image)
    copy.write_bytes(first)
    with pytest.raises(subprocess.CalledProcessError):
        run("qemu-img", "compare", "--image-opts", f"driver=raw,file.filename={copy}", image)


@CLIENTS
def test_block_devices_have_the_bytes_of_weights__over_a_network(cluster, tmp_path):
    one = cluster(2)
    one.create("model", size="1MiB", reducer="assign", learners=1)
    mount = one.mount(nbd="127.0.0.1:0")
    weights = np.arange(MIB // 4, dtype="<f4").tobytes()
    (mount.root / "model" / "weights").write_bytes(weights)
    copy = tmp_path / "copy"
    run("nbdcopy", export(uri_of(mount), "model/weights"), str(copy))
    assert copy.read_bytes() == weights


def test_an_export_keeps_the_version_that_it_was_opened_on(served):
    mount, path = served
    first = (mount.model / "weights").read_bytes()
    old, simple = Client(path), Client(path, structured=False)
    for client in (old, simple):
        size, flags = client.go("model/weights")
        assert size == SIZE and flags & 2 and bool(flags & 1 << 7) == client.structured
    versions = [publish(mount, seed) for seed in range(2, 7)]
    new = opened(path, "model/weights")
    for client, expected in [(old, first), (simple, first), (new, versions[-1])]:
        assert client.ask(READ, 3, 4 * MIB) == (0, expected[3 : 3 + 4 * MIB])
        assert client.ask(READ, SIZE - 1, 1) == (0, expected[-1:])
    with pytest.raises(LookupError, match="no export"):
        Client(path).go("model@77")
    # Many requests at once, each with its answer.
    for cookie in range(200):
        old.send(READ, cookie * 1000, 1000, cookie=cookie)
    for cookie in range(200):
        assert old.answer(expected=cookie) == (0, first[cookie * 1000 : (cookie + 1) * 1000])


def test_an_export_follows_the_newest_version_at_each_flush(served):
    mount, path = served
    first = (mount.model / "weights").read_bytes()
    follower = Client(path)
    assert follower.go("model/weights@follow") == (SIZE, 1 | 2 | 4 | 1 << 7 | 1 << 10)
    second = publish(mount, 2)
    assert follower.ask(READ, 0, MIB) == (0, first[:MIB])
    assert follower.ask(FLUSH) == (0, b"") and follower.ask(READ, 0, MIB) == (0, second[:MIB])
    third = publish(mount, 3)
    # Replies before the FLUSH are of the old version, those behind it of the new one.
    for command, length in [(READ, MIB), (FLUSH, 0), (READ, MIB)]:
        follower.send(command, 0, length)
    assert [follower.answer()[1] for _ in range(3)] == [second[:MIB], b"", third[:MIB]]
    assert follower.ask(WRITE, 0, 4, payload=bytes(4))[0] == 1


def test_models_that_are_averaged_are_not_written_as_block_devices(served):
    mount, path = served
    mount.control("reducer", "average")
    for name in ("model", "model/gradients", "model/learners/a"):
        with pytest.raises(LookupError, match="reducer average takes models, which are written as files"):
            Client(path).go(name)
    assert os.listdir(mount.model / "learners") == []
    Client(path).go("model/weights")


def test_wrong_requests_are_refused_and_change_nothing(served):
    mount, path = served
    weights = (mount.model / "weights").read_bytes()
    client = opened(path, "model/weights")
    for words, errno in [((READ, SIZE - 1, 2), 22), ((READ, 2**64 - 1, 2), 22), ((READ, 0, 33 * MIB), 22), ((TRIM, 0, 4096), 1), ((ZEROES, 0, 4096), 1), ((STATUS, 0, 4096), 22), ((77, 0, 0), 22)]:
        got, message = client.ask(*words)
        assert got == errno and message, (words, got)
    # The payload of a write is not taken for requests, however long it is.
    for length in (1, 4096, 3 * MIB):
        assert client.ask(WRITE, 0, length, payload=b"\x25" * length)[0] == 1
    assert client.ask(READ, 0, 8, flags=1 << 9)[0] == 22
    assert client.ask(FLUSH) == (0, b"") and client.ask(CACHE, 0, 4096) == (0, b"")
    assert client.ask(READ, 0, 64) == (0, weights[:64])
    client.send(DISC)
    with pytest.raises((EOFError, ConnectionError)):
        client.get(1)
    # As libnbd ends: the replies that are outstanding come.
    leaving = opened(path, "model/weights")
    for cookie in range(8):
        leaving.send(READ, 0, 4 * MIB, cookie=cookie)
    leaving.send(DISC)
    leaving.socket.shutdown(socket.SHUT_WR)
    for cookie in range(8):
        assert leaving.answer(expected=cookie) == (0, weights[: 4 * MIB])
    lost = opened(path, "model/weights")
    lost.socket.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
    with pytest.raises((EOFError, ConnectionError)):
        lost.get(1)
    assert (mount.model / "weights").read_bytes() == weights
    assert "panicked" not in mount.stderr()


def test_a_slow_client_of_block_devices_keeps_nobody_waiting(served):
    mount, path = served
    weights = (mount.model / "weights").read_bytes()
    slow = [Client(path) for _ in range(8)]
    for client in slow:
        client.go("model/weights")
        client.socket.settimeout(1)
        # More than the server takes: none of it is read.
        try:
            for _ in range(3000):
                client.send(READ, 0, 4 * MIB)
        except TimeoutError:
            pass
    quick = opened(path, "model/weights")
    with takes(0, 5):
        for at in range(0, 4 * MIB, 64 << 10):
            assert quick.ask(READ, at, 64 << 10) == (0, weights[at : at + (64 << 10)])
    assert publish(mount, 9) == (mount.model / "weights").read_bytes()


def test_the_socket_is_its_owners_and_goes_with_the_daemon(start_mount, tmp_path):
    path = tmp_path / "nbd.sock"
    words = {"size": BLOCK, "block_size": BLOCK, "nbd": str(path)}
    mount = start_mount(**words)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # Another daemon does not take it away.
    with pytest.raises(MountFailed, match="(?s)cannot serve NBD on .*another program has it"):
        start_mount(**words)
    mount.process.kill()
    mount.process.wait()
    assert path.is_socket()
    again = start_mount(**words)
    Client(path).go("model/weights" if (again.root / "model").exists() else "")
    again.process.terminate()
    again.process.wait()
    assert not path.exists()
    # What is no socket stays.
    path.write_text("mine")
    with pytest.raises(MountFailed, match="cannot serve NBD"):
        start_mount(**words)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:1"])
def test_other_hosts_are_let_in_only_if_the_operator_says_so(start_mount, address):
    words = {"size": BLOCK, "block_size": BLOCK, "nbd": address}
    with pytest.raises(MountFailed, match="NBD knows no users"):
        start_mount(**words)
    if address == "192.0.2.1:1":
        return
    mount = start_mount(insecure=True, **words)
    port = int(uri_of(mount).rpartition(":")[2])
    client = Client(("127.0.0.1", port))
    assert client.go("model")[0] == BLOCK
