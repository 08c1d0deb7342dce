"""Programs that are killed or interrupted while their weights wait for a version, or at the start of a long fsync."""

import os
import signal
import time

import pytest
from conftest import write_all
from filetools import BLOCK, SIZE, array, f32, filled, go, hear, killed, outcome, program, takes

# Writes weights whole, and waits in fsync or close. A signal that is handled raises; the program is killed later.
PUBLISHER = """
import errno
path, call, act = argv
mapped = path.endswith("publish")
class Interrupted(Exception): pass
def interrupt(*_): raise Interrupted
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, interrupt if act == "handle" else signal.SIG_DFL)
size = os.stat(path).st_size
fd = os.open(path, os.O_RDWR | os.O_DIRECT if mapped else os.O_WRONLY)
sevens = bytes([0, 0, 224, 64]) * (size // 4)
if mapped:
    memory = mmap.mmap(fd, size)
    memory[:] = sevens
else:
    assert os.pwrite(fd, sevens, 0) == size
say("waits")
try:
    (os.fsync if call == "fsync" else os.close)(fd)
    say("done")
except Interrupted:
    say("interrupted")
except OSError as error:
    say(errno.errorcode[error.errno])
wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def publish(mount, value):
    write_all(mount.model / "weights", filled(mount, value))


def gone_while_it_waits(mount, call, number, act, name="weights"):
    """A publisher of sevens that has been waiting in `call` gets a signal, and is gone."""
    publisher = program(PUBLISHER, mount.model / name, call, act)
    assert hear(publisher) == "waits"
    time.sleep(0.2)
    assert publisher.poll() is None and mount.version() == 0
    with takes(0, 2):
        publisher.send_signal(number)
        if act == "handle":
            assert hear(publisher) in ("interrupted", "EINTR")
            go(publisher)
        rest, _ = publisher.communicate(timeout=300)
    assert rest == "" and publisher.returncode == -(number if act == "default" else signal.SIGKILL)


# Over a network nothing of a contribution is on its way before its commit: weights do not wait for it.
@pytest.mark.one_process
@pytest.mark.parametrize(
    "name, call, number, act",
    [
        ("weights", "fsync", signal.SIGINT, "default"), ("weights", "close", signal.SIGTERM, "handle"),
        ("weights", "close", signal.SIGKILL, "default"), ("publish", "fsync", signal.SIGTERM, "handle"),
    ],
)  # fmt: skip
def test_weights_publish_atomically__or_never_once_a_signal_ends_the_wait(start_mount, name, call, number, act):
    """Mapped ones, too. They wait for a writer of gradients, whose blocks are on their way into the next version."""
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="assign", timeout=200, lease=0)
    mount.join("a")
    fd = os.open(mount.place("a") / "gradients", os.O_WRONLY)
    os.pwrite(fd, filled(mount, 3)[: BLOCK // 4], 0)
    gone_while_it_waits(mount, call, number, act, name)
    time.sleep(0.2)
    assert mount.version() == 0
    os.close(fd)
    assert mount.wait_for_version(1) == 1
    time.sleep(0.2)
    weights = array(mount.model / "weights")
    assert mount.version() == 1 and (weights[: BLOCK // 4] == 3).all() and not weights[BLOCK // 4 :].any()
    publish(mount, 9)
    assert mount.version() == 2 and (array(mount.model / "weights") == 9).all()


@pytest.mark.one_process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_weights_publish_atomically__or_never_when_the_gradients_are_dropped(start_mount, number):
    """Version 0 is to be initialised, and who was before them gives up."""
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", timeout=200, lease=0)
    mount.join("a")
    fd = os.open(mount.place("a") / "gradients", os.O_WRONLY)
    os.pwrite(fd, filled(mount, 3)[: BLOCK // 4], 0)
    gone_while_it_waits(mount, "close", number, "default")
    assert outcome(os.pwrite, fd, f32(float("nan")), BLOCK) == "done"
    assert outcome(os.close, fd) == "EINVAL"
    time.sleep(0.2)
    assert mount.version() == 0 and not any(mount.weights())
    publish(mount, 9)
    assert mount.version() == 1 and (array(mount.model / "weights") == 9).all()


# A contribution of which every block is begun and none is whole: fsync has all of it to do.
SCATTERED = """
import errno
class Interrupted(Exception): pass
def interrupt(*_): raise Interrupted
fd = os.open(argv[0], os.O_WRONLY)
for at in range(0, os.stat(argv[0]).st_size, int(argv[1])):
    os.pwrite(fd, bytes([0, 0, 128, 66]), at)  # 64.0
signal.signal(signal.SIGINT, interrupt)
try:
    say("ends it")
    os.fsync(fd)
    said = "done"
except Interrupted:
    said = "interrupted"
except OSError as error:
    said = errno.errorcode[error.errno]
say(said)
time.sleep(30)
"""


def test_a_signal_ends_a_wait__from_its_beginning(start_mount):
    """Many blocks are still to be completed when the signal comes; the wait for others comes after that."""
    mount = start_mount(size="256MiB", block_size=BLOCK, reducer="sum", timeout=200, lease=0, learners=2)
    mount.join("a", "b")
    mount.contribute(f32(1), learner="a")
    # The learner stays when a program that wrote for it is killed.
    fd = os.open(mount.place("a") / "gradients", os.O_WRONLY)
    for delay in (0, 0.03):
        child = program(SCATTERED, mount.place("a") / "gradients", BLOCK)
        assert hear(child) == "ends it"
        time.sleep(delay)
        # Completing the blocks is work, which takes as long as it takes; but the signal is not forgotten over it.
        with takes(0, 12):
            child.send_signal(signal.SIGINT)
            assert hear(child) in ("interrupted", "EINTR"), f"{delay} s into fsync"
        killed(child)
    mount.contribute(f32(1), learner="b")
    assert mount.wait_for_version(1) == 1
    mount.contribute(f32(1), offset=4, learner="b")
    time.sleep(0.2)
    weights = array(mount.model / "weights")
    assert mount.version() == 1 and weights[0] == 2 and weights.sum(dtype="<f8") == 2
    os.close(fd)
