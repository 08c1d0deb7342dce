"""Writers that are killed: no half step, and sums and optimizer state as if they had never written."""

import signal
import time

import numpy as np
import pytest
from filetools import BLOCK, SIZE, array, eventually, filled, hear, killed, mounts, program

# Writes the first bytes of a contribution, says so, and is not to live on.
VICTIM = """
fd = os.open(argv[0], os.O_WRONLY)
data = bytes([0, 0, 128, 66]) * (int(argv[1]) // 4)  # 64.0
at = 0
while at < len(data):
    at += os.pwrite(fd, data[at:], at)
say("written")
time.sleep(30)
"""

MANY_THREADS = """
fd = os.open(argv[0], os.O_WRONLY)
def write(at):
    os.pwrite(fd, bytes([0, 0, 128, 66]) * 1000, at)
    barrier.wait()
    time.sleep(30)
barrier = threading.Barrier(4)
for i in range(3):
    threading.Thread(target=write, args=[i * 10_000], daemon=True).start()
barrier.wait()
say("written")
time.sleep(30)
"""

MANY_FILES = """
fds = [os.open(argv[0], os.O_WRONLY) for _ in range(6)]
for i, fd in enumerate(fds):
    os.pwrite(fd, bytes([0, 0, 128, 66]) * 1000, i * 10_000)
say("written")
time.sleep(30)
"""


mounted = mounts(lease=0)


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_killed_writer_leaves_no_half_step(mounted, with_signal):
    mount = mounted()
    for code, length in [(VICTIM, 4), (VICTIM, BLOCK), (VICTIM, 3 * BLOCK + 8), (VICTIM, SIZE), (MANY_THREADS, 0)]:
        child = program(code, mount.model / "gradients", length)
        hear(child)
        killed(child, with_signal)
        eventually(lambda: mount.status()["learners"] == [])
        assert mount.version() == 0 and not any(mount.weights()), "a half contribution was published"
    mount.contribute(filled(mount, 1))
    assert mount.version() == 1 and (array(mount.model / "weights") == 1).all()


def test_a_death_in_mid_write_is_logged_once(mounted):
    """However many files and threads the program wrote through."""
    mount = mounted()
    for i, code in enumerate([MANY_FILES, MANY_THREADS, MANY_FILES]):
        learner = mount.join(f"victim{i}")
        child = program(code, learner / "gradients")
        hear(child)
        killed(child)
        eventually(lambda: mount.status()["learners"] == [])
    # The threads that settle the other files are through by then.
    time.sleep(1)
    lines = [line for line in mount.stderr().splitlines() if "in mid-write" in line]
    assert len(lines) == 3 and all(f"victim{i}" in line for i, line in enumerate(lines)), lines


@pytest.mark.parametrize("victim_is_last", [False, True])
def test_killed_writer_leaves_no_half_step__beside_others(mounted, victim_is_last):
    """The job goes on without the killed one, and the sums are exact."""
    mount = mounted(learners=3)
    mount.join("a", "b")
    for step in range(1, 4):
        victim = mount.join(f"victim{step}")
        child = None
        for name, value in (("a", 1), ("b", 10)):
            if not victim_is_last and child is None:
                child = program(VICTIM, victim / "gradients", 4 * BLOCK + 100)
                hear(child)
            mount.contribute(filled(mount, value), learner=name)
        if child is None:
            # All others are in: its blocks are reduced as they arrive, and must be computed again.
            child = program(VICTIM, victim / "gradients", 4 * BLOCK + 100)
            hear(child)
        assert mount.version() == step - 1
        killed(child)
        eventually(lambda: mount.version() == step)
        assert (array(mount.model / "weights") == 11 * step).all()
        # The kernel hears of it a moment later.
        eventually(lambda victim=victim: not victim.exists())


def test_killed_writer_leaves_no_half_step__after_its_commit(mounted):
    """What was taken before stays."""
    mount = mounted(learners=2)
    a, _ = mount.join("a", "b")
    code = "fd = os.open(argv[0], os.O_WRONLY)\nos.pwrite(fd, bytes([0, 0, 128, 66]) * 2, 0)\nos.fsync(fd)\n"
    code += "os.pwrite(fd, bytes([0, 0, 128, 66]), 400)\nsay('in')\ntime.sleep(30)"
    child = program(code, a / "gradients")
    hear(child)
    killed(child)
    eventually(lambda: not a.exists())
    mount.contribute(filled(mount, 1), learner="b")
    expected = filled(mount, 1)
    expected[:2] += 64
    assert mount.version() == 1 and mount.weights() == expected.tobytes()


@pytest.mark.parametrize("reducer", ["momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad", "lion"])
def test_killed_writer_leaves_no_half_step__nor_half_a_state(start_mount, reducer):
    """Two jobs with the same steps; in one of them a writer is killed between them."""
    generator = np.random.RandomState(5)
    steps = [generator.standard_normal(SIZE // 4).astype("<f4") for _ in range(4)]
    ends = []
    for dies in (False, True):
        options = {"size": SIZE, "block_size": BLOCK, "lease": 0, "learning_rate": 0.1}
        mount = start_mount(reducer=reducer, weight_decay=0.01, **options)
        for i, gradients in enumerate(steps):
            if dies and i:
                child = program(VICTIM, mount.model / "gradients", 4 * BLOCK + 4000)
                hear(child)
                killed(child)
                eventually(lambda: all(each["phase"] != "writing" for each in mount.status()["learners"]))
            mount.contribute(gradients)
        assert mount.version() == 4
        ends.append(mount.weights())
    assert ends[0] == ends[1]
