"""Writing contributions: what docs/use/semantics.md and docs/use/contributions.md promise of `gradients` and
`device`.

New weights written whole are in test_writing_weights.py, deaths in mid-write in test_writing_ends.py.
"""

import errno
import mmap
import os
import random
import time

import numpy as np
import pytest
from filetools import (
    BLOCK, SIZE, Threads, array, eventually, f32, fails, filled, finish, go, hear, impatient, mounts, outcome,
    program, raises, said, shell, takes, write_safetensors
)

pytestmark = pytest.mark.also_on_network
mounted = mounts()


def some_values(seed=0):
    return np.random.RandomState(seed).randint(-1000, 1000, SIZE // 4).astype("<f4")


def test_offsets_are_those_of_weights(mounted):
    mount = mounted()
    values = some_values()
    mount.contribute(values)
    assert mount.weights() == values.tobytes()
    mount.contribute(f32(1, 2), offset=BLOCK - 4)
    values[BLOCK // 4 - 1 : BLOCK // 4 + 1] += [1, 2]
    assert mount.weights() == values.tobytes()


def test_unwritten_counts_as_zero(mounted):
    mount = mounted()
    values = some_values()
    mount.contribute(values)
    expected = values.copy()
    for offset, count in [(0, 1), (SIZE - 4, 1), (BLOCK * 2, BLOCK // 4), (BLOCK + 400, BLOCK // 2)]:
        mount.contribute(np.ones(count, "<f4"), offset=offset)
        expected[offset // 4 : offset // 4 + count] += 1
        assert mount.weights() == expected.tobytes(), (offset, count)
    assert mount.version() == 5


def test_writes_of_any_shape(mounted):
    """Odd offsets and lengths, in any order, from several threads."""
    mount = mounted()
    values, generator = some_values(1), random.Random(2)
    data, expected = memoryview(values).cast("B"), np.zeros_like(values)
    threads = Threads()
    for _ in range(6):
        cuts = sorted({0, SIZE, *(generator.randrange(SIZE) for _ in range(200))})
        ranges = list(zip(cuts, cuts[1:]))
        generator.shuffle(ranges)
        fd = os.open(mount.model / "gradients", os.O_WRONLY)

        def write(part):
            for start, end in part:
                assert os.pwrite(fd, data[start:end], start) == end - start

        threads.run(*(lambda part=ranges[i::4]: write(part) for i in range(4)))
        os.close(fd)
        expected += values
        assert mount.weights() == expected.tobytes()


def test_bytes_are_written_once(mounted):
    mount = mounted()
    ones = np.ones(BLOCK // 4, "<f4").tobytes()
    for data, at in ((ones, BLOCK), (f32(5).tobytes(), 2 * BLOCK - 4)):
        fd = os.open(mount.model / "gradients", os.O_WRONLY)
        os.pwrite(fd, ones, BLOCK)
        fails(errno.EINVAL, os.pwrite, fd, data, at)
        fails(errno.EINVAL, os.close, fd)
    fd = os.open(mount.model / "gradients", os.O_WRONLY)
    os.pwrite(fd, ones, BLOCK)
    with raises(errno.EINVAL), open(mount.model / "gradients", "wb", buffering=0) as other, raises(errno.EINVAL):
        os.pwrite(other.fileno(), ones, BLOCK)
    # A block that is not whole yet has not gone anywhere: what is written last counts.
    os.pwrite(fd, f32(5, 5).tobytes(), 0)
    os.pwrite(fd, f32(6).tobytes(), 4)
    os.close(fd)
    values = array(mount.model / "weights")
    assert (values[BLOCK // 4 : BLOCK // 2] == 1).all()
    assert values[:3].tolist() == [5, 6, 0]
    mount.contribute(ones, offset=BLOCK)
    assert (array(mount.model / "weights")[BLOCK // 4 : BLOCK // 2] == 2).all(), "once a contribution"

@pytest.mark.also_on_network
@pytest.mark.parametrize("file", ["gradients", "weights"])
def test_an_array_that_is_too_long_is_not_taken(start_mount, file):
    """Longer than the longest request of the kernel, so that its beginning is taken before its end is seen."""
    mount = start_mount(size="2MiB", reducer="sum" if file == "gradients" else "assign")
    doubles = np.ones(1 << 19, "<f8")
    before = mount.weights()
    with raises(errno.EFBIG), open(mount.model / file, "wb", buffering=0) as to:
        done = 0
        while done < doubles.nbytes:
            done += to.write(memoryview(doubles).cast("B")[done:])
    assert "float64 is 2x the size" in (mount.model / "error").read_text()
    fd = os.open(mount.model / file, os.O_WRONLY)
    os.pwrite(fd, f32(1), 0)
    fails(errno.EFBIG, os.pwrite, fd, f32(1), 2 << 20)
    fails(errno.EFBIG, os.fsync, fd)
    assert mount.weights() == before and mount.version() == 0
    os.pwrite(fd, f32(1), 0)
    os.close(fd)
    mount.wait_for_version(1)
    assert mount.weights() == f32(1).tobytes() + before[4:]


def test_the_size_is_fixed(mounted):
    mount = mounted()
    path = mount.model / "gradients"
    fd = os.open(path, os.O_WRONLY)
    assert os.pwrite(fd, b"", SIZE) == 0, "no write at all"
    for offset, data in [(SIZE, b"1234"), (SIZE - 4, b"12345678"), (0, bytes(SIZE + 4)), (1 << 40, b"1234"), (1 << 62, b"1234")]:
        fails(errno.EFBIG, os.pwrite, fd, data, offset)
    os.ftruncate(fd, SIZE)
    fails(errno.EINVAL, os.ftruncate, fd, 8)
    fails(errno.EFBIG, os.close, fd)
    for name in ("gradients", "device", "weights"):
        fails(errno.EINVAL, os.open, mount.model / name, os.O_WRONLY | os.O_APPEND)
        for length in (1, SIZE - 1, SIZE + 1, 1 << 40):
            fails(errno.EINVAL, os.truncate, mount.model / name, length)
        os.truncate(mount.model / name, SIZE)
        assert os.stat(mount.model / name).st_size == SIZE
    fails(errno.EACCES, os.open, path, os.O_RDONLY)
    for words in [("fixed size", "do not append"), ("size is fixed at", str(SIZE)), ("gradients is write-only", "read weights")]:
        said(mount, *words)
    assert mount.version() == 0, "nothing was taken"
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


def test_half_elements_are_refused(mounted):
    mount = mounted()
    for ranges in [[(0, 3)], [(1, 4)], [(BLOCK, 6)], [(BLOCK - 2, 2)], [(4, 7), (12, 4)], [(0, 4), (SIZE - 3, 3)]]:
        fd = os.open(mount.model / "gradients", os.O_WRONLY)
        for offset, length in ranges:
            os.pwrite(fd, bytes(length), offset)
        fails(errno.EINVAL, os.close, fd)
    assert mount.version() == 0
    one = f32(1).tobytes()
    fd = os.open(mount.model / "gradients", os.O_WRONLY)
    os.pwrite(fd, one[:1], 0)
    fails(errno.EINVAL, os.fsync, fd)
    # The file is as good as new.
    for offset, part in [(0, one[:1]), (3, one[3:] + one[:2]), (1, one[1:3]), (6, one[2:])]:
        os.pwrite(fd, part, offset)
    os.close(fd)
    assert array(mount.model / "weights")[:3].tolist() == [1, 1, 0]


@pytest.mark.also_on_network
def test_half_elements_are_refused__of_several_types(start_mount, tmp_path):
    tensors = {"a": ("F32", (2,), bytes(8)), "b": ("F16", (3,), bytes(6)), "c": ("U8", (7,), bytes(7))}
    mount = start_mount(model=write_safetensors(tmp_path / "mixed.safetensors", tensors), reducer="sum")
    for offset, length, ends in [(0, 6, "EINVAL"), (8, 1, "EINVAL"), (8, 2, "done"), (10, 4, "done"), (14, 1, "done")]:
        assert outcome(mount.contribute, bytes(length), offset) == ends, (offset, length)


def test_fsync_or_close_is_the_only_success(mounted):
    mount = mounted()
    fd = os.open(mount.model / "gradients", os.O_WRONLY)
    os.pwrite(fd, filled(mount, 1), 0)
    assert mount.version() == 0 and not any(mount.weights()), "written is not yet taken"
    os.fsync(fd)
    assert mount.version() == 1
    os.fsync(fd)
    assert mount.version() == 1, "nothing was written since"
    os.pwrite(fd, filled(mount, 1), 0)
    assert mount.version() == 1
    os.close(fd)
    assert mount.version() == 2
    os.close(os.open(mount.model / "gradients", os.O_WRONLY))
    assert mount.version() == 2, "an empty contribution is none"


def test_nan_is_refused_or_accepted(mounted):
    mount = mounted()
    for bad in (np.nan, np.inf, -np.inf):
        fails(errno.EINVAL, mount.contribute, f32(1, bad), offset=BLOCK - 4)
        values = filled(mount, 1)
        values[BLOCK // 2] = bad
        fails(errno.EINVAL, mount.contribute, values)
    assert mount.version() == 0 and not any(mount.weights())
    mount.control("nonfinite", "accept")
    mount.contribute(f32(1, np.nan, np.inf))
    values = array(mount.model / "weights")
    assert values[0] == 1 and np.isnan(values[1]) and np.isposinf(values[2]) and not values[3:].any()


def test_exactly_once(mounted):
    """A taken contribution counts once, however often its end is asked for, by whomever."""
    mount = mounted(learners=2)
    a, _ = mount.join("a", "b")
    fd = os.open(a / "gradients", os.O_WRONLY)
    os.pwrite(fd, filled(mount, 1), 0)
    for _ in range(3):
        os.fsync(fd)
    os.close(os.dup(fd))
    mount.contribute(filled(mount, 10), learner="b")
    os.close(fd)
    assert mount.version() == 1 and (array(mount.model / "weights") == 11).all()


def test_mapped_gradients_ship_at_fsync(mounted):
    mount = mounted()
    fd = os.open(mount.model / "gradients", os.O_RDWR | os.O_DIRECT)
    mapping = mmap.mmap(fd, SIZE)
    view = np.frombuffer(mapping, "<f4")
    view[:] = 1
    assert mount.version() == 0
    if mount.status()["passthrough"]:
        mapping.flush()
        assert mount.version() == 0, "msync ships nothing of memory that is mapped itself"
    os.fsync(fd)
    assert mount.version() == 1 and (array(mount.model / "weights") == 1).all()
    view[3] = 5
    os.fsync(fd)
    values = array(mount.model / "weights")
    assert values[3] == 6 and (np.delete(values, 3) == 2).all(), "the region keeps what was stored"
    view[7] = np.nan
    fails(errno.EINVAL, os.fsync, fd)
    view[7] = 0
    del view
    mapping.close()
    os.close(fd)
    assert mount.version() == 2, "closing ships nothing that fsync did not"
    assert (array(mount.model / "weights")[10:] == 2).all()


def test_a_learner_writes_ahead(mounted):
    """Step s+1 can be written while s still waits for others; its end waits until s is out."""
    mount = mounted(learners=2)
    a, _ = mount.join("a", "b")
    mount.contribute(filled(mount, 1), learner="a")
    fd = os.open(a / "gradients", os.O_WRONLY)
    os.pwrite(fd, filled(mount, 100), 0)
    threads = Threads()
    closed = threads.start(os.close, fd)
    time.sleep(0.1)
    assert not closed.done() and mount.version() == 0
    mount.contribute(filled(mount, 10), learner="b")
    closed.result(300)
    assert mount.version() == 1 and (array(mount.model / "learners/b/weights") == 11).all()
    mount.contribute(filled(mount, 1000), learner="b")
    assert mount.version() == 2 and (array(a / "weights") == 1111).all()


def test_a_close_after_a_failed_fsync_does_not_wait_again(mounted):
    mount = mounted(learners=2)
    mount.join("a", "b")
    mount.contribute(filled(mount, 1), learner="a")
    fd = os.open(mount.place("a") / "gradients", os.O_WRONLY)
    assert os.write(fd, filled(mount, 100).tobytes()) == SIZE
    with impatient(mount, 1):
        with takes(0.9, 4), raises(errno.ETIMEDOUT):
            os.fsync(fd)
        with takes(0, 0.8), raises(errno.ETIMEDOUT):
            os.close(fd)
    mount.contribute(filled(mount, 10), learner="b")
    mount.catch_up()
    assert (array(mount.model / "weights") == 11).all(), "it was dropped"


def test_device_has_both_faces(mounted):
    mount = mounted()
    mount.contribute(filled(mount, 1))
    with open(mount.model / "device", "r+b", buffering=0) as device:
        fd = device.fileno()
        assert os.pread(fd, SIZE, 0) == filled(mount, 1).tobytes()
        os.pwrite(fd, filled(mount, 4)[: BLOCK // 4 + 1], 0)
        assert os.pread(fd, 4, 0) == f32(1).tobytes(), "not yet taken"
        os.fsync(fd)
        expected = filled(mount, 1)
        expected[: BLOCK // 4 + 1] += 4
        assert os.pread(fd, SIZE, 0) == expected.tobytes(), "what fsync made is there"
        os.pwrite(fd, f32(3).tobytes(), SIZE - 4)
    expected[-1] += 3
    assert mount.weights() == (mount.model / "device").read_bytes() == expected.tobytes()
    shell('dd if=/dev/zero of="$1" bs=4096 count=2 conv=notrunc,fsync status=none', mount.model / "device")
    assert mount.version() == 4 and mount.weights() == expected.tobytes()


def test_device_is_not_for_mapping(mounted):
    """What is stored into a mapping of it would go nowhere: somebody has to say so."""
    mount = mounted()
    fd = os.open(mount.model / "device", os.O_RDWR)
    with raises(errno.ENODEV, errno.EACCES, errno.EINVAL, errno.EIO, errno.EPERM):
        mapping = mmap.mmap(fd, SIZE)
        mapping[:4] = f32(1).tobytes()
        mapping.flush()
        os.fsync(fd)
        mapping.close()
        os.close(fd)


def test_redirections_close_with_their_shell(mounted, tmp_path):
    mount = mounted()
    halves = np.array_split(some_values(), 2)
    for i, half in enumerate(halves):
        (tmp_path / str(i)).write_bytes(half.tobytes())
    target = mount.model / "gradients"
    shell('{ cat "$1/0"; cat "$1/1"; } > "$2"', tmp_path, target)
    expected = np.concatenate(halves)
    assert mount.version() == 1 and mount.weights() == expected.tobytes()
    # Without O_TRUNC, for a part alone.
    shell('head -c 400 "$1/0" 1<> "$2"', tmp_path, target)
    expected[:100] += halves[0][:100]
    assert mount.version() == 2 and mount.weights() == expected.tobytes()
    shell('cat "$1/0" "$1/1" | dd of="$2" bs=1000 status=none conv=notrunc', tmp_path, target)
    assert mount.version() == 3
    shell('exec 3<> "$2"; head -c 400 "$1/0" >&3; tail -c +401 "$1/0" >&3; cat "$1/1" >&3; exec 3>&-', tmp_path, target)
    assert mount.version() == 4
    expected += 2 * np.concatenate(halves)
    assert mount.weights() == expected.tobytes()


LEAVES_OPEN = """
fd = os.open(argv[0], os.O_WRONLY)
os.pwrite(fd, bytes([0, 0, 128, 63]) * 5, 0)
say("written"); wait()
os._exit(int(argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_what_exit_leaves_open_counts(mounted, code):
    mount = mounted()
    child = program(LEAVES_OPEN, mount.model / "gradients", code)
    hear(child)
    assert mount.version() == 0
    go(child)
    finish(child, code)
    eventually(lambda: mount.version() == 1)
    assert array(mount.model / "weights")[:6].tolist() == [1, 1, 1, 1, 1, 0]


def test_offsets_are_those_of_weights__when_copied(mounted):
    """cp and sendfile(2) from within the same mount."""
    mount = mounted(reducer="sum")
    values = some_values()
    mount.contribute(values)
    # From here on cp finds the same version whenever it looks.
    assert mount.weights() == values.tobytes()
    shell('cp "$1/weights" "$1/gradients"', mount.model)
    assert mount.weights() == (2 * values).tobytes()
    with open(mount.model / "weights", "rb") as source, open(mount.model / "gradients", "wb") as target:
        at = 0
        while at < SIZE:
            at += os.sendfile(target.fileno(), source.fileno(), at, SIZE - at)
    assert mount.weights() == (4 * values).tobytes()


def test_the_mounts_own_learner_joins_at_the_first_open(mounted):
    """However many programs open `gradients` first, at the same moment."""
    mount = mounted(size="64MiB", block_size="256KiB", learners=2)
    code = "wait()\nos.close(os.open(argv[0], os.O_WRONLY))\nsay('open')"
    programs = [program(code, mount.model / "gradients") for _ in range(4)]
    assert mount.status()["learners"] == []
    time.sleep(0.2)
    for one in programs:
        go(one)
    ends = [(one.communicate(timeout=300)[0].strip(), one.returncode) for one in programs]
    assert ends == [("open", 0)] * 4
    assert [learner["id"] for learner in mount.status()["learners"]] == [mount.own()]
