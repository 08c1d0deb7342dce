"""The daemon's own life: where it may mount, how it ends, what is left when it is killed, and a storm of calls."""

import contextlib
import errno
import mmap
import os
import random
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conftest import MountFailed, gradfs_binary

ONE = struct.pack("<f", 1.0)
BLOCK = 64 << 10
GONE = {errno.EIO, errno.ENOTCONN, errno.ECONNABORTED}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting something else takes root")


def small(start_mount, **options):
    return start_mount(**{"size": 4 * BLOCK, "block_size": "64KiB", "reducer": "sum", **options})


def up_refused(gradfs, mountpoint, *words):
    """`gradfs up` on `mountpoint` must fail, saying `words`; returns what it said."""
    done = gradfs("up", "--size", "64KiB", "--reducer", "sum", mountpoint, timeout=20)
    assert done.returncode == 1, done
    assert done.stderr.startswith("gradfs: error: ") and "panicked" not in done.stderr, done.stderr
    assert done.stdout == ""
    for word in [str(mountpoint), *words]:
        assert word in done.stderr, f"{word!r} is missing:\n{done.stderr}"
    return done.stderr


class Child:
    """A Python program in a process of its own; it says `ready` with its first line. Killed at the end."""

    def __init__(self, code, *args, ready=True, cwd=None):
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", "import errno, mmap, os, sys, time\n" + code, *map(str, args)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        )
        self.pid = self.process.pid
        if ready:
            assert self.line() == "ready"

    def line(self, timeout=10):
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            self.process.kill()
            pytest.fail(f"the child said nothing for {timeout} s")
        return self.process.stdout.readline().strip()

    def end(self, timeout=10):
        """Its output, once it has ended by itself."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"the child hangs: no end within {timeout} s")
        return out.strip(), err

    def kill(self):
        self.process.kill()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            pytest.fail("the child cannot be killed: it hangs in the kernel")


@pytest.fixture
def child():
    children = []

    def start(*args, **options):
        one = Child(*args, **options)
        children.append(one)
        return one

    yield start
    for one in children:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(10)
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.close()


def die(mount):
    """kill -9; the dead mount stays where it is."""
    mount.process.kill()
    mount.process.wait(10)


@pytest.fixture(autouse=True)
def mkdir_meets_dead_mounts(monkeypatch):
    """The fixture's `mkdir(exist_ok=True)` looks whether there is a directory; a dead mount does not answer."""
    mkdir = Path.mkdir

    def tolerant(self, *args, **options):
        try:
            mkdir(self, *args, **options)
        except OSError as error:
            if error.errno not in GONE:
                raise

    monkeypatch.setattr(Path, "mkdir", tolerant)


def is_mounted(path):
    with open("/proc/self/mountinfo") as table:
        return [line for line in table if line.split()[4] == str(path)]


# Mountpoints


def test_mountpoint_is_missing(gradfs, tmp_path):
    up_refused(gradfs, tmp_path / "none", "does not exist", "mkdir -p")
    assert not (tmp_path / "none").exists()


def test_mountpoint_is_a_file(gradfs, tmp_path):
    path = tmp_path / "file"
    path.write_text("kept")
    up_refused(gradfs, path, "not a directory")
    up_refused(gradfs, path / "below", "not a directory")
    assert path.read_text() == "kept"


def test_mountpoint_is_a_dangling_link(gradfs, tmp_path):
    path = tmp_path / "link"
    path.symlink_to(tmp_path / "none")
    up_refused(gradfs, path, "does not exist")


def test_mountpoint_is_not_empty(gradfs, tmp_path):
    (tmp_path / "precious").write_text("kept")
    up_refused(gradfs, tmp_path, "not empty")
    assert (tmp_path / "precious").read_text() == "kept"


