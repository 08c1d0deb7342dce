"""What tests of refusals share: a message that helps, and nothing changed."""

import hashlib
import json
import os
import struct
import subprocess
from contextlib import contextmanager

import pytest
from filetools import BLOCK

ONES = {"f32": struct.pack("<f", 1.0), "f16": struct.pack("<e", 1.0), "bf16": b"\x80\x3f", "f8_e4m3": b"\x38", "f8_e5m2": b"\x3c"}
ONE = ONES["f32"]


def small(start_mount, **options):
    """A blank model of four blocks."""
    return start_mount(**{"size": 4 * BLOCK, "block_size": "64KiB", "reducer": "sum", **options})


def state(mount):
    settings = {path.name: path.read_text() for path in (mount.model / "control").iterdir()}
    return mount.version(), hashlib.sha256(mount.weights()).hexdigest(), settings


@contextmanager
def nothing_changes(mount):
    """Version, weights and settings stay as they are through the body, and the job is usable after it."""
    before = state(mount)
    yield
    assert state(mount) == before
    mount.contribute(ONE)
    assert mount.wait_for_version(before[0] + 1) == before[0] + 1


def tensor(begin, end, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def refused_up(gradfs, mnt, *args, words, code=1, env=None):
    """`gradfs up ARGS MNT` must fail and say `words`, and mount nothing; returns what it said."""
    try:
        done = gradfs("up", *args, mnt, timeout=300, env=env)
    except subprocess.TimeoutExpired:
        mounted = os.path.ismount(mnt)
        subprocess.run(["umount", "-l", mnt], stderr=subprocess.DEVNULL, check=False)
        pytest.fail(f"gradfs up {args} was not refused; {'it mounted' if mounted else 'it hangs'}", pytrace=False)
    shown = f"$ gradfs up {' '.join(map(str, args))}\n{done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == code and done.stdout == "", shown
    assert done.stderr.startswith("gradfs: error: ") and len(done.stderr) < 2000, shown
    assert "panicked" not in done.stderr and "RUST_BACKTRACE" not in done.stderr, shown
    assert not os.path.ismount(mnt) and (not os.path.isdir(mnt) or os.listdir(mnt) == []), shown
    for word in words:
        assert str(word) in done.stderr, f"{word!r} is missing:\n{shown}"
    return done.stderr
