"""Learners that stop, and whose processes live, hold others up for as long as patience lasts, those whose processes exit
for `linger`; and nobody else."""

import errno
import itertools
import os
import signal
import subprocess
import time

import pytest
from filetools import (
    BLOCK, SIZE, Threads, array, eventually, fails, filled, finish, go, hear, killed, outcome, program, raises, shell,
    takes
)
from patience import Limit
from test_metrics import Metrics

PATIENCE = 1

# Writes the first bytes of a contribution and keeps it open.
HOLDER = """
import errno
fd = os.open(argv[0], os.O_WRONLY)
at, length = 0, int(argv[1])
while at < length:
    at += os.pwrite(fd, bytes([0, 0, 128, 66]) * ((length - at) // 4), at)  # 64.0
if argv[2] == "ends it":
    os.fsync(fd)
say("written")
wait()
try:
    os.close(fd)
    say("done")
except OSError as error:
    say(errno.errorcode[error.errno])
wait()
"""


# Says how calls on a learner's files end, each time that it is told to go on.
DROPPED = """
import errno
place = argv[0]
fd = os.open(place + "/gradients", os.O_WRONLY)
os.write(fd, bytes(4))
say("written")

def end(call):
    try:
        call()
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]

def calls():
    yield lambda: os.open(place + "/gradients", os.O_WRONLY)
    yield lambda: os.open(place + "/weights", os.O_RDONLY)
    yield lambda: os.stat(place + "/status")
    yield lambda: os.stat(place + "/weight")

asked = 0
while True:
    said = sys.stdin.readline()
    if "leave" in said:
        os.rmdir(place)
        say("left")
        continue
    asked += 1
    if asked == 3 and os.path.exists(place):
        say(open(place + "/error").read().strip())
        wait()
        os.mkdir(place)
        say("joined")
        with open(place + "/gradients", "wb", buffering=0) as file:
            file.write(bytes([0, 0, 128, 63]) * (os.stat(place + "/gradients").st_size // 4))
        break
    say(*map(end, calls()), os.path.exists(place))
"""


def holding(place, length, then=""):
    """A program that has written, and holds its contribution."""
    holder = program(HOLDER, place / "gradients", length, then)
    assert hear(holder) == "written"
    return holder


def stopped(place, length, then=""):
    """The same, stopped, alive."""
    holder = holding(place, length, then)
    holder.send_signal(signal.SIGSTOP)
    return holder


def continued(holder):
    """It goes on and closes; returns how its close ends."""
    holder.send_signal(signal.SIGCONT)
    go(holder)
    said = hear(holder)
    go(holder)
    finish(holder)
    return said


def tried(call, *arguments):
    """Repeats what times out until it does not; returns how often it did, and the seconds it took."""
    limit, timeouts = Limit(8), 0
    while (end := outcome(call, *arguments)) != "done":
        timeouts += 1
        assert end == "ETIMEDOUT" and not limit.over()
    return timeouts, limit.taken()


# The timeout is shorter than the patience, as long, and longer: 4, of which the wait must not take all.
@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_patience_ends__of_who_stops_in_a_contribution(start_mount, shards, consistency):
    """Also while those who wait for it time out and come again. All jobs at the same time."""
    options = {"size": SIZE, "block_size": BLOCK, "reducer": "sum", "consistency": consistency}
    cases = [*itertools.product([0.7 * PATIENCE, PATIENCE, 4 * PATIENCE], [4, BLOCK, SIZE])]
    mounts = [start_mount(timeout=timeout, patience=PATIENCE, **options) for timeout, _ in cases]

    holders = [holding(mount.join("a"), length) for (_, length), mount in zip(cases, mounts)]

    def both(mount, holder):
        """One stops, and at once the other one begins: no patience is used up by the other jobs."""
        holder.send_signal(signal.SIGSTOP)
        mount.join("b")
        said = tried(mount.contribute, filled(mount, 1), 0, "b")
        mount.wait_for_version(1)
        return *said, array(mount.model / "weights")

    threads = Threads()
    waits = [threads.start(both, *job) for job in zip(mounts, holders)]
    for (timeout, length), mount, holder, wait in zip(cases, mounts, holders, waits):
        job = f"{consistency}, {length} bytes, timeout {timeout}"
        timeouts, took, weights = wait.result(300)
        assert took < 3.5 * PATIENCE, job
        if consistency == "async" and (length == 4 or shards):
            # Nobody waits for a contribution before it is at the shard. Over a network that is with its commit.
            assert took < 0.5 * PATIENCE, job
            continued(holder)
        else:
            assert took > 0.3 * PATIENCE, job
            eventually(lambda mount=mount: not mount.place("a").exists())
            assert continued(holder) == "ENOTCONN", job
        # One that timed out may have been taken in the same moment. The stopped one's 64 is in no sum.
        assert (weights == weights[0]).all() and 1 <= weights[0] <= 1 + timeouts, job


