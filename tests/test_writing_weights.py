"""Writing whole new weights, and element types: what docs/use/semantics.md promises of them."""

import errno
import os
import threading

import numpy as np
import pytest
from conftest import write_all
from filetools import (
    BLOCK, SIZE, Threads, array, bf16, eventually, f32, fails, filled, finish, from_bf16, go, hear, killed, mounts,
    program, shell, write_safetensors
)

pytestmark = pytest.mark.also_on_network
mounted = mounts(reducer="assign")


BOTH = pytest.mark.parametrize("name", ["weights", "publish"])


def publish(mount, data, offset=0, name="weights", **options):
    write_all(mount.model / name, data, offset, **options)


def test_weights_publish_atomically(mounted):
    mount = mounted()
    stop, seen = threading.Event(), set()

    def watch():
        while not stop.is_set():
            values = array(mount.model / "weights")
            assert (values == values[0]).all()
            seen.add(int(values[0]))

    threads = Threads()
    watchers = [threads.start(watch) for _ in range(2)]
    for value in range(1, 21):
        fd = os.open(mount.model / "weights", os.O_WRONLY | os.O_TRUNC)
        new = filled(mount, value).tobytes()
        for at in range(0, SIZE, 100_001):
            os.pwrite(fd, new[at : at + 100_001], at)
        assert mount.version() == value - 1
        os.close(fd)
        assert mount.version() == value and (array(mount.model / "weights") == value).all()
        if value % 5 == 0:
            eventually(lambda value=value: value in seen)
    stop.set()
    for watcher in watchers:
        watcher.result(300)


