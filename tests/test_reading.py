"""Reading: what docs/use/semantics.md promises of `weights` and its other forms, each with and without passthrough."""

import ctypes
import errno
import mmap
import os
import random
import socket
import threading
import time

import numpy as np
import pytest
from filetools import (
    SIZE, Threads, array, eventually, f32, filled, finish, go, hear, impatient, mounts, program, raises, shell, takes
)

# They add contributions up, so that with ones every element is the version's number.
pytestmark = pytest.mark.also_on_network
mounted = mounts()


def only_version(values):
    """The one version that all values show."""
    first = values[0]
    assert (values == first).all(), f"torn: versions {sorted(set(values.tolist()))}"
    return int(first)


def test_close_to_open(mounted):
    mount = mounted()
    ones = filled(mount, 1)
    handles = []
    for version in range(5):
        fd = os.open(mount.model / "weights", os.O_RDONLY)
        handles.append((version, fd, mmap.mmap(fd, SIZE, prot=mmap.PROT_READ), os.fstat(fd)))
        mount.contribute(ones)
        assert only_version(array(mount.model / "weights")) == version + 1
    for version, fd, mapping, stat in handles:
        assert only_version(np.frombuffer(os.pread(fd, SIZE, 0), "<f4")) == version
        assert only_version(np.frombuffer(mapping[:], "<f4")) == version
        assert os.fstat(fd)[:9] == stat[:9] and os.fstat(fd).st_mtime_ns == stat.st_mtime_ns
        assert os.lseek(fd, 0, os.SEEK_END) == SIZE
        os.close(fd)


def test_close_to_open__of_other_forms(mounted):
    mount = mounted()
    names = ["weights.safetensors", "tensors/weights.npy", "device"]
    files = [open(mount.model / name, "rb", buffering=0) for name in names]
    mount.contribute(filled(mount, 1))
    for file in files:
        with file:
            assert not np.frombuffer(file.readall()[-SIZE:], "<f4").any(), file.name
        with open(file.name, "rb") as again:
            assert only_version(np.frombuffer(again.read()[-SIZE:], "<f4")) == 1


def test_one_inode_a_version(mounted):
    mount = mounted()
    paths = [mount.model / name for name in ("weights", "weights.safetensors", "tensors/weights.npy")]
    seen = [{os.stat(path).st_ino} for path in paths]
    for _ in range(4):
        mount.contribute(filled(mount, 1))
        mount.catch_up()
        for path, inodes in zip(paths, seen):
            inodes.add(os.stat(path).st_ino)
            assert os.stat(path).st_ino in inodes
    assert [len(inodes) for inodes in seen] == [5, 5, 5]
    assert len(set.union(*seen)) == 15


def test_mapping_outlives_its_descriptor(mounted):
    mount = mounted(max_versions=4)
    ones = filled(mount, 1)
    mount.contribute(ones)
    fd = os.open(mount.model / "weights", os.O_RDONLY)
    kept = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
    fresh = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)  # Not touched before its buffer could be wanted.
    os.close(fd)
    assert only_version(np.frombuffer(kept[:], "<f4")) == 1
    for _ in range(25):
        mount.contribute(ones)
    assert mount.version() == 26
    assert only_version(np.frombuffer(kept[:], "<f4")) == 1
    assert only_version(np.frombuffer(fresh[:], "<f4")) == 1
    assert 1 in mount.status()["versions_in_memory"]
    kept.close()
    fresh.close()
    mount.contribute(ones)
    # Nobody has it now, so its memory is used again.
    eventually(lambda: 1 not in mount.status()["versions_in_memory"])


