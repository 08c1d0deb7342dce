"""Models as rewritable disks, with reducer assign (docs/use/nbd.md): what is written shows at once, and a FLUSH publishes it."""

import json
import random
import re
import select
import threading
import time

import numpy as np
import pytest
from conftest import ran
from filetools import BLOCK, Threads, eventually
from test_nbd import CLIENTS, DISC, FLUSH, READ, TRIM, WRITE, ZEROES, Client, export, run, uri_of, opened, version

BLOCKS = 5
SIZE = BLOCKS * BLOCK + 4096
FUA, NO_HOLE, FAST_ZERO = 1, 2, 16


@pytest.fixture
def served(start_mount, tmp_path):
    path = tmp_path / "nbd.sock"
    return start_mount(size=SIZE, dtype="u8", block_size=BLOCK, reducer="assign", learners=1, nbd=path), path


def weights(mount):
    return (mount.model / "weights").read_bytes()


def write(client, at, data, flags=0):
    assert client.ask(WRITE, at, len(data), payload=data, flags=flags) == (0, b"")


def flush(client):
    assert client.ask(FLUSH) == (0, b"")


@pytest.mark.also_on_network
def test_a_disk_shows_writes_at_once_on_every_connection(served):
    """They may be written again, in pieces of any length and place, before anything is published."""
    mount, path = served
    writer, reader = opened(path), opened(path)
    expected = bytearray(SIZE)
    dice = random.Random(1)
    for _ in range(60):
        at = dice.randrange(SIZE)
        data = dice.randbytes(min(dice.choice([1, 512, 4096, BLOCK, 3 * BLOCK]), SIZE - at))
        write(writer, at, data)
        expected[at : at + len(data)] = data
        assert reader.ask(READ, 0, SIZE) == (0, bytes(expected))
    assert version(mount) == 0 and weights(mount) == bytes(SIZE)


@pytest.mark.also_on_network
def test_a_flush_of_a_disk_publishes_a_version_with_the_writes_of_all(served):
    mount, path = served
    one, two = opened(path), opened(path)
    write(one, 10, b"one")
    write(two, 3 * BLOCK - 1, b"two")
    flush(one)
    expected = bytearray(SIZE)
    expected[10:13], expected[3 * BLOCK - 1 : 3 * BLOCK + 2] = b"one", b"two"
    assert version(mount) == 1 and weights(mount) == expected
    # The rest of the disk, and what was published, are read from anywhere.
    assert two.ask(READ, 0, SIZE) == (0, bytes(expected))
    flush(two)
    assert version(mount) == 1, "nothing was written since"
    write(two, 12, b"E", flags=FUA)
    expected[12:13] = b"E"
    assert version(mount) == 2 and weights(mount) == expected
    # Zeros, few and many; a TRIM writes them, too.
    for command, at, count, flags in [
        (ZEROES, 5, 4, 0),
        (ZEROES, BLOCK - 1, 2 * BLOCK, NO_HOLE),
        (TRIM, 3 * BLOCK, 2 * BLOCK + 4096, FUA),
    ]:
        write(one, 0, b"x" * SIZE)
        assert one.ask(command, at, count, flags=flags) == (0, b"")
        expected = b"x" * at + bytes(count) + b"x" * (SIZE - at - count)
        assert two.ask(READ, 0, SIZE) == (0, expected)
    assert version(mount) == 3 and weights(mount) == expected
    # The client says that it goes.
    write(one, 0, b"end")
    one.send(DISC)
    eventually(lambda: version(mount) == 4)
    assert weights(mount)[:4] == b"endx"


@pytest.mark.also_on_network
def test_a_flush_of_a_disk_copies_changed_blocks_only(start_mount, tmp_path):
    """A disk of 64 MiB of which one byte is written: on a network, that byte's block travels, and no other."""
    path = tmp_path / "nbd.sock"
    size = 64 << 20
    mount = start_mount(size=size, dtype="u8", reducer="assign", learners=1, nbd=path)
    disk = opened(path)
    for at in range(0, size, 8 << 20):
        write(disk, at, random.Random(at).randbytes(8 << 20))
    flush(disk)
    payload = lambda: mount.status().get("payload")  # noqa: E731
    before = payload()
    for at in (5, 20 << 20, size - 1):
        write(disk, at, b"x")
        flush(disk)
    if before:
        assert payload()["pushed_bytes"] - before["pushed_bytes"] == 3 * (256 << 10)
    expected = b"".join(random.Random(at).randbytes(8 << 20) for at in range(0, size, 8 << 20))
    expected = bytearray(expected)
    for at in (5, 20 << 20, size - 1):
        expected[at] = ord("x")
    assert weights(mount) == expected


