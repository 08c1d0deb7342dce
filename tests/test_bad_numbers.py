"""NaN, Inf and calls on the tree that must be refused."""

import ctypes
import errno
import mmap
import os
import struct

import pytest

from refusals import (
    BLOCK,
    EACCES,
    EINVAL,
    EPERM,
    ONE,
    ONES,
    libc,
    nothing_changes,
    opened,
    refused,
    said,
    small,
)


NONFINITE = {
    "f32": [struct.pack("<f", float(x)) for x in ("nan", "inf", "-inf")] + [struct.pack("<I", 0x7F800001)],
    "f16": [struct.pack("<e", float(x)) for x in ("nan", "inf", "-inf")] + [struct.pack("<H", 0x7C01)],
    "bf16": [struct.pack("<H", x) for x in (0x7FC0, 0x7F80, 0xFF80, 0x7F81)],
    # There is no infinity in E4M3.
    "f8_e4m3": [b"\xff", b"\x7f"],
    "f8_e5m2": [b"\x7e", b"\x7c", b"\xfc", b"\x7d"],
}


def contribute_mapped(path, size, offset, data):
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        with mmap.mmap(fd, size) as memory:
            kept = memory[offset:offset + len(data)]
            memory[offset:offset + len(data)] = data
            try:
                os.fsync(fd)
            finally:
                memory[offset:offset + len(data)] = kept
    finally:
        os.close(fd)


