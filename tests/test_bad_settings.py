"""Settings and learners that must be refused."""

import errno
import mmap
import os
import resource
import subprocess
import threading
import time

import pytest

from refusals import BLOCK, EINVAL, ONE, nothing_changes, opened, refused, said, small


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
    "consistency": [b"maybe", b"quorum 2", b"ssp", b"grace(2)", b"grace(0, 1)", b"grace(2, 0)", b"grace(2, 10.5)", b"grace(2, x)"],
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
            for value in values:
                if not value:
                    continue
                for flags in [os.O_WRONLY, os.O_WRONLY | os.O_TRUNC, os.O_RDWR]:
                    with refused(EINVAL), opened(mount.model / "control" / name, flags) as fd:
                        os.write(fd, value)
                assert (mount.model / "control" / name).read_bytes() == old, (name, value)
        said(mount, "control/learning_rate", '"fast"', "number")
        said(mount, "control/min_learners", "above learners")
        said(mount, "control/learners", '"4097"', "from 1 to 4096")
        said(mount, "control/consistency", '"quorum 2"', "did you mean quorum(2)?")
        said(mount, "control/consistency", '"grace(2)"', "did you mean grace(2, 0.5)?")
        said(mount, "control/staleness_aware", "needs consistency async or ssp(s), and it is sync")
        for line in mount.stderr().splitlines():
            assert len(line) < 500, f"a line of {len(line)} bytes in the log: {line[:200]}…"