@pytest.mark.also_on_network
def test_what_a_disk_has_taken_outlives_its_connections(served):
    """A write that was answered stays, and the last connection's end publishes it. Half of a write is no more than that."""
    mount, path = served
    first, lost = opened(path), opened(path)
    write(lost, 0, b"answered")
    lost.send(WRITE, BLOCK, 2 * BLOCK, payload=b"y" * (BLOCK + 100))
    lost.socket.close()
    read = lambda: first.ask(READ, 0, 3 * BLOCK)[1]  # noqa: E731
    assert read()[:9] == b"answered\0"
    eventually(lambda: read()[BLOCK:] == b"y" * (BLOCK + 100) + bytes(BLOCK - 100))
    assert version(mount) == 0
    first.socket.close()
    eventually(lambda: version(mount) == 1)
    assert weights(mount)[:9] == b"answered\0"
    again = opened(path)
    assert again.ask(READ, 0, 9) == (0, b"answered\0")


@pytest.mark.also_on_network
def test_flushes_of_a_disk_take_no_memory(served):
    """Nor the time of whoever asks for the status: the disk's memory is registered once."""
    mount, path = served
    client = opened(path)
    staging = set()
    for number in range(20):
        write(client, 0, bytes([number]))
        flush(client)
        staging.add(mount.status()["memory"]["staging"])
    assert len(staging) == 1 and version(mount) == 20


def test_blocks_of_a_disk_that_is_written_meanwhile_arrive_whole(cluster, tmp_path):
    """Over TCP, with checksums: no connection is given up for a frame that its own bytes contradict."""
    one = cluster(1)
    one.create("model", size=64 * BLOCK, dtype="u8", block_size=BLOCK, reducer="assign")
    mount = one.mount(transport="tcp", checksum="on", nbd=tmp_path / "nbd.sock")
    busy, flusher = opened(tmp_path / "nbd.sock"), opened(tmp_path / "nbd.sock")
    over = threading.Event()

    def writes():
        number = 0
        while not over.is_set():
            number += 1
            write(busy, 0, bytes([number % 256]) * (16 * BLOCK))

    writer = threading.Thread(target=writes)
    writer.start()
    try:
        for _ in range(30):
            write(flusher, 63 * BLOCK, b"x")
            flush(flusher)
    finally:
        over.set()
        writer.join(300)
    flush(busy)
    assert weights(mount) == flusher.ask(READ, 0, 32 * BLOCK)[1] + flusher.ask(READ, 32 * BLOCK, 32 * BLOCK)[1]
    (shard,) = one.shards
    for log in (mount.stderr(), shard.stderr()):
        assert "checksum" not in log and "broken" not in log, log


def test_a_disk_of_floats_needs_nonfinite_accept(start_mount, tmp_path):
    path = tmp_path / "nbd.sock"
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="assign", nbd=path)
    client = Client(path)
    data = b"\0\0\0\5model\0\0"
    [*_, (kind, why)] = client.option(7, data)
    assert kind == 2**31 + 2 and b"control/nonfinite" in why, "NBD_REP_ERR_POLICY"
    (mount.model / "control" / "nonfinite").write_text("accept")
    # The handshake goes on.
    client.go("model")
    nan = np.full(BLOCK, np.nan, "<f4").tobytes()
    write(client, 0, nan)
    flush(client)
    assert version(mount) == 1 and weights(mount)[: len(nan)] == nan
    # If it is taken back, a FLUSH says so, and nothing that was written is lost.
    (mount.model / "control" / "nonfinite").write_text("reject")
    write(client, BLOCK, nan[:BLOCK])
    errno, why = client.ask(FLUSH)
    assert errno == 22 and b"NaN" in why, (errno, why)


def test_a_flush_that_is_refused_keeps_what_was_written(start_mount, tmp_path):
    path = tmp_path / "nbd.sock"
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="assign", nonfinite="accept", nbd=path)
    disk = opened(path)
    write(disk, 0, b"kept")
    flush(disk)
    (mount.model / "control" / "reducer").write_text("sum")
    write(disk, 4, b"more")
    errno, why = disk.ask(FLUSH)
    assert errno == 1 and b"assign" in why
    assert disk.ask(READ, 0, 9) == (0, b"keptmore\0") and version(mount) == 1
    (mount.model / "control" / "reducer").write_text("assign")
    flush(disk)
    assert weights(mount)[:9] == b"keptmore\0"


