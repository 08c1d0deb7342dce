"""What a hundred models in one mount take of threads and memory."""

import os
import time
from pathlib import Path

import numpy as np

from filetools import array, write_safetensors

MODELS = 100
ELEMENTS = 256 << 10
BYTES = 4 * ELEMENTS
# Of the daemon, however many models there are.
THREADS = 16
# Versions of models in which nobody has contributed yet, and all else that they take: of their bytes.
AT_REST = 2.2


def taken(mount):
    """(threads, bytes) of the daemon: its own memory, and its shared memory."""
    lines = Path(f"/proc/{mount.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    kib = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    # Memory of versions that is not mapped counts as well.
    return int(status["Threads"]), max(kib << 10, shared(mount))


def shared(mount):
    files = {}
    for descriptor in Path(f"/proc/{mount.pid}/fd").iterdir():
        try:
            if "memfd:" in os.readlink(descriptor):
                status = os.stat(descriptor)
                files[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:  # It was closed meanwhile.
            pass
    return sum(files.values())


def settled(mount):
    """Its usage once that has been the same for a while."""
    before = taken(mount)
    while True:
        time.sleep(0.3)
        now = taken(mount)
        if now == before:
            return now
        before = now


def models(directory, count):
    data = np.ones(ELEMENTS, "<f4").tobytes()
    return [write_safetensors(directory / f"m{i}.safetensors", {"w": ("F32", (ELEMENTS,), data)}) for i in range(count)]


def test_threads_and_memory_do_not_grow_with_models(start_mount, tmp_path):
    files = models(tmp_path, MODELS)
    few = start_mount(model=files[:1], reducer="sum")
    threads_of_one, bytes_of_one = settled(few)
    mount = start_mount(model=files, reducer="sum")
    threads, taken_at_rest = settled(mount)
    assert threads <= THREADS and threads == threads_of_one
    empty = bytes_of_one - 2 * BYTES
    assert taken_at_rest - empty <= AT_REST * MODELS * BYTES
    # All of them can be trained all the same, and threads do not grow with that either.
    for model in mount.models:
        with open(model / "gradients", "wb", buffering=0) as file:
            file.write(np.full(ELEMENTS, 2, "<f4").tobytes())
    assert all((array(model / "weights") == 3).all() for model in mount.models)
    assert settled(mount)[0] <= THREADS


def test_threads_do_not_grow_with_models_on_a_network(cluster):
    shard = cluster()
    names = [f"m{i}" for i in range(20)]
    for name in names:
        shard.create(name, size=BYTES, reducer="sum")
    few = shard.mount(models=names[:1], transport="tcp")
    mount = shard.mount(models=names, transport="tcp")
    assert settled(mount)[0] == settled(few)[0] <= THREADS
    # All of them can be trained all the same.
    for model in mount.models:
        with open(model / "gradients", "wb", buffering=0) as file:
            file.write(np.full(ELEMENTS, 2, "<f4").tobytes())
        assert (array(model / "weights") == 2).all()
    assert settled(mount)[0] <= THREADS