def test_patience_ends__before_those_who_wait_time_out(start_mount):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=3, patience=1)
    mount.join("a", "b")
    holder = stopped(mount.place("b"), SIZE, "ends it")
    mount.contribute(filled(mount, 1), learner="a")
    assert (array(mount.place("a") / "weights") == 65).all(), "what it had committed before counts"
    with takes(0.3, 2.8):
        mount.contribute(filled(mount, 1), learner="a")
        assert (array(mount.place("a") / "weights") == 66).all()
    eventually(lambda: not mount.place("b").exists())
    killed(holder)


@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_leases_expire__of_who_has_closed_its_files_and_lives(start_mount, shards, consistency):
    """Where nobody would ever wait for it, as with async. Whoever has its files open stays there, too."""
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", consistency=consistency, lease=PATIENCE)
    mount.join("a", "b")
    fd = os.open(mount.place("b") / "gradients", os.O_WRONLY)
    os.write(fd, filled(mount, 1).tobytes())
    mount.contribute(filled(mount, 1), learner="a")
    os.fsync(fd)
    if consistency == "sync":
        os.close(fd)
        time.sleep(3 * PATIENCE)
        assert mount.place("a").exists() and mount.place("b").exists(), "they compute for as long as they like"
        return
    eventually(lambda: os.listdir(mount.model / "learners") == ["b"])
    os.close(fd)
    eventually(lambda: os.listdir(mount.model / "learners") == [])
    fails(errno.ENOTCONN, mount.contribute, filled(mount, 1), learner="a")


def test_others_wait_for_a_living_process_beyond_the_lease(start_mount):
    """It evaluates, in the usual way: its files are closed. A learner that no process has used leaves with the lease."""
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=3, timeout=0.5, lease=1)
    assert mount.control("patience") == "10", "ten leases, where only the lease is given"
    slow = program(STEP, mount.join("slow") / "gradients", "stays")
    mount.join("b", "unused")
    assert hear(slow) == "written"
    go(slow)
    assert hear(slow) == "closed"
    mount.contribute(filled(mount, 10), learner="b")
    eventually(lambda: not mount.place("unused").exists())
    assert (array(mount.place("b") / "weights") == 11).all()
    mount.contribute(filled(mount, 10), learner="b")
    start = time.monotonic()
    while time.monotonic() < start + 2.5:
        assert outcome(array, mount.place("b") / "weights") == "ETIMEDOUT", "it can be repeated"
    assert mount.place("slow").exists()
    mount.contribute(filled(mount, 1), learner="slow")
    assert (array(mount.place("b") / "weights") == 22).all()
    finish(slow)


def test_whoever_is_dropped_hears_why(start_mount):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=200, patience=1)
    a, _ = mount.join("a", "b")
    holder = program(DROPPED, a)
    assert hear(holder) == "written"
    mount.contribute(filled(mount, 1), learner="b")
    assert (array(mount.place("b") / "weights") == 1).all(), "it goes on without it"
    eventually(lambda: not a.exists())
    for _ in range(2):
        go(holder)
        assert hear(holder) == "ENOTCONN " * 4 + "True", "as often as it asks"
    go(holder)
    reason = hear(holder)
    assert 'learner "a" is no longer in the job: silent while others waited for it (control/patience)' in reason
    assert sorted(os.listdir(mount.model / "learners")) == ["b"]
    # It joins again, under the same name, and so may another program.
    go(holder)
    assert hear(holder) == "joined"
    assert sorted(os.listdir(mount.model / "learners")) == ["a", "b"]
    mount.contribute(filled(mount, 1), learner="b")
    assert (array(mount.place("b") / "weights") == 3).all()
    finish(holder)


def test_whoever_is_dropped_hears_why__until_it_leaves_or_ends(start_mount):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=3, timeout=200, patience=1)
    a, b, _ = mount.join(*"abc")
    holders = [program(DROPPED, place) for place in (a, b)]
    assert [hear(holder) for holder in holders] == ["written"] * 2
    mount.contribute(filled(mount, 1), learner="c")
    eventually(lambda: os.listdir(mount.model / "learners") == ["c"])
    go(holders[0])
    assert hear(holders[0]) == "ENOTCONN " * 4 + "True"
    holders[0].stdin.write("leave\n")
    holders[0].stdin.flush()
    assert hear(holders[0]) == "left"
    go(holders[0])
    assert hear(holders[0]) == "ENOENT " * 4 + "False"
    for holder in holders:
        killed(holder)
    # Nothing is left of it for others.
    mount.join("a", "b")


