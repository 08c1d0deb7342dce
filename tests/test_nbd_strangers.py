"""Block devices (docs/use/nbd.md) under clients that are broken or hostile, and when their model goes."""

import resource
import socket
import struct

import numpy as np
import pytest
from filetools import BLOCK, eventually
from test_nbd import FLUSH, READ, WRITE, Client, opened

SIZE = 4 * BLOCK
GREETING = b"NBDMAGICIHAVEOPT\0\3"
OPTION = b"IHAVEOPT"
# The specification's answers.
ACK, UNSUPPORTED, INVALID, UNKNOWN, TOO_BIG = 1, 2**31 + 1, 2**31 + 3, 2**31 + 6, 2**31 + 9


@pytest.fixture
def served(start_mount, tmp_path):
    path = tmp_path / "nbd.sock"
    return start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=1, nbd=path), path


def is_served(path, name="model/weights"):
    assert opened(path, name).ask(READ, 0, 16)[0] == 0


def is_cut_off(stranger):
    """Nothing more comes than the greeting."""
    got = b""
    try:
        while piece := stranger.recv(4096):
            got += piece
    except ConnectionError:
        pass
    return got[: len(GREETING)] == GREETING[: len(got)]


def stranger(path):
    client = socket.socket(socket.AF_UNIX)
    # The kernel's queue may be full for a moment. With a timeout, connect(2) does not wait for room there.
    client.connect(str(path))
    client.settimeout(10)
    return client


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 12_000:
        pytest.skip(f"the limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ten_thousand_connections_that_send_one_byte_keep_nobody_out(served, many_files):
    """Neither new clients nor one that has an export, nor programs on the mount."""
    mount, path = served
    served_before = opened(path)
    crowd = []
    for index in range(10_000):
        client = stranger(path)
        try:
            client.sendall(b"\0")
        except ConnectionError:
            pass
        crowd.append(client)
        if index % 1000 == 999:
            assert served_before.ask(READ, 0, 16)[0] == 0
    # One may be sent away while the crowd is being let in.
    eventually(lambda: not refuses(path), deadline=10)
    assert served_before.ask(WRITE, 0, SIZE, payload=np.ones(SIZE // 4, "<f4").tobytes()) == (0, b"")
    assert served_before.ask(FLUSH) == (0, b"")
    assert int((mount.model / "version").read_text()) == 1
    for client in crowd:
        client.close()
    is_served(path)
    assert "panicked" not in mount.stderr()


def test_clients_that_are_silent_keep_nobody_out(served, many_files):
    """Readers that have an export open go before those that write, and those that were heard last go last."""
    mount, path = served
    writer, reader = opened(path), opened(path, "model/weights")
    crowd = []
    for _ in range(1024):
        crowd.append(opened(path, "model/weights"))
        assert reader.ask(READ, 0, 16)[0] == 0
    eventually(lambda: not refuses(path))
    assert writer.ask(WRITE, 0, SIZE, payload=np.ones(SIZE // 4, "<f4").tobytes()) == (0, b"")
    assert writer.ask(FLUSH) == (0, b"")
    assert reader.ask(READ, 0, 16)[0] == 0
    with pytest.raises((ConnectionError, EOFError)):
        crowd[0].ask(READ, 0, 16)
    assert crowd[-1].ask(READ, 0, 16)[0] == 0
    assert int((mount.model / "version").read_text()) == 1


def refuses(path):
    try:
        is_served(path)
    except (ConnectionError, EOFError):
        return True
    return False


def option(number, data=b"", magic=OPTION, length=None):
    return magic + struct.pack(">II", number, len(data) if length is None else length) + data


def test_malformed_handshakes_get_the_errors_of_the_specification(served):
    mount, path = served
    # A connection that is cut off: flags that the server does not know, what is no option, and a request before an export.
    begun = struct.pack(">I", 3)
    request = struct.pack(">IHHQQI", 0x25609513, 0, READ, 1, 0, 512)
    for sent in (struct.pack(">I", 4), begun + option(6, magic=b"IHAVEOPS"), begun + request, begun + option(1, b"no such model")):
        client = stranger(path)
        client.sendall(sent)
        assert is_cut_off(client), sent
    client = Client(path, structured=False)
    name = lambda text: struct.pack(">I", len(text)) + text  # noqa: E731
    for number, data, kind in [
        (3, b"x", INVALID), (5, b"", UNSUPPORTED), (8, b"", ACK), (10, name(b"no such model") + struct.pack(">I", 0), UNKNOWN),
        (6, name(b"model"), INVALID), (6, name(b"\xff") + b"\0\0", INVALID), (6, name(b"model@99") + b"\0\0", UNKNOWN),
        (7, name(b"model/learners/../x") + b"\0\0", UNKNOWN), (6, b"x" * (1 << 20), TOO_BIG),
    ]:  # fmt: skip
        [*_, (got, _)] = client.option(number, data)
        assert got == kind, (number, data[:40], hex(got))
    client.structured = True
    assert client.go("model")[0] == SIZE
    assert client.ask(READ, 0, 16)[0] == 0
    assert (mount.model / "weights").read_bytes() == bytes(SIZE)


def test_a_model_that_is_deleted_or_moved_under_a_connection_disturbs_nothing_else(cluster):
    three = cluster(3)
    for model in ("goes", "moves"):
        three.create(model, size=SIZE, block_size=BLOCK, reducer="sum", learners=1, timeout=3)
    mount = three.mount(nbd="127.0.0.1:0")
    address = ("127.0.0.1", int(mount.stdout().split("nbd://127.0.0.1:")[1].split()[0]))
    goes, reads, moves = Client(address), Client(address), Client(address)
    goes.go("goes")
    reads.go("goes/weights")
    moves.go("moves")
    ones = np.ones(SIZE // 4, "<f4").tobytes()
    for client in (goes, moves):
        assert client.ask(WRITE, 0, SIZE, payload=ones) == (0, b"") and client.ask(FLUSH) == (0, b"")
    assert moves.ask(WRITE, 0, SIZE // 2, payload=ones[: SIZE // 2]) == (0, b"")
    assert three.run("delete", "goes").returncode == 0
    errno, why = goes.ask(WRITE, 0, SIZE, payload=ones)
    if errno == 0:
        errno, why = goes.ask(FLUSH)
    assert errno == 5 and why, "what was written since counts nowhere, and the reason is told"
    assert reads.ask(READ, 0, SIZE) == (0, bytes(SIZE)), "the version that it was opened on"
    assert three.run("drain", three.shards[1].address, timeout=300).returncode == 0
    assert moves.ask(WRITE, SIZE // 2, SIZE // 2, payload=ones[SIZE // 2 :]) == (0, b"")
    errno, why = moves.ask(FLUSH)
    assert errno == 0, why
    assert moves.ask(READ, 0, SIZE) == (0, (2 * np.ones(SIZE // 4, "<f4")).tobytes())
    again = Client(address)
    try:
        again.go("goes/learners/late")
        # It is shown for as long as somebody uses it, and takes nothing.
        assert again.ask(WRITE, 0, SIZE, payload=ones)[0] != 0 or again.ask(FLUSH)[0] != 0
        again = Client(address)
    except LookupError:
        pass
    again.go("moves/weights")
    assert again.ask(READ, 0, 4) == (0, np.float32(2).tobytes())
    assert "panicked" not in mount.stderr()
