"""Blocks are lost, and the job goes on from its newest snapshot by itself, as docs/operate/failures.md promises it."""

import errno
import os
import time

import numpy as np
import pytest
from filetools import BLOCK, eventually
from patience import HANGS, Limit
from test_cluster_registry import apart  # noqa: F401

SIZE = 9 * BLOCK


class Restored:
    """A sum of ones: the weights say how many contributions are part of them."""

    def __init__(self, one, store, shards=3, **settings):
        self.one = one
        settings = {"reducer": "sum", "snapshot_to": store, "snapshot_every": 1, "lease": 5, "learners": 1, **settings}
        one.create("m", size=SIZE, block_size=BLOCK, shards=shards, **settings)
        self.mount = one.mount(models=["m"])
        self.model = self.mount.path if hasattr(self.mount, "path") else self.mount.root / "m"

    def shown(self):
        values = np.frombuffer(self.read("weights"), "<f4")
        assert (values == values[0]).all(), f"torn: {sorted(set(values.tolist()))}"
        return int(values[0])

    def read(self, name):
        return (self.model / name).read_bytes()

    def number(self, name):
        return int(self.read(name) or -1)

    def step(self):
        """One contribution."""
        with open(self.model / "gradients", "wb", buffering=0) as file:
            file.write(np.ones(SIZE // 4, "<f4").tobytes())
            os.fsync(file.fileno())

    def durable(self, version=None):
        """Waits until this version is durable, or the one that is shown."""
        version = self.number("version") if version is None else version
        eventually(lambda: self.number("durable_version") >= version)

    def goes_on(self, limit=HANGS):
        """Takes a step as soon as one succeeds. Returns the errnos on the way, and the seconds."""
        limit, begin, errnos = Limit(limit), time.monotonic(), []
        while True:
            try:
                self.step()
                return errnos, time.monotonic() - begin
            except OSError as error:
                errnos.append(error.errno)
                self.why = self.read("error").decode()
                assert not limit.over(), (errnos, self.mount.stderr())

    def state(self):
        return self.mount.status()["models"]["m"]["state"] if hasattr(self.mount, "status") else None


@pytest.mark.parametrize("who", ["another", "coordinator"])
def test_a_job_comes_back_by_itself_when_a_shard_dies(apart, tmp_path, who):
    job = Restored(apart(3), tmp_path / "store")
    for _ in range(5):
        job.step()
    job.durable()
    assert job.shown() == 5
    before = job.number("version")
    coordinator = job.one.coordinator_shard("m")
    dead = coordinator if who == "coordinator" else next(s for s in job.one.shards if s is not coordinator)
    held = os.open(job.model / "weights", os.O_RDONLY)
    dead.kill()
    errnos, seconds = job.goes_on()
    print(who, errnos, seconds)
    assert errnos == [errno.ENOTCONN], errnos
    assert job.shown() == 6 and job.number("version") > before
    assert np.frombuffer(os.pread(held, SIZE, 0), "<f4").max() == 5
    os.close(held)
    assert "the model goes on from its newest snapshot" in job.why
