"""Publishing over a network: what docs/use/several-hosts.md promises of mounts that publish."""

import mmap
import os

import numpy as np
import pytest
from filetools import BLOCK, SIZE, array, close, eventually, filled


@pytest.fixture(params=[("tcp", 2), ("shm", 2), ("shm", 1)], ids=["tcp", "shm", "the shard's memory"])
def mounts(cluster, request):
    """Two mounts of a model on some shards. With one shard over shared memory they show the shard's own memory."""
    transport, shards = request.param
    one = cluster(shards, size=SIZE, block_size=BLOCK, reducer="assign", timeout=200)
    return [one.mount(transport=transport) for _ in range(2)]


def pulled(mount):
    """Bytes that were transferred. A version that is shown in the shard's memory counts as pulled, without a copy."""
    status = mount.status()
    shows_shards_memory = len(status["shards"]) == 1 and status["transport"] == "shm"
    return status["payload"]["pull_copied_bytes" if shows_shards_memory else "pulled_bytes"]


def write(path, data, flags=os.O_WRONLY):
    fd = os.open(path, flags)
    assert os.write(fd, data) == len(data)
    os.close(fd)


def test_a_publisher_pulls_none_of_its_own_weights(mounts):
    a, b = mounts
    before, held = pulled(a), []
    for version in range(1, 9):
        name = "weights" if version % 2 else "publish"
        write(a.model / name, filled(a, version).tobytes())
        assert a.version() == version and (array(a.model / "weights") == version).all()
        held.append(os.open(a.model / "weights", os.O_RDONLY))
        if len(held) > 2:
            assert os.pread(held[0], SIZE, 0) == filled(a, version - 2).tobytes(), "the buffer is used for another version"
            os.close(held.pop(0))
    fd = os.open(a.model / "publish", os.O_RDWR | os.O_DIRECT)
    view = np.frombuffer(mmap.mmap(fd, SIZE), "<f4")
    for version in range(9, 13):
        view[:] = version
        os.fsync(fd)
        view[:] = 99
        assert a.version() == version and (array(a.model / "weights") == version).all()
    assert pulled(a) == before
    eventually(lambda: b.version() == 12)
    pulls = a.status()["transport"] == "tcp" or len(a.status()["shards"]) > 1
    assert b.weights() == a.weights() and (pulled(b) > 0) == pulls
    # What others have published, and what is written in part, is pulled.
    write(b.model / "weights", filled(b, 20).tobytes())
    eventually(lambda: a.version() == 13)
    write(a.model / "weights", filled(a, 21).tobytes()[:4])
    assert a.version() == 14 and array(a.model / "weights")[:3].tolist() == [21, 20, 20]
    assert (pulled(a) > before) == pulls
    close(*(fd, *held))


def pushed(mount):
    return mount.status()["payload"]["pushed_bytes"]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_new_weights_travel_while_they_are_written(cluster, transport):
    one = cluster(2, size=64 * BLOCK, block_size=BLOCK, reducer="assign", timeout=200)
    writes, reads = (one.mount(transport=transport) for _ in range(2))
    for version, name in enumerate(["publish", "weights", "publish"], 1):
        data, before = filled(writes, version).tobytes(), pushed(writes)
        fd = os.open(writes.model / name, os.O_WRONLY)
        assert os.write(fd, data[: 40 * BLOCK]) == 40 * BLOCK
        # A mount sends four blocks of a shard together, so it may keep three.
        eventually(lambda: pushed(writes) >= before + 34 * BLOCK)
        assert reads.version() == writes.version() == version - 1
        assert os.write(fd, data[40 * BLOCK :]) == 24 * BLOCK
        os.close(fd)
        assert writes.version() == version and writes.weights() == data
        eventually(lambda: reads.version() == version)
        assert reads.weights() == data
        assert pushed(writes) == before + 64 * BLOCK, "no block is sent twice"


def test_blocks_that_are_written_again_count_as_they_were_written_last(mounts):
    writes, reads = mounts
    for version in range(1, 6):
        data, before = filled(writes, version).tobytes(), pushed(writes)
        fd = os.open(writes.model / "publish", os.O_WRONLY)
        os.pwrite(fd, filled(writes, -1).tobytes(), 0)
        if writes.status()["transport"] == "tcp":
            eventually(lambda: pushed(writes) > before)
        os.pwrite(fd, data, 0)
        os.close(fd)
        assert writes.version() == version and writes.weights() == data
        eventually(lambda: reads.version() == version)
        assert reads.weights() == data
