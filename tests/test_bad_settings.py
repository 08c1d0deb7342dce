"""Settings and learners that must be refused."""

import errno
import mmap
import os
import resource

from filetools import BLOCK, close, fails, opened, raises, said
from refusals import ONE, nothing_changes, small


BAD_VALUES = {
    "learning_rate": [b"fast", b"\n", b" ", b"nan", b"inf", b"-1", b"1e39", b"0.1 0.2", b"0.1\n0.2\n", b"0,1", b"0x10", b"\xff\xfe", b"0.1\0", b"\0" * 64, b"1" * 5000, b"1" * (2 << 20)],
    "momentum": [b"1.01", b"-0.1", b"x"],
    "beta1": [b"1", b"2"],
    "learners": [b"0", b"-1", b"1.5", b"4097", b"70000", b"18446744073709551617"],
    "min_learners": [b"0", b"2"],
    "max_learners": [b"0", b"4097", b"x"],
    "max_versions": [b"0", b"2", b"x"],
    "retain": [b"-1", b"70000", b"14"],
    "timeout": [b"0", b"-1", b"never", b"1e300", b"nan", b"inf"],
    "shard_patience": [b"-1", b"soon", b"1e300", b"nan"],
    "lease": [b"-1", b"x"],
    "patience": [b"-1", b"x"],
    "linger": [b"-1", b"x", b"nan", b"1e300"],
    "reducer": [b"", b"magic", b"SGD2", b"sgd adam", b"../../etc"],
    "consistency": [b"maybe", b"quorum 2", b"ssp", b"grace(2)", b"grace(0, 1)", b"grace(2, 0)", b"grace(2, 10.5)", b"grace(2, x)",
                    b"quorum(0)", b"quorum(-1)", b"quorum(65537)", b"ssp(x)", b"ssp()", b"sync(1)"],
    "staleness_aware": [b"2", b"true"],
    "aggregation": [b"max"],
    "nonfinite": [b"perhaps"],
    "wire": [b"int4", b"topk", b"topk(0)", b"topk(2)", b"topk(nan)"],
    "pull": [b"later", b"on demand", b"-1"],
    "read_own_step": [b"2", b"maybe"],
}


def test_bad_values_of_settings_are_refused(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        for name, values in BAD_VALUES.items():
            old = (mount.model / "control" / name).read_bytes()
            for value in filter(None, values):
                for flags in [os.O_WRONLY, os.O_WRONLY | os.O_TRUNC, os.O_RDWR]:
                    with raises(errno.EINVAL), opened(mount.model / "control" / name, flags) as fd:
                        os.write(fd, value)
                assert (mount.model / "control" / name).read_bytes() == old, (name, value)
            assert f"control/{name}" in (mount.model / "error").read_text()
        said(mount, "control/learning_rate", '"fast"', "number")
        said(mount, "control/min_learners", "above learners")
        said(mount, "control/learners", '"4097"', "from 1 to 4096")
        said(mount, "control/consistency", '"quorum 2"', "did you mean quorum(2)?")
        said(mount, "control/consistency", '"grace(2)"', "did you mean grace(2, 0.5)?")
        said(mount, "control/staleness_aware", "needs consistency async or ssp(s), and it is sync")
        for line in mount.stderr().splitlines():
            assert len(line) < 500, f"a line of {len(line)} bytes in the log: {line[:200]}…"


def test_a_setting_at_an_offset_is_refused(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        with raises(errno.EINVAL), opened(mount.model / "control/learning_rate", os.O_WRONLY) as fd:
            for offset in [1, 2, 4096, 1 << 40]:
                with raises(errno.EINVAL, errno.EFBIG):
                    os.pwrite(fd, b"0.5\n", offset)
        said(mount, "control/learning_rate", "whole value, from its start")


# Learners


def test_handles_outlive_their_learner(start_mount):
    mount = small(start_mount)
    mount.contribute(ONE)
    mount.leave("mount")
    mount.join("a")
    place = mount.place("a")
    weights = os.open(place / "weights", os.O_RDONLY)
    gradients = os.open(place / "gradients", os.O_RDWR | os.O_DIRECT)
    memory = mmap.mmap(gradients, BLOCK)
    status = os.open(place / "status", os.O_RDONLY)
    mount.leave("a")
    with nothing_changes(mount):
        assert os.pread(weights, 4, 0) == ONE
        memory[:4] = ONE
        for act in [lambda: os.fsync(gradients), lambda: os.pwrite(gradients, ONE, 0)]:
            fails(errno.ENOTCONN, act)
        with raises(errno.ENOENT, errno.ENOTCONN):
            os.pread(status, 100, 0)
        memory.close()
        close(*[weights, status])
        fails(errno.ENOTCONN, os.close, gradients)
        fails(errno.ENOENT, os.open, place / "gradients", os.O_WRONLY)


def test_an_old_handle_does_not_write_for_the_next_learner_of_its_name(start_mount):
    mount = small(start_mount)
    mount.join("a")
    old = os.open(mount.place("a") / "gradients", os.O_WRONLY)
    mount.leave("a")
    mount.join("a")
    fails(errno.ENOTCONN, os.pwrite, old, ONE * (BLOCK // 4), 0)
    mount.contribute(ONE, offset=BLOCK, learner="a")
    fails(errno.ENOTCONN, os.pwrite, old, ONE, 0)
    fails(errno.ENOTCONN, os.close, old)
    assert mount.wait_for_version(1) == 1
    assert (mount.weights()[:BLOCK + 4] == bytes(BLOCK) + ONE) is True


def test_joining_beyond_the_limit_of_open_files_is_enfile(start_mount):
    """Not ENOMEM: there is memory, and another limit is to be raised."""
    mount = small(start_mount)
    mount.contribute(ONE)
    limit = len(os.listdir(f"/proc/{mount.pid}/fd")) + 10
    resource.prlimit(mount.pid, resource.RLIMIT_NOFILE, (limit, limit))
    joined = []
    with nothing_changes(mount):
        with raises(errno.ENFILE):
            for i in range(20):
                joined.append(mount.join(i))
        assert joined, "not even one"
        said(mount, "out of open files", "ulimit -Hn")
        for place in joined:
            place.rmdir()
    mount.join("again")


def test_more_learners_than_the_limit_are_refused(start_mount):
    """Each takes two open files, and a login session allows a process 1,024 unless it asks for more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        # On a slow machine, making them takes longer than a lease.
        mount = start_mount(size="64KiB", block_size="64KiB", reducer="sum", consistency="async", lease=0, max_learners=800)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for i in range(800):
        mount.join(i)
    fails(errno.EDQUOT, mount.join, "one-more")
    said(mount, "800 learners", "control/max_learners")
    assert len(os.listdir(mount.model / "learners")) == 800
    mount.leave(17)
    mount.join("late")
    fails(errno.EDQUOT, mount.join, "later")
    mount.contribute(ONE, learner=18)
    assert mount.wait_for_version(1) == 1
