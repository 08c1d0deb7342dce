"""A shard that is killed or stopped holds nobody up who does not need it, and the others hear soon, as
docs/operate/cluster.md promises it."""

import contextlib
import errno
import os
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from conftest import write_all
from filetools import BLOCK, array, eventually, finish, go, hear, outcome, program, raises, takes
from patience import Limit

SIZE = 4 * BLOCK
# The calls that wait must outlast the others, on any machine.
LONG = 120
# Of the calls of model `a`.
TIMEOUT = 12
# What needs no shard takes less. The kernel locks a directory in which somebody makes another one.
SOON, BEHIND_MKDIR = 0.1, 2
LEARNERS = 4

TRIES = """
while True:
    try:
        fd = os.open(argv[0] + "/gradients", os.O_WRONLY)
        try:
            os.write(fd, bytes(int(argv[1])))
            os.fsync(fd)
        finally:
            os.close(fd)
        say("done")
    except OSError as error:
        say(error.errno)
"""

INTERRUPTED = """
fd = os.open(argv[0] + "/gradients", os.O_WRONLY)
os.write(fd, bytes(int(argv[1])))
say("written"); wait()
try:
    os.fsync(fd)
except KeyboardInterrupt:
    say("interrupted")
wait()
os.fsync(fd)
"""


def create(one, name, **settings):
    options = {"size": SIZE, "block_size": BLOCK, "reducer": "sum", "consistency": "async", "shards": 1, "timeout": LONG}
    one.create(name, **{**options, "lease": LONG, **settings})


@pytest.fixture
def pair(cluster):
    """Models `a` and `b` with a shard each, and the shard of `a`, which is not the registry's."""
    one = cluster(2)

    def start(**settings):
        create(one, "a", **settings)
        registry = str(one.shards[0].number)
        assert one.run("drain", registry).returncode == 0
        assert one.run("drain", "--cancel", registry).returncode == 0
        create(one, "b")
        shard = one.coordinator_shard("a")
        if one.coordinator_shard("b") is shard:
            assert one.run("drain", str(shard.number)).returncode == 0
            assert one.run("drain", "--cancel", str(shard.number)).returncode == 0
            shard = one.coordinator_shard("a")
        assert one.coordinator_shard("b") is not shard
        return one, shard

    return start


