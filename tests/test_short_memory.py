"""No memory for another version: who fails, who waits, and what goes on."""

import errno
import os
import re
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY, gradfs_binary
from filetools import Threads, array, close, eventually, fails, filled, outcome, raises
from test_nbd import FLUSH, READ, TRIM, WRITE, ZEROES, Client

# At the end: what the tests call by the same name is theirs.
sys.path.append(str(REPOSITORY / "scripts/lib"))

import memory_group  # noqa: E402

MIB = 1 << 20
SIZE = 64 * MIB
# Room for what the daemon needs besides: less than a version.
SLACK = SIZE // 2


def no_memory(mount):
    """What the mount says of it."""
    return mount.status()["version_buffers"]["no_memory"]


def complaints(daemon):
    """Lines of the log that say so; those of calls that fail are warnings."""
    lines = (daemon.stdout() + daemon.stderr()).splitlines()
    return [line for line in lines if " ERROR " in line and "no memory for another version" in line]


def opened(path):
    return os.open(path, os.O_RDONLY)


def limit_addresses(daemon):
    """The daemon gets no address space for another version."""
    size = int(re.search(r"VmSize:\s+(\d+) kB", Path(f"/proc/{daemon.pid}/status").read_text())[1]) << 10
    resource.prlimit(daemon.pid, resource.RLIMIT_AS, (size + SLACK, resource.RLIM_INFINITY))


@pytest.fixture
def group(monkeypatch, tmp_path):
    """Daemons that are started from when this is called are in a control group, whose limit can be set."""
    with memory_group.group("short") as group:

        def begin():
            if not isinstance(group, memory_group.Group):
                pytest.skip("no control group of memory can be made here")
            monkeypatch.setenv("GRADFS_BIN", str(group.starts(tmp_path / "gradfs-in-group", gradfs_binary())))
            return group

        yield begin


class Learner:
    """A learner that contributes ones, so that the weights count its steps."""

    def __init__(self, mount):
        self.mount, self.place, self.ones, self.taken = mount, mount.join("a"), filled(mount, 1), 0

    def contribute(self):
        self.taken += 1
        self.mount.contribute(self.ones, learner="a")

    def steps(self, count):
        for _ in range(count):
            self.contribute()
            assert (array(self.place / "weights") == self.taken).all()

    def settle(self):
        """Until no buffer is left that a reader made necessary, and staging has its pages."""
        self.steps(3)
        while self.mount.status()["version_buffers"]["existing"] > 2:
            assert self.taken < 50
            self.steps(1)
        return self.taken


def one_process_is_short(mount, limit):
    """A reader holds a version, and there is no memory for the one after the next."""
    b, a, threads = mount.join("b"), Learner(mount), Threads()
    shown = a.settle()
    held = opened(mount.model / "weights")
    limit()
    a.contribute()
    assert no_memory(mount) is None, "the next version has the second buffer"
    waiting = threads.start(a.contribute)
    reason = eventually(lambda: no_memory(mount), deadline=20)
    for path in ("weights", "weights.safetensors", "tensors/weights.npy"):
        fails(errno.ENOMEM, opened, mount.model / path)
    assert reason in (mount.model / "error").read_text()
    # What is held stays readable, and learners may open what is shown.
    assert os.pread(held, 4, 0) == np.float32(shown).tobytes()
    assert (array(b / "weights") == shown + 1).all()
    assert not waiting.done()
    os.close(held)
    waiting.result(300)
    assert (array(mount.model / "weights") == shown + 2).all()
    a.steps(3)
    assert no_memory(mount) is None and len(complaints(mount)) == 1, complaints(mount)
    assert mount.running()


def a_mount_is_short(mount, limit):
    """Contributions count; what cannot be shown here are the versions."""
    a = Learner(mount)
    shown = a.settle()
    held = opened(mount.model / "weights")
    limit()
    a.steps(1)
    for _ in range(4):
        a.contribute()
        fails(errno.ENOMEM, opened, a.place / "weights")
        assert "no memory for another version" in (a.place / "error").read_text()
        assert mount.coordinator_version() == a.taken
    assert no_memory(mount)
    # Who does not need a newer version reads what is here.
    assert (array(mount.model / "weights") == shown + 1).all()
    assert os.pread(held, 4, 0) == np.float32(shown).tobytes()
    os.close(held)
    eventually(lambda: mount.seen() == a.taken, deadline=20)
    a.steps(3)
    assert no_memory(mount) is None and len(complaints(mount)) == 1, complaints(mount)
    assert mount.running()


SETTINGS = {"size": SIZE, "reducer": "sum", "timeout": 60, "lease": 100}
# So that another learner need not contribute.
ASYNC = {"consistency": "async", "read_own_step": "true"}


def test_without_memory_for_another_version_training_goes_on(start_mount):
    mount = start_mount(**SETTINGS, **ASYNC)
    one_process_is_short(mount, lambda: limit_addresses(mount))


