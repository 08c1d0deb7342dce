"""What tests of the daemon's life share: programs of its own, and mounts that fail."""

import contextlib
import errno
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from conftest import gradfs_binary
from filetools import BLOCK, eventually  # noqa: F401
from patience import HANGS
from refusals import ONE, small  # noqa: F401

NOBODY = 65534
# What a mount namespace of one's own begins with. It has copies of all mounts, which would keep other tests' daemons alive.
LETS_GO = "umount -alt fuse.gradfs"
GONE = {errno.EIO, errno.ENOTCONN, errno.ECONNABORTED}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting something else takes root")


def up_refused(gradfs, mountpoint, *words):
    """`gradfs up` on `mountpoint` must fail, saying `words`; returns what it said."""
    done = gradfs("up", "--size", "64KiB", "--reducer", "sum", mountpoint, timeout=300)
    assert done.returncode == 1 and done.stdout == "", done
    assert done.stderr.startswith("gradfs: error: ") and "panicked" not in done.stderr, done.stderr
    assert all(word in done.stderr for word in [str(mountpoint), *words]), done.stderr
    return done.stderr


@contextlib.contextmanager
def started(mnt, *options, **pipes):
    """`gradfs up` on `mnt`, once it is mounted: the process. Nothing is mounted afterwards."""
    command = [gradfs_binary(), "up", "--size", "256KiB", "--reducer", "sum", *options, mnt]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **pipes}
    process = subprocess.Popen(command, **pipes)
    try:
        eventually(lambda: process.poll() is not None or is_mounted(mnt))
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()
        while is_mounted(mnt):
            subprocess.run(["umount", "-l", mnt], check=True)


class Child:
    """A Python program in a process of its own; it says `ready` with its first line. Killed at the end.

    `under` is a command that runs it, as `unshare` does.
    """

    def __init__(self, code, *args, ready=True, cwd=None, under=()):
        self.process = subprocess.Popen(
            [*under, sys.executable, "-u", "-c", "import errno, mmap, os, sys, time\n" + code, *map(str, args)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        )
        self.pid = self.process.pid
        if ready:
            assert self.line() == "ready"

    def line(self, timeout=HANGS):
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            self.process.kill()
            pytest.fail(f"the child said nothing for {timeout} s")
        return self.process.stdout.readline().strip()

    def end(self, timeout=HANGS):
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
            self.process.wait(300)
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
            one.process.wait(300)
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.close()


def in_namespace(place, setup, script):
    """Runs `script` in a mount namespace that root has prepared by `setup`; `$up` is gradfs up as nobody. `$0` is gradfs,
    `$1` the mountpoint, `$2` a directory for whatever the setup needs."""
    binary, root, scratch = (place / name for name in ("gradfs", "mnt", "scratch"))
    shutil.copy(gradfs_binary(), binary)
    binary.chmod(0o755)
    root.mkdir()
    scratch.mkdir()
    os.chown(root, NOBODY, NOBODY)
    up = f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups {binary} up --size 64KiB --reducer sum --no-passthrough"
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{LETS_GO}; up='{up}'; {setup} && {{ {script}; }}", binary, root, scratch],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, cwd="/", check=False,
    )


@pytest.fixture
def place_for_all():
    """A directory that other users get into."""
    with tempfile.TemporaryDirectory(prefix="gradfs-test-") as path:
        os.chmod(path, 0o755)
        yield Path(path)


def die(mount):
    """kill -9; the dead mount stays where it is."""
    mount.process.kill()
    mount.process.wait(300)


def is_mounted(path):
    with open("/proc/self/mountinfo") as table:
        return [line for line in table if line.split()[4] == str(path)]