def test_a_shell_sees_that_a_setting_is_refused(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        done = subprocess.run(
            ["sh", "-c", "echo fast | tee control/learning_rate"], cwd=mount.model, capture_output=True, text=True, timeout=300, check=False,
        )
        assert done.returncode != 0 and "Invalid argument" in done.stderr, done


def test_a_setting_at_an_offset_is_refused(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        with refused(EINVAL), opened(mount.model / "control/learning_rate", os.O_WRONLY) as fd:
            for offset in [1, 2, 4096, 1 << 40]:
                with refused(EINVAL, errno.EFBIG):
                    os.pwrite(fd, b"0.5\n", offset)
        said(mount, "control/learning_rate", "whole value, from its start")


def test_an_unknown_setting_does_not_exist(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        path = mount.model / "control/learning_speed"
        for flags in [os.O_RDONLY, os.O_WRONLY, os.O_WRONLY | os.O_CREAT]:
            with refused(errno.ENOENT):
                os.open(path, flags, 0o644)
        said(mount, "control/ has no setting", '"learning_speed"')
        with refused(errno.ENOENT):
            path.stat()


def test_settings_are_whole_while_they_change(start_mount):
    mount = small(start_mount)
    values = ["0.125", "12345", "0.0000001"]
    stop, strange = threading.Event(), []

    def read():
        while not stop.is_set():
            for way in ["file", "status"]:
                got = mount.control("learning_rate") if way == "file" else mount.status()["control"]["learning_rate"]
                if got not in values and got != "0.001":
                    strange.append(got)

    def write(value):
        while not stop.is_set():
            mount.control("learning_rate", value)

    threads = [threading.Thread(target=read) for _ in range(2)]
    threads += [threading.Thread(target=write, args=[value]) for value in values]
    for thread in threads:
        thread.start()
    time.sleep(0.7)
    stop.set()
    for thread in threads:
        thread.join(300)
    assert strange == []
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1


# Learners


def test_bad_names_of_learners_are_refused(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        place = os.fsencode(mount.model / "learners")
        for name in [b".hidden", b"a b", "ü".encode(), b"a\nb", b"\xff\xfe", b"a:b", b"*"]:
            with refused(EINVAL):
                os.mkdir(place + b"/" + name)
        for length in [65, 255, 256, 1024, 1025]:
            with refused(errno.ENAMETOOLONG):
                os.mkdir(place + b"/" + b"x" * length)
        for directory in [mount.root, mount.model, mount.model / "control", mount.model / "versions"]:
            with refused(errno.ENAMETOOLONG):
                os.stat(directory / ("x" * 256))
            with refused(errno.ENOENT):
                os.stat(directory / ("x" * 255))
        assert os.listdir(place) == []
        said(mount, "learner name", "letters, digits")
        said(mount, "xxx", "65 bytes", "64 is the most")
    os.mkdir(place + b"/" + b"x" * 64)


def test_a_taken_name_of_a_learner_is_refused(start_mount):
    mount = small(start_mount)
    mount.join("a")
    for _ in range(3):
        with refused(errno.EEXIST):
            mount.join("a")
    mount.contribute(ONE, learner="a")
    assert mount.wait_for_version(1) == 1


def test_a_name_goes_to_one_of_the_learners_that_race_for_it(start_mount):
    mount = small(start_mount)
    for round_ in range(20):
        outcomes, barrier = [], threading.Barrier(4)

        def join():
            barrier.wait(300)
            try:
                os.mkdir(mount.place(f"r{round_}"))
                outcomes.append(0)
            except OSError as error:
                outcomes.append(error.errno)

        threads = [threading.Thread(target=join) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert sorted(outcomes) == [0] + [errno.EEXIST] * 3
        mount.leave(f"r{round_}")


def test_leaving_without_having_joined(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        for name in ["nobody", ".hidden", "x" * 255]:
            with refused(errno.ENOENT):
                mount.leave(name)
        mount.join("a")
        mount.leave("a")
        with refused(errno.ENOENT):
            mount.leave("a")


def test_a_write_after_leaving_fails(start_mount):
    mount = small(start_mount)
    mount.join("a")
    fd = os.open(mount.place("a") / "gradients", os.O_WRONLY)
    os.pwrite(fd, ONE * (BLOCK // 4), 0)
    os.pwrite(fd, ONE, BLOCK)
    mount.leave("a")
    with nothing_changes(mount):
        with refused(errno.ENOTCONN):
            os.pwrite(fd, ONE * (BLOCK // 4), 2 * BLOCK)
        with refused(errno.ENOTCONN):
            os.close(fd)
    said(mount, "no longer in the job", "join again")


def test_a_close_after_leaving_fails(start_mount):
    mount = small(start_mount)
    mount.join("a")
    fd = os.open(mount.place("a") / "gradients", os.O_WRONLY)
    os.pwrite(fd, ONE, 0)
    mount.leave("a")
    with nothing_changes(mount):
        with refused(errno.ENOTCONN):
            os.close(fd)


def test_handles_outlive_their_learner(start_mount, way):
    mount = small(start_mount, **way)
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
            with refused(errno.ENOTCONN):
                act()
        with refused(errno.ENOENT, errno.ENOTCONN):
            os.pread(status, 100, 0)
        memory.close()
        for fd in [weights, status]:
            os.close(fd)
        with refused(errno.ENOTCONN):
            os.close(gradients)
        with refused(errno.ENOENT):
            os.open(place / "gradients", os.O_WRONLY)


def test_an_old_handle_does_not_write_for_the_next_learner_of_its_name(start_mount):
    mount = small(start_mount)
    mount.join("a")
    old = os.open(mount.place("a") / "gradients", os.O_WRONLY)
    mount.leave("a")
    mount.join("a")
    with refused(errno.ENOTCONN):
        os.pwrite(old, ONE * (BLOCK // 4), 0)
    mount.contribute(ONE, offset=BLOCK, learner="a")
    with refused(errno.ENOTCONN):
        os.pwrite(old, ONE, 0)
    with refused(errno.ENOTCONN):
        os.close(old)
    assert mount.wait_for_version(1) == 1
    assert (mount.weights()[:BLOCK + 4] == bytes(BLOCK) + ONE) is True


def test_leaving_in_mid_step_lets_the_others_go_on(start_mount):
    mount = small(start_mount, learners=2)
    mount.join("a"), mount.join("b")
    fd = os.open(mount.place("b") / "gradients", os.O_WRONLY)
    os.pwrite(fd, ONE * (BLOCK // 4), 0)
    mount.contribute(ONE, learner="a")
    assert mount.version() == 0
    mount.leave("b")
    assert mount.wait_for_version(1) == 1
    assert (mount.weights() == ONE + bytes(4 * BLOCK - 4)) is True
    try:
        os.pwrite(fd, ONE, BLOCK)  # May be buffered; what counts is that close tells.
    except OSError as error:
        assert error.errno == errno.ENOTCONN
    with refused(errno.ENOTCONN):
        os.close(fd)


def test_joining_beyond_the_limit_of_open_files_is_enfile(start_mount):
    """Not ENOMEM: there is memory, and another limit is to be raised."""
    mount = small(start_mount)
    mount.contribute(ONE)
    limit = len(os.listdir(f"/proc/{mount.pid}/fd")) + 10
    resource.prlimit(mount.pid, resource.RLIMIT_NOFILE, (limit, limit))
    joined = []
    with nothing_changes(mount):
        with refused(errno.ENFILE):
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
    with refused(errno.EDQUOT):
        mount.join("one-more")
    said(mount, "800 learners", "control/max_learners")
    assert len(os.listdir(mount.model / "learners")) == 800
    mount.leave(17)
    mount.join("late")
    with refused(errno.EDQUOT):
        mount.join("later")
    mount.contribute(ONE, learner=18)
    assert mount.wait_for_version(1) == 1
