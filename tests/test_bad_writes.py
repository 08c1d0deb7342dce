"""Writes that must be refused."""

import errno
import os

import pytest

from refusals import (
    BLOCK,
    EACCES,
    EINVAL,
    ONE,
    ONES,
    nothing_changes,
    opened,
    refused,
    safetensors,
    said,
    small,
    state,
    tensor,
)



def test_a_write_past_the_end_is_refused(start_mount):
    mount = small(start_mount)
    size = 4 * BLOCK
    with nothing_changes(mount):
        with refused(errno.EFBIG), opened(mount.model / "gradients", os.O_WRONLY) as fd:
            for offset in [size, size + 1, size + (1 << 20), 1 << 40, 1 << 62]:
                with refused(errno.EFBIG):
                    os.pwrite(fd, ONE, offset)
        said(mount, str(size + 4), str(size))


def test_a_write_across_the_end_is_refused(start_mount):
    mount = small(start_mount)
    size = 4 * BLOCK
    with nothing_changes(mount):
        with refused(errno.EFBIG), opened(mount.model / "gradients", os.O_WRONLY) as fd:
            with refused(errno.EFBIG):
                os.pwrite(fd, ONE * 2, size - 4)
            with refused(errno.EFBIG):
                os.pwrite(fd, bytes(size + 4), 0)


def test_a_write_of_new_weights_past_the_end_is_refused(start_mount):
    mount = small(start_mount, reducer="assign")
    size = 4 * BLOCK
    with nothing_changes(mount):
        with refused(errno.EFBIG), opened(mount.model / "weights", os.O_WRONLY) as fd:
            with refused(errno.EFBIG):
                os.pwrite(fd, ONE, size)
            with refused(errno.EFBIG):
                os.pwrite(fd, ONE * 2, size - 4)


def test_nothing_of_a_huge_write_that_is_cut_at_the_end_counts(start_mount):
    mount = start_mount(size="16MiB", reducer="sum")
    data = ONE * (5 << 20)
    with nothing_changes(mount):
        fd = os.open(mount.model / "gradients", os.O_WRONLY)
        done = os.pwrite(fd, data, 0)
        assert 0 < done <= 16 << 20 and done % 4 == 0, done
        with refused(errno.EFBIG):
            os.pwrite(fd, data[done:], done)
        with refused(errno.EFBIG):
            os.close(fd)


def test_nothing_of_a_huge_write_in_one_call_counts(start_mount):
    mount = start_mount(size="64MiB", reducer="sum")
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        assert os.write(fd, ONE * (16 << 20)) == 64 << 20
    assert mount.wait_for_version(1) == 1
    assert (mount.weights() == ONE * (16 << 20)) is True


def test_files_that_are_read_only_are_so_for_root_too(start_mount):
    mount = small(start_mount)
    mount.join("a")
    mount.leave("a")
    mount.join("a")
    mount.contribute(ONE, learner="a")
    mount.wait_for_version(1)
    mount.leave("a")
    mount.join("b")
    m = mount.model
    paths = [
        m / "weights", m / "weights.safetensors", m / "tensors/weights.npy", m / "version", m / "status.json",
        m / "versions/1/weights", m / "versions/1/weights.safetensors", m / "versions/1/version",
        m / "versions/1/tensors/weights.npy", m / "learners/b/weights", m / "learners/b/version",
        m / "learners/b/status", mount.root / "README",
    ]
    before = state(mount)
    for path in paths:
        for flags in [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND]:
            # Which of two reasons is given for appending to a read-only file is open.
            with refused(EACCES, EINVAL) if flags & os.O_APPEND else refused(EACCES):
                os.close(os.open(path, flags))
    for path in paths[1:]:
        with refused(EACCES):
            os.truncate(path, 0)
    said(mount, "weights is read-only", "assign", "control/reducer")
    assert state(mount) == before


def test_gradients_cannot_be_read(start_mount):
    mount = small(start_mount)
    mount.join("a")
    for path in [mount.model / "gradients", mount.model / "learners/a/gradients"]:
        with refused(EACCES):
            os.close(os.open(path, os.O_RDONLY))
    said(mount, "gradients is write-only", "read weights instead")


HALVES = {
    "f32": [[(0, 6)], [(0, 1)], [(2, 2)], [(4, 7), (12, 4)], [(BLOCK - 2, 2)], [(BLOCK, 5)], [(BLOCK + 1, 4)], [(0, 4), (4 * BLOCK - 3, 3)]],
    "bf16": [[(0, 3)], [(1, 1)], [(BLOCK - 1, 1)], [(1, 4)]],
    "f16": [[(0, 3)], [(1, 1)], [(BLOCK - 1, 1)], [(1, 4)]],
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("end", ["close", "fsync"])
def test_half_an_element_is_refused(start_mount, dtype, end):
    mount = small(start_mount, dtype=dtype)
    for ranges in HALVES[dtype]:
        with nothing_changes(mount, ONES[dtype]):
            fd = os.open(mount.model / "gradients", os.O_WRONLY)
            for offset, length in ranges:
                assert os.pwrite(fd, bytes(length), offset) == length
            if end == "fsync":
                with refused(EINVAL):
                    os.fsync(fd)
                os.close(fd)
            else:
                with refused(EINVAL):
                    os.close(fd)
    said(mount, "in the middle of an element")


def test_half_an_element_that_is_completed_in_time(start_mount):
    mount = small(start_mount)
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        for offset, part in [(0, ONE[:1]), (3, ONE[3:] + ONE[:2]), (1, ONE[1:3]), (6, ONE[2:])]:
            os.pwrite(fd, part, offset)
    assert mount.wait_for_version(1) == 1
    assert (mount.weights()[:12] == ONE * 2 + bytes(4)) is True


def test_fsync_of_half_an_element_leaves_the_handle_usable(start_mount):
    mount = small(start_mount)
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        os.pwrite(fd, bytes(6), 0)
        with refused(EINVAL):
            os.fsync(fd)
        os.pwrite(fd, ONE, 0)
        os.fsync(fd)
        assert mount.version() == 1
    assert mount.version() == 1 and mount.weights()[:4] == ONE


def test_half_an_element_of_new_weights_is_refused(start_mount):
    mount = small(start_mount, reducer="assign")
    for end in ["fsync", "close"]:
        with nothing_changes(mount):
            fd = os.open(mount.model / "weights", os.O_WRONLY)
            os.pwrite(fd, bytes(6), 0)
            with refused(EINVAL):
                os.fsync(fd) if end == "fsync" else os.close(fd)
            if end == "fsync":
                os.close(fd)


def test_half_an_element_is_refused_in_a_model_of_several_types(start_mount, tmp_path):
    path = tmp_path / "mixed.safetensors"
    header = {"a": tensor(0, 8), "b": tensor(8, 14, "F16", [3]), "c": tensor(14, 21, "U8", [7])}
    path.write_bytes(safetensors(header, bytes(21)))
    mount = start_mount(model=path, reducer="sum")
    for offset, length, fits in [(0, 6, False), (8, 1, False), (8, 2, True), (10, 4, True), (14, 1, True), (15, 3, True)]:
        fd = os.open(mount.model / "gradients", os.O_WRONLY)
        os.pwrite(fd, bytes(length), offset)
        if fits:
            os.close(fd)
        else:
            with refused(EINVAL):
                os.close(fd)
