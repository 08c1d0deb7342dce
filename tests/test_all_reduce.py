"""Numbers that learners reduce among themselves: `learners/<id>/all_reduce`."""

import contextlib
import errno
import os
import subprocess
import time
from concurrent.futures import as_completed

import pytest
from filetools import Threads, fails, impatient, program, raises, shell
from patience import HANGS

pytestmark = pytest.mark.also_on_network


def all_reduce(place, line):
    """The results, once all have given their numbers."""
    fd = os.open(place / "all_reduce", os.O_RDWR)
    try:
        os.write(fd, f"{line}\n".encode())
        return [float(word) for word in os.pread(fd, 4096, 0).split()]
    finally:
        os.close(fd)


def test_numbers_of_all_learners_are_reduced(start_mount):
    mount = start_mount(size="64KiB", reducer="sum", learners=3)
    places = mount.join("a", "b", "c")
    threads = Threads()
    for op, expected in [("sum", [6, 0.5]), ("mean", [2, 0.5 / 3]), ("min", [1, -1]), ("max", [3, 2])]:
        waiting = [
            threads.start(all_reduce, place, f"{op} {a} {b}") for place, a, b in zip(places, (1, 2, 3), (-1, 2, -0.5))
        ]
        assert [one.result() for one in waiting] == [pytest.approx(expected)] * 3, op
    assert mount.version() == 0, "no step was made"


def test_who_leaves_is_not_waited_for(start_mount):
    mount = start_mount(size="64KiB", reducer="sum", learners=2)
    a, b = mount.join("a", "b")
    threads = Threads()
    waiting = threads.start(all_reduce, a, "sum 1")
    child = program("fd = os.open(argv[0], os.O_RDWR); say('writes'); os.write(fd, b'sum 5')", b / "all_reduce")
    assert child.stdout.readline()
    b.rmdir()
    assert waiting.result() in ([1], [6])
    child.communicate(timeout=HANGS)


def test_a_learner_that_leaves_waits_no_longer(start_mount):
    mount = start_mount(size="64KiB", reducer="sum", learners=2)
    a, _ = mount.join("a", "b")
    child = program("fd = os.open(argv[0], os.O_RDWR); say('writes'); os.write(fd, b'sum 5')", a / "all_reduce", stderr=subprocess.PIPE)
    assert child.stdout.readline()
    while child.poll() is None:
        # It may not have come to its write, and then hears that there is no learner.
        with contextlib.suppress(FileNotFoundError):
            a.rmdir()
        time.sleep(0.01)
    assert "OSError" in child.stderr.read()


def test_learners_that_do_not_come_are_waited_for_until_the_timeout(start_mount):
    mount = start_mount(size="64KiB", reducer="sum", learners=2)
    a, b = mount.join("a", "b")
    with impatient(mount):
        fails(errno.ETIMEDOUT, all_reduce, a, "sum 1")
        assert "have not given their numbers" in (a / "error").read_text()
    threads = Threads()
    waiting = [threads.start(all_reduce, place, "sum 2") for place in (a, b)]
    assert [one.result() for one in waiting] == [[4], [4]], "what was late does not count"


def test_learners_must_call_alike(start_mount):
    mount = start_mount(size="64KiB", reducer="sum", learners=2)
    a, b = mount.join("a", "b")
    for line in ("", "mean", "mean x", "product 1", "sum" + " 1" * 65):
        fails(errno.EINVAL, all_reduce, a, line)
    assert "write one line" in (a / "error").read_text()
    threads = Threads()
    calls = {threads.start(all_reduce, a, "max 1"): (a, "min 2"), threads.start(all_reduce, b, "min 3"): (b, "max 2")}
    refused = next(as_completed(calls))
    with raises(errno.EINVAL):
        refused.result()
    place, line = calls.pop(refused)
    assert "all must call alike" in (place / "error").read_text()
    (waiting,) = calls
    assert all_reduce(place, line) == waiting.result()


def test_a_shell_can_wait_at_a_barrier(start_mount):
    mount = start_mount(size="64KiB", reducer="sum", learners=1)
    place = mount.join("a")
    assert shell('exec 3<>"$1/all_reduce"; echo "mean 0.5 3" >&3; cat <&3', place) == "0.5 3.0\n"