def test_mapping_outlives_its_descriptor__and_all_its_duplicates(mounted):
    """A program maps each version and closes it. Python's own mapping would keep a duplicate of the descriptor."""
    mount, libc = mounted(max_versions=4), ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    mount.join("a")
    mapped, refused = {}, 0
    for version in range(24):
        try:
            fd = os.open(mount.model / "weights", os.O_RDONLY)
        except OSError as error:
            assert error.errno == errno.ENOMEM
            refused += 1
        else:
            mapped[version] = libc.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            os.close(fd)
            assert mapped[version] != ctypes.c_void_p(-1).value
        mount.contribute(filled(mount, 1), learner="a")
        mount.wait_for_version(version + 1)
        for of, place in mapped.items():
            weights = np.ctypeslib.as_array((ctypes.c_float * (SIZE // 4)).from_address(place))
            assert only_version(weights) == of
    assert len(mapped) >= 4 and refused >= 16, "training goes on, and all that is mapped stays"
    for place in mapped.values():
        libc.munmap(place, SIZE)
    eventually(lambda: len(mount.status()["versions_in_memory"]) <= 2)


def test_held_versions_bound_the_memory(mounted):
    mount = mounted(max_versions=4)
    ones = filled(mount, 1)
    handles = []
    with impatient(mount, 0.5), takes(0.4, 8), raises(errno.ETIMEDOUT):
        for _ in range(12):
            handles.append(os.open(mount.model / "weights", os.O_RDONLY))
            mount.contribute(ones)
    # Over a network the shards have what this mount has no room to show.
    version = mount.status()["contributions"]
    assert mount.status()["version_buffers"]["existing"] <= 8
    for i, fd in enumerate(handles):
        assert only_version(np.frombuffer(os.pread(fd, SIZE, 0), "<f4")) == i
        os.close(fd)
    mount.contribute(ones)
    assert only_version(array(mount.model / "weights")) == version + 1


READER = """
import numpy as np
say("ready"); wait()
path, end, seen = argv[0], time.monotonic() + float(argv[1]), set()
size, rounds = os.stat(path).st_size, 0
while time.monotonic() < end:
    fd = os.open(path, os.O_RDONLY)
    way = rounds % 3
    if way == 0:
        data = os.pread(fd, size, 0)
    elif way == 1:
        data = b"".join(os.pread(fd, 50_001, at) for at in range(0, size, 50_001))
    else:
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapping:
            data = mapping[:]
    os.close(fd)
    values = np.frombuffer(data, "<f4")
    assert len(data) == size and (values == values[0]).all(), sorted(set(values.tolist()))
    assert not seen or values[0] >= max(seen), "an older version than before"
    seen.add(float(values[0]))
    rounds += 1
say(rounds, len(seen))
"""


def test_no_read_is_torn(mounted):
    """Many versions while three processes read them in every way: each open sees exactly one."""
    mount = mounted(size=1 << 20, max_versions=6)
    seconds = 2
    readers = [program(READER, mount.model / "weights", seconds) for _ in range(3)]
    for reader in readers:
        assert hear(reader) == "ready"
    for reader in readers:
        go(reader)
    ones, end = filled(mount, 1), time.monotonic() + seconds + 0.5
    while time.monotonic() < end:
        mount.contribute(ones)
    told = [[int(word) for word in hear(reader).split()] for reader in readers]
    for reader in readers:
        finish(reader)
    assert mount.version() > 30
    assert sum(rounds for rounds, _ in told) > 60 and min(versions for _, versions in told) > 5, told


def test_every_way_of_reading_is_the_same(mounted, tmp_path):
    mount = mounted()
    weights = mount.model / "weights"
    random.seed(1)
    values = np.array([random.randrange(1 << 20) for _ in range(SIZE // 4)], "<f4")
    mount.contribute(values)
    expected = values.tobytes()
    assert weights.read_bytes() == expected
    assert np.fromfile(weights, "<f4").tobytes() == expected
    assert np.memmap(weights, "<f4", "r").tobytes() == expected
    with open(weights, "rb", buffering=0) as file:
        out = bytearray(SIZE + 10)
        assert file.readinto(out) == SIZE and out[:SIZE] == expected
        assert file.read(1) == b"" and os.pread(file.fileno(), 9, SIZE + 5) == b""
        for _ in range(200):
            at, length = random.randrange(SIZE), random.choice([1, 3, 4096, 70_001])
            assert os.pread(file.fileno(), length, at) == expected[at : at + length]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            received, at = bytearray(), 0
            theirs.settimeout(10)
            while at < SIZE:
                at += os.sendfile(ours.fileno(), file.fileno(), at, min(60_000, SIZE - at))
                while len(received) < at:
                    received += theirs.recv(1 << 16)
        assert received == expected
    copy = tmp_path / "copy"
    for command in ('cp "$1" "$2"', 'dd status=none bs=7777 if="$1" of="$2"', 'cat < "$1" > "$2"'):
        shell(command, weights, copy)
        assert copy.read_bytes() == expected, command


def test_read_your_own_step(mounted):
    mount = mounted(learners=2)
    a, b = mount.join("a", "b")
    ones = filled(mount, 1)
    threads = Threads()
    for step in range(1, 6):
        mount.contribute(ones, learner="a")
        assert mount.version() == step - 1
        opened = threads.start(array, a / "weights")
        others = array(b / "weights"), array(mount.model / "weights")
        assert [only_version(values) for values in others] == [2 * step - 2] * 2, "others do not wait"
        time.sleep(0.05)
        assert not opened.done()
        mount.contribute(ones, learner="b")
        assert only_version(opened.result(300)) == 2 * step


def test_read_your_own_step__while_another_thread_writes_ahead(mounted):
    """Steps that are committed while an open waits are not waited for."""
    mount = mounted(learners=2)
    a, b = mount.join("a", "b")
    ones, stop = filled(mount, 1), threading.Event()
    taken, shown = [0], []

    def learn(name):
        while not stop.is_set():
            mount.contribute(ones, learner=name)
            if name == "a":
                taken[0] += 1

    def look():
        end = time.monotonic() + 1.5
        try:
            while time.monotonic() < end:
                mine = taken[0]
                shown.append((mine, only_version(array(a / "weights"))))
        finally:
            stop.set()
            # Whoever still waits for the other is let go.
            for place in (a, b):
                place.rmdir()

    threads = Threads()
    workers = [threads.start(learn, name) for name in "ab"]
    threads.run(look)
    for worker in workers:
        assert isinstance(worker.exception(30), (OSError, type(None)))
    assert len(shown) > 20 and all(2 * mine <= seen for mine, seen in shown)


SLIP = """
with os.fdopen(os.open(argv[0], os.O_WRONLY), "wb", buffering=0) as file:
    file.write(bytes(400))
say("written")
wait()
with open(argv[1], "rb") as file:
    say(file.read(4).hex())
wait()
"""


def test_a_slip_of_one_program_keeps_no_reader_waiting(mounted):
    """Only the program that wrote as the mount's own learner waits for its step, and the learner lingers no longer than
    others do."""
    mount = mounted(learners=2, timeout=200, linger=1)
    writer = program(SLIP, mount.model / "gradients", mount.model / "weights")
    assert hear(writer) == "written"
    own = eventually(lambda: mount.status()["learners"])[0]["id"]
    mount.join("a")
    with takes(0, 5):
        for name in ("weights", "weights.safetensors", "tensors/weights.npy", "device"):
            shell('cat "$1" > "$2"', mount.model / name, os.devnull)
            (mount.model / name).read_bytes()
    go(writer)
    mount.contribute(filled(mount, 1), learner="a")
    assert hear(writer) == f32(1).tobytes().hex(), "it waited"
    finish(writer)
    mount.contribute(filled(mount, 1), learner="a")
    with takes(0, 10):
        assert only_version(array(mount.place("a") / "weights")) == 2
    eventually(lambda: [learner["id"] for learner in mount.status()["learners"]] == ["a"])
    assert own != "a"


def test_open_gives_up_at_the_timeout(mounted):
    mount = mounted(learners=2)
    a, _ = mount.join("a", "b")
    ones = filled(mount, 1)
    mount.contribute(ones, learner="a")
    with impatient(mount), takes(0.35, 3), raises(errno.ETIMEDOUT):
        os.open(a / "weights", os.O_RDONLY)
    mount.contribute(ones, learner="b")
    assert only_version(array(a / "weights")) == 2, "nothing is lost by that"


def test_nonblocking_open_is_eagain(mounted):
    mount = mounted(learners=2)
    a, _ = mount.join("a", "b")
    ones = filled(mount, 1)
    os.close(os.open(a / "weights", os.O_RDONLY | os.O_NONBLOCK))
    mount.contribute(ones, learner="a")
    with takes(0, 2), raises(errno.EAGAIN):
        os.open(a / "weights", os.O_RDONLY | os.O_NONBLOCK)
    mount.contribute(ones, learner="b")
    mount.catch_up()
    fd = os.open(a / "weights", os.O_RDONLY | os.O_NONBLOCK)
    assert os.pread(fd, 4, 0) == f32(2).tobytes()
    os.close(fd)


def test_published_weights_never_change(mounted):
    """Not even by a program that may write `weights`: there is no way to map them writable."""
    mount = mounted(reducer="assign")
    before = mount.weights()
    reader = os.open(mount.model / "weights", os.O_RDONLY)
    with raises(errno.EACCES, errno.EPERM, errno.ENODEV):
        fd = os.open(mount.model / "weights", os.O_RDWR)
        try:
            mapping = mmap.mmap(fd, SIZE)
            mapping[:4] = b"\1\2\3\4"
            mapping.flush()
            mapping.close()
        finally:
            os.close(fd)
    assert os.pread(reader, SIZE, 0) == before, "an open handle's version was changed under it"
    os.close(reader)
    fd = os.open(mount.model / "weights", os.O_RDONLY)
    with raises(errno.EACCES, errno.EPERM):
        mmap.mmap(fd, SIZE)
    private = mmap.mmap(fd, SIZE, access=mmap.ACCESS_COPY)
    private[:4] = b"\1\2\3\4"
    assert os.pread(fd, SIZE, 0) == before
    os.close(fd)


def test_without_passthrough_the_same(start_mount):
    mounts = [start_mount(size="1MiB", reducer="sum", no_passthrough=flag) for flag in (False, True)]
    assert mounts[1].status()["passthrough"] is False
    for mount in mounts:
        mount.contribute(f32(1, 2, 3), offset=8)
    trees = []
    for mount in mounts:
        tree = {}
        for path, folders, files in os.walk(mount.model):
            if os.path.basename(path) in ("control", "learners"):
                folders.clear()
            for name in files:
                stat = os.stat(os.path.join(path, name))
                where = os.path.relpath(os.path.join(path, name), mount.model)
                if name in ("status.json", "snapshot"):  # They tell of the process, or of its registry.
                    continue
                data = b"" if name.startswith(("gradients", "publish")) else open(os.path.join(path, name), "rb").read()
                tree[where] = stat.st_mode, stat.st_size, data
        trees.append(tree)
    assert trees[0] == trees[1]