# Contributes once, as one process.
STEP = """
import errno
fd = os.open(argv[0], os.O_WRONLY)
os.write(fd, bytes([0, 0, 128, 63]) * (os.stat(argv[0]).st_size // 4))  # 1.0
say("written")
wait()
os.close(fd)
if argv[1] == "stays":
    say("closed")
    wait()
if argv[1] == "fails":
    raise SystemExit(1)
"""


def one_step(place, then="ends", status=0):
    """A process of its own contributes, and ends."""
    step = program(STEP, place / "gradients", then)
    assert hear(step) == "written"
    finish(step, status)


@pytest.mark.parametrize("then", ["ends", "fails"])
def test_a_learner_whose_last_process_exits_leaves_after_linger__while_others_wait_for_it(start_mount, then):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=200, lease=20)
    assert mount.control("linger") == "2"
    mount.control("linger", 1)
    mount.join("a", "b")
    one_step(mount.place("a"), then, status=1 if then == "fails" else 0)
    time.sleep(1.5)
    mount.contribute(filled(mount, 10), learner="b")
    assert (array(mount.place("b") / "weights") == 11).all(), "while nobody waited for it, it stayed"
    assert mount.place("a").exists()
    mount.contribute(filled(mount, 100), learner="b")
    with takes(0.5, 5):
        assert (array(mount.place("b") / "weights") == 111).all()
    eventually(lambda: not mount.place("a").exists())
    assert "out of the job: its last process had exited, and others waited for it" in mount.stderr()
    mount.join("a")


def test_a_learner_that_comes_back_within_linger_stays(start_mount):
    """A script whose steps are processes of their own, which pause for longer than nobody waits for."""
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=200, lease=20, linger=3)
    place = mount.join("a")
    mount.join("b")
    mount.weights()
    script = "for step in 1 2 3; do cat $1/weights > $2; sleep 1; cat $3 > $1/gradients || exit 1; done"
    gradient = mount.root.parent / f"{mount.root.name}.gradient"
    gradient.write_bytes(filled(mount, 1).tobytes())
    try:
        threads = Threads()
        steps = threads.start(shell, script, place, os.devnull, gradient)
        for step in 1, 2, 3:
            mount.contribute(filled(mount, 1), learner="b")
            assert (array(mount.place("b") / "weights") == 2 * step).all()
        steps.result(300)
    finally:
        gradient.unlink()
    assert place.exists()


@pytest.mark.parametrize("case", ["a process lives", "another process lives", "a signal"])
def test_a_learner_whose_last_process_exits_leaves_after_linger__and_no_other_one(start_mount, case):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=2, lease=20, linger=0)
    mount.join("a", "b")
    first = program(STEP, mount.place("a") / "gradients", "stays")
    assert hear(first) == "written"
    go(first)
    assert hear(first) == "closed"
    if case == "another process lives":
        # It has had gradients open, and has closed them.
        fd = os.open(mount.place("a") / "gradients", os.O_WRONLY)
        os.close(fd)
        finish(first)
    elif case == "a signal":
        killed(first)
        eventually(lambda: not mount.place("a").exists(), deadline=2)
        return
    mount.contribute(filled(mount, 10), learner="b")
    assert (array(mount.place("b") / "weights") == 11).all()
    mount.contribute(filled(mount, 10), learner="b")
    with takes(1.5, 5), raises(errno.ETIMEDOUT):
        array(mount.place("b") / "weights")
    assert mount.place("a").exists()
    if case == "a process lives":
        finish(first)
        eventually(lambda: not mount.place("a").exists(), deadline=2)


