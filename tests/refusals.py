"""What tests of refusals share: the right errno, a message that helps, and nothing changed."""

import ctypes
import errno
import hashlib
import json
import os
import subprocess
import struct
import time
from contextlib import contextmanager

import pytest
from patience import HANGS, Limit

ONE = struct.pack("<f", 1.0)
BLOCK = 64 << 10
EPERM, EINVAL, EACCES = errno.EPERM, errno.EINVAL, errno.EACCES
libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def refused(*errnos):
    """The body must raise OSError with one of `errnos`."""
    names = [errno.errorcode[number] for number in errnos]
    try:
        yield
    except OSError as error:
        got = errno.errorcode.get(error.errno, error.errno)
        assert error.errno in errnos, f"expected {names}, got {got}: {error}"
    else:
        pytest.fail(f"expected {names}, but it succeeded")


def state(mount):
    settings = {path.name: path.read_text() for path in (mount.model / "control").iterdir()}
    return mount.version(), hashlib.sha256(mount.weights()).hexdigest(), settings


@contextmanager
def nothing_changes(mount, one=ONE):
    """Version, weights and settings stay as they are through the body, and the job is usable after it."""
    before = state(mount)
    yield
    after = state(mount)
    assert after == before
    mount.contribute(one)
    assert mount.wait_for_version(before[0] + 1) == before[0] + 1
    assert mount.weights() != b"", "weights can be read"
    assert mount.running()


def said(mount, *words):
    """Waits until a line of the daemon's log holds all `words`."""
    limit = Limit(HANGS)
    while True:
        lines = mount.stderr().splitlines()
        if any(all(word in line for word in words) for line in lines):
            return
        assert not limit.over(), f"no line of the log holds {words}:\n" + "\n".join(lines[-20:])
        time.sleep(0.01)


@contextmanager
def opened(path, flags):
    """A descriptor; an error of close counts, unless the body has failed already."""
    fd = os.open(path, flags)
    try:
        yield fd
    except BaseException:
        try:
            os.close(fd)
        except OSError:
            pass
        raise
    os.close(fd)


def small(start_mount, *args, **options):
    """A blank model of four blocks."""
    given = {"size": 4 * BLOCK, "block_size": "64KiB", "reducer": "sum", **options}
    return start_mount(*args, **given)


def tensor(begin, end, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def up(gradfs, mnt, *args, env=None):
    """`gradfs up ARGS MNT`, which must end by itself."""
    try:
        return gradfs("up", *args, mnt, timeout=300, env=env)
    except subprocess.TimeoutExpired:
        mounted = os.path.ismount(mnt)
        subprocess.run(["umount", "-l", mnt], stderr=subprocess.DEVNULL, check=False)
        pytest.fail(f"gradfs up {args} was not refused; {'it mounted' if mounted else 'it hangs'}", pytrace=False)


def refused_up(gradfs, tmp_path, *args, words, code=None, env=None):
    """`gradfs up ARGS MNT` must fail and say `words`; nothing is mounted then, nothing left in the directory."""
    mnt = tmp_path / "mnt"
    mnt.mkdir(exist_ok=True)
    done = up(gradfs, mnt, *args, env=env)
    shown = f"$ gradfs up {' '.join(map(str, args))}\n{done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == code if code is not None else done.returncode in (1, 2), shown
    assert done.stderr.startswith("gradfs: error: "), shown
    assert "panicked" not in done.stderr and "RUST_BACKTRACE" not in done.stderr, shown
    assert done.stdout == "", shown
    assert len(done.stderr) < 2000, shown
    for word in words:
        assert word in done.stderr, f"{word!r} is missing:\n{shown}"
    assert not os.path.ismount(mnt) and list(mnt.iterdir()) == [], shown
    return done.stderr


ONES = {"f32": ONE, "f16": struct.pack("<e", 1.0), "bf16": ONE[2:], "f8_e4m3": b"\x38", "f8_e5m2": b"\x3c"}
