"""fallocate(2) on mapped gradients: a program says which bytes are final, and they travel while it computes the rest."""

import ctypes
import errno
import mmap
import os
import signal
import time

import numpy as np
import pytest
from filetools import (
    BLOCK, SIZE, Threads, array, eventually, fails, finish, go, hear, mounts, only, outcome, program, takes
)

mounted = mounts()
also_on_network = pytest.mark.also_on_network

# Blocks that a client keeps until it has four to send together.
KEPT = 3 * BLOCK
BIG = 64 * BLOCK

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def fallocate(fd, mode, offset, length):
    """The system call, without what the C library does for other systems."""
    if libc.fallocate(fd, mode, offset, length) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mapped(place, size=SIZE, direct=os.O_DIRECT):
    """A descriptor of gradients, and its mapping as values."""
    fd = os.open(place / "gradients", os.O_RDWR | direct)
    return fd, np.frombuffer(mmap.mmap(fd, size), "<f4")


def pushed(mount):
    return mount.status()["payload"]["pushed_bytes"]


def sum_model(one, **settings):
    one.create("m", size=BIG, block_size=BLOCK, reducer="sum", **{"timeout": 20, "lease": 30, **settings})
    return one


TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.mark.parametrize("transport, shards", [("shm", 1), ("tcp", 2)])
def test_final_bytes_travel_before_fsync(cluster, transport, shards):
    mount = sum_model(cluster(shards)).mount(transport=transport)
    fd, values = mapped(mount.model, BIG)
    for step in range(1, 4):
        before = pushed(mount)
        values[: BIG // 8] = step
        os.posix_fallocate(fd, 0, BIG // 2)
        eventually(lambda: pushed(mount) >= before + BIG // 2 - shards * KEPT, deadline=15)
        assert mount.version() == step - 1, "nothing counts before fsync"
        values[BIG // 8 :] = step
        os.fsync(fd)
        assert only(mount, mount.own()) == sum(range(step + 1))
        assert pushed(mount) == before + BIG, "nothing is sent twice"
    os.close(fd)


@pytest.mark.parametrize("transport, is_shared", [("shm", False), ("tcp", True)], ids=["two mounts", "one mount"])
def test_final_bytes_travel_before_fsync__beside_others_that_write(cluster, transport, is_shared):
    """In a job of two, blocks of a mount go once all of its learners have them."""
    one = sum_model(cluster(1), learners=2)
    near = one.mount(transport=transport)
    far = near if is_shared else one.mount(transport=transport)
    a, b = near.join("a"), far.join("b")
    fd, values = mapped(a, BIG)
    for step in range(1, 4):
        before = pushed(near)
        writes = os.open(b / "gradients", os.O_WRONLY)
        values[:] = 1
        os.posix_fallocate(fd, 0, BIG)
        os.pwrite(writes, np.full(BIG // 8, 2, "<f4"), 0)
        eventually(lambda: pushed(near) >= before + BIG // 2 - KEPT, deadline=15)
        assert near.version() == step - 1
        os.pwrite(writes, np.full(BIG // 8, 2, "<f4"), BIG // 2)
        Threads().run(lambda: os.fsync(fd), lambda: os.close(writes))
        values[:] = 1000
        assert near.version() == step and only(near, "a") == 3 * step
    os.close(fd)


@TRANSPORTS
def test_blocks_that_are_final_in_part_wait_for_fsync(cluster, transport):
    mount = sum_model(cluster(1)).mount(transport=transport)
    fd, values = mapped(mount.model, BIG)
    before = pushed(mount)
    values[:] = 1
    for at in range(0, BIG, BLOCK):
        os.posix_fallocate(fd, at, BLOCK - 4)
    time.sleep(0.2)
    assert pushed(mount) == before
    values[BLOCK // 4 - 1 :: BLOCK // 4] = 2
    os.fsync(fd)
    got = array(mount.place(mount.own()) / "weights").reshape(-1, BLOCK // 4)
    assert (got[:, :-1] == 1).all() and (got[:, -1] == 2).all()
    os.close(fd)


@also_on_network
def test_fsync_ships_what_fallocate_did_not_name(mounted):
    mount = mounted()
    fd, values = mapped(mount.model)
    for step in range(1, 5):
        values[:] = 1
        for _ in range(2):
            os.posix_fallocate(fd, BLOCK - 8, 2 * BLOCK)
        os.fsync(fd)
        assert mount.version() == step and (array(mount.model / "weights") == step).all()
    os.fsync(fd)
    assert mount.version() == 5 and (array(mount.model / "weights") == 5).all(), "the region keeps what was stored"
    os.posix_fallocate(fd, 0, SIZE)
    os.fsync(fd)
    assert mount.version() == 6 and (array(mount.model / "weights") == 6).all()
    os.close(fd)


@also_on_network
def test_what_fallocate_refuses_changes_nothing(mounted):
    mount = mounted()
    fd, values = mapped(mount.model)
    values[:] = 1
    size = os.fstat(fd).st_size
    for offset, length in [(0, SIZE + 1), (SIZE, 1), (1 << 40, 1), (SIZE - 1, 2)]:
        fails(errno.EFBIG, os.posix_fallocate, fd, offset, length)
        assert os.fstat(fd).st_size == size == os.stat(mount.model / "weights").st_size
    assert "outside the model" in (mount.model / "error").read_text()
    for mode in [1, 2 | 1, 0x10, 0x10 | 1]:
        fails(errno.EOPNOTSUPP, fallocate, fd, mode, 0, BLOCK)
    for length in [0, -1]:
        fails(errno.EINVAL, os.posix_fallocate, fd, 0, length)
    fails(errno.EINVAL, os.posix_fallocate, fd, -1, 4)
    # None of that has turned it off.
    fallocate(fd, 0, 0, SIZE)
    assert mount.version() == 0
    os.fsync(fd)
    assert mount.version() == 1 and (array(mount.model / "weights") == 1).all()
    os.close(fd)


@also_on_network
def test_fallocate_is_for_mapped_gradients(mounted):
    """Elsewhere it is EINVAL, so that no C library writes zeros in its place."""
    mount = mounted()
    place = mount.join("a")
    for path in [mount.model / "gradients", place / "gradients", mount.model / "device", mount.model / "control/linger"]:
        fd = os.open(path, os.O_WRONLY)
        fails(errno.EINVAL, os.posix_fallocate, fd, 0, 4)
        os.close(fd)
    fd = os.open(mount.model / "device", os.O_RDWR)
    fails(errno.EINVAL, os.posix_fallocate, fd, 0, SIZE)
    os.close(fd)
    assert mount.version() == 0
    fd, values = mapped(place)
    values[:] = 3
    os.posix_fallocate(fd, 0, SIZE)
    os.close(fd)


def test_fallocate_is_answered_at_once(cluster):
    """Also while no shard answers."""
    one = sum_model(cluster(2), timeout=2)
    mount = one.mount(transport="shm")
    fd, values = mapped(mount.model, BIG)
    values[:] = 1
    for shard in one.shards:
        shard.pause()
    with takes(0, 1):
        for at in range(0, BIG, BLOCK):
            os.posix_fallocate(fd, at, BLOCK)
    assert outcome(os.fsync, fd) == "ETIMEDOUT"
    # The outcome of that step is open, and so is the number of the next.
    with takes(0, 1):
        os.posix_fallocate(fd, 0, BIG)
    for shard in one.shards:
        shard.resume()
    values[:] = 1000
    eventually(lambda: outcome(os.fsync, fd) == "done", deadline=20)
    assert only(mount, mount.own()) % 1000 in (0, 1)
    os.close(fd)


@TRANSPORTS
def test_final_bytes_that_change_count_either_way(cluster, transport):
    """For that learner alone: each of its bytes is old or new, and the others' are as they were written."""
    one = sum_model(cluster(1), learners=2)
    near, far = one.mount(transport=transport), one.mount(transport=transport)
    a, b = near.join("a"), far.join("b")
    fd, values = mapped(a, BIG)
    values[:] = 1
    os.posix_fallocate(fd, 0, BIG)
    writes = os.open(b / "gradients", os.O_WRONLY)
    os.write(writes, np.full(BIG // 4, 10, "<f4"))
    values[:] = 2
    Threads().run(lambda: os.fsync(fd), lambda: os.close(writes))
    assert set(array(far.place("b") / "weights").tolist()) <= {11, 12}
    os.close(fd)


@also_on_network
def test_nan_in_final_bytes_is_reported_at_fsync(mounted):
    mount = mounted(learners=2)
    places = [mount.join(name) for name in "ab"]
    fd, values = mapped(places[0])
    for step in range(1, 4):
        values[:] = 1
        values[step * BLOCK // 4] = np.nan
        os.posix_fallocate(fd, 0, SIZE)
        writes = os.open(places[1] / "gradients", os.O_WRONLY)
        os.write(writes, np.full(SIZE // 4, 2, "<f4"))
        closes = Threads().start(os.close, writes)
        fails(errno.EINVAL, os.fsync, fd)
        assert "NaN or Inf" in (places[0] / "error").read_text()
        assert mount.version() == step - 1
        values[step * BLOCK // 4] = 1
        os.posix_fallocate(fd, 0, SIZE)
        os.fsync(fd)
        closes.result(300)
        assert mount.version() == step and only(mount, "a") == 3 * step
    os.close(fd)


@also_on_network
def test_closing_drops_final_bytes(mounted):
    """As it ships nothing of a mapping."""
    mount = mounted()
    for _ in range(3):
        fd, values = mapped(mount.model)
        values[:] = 1000
        os.posix_fallocate(fd, 0, SIZE)
        del values
        os.close(fd)
        assert mount.version() == 0
    fd, values = mapped(mount.model)
    values[:] = 1
    os.posix_fallocate(fd, 2 * BLOCK, BLOCK)
    # Another one that closes costs time, and not the step.
    other, _ = mapped(mount.model)
    os.posix_fallocate(other, 0, BLOCK)
    os.close(other)
    os.fsync(fd)
    assert mount.version() == 1 and (array(mount.model / "weights") == 1).all()
    os.close(fd)


@also_on_network
def test_a_truncation_drops_final_bytes(mounted):
    mount = mounted()
    fd, values = mapped(mount.model)
    for step in range(1, 4):
        values[:] = 1000
        os.posix_fallocate(fd, 0, SIZE)
        os.ftruncate(fd, 0)
        values[:] = 1
        os.fsync(fd)
        assert mount.version() == step and (array(mount.model / "weights") == step).all()
    os.close(fd)


FINAL = """
fd = os.open(argv[0], os.O_RDWR | os.O_DIRECT)
memory = memoryview(mmap.mmap(fd, int(argv[1]))).cast("f")
memory[:] = memoryview(bytes([0, 0, 122, 68]) * (int(argv[1]) // 4)).cast("f")
os.posix_fallocate(fd, 0, int(argv[1]))
say("final")
wait()
"""


@pytest.mark.parametrize("ends", ["killed", "exits"])
@also_on_network
def test_final_bytes_of_a_program_that_ends_before_fsync_never_count(mounted, ends):
    mount = mounted()
    place = mount.join("a")
    learner = program(FINAL, place / "gradients", SIZE)
    assert hear(learner) == "final"
    if ends == "killed":
        os.kill(learner.pid, signal.SIGKILL)
        finish(learner, -signal.SIGKILL)
        eventually(lambda: not place.exists())
        place = mount.join("a")
    else:
        go(learner)
        finish(learner)
    fd, values = mapped(place)
    values[:] = 1
    os.posix_fallocate(fd, 0, 2 * BLOCK)
    os.fsync(fd)
    assert only(mount, "a") == 1
    os.close(fd)


@also_on_network
def test_a_write_takes_the_place_of_final_bytes(mounted):
    """fsync ships writes or the mapping, as without fallocate."""
    mount = mounted()
    fd, values = mapped(mount.model)
    for step in range(1, 4):
        values[:] = 1000
        os.posix_fallocate(fd, 0, SIZE)
        os.pwrite(fd, np.full(BLOCK // 4, step, "<f4"), BLOCK)
        fails(errno.EINVAL, os.posix_fallocate, fd, 0, SIZE)
        assert "write(2) was used" in (mount.model / "error").read_text()
        os.fsync(fd)
        assert mount.version() == step
        got = array(mount.model / "weights")
        assert (got[BLOCK // 4 : BLOCK // 2] == sum(range(step + 1))).all()
        assert (got[: BLOCK // 4] == 0).all() and (got[BLOCK // 2 :] == 0).all()
    values[:] = 5
    os.posix_fallocate(fd, 0, SIZE)
    os.fsync(fd)
    assert mount.version() == 4 and array(mount.model / "weights")[0] == 5
    os.close(fd)


@pytest.mark.parametrize("direct", [0, os.O_DIRECT], ids=["opened without O_DIRECT", "no passthrough"])
def test_final_bytes_in_the_page_cache_wait_for_fsync(cluster, direct):
    mount = sum_model(cluster(1)).mount(no_passthrough=direct != 0)
    fd, values = mapped(mount.model, BIG, direct)
    before = pushed(mount)
    values[:] = 1
    os.posix_fallocate(fd, 0, BIG)
    time.sleep(0.2)
    assert pushed(mount) == before
    os.fsync(fd)
    assert only(mount, mount.own()) == 1 and pushed(mount) == before + BIG
    os.close(fd)
