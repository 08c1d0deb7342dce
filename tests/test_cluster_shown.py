"""A mount that shares memory with a model's only shard shows versions where they lie, as docs/use/memory.md promises."""

import errno
import mmap
import os

import numpy as np
from filetools import BLOCK, array, close, eventually, fails

SIZE = 16 * BLOCK + 4096
ELEMENTS = SIZE // 4
MOST = 4


def is_all(data, value):
    return (np.frombuffer(data, "<f4") == value).all()


def test_versions_shown_from_the_shards_memory_hold_nobody_up(cluster):
    """One mount's readers hold all that it may show, and more versions than that are made by another one."""
    one = cluster(1, size=SIZE, block_size=BLOCK, reducer="sum", learners=1, timeout=200, max_versions=MOST)
    trains, reads = one.mount(transport="shm"), one.mount(transport="shm")
    ones = np.ones(ELEMENTS, "<f4")
    held = []
    for version in range(MOST):
        fd = os.open(reads.model / "weights", os.O_RDONLY)
        held.append((version, fd, mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)))
        trains.contribute(ones)
        eventually(lambda: reads.seen() == version + 1)
    fails(errno.ENOMEM, os.open, reads.model / "weights", os.O_RDONLY)
    assert f"programs hold {MOST} versions open" in (reads.model / "error").read_text()
    for version in range(MOST, 5 * MOST):
        trains.contribute(ones)
        assert (array(trains.model / "weights") == version + 1).all()
    status = reads.status()
    # It shows the newest one beside those that are held.
    eventually(lambda: reads.seen() == 5 * MOST)
    assert status["version_buffers"]["existing"] <= 2 * MOST
    assert (status["payload"]["pull_copied_bytes"], status["shards"][0]["transport"]) == (0, "shm")
    assert trains.status()["payload"]["pull_copied_bytes"] == 0
    # The shard has six buffers and two sums, and has left the others to the mount.
    assert one.partition(one.shards[0], "m")["memory_bytes"] <= 8 * SIZE

    def all_are_whole():
        for version, fd, mapping in held:
            assert is_all(os.pread(fd, SIZE, 0), version) and is_all(mapping[:], version), version

    all_are_whole()
    # One that is given back makes room for the newest.
    version, fd, mapping = held.pop(1)
    mapping.close()
    os.close(fd)
    eventually(lambda: reads.seen() == 5 * MOST)
    assert (array(reads.model / "weights") == 5 * MOST).all()
    newest = os.open(reads.model / "weights", os.O_RDONLY)
    held.append((5 * MOST, newest, mmap.mmap(newest, SIZE, prot=mmap.PROT_READ)))
    # Open versions stay readable when the shard is killed.
    one.shards[0].kill()
    eventually(lambda: not reads.status()["shards"][0]["connected"])
    all_are_whole()
    for _, fd, mapping in held:
        mapping.close()
        os.close(fd)


def test_versions_shown_from_the_shards_memory_hold_nobody_up__but_who_must_see_a_newer_one_is_told_why(cluster):
    """A learner holds all versions that its mount may show. Nobody else is missing."""
    one = cluster(1, size=SIZE, block_size=BLOCK, reducer="sum", learners=1, timeout=0.5, max_versions=MOST)
    mount = one.mount(transport="shm")
    place, held = mount.join("a"), []
    for _ in range(2 * MOST):
        held.append(os.open(place / "weights", os.O_RDONLY))
        mount.contribute(np.ones(ELEMENTS, "<f4"), learner="a")
        eventually(lambda: mount.seen() == len(held) or len(held) == 2 * MOST)
    fails(errno.ETIMEDOUT, os.open, place / "weights", os.O_RDONLY)
    assert "every version buffer of this mount is held open" in (place / "error").read_text()
    close(held.pop(0))
    assert (array(place / "weights") == 2 * MOST).all()
    close(*held)
