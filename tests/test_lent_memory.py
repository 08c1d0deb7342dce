"""The memory of versions, lent by the mount, as docs/use/memory.md promises."""

import contextlib
import errno
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from borrowing import Borrowed, ask, lends, where  # noqa: F401
from conftest import ran
from filetools import BLOCK, eventually, raises
from patience import HANGS
from test_owners import NOBODY, as_user, mounted, place_for_all  # noqa: F401

SIZE = 4 * BLOCK + 1236
MOST = 4
ONES = np.ones(SIZE // 4, "<f4")


@pytest.fixture
def mount(lends):  # noqa: F811
    return lends(size=SIZE, block_size=BLOCK, max_versions=MOST)


def value(data):
    """The value of all elements."""
    values = np.frombuffer(data, "<f4")
    assert len(values) == SIZE // 4 and (values == values[0]).all(), sorted(set(values.tolist()))
    return values[0]


@contextlib.contextmanager
def refused(number, words):
    with pytest.raises(OSError) as caught:
        yield
    assert (caught.value.errno, caught.value.strerror) == (number, words)


def versions(mount, count):
    """So many more versions: each is one more, everywhere."""
    for _ in range(count):
        mount.contribute(ONES)
    return mount.version()


def test_lent_memory_stays_as_it_is(mount):
    versions(mount, 1)
    lent = Borrowed(mount.model)
    assert (lent.version, lent.size, os.fstat(lent.file).st_size) == (1, SIZE, SIZE)
    assert os.lseek(lent.file, 0, os.SEEK_CUR) == 0
    assert str(lent.generation) == os.getxattr(mount.model / "weights", "user.gradfs.epoch").decode()
    with mmap.mmap(lent.file, SIZE, prot=mmap.PROT_READ) as mapping:
        assert versions(mount, 50) == 51
        assert value(lent.read()) == value(mapping[:]) == 1
    lent.give_back()


def test_lent_memory_stays_as_it_is__while_many_borrow(mount):
    """Some give it back, some do not."""
    ended, wrong, seen = threading.Event(), [], set()

    def borrow(number):
        try:
            while not ended.is_set():
                with contextlib.suppress(OSError):  # Many versions are held just now.
                    lent = Borrowed(mount.model)
                    seen.add(lent.version)
                    assert value(lent.read()) == lent.version
                    if number:
                        lent.give_back()
                    else:
                        lent.vanish()
                        assert value(lent.read()) == lent.version
                        lent.close()
        except BaseException as why:
            wrong.append(why)

    threads = [threading.Thread(target=borrow, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    versions(mount, 150)
    ended.set()
    for thread in threads:
        thread.join(HANGS)
    assert not wrong and len(seen) > 5, (wrong, seen)


def test_nobody_can_write_lent_memory(mount):
    lent = Borrowed(mount.model)
    with raises(errno.EBADF):
        os.pwrite(lent.file, b"x", 0)
    with raises(errno.EACCES):
        mmap.mmap(lent.file, SIZE)
    # Its holder may open it anew.
    with contextlib.suppress(PermissionError):
        anew = os.open(f"/proc/self/fd/{lent.file}", os.O_RDWR)
        for write in (lambda: os.pwrite(anew, b"x", 0), lambda: os.ftruncate(anew, 0), lambda: mmap.mmap(anew, SIZE)):
            with raises(errno.EPERM):
                write()
        os.close(anew)
    assert value(lent.read()) == 0
    lent.give_back()


# Borrows, and hands the descriptor on: to a child that lives on, or to whoever is at the other end of the channel.
HOLDER = """\
import os, pathlib, socket, sys
sys.path.insert(0, sys.argv[1])
from borrowing import Borrowed
lent = Borrowed(pathlib.Path(sys.argv[2]))
channel = socket.socket(fileno=int(sys.argv[3]))
if sys.argv[4] == "passed":
    socket.send_fds(channel, [str(lent.version).encode()], [lent.file])
elif os.fork() == 0:
    lent.mount.close()
    channel.send(str(lent.version).encode())
    channel.recv(1)
    channel.sendall(lent.read())
    os._exit(0)
os.read(0, 1)
"""


@pytest.mark.parametrize("how", ["passed", "forked"])
def test_memory_that_is_not_given_back_is_never_written_again(mount, how):
    """Its borrower is killed, and another process still has it."""
    versions(mount, 3)
    here, there = socket.socketpair()
    words = [Path(__file__).parent, mount.model, there.fileno(), how]
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, *map(str, words)], stdin=subprocess.PIPE, pass_fds=[there.fileno()])
    there.close()
    here.settimeout(HANGS)
    version, files, *_ = socket.recv_fds(here, 16, 1)
    assert version == b"3"
    holder.kill()
    assert holder.wait(HANGS) == -signal.SIGKILL
    holder.stdin.close()
    versions(mount, 50)
    if how == "forked":
        here.send(b"?")
    assert value(os.pread(files[0], SIZE, 0) if files else here.makefile("rb").read(SIZE)) == 3
    here.close()


@pytest.mark.parametrize("last", [None, b"Done", b"done done", b"\xff", b"newest"])
def test_memory_that_is_not_given_back_is_never_written_again__whatever_is_said(mount, last):
    versions(mount, 1)
    lent = Borrowed(mount.model)
    if last is not None:
        lent.mount.send(last)
        assert lent.mount.recv(1) == b""
    lent.vanish()
    for _ in range(30):
        versions(mount, 1)
        other = Borrowed(mount.model)
        assert other.inode != lent.inode
        other.give_back()
    assert value(lent.read()) == 1
    lent.close()
    # It holds nobody up, and is not counted.
    assert mount.status()["version_buffers"]["existing"] <= MOST


def test_memory_that_is_given_back_is_used_again(mount):
    inodes, existing = set(), 0
    for _ in range(30):
        lent, other = Borrowed(mount.model), Borrowed(mount.model)
        inodes.add(lent.inode)
        versions(mount, 2)
        lent.give_back()
        other.give_back()
        existing = max(existing, mount.status()["version_buffers"]["existing"])
    assert len(inodes) <= MOST and existing <= MOST


def test_loans_count_as_versions_that_are_held(mount):
    lent = []
    for version in range(MOST):
        lent.append(Borrowed(mount.model))
        assert (lent[-1].version, versions(mount, 1)) == (version, version + 1)
    with refused(errno.ENOMEM, f"programs hold {MOST} versions open (close old handles or raise control/max_versions)"):
        Borrowed(mount.model)
    # Another program, which is no user of the mount's own learner.
    assert "Cannot allocate memory" in ran(["head", "-c1", mount.model / "weights"], env={"LC_ALL": "C", **os.environ}).stderr
    again = Borrowed(mount.model, version=1)
    assert (again.version, again.inode) == (1, lent[1].inode)
    again.give_back()
    lent.pop(0).give_back()
    lent.append(Borrowed(mount.model))
    assert [value(one.read()) for one in lent] == [1, 2, 3, MOST]
    # Whoever has gone holds nobody up.
    for one in lent:
        one.vanish()
    eventually(lambda: mount.status()["version_buffers"]["existing"] <= MOST)
    versions(mount, 10)
    assert [value(one.read()) for one in lent] == [1, 2, 3, MOST]


def test_a_version_that_is_gone_cannot_be_borrowed(mount):
    versions(mount, 10)
    for version in (0, 3, 11, 2**64 - 1):
        with refused(errno.ENOENT, f"version {version} is not here"):
            Borrowed(mount.model, version)
    for version in (10, "newest"):
        lent = Borrowed(mount.model, version)
        assert lent.version == 10
        lent.give_back()


def test_wrong_requests_to_borrow_are_refused(start_mount):
    mount = start_mount(size=SIZE, reducer="sum", max_versions=MOST)
    address, key = where(mount.model)
    wrong = [b"\n", b"newest", b"\xff\xfe", b"done", *(f"{key}{rest}".encode() for rest in ("", " ", " -1", " 1.0", f" {2**64}", " 0" * 99))]
    for request in wrong:
        connection, answer, file = ask(address, request)
        assert (answer.split()[:2], file) == (["error:", str(errno.EINVAL)], None), request
        assert connection.recv(1) == b""
        connection.close()
    for unknown in ("", key[:-1], key.upper() + "0", "0" * 32):
        _, answer, file = ask(address, f"{unknown} newest".encode())
        assert (answer.split()[1], file) == (str(errno.EACCES), None)
    # Those who say nothing are sent away: for others, and after a while.
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(100)]
    for one in silent:
        one.settimeout(HANGS)
        one.connect(address)
    Borrowed(mount.model).give_back()
    assert [one.recv(1) for one in silent] == [b""] * len(silent)
    # So many loans are there at most.
    loans = [Borrowed(mount.model) for _ in range(256)]
    with refused(errno.EAGAIN, "256 programs borrow memory already"):
        Borrowed(mount.model)
    for loan in loans:
        loan.give_back()
    versions(mount, 20)
    assert mount.status()["version_buffers"]["existing"] <= 3


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_lent_memory_outlives_the_mount(mount, end):
    versions(mount, 2)
    lent, (address, key) = Borrowed(mount.model), where(mount.model)
    getattr(mount, end)()
    assert lent.mount.recv(1) == b""
    assert value(lent.read()) == 2
    with raises(errno.ECONNREFUSED):
        ask(address, f"{key} newest".encode())
    lent.close()