def test_what_exit_leaves_open_counts__though_the_learner_does_not_linger(start_mount):
    """A learner that leaves at once keeps its contribution."""
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=200, lease=20, linger=0)
    mount.join("a", "b")
    mount.contribute(filled(mount, 10), learner="b")
    code = "fd = os.open(argv[0], os.O_WRONLY)\nos.write(fd, bytes([0, 0, 128, 63]) * int(argv[1]))\nos._exit(0)"
    writer = program(code, mount.place("a") / "gradients", SIZE // 4)
    finish(writer)
    assert (array(mount.place("b") / "weights") == 11).all()


def waited_for(mount):
    """How many learners are waited for, as the metrics say, and for how long by name."""
    scraped = Metrics(mount)
    (model,) = [labels["model"] for labels, _ in scraped.all("gradfs_learners_waited_for")]
    named = {labels["learner"]: seconds for labels, seconds in scraped.all("gradfs_learner_waited_for_seconds")}
    return scraped("gradfs_learners_waited_for", model=model), named


def test_after_5_s_of_waiting_it_is_said_who_is_waited_for(start_mount):
    mount = start_mount(
        size=SIZE, block_size=BLOCK, reducer="sum", learners=3, timeout=200, lease=0, metrics="127.0.0.1:0"
    )
    mount.join("a")
    mount.contribute(filled(mount, 1), learner="a")
    assert mount.status()["waits_for_more_learners"] == 0 and waited_for(mount) == (0, {})
    eventually(lambda: mount.status()["waits_for_more_learners"] == 2, deadline=9)
    assert mount.status()["waits_for_learners"] == [] and waited_for(mount) == (2, {}), "nobody knows their names"
    eventually(lambda: "s for 2 more to join (control/learners)" in mount.stderr())
    mount.join("slow", "b")
    began = time.time()
    mount.contribute(filled(mount, 1), learner="b")
    waited = time.time()
    time.sleep(3)
    assert mount.status()["waits_for_learners"] == []
    assert waited_for(mount) == (0, {})
    (late,) = eventually(lambda: mount.status()["waits_for_learners"], deadline=6)
    assert late["id"] == "slow" and began - 1 < late["since_unix_seconds"] < waited + 1, (late, began, waited)
    count, seconds = waited_for(mount)
    assert count == 1 and seconds.keys() == {"slow"} and 5 <= seconds["slow"] < time.time() - began + 1, (seconds, began)
    line = "s for slow"
    eventually(lambda: line in mount.stderr())
    time.sleep(2.5)
    assert mount.stderr().count("s for slow") == 1, "once a wait"
    mount.contribute(filled(mount, 1), learner="slow")
    eventually(lambda: mount.status()["waits_for_learners"] == [])
    eventually(lambda: waited_for(mount) == (0, {}))


# Opens weights, and contributes once it is told to.
READER = """
with open(argv[0] + "/weights", "rb") as weights:
    size = os.stat(weights.fileno()).st_size
say("open")
wait()
with open(argv[0] + "/gradients", "wb", buffering=0) as gradients:
    gradients.write(bytes([0, 0, 128, 63]) * (size // 4))  # 1.0
say("closed")
wait()
"""


def test_the_first_step_of_a_process_that_has_opened_weights_may_take_longer_than_the_lease(start_mount, shards):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=3, timeout=200, lease=600, patience=600)
    places = [mount.join(name) for name in ("slow", "killed", "b")]
    slow, dies = (program(READER, place) for place in places[:2])
    assert [hear(one) for one in (slow, dies)] == ["open"] * 2
    # The programs may take a while to start.
    mount.control("lease", 1)
    mount.contribute(filled(mount, 10), learner="b")
    time.sleep(3)
    assert all(place.exists() for place in places), "they compute their first gradients"
    killed(dies)
    eventually(lambda: not mount.place("killed").exists())
    go(slow)
    assert hear(slow) == "closed"
    assert (array(mount.place("b") / "weights") == 11).all()
    # Now it is one whose gradients were open.
    killed(slow)
    eventually(lambda: not mount.place("slow").exists())


def test_the_first_step_of_a_process_that_has_opened_weights_may_take_longer_than_the_lease__but_a_look_prolongs_nothing(
    start_mount,
):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=3, timeout=200, lease=1, patience=600)
    looked_at, refused, _ = (mount.join(name) for name in ("looked_at", "refused", "b"))
    fails(errno.EACCES, os.open, refused / "weights", os.O_WRONLY)
    look = f"while head -c 4 {looked_at}/weights > /dev/null; do sleep 0.05; done"
    looks = subprocess.Popen(["bash", "-c", look], stderr=subprocess.DEVNULL)
    mount.contribute(filled(mount, 1), learner="b")
    assert (array(mount.place("b") / "weights") == 1).all(), "the job goes on without them"
    eventually(lambda: sorted(os.listdir(mount.model / "learners")) == ["b"])
    assert looks.wait(300) == 0
    eventually(lambda: mount.status()["watched_processes"] <= 1)


def test_whoever_is_dropped_hears_why__if_it_has_only_opened_weights(start_mount):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=200, patience=1)
    a, b = mount.join("a", "b")
    reader = program(READER, a, stderr=subprocess.PIPE)
    assert hear(reader) == "open"
    mount.contribute(filled(mount, 10), learner="b")
    eventually(lambda: not a.exists())
    _, stderr = reader.communicate("go on\n", timeout=300)
    assert f"[Errno {errno.ENOTCONN}]" in stderr
    assert (array(b / "weights") == 10).all()
