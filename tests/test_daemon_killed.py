"""The daemon is killed: calls fail at once, and the next daemon takes over."""

import contextlib
import mmap
import os
import signal
import time

import pytest

from conftest import pause
from daemons import BLOCK, GONE, ONE, child, die, is_mounted, small, up_refused
from filetools import takes


def test_a_dead_mount_is_taken_over(start_mount):
    first = small(start_mount)
    first.contribute(ONE)
    die(first)
    with pytest.raises(OSError) as caught:
        os.listdir(first.root)
    assert caught.value.errno in GONE
    second = small(start_mount, root=first.root)
    assert "dead gradfs" in second.stderr() and str(first.root) in second.stderr()
    assert second.version() == 0
    second.contribute(ONE)
    assert second.wait_for_version(1) == 1
    assert len(is_mounted(first.root)) == 1
    assert second.stop() == 0


def test_a_dead_mount_is_taken_over_while_in_use(start_mount, child):
    first = small(start_mount)
    holder = child(
        "w = os.open('weights', os.O_RDONLY); g = os.open('gradients', os.O_RDWR | os.O_DIRECT); v = os.open('version', os.O_RDONLY)\n"
        "m = mmap.mmap(g, 0); m[:4] = b'abcd'; os.pwrite(g, b'x' * 8, 0)\n"
        "print('ready'); sys.stdin.readline()\n"
        "for act in (lambda: os.pwrite(g, b'x', 0), lambda: os.fsync(g), lambda: os.pread(v, 9, 0), lambda: os.stat('weights')):\n"
        "    try: act(); print('no error')\n"
        "    except OSError as e: print(e.errno)\n"
        "print(len(os.pread(w, 1 << 20, 0)), m[:4])\n",
        cwd=first.model,
    )
    die(first)
    second = small(start_mount, root=first.root)
    second.contribute(ONE)
    assert second.wait_for_version(1) == 1
    out, err = (holder.process.stdin.write("go\n"), holder.process.stdin.flush(), holder.end())[2]
    lines = out.splitlines()
    assert len(lines) == 5, out + err
    assert all(int(number) in GONE for number in lines[:4]), lines
    assert lines[4] == f"{4 * BLOCK} b'abcd'", "what was open with passthrough keeps its bytes"
    assert second.version() == 1 and second.stop() == 0
    assert not is_mounted(first.root)


def test_many_dead_mounts_on_one_directory(start_mount):
    first = small(start_mount)
    mounts = [first]
    for _ in range(4):
        die(mounts[-1])
        mounts.append(small(start_mount, root=first.root))
    mounts[-1].contribute(ONE)
    assert mounts[-1].wait_for_version(1) == 1
    assert len(is_mounted(first.root)) == 1


def test_a_dead_mount_is_unmounted(start_mount, gradfs, child):
    mount = small(start_mount)
    child("f = open('weights'); print('ready'); time.sleep(60)", cwd=mount.model)
    die(mount)
    done = gradfs("unmount", mount.root)
    assert done.returncode == 0, done
    assert not is_mounted(mount.root) and list(mount.root.iterdir()) == []


def test_a_mountpoint_inside_a_dead_mount_is_refused(start_mount, gradfs):
    mount = small(start_mount)
    die(mount)
    said = up_refused(gradfs, mount.root / "model", "is dead", f"gradfs unmount {mount.root}")
    assert str(mount.root) in said


def test_kill_of_the_daemon_fails_every_call_at_once(start_mount, child):
    mount = small(start_mount, learners=2, timeout=200)
    mount.join("a"), mount.join("b")
    mount.contribute(ONE, learner="a")
    blocked = child(
        "print('ready')\n"
        "try: os.open(sys.argv[1], os.O_RDONLY); print(0)\n"
        "except OSError as e: print(e.errno)",
        mount.place("a") / "weights",
    )
    writer = child(
        "g = os.open(sys.argv[1], os.O_WRONLY); print('ready')\n"
        "try:\n"
        "    while True: os.pwrite(g, b'\\0' * 4, 0)\n"
        "except OSError as e: print(e.errno)\n"
        "try: os.close(g); print(0)\n"
        "except OSError as e: print(e.errno)",
        mount.place("b") / "gradients",
    )
    poller = child(
        "import select\n"
        "v = os.open(sys.argv[1], os.O_RDONLY); os.read(v, 9); p = select.poll(); p.register(v, select.POLLIN | select.POLLPRI)\n"
        "print('ready'); p.poll(5000)\n"
        "try: os.pread(v, 9, 0); print(0)\n"
        "except OSError as e: print(e.errno)",
        mount.model / "version",
    )
    weights = os.open(mount.model / "versions/0/weights", os.O_RDONLY)
    memory = mmap.mmap(weights, 4 * BLOCK, prot=mmap.PROT_READ)
    time.sleep(0.3)
    with takes(0, 6.5):
        die(mount)
        for one in [blocked, writer, poller]:
            out, err = one.end(timeout=300)
            assert out and all(int(number) in GONE for number in out.split()), (out, err)
    assert os.pread(weights, 8 * BLOCK, 0) == bytes(4 * BLOCK), "the version stays readable"
    assert memory[:] == bytes(4 * BLOCK)
    memory.close()
    with contextlib.suppress(OSError):
        os.close(weights)
    with takes(0, 2):
        for act in [mount.weights, mount.version, lambda: os.mkdir(mount.place("c")), lambda: mount.contribute(ONE)]:
            with pytest.raises(OSError) as caught:
                act()
            assert caught.value.errno in GONE


# Started before the daemon is stopped: a new process first closes inherited descriptors, which asks the daemon.
READ_WHEN_TOLD = """
print('ready'); sys.stdin.readline()
try: print(open(sys.argv[1]).read().strip())
except OSError as e: print(e.errno)
"""


def tell(child):
    child.process.stdin.write("go\n")
    child.process.stdin.flush()


def test_stopped_daemon_hurts_only_while_it_is_stopped(start_mount, child):
    mount = small(start_mount)
    mount.contribute(ONE)
    waits = child(READ_WHEN_TOLD, mount.model / "version")
    victim = child(READ_WHEN_TOLD, mount.model / "status.json")
    weights = os.open(mount.model / "weights", os.O_RDONLY)
    pause(mount.pid)
    try:
        tell(waits), tell(victim)
        assert os.pread(weights, 4, 0) == ONE, "an open version is read past the daemon"
        time.sleep(0.3)
        assert waits.process.poll() is None
        victim.kill()
    finally:
        os.kill(mount.pid, signal.SIGCONT)
    os.close(weights)
    assert waits.end()[0] == "1"
    mount.contribute(ONE)
    assert mount.wait_for_version(2) == 2


def test_kill_of_a_stopped_daemon_frees_who_waits(start_mount, child):
    mount = small(start_mount)
    waits = child(READ_WHEN_TOLD, mount.model / "version")
    pause(mount.pid)
    tell(waits)
    time.sleep(0.2)
    die(mount)
    assert int(waits.end(timeout=300)[0]) in GONE


def test_a_stopped_daemon_does_not_hang_who_wants_its_mountpoint(start_mount, gradfs):
    mount = small(start_mount)
    pause(mount.pid)
    try:
        with takes(0, 10):
            up_refused(gradfs, mount.root, str(mount.pid))
    finally:
        os.kill(mount.pid, signal.SIGCONT)