BORROW = """\
import socket
name, key = (sys.argv[2:] or os.getxattr(path + "/weights", "user.gradfs.memory").decode().split())
mount = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
mount.connect(chr(0) + name)
mount.send((key + " newest").encode())
answer, files, _, _ = socket.recv_fds(mount, 4096, 1)
if not files:
    sys.exit(int(answer.split()[1]))
assert len(os.pread(files[0], 9000, 0)) == 8192
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root serves other users")
@pytest.mark.parametrize("umask, status", [("077", errno.EACCES), ("022", 0)])
def test_who_may_not_read_weights_borrows_nothing(mounted, umask, status):  # noqa: F811
    mount = mounted(umask=umask)
    assert as_user(BORROW, mount.model) == status
    # The socket's name is no secret.
    address, _ = where(mount.model)
    assert as_user(BORROW, mount.model, address[1:], "0" * 32) == errno.EACCES
    assert as_user(BORROW, mount.model, *os.getxattr(mount.model / "weights", "user.gradfs.memory").decode().split()) == 0


def test_memory_that_is_not_given_back_is_never_written_again__and_a_shard_goes_on_sharing(cluster):
    """However many loans of its memory are lost."""
    one = cluster(1, size=SIZE, block_size=BLOCK, reducer="sum", learners=1, max_versions=MOST)
    mount, kept = one.mount(transport="shm"), []
    for version in range(300):
        lent = Borrowed(mount.model)
        lent.vanish()
        kept.append(lent) if version % 30 == 0 else lent.close()
        versions(mount, 1)
    for lent in kept:
        assert value(lent.read()) == lent.version
        lent.close()
    # A version may come in blocks now and then. Those of 44 would, if the shard counted lost loans for ever.
    assert mount.status()["payload"]["pull_copied_bytes"] < 20 * SIZE
    assert one.partition(one.shards[0], "m")["memory_bytes"] <= 8 * SIZE
