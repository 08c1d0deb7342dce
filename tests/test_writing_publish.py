"""Publishing whole new weights through the file `publish`: what docs/use/contributions.md promises of it."""

import errno
import mmap
import os
import threading
import time

import numpy as np
import pytest
from conftest import write_all
from filetools import BLOCK, SIZE, Threads, array, f32, fails, filled, impatient, mounts, raises, shell, takes

pytestmark = pytest.mark.also_on_network
mounted = mounts(reducer="assign")


def publish(mount, data, offset=0, **options):
    write_all(mount.model / "publish", data, offset, **options)


def why(mount):
    return (mount.model / "error").read_text()


@pytest.mark.parametrize("end", [os.fsync, os.close])
def test_what_is_written_to_publish_becomes_a_version(mounted, end):
    mount = mounted()
    fd = os.open(mount.model / "publish", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    new = filled(mount, 1).tobytes()
    for at in range(0, SIZE, 100_001):
        os.pwrite(fd, new[at : at + 100_001], at)
    assert mount.version() == 0 and not any(mount.weights())
    end(fd)
    assert mount.version() == 1 and mount.weights() == new
    if end is os.fsync:
        os.pwrite(fd, f32(2).tobytes(), 8)
        os.close(fd)
        assert mount.version() == 2 and array(mount.model / "weights")[:4].tolist() == [1, 1, 2, 1]


def test_what_is_written_to_publish_becomes_a_version__of_tools(mounted, tmp_path):
    mount = mounted()
    (tmp_path / "new").write_bytes(filled(mount, 3).tobytes())
    for number, command in enumerate(['cp "$1" "$2"', 'cat "$1" > "$2"', 'dd if="$1" of="$2" bs=100k status=none'], 1):
        shell(command, tmp_path / "new", mount.model / "publish")
        assert mount.version() == number and (array(mount.model / "weights") == 3).all(), command
    (tmp_path / "short").write_bytes(bytes(SIZE - 4))
    shell('cp "$1" "$2"', tmp_path / "short", mount.model / "publish", status=1)
    assert mount.version() == 3 and "not all of its" in why(mount)


def test_what_is_written_to_publish_becomes_a_version__as_it_is_at_the_end(mounted):
    """Bytes may be written again until then: NaN is no reason to refuse them before."""
    mount = mounted()
    fd = os.open(mount.model / "publish", os.O_WRONLY | os.O_TRUNC)
    new = filled(mount, 1)
    os.pwrite(fd, np.full(len(new), np.nan, "<f4"), 0)
    threads = Threads()

    def write(first):
        for at in range(first, SIZE, 2 * 5000):
            os.pwrite(fd, new.tobytes()[at : at + 5000], at)

    threads.run(lambda: write(0), lambda: write(5000))
    os.close(fd)
    assert mount.version() == 1 and mount.weights() == new.tobytes()
    mount.control("nonfinite", "accept")
    new[5] = np.inf
    publish(mount, new)
    mount.control("nonfinite", "reject")
    fd, view = mapped(mount)
    view[:] = new
    fails(errno.EINVAL, os.fsync, fd)
    os.close(fd)
    fails(errno.EINVAL, publish, mount, new)
    assert mount.version() == 2 and mount.weights() == new.tobytes()


def test_publish_opens_where_weights_can_be_written(mounted):
    mount = mounted(reducer="sum")
    publish(mount, filled(mount, 3))
    assert mount.version() == 1, "version 0 is initialised with any reducer"
    for flags in (os.O_WRONLY, os.O_WRONLY | os.O_TRUNC, os.O_RDWR):
        fails(errno.EACCES, os.open, mount.model / "publish", flags)
    assert "weights is read-only at version 1 with reducer sum" in why(mount)
    mount.control("reducer", "assign")
    publish(mount, filled(mount, 9))
    assert mount.version() == 2 and (array(mount.model / "weights") == 9).all()
    fails(errno.EACCES, os.open, mount.model / "publish", os.O_RDONLY)
    fails(errno.EINVAL, os.open, mount.model / "publish", os.O_WRONLY | os.O_APPEND)
    for act in (os.unlink, lambda path: os.rename(path, mount.model / "other"), lambda path: os.chmod(path, 0o777)):
        fails(errno.EPERM, act, mount.model / "publish")
    fails(errno.EEXIST, os.open, mount.model / "publish", os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def test_each_open_of_publish_is_a_publication_of_its_own(mounted):
    mount = mounted()
    fds = [os.open(mount.model / "publish", os.O_WRONLY) for _ in range(2)]
    assert os.fstat(fds[0]).st_ino != os.fstat(fds[1]).st_ino
    assert all(os.fstat(fd).st_size == SIZE for fd in fds)
    os.pwrite(fds[0], filled(mount, 1), 0)
    os.close(fds[0])
    assert mount.version() == 1 and (array(mount.model / "weights") == 1).all()
    os.pwrite(fds[1], f32(5), 4)
    os.close(fds[1])
    assert mount.version() == 2 and array(mount.model / "weights")[:3].tolist() == [1, 5, 1]
    # The same one cannot be opened twice: the second program would not know whose bytes count.
    fd = os.open(mount.model / "publish", os.O_WRONLY)
    fails(errno.EBUSY, os.open, f"/proc/self/fd/{fd}", os.O_WRONLY)
    assert "open publish by its path" in why(mount)
    os.close(fd)
    assert mount.version() == 2, "without anything written"


def test_of_two_publications_at_once_the_first_to_end_is_published(mounted):
    mount = mounted()
    fds = [os.open(mount.model / "publish", os.O_WRONLY) for _ in range(2)]
    for value, fd in enumerate(fds, 1):
        os.pwrite(fd, filled(mount, value), 0)
    os.fsync(fds[1])
    fails(errno.EBUSY, os.fsync, fds[0])
    assert "has published other weights" in why(mount) and "newest version is 1" in why(mount)
    assert mount.version() == 1 and (array(mount.model / "weights") == 2).all()
    # Whoever knows that, and wants it, replaces them.
    os.pwrite(fds[0], filled(mount, 3), 0)
    os.fsync(fds[0])
    assert mount.version() == 2 and (array(mount.model / "weights") == 3).all()
    for fd in fds:
        os.close(fd)


def test_of_two_publications_at_once_the_first_to_end_is_published__however_many_come(mounted):
    mount = mounted(max_versions=16)
    start, threads = threading.Barrier(4), Threads()

    def publishes(value):
        start.wait(300)
        for _ in range(10):
            while True:
                try:
                    publish(mount, filled(mount, value))
                    break
                except OSError as error:
                    assert error.errno == errno.EBUSY

    for writer in [threads.start(publishes, value) for value in range(1, 5)]:
        writer.result(300)
    values = array(mount.model / "weights")
    assert mount.version() == 40 and (values == values[0]).all()


def mapped(mount, flags=os.O_RDWR | os.O_DIRECT):
    """A descriptor of `publish`, and what it is mapped to as float32 values."""
    fd = os.open(mount.model / "publish", flags)
    return fd, np.frombuffer(mmap.mmap(fd, SIZE), "<f4")


def test_mapped_weights_are_published_at_fsync(mounted):
    mount = mounted()
    fd, view = mapped(mount)
    assert not view.any(), "a fresh buffer"
    view[:] = 1
    assert mount.version() == 0
    os.fsync(fd)
    assert mount.version() == 1 and (array(mount.model / "weights") == 1).all()
    view[3] = 5
    assert os.pread(fd, 4, 12) == f32(5).tobytes()
    os.fsync(fd)
    assert mount.version() == 2 and array(mount.model / "weights")[2:5].tolist() == [1, 5, 1]
    view[SIZE // 4 - 1] = np.nan
    fails(errno.EINVAL, os.fsync, fd)
    assert "NaN" in why(mount) and mount.version() == 2
    view[:] = 7
    os.fsync(fd)
    assert why(mount) == "" and (array(mount.model / "weights") == 7).all()
    view[:] = 8
    os.close(fd)
    time.sleep(0.1)
    assert mount.version() == 3 and (array(mount.model / "weights") == 7).all(), "closing publishes no mapping"


def test_mapped_weights_are_published_at_fsync__or_what_was_written(mounted):
    mount = mounted()
    publish(mount, filled(mount, 1))
    mount.catch_up()
    fd, view = mapped(mount, os.O_RDWR | os.O_DIRECT | os.O_CREAT)
    view[:] = 9
    os.pwrite(fd, f32(2), 8)
    os.fsync(fd)
    assert array(mount.model / "weights")[:4].tolist() == [1, 1, 2, 1] and (view == 9).all()
    os.pwrite(fd, f32(3), 4)
    # Python's mapping has a duplicate of the descriptor.
    del view
    os.close(fd)
    assert mount.version() == 3 and array(mount.model / "weights")[:4].tolist() == [1, 3, 2, 1]
    fd = os.open(mount.model / "publish", os.O_RDWR | os.O_DIRECT | os.O_TRUNC)
    os.pwrite(fd, f32(3), 4)
    fails(errno.EINVAL, os.close, fd)
    assert "not all of its" in why(mount)
    fd, view = mapped(mount, os.O_RDWR | os.O_DIRECT | os.O_TRUNC)
    os.ftruncate(fd, SIZE)
    view[:] = 4
    os.fsync(fd)
    os.close(fd)
    assert mount.version() == 4 and (array(mount.model / "weights") == 4).all()


def test_mapped_weights_are_published_at_fsync__and_several_maps_are_apart(mounted):
    mount = mounted()
    (one, ones), (two, twos) = mapped(mount), mapped(mount)
    ones[:], twos[:] = 1, 2
    assert (ones == 1).all()
    os.fsync(two)
    assert (array(mount.model / "weights") == 2).all()
    os.fsync(one)
    assert mount.version() == 2 and (array(mount.model / "weights") == 1).all()
    os.close(one), os.close(two)


def test_stores_after_fsync_change_no_version(mounted):
    """What readers hold, and what they open later, is what was there at fsync: the mapping is the program's again."""
    mount = mounted()
    fd, view = mapped(mount)
    held = []
    for value in range(1, 4):
        view[:] = value
        os.fsync(fd)
        reader = os.open(mount.model / "weights", os.O_RDONLY)
        held.append((reader, np.frombuffer(mmap.mmap(reader, SIZE, prot=mmap.PROT_READ), "<f4")))
        view[:] = 100 + value
        assert mount.version() == value and (array(mount.model / "weights") == value).all()
    os.close(fd)
    view[:] = 200
    for value, (reader, shown) in enumerate(held, 1):
        assert (shown == value).all() and os.pread(reader, SIZE, 0) == filled(mount, value).tobytes()
        os.close(reader)
    assert (array(mount.model / "weights") == 3).all()


def test_stores_after_fsync_change_no_version__nor_tear_one_while_they_go_on(mounted):
    mount = mounted()
    fd, view = mapped(mount)
    stop, threads = threading.Event(), Threads()

    def stores():
        value = 0
        while not stop.is_set():
            value = (value + 1) % 1000
            view[:] = value

    storing = threads.start(stores)
    for version in range(1, 11):
        os.fsync(fd)
        first = mount.weights()
        time.sleep(0.02)
        assert mount.version() == version and mount.weights() == first
    stop.set()
    storing.result(300)
    os.close(fd)


@pytest.mark.one_process
def test_mapped_weights_are_published_at_fsync__or_not_at_all_after_the_timeout(mounted):
    mount = mounted(lease=0)
    gradients = os.open(mount.join("a") / "gradients", os.O_WRONLY)
    os.pwrite(gradients, filled(mount, 3)[: BLOCK // 4], 0)
    fd, view = mapped(mount)
    view[:] = 7
    with impatient(mount), takes(0.35, 3), raises(errno.ETIMEDOUT):
        os.fsync(fd)
    os.close(gradients)
    assert mount.wait_for_version(1) == 1
    os.fsync(fd)
    assert mount.wait_for_version(2) == 2 and (array(mount.model / "weights") == 7).all()
    os.close(fd)
