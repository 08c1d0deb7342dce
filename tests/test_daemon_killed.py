"""The daemon is killed: calls fail at once, and the next daemon takes over."""

import contextlib
import mmap
import os
import signal
import time

from conftest import pause
from daemons import BLOCK, GONE, ONE, child, die, is_mounted, small, up_refused
from filetools import raises, takes


def test_the_end_of_the_daemon_is_no_hang__and_the_next_one_takes_its_place(start_mount, child):
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
    with raises(*GONE):
        os.listdir(first.root)
    second = small(start_mount, root=first.root)
    assert "dead gradfs" in second.stderr() and str(first.root) in second.stderr()
    second.contribute(ONE)
    assert second.wait_for_version(1) == 1 and len(is_mounted(first.root)) == 1
    out, err = (holder.process.stdin.write("go\n"), holder.process.stdin.flush(), holder.end())[2]
    lines = out.splitlines()
    assert len(lines) == 5, out + err
    assert all(int(number) in GONE for number in lines[:4]), lines
    assert lines[4] == f"{4 * BLOCK} b'abcd'", "what was open with passthrough keeps its bytes"
    assert second.version() == 1 and second.stop() == 0
    assert not is_mounted(first.root)


def test_the_end_of_the_daemon_is_no_hang__and_its_mount_goes_by_command(start_mount, gradfs, child):
    mount = small(start_mount)
    child("f = open('weights'); print('ready'); time.sleep(60)", cwd=mount.model)
    die(mount)
    up_refused(gradfs, mount.root / "model", "is dead", f"gradfs unmount {mount.root}")
    done = gradfs("unmount", mount.root)
    assert done.returncode == 0, done
    assert not is_mounted(mount.root) and list(mount.root.iterdir()) == []


def test_the_end_of_the_daemon_is_no_hang(start_mount, child):
    mount = small(start_mount, learners=2, timeout=200)
    mount.join("a", "b")
    mount.contribute(ONE, learner="a")
    ends = "; print(0)\nexcept OSError as e: print(e.errno)\n"
    blocked = child("print('ready')\ntry: os.open(sys.argv[1], os.O_RDONLY)" + ends, mount.place("a") / "weights")
    writer = child(
        "g = os.open(sys.argv[1], os.O_WRONLY); print('ready')\n"
        "try:\n"
        "    while True: os.pwrite(g, b'\\0' * 4, 0)\n"
        "except OSError as e: print(e.errno)\n"
        "try: os.close(g)" + ends,
        mount.place("b") / "gradients",
    )
    poller = child(
        "import select\n"
        "v = os.open(sys.argv[1], os.O_RDONLY); os.read(v, 9); p = select.poll(); p.register(v, select.POLLIN | select.POLLPRI)\n"
        "print('ready'); p.poll(5000)\n"
        "try: os.pread(v, 9, 0)" + ends,
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
            with raises(*GONE):
                act()


# Started before the daemon is stopped: a new process first closes inherited descriptors, which asks the daemon.
READ_WHEN_TOLD = """
print('ready'); sys.stdin.readline()
try: print(open(sys.argv[1]).read().strip())
except OSError as e: print(e.errno)
"""


def tell(child):
    child.process.stdin.write("go\n")
    child.process.stdin.flush()


def test_the_end_of_the_daemon_is_no_hang__and_a_stop_hurts_only_while_it_lasts(start_mount, child):
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


def test_the_end_of_the_daemon_is_no_hang__of_one_that_was_stopped(start_mount, child):
    mount = small(start_mount)
    waits = child(READ_WHEN_TOLD, mount.model / "version")
    pause(mount.pid)
    tell(waits)
    time.sleep(0.2)
    die(mount)
    assert int(waits.end(timeout=300)[0]) in GONE


def test_the_end_of_the_daemon_is_no_hang__nor_for_who_wants_the_mountpoint_of_a_stopped_one(start_mount, gradfs):
    mount = small(start_mount)
    pause(mount.pid)
    try:
        with takes(0, 10):
            up_refused(gradfs, mount.root, str(mount.pid))
    finally:
        os.kill(mount.pid, signal.SIGCONT)
