"""How the daemon ends in order."""

import contextlib
import errno
import mmap
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conftest import gradfs_binary, write_all
from daemons import BLOCK, GONE, ONE, as_root, child, is_mounted, small, started
from filetools import eventually, takes
from patience import HANGS

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_the_daemon_with_files_open(start_mount, number):
    mount = small(start_mount)
    mount.contribute(ONE)
    fds = [os.open(mount.model / name, os.O_RDONLY) for name in ["weights", "version", "control/reducer", "weights.safetensors"]]
    gradients = os.open(mount.model / "gradients", os.O_RDWR | os.O_DIRECT)
    os.pwrite(gradients, ONE, 0)
    memory = mmap.mmap(gradients, BLOCK)
    with takes(0, 8):
        assert mount.stop(number) == 0, mount.stderr()
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


BLOCKED = {
    "open": "print('ready')\ntry: os.open(sys.argv[1] + '/weights', os.O_RDONLY)",
    # The step before is not complete, so the close of the next contribution waits: it must fail, not succeed.
    "close": "g = os.open(sys.argv[1] + '/gradients', os.O_WRONLY); os.write(g, b'\\0\\0\\x80\\x3f'); print('ready')\n"
    "try: os.close(g)",
}


@pytest.mark.parametrize("call", BLOCKED)
def test_a_signal_to_the_daemon_ends_a_call_that_waits(start_mount, child, call):
    mount = small(start_mount, learners=2, timeout=200)
    mount.join("a", "b")
    mount.contribute(ONE, learner="a")
    blocked = child(BLOCKED[call] + "; print(0)\nexcept OSError as e: print(e.errno)", mount.place("a"))
    time.sleep(0.2)
    assert blocked.process.poll() is None
    assert mount.stop(signal.SIGTERM) == 0, mount.stderr()
    assert int(blocked.end(timeout=300)[0]) in GONE


def test_a_signal_to_the_daemon_during_writes_ends_them(start_mount, child):
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
    assert mount.stop(signal.SIGHUP) == 0, mount.stderr()
    out, _ = writer.end(timeout=300)
    # ENOENT: the next open found the directory below.
    assert int(out) in GONE | {errno.ENOENT}, out
    assert "panicked" not in mount.stderr()


@pytest.mark.parametrize("pause", [0, 0.3, 1.2])
def test_a_second_signal_leaves_no_mount(start_mount, child, pause):
    mount = small(start_mount)
    child("f = open('gradients', 'wb', 0); f.write(b'\\0' * 4); print('ready'); time.sleep(60)", cwd=mount.model)
    mount.process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        mount.process.wait(pause)
    mount.process.send_signal(signal.SIGINT)
    assert mount.process.wait(300) in ((0, 130) if pause > 1 else (0,)), mount.stderr()
    assert not is_mounted(mount.root) and list(mount.root.iterdir()) == []


def test_forced_exit_leaves_no_mount(tmp_path):
    """Of a daemon that is mounted and gets no further, as its standard output is a pipe that nobody empties."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    with started(tmp_path, stdout=writer) as stuck:
        os.close(writer)
        write_all(tmp_path / "model/gradients", ONE)
        weights = os.open(tmp_path / "model/weights", os.O_RDONLY)
        for pause in [0.3, 1]:
            stuck.send_signal(signal.SIGTERM)
            time.sleep(pause)
        assert stuck.poll() is None and is_mounted(tmp_path), "two in a second are one"
        stuck.send_signal(signal.SIGTERM)
        assert stuck.wait(HANGS) == 130
        assert "SIGTERM again: exiting at once" in stuck.stderr.read()
        assert not is_mounted(tmp_path) and list(tmp_path.iterdir()) == []
        os.close(weights)
    os.close(reader)


def test_a_signal_while_the_model_loads_ends_the_daemon(mnt):
    """The earlier a Ctrl-C comes, the less may be left."""
    for wait in [0.0, 0.003, 0.01, 0.02, 0.04, 0.08]:
        command = [gradfs_binary(), "up", "--size", "64MiB", "--reducer", "sum", mnt]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        try:
            _, stderr = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"a SIGINT after {wait} s is lost")
        assert process.returncode in (0, -signal.SIGINT, 130) and "panicked" not in stderr, stderr
        assert not is_mounted(mnt)


def test_unmount_ends_the_daemon(start_mount, gradfs):
    mount = small(start_mount)
    mount.contribute(ONE)
    done = gradfs("unmount", mount.root)
    assert done.returncode == 0 and done.stderr == "", done
    assert mount.process.wait(300) == 0, mount.stderr()
    assert not is_mounted(mount.root)


def test_unmount_with_files_open_is_refused_unless_it_is_lazy(start_mount, gradfs):
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
    assert mount.process.wait(300) == 0, mount.stderr()


@as_root
def test_unmount_names_a_process_that_has_a_copy_of_the_mount(start_mount, gradfs):
    mount = small(start_mount)
    # Of other tests' mounts it keeps none.
    script = 'findmnt -nrt fuse.gradfs -o TARGET | grep -vxF "$0" | xargs -r umount -l; exec sleep infinity'
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", script, mount.root]) as other:
        try:
            eventually(lambda: Path(f"/proc/{other.pid}/comm").read_text() == "sleep\n")
            assert str(mount.root) in Path(f"/proc/{other.pid}/mountinfo").read_text()
            done = gradfs("unmount", mount.root)
            assert done.returncode == 1 and f"pid {other.pid} (sleep) has a copy of the mount" in done.stderr, done
            assert not is_mounted(mount.root) and mount.running()
        finally:
            other.kill()
    assert mount.process.wait(300) == 0, mount.stderr()


@as_root
@pytest.mark.parametrize("how", [["umount"], ["umount", "-l"], ["fusermount3", "-u"]], ids=" ".join)
def test_the_daemon_ends_when_it_is_unmounted_from_outside(start_mount, how):
    mount = small(start_mount)
    mount.contribute(ONE)
    subprocess.run([*how, mount.root], check=True)
    assert mount.process.wait(300) == 0, mount.stderr()
    assert "panicked" not in mount.stderr()
    small(start_mount, root=mount.root).contribute(ONE)


def test_a_signal_ends_a_daemon_that_has_no_descriptors_left(start_mount):
    mount = small(start_mount)
    resource.prlimit(mount.pid, resource.RLIMIT_NOFILE, (3, 3))
    assert mount.stop() == 0, mount.stderr()


@pytest.mark.parametrize("where", ["full", "closed_pipe"])
def test_a_log_that_cannot_be_written_harms_no_call(mnt, where):
    """A full disk or a gone `| head` under the log must not end the service."""
    reader, sink = os.pipe() if where == "closed_pipe" else (None, os.open("/dev/full", os.O_WRONLY))
    with started(mnt, stdout=sink, stderr=sink) as process:
        os.close(sink)
        eventually((mnt / "model").exists)
        if reader is not None:
            os.close(reader)
        for _ in range(8):
            # In a process of its own: a service that has lost its threads does not answer.
            tee = ["tee", mnt / "model/control/learning_rate"]
            done = subprocess.run(tee, input=b"fast", capture_output=True, timeout=HANGS, check=False)
            assert b"Invalid argument" in done.stderr
        write_all(mnt / "model/gradients", ONE)
        assert (mnt / "model/version").read_text() == "1\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == (1 if where == "full" else 0), "it could not say that it was ready"