def ends(shard, how):
    shard.pause() if how == "stopped" else shard.kill()


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_coordinator_that_is_away_holds_up_nobody_else(pair, how):
    """Programs of model `a` wait for its coordinator in every way that there is. Meanwhile each call on `b`, and each
    read or listing of `a`, takes less than 100 ms. One listing of learners may wait behind a mkdir there."""
    one, shard = pair(timeout=TIMEOUT, shard_patience=LONG)
    mount = one.mount("--threads", "2", models=("a", "b"))
    a, b = mount.root / "a", mount.root / "b"
    for learner in range(LEARNERS):
        (a / f"learners/w{learner}").mkdir()
    for learner in ("idle", "x"):
        ((a if learner == "idle" else b) / f"learners/{learner}").mkdir()
    data, took, late = np.ones(SIZE // 4, "<f4").tobytes(), {}, []
    children = [program(TRIES, a / f"learners/w{learner}", SIZE) for learner in range(LEARNERS)]
    over = threading.Event()

    def tries(call, *arguments):
        while not over.is_set():
            outcome(call, *arguments)
            time.sleep(0.01)

    def answers(name, call, *arguments):
        soon, once = Limit(SOON), Limit(BEHIND_MKDIR)
        call(*arguments)
        took[name] = max(took.get(name, 0), soon.taken())
        late.extend([name] if soon.over() else [])
        assert not once.over(), took

    others = [
        threading.Thread(target=tries, args=arguments)
        for arguments in [(os.mkdir, a / "learners/new"), (os.rmdir, a / "learners/idle"), ((a / "control/retain").write_text, "9")]
    ]
    try:
        for child in children:
            assert hear(child) == "done"
        ends(shard, how)
        for child in children:
            # Whether that step counts is for the coordinator to say: the next write asks it.
            while hear(child) == "done":
                pass
        for thread in others:
            thread.start()
        for _ in range(3):
            for model in (a, b):
                for name in ("status.json", "version", "weights", "control/timeout", "error"):
                    answers(f"{model.name}/{name}", (model / name).read_bytes)
                for directory in (model, model / "learners", model / "versions", model / "tensors"):
                    answers(f"ls {model.name}/{directory.name}", os.listdir, directory)
                answers(f"stat {model.name}/gradients", os.stat, model / "gradients")
            answers("status of a learner of a", (a / "learners/w0/status").read_bytes)
            answers("a step of b", (b / "learners/x/gradients").write_bytes, data)
            answers("joining b", os.mkdir, b / "learners/y")
            answers("leaving b", os.rmdir, b / "learners/y")
        longest = max(took, key=took.get)
        print(f"the longest call: {longest}, {took[longest]:.3f} s")
        assert late in ([], ["ls a/learners"]), (late, took)
        assert all(child.poll() is None for child in children)
    finally:
        over.set()
        for child in children:
            child.kill()
        if how == "stopped":
            shard.resume()
        for thread in others:
            thread.join(LONG) if thread.ident else None


@contextlib.contextmanager
def step(path):
    """As README has it."""
    with open(path, "wb") as file:
        try:
            yield file
        except BaseException:
            file.truncate(0)
            raise


@pytest.mark.parametrize("end", ["fsync", "close"])
@pytest.mark.parametrize("which", ["its coordinator", "another one", "its only one, in mid-step"])
def test_a_contribution_can_be_taken_back__and_a_step_that_is_repeated_trains_once(cluster, which, end):
    """A step ends with ETIMEDOUT for a shard that is stopped. The program takes it back, and repeats it until it succeeds.
    (A small model's payload goes with its commit, so its only shard finds all of it when it wakes.)"""
    in_step = "mid-step" in which
    one = cluster(1 if in_step else 2)
    create(one, "m", shards=1 if in_step else 2, shard_patience=3, consistency="sync")
    mount = one.mount()
    place = mount.join("x")
    mount.contribute(np.ones(SIZE // 4, "<f4"), learner="x")
    assert mount.wait_for_version(1) == 1
    coordinator = one.coordinator_shard("m")
    shard = next(shard for shard in one.shards if (shard is coordinator) == (which != "another one"))
    errors = []

    def repeats():
        try:
            with step(place / "gradients") as file:
                file.write(np.full(SIZE // 4, 10, "<f4"))
                file.flush()
                if in_step and not errors:
                    shard.pause()
                if end == "fsync":
                    os.fsync(file.fileno())
            return True
        except OSError as error:
            errors.append((error.errno, (place / "error").read_text()))
            return False

    if not in_step:
        shard.pause()
    try:
        assert not repeats() and not repeats()
    finally:
        shard.resume()
    eventually(repeats, LONG)
    assert mount.wait_for_version(2) == 2
    assert set(array(place / "weights")) == {11}, errors
    print(errors)
    if which == "another one":
        assert {code for code, _ in errors} == {errno.ETIMEDOUT}, "the coordinator knows that it was taken back"
    elif end == "fsync":
        assert errors[0][0] == errno.EIO and "may count" in errors[0][1], "nobody knows"
    else:
        assert errors[0][0] == errno.ETIMEDOUT and "may count" in errors[0][1], "nobody knows"


@pytest.mark.parametrize("which", ["its coordinator", "another one"])
def test_a_signal_ends_a_wait__while_a_shard_is_away(cluster, which):
    one = cluster(2)
    create(one, "m", shards=2, shard_patience=LONG, consistency="sync")
    mount = one.mount()
    place = mount.join("x")
    coordinator = one.coordinator_shard("m")
    shard = next(shard for shard in one.shards if (shard is coordinator) == (which == "its coordinator"))
    child = program(INTERRUPTED, place, SIZE)
    assert hear(child) == "written"
    with shard.paused():
        go(child)
        time.sleep(1)
        with takes(0, LONG / 2):
            child.send_signal(signal.SIGINT)
            assert hear(child) == "interrupted"
    go(child)
    finish(child)
    assert mount.wait_for_version(1) == 1, "fsync could be called again"


@pytest.mark.parametrize("how", ["stopped", "killed"])
@pytest.mark.parametrize("which", ["its coordinator", "another one"])
def test_calls_that_need_a_shard_wait_for_shard_patience(cluster, how, which):
    """They end with ETIMEDOUT, and `error` names the shard. Later ones fail at once, until the shard answers again."""
    one = cluster(2)
    create(one, "m", shards=2, shard_patience=3)
    mount = one.mount()
    place = mount.join("x")
    data = np.ones(SIZE // 4, "<f4")
    mount.contribute(data, learner="x")
    # The mount has this version by then.
    assert array(mount.model / "weights").size == SIZE // 4
    coordinator = one.coordinator_shard("m")
    shard = next(shard for shard in one.shards if (shard is coordinator) == (which == "its coordinator"))
    ends(shard, how)
    try:
        began = time.monotonic()
        assert outcome(mount.contribute, data, 0, "x") == "ETIMEDOUT"
        took = time.monotonic() - began
        assert 2 < took < LONG / 2, took
        assert f"out of reach: shard {shard.number}," in (place / "error").read_text()
        print(f"heard after {took:.1f} s")
        began = time.monotonic()
        for _ in range(5):
            assert outcome(mount.contribute, data, 0, "x") == "ETIMEDOUT"
        assert time.monotonic() - began < took, "later calls do not wait again"
        if which == "its coordinator":
            assert outcome(os.mkdir, place.parent / "y") == "ETIMEDOUT"
        assert array(place.parent.parent / "weights").size == SIZE // 4
    finally:
        if how == "stopped":
            shard.resume()
    if how == "stopped":
        eventually(lambda: outcome(mount.contribute, data, 0, "x") == "done", LONG)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_setting_that_nobody_takes_is_refused_at_its_write(cluster, how):
    """Shells show no errors of close."""
    one = cluster(1)
    create(one, "m", shard_patience=3)
    mount = one.mount()
    shard, setting = one.coordinator_shard("m"), mount.model / "control/learning_rate"
    before = setting.read_text()
    ends(shard, how)
    try:
        done = subprocess.run(["sh", "-c", 'echo 0.5 > "$0"', setting], capture_output=True, text=True, timeout=LONG)
        assert done.returncode != 0 and done.stderr, done
        assert setting.read_text() == before
        assert f"shard {shard.number}" in (mount.model / "error").read_text()
        with takes(0, 2), raises(errno.ETIMEDOUT):
            write_all(setting, b"0.5\n")
    finally:
        if how == "stopped":
            shard.resume()
    if how == "stopped":
        eventually(lambda: outcome(setting.write_text, "0.25\n") == "done", LONG)
        assert float(setting.read_text()) == 0.25
