"""Handles and programs that share one learner: what one of them does to the contribution, the others hear of."""

import errno
import json
import os
import time

import numpy as np
import pytest
from filetools import (
    BLOCK, SIZE, Threads, array, close, eventually, f32, fails, filled, go, hear, killed, mounts, outcome, program,
    takes
)
from patience import HANGS

mounted = mounts(both=False, lease=0)
ONES = np.ones(BLOCK // 4, "<f4")


def lose_by_nan(gradients):
    """A whole block: the write says so, and close says so again."""
    fd = os.open(gradients, os.O_WRONLY)
    fails(errno.EINVAL, os.pwrite, fd, ONES * np.nan, 0)
    fails(errno.EINVAL, os.close, fd)


def lose_by_nan_in_a_part(gradients):
    """Nobody looks at it before close."""
    fd = os.open(gradients, os.O_WRONLY)
    os.pwrite(fd, f32(np.nan), 40)
    fails(errno.EINVAL, os.close, fd)


def lose_by_half_an_element(gradients):
    fd = os.open(gradients, os.O_WRONLY)
    os.pwrite(fd, b"ab", 40)
    fails(errno.EINVAL, os.close, fd)


VICTIM = """
fd = os.open(argv[0], os.O_WRONLY)
os.pwrite(fd, bytes([0, 0, 128, 66]) * 16384, 0)  # A block of 64.0.
say("written")
time.sleep(30)
"""


def kill_a_writer(gradients):
    victim = program(VICTIM, gradients)
    assert hear(victim) == "written"
    killed(victim)


def lose_by_a_kill(gradients):
    kill_a_writer(gradients)
    status = gradients.parent / "status.json"
    eventually(lambda: json.loads(status.read_text())["learners"][0]["phase"] == "idle")


@pytest.mark.parametrize("lose", [lose_by_nan, lose_by_nan_in_a_part, lose_by_half_an_element, lose_by_a_kill])
def test_fsync_or_close_is_the_only_success__for_each_handle_that_wrote(mounted, lose):
    """A program whose bytes were dropped with another's gets one error, at its next call."""
    mount = mounted()
    gradients = mount.model / "gradients"
    taken = 0

    def holds_what_was_taken():
        return mount.version() == taken and array(mount.model / "weights").sum() == taken

    for told_by in ("write", "fsync", "close"):
        for goes_on in (False, True):
            fd, idle = (os.open(gradients, os.O_WRONLY) for _ in range(2))
            os.pwrite(fd, ONES, BLOCK)
            lose(gradients)
            if goes_on:
                # A program that had written nothing is not concerned, and its later writes count.
                os.fsync(idle)
                os.pwrite(idle, f32(1), 2 * BLOCK)
                os.fsync(idle)
                taken += 1
            if told_by == "write":
                fails(errno.EIO, os.pwrite, fd, ONES, 3 * BLOCK)
                fails(errno.EIO, os.fsync, fd)
            elif told_by == "fsync":
                fails(errno.EIO, os.fsync, fd)
            else:
                fails(errno.EIO, os.close, fd)
                fd = os.open(gradients, os.O_WRONLY)
            os.close(idle)
            os.fsync(fd)
            assert holds_what_was_taken(), f"told by {told_by}"
            os.pwrite(fd, f32(1), BLOCK)
            os.fsync(fd)
            taken += 1
            os.close(fd)
            assert holds_what_was_taken(), f"told by {told_by}: the next one starts clean"


def test_fsync_or_close_is_the_only_success__not_after_a_write_that_failed(mounted):
    """Another handle's close reports the failure and drops the contribution; the one whose write failed hears of it too."""
    mount = mounted()
    first, second = (os.open(mount.model / "gradients", os.O_WRONLY) for _ in range(2))
    os.pwrite(first, ONES, 0)
    fails(errno.EINVAL, os.pwrite, second, ONES * np.nan, BLOCK)
    fails(errno.EINVAL, os.close, first)
    fails(errno.EIO, os.close, second)
    mount.contribute(ONES)
    assert mount.version() == 1 and array(mount.model / "weights").sum() == len(ONES)


def test_fsync_or_close_is_the_only_success__of_what_was_taken_before(mounted):
    """A loss concerns only programs that wrote into the lost contribution."""
    mount = mounted()
    gradients = mount.model / "gradients"
    first, second = (os.open(gradients, os.O_WRONLY) for _ in range(2))
    os.pwrite(first, f32(1), 0)
    os.pwrite(second, f32(1), BLOCK)
    os.fsync(first)
    assert mount.version() == 1
    lose_by_nan(gradients)
    lose_by_a_kill(gradients)
    os.close(second)
    os.pwrite(first, f32(1), 0)
    os.close(first)
    weights = array(mount.model / "weights")
    assert mount.version() == 2 and (weights[0], weights[BLOCK // 4], weights.sum()) == (2, 1, 3)


@pytest.mark.parametrize("told_by", ["fsync", "close"])
def test_killed_writer_leaves_no_half_step__to_those_who_share_its_learner(mounted, told_by):
    """Not even in the moment in which it is reaped."""
    mount = mounted()
    gradients = mount.model / "gradients"
    for turn in range(15):
        fd = os.open(gradients, os.O_WRONLY)
        os.pwrite(fd, ONES, BLOCK)
        kill_a_writer(gradients)
        said = outcome(getattr(os, told_by), fd)
        assert (said, mount.version(), any(mount.weights())) == ("EIO", 0, False), f"turn {turn}"
        if told_by == "fsync":
            os.close(fd)


@pytest.fixture
def ahead(start_mount):
    """A job of `a` and `b` in which `a` is a step ahead, so that its next step waits for `b`."""

    def start(**options):
        options = {"size": SIZE, "block_size": BLOCK, "reducer": "sum", "timeout": 20, "learners": 2, **options}
        mount = start_mount(**options)
        mount.join("a", "b")
        mount.contribute(filled(mount, 0), learner="a")
        return mount, [os.open(mount.place("a") / "gradients", os.O_WRONLY) for _ in range(3)]

    return start


def others_contribute(mount):
    mount.contribute(filled(mount, 0), learner="b")


@pytest.mark.parametrize("first", ["fsync", "close"])
@pytest.mark.parametrize("second", ["fsync", "close"])
def test_a_learner_is_one_contribution_at_a_time__and_all_who_wrote_wait_for_it(ahead, first, second):
    mount, handles = ahead()
    for rank, fd in enumerate(handles):
        os.pwrite(fd, f32(1), rank * BLOCK)
    threads, ends = Threads(), []
    for fd, call in zip(handles, (first, second, "close")):
        ends.append(threads.start(outcome, getattr(os, call), fd))
        time.sleep(0.1)
    assert not any(end.done() for end in ends)
    others_contribute(mount)
    assert [end.result(300) for end in ends] == ["done"] * 3
    others_contribute(mount)
    assert mount.version() == 2
    weights = array(mount.model / "weights")
    assert (weights[:: BLOCK // 4][:3] == 1).all() and weights.sum() == 3
    for fd, call in zip(handles, (first, second)):
        if call == "fsync":
            os.close(fd)
    assert mount.version() == 2


@pytest.mark.parametrize("second", ["fsync", "close"])
def test_a_learner_is_one_contribution_at_a_time__and_times_out_for_all(ahead, second):
    mount, (one, two, three) = ahead(timeout=1)
    os.close(three)
    os.pwrite(one, f32(1), 0)
    os.pwrite(two, f32(1), BLOCK)
    threads = Threads()
    with takes(0.5, 3):
        ends = [threads.start(outcome, os.fsync, one)]
        time.sleep(0.3)
        ends.append(threads.start(outcome, getattr(os, second), two))
        assert [end.result(300) for end in ends] == ["ETIMEDOUT"] * 2
    others_contribute(mount)
    assert mount.version() == 1 and not any(mount.weights())
    # What fsync leaves open can be ended yet; what close has dropped cannot. Either way it is whole, or nothing.
    again = [outcome(os.close, fd) for fd in ((one, two) if second == "fsync" else (one,))]
    if second == "fsync":
        assert again == ["done"] * 2
    others_contribute(mount)
    counts = int(again[0] == "done")
    mount.catch_up()
    weights = array(mount.model / "weights")
    assert (weights[0], weights[BLOCK // 4], mount.version()) == (counts, counts, 1 + counts), again
    mount.contribute(f32(5), learner="a")
    if not counts:
        assert mount.wait_for_version(2)
    else:
        others_contribute(mount)
    mount.catch_up()
    assert array(mount.model / "weights")[0] == counts + 5, "the next one starts clean"


WAITER = """
import errno
fd = os.open(argv[0], os.O_WRONLY)
os.pwrite(fd, bytes([0, 0, 128, 63]), 0)  # 1.0
say("written")
wait()
os.fsync(fd)
"""


@pytest.mark.parametrize("second", ["fsync", "close"])
def test_killed_writer_leaves_no_half_step__whose_end_another_waits_for(ahead, second):
    """The killed one's fsync is under way, and another's waits with it: all of it counts, or nothing."""
    mount, (fd, *rest) = ahead()
    waiter = program(WAITER, mount.place("a") / "gradients")
    hear(waiter)
    os.pwrite(fd, f32(1), BLOCK)
    go(waiter)
    time.sleep(0.3)
    end = Threads().start(outcome, getattr(os, second), fd)
    time.sleep(0.3)
    assert not end.done()
    killed(waiter)
    time.sleep(0.5)
    others_contribute(mount)
    said = end.result(300)
    assert said in ("done", "EIO", "EINTR")
    others_contribute(mount)
    counts = int(said == "done")
    assert mount.wait_for_version(1 + counts) == 1 + counts
    weights = array(mount.model / "weights")
    assert (weights[0], weights[BLOCK // 4]) == (counts, counts)
    close(*[*rest, *([fd] if second == "fsync" else [])])


def test_a_program_that_starts_others_while_it_writes_is_not_held_up(mounted):
    """execve(2) closes a descriptor of the new program under a lock; the answer to that close must not need it."""
    mount = mounted()
    data = filled(mount, 2).tobytes()
    with open(mount.model / "gradients", "wb", buffering=0) as file:
        os.pwrite(file.fileno(), data[: SIZE // 2], 0)
        for _ in range(3):
            child = os.posix_spawn("/bin/true", ["true"], os.environ)
            eventually(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
        os.pwrite(file.fileno(), data[SIZE // 2 :], SIZE // 2)
    assert mount.version() == 1 and (array(mount.model / "weights") == 2).all()


LEAVES_IT_TO_A_CHILD = """
import subprocess
gradients, data, steps = argv[0], argv[1], int(argv[2])
for step in range(steps):
    with open(gradients, "wb") as file:
        child = subprocess.Popen(["sh", "-c", 'read line; cat "$0"', data], stdin=subprocess.PIPE, stdout=file)
    child.communicate(b"go on\\n")
    with open(gradients, "wb", buffering=0) as file:
        file.write(open(data, "rb").read())
say("done")
"""


def test_a_file_that_is_left_to_a_child_is_a_step_before_the_openers_next_one(mounted, tmp_path):
    """The opener closes it first. When it has waited for its child, what that wrote counts before what is opened then."""
    mount = mounted()
    data = tmp_path / "data"
    data.write_bytes(filled(mount, 1).tobytes())
    opener = program(LEAVES_IT_TO_A_CHILD, mount.model / "gradients", data, 5)
    assert hear(opener) == "done"
    assert mount.version() == 10 and (array(mount.model / "weights") == 10).all()


LEAVES_IT_TO_A_CHILD_THAT_DIES = """
import subprocess
gradients, data = argv
write = "import os, sys, time; os.write(1, open(sys.argv[1], 'rb').read()); os.write(2, b'written'); time.sleep(300)"
with open(gradients, "wb") as file:
    child = subprocess.Popen([sys.executable, "-c", write, data], stdout=file, stderr=subprocess.PIPE)
child.stderr.read(7)
child.kill()
child.wait()
with open(gradients, "wb", buffering=0) as file:
    file.write(open(data, "rb").read())
say("done")
"""


def test_killed_writer_leaves_no_half_step__that_its_opener_has_left_the_file_to(mounted, tmp_path):
    mount = mounted()
    data = tmp_path / "data"
    data.write_bytes(filled(mount, 1).tobytes())
    opener = program(LEAVES_IT_TO_A_CHILD_THAT_DIES, mount.model / "gradients", data)
    assert hear(opener) == "done"
    assert mount.version() == 1 and (array(mount.model / "weights") == 1).all()


BECOMES_ANOTHER = """
fd = os.open(argv[0], os.O_WRONLY | os.O_TRUNC)
os.write(fd, open(argv[1], "rb").read())
os.execvp("true", ["true"])
"""


def test_a_program_that_becomes_another_one_holds_up_nobody(mounted, tmp_path):
    """Its file is closed by execve(2), under a lock that reading a link in its /proc/<pid>/fd takes."""
    mount = mounted(consistency="async")
    data = tmp_path / "data"
    data.write_bytes(filled(mount, 1).tobytes())
    (tmp_path / "setting").write_bytes(b"3")
    places = [mount.join(name) / "gradients" for name in "abc"]
    programs = [program(BECOMES_ANOTHER, place, data) for place in places]
    programs.append(program(BECOMES_ANOTHER, mount.model / "control/retain", tmp_path / "setting"))
    for one in programs:
        assert one.wait(HANGS) == 0
    eventually(lambda: mount.version() == len(places))
    assert (mount.model / "control/retain").read_text() == "3\n"