def test_without_memory_for_another_version_training_goes_on__on_a_network(cluster):
    one = cluster(1, **SETTINGS)
    mount = one.mount(transport="tcp")
    a_mount_is_short(mount, lambda: limit_addresses(mount))


def test_without_memory_for_another_version_training_goes_on__at_a_shard(cluster):
    """A mount on the shard's host shows the shard's memory: its readers hold that."""
    one, threads = cluster(1), Threads()
    one.create("m", **SETTINGS)
    (shard,), mount = one.shards, one.mount(transport="shm")
    a = Learner(mount)
    a.steps(3)
    while one.partition(shard, "m")["memory"]["versions"] > 2 * SIZE:
        assert a.taken < 50
        a.steps(1)
    held, shown = opened(mount.model / "weights"), a.taken
    limit_addresses(shard)
    a.steps(1)
    waiting = threads.start(a.steps, 1)
    eventually(lambda: complaints(shard), deadline=20)
    assert (array(mount.model / "weights") == shown + 1).all()
    assert os.pread(held, 4, 0) == np.float32(shown).tobytes() and not waiting.done()
    os.close(held)
    waiting.result(300)
    a.steps(3)
    assert len(complaints(shard)) == 1 and shard.running() and mount.running()


def test_a_limit_of_a_control_group_ends_no_daemon(group, start_mount):
    """The kernel would end a process that touches a page beyond it."""
    group = group()
    mount = start_mount(**SETTINGS, **ASYNC)
    one_process_is_short(mount, lambda: group.limit(group.used() + SLACK))


def test_a_limit_of_a_control_group_ends_no_daemon__on_a_network(group, cluster):
    one = cluster(1, **SETTINGS)
    group = group()
    mount = one.mount(transport="tcp")
    a_mount_is_short(mount, lambda: group.limit(group.used() + SLACK))


def versions_give_way(mount, group):
    """Readers have held old versions, and have gone. There is no memory for what another learner writes besides."""
    a, held, b = Learner(mount), [], mount.join("b")
    for _ in range(4):
        held.append(opened(mount.model / "weights"))
        a.steps(1)
    close(*held)
    group.limit(group.used() + SLACK)
    # The kernel takes a moment to let go of what it has opened past the daemon.
    eventually(lambda: outcome(lambda: mount.contribute(a.ones, learner="b")) == "done", deadline=20)
    assert (array(b / "weights") == a.taken + 1).all()
    assert mount.status()["version_buffers"]["existing"] <= 3 and mount.running()


@pytest.mark.parametrize("where", ["here", "network"])
def test_free_versions_give_way_to_what_a_learner_writes(group, start_mount, cluster, where):
    one = cluster(1, **SETTINGS, **ASYNC) if where == "network" else None
    group = group()
    versions_give_way(one.mount(transport="tcp") if one else start_mount(**SETTINGS, **ASYNC), group)


def test_learners_that_write_end_no_daemon(group, start_mount):
    """Each takes staging of the model's size, and there is room for two or three of them."""
    group = group()
    mount = start_mount(size=SIZE, reducer="sum", timeout=60, lease=100, learners=2, **ASYNC)
    group.limit(group.used() + 4 * SIZE)
    written, taken = [], 0
    with raises(errno.ENOMEM):
        for name in "abcdef":
            written.append((name, os.open(mount.join(name) / "gradients", os.O_WRONLY)))
            for offset in range(0, SIZE - MIB, MIB):
                os.pwrite(written[-1][1], bytes(MIB), offset)
    assert mount.running() and len(written) > 1
    name, last = written.pop()
    assert "no memory for what a learner writes" in (mount.place(name) / "error").read_text()
    fails(errno.ENOMEM, os.close, last)
    # It counts nowhere, and the others go on.
    for name, fd in written:
        os.close(fd)
        taken += 1
    eventually(lambda: mount.status()["contributions"] == taken)
    mount.leave(name)
    a = filled(mount, 1)
    mount.contribute(a, learner="a")
    mount.catch_up()
    assert (array(mount.model / "weights") == 1).all() and mount.running()


def test_a_disk_that_is_written_ends_no_daemon(group, start_mount, tmp_path):
    """It takes memory of the model's size with its first write, and none if it is only read."""
    group, path = group(), tmp_path / "nbd.sock"
    mount = start_mount(size=SIZE, dtype="u8", reducer="assign", nbd=path)
    disk = Client(path)
    disk.go("model")
    group.limit(group.used() + SLACK)
    for command, payload in ((WRITE, bytes(MIB)), (ZEROES, b""), (TRIM, b"")):
        got, why = disk.ask(command, 0, MIB, payload=payload)
        assert got == errno.ENOMEM and why, (command, got, why)
    assert disk.ask(READ, 0, MIB) == (0, bytes(MIB)) and mount.running()
    group.limit(group.used() + 4 * SIZE)
    for offset in range(0, SIZE, MIB):
        assert disk.ask(WRITE, offset, MIB, payload=b"x" * MIB) == (0, b"")
    assert disk.ask(FLUSH) == (0, b"")
    assert (mount.model / "weights").read_bytes() == b"x" * SIZE