@pytest.mark.parametrize("dtype", NONFINITE)
@pytest.mark.parametrize("where", ["whole_block", "partial_block", "last_element", "mapped"])
def test_nan_and_inf_in_gradients_are_refused(start_mount, way, dtype, where):
    mount = small(start_mount, dtype=dtype, **way)
    one = ONES[dtype]
    count = BLOCK // len(one)
    path = mount.model / "gradients"
    for bad in NONFINITE[dtype]:
        with nothing_changes(mount, one):
            with refused(EINVAL):
                if where == "whole_block":
                    mount.contribute(one * (count // 2) + bad + one * (count - count // 2 - 1), offset=BLOCK)
                elif where == "partial_block":
                    mount.contribute(one + bad, offset=BLOCK + 3 * len(one))
                elif where == "last_element":
                    mount.contribute(one * (count - 1) + bad, offset=3 * BLOCK)
                else:
                    contribute_mapped(path, 4 * BLOCK, 2 * BLOCK + 7 * len(one), bad)
    said(mount, "NaN or Inf", "control/nonfinite")


@pytest.mark.parametrize("dtype", NONFINITE)
def test_nan_spoils_only_its_own_learners_contribution(start_mount, dtype):
    mount = small(start_mount, dtype=dtype, learners=2)
    one = ONES[dtype]
    mount.join("good"), mount.join("bad")
    # No half or quarter of the model, which is taken for an array of a narrower type.
    good = one * (BLOCK // len(one) + 1)
    mount.contribute(good, learner="good")
    for data in [NONFINITE[dtype][0] * (BLOCK // len(one)), one + NONFINITE[dtype][1]]:
        with refused(EINVAL):
            mount.contribute(data, learner="bad")
        assert mount.version() == 0 and mount.weights() == bytes(4 * BLOCK)
    mount.contribute(one, offset=2 * BLOCK, learner="bad")
    assert mount.wait_for_version(1) == 1
    assert (mount.weights() == good + bytes(BLOCK - len(one)) + one + bytes(2 * BLOCK - len(one))) is True


@pytest.mark.parametrize("dtype", NONFINITE)
def test_nan_and_inf_in_new_weights_are_refused(start_mount, dtype):
    mount = small(start_mount, dtype=dtype, reducer="assign")
    one = ONES[dtype]
    for bad in NONFINITE[dtype]:
        for offset in [0, BLOCK + 6 * len(one), 4 * BLOCK - len(bad)]:
            with nothing_changes(mount, one):
                fd = os.open(mount.model / "weights", os.O_WRONLY)
                os.pwrite(fd, bad, offset)
                with refused(EINVAL):
                    os.close(fd)


@pytest.mark.parametrize("dtype", NONFINITE)
def test_nan_and_inf_are_taken_where_they_are_wanted(start_mount, way, dtype):
    mount = small(start_mount, dtype=dtype, nonfinite="accept", carry=0, **way)
    one = ONES[dtype]
    inf, size = NONFINITE[dtype][1], len(one)
    mount.contribute(inf * (BLOCK // size), offset=BLOCK)
    assert (mount.weights()[BLOCK:2 * BLOCK] == inf * (BLOCK // size)) is True
    mount.contribute(one + inf)
    assert (mount.weights()[:3 * size] == one + inf + bytes(size)) is True
    contribute_mapped(mount.model / "gradients", 4 * BLOCK, 5 * size, inf)
    assert (mount.weights()[5 * size:6 * size] == inf) is True
    nan = NONFINITE[dtype][0]
    mount.contribute(nan)
    got = mount.weights()[:size]
    bits = int.from_bytes(got, "little")
    exponent, fraction = {
        "f32": (0x7F800000, 0x7FFFFF),
        "f16": (0x7C00, 0x3FF),
        "bf16": (0x7F80, 0x7F),
        "f8_e4m3": (0x78, 0x07),
        "f8_e5m2": (0x7C, 0x03),
    }[dtype]
    assert bits & exponent == exponent and bits & fraction, f"{got.hex()} is no NaN"
    assert mount.version() == 4


def test_a_sent_block_cannot_be_written_again(start_mount):
    mount = small(start_mount)
    whole = ONE * (BLOCK // 4)
    for offset, data in [(0, whole), (0, ONE), (BLOCK - 4, ONE * 2)]:
        with refused(EINVAL), opened(mount.model / "gradients", os.O_WRONLY) as fd:
            assert os.pwrite(fd, whole, 0) == BLOCK
            with refused(EINVAL):
                os.pwrite(fd, data, offset)
    said(mount, "block 0", "already sent")
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        assert os.pwrite(fd, whole, 0) == BLOCK
        # A block that is not complete can be written over; the last one counts.
        os.pwrite(fd, ONE, BLOCK)
        os.pwrite(fd, struct.pack("<f", 3.0), BLOCK)
    assert mount.wait_for_version(1) == 1
    assert mount.weights() == whole + struct.pack("<f", 3.0) + bytes(3 * BLOCK - 4)


def test_a_sent_block_cannot_be_written_again_through_another_handle(start_mount):
    mount = small(start_mount)
    whole = ONE * (BLOCK // 4)
    with opened(mount.model / "gradients", os.O_WRONLY) as one:
        os.pwrite(one, whole, BLOCK)
        with refused(EINVAL), opened(mount.model / "gradients", os.O_WRONLY) as other:
            with refused(EINVAL):
                os.pwrite(other, whole, BLOCK)
        os.fsync(one)
    # The handle that wrote nothing has dropped nothing.
    assert mount.version() == 1
    assert (mount.weights() == bytes(BLOCK) + whole + bytes(2 * BLOCK)) is True


def test_appending_is_refused(start_mount):
    mount = small(start_mount)
    mount.join("a")
    mount.leave("a")
    with nothing_changes(mount):
        for name in ["gradients", "device", "weights"]:
            with refused(EINVAL):
                os.close(os.open(mount.model / name, os.O_WRONLY | os.O_APPEND))
        said(mount, "fixed size", "do not append")


def test_truncating_to_another_size_is_refused(start_mount):
    mount = small(start_mount)
    size = 4 * BLOCK
    with nothing_changes(mount):
        for name in ["gradients", "device", "weights"]:
            for length in [1, size - 1, size + 1, 1 << 40]:
                with refused(EINVAL):
                    os.truncate(mount.model / name, length)
            os.truncate(mount.model / name, size)
            assert (mount.model / name).stat().st_size == size
        with opened(mount.model / "gradients", os.O_WRONLY) as fd:
            with refused(EINVAL):
                os.ftruncate(fd, 8)
        said(mount, "size is fixed at", str(size))


def test_truncate_of_small_files_to_a_size_changes_nothing(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        for path in [mount.model / "version", mount.model / "status.json", mount.root / "README"]:
            with refused(EACCES):
                os.truncate(path, 1)
        os.truncate(mount.model / "control/learning_rate", 0)


def fallocate(fd, mode, offset, length):
    call = libc.fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, mode, offset, length) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def test_fallocate_is_refused_but_of_mapped_gradients(start_mount, way):
    """For mode 0 never with an errno for which the C library would write zeros."""
    mount = small(start_mount, **way)
    with nothing_changes(mount):
        for name in ["gradients", "device", "weights", "control/linger"]:
            with opened(mount.model / name, os.O_WRONLY) as fd:
                for mode in [1, 3, 0x10]:
                    with refused(errno.EOPNOTSUPP):
                        fallocate(fd, mode, 0, BLOCK)
                with refused(EINVAL):
                    fallocate(fd, 0, 0, 4)
                with refused(EINVAL):
                    os.posix_fallocate(fd, 0, 4)


def test_names_cannot_be_made_removed_or_moved(start_mount, tmp_path):
    mount = small(start_mount)
    m = mount.model
    mount.join("a")
    mount.leave("a")

    def create(path):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))

    with nothing_changes(mount):
        for place in [mount.root, m, m / "control", m / "tensors", m / "versions", m / "versions/0", m / "learners"]:
            # A file that is made in control/ is a setting whose name is misspelt.
            with refused(errno.ENOENT if place.name == "control" else EPERM):
                create(place / "new")
            with refused(EPERM):
                os.mknod(place / "new", 0o600)
            with refused(EPERM):
                os.mkfifo(place / "new")
            with refused(EPERM):
                os.symlink("/etc/passwd", place / "new")
            with refused(EPERM):
                os.link(m / "version", place / "new")
            with refused(EPERM):
                os.rename(m / "version", place / "new")
            if place != m / "learners":
                with refused(EPERM):
                    os.mkdir(place / "new")
            assert not (place / "new").exists()
        files = ["weights", "weights.safetensors", "tensors/weights.npy", "gradients", "device", "version",
                 "status.json", "versions/0/weights", "control/reducer", "../README"]
        for name in files:
            with refused(EPERM):
                os.unlink(m / name)
            with refused(EPERM):
                os.chmod(m / name, 0o777)
            with refused(EPERM):
                os.chown(m / name, 1, 1)
            with refused(EPERM):
                os.setxattr(m / name, "user.x", b"1")
            with refused(EPERM):
                os.removexattr(m / name, "user.gradfs.version")
            with refused(EPERM):
                os.rename(m / name, m / "moved")
        for name in [".", "control", "tensors", "versions", "versions/0", "learners"]:
            with refused(EPERM):
                os.rmdir((m / name).resolve())
            with refused(EPERM):
                os.chmod(m / name, 0o777)
        with refused(EPERM, errno.EXDEV):
            os.rename(m / "version", tmp_path / "stolen")


def test_a_learners_directory_cannot_be_renamed(start_mount):
    mount = small(start_mount)
    mount.join("a")
    for target in [mount.model / "learners/b", mount.root / "b"]:
        with refused(EPERM):
            os.rename(mount.place("a"), target)
    with refused(EPERM):
        os.mkdir(mount.place("a") / "x")
    with refused(EPERM):
        os.unlink(mount.place("a") / "status")
    mount.contribute(ONE, learner="a")
    assert mount.wait_for_version(1) == 1


def test_zero_length_writes_contribute_nothing(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        with opened(mount.model / "gradients", os.O_WRONLY) as fd:
            for offset in [0, 1, BLOCK, 4 * BLOCK]:
                assert os.pwrite(fd, b"", offset) == 0
            os.fsync(fd)
        with opened(mount.model / "control/learning_rate", os.O_WRONLY) as fd:
            assert os.write(fd, b"") == 0


def test_o_direct_takes_unaligned_buffers(start_mount, way):
    mount = start_mount(size="4MiB", block_size="64KiB", reducer="sum", **way)
    data = struct.pack("<262144f", *range(1 << 18)) * 4
    raw = mmap.mmap(-1, len(data) + 8192)
    raw[3:3 + len(data)] = data
    with opened(mount.model / "gradients", os.O_WRONLY | os.O_DIRECT) as fd:
        done = 0
        for length in [4, 65532, 65536 + 4, 1 << 20, (1 << 20) + 12, len(data)]:
            with memoryview(raw) as view:
                length = min(length, len(data) - done)
                assert os.pwrite(fd, view[3 + done:3 + done + length], done) == length
            done += length
    assert mount.wait_for_version(1) == 1
    fd = os.open(mount.model / "weights", os.O_RDONLY)
    got = mmap.mmap(-1, len(data) + 8192)
    with memoryview(got) as view:
        assert os.preadv(fd, [view[1:1 + len(data)]], 0) == len(data)
    os.close(fd)
    assert got[1:1 + len(data)] == data


def test_vectored_writes_are_contributions(start_mount):
    mount = small(start_mount)
    data = struct.pack(f"<{BLOCK}f", *range(BLOCK))
    cuts = [0, 1, 3, 4, 10, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7, 4 * BLOCK]
    parts = [data[a:b] for a, b in zip(cuts, cuts[1:])]
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        assert os.writev(fd, parts) == len(data)
    assert (mount.weights() == data) is True
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        many = [data[BLOCK + i:BLOCK + i + 1] for i in range(1000)]
        assert os.pwritev(fd, many, BLOCK) == 1000
    with refused(errno.EFBIG), opened(mount.model / "gradients", os.O_WRONLY) as fd:
        os.pwritev(fd, [ONE, ONE, ONE], 4 * BLOCK - 8)
    twice = struct.pack("<250f", *(2 * (BLOCK // 4 + i) for i in range(250)))
    assert (mount.weights() == data[:BLOCK] + twice + data[BLOCK + 1000:]) is True


@pytest.mark.parametrize("call", ["sendfile", "splice", "copy_file_range", "copy_file_range_inside"])
def test_copies_by_the_kernel_are_contributions(start_mount, tmp_path, way, call):
    mount = start_mount(size="2MiB", block_size="64KiB", reducer="sum", **way)
    data = struct.pack("<262144f", *range(1 << 18)) * 2
    source = tmp_path / "source"
    source.write_bytes(data)
    inside = call == "copy_file_range_inside"
    if inside:
        mount.contribute(data)
        source = mount.model / "weights"
    version = mount.version()
    expected = struct.pack("<262144f", *range(0, 1 << 19, 2)) * 2 if inside else data
    with opened(source, os.O_RDONLY) as of, opened(mount.model / "gradients", os.O_WRONLY) as to:
        done = 0
        try:
            while done < len(data):
                if call == "sendfile":
                    moved = os.sendfile(to, of, done, len(data) - done)
                elif call == "splice":
                    r, w = os.pipe()
                    moved = os.splice(of, w, 65536, offset_src=done)
                    left = moved
                    while left:
                        left -= os.splice(r, to, left, offset_dst=done + moved - left)
                    os.close(r), os.close(w)
                else:
                    moved = os.copy_file_range(of, to, len(data) - done, done, done)
                assert moved > 0
                done += moved
        except OSError as error:
            # Between filesystems the kernel may refuse; programs then copy by themselves.
            assert call == "copy_file_range" and error.errno in (errno.EXDEV, errno.EOPNOTSUPP), error
            assert done == 0
            os.pwrite(to, data, 0)
    assert mount.wait_for_version(version + 1) == version + 1
    assert (mount.weights() == expected) is True


def test_a_splice_past_the_end_is_refused(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        r, w = os.pipe()
        os.write(w, ONE * 4)
        with refused(errno.EFBIG), opened(mount.model / "gradients", os.O_WRONLY) as fd:
            with refused(errno.EFBIG):
                os.splice(r, fd, 16, offset_dst=4 * BLOCK)
        os.close(r), os.close(w)


def test_weights_cannot_be_changed_through_a_mapping(start_mount, way):
    """A version is immutable: a handle that could be mapped writable is refused."""
    mount = small(start_mount, reducer="assign", **way)
    with opened(mount.model / "weights", os.O_RDONLY) as reader:
        with refused(EACCES):
            os.open(mount.model / "weights", os.O_RDWR)
        for flags in (os.O_RDONLY, os.O_WRONLY):
            with opened(mount.model / "weights", flags) as fd, pytest.raises(OSError):
                mmap.mmap(fd, BLOCK, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        assert os.pread(reader, 4, 0) == bytes(4), "a reader of this version sees what was never published"
        assert (mount.model / "versions/0/weights").read_bytes()[:4] == bytes(4)
        assert os.pread(reader, 4, 0) == bytes(4)


def test_stores_through_a_mapping_of_device_are_not_lost_in_silence(start_mount):
    mount = small(start_mount)
    fd = os.open(mount.model / "device", os.O_RDWR)
    try:
        with mmap.mmap(fd, BLOCK) as memory:
            memory[:4] = ONE
            memory.flush()
        os.fsync(fd)
    except OSError:
        return
    finally:
        os.close(fd)
    assert (mount.weights()[:4] == ONE) is True, "every call succeeded, and the stored gradient counts nowhere"
