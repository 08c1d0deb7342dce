"""Writes by every call that there is, and numbers of every type: what docs/use/semantics.md promises of `gradients`."""

import errno
import mmap
import os
import struct

import numpy as np
import pytest

from conftest import write_all
from filetools import BLOCK, fails, opened, raises, said
from refusals import ONES, small

NONFINITE = {
    "f32": [struct.pack("<f", float(x)) for x in ("nan", "inf", "-inf")] + [struct.pack("<I", 0x7F800001)],
    "f16": [struct.pack("<e", float(x)) for x in ("nan", "inf", "-inf")] + [struct.pack("<H", 0x7C01)],
    "bf16": [struct.pack("<H", x) for x in (0x7FC0, 0x7F80, 0xFF80, 0x7F81)],
    # There is no infinity in E4M3.
    "f8_e4m3": [b"\xff", b"\x7f"],
    "f8_e5m2": [b"\x7e", b"\x7c", b"\xfc", b"\x7d"],
}
# Exponent and fraction.
BITS = {"f32": (0x7F800000, 0x7FFFFF), "f16": (0x7C00, 0x3FF), "bf16": (0x7F80, 0x7F), "f8_e4m3": (0x78, 7), "f8_e5m2": (0x7C, 3)}


def contribute_mapped(path, offset, data):
    with opened(path, os.O_RDWR | os.O_DIRECT) as fd, mmap.mmap(fd, 4 * BLOCK) as memory:
        kept = memory[offset : offset + len(data)]
        memory[offset : offset + len(data)] = data
        try:
            os.fsync(fd)
        finally:
            memory[offset : offset + len(data)] = kept


@pytest.mark.parametrize("dtype", NONFINITE)
def test_nan_is_refused_or_accepted__of_every_type(start_mount, dtype):
    """In whole blocks, parts of them, mappings and new weights. It spoils the contribution of its own learner alone."""
    mount = small(start_mount, dtype=dtype, learners=2, carry=0)
    one, size, nan, inf = ONES[dtype], len(ONES[dtype]), *NONFINITE[dtype][:2]
    count = BLOCK // size
    for bad in NONFINITE[dtype]:
        fails(errno.EINVAL, write_all, mount.model / "weights", bad, 4 * BLOCK - size)
    mount.join("bad", "good")
    # No half or quarter of the model, which is taken for an array of a narrower type.
    good = one * (count + 1)
    mount.contribute(good, learner="good")
    for bad in NONFINITE[dtype]:
        block = one * (count // 2) + bad + one * (count - count // 2 - 1)
        for data, offset in [(block, BLOCK), (one + bad, BLOCK + 3 * size), (one * (count - 1) + bad, 3 * BLOCK)]:
            fails(errno.EINVAL, mount.contribute, data, offset, learner="bad")
        fails(errno.EINVAL, contribute_mapped, mount.place("bad") / "gradients", 2 * BLOCK + 7 * size, bad)
    said(mount, "NaN or Inf", "control/nonfinite")
    assert mount.version() == 0 and not any(mount.weights())
    mount.contribute(one, 2 * BLOCK, learner="bad")
    assert mount.wait_for_version(1) == 1
    assert mount.weights() == good + bytes(BLOCK - size) + one + bytes(2 * BLOCK - size)
    mount.leave("good")
    mount.control("nonfinite", "accept")
    mount.contribute(inf * count + one + nan, learner="bad")
    contribute_mapped(mount.place("bad") / "gradients", 0, bytes(4 * BLOCK))
    weights = mount.weights("bad")
    assert mount.version() == 3 and not any(weights)
    mount.contribute(nan + inf + one, 5 * size, learner="bad")
    weights = mount.weights("bad")[5 * size : 8 * size]
    bits, (exponent, fraction) = int.from_bytes(weights[:size], "little"), BITS[dtype]
    assert bits & exponent == exponent and bits & fraction and weights[size:] == inf + one, weights.hex()


def test_writes_of_any_shape__from_unaligned_memory(start_mount, way):
    mount = start_mount(size="4MiB", block_size=BLOCK, reducer="sum", **way)
    data = np.tile(np.arange(1 << 18, dtype="<f4"), 4).tobytes()
    raw = memoryview(bytes(3) + data)[3:]
    with opened(mount.model / "gradients", os.O_WRONLY | os.O_DIRECT) as fd:
        done = 0
        for length in [4, 65532, 65536 + 4, 1 << 20, (1 << 20) + 12, len(data)]:
            done += os.pwrite(fd, raw[done : done + length], done)
    assert done == len(data) and mount.wait_for_version(1) == 1
    got = bytearray(len(data) + 1)
    with opened(mount.model / "weights", os.O_RDONLY) as fd:
        assert os.preadv(fd, [memoryview(got)[1:]], 0) == len(data)
    assert got[1:] == data


def test_writes_of_any_shape__in_vectors(start_mount):
    mount = small(start_mount)
    data = np.arange(BLOCK, dtype="<f4").tobytes()
    cuts = [0, 1, 3, 4, 10, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7, 4 * BLOCK]
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        assert os.writev(fd, [data[a:b] for a, b in zip(cuts, cuts[1:])]) == len(data)
    assert mount.weights() == data
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        assert os.pwritev(fd, [data[BLOCK + i : BLOCK + i + 1] for i in range(1000)], BLOCK) == 1000
    with raises(errno.EFBIG), opened(mount.model / "gradients", os.O_WRONLY) as fd:
        os.pwritev(fd, [ONES["f32"]] * 3, 4 * BLOCK - 8)
    twice = (2 * np.frombuffer(data, "<f4")[BLOCK // 4 : BLOCK // 4 + 250]).tobytes()
    assert mount.weights() == data[:BLOCK] + twice + data[BLOCK + 1000 :]


@pytest.mark.parametrize("call", ["sendfile", "splice", "copy_file_range", "copy_file_range_inside"])
def test_writes_of_any_shape__by_the_kernel(start_mount, tmp_path, call):
    mount = start_mount(size="2MiB", block_size=BLOCK, reducer="sum")
    data, source = np.tile(np.arange(1 << 18, dtype="<f4"), 2), tmp_path / "source"
    source.write_bytes(data.tobytes())
    if call == "copy_file_range_inside":
        mount.contribute(data)
        source = mount.model / "weights"
    version, length, done = mount.version(), data.nbytes, 0
    with opened(source, os.O_RDONLY) as of, opened(mount.model / "gradients", os.O_WRONLY) as to:
        try:
            while done < length:
                if call == "sendfile":
                    moved = os.sendfile(to, of, done, length - done)
                elif call == "splice":
                    r, w = os.pipe()
                    left = moved = os.splice(of, w, 65536, offset_src=done)
                    while left:
                        left -= os.splice(r, to, left, offset_dst=done + moved - left)
                    os.close(r), os.close(w)
                else:
                    moved = os.copy_file_range(of, to, length - done, done, done)
                assert moved > 0
                done += moved
        except OSError as error:
            # Between filesystems the kernel may refuse; programs then copy by themselves.
            assert call == "copy_file_range" and error.errno in (errno.EXDEV, errno.EOPNOTSUPP) and done == 0, error
            os.pwrite(to, data, 0)
    assert mount.wait_for_version(version + 1) == version + 1
    assert mount.weights() == (data * (version + 1)).tobytes()