def test_a_disk_that_is_none_any_more_goes_with_its_last_connection(start_mount, tmp_path):
    """Its old bytes do not undo what others have learned meanwhile."""
    path = tmp_path / "nbd.sock"
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="assign", nonfinite="accept", learners=1, nbd=path)
    reducer = mount.model / "control" / "reducer"
    disk = opened(path)
    # Version 0 takes weights with any reducer.
    write(disk, 0, bytes(4), flags=FUA)
    write(disk, 0, b"old!")
    reducer.write_text("sum")
    disk.send(DISC)
    eventually(lambda: "what was written to the disk is dropped" in mount.stderr())
    ones = np.ones(SIZE // 4, "<f4")
    for _ in range(3):
        (mount.model / "gradients").write_bytes(ones.tobytes())
    reducer.write_text("assign")
    again = opened(path)
    assert again.ask(READ, 0, SIZE) == (0, (3 * ones).tobytes())
    write(again, 8, b"new!")
    flush(again)
    assert weights(mount) == (3 * ones).tobytes()[:8] + b"new!" + (3 * ones).tobytes()[12:]


def test_many_zeros_on_a_disk_hold_up_nobody_else(start_mount, tmp_path):
    path = tmp_path / "nbd.sock"
    size = 1 << 30
    start_mount(size=size, dtype="u8", reducer="assign", nbd=path)
    disk, others = opened(path), [opened(path, name) for name in ("model", "model/weights") * 4]
    disk.socket.settimeout(60)
    disk.send(TRIM, 0, size, cookie=1)
    disk.send(FLUSH, cookie=2)
    begun, slowest = time.monotonic(), 0
    while not select.select([disk.socket], [], [], 0)[0]:
        for other in others:
            asked = time.monotonic()
            assert other.ask(READ, size // 2, 4096) == (0, bytes(4096))
            slowest = max(slowest, time.monotonic() - asked)
    took = time.monotonic() - begun
    assert disk.answer(expected=1) == (0, b"") and disk.answer(expected=2) == (0, b"")
    assert slowest < max(took / 2, 0.2), (slowest, took)


def test_wrong_requests_to_a_disk_are_refused_and_change_nothing(served):
    mount, path = served
    disk = opened(path)
    write(disk, 0, b"x" * SIZE, flags=FUA)
    for words, errno, flags in [
        ((WRITE, SIZE - 1, BLOCK), 28, 0), ((WRITE, 2**64 - 1, 2), 28, 0), ((WRITE, 0, BLOCK), 22, FAST_ZERO), ((ZEROES, SIZE - 1, 2), 28, 0),
        ((ZEROES, 0, 4), 22, FAST_ZERO), ((TRIM, SIZE, 1), 22, 0), ((TRIM, 0, 4), 22, NO_HOLE), ((READ, SIZE, 1), 22, 0),
    ]:  # fmt: skip
        payload = b"y" * words[2] if words[0] == WRITE else b""
        got, why = disk.ask(*words, payload=payload, flags=flags)
        assert got == errno and why, (words, got, why)
    assert disk.ask(READ, 0, SIZE) == (0, b"x" * SIZE)
    flush(disk)
    assert version(mount) == 1


@pytest.mark.also_on_network
def test_weights_that_others_publish_show_on_a_disk(served):
    """Where it was not written since."""
    mount, path = served
    disk = opened(path)
    write(disk, 0, b"disk")
    write(disk, 2 * BLOCK, b"disk")
    flush(disk)
    write(disk, 2 * BLOCK + 4, b"more")
    (mount.model / "weights").write_bytes(b"w" * SIZE)
    assert disk.ask(READ, 0, BLOCK) == (0, b"w" * BLOCK)
    assert disk.ask(READ, 2 * BLOCK, 8) == (0, b"diskmore")
    write(disk, 4, b"new")
    assert disk.ask(READ, 0, 8) == (0, b"wwwwneww")
    flush(disk)
    assert weights(mount)[:8] == b"wwwwneww" and weights(mount)[2 * BLOCK : 2 * BLOCK + 8] == b"diskmore"


@pytest.mark.also_on_network
def test_many_connections_of_a_disk_write_and_publish_together(served):
    """Each has bytes of its own, in chunks and blocks that it shares with the others."""
    mount, path = served
    lanes = 4
    final = {}

    def work(lane):
        dice = random.Random(lane)
        disk = opened(path)
        own = bytearray(SIZE // lanes)
        for step in range(60):
            at = dice.randrange(len(own) - 100)
            data = dice.randbytes(dice.randrange(1, 100))
            own[at : at + len(data)] = data
            for i, byte in enumerate(data):
                disk.send(WRITE, (at + i) * lanes + lane, 1, payload=bytes([byte]), cookie=i)
            for i in range(len(data)):
                assert disk.answer(expected=i) == (0, b"")
            if step % 7 == lane:
                flush(disk)
            errno, all_bytes = disk.ask(READ, 0, len(own) * lanes)
            assert errno == 0 and all_bytes[lane::lanes] == own, (lane, step)
        flush(disk)
        assert weights(mount)[: len(own) * lanes][lane::lanes] == own, (lane, "after the last flush")
        final[lane] = own

    Threads().run(*(lambda lane=lane: work(lane) for lane in range(lanes)))
    content = weights(mount)
    for lane, own in final.items():
        assert content[: len(own) * lanes][lane::lanes] == own


@CLIENTS
def test_clients_that_others_wrote_use_a_disk(served, tmp_path):
    """qemu-io, nbdcopy and libnbd for Python."""
    mount, path = served
    uri = export(uri_of(mount), "model")
    said = run(
        "qemu-io", "-f", "raw", uri, "-c", "write -P 7 1000 200k", "-c", "write -z 64k 64k", "-c", "discard 128k 4k",
        "-c", "read -P 7 1000 60k", "-c", "read -P 0 64k 64k", "-c", "flush",
    )  # fmt: skip
    assert "failed" not in said and "wrote 204800/204800" in said, said
    eventually(lambda: weights(mount)[1000:2000] == b"\7" * 1000)
    data, copy = tmp_path / "data", tmp_path / "copy"
    data.write_bytes(random.Random(3).randbytes(SIZE))
    run("nbdcopy", "--flush", "--connections=4", "--request-size=65536", str(data), uri)
    run("nbdcopy", "--connections=4", uri, str(copy))
    assert copy.read_bytes() == data.read_bytes() == weights(mount)
    shell = """
import nbd
one, two = nbd.NBD(), nbd.NBD()
one.connect_uri(URI), two.connect_uri(URI)
assert one.can_multi_conn() and one.can_zero() and one.can_trim() and one.can_fua() and not one.is_read_only()
one.pwrite(b"shell", 123)
assert bytes(two.pread(5, 123)) == b"shell"
two.zero(3, 124)
one.flush()
assert bytes(one.pread(5, 123)) == b"s\\0\\0\\0l"
try:
    one.set_strict_mode(0)
    one.pwrite(b"past", one.get_size())
except nbd.Error as error:
    print(error.errno)
two.pwrite(b"fua", 7, nbd.CMD_FLAG_FUA)
one.shutdown(), two.shutdown()
"""
    program = f"URI = {uri!r}\n{shell}"
    # Debian's module is of Debian's Python.
    done = ran(["/usr/bin/python3", "-c", program])
    assert done.returncode == 0 and re.fullmatch(r"ENOSPC\n", done.stdout), done
    assert weights(mount)[123:128] == b"s\0\0\0l" and weights(mount)[7:10] == b"fua"


@CLIENTS
@pytest.mark.parametrize("name", ["model", "model@1"])
def test_fio_finds_what_it_has_written_to_a_disk(served, tmp_path, name):
    """fio's own client (ioengine=nbd)."""
    mount, path = served
    write(opened(path), 0, bytes(SIZE), flags=FUA)
    words = ["fio", "--name=disk", "--ioengine=nbd", "--uri=" + export(uri_of(mount), name), "--output-format=json"]
    if name == "model":
        words += ["--rw=randwrite", "--bs=4k-64k", f"--size={BLOCKS * BLOCK}", "--iodepth=16", "--verify=crc32c"]
        words += ["--verify_fatal=1", "--fsync=5", "--randseed=7"]
    else:
        words += ["--rw=randread", "--bs=64k", f"--size={BLOCKS * BLOCK}", "--iodepth=16"]
    said = run(*words, cwd=tmp_path)
    [job] = json.loads(said[said.index("{") :])["jobs"]
    assert job["error"] == 0
    if name == "model":
        assert job["write"]["total_ios"] and job["read"]["total_ios"]
        assert version(mount) > 1
