"""What tests of the daemon's life share: programs of its own, and mounts that fail."""

import contextlib
import errno
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from conftest import gradfs_binary
from patience import HANGS

ONE = struct.pack("<f", 1.0)
BLOCK = 64 << 10
NOBODY = 65534
GONE = {errno.EIO, errno.ENOTCONN, errno.ECONNABORTED}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting something else takes root")


def small(start_mount, **options):
    return start_mount(**{"size": 4 * BLOCK, "block_size": "64KiB", "reducer": "sum", **options})


def up_refused(gradfs, mountpoint, *words):
    """`gradfs up` on `mountpoint` must fail, saying `words`; returns what it said."""
    done = gradfs("up", "--size", "64KiB", "--reducer", "sum", mountpoint, timeout=300)
    assert done.returncode == 1, done
    assert done.stderr.startswith("gradfs: error: ") and "panicked" not in done.stderr, done.stderr
    assert done.stdout == ""
    for word in [str(mountpoint), *words]:
        assert word in done.stderr, f"{word!r} is missing:\n{done.stderr}"
    return done.stderr


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
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"up='{up}'; {setup} && {{ {script}; }}", binary, root, scratch],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, cwd="/", check=False,
    )
    return done


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
