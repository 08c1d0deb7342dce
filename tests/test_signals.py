"""Programs that wait for other learners, and get a signal while they do."""

import errno
import os
import signal
import time

import pytest
from filetools import array, filled, finish, go, hear, program, takes

BLOCK = 64 << 10
SIZE = 2 * BLOCK

# Does one call that waits, and says how it went. Signals are handled by doing nothing.
WAITER = """
import signal
place, how, act = argv[0], argv[1], argv[2]
handler = {"handle": lambda *_: None, "ignore": signal.SIG_IGN, "default": signal.SIG_DFL}[act]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(number, handler)
class Retry(Exception):
    pass
def once(call):
    # Python repeats what a signal has interrupted: a handler that raises is told apart from one that returns.
    def raising(*_):
        raise Retry
    if act == "handle":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, raising)
    try:
        call()
        return "done"
    except Retry:
        return "interrupted"
    except OSError as error:
        return errno.errorcode[error.errno]
def contribution(flags, value):
    file = os.open(place + "/gradients", flags)
    os.write(file, struct.pack("<f", value) * (SIZE // 4))
    return file
SIZE = os.stat(place + "/weights").st_size
import errno, struct
os.close(contribution(os.O_WRONLY, 1.0))
if how == "open":
    say("waits")
    say(once(lambda: os.open(place + "/weights", os.O_RDONLY)))
else:
    file = contribution(os.O_WRONLY, 10.0)
    say("waits")
    say(once(lambda: (os.fsync if how == "fsync" else os.close)(file)))
    wait()
    if how == "fsync":
        os.fsync(file)
        os.close(file)
    say("ended")
wait()
"""


@pytest.fixture
def waiting(start_mount):
    """A job of two, of whom `a` has contributed and waits in the call `how`."""

    def start(how, act):
        mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=200, lease=0)
        place = mount.join("a")
        mount.join("b")
        process = program(WAITER, place, how, act)
        assert hear(process) == "waits"
        time.sleep(0.3)
        return mount, process

    return start


def others_contribute(mount, value):
    mount.contribute(filled(mount, value), learner="b")


def both_steps_count(mount, process):
    """Lets the fsync of the second step come to its end, and the program."""
    others_contribute(mount, 2)
    assert hear(process) == "done"
    go(process)
    assert hear(process) == "ended"
    go(process)
    others_contribute(mount, 20)
    assert mount.wait_for_version(2) == 2
    assert set(array(mount.model / "weights")) == {33}
    finish(process)


@pytest.mark.parametrize(
    "how, number", [("open", signal.SIGINT), ("fsync", signal.SIGTERM), ("fsync", signal.SIGQUIT), ("close", signal.SIGHUP)]
)
def test_a_signal_ends_a_wait(waiting, how, number):
    mount, process = waiting(how, "handle")
    with takes(0, 1):
        os.kill(process.pid, number)
        assert hear(process) in ("interrupted", "EINTR")
    assert mount.version() == 0
    others_contribute(mount, 2)
    assert mount.wait_for_version(1) == 1
    assert set(array(mount.model / "weights")) == {3}, "the first step was taken before"
    go(process)
    if how != "open":
        assert hear(process) == "ended"
        go(process)
        others_contribute(mount, 20)
        if how == "close":
            time.sleep(0.3)
            assert mount.version() == 1, "the second contribution was dropped by close"
        else:
            assert mount.wait_for_version(2) == 2
            assert set(array(mount.model / "weights")) == {33}, "fsync could be called again"
    finish(process)


@pytest.mark.parametrize("how", ["open", "fsync", "close"])
def test_a_signal_ends_a_wait__and_kills_who_does_not_handle_it(waiting, how):
    mount, process = waiting(how, "default")
    with takes(0, 1):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert process.returncode == -signal.SIGTERM
    assert mount.version() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_a_wait__but_not_an_ignored_one_nor_others(waiting, number):
    mount, process = waiting("fsync", "handle" if number == signal.SIGUSR1 else "ignore")
    os.kill(process.pid, number)
    time.sleep(0.7)
    both_steps_count(mount, process)


def test_exactly_once__when_fsync_is_retried(start_mount):
    """Python repeats an fsync whose signal handler returns: the contribution counts once."""
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=200, lease=0)
    place = mount.join("a")
    mount.join("b")
    process = program(WAITER.replace("raise Retry", "pass"), place, "fsync", "handle")
    assert hear(process) == "waits"
    for _ in range(3):
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGINT)
    time.sleep(0.5)
    both_steps_count(mount, process)
    assert errno.errorcode[errno.EBUSY] not in mount.stderr()