@BOTH
def test_weights_publish_atomically__in_part(mounted, name):
    mount = mounted()
    publish(mount, filled(mount, 1), name=name)
    expected = filled(mount, 1)
    for offset, count in [(0, 1), (BLOCK - 8, 100), (SIZE - 4, 1)]:
        publish(mount, np.full(count, 7, "<f4"), offset, name)
        expected[offset // 4 : offset // 4 + count] = 7
        assert mount.weights() == expected.tobytes(), "what was not written keeps its value"
    fd = os.open(mount.model / name, os.O_WRONLY)
    os.pwrite(fd, f32(8).tobytes(), 0)
    os.pwrite(fd, f32(9).tobytes(), 0)
    os.fsync(fd)
    assert mount.version() == 5 and array(mount.model / "weights")[0] == 9, "the last write of a byte counts"
    os.close(fd)
    assert mount.version() == 5


@BOTH
def test_weights_publish_atomically__or_not_at_all(mounted, name):
    """Refused bytes, and a writer that is killed, leave no trace; one that exits has closed."""
    mount = mounted()
    for data, offset, code in [
        (b"abc", 0, errno.EINVAL), (f32(np.nan), 0, errno.EINVAL), (f32(1, 2), SIZE - 4, errno.EFBIG),
        (b"\x93NUMPY\x01\0v\0{'descr'", 0, errno.EINVAL),
    ]:  # fmt: skip
        fails(code, publish, mount, data, offset, name)
    fails(errno.EINVAL, os.truncate, mount.model / name, 4)
    fd = os.open(mount.model / name, os.O_WRONLY)
    nan = f32(np.nan).tobytes()
    os.pwrite(fd, nan[:2], BLOCK)
    os.pwrite(fd, nan[2:], BLOCK + 2)
    fails(errno.EINVAL, os.close, fd)
    assert "NaN" in (mount.model / "error").read_text(), "of an element that came in two parts"
    code = (
        "fd = os.open(argv[0], os.O_WRONLY)\nos.pwrite(fd, bytes([0, 0, 128, 63]) * 70_000, 0)\n"
        "say('written'); wait()\nos._exit(0)"
    )
    for _ in range(3):
        child = program(code, mount.model / name)
        hear(child)
        killed(child)
    child = program(code, mount.model / name)
    hear(child)
    assert mount.version() == 0 and not any(mount.weights()), "a killed writer's weights were published"
    go(child)
    finish(child)
    eventually(lambda: mount.version() == 1)
    assert (array(mount.model / "weights")[:70_000] == 1).all()


def test_weights_writable_for_assign_or_at_version_0(mounted):
    mount = mounted(reducer="sum")
    publish(mount, filled(mount, 3))
    assert mount.version() == 1 and (array(mount.model / "weights") == 3).all()
    for flags in (os.O_WRONLY, os.O_WRONLY | os.O_TRUNC):
        fails(errno.EACCES, os.open, mount.model / "weights", flags)
    mount.contribute(filled(mount, 1))
    mount.control("reducer", "assign")
    publish(mount, filled(mount, 9))
    mount.control("reducer", "sum")
    mount.contribute(filled(mount, 1))
    assert mount.version() == 4 and (array(mount.model / "weights") == 10).all()
    for name in ("weights.safetensors", "tensors/weights.npy", "versions/4/weights", f"learners/{mount.own()}/weights"):
        fails(errno.EACCES, os.open, mount.model / name, os.O_WRONLY)


def test_truncated_weights_must_be_written_whole(mounted, tmp_path):
    mount = mounted()
    publish(mount, filled(mount, 1))
    fails(errno.EINVAL, publish, mount, filled(mount, 2)[:-1], flags=os.O_WRONLY | os.O_TRUNC)
    assert mount.version() == 1 and (array(mount.model / "weights") == 1).all()
    (tmp_path / "short").write_bytes(bytes(SIZE - 4))
    shell('cp "$1" "$2"', tmp_path / "short", mount.model / "weights", status=1)
    assert mount.version() == 1
    (tmp_path / "whole").write_bytes(filled(mount, 5).tobytes())
    shell('cp "$1" "$2"', tmp_path / "whole", mount.model / "weights")
    assert mount.version() == 2 and (array(mount.model / "weights") == 5).all()


def test_assigned_contributions_hold_values(mounted):
    mount = mounted(learners=2)
    mount.join("a", "b")
    mount.contribute(filled(mount, 1), learner="a")
    mount.contribute(f32(5, 5), offset=BLOCK, learner="b")
    expected = filled(mount, 1)
    expected[BLOCK // 4 : BLOCK // 4 + 2] = 5
    assert mount.weights() == expected.tobytes()


def mixed_model(path):
    """Tensors of four types; the 64-bit one in the middle of the float ones' bytes."""
    floats = np.arange(50_000, dtype="<f4")
    halves = np.full(30_001, 2, "<f2")
    brains = np.full(40_000, 3, "<f4")
    whole = np.arange(10_000, dtype="<i8") << 40
    tensors = {
        "whole": ("I64", whole.shape, whole.tobytes()),
        "floats": ("F32", (250, 200), floats.tobytes()),
        "brains": ("BF16", brains.shape, bf16(brains).tobytes()),
        "halves": ("F16", halves.shape, halves.tobytes()),
    }
    return write_safetensors(path, tensors, {"made": "by a test"}), tensors


def parts_of(mount):
    """Name -> the slice of the flat file that holds the tensor."""
    flat, parts, at = mount.weights(), {}, 0
    for name, length in [("whole", 80_000), ("floats", 200_000), ("brains", 80_000), ("halves", 60_002)]:
        parts[name] = slice(at, at + length)
        at += length
    assert at == len(flat)
    return parts


def test_non_float_tensors_keep_their_bytes(start_mount, tmp_path):
    path, tensors = mixed_model(tmp_path / "mixed.safetensors")
    mount = start_mount(model=path, block_size=BLOCK, reducer="sum")
    parts = parts_of(mount)
    contribution = bytearray(len(mount.weights()))
    contribution[parts["whole"]] = b"\xff" * 80_000
    contribution[parts["floats"]] = np.ones(50_000, "<f4").tobytes()
    contribution[parts["brains"]] = bf16(np.ones(40_000)).tobytes()
    contribution[parts["halves"]] = np.ones(30_001, "<f2").tobytes()
    mount.contribute(bytes(contribution))
    flat = mount.weights()
    assert flat[parts["whole"]] == tensors["whole"][2]
    assert (np.frombuffer(flat[parts["floats"]], "<f4") == np.arange(50_000) + 1).all()
    assert (from_bf16(np.frombuffer(flat[parts["brains"]], "<u2")) == 4).all()
    assert (np.frombuffer(flat[parts["halves"]], "<f2") == 3).all()
    mount.control("reducer", "assign")
    publish(mount, b"\x11" * 80_000, parts["whole"].start)
    assert mount.weights() == b"\x11" * 80_000 + flat[80_000:]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_half_precision_accumulates_in_fp32(start_mount, dtype):
    """Additions too small for the weights' own type add up."""
    mount = start_mount(size=4096, dtype=dtype, reducer="sum")
    encode = bf16 if dtype == "bf16" else lambda values: np.asarray(values, "<f2")
    decode = from_bf16 if dtype == "bf16" else lambda bits: bits.astype("<f4")
    kind = "<u2" if dtype == "bf16" else "<f2"
    small = 2.0**-9 if dtype == "bf16" else 2.0**-12
    mount.contribute(encode(np.ones(2048)))
    for _ in range(2):
        mount.contribute(encode(np.full(2048, small)))
        mount.contribute(encode(np.full(2048, small)))
    assert (decode(np.frombuffer(mount.weights(), kind)) == 1 + 4 * small).all()