def test_mountpoint_is_a_link_to_a_directory(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    process = subprocess.Popen(
        [gradfs_binary(), "up", "--size", "64KiB", "--reducer", "sum", link], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 10
        while not (link / "model").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        (link / "model/gradients").write_bytes(ONE)
        assert (real / "model/version").read_text() == "1\n"
        assert subprocess.run([gradfs_binary(), "unmount", link], timeout=20, check=False).returncode == 0
        assert process.wait(5) == 0
        assert link.is_symlink() and not is_mounted(real)
    finally:
        process.kill()
        process.communicate()
        if is_mounted(real):
            subprocess.run(["umount", "-l", real], check=False)


def test_mountpoint_is_inside_a_live_mount(start_mount, gradfs):
    mount = small(start_mount)
    up_refused(gradfs, mount.model / "control")
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1


def test_mountpoint_with_odd_characters(start_mount, tmp_path):
    path = tmp_path / "a b\tc\\d\nü"
    path.mkdir()
    mount = small(start_mount, root=path)
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1


def test_already_mounted(start_mount, gradfs):
    mount = small(start_mount)
    said = up_refused(gradfs, mount.root, "already mounted by", str(mount.pid), "gradfs unmount")
    assert str(mount.root) in said
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1


def test_already_mounted_and_named_in_other_ways(start_mount, gradfs, tmp_path):
    mount = small(start_mount)
    link = tmp_path / "link"
    link.symlink_to(mount.root)
    for name in [link, f"{mount.root}/", f"{mount.root}/../{mount.root.name}/."]:
        done = gradfs("up", "--size", "64KiB", name, timeout=20)
        assert done.returncode == 1 and "already mounted by" in done.stderr, done
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1


def test_of_several_that_race_for_a_mountpoint_one_wins(tmp_path):
    for round_ in range(3):
        mnt = tmp_path / f"m{round_}"
        mnt.mkdir()
        command = [gradfs_binary(), "up", "--size", "64KiB", "--reducer", "sum", mnt]
        racers = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(5)
        ]
        try:
            deadline = time.monotonic() + 20
            while sum(racer.poll() is None for racer in racers) > 1 or not (mnt / "model").exists():
                assert time.monotonic() < deadline, [racer.poll() for racer in racers]
                time.sleep(0.01)
            winners = [racer for racer in racers if racer.poll() is None]
            assert len(winners) == 1
            for racer in racers:
                if racer is not winners[0]:
                    _, stderr = racer.communicate()
                    assert racer.returncode == 1 and str(mnt) in stderr and "mounted" in stderr, stderr
            assert len(is_mounted(mnt)) == 1
            (mnt / "model/gradients").write_bytes(ONE)
            assert (mnt / "model/version").read_text() == "1\n"
            winners[0].send_signal(signal.SIGTERM)
            assert winners[0].wait(10) == 0
            assert not is_mounted(mnt)
        finally:
            for racer in racers:
                racer.kill()
                racer.communicate()
            while is_mounted(mnt):
                subprocess.run(["umount", "-l", mnt], check=True)


@as_root
def test_mounted_by_something_else(gradfs, tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    try:
        up_refused(gradfs, tmp_path, "tmpfs", f"umount {tmp_path}")
        done = gradfs("unmount", tmp_path)
        assert done.returncode == 1 and "not of gradfs" in done.stderr, done
        assert is_mounted(tmp_path)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@as_root
def test_something_else_mounted_over_a_live_mount(start_mount, gradfs):
    mount = small(start_mount)
    subprocess.run(["mount", "-t", "tmpfs", "none", mount.root], check=True)
    try:
        (mount.root / "precious").write_text("kept")
        up_refused(gradfs, mount.root, str(mount.pid))
        done = gradfs("unmount", mount.root)
        assert done.returncode == 1 and "tmpfs" in done.stderr, done
        mount.process.send_signal(signal.SIGTERM)
        mount.process.wait(10)
        assert (mount.root / "precious").exists(), "the daemon has unmounted what was not its own"
        assert (mount.root / "precious").read_text() == "kept"
    finally:
        for line in is_mounted(mount.root):
            if " tmpfs " in line:
                subprocess.run(["umount", mount.root], check=True)
    assert mount.process.returncode == 0, mount.stderr()
    # What is left, if anything, must not stand in the way of the next one.
    small(start_mount, root=mount.root).contribute(ONE)


def test_nothing_to_unmount(gradfs, tmp_path):
    done = gradfs("unmount", tmp_path)
    assert done.returncode == 1 and "nothing is mounted" in done.stderr and str(tmp_path) in done.stderr, done
    done = gradfs("unmount", tmp_path / "none")
    assert done.returncode == 1 and "does not exist" in done.stderr, done


# After kill -9


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
        "w = os.open('weights', os.O_RDONLY); g = os.open('gradients', os.O_RDWR); v = os.open('version', os.O_RDONLY)\n"
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


def test_mountpoint_inside_a_dead_mount(start_mount, gradfs):
    mount = small(start_mount)
    die(mount)
    said = up_refused(gradfs, mount.root / "model", "is dead", f"gradfs unmount {mount.root}")
    assert str(mount.root) in said


def test_kill_of_the_daemon_fails_every_call_at_once(start_mount, child):
    mount = small(start_mount, learners=2, timeout=60)
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
    begin = time.monotonic()
    die(mount)
    for one in [blocked, writer, poller]:
        out, err = one.end(timeout=7)
        assert out and all(int(number) in GONE for number in out.split()), (out, err)
    assert time.monotonic() - begin < 6.5
    assert os.pread(weights, 8 * BLOCK, 0) == bytes(4 * BLOCK), "the version stays readable"
    assert memory[:] == bytes(4 * BLOCK)
    memory.close()
    with contextlib.suppress(OSError):
        os.close(weights)
    begin = time.monotonic()
    for act in [mount.weights, mount.version, lambda: os.mkdir(mount.place("c")), lambda: mount.contribute(ONE)]:
        with pytest.raises(OSError) as caught:
            act()
        assert caught.value.errno in GONE
    assert time.monotonic() - begin < 2


# Started before the daemon is stopped: a new process first closes what it inherits, and that asks the daemon.
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
    os.kill(mount.pid, signal.SIGSTOP)
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
    os.kill(mount.pid, signal.SIGSTOP)
    tell(waits)
    time.sleep(0.2)
    die(mount)
    assert int(waits.end(timeout=5)[0]) in GONE


def test_a_stopped_daemon_does_not_hang_who_wants_its_mountpoint(start_mount, gradfs):
    mount = small(start_mount)
    os.kill(mount.pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        up_refused(gradfs, mount.root, str(mount.pid))
        assert time.monotonic() - begin < 10
    finally:
        os.kill(mount.pid, signal.SIGCONT)


# Ends


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_signal_with_files_open(start_mount, number):
    mount = small(start_mount)
    mount.contribute(ONE)
    fds = [os.open(mount.model / name, os.O_RDONLY) for name in ["weights", "version", "control/reducer", "weights.safetensors"]]
    gradients = os.open(mount.model / "gradients", os.O_RDWR)
    os.pwrite(gradients, ONE, 0)
    memory = mmap.mmap(gradients, BLOCK)
    begin = time.monotonic()
    assert mount.stop(number) == 0, mount.stderr()
    assert time.monotonic() - begin < 8
    assert not is_mounted(mount.root) and list(mount.root.iterdir()) == []
    assert os.pread(fds[0], 4, 0) == ONE, "an open version can be read to the end"
    memory.close()
    with pytest.raises(OSError):
        os.pwrite(gradients, ONE, 0)
    with contextlib.suppress(OSError):
        os.close(gradients)
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    assert "panicked" not in mount.stderr()
    small(start_mount, root=mount.root).contribute(ONE)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_signal_during_a_blocked_open(start_mount, child, number):
    mount = small(start_mount, learners=2, timeout=60)
    mount.join("a"), mount.join("b")
    mount.contribute(ONE, learner="a")
    blocked = child(
        "print('ready')\ntry: os.open(sys.argv[1], os.O_RDONLY); print(0)\nexcept OSError as e: print(e.errno)",
        mount.place("a") / "weights",
    )
    time.sleep(0.2)
    assert blocked.process.poll() is None
    assert mount.stop(number) == 0, mount.stderr()
    assert int(blocked.end(timeout=5)[0]) in GONE


def test_signal_during_a_blocked_close(start_mount, child):
    """The step before is not complete, so the close of the next contribution waits: it must fail, not succeed."""
    mount = small(start_mount, learners=2, timeout=60)
    mount.join("a"), mount.join("b")
    mount.contribute(ONE, learner="a")
    blocked = child(
        "g = os.open(sys.argv[1], os.O_WRONLY); os.write(g, b'\\0\\0\\x80\\x3f'); print('ready')\n"
        "try: os.close(g); print(0)\nexcept OSError as e: print(e.errno)",
        mount.place("a") / "gradients",
    )
    time.sleep(0.2)
    assert blocked.process.poll() is None
    assert mount.stop(signal.SIGTERM) == 0, mount.stderr()
    assert int(blocked.end(timeout=5)[0]) in GONE


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_signal_during_writes(start_mount, child, number):
    mount = start_mount(size="8MiB", block_size="64KiB", reducer="sum")
    writer = child(
        "data = b'\\0\\0\\x80\\x3f' * (2 << 20); print('ready')\n"
        "try:\n"
        "    while True:\n"
        "        g = os.open(sys.argv[1], os.O_WRONLY); os.write(g, data); os.close(g)\n"
        "except OSError as e: print(e.errno)",
        mount.model / "gradients",
    )
    mount.wait_for_version(3)
    assert mount.stop(number) == 0, mount.stderr()
    out, _ = writer.end(timeout=5)
    # ENOENT: the next open found the directory below.
    assert int(out) in GONE | {errno.ENOENT}, out
    assert "panicked" not in mount.stderr()


def test_second_signal_ends_it_at_once(start_mount, child):
    mount = small(start_mount)
    child("f = open('gradients', 'wb', 0); f.write(b'\\0' * 4); print('ready'); time.sleep(60)", cwd=mount.model)
    mount.process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        mount.process.wait(0.3)
    if mount.running():
        mount.process.send_signal(signal.SIGINT)
    assert mount.process.wait(5) in (0, 130)
    assert not is_mounted(mount.root)


def test_signals_while_it_loads(gradfs, tmp_path):
    """The earlier a Ctrl-C comes, the less may be left."""
    mnt = tmp_path / "mnt"
    mnt.mkdir()
    for wait in [0.0, 0.003, 0.01, 0.02, 0.04, 0.08]:
        process = subprocess.Popen(
            [gradfs_binary(), "up", "--size", "64MiB", "--reducer", "sum", mnt], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        try:
            _, stderr = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"a SIGINT after {wait} s is lost")
        assert process.returncode in (0, -signal.SIGINT, 130), stderr
        assert "panicked" not in stderr
        assert not is_mounted(mnt)


def test_unmount(start_mount, gradfs):
    mount = small(start_mount)
    mount.contribute(ONE)
    done = gradfs("unmount", mount.root)
    assert done.returncode == 0 and done.stderr == "", done
    assert mount.process.wait(5) == 0, mount.stderr()
    assert not is_mounted(mount.root)


def test_unmount_with_files_open(start_mount, gradfs):
    mount = small(start_mount)
    weights = os.open(mount.model / "weights", os.O_RDONLY)
    done = gradfs("unmount", mount.root)
    assert done.returncode == 1 and "--lazy" in done.stderr and str(mount.root) in done.stderr, done
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1
    gradients = os.open(mount.model / "gradients", os.O_WRONLY)
    done = gradfs("unmount", "--lazy", mount.root)
    assert done.returncode == 0, done
    assert not is_mounted(mount.root)
    assert mount.running(), "files are open: they keep working until they are closed"
    assert os.pread(weights, 4, 0) == bytes(4)
    os.pwrite(gradients, ONE, 0)
    os.close(gradients)
    os.close(weights)
    assert mount.process.wait(5) == 0, mount.stderr()


@as_root
@pytest.mark.parametrize("how", [["umount"], ["umount", "-l"], ["fusermount3", "-u"]], ids=" ".join)
def test_unmounted_from_outside(start_mount, how):
    mount = small(start_mount)
    mount.contribute(ONE)
    subprocess.run([*how, mount.root], check=True)
    assert mount.process.wait(5) == 0, mount.stderr()
    assert "panicked" not in mount.stderr()
    small(start_mount, root=mount.root).contribute(ONE)


@pytest.mark.parametrize("where", ["full", "closed_pipe"])
def test_log_that_cannot_be_written(tmp_path, where):
    """A full disk or a gone `| head` under the log must not end the service."""
    mnt = tmp_path / "mnt"
    mnt.mkdir()
    if where == "full":
        sink = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, sink = os.pipe()
    process = subprocess.Popen(
        [gradfs_binary(), "up", "--size", "256KiB", "--reducer", "sum", mnt], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
    )
    os.close(sink)
    try:
        deadline = time.monotonic() + 10
        while not (mnt / "model").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        if where == "closed_pipe":
            os.close(reader)
        for _ in range(8):
            # In a process of its own: a service that has lost its threads does not answer.
            try:
                done = subprocess.run(
                    ["tee", mnt / "model/control/learning_rate"], input=b"fast", capture_output=True, timeout=3, check=False
                )
            except subprocess.TimeoutExpired:
                pytest.fail("the daemon does not answer any more", pytrace=False)
            assert b"Invalid argument" in done.stderr
        (mnt / "model/gradients").write_bytes(ONE)
        assert (mnt / "model/version").read_text() == "1\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        if is_mounted(mnt):
            subprocess.run(["umount", "-l", mnt], check=False)


# Learners that are killed


WRITE_AND_WAIT = """
g = os.open(sys.argv[1], os.O_WRONLY)
one = b'\\0\\0\\x80\\x3f'
for offset, count in [(0, 16384), (65536, 16384), (131072, 100)]:
    os.pwrite(g, one * count, offset)
print('ready'); time.sleep(60)
"""


@pytest.mark.parametrize("first", ["killed", "other"])
def test_kill_of_a_learner_in_mid_write_leaves_no_half_step(start_mount, child, first):
    mount = small(start_mount, learners=2)
    mount.join("killed"), mount.join("other")
    data = struct.pack("<f", 2.0) * BLOCK
    if first == "other":
        mount.contribute(data, learner="other")
    victim = child(WRITE_AND_WAIT, mount.place("killed") / "gradients")
    if first == "killed":
        mount.contribute(data, learner="other")
    assert mount.version() == 0
    victim.kill()
    assert mount.wait_for_version(1) == 1
    assert (mount.weights() == data) is True, "the other's step, all of it and nothing else"
    deadline = time.monotonic() + 5
    while (mount.model / "learners/killed").exists():
        assert time.monotonic() < deadline, "the killed learner is still in the job"
        time.sleep(0.01)
    assert "SIGKILL" in mount.stderr()
    mount.contribute(data, learner="other")
    assert mount.wait_for_version(2) == 2
    assert mount.weights() == struct.pack("<f", 4.0) * BLOCK


def test_kill_of_the_only_learner_in_mid_write(start_mount, child):
    mount = small(start_mount)
    for round_ in range(3):
        victim = child(WRITE_AND_WAIT, mount.model / "gradients")
        victim.kill()
        deadline = time.monotonic() + 5
        # This process has contributed as the same learner, so that one stays; the victim's bytes go.
        while any(learner["phase"] == "writing" for learner in mount.status()["learners"]):
            assert time.monotonic() < deadline, "the killed writer's contribution is still open"
            time.sleep(0.01)
        mount.contribute(ONE)
        assert mount.wait_for_version(round_ + 1) == round_ + 1
        assert mount.weights() == struct.pack("<f", round_ + 1.0) + bytes(4 * BLOCK - 4)


def test_kill_of_a_writer_of_new_weights(start_mount, child):
    mount = small(start_mount, reducer="assign")
    for _ in range(3):
        victim = child(WRITE_AND_WAIT, mount.model / "weights")
        victim.kill()
        time.sleep(0.05)
        assert mount.version() == 0 and mount.weights() == bytes(4 * BLOCK)
    time.sleep(0.7)
    assert mount.version() == 0
    (mount.model / "weights").write_bytes(ONE * BLOCK)
    assert mount.version() == 1 and mount.weights() == ONE * BLOCK


def test_a_bystander_that_is_killed_takes_nobody_else_along(start_mount, child):
    """Two processes write as the mount's own learner; one of them, which wrote nothing, is killed."""
    mount = small(start_mount)
    bystander = child("g = os.open(sys.argv[1], os.O_WRONLY); print('ready'); time.sleep(60)", mount.model / "gradients")
    fd = os.open(mount.model / "gradients", os.O_WRONLY)
    os.pwrite(fd, ONE, 0)
    bystander.kill()
    time.sleep(0.3)
    os.pwrite(fd, ONE, 4)
    os.close(fd)
    assert mount.wait_for_version(1) == 1
    assert (mount.weights()[:8] == ONE * 2) is True


# A storm


STORM = r"""
import faulthandler, random
faulthandler.enable()
root, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
dice = random.Random(seed)
model = root + '/model'
SIZE = 4 * 65536
end = time.monotonic() + seconds
fds, maps = [], []
names = ['weights', 'weights.safetensors', 'gradients', 'device', 'version', 'status.json', 'tensors/weights.npy',
         'control/learning_rate', 'control/retain', 'control/momentum', 'versions', 'tensors', 'control', 'nothing',
         'learners', '../README', 'versions/0/weights', 'tensors/none.npy']
flags = [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_DIRECT,
         os.O_RDONLY | os.O_NONBLOCK, os.O_WRONLY | os.O_CREAT, os.O_RDONLY | os.O_DIRECTORY, os.O_WRONLY | os.O_SYNC]

def path():
    if dice.random() < 0.3:
        return f'{model}/learners/l{dice.randrange(6)}/' + dice.choice(['weights', 'gradients', 'version', 'status'])
    if dice.random() < 0.1:
        return f'{model}/versions/{dice.randrange(2000)}/' + dice.choice(['weights', 'version', 'tensors/weights.npy'])
    return f'{model}/' + dice.choice(names)

def offset():
    return dice.choice([0, 4, 1, 65536, 65532, SIZE - 4, SIZE, SIZE + 4, 1 << 40, dice.randrange(SIZE)])

def data():
    length = dice.choice([0, 1, 3, 4, 4096, 65536, 65540, SIZE, SIZE + 4, dice.randrange(1, 200000)])
    return dice.choice([b'\0', b'\xff', b'\0\0\x80\x3f', b'1e-3\n']) * (length // dice.choice([1, 4]) + 1)

def fd():
    return dice.choice(fds)

def listdir(): os.listdir(dice.choice([root, model, model + '/control', model + '/learners', model + '/versions', model + '/tensors']))
# A page of a learner's file whose learner has left cannot be read: SIGBUS. Only what stays is mapped.
lasting = set()
def open_():
    name = path(); fds.append(os.open(name, dice.choice(flags), 0o644)); lasting.discard(fds[-1])
    if 'learners' not in name and name.endswith(('weights', 'gradients', '.safetensors', '.npy')): lasting.add(fds[-1])
def close():
    if len(fds) > 4: os.close(fds.pop(dice.randrange(len(fds))))
def map_():
    if len(maps) > 8: maps.pop(dice.randrange(len(maps))).close()
    maps.append(mmap.mmap(dice.choice([f for f in fds if f in lasting]), dice.choice([4096, 65536, SIZE]), access=dice.choice([mmap.ACCESS_READ, mmap.ACCESS_WRITE, mmap.ACCESS_COPY])))
def touch():
    m = dice.choice(maps); i = dice.randrange(len(m) - 4); m[i]
    try: m[i:i + 4] = dice.choice([b'\0\0\0\0', b'\0\0\x80\x3f', b'\xff\xff\xff\xff'])
    except TypeError: pass
def flush(): dice.choice(maps).flush()
def poll():
    import select
    p = select.poll(); p.register(fd(), select.POLLIN | select.POLLOUT); p.poll(dice.choice([0, 1, 5]))

calls = [listdir, open_, open_, open_, open_, close, close, map_, touch, touch, touch, flush, poll,
    lambda: os.pread(fd(), dice.choice([1, 4096, SIZE * 2]), offset()), lambda: os.pread(fd(), 100, offset()),
    lambda: os.pwrite(fd(), data(), offset()), lambda: os.pwrite(fd(), data(), offset()), lambda: os.pwrite(fd(), data(), 0),
    lambda: os.write(fd(), data()), lambda: os.writev(fd(), [data(), data()]), lambda: os.fsync(fd()), lambda: os.fdatasync(fd()),
    lambda: os.fstat(fd()), lambda: os.lseek(fd(), offset(), dice.choice([0, 1, 2, 3, 4])), lambda: os.ftruncate(fd(), offset()),
    lambda: os.truncate(path(), offset()), lambda: os.stat(path()), lambda: os.statvfs(path()),
    lambda: os.mkdir(f'{model}/learners/l{dice.randrange(6)}'), lambda: os.mkdir(f'{model}/learners/l{dice.randrange(6)}'),
    lambda: os.rmdir(f'{model}/learners/l{dice.randrange(6)}'), lambda: os.mkdir(f'{model}/x'), lambda: os.unlink(path()),
    lambda: os.rename(path(), path()), lambda: os.link(path(), path()), lambda: os.symlink('x', path() + 'x'),
    lambda: os.chmod(path(), dice.randrange(0o1000)), lambda: os.setxattr(path(), 'user.x', b'1'), lambda: os.listxattr(path()),
    lambda: os.getxattr(path(), 'user.gradfs.version'), lambda: os.utime(path()), lambda: os.posix_fadvise(fd(), 0, 0, 4),
    lambda: os.sendfile(fd(), fd(), 0, dice.choice([4, 70000])), lambda: os.copy_file_range(fd(), fd(), 70000, 0, 0),
    lambda: os.close(os.dup(fd())), lambda: os.sync() if dice.random() < 0.01 else None,
]
count = done = 0
print('ready')
while time.monotonic() < end:
    count += 1
    try:
        dice.choice(calls)(); done += 1
    except (OSError, ValueError, IndexError, BufferError):
        pass
    if len(fds) > 40:
        try: os.close(fds.pop(0))
        except OSError: pass
print(count, done)
if seed % 3 == 0:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("way", ["passthrough", "no_passthrough"])
def test_storm(start_mount, child, way):
    seed = int(os.environ.get("GRADFS_TEST_SEED", 0)) or random.randrange(1, 1 << 30)
    print(f"GRADFS_TEST_SEED={seed}")
    mount = small(start_mount, no_passthrough=way == "no_passthrough", timeout=0.2, lease=1, retain=2)
    stop = threading.Event()

    def pull():
        """Learners come and go, so that a step is not stuck for long."""
        while not stop.wait(0.05):
            with contextlib.suppress(OSError):
                mount.contribute(ONE)

    helper = threading.Thread(target=pull)
    helper.start()
    try:
        storms = [child(STORM, mount.root, seed + i, 4) for i in range(5)]
        for i, one in enumerate(storms):
            out, err = one.end(timeout=25)
            assert len(out.split()) == 2, f"the storm ended with {one.process.returncode}: {out}{err}"
            count, done = map(int, out.split())
            print(f"seed {seed + i}: {done} of {count} calls succeeded")
            assert done > 100, out + err
    finally:
        stop.set()
        helper.join(20)
    assert mount.running(), mount.stderr()[-3000:]
    assert "panicked" not in mount.stderr(), mount.stderr()[-3000:]
    for name in os.listdir(mount.model / "learners"):
        mount.leave(name)
    for name, value in [("timeout", 10), ("reducer", "sum"), ("carry", 1)]:
        mount.control(name, value)
    before, version = mount.weights(), mount.version()
    assert len(before) == 4 * BLOCK
    try:
        mount.contribute(struct.pack("<f", 0.5) * (BLOCK // 4), offset=2 * BLOCK)
    except OSError as error:
        pytest.fail(f"{error}\n{mount.stderr()[-1000:]}\n{mount.status()}")
    assert mount.wait_for_version(version + 1) == version + 1
    after = mount.weights()
    old = struct.unpack(f"<{BLOCK // 4}f", before[2 * BLOCK:3 * BLOCK])
    new = struct.unpack(f"<{BLOCK // 4}f", after[2 * BLOCK:3 * BLOCK])
    expected = struct.unpack(f"<{BLOCK // 4}f", struct.pack(f"<{BLOCK // 4}f", *(x + 0.5 for x in old)))
    assert (new == expected) is True
    assert (before[:2 * BLOCK] == after[:2 * BLOCK] and before[3 * BLOCK:] == after[3 * BLOCK:]) is True
    assert mount.status()["state"] == "running"


def test_mount_that_fails_says_why(start_mount, tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(MountFailed, match="not empty"):
        small(start_mount, root=tmp_path)
