"""Mapped gradients on a network: shards read the memory of a program while its fsync runs, and never count what they read
later."""

import mmap
import os
import signal
import time

import numpy as np
import pytest
from filetools import BLOCK, Threads, eventually, finish, go, hear, only, outcome, program, takes

# More than sockets hold between a mount and a shard that is stopped.
SIZES = {"shm": 8 << 20, "tcp": 64 << 20}

# Whether half of the bytes are declared final before fsync.
DECLARES = pytest.mark.parametrize("final", [0, 2], ids=["nothing is final", "half is final"])

# Ships ones, stores thousands as soon as fsync says anything, and ships those.
STORES = """
import errno
def ends(*_):
    raise InterruptedError(errno.EINTR, "asked to end")
signal.signal(signal.SIGINT, ends)
path, size, final = argv[0], int(argv[1]), int(argv[2])
fd = os.open(path, os.O_RDWR | os.O_DIRECT)
memory = memoryview(mmap.mmap(fd, size)).cast("f")
one, thousand = memoryview(bytes([0, 0, 128, 63]) * (size // 4)), memoryview(bytes([0, 0, 122, 68]) * (size // 4))
memory[:] = one.cast("f")
say("ready")
wait()
if final:
    os.posix_fallocate(fd, 0, size // final)
try:
    os.fsync(fd)
    said = "done"
except OSError as error:
    said = errno.errorcode[error.errno]
memory[:] = thousand.cast("f")
say(said)
wait()
"""


def model(one, size, **settings):
    one.create("m", size=size, block_size=BLOCK, reducer="sum", **{"timeout": 2, "lease": 30, **settings})
    return one


def other_than_the_coordinator(one):
    coordinator = one.coordinator_shard("m")
    return coordinator, next(shard for shard in one.shards if shard is not coordinator)


@DECLARES
@pytest.mark.parametrize(
    "transport, stopped", [("shm", "other"), ("shm", "coordinator"), ("shm", "both"), ("tcp", "other"), ("tcp", "both")]
)
def test_mapped_memory_is_its_programs_again_after_a_timeout(cluster, transport, stopped, final):
    """What it stores then is not counted in the place of what it had stored: not by a shard that goes on later, whoever
    else was stopped."""
    size = SIZES[transport]
    one = model(cluster(2), size)
    mount = one.mount(transport=transport)
    fd = os.open(mount.join("a") / "gradients", os.O_RDWR | os.O_DIRECT)
    memory = np.frombuffer(mmap.mmap(fd, size), "<f4")
    coordinator, other = other_than_the_coordinator(one)
    for shard in {"other": [other], "coordinator": [coordinator], "both": [other]}[stopped]:
        shard.pause()
    memory[:] = 1
    if final:
        os.posix_fallocate(fd, 0, size // final)
    fsync = Threads().start(outcome, os.fsync, fd)
    if stopped == "both":
        # Its plan is under way.
        time.sleep(0.7)
        coordinator.pause()
    assert fsync.result(300) == "ETIMEDOUT"
    memory[:] = 1000
    other.resume()
    time.sleep(0.3)
    coordinator.resume()
    eventually(lambda: outcome(os.fsync, fd) == "done", deadline=20)
    assert only(mount, "a") % 1000 in (0, 1)
    eventually(lambda: outcome(os.fsync, fd) == "done", deadline=20)
    assert only(mount, "a") % 1000 in (0, 1)
    os.close(fd)


@DECLARES
def test_mapped_memory_is_its_programs_again_after_a_signal(cluster, final):
    """A signal ends the wait within a second, also while a shard does not answer."""
    size = SIZES["shm"]
    one = model(cluster(2), size, timeout=200)
    mount = one.mount(transport="shm")
    learner = program(STORES, mount.join("a") / "gradients", size, final)
    assert hear(learner) == "ready"
    coordinator, other = other_than_the_coordinator(one)
    other.pause()
    go(learner)
    time.sleep(0.7)
    with takes(0, 3):
        os.kill(learner.pid, signal.SIGINT)
        assert hear(learner) == "EINTR"
    other.resume()
    fd = os.open(mount.place("a") / "gradients", os.O_RDWR | os.O_DIRECT)
    eventually(lambda: outcome(os.fsync, fd) == "done", deadline=20)
    assert only(mount, "a") == 1000, "what was interrupted does not count"
    os.close(fd)
    finish(learner)


@DECLARES
def test_mapped_memory_is_its_programs_again_when_its_daemon_is_killed(cluster, final):
    """What a shard reads of it later does not count, though the memory is still there."""
    size = SIZES["shm"]
    one = model(cluster(2), size, lease=2, timeout=200)
    mount, reader = one.mount(transport="shm"), one.mount(transport="shm")
    learner = program(STORES, mount.join("a") / "gradients", size, final)
    assert hear(learner) == "ready"
    coordinator, other = other_than_the_coordinator(one)
    other.pause()
    go(learner)
    time.sleep(0.7)
    mount.kill()
    assert hear(learner) in ("ECONNABORTED", "ENOTCONN")
    other.resume()
    time.sleep(0.5)
    fd = os.open(reader.join("b") / "gradients", os.O_WRONLY)
    twos = np.full(size // 4, 2, "<f4")
    os.write(fd, twos)
    eventually(lambda: outcome(os.fsync, fd) == "done", deadline=20)
    assert only(reader, "b") in (2, 3)
    os.close(fd)
    learner.kill()
    learner.wait()
