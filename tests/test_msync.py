"""msync(2), which is what flush() of np.memmap and of Python's mmap calls: it ends a step as fsync does."""

import ctypes
import errno
import mmap
import os
import signal
import threading

import numpy as np
import pytest
from filetools import (
    BLOCK, SIZE, Threads, array, eventually, fails, finish, go, hear, impatient, mounts, outcome, program, raises
)

mounted = mounts()

libc = ctypes.CDLL(None, use_errno=True)


def memmap(path):
    return np.memmap(path, "<f4", "r+")


def weights(mount, learner=None):
    """The value of all weights, as a learner sees them."""
    values = array(mount.place(learner) / "weights")
    assert (values == values[0]).all(), f"a mix: {sorted(set(values.tolist()))}"
    return values[0]


def write_back(path):
    """Has the kernel write back what the page cache of this filesystem holds, as it does by itself after a while."""
    fd = os.open(path, os.O_RDONLY)
    assert libc.syncfs(fd) == 0
    os.close(fd)


@pytest.mark.also_on_network
def test_msync_ships_mapped_gradients(mounted):
    """Each flush is a contribution, exactly once, with what was stored before it."""
    mount = mounted()
    gradients = memmap(mount.join("a") / "gradients")
    for step in range(1, 51):
        gradients[:] = step
        gradients.flush()
        assert mount.version() == step and weights(mount, "a") == step * (step + 1) / 2
    gradients.flush()
    assert weights(mount, "a") == 51 * 25 + 50, "the file keeps what was stored"
    gradients = np.memmap(mount.place("a") / "gradients", "<f4", "w+", shape=(SIZE // 4,))
    gradients[:] = 1
    gradients.flush()
    assert mount.version() == 52 and weights(mount, "a") == 51 * 25 + 51


def test_msync_ships_mapped_gradients__or_says_why_not(mounted):
    mount = mounted(learners=2, lease=0)
    place, other = mount.join("a", "b")
    gradients = memmap(place / "gradients")
    gradients[:] = np.nan
    fails(errno.EINVAL, gradients.flush)
    assert "NaN" in (place / "error").read_text()
    gradients[:] = 1
    gradients.flush()
    gradients[:] = 10
    with impatient(mount), raises(errno.ETIMEDOUT):
        gradients.flush()
    theirs = memmap(other / "gradients")
    theirs[:] = 2
    theirs.flush()
    assert mount.version() == 1 and weights(mount, "a") == 3
    gradients.flush()
    theirs.flush()
    assert mount.version() == 2 and weights(mount, "a") == 15
    mount.leave("b")
    theirs[:] = 1
    fails(errno.ENOTCONN, theirs.flush)
    mount.kill()
    gradients[:] = 1
    with raises(errno.ENOTCONN, errno.ECONNABORTED):
        gradients.flush()


def test_msync_ships_mapped_gradients__all_of_them_if_it_is_of_a_part(mounted):
    mount = mounted()
    with open(mount.join("a") / "gradients", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        values = np.frombuffer(mapping, "<f4")
        values[:] = 1
        mapping.flush()
        values[:4] = 2
        mapping.flush(0, mmap.PAGESIZE)
        assert mount.version() == 2
        got = array(mount.place("a") / "weights")
        assert (got[:4] == 3).all() and (got[4:] == 2).all()
        del values


def test_mapped_gradients_ship_at_fsync__in_one_step_if_they_are_mapped_in_pieces(mounted):
    mount = mounted()
    path = mount.join("a") / "gradients"
    pieces = [np.memmap(path, "<f4", "r+", offset=at, shape=BLOCK // 4) for at in range(0, SIZE - BLOCK, BLOCK)]
    fd = os.open(path, os.O_RDWR)
    for step in range(1, 4):
        for piece in pieces:
            piece[:] = 1
        os.fsync(fd)
        got = array(mount.place("a") / "weights")
        assert mount.version() == step and (got[: len(pieces) * BLOCK // 4] == step).all()
    os.close(fd)


def test_msync_ships_mapped_gradients__of_a_child(mounted):
    """A mapping that fork hands down is one memory."""
    mount = mounted()
    child = program(
        "import os\n"
        "file = open(argv[0], 'r+b'); memory = mmap.mmap(file.fileno(), 0)\n"
        "def fill(byte): memory[:] = bytes([0, 0, byte, 63]) * (len(memory) // 4)\n"
        "fill(0)\n"
        "if os.fork() == 0:\n"
        "    fill(128)\n"
        "    memory.flush()\n"
        "    os._exit(0)\n"
        "assert os.wait()[1] == 0\n"
        "if os.fork() == 0:\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "say(memory[2])\n"
        "wait()\n"
        "memory.flush()\n",
        mount.join("a") / "gradients",
    )
    assert hear(child) == "128"
    assert mount.version() == 1 and weights(mount, "a") == 1, "the end of a child ships nothing"
    go(child)
    finish(child)
    assert mount.version() == 2 and weights(mount) == 2


def test_msync_publishes_mapped_weights(mounted):
    mount = mounted(reducer="assign")
    published = memmap(mount.model / "publish")
    assert not published.any(), "a fresh buffer"
    for version in range(1, 6):
        published[:] = version
        assert mount.version() == version - 1
        published.flush()
        assert mount.version() == version and weights(mount) == version
    published[3] = np.nan
    fails(errno.EINVAL, published.flush)
    assert "NaN" in (mount.model / "error").read_text() and mount.version() == 5
    with open(mount.model / "publish", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[:] = published.tobytes()[:4] * (SIZE // 4)
        mapping.flush()
    assert mount.version() == 6 and weights(mount) == 5


STORES = """
file = open(argv[0], "r+b")
memory = mmap.mmap(file.fileno(), 0)
memory[:] = bytes([0, 0, 122, 68]) * (len(memory) // 4)  # 1000.0
say("stored")
wait()
"""


@pytest.mark.parametrize("name", ["gradients", "publish"])
def test_stores_without_msync_never_count(mounted, name):
    """The kernel may write them back at any time: when it likes, when the file is closed, and when the program ends."""
    mount = mounted(reducer="assign" if name == "publish" else "sum", lease=0)
    path = mount.model / name
    values = memmap(path)
    values[:] = 1000
    write_back(mount.model)
    assert mount.version() == 0, "written back"
    del values
    assert mount.version() == 0, "closed"
    for ends in ["killed", "exits"]:
        child = program(STORES, path)
        assert hear(child) == "stored"
        write_back(mount.model)
        if ends == "killed":
            child.send_signal(signal.SIGKILL)
            finish(child, -signal.SIGKILL)
        else:
            go(child)
            finish(child)
        eventually(lambda: mount.status()["watched_processes"] <= 1)
        assert mount.version() == 0, ends
    values = memmap(path)
    values[:] = 1
    values.flush()
    assert mount.version() == 1 and weights(mount) == 1


def test_o_direct_maps_the_memory_itself(mounted):
    """Such a mapping sees what others have shipped, and msync of it says nothing to anybody."""
    mount = mounted()
    path = mount.join("a") / "gradients"
    cached = memmap(path)
    cached[:] = 1
    cached.flush()
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    mapping = mmap.mmap(fd, 0)
    values = np.frombuffer(mapping, "<f4")
    assert (values == 1).all()
    is_memory = mount.status()["passthrough"]
    assert (os.fstat(fd).st_ino != os.stat(path).st_ino) == is_memory
    values[:] = 2
    mapping.flush()
    assert mount.version() == (1 if is_memory else 2)
    os.fsync(fd)
    assert mount.version() == (2 if is_memory else 3)
    before = mount.version(), weights(mount, "a")
    # Neither keeps the other from being opened, mapped or written.
    anew = memmap(path)
    assert (anew == 2).all()
    anew[:] = 3
    anew.flush()
    writes = os.open(path, os.O_WRONLY)
    os.pwrite(writes, np.full(SIZE // 4, 4, "<f4"), 0)
    os.fsync(writes)
    os.close(writes)
    os.fsync(fd)
    assert mount.version() == before[0] + 3 and weights(mount, "a") == before[1] + 3 + 4 + 3
    os.close(fd)


def test_o_direct_maps_the_memory_itself__whoever_else_opens_the_file(start_mount):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum")
    path = mount.join("a") / "gradients"
    start = threading.Barrier(8)

    def opens(flags):
        start.wait()
        found = set()
        for _ in range(100):
            fd = os.open(path, flags)
            found.add(os.fstat(fd).st_ino)
            mmap.mmap(fd, 0).close() if flags & os.O_RDWR else None
            os.close(fd)
        return found

    ways = [os.O_RDWR, os.O_RDWR | os.O_DIRECT, os.O_WRONLY, os.O_WRONLY | os.O_DIRECT]
    found = Threads().run(*[lambda flags=flags: opens(flags) for flags in ways * 2])
    cached, memory = {os.stat(path).st_ino}, found[1]
    assert found == [cached, memory, cached, cached] * 2 and len(memory) == 1 and memory != cached
    assert mount.version() == 0


def test_an_open_file_is_not_opened_again_with_another_mapping(start_mount):
    """By its path it is."""
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum")
    path = mount.join("a") / "gradients"
    for flags, other in [(0, os.O_DIRECT), (os.O_DIRECT, 0)]:
        fd = os.open(path, os.O_RDWR | flags)
        again = f"/proc/self/fd/{fd}"
        assert outcome(os.open, again, os.O_RDWR | other) == "ESTALE"
        for works, by in [(again, os.O_RDWR | flags), (again, os.O_WRONLY | other), (path, os.O_RDWR | other)]:
            os.close(os.open(works, by))
        os.close(fd)
