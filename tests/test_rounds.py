"""Many rounds of a synchronous job: learners that write and learners that map, in step with each other and not.

All values are whole numbers, and all sums stay below 2^24: what float32 holds of them is exact.
"""

import errno
import mmap
import os
import time

import numpy as np
import pytest
from filetools import BLOCK, Threads, array, fails, filled, finish, go, hear, program


class Mapped:
    """A learner whose gradients are mapped; `view` is its memory, `ship` its step."""

    def __init__(self, place):
        self.place = place
        self.fd = os.open(place / "gradients", os.O_RDWR | os.O_DIRECT)
        self.view = np.frombuffer(mmap.mmap(self.fd, 0), "<f4")

    def ship(self):
        os.fsync(self.fd)

    def weights(self):
        return array(self.place / "weights")

    def close(self):
        self.view = None  # Unmaps it: a mapping would keep the mount busy.
        os.close(self.fd)


@pytest.fixture
def mapped_job(start_mount, way):
    """Starts a job of so many mapped learners, and of `writers` who are not."""
    learners = []

    def start(count, size, writers=()):
        waits_for = count + len(writers)
        mount = start_mount(size=size, block_size=BLOCK, reducer="sum", learners=waits_for, timeout=200, **way)
        learners.extend(Mapped(mount.join(rank)) for rank in range(count))
        mount.join(*writers)
        return mount, learners

    yield start
    for learner in learners:
        learner.close()


@pytest.mark.parametrize("when", ["first", "last", "together"])
def test_nan_is_refused_or_accepted__of_one_of_four_that_map(mapped_job, when):
    """The others' steps stay taken, and wait; what the refused one stores then completes the version."""
    mount, learners = mapped_job(4, 1 << 20)
    bad, threads = learners[2], Threads()
    total = 0
    for step in range(1, 4):
        for rank, learner in enumerate(learners):
            learner.view[:] = 10**rank
        bad.view[-1] = np.nan
        others = []

        def ship_others():
            others.extend(threads.start(learner.ship) for learner in learners if learner is not bad)

        if when != "first":
            ship_others()
        if when == "last":
            time.sleep(0.3)
        fails(errno.EINVAL, bad.ship)
        if when == "first":
            ship_others()
        time.sleep(0.05)
        assert mount.version() == step - 1 and (array(mount.model / "weights") == total).all()
        assert np.isnan(bad.view[-1]), "its memory keeps what was stored"
        bad.view[-1] = 100
        bad.ship()
        for other in others:
            other.result(300)
        total += 1111
        for learner in learners:
            assert (learner.weights() == total).all(), f"version {step}"
        assert mount.version() == step


LEARNER = """
import numpy as np

place, way, rounds, gift, sum_of_all = argv[0], argv[1], int(argv[2]), float(argv[3]), float(argv[4])
count = os.stat(place + "/weights").st_size // 4
data = np.full(count, gift, "<f4")
if way == "mmap":
    gradients = os.open(place + "/gradients", os.O_RDWR | os.O_DIRECT)
    memory = np.frombuffer(mmap.mmap(gradients, 0), "<f4")

def contribute():
    if way == "mmap":
        memory[:] = gift
        os.fsync(gradients)
        memory[:] = -1
    else:
        with open(place + "/gradients", "wb", buffering=0) as file:
            assert file.write(data) == 4 * count

def weights():
    with open(place + "/weights", "rb", buffering=0) as file:
        if way == "mmap":
            return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), "<f4")
        return np.frombuffer(file.readall(), "<f4")

say("ready")
wait()
for step in range(1, rounds + 1):
    contribute()
    seen = weights()
    # Its next step is in no version, so the one with this step is the newest.
    if not (seen == sum_of_all * step).all():
        say("step", step, "reads", sorted(set(seen.tolist()))[:5], "instead of", sum_of_all * step)
        sys.exit(1)
say("exact")
"""


@pytest.mark.parametrize("contribute_by", ["write", "mmap"])
def test_read_your_own_step__in_thousands_of_rounds(start_mount, way, contribute_by):
    """A learner never reads a version without its own last step, as fast as the two of them go."""
    rounds, gifts = 1_000, [1, 4096]
    mount = start_mount(size=BLOCK, block_size=BLOCK, reducer="sum", learners=2, timeout=200, **way)
    learners = [
        program(LEARNER, mount.join(f"gives-{gift}"), contribute_by, rounds, gift, sum(gifts)) for gift in gifts
    ]
    for learner in learners:
        assert hear(learner) == "ready"
    for learner in learners:
        go(learner)
    said = [hear(learner) for learner in learners]
    assert said == ["exact"] * 2
    for learner in learners:
        finish(learner)
    assert mount.version() == rounds
    assert (array(mount.model / "weights") == rounds * filled(mount, sum(gifts))).all()
