"""Threads and programs write as one learner at once: a contribution counts exactly if its writer got success."""

import itertools
import os
import threading

import numpy as np
from filetools import BLOCK, Threads, array, filled, hear, killed, mounts, outcome, program

mounted = mounts(both=False, lease=0)
ONES = np.ones(BLOCK // 4, "<f4")


def test_exactly_once__for_many_handles(mounted):
    """Each thread has handles of its own: a contribution counts exactly if its writer got success."""
    mount = mounted(learners=2)
    mount.join("a", "b")
    gradients, hands, stop = mount.place("a") / "gradients", 4, threading.Event()
    told, busy = [0] * hands, [0] * hands

    def hand(rank):
        for turn in range(150):
            fd = os.open(gradients, os.O_WRONLY)
            written = outcome(os.pwrite, fd, ONES, rank * BLOCK)
            ends = [outcome(os.fsync, fd)] if turn % 3 == 0 else []
            ends.append(outcome(os.close, fd))
            if written == "done":
                assert ends == ["done"] * len(ends), f"turn {turn}: written, then {ends}"
                told[rank] += 1
            else:
                assert written == "EBUSY", written
                busy[rank] += 1

    def others():
        while not stop.is_set():
            mount.contribute(filled(mount, 0), learner="b")

    threads = Threads()
    other = threads.start(outcome, others)
    try:
        threads.run(*(lambda rank=rank: hand(rank) for rank in range(hands)))
    finally:
        stop.set()
        mount.leave("b")
    assert other.result(300) in ("done", "ENOTCONN", "ENOENT")
    weights = array(mount.place("a") / "weights")[: hands * BLOCK // 4].reshape(hands, -1)
    assert (weights == weights[:, :1]).all() and weights[:, 0].tolist() == told, busy
    assert sum(told) > 50


REFUSED = """
fd = os.open(argv[0], os.O_RDWR | os.O_DIRECT)
memory = memoryview(mmap.mmap(fd, 0)).cast("f")
memory[5] = float("nan")
say("keeps on")
while os.getppid() != 1:
    try:
        os.fsync(fd)
    except OSError:
        pass
"""


def test_exactly_once__beside_a_mapping_that_is_refused(mounted):
    """A program that ships NaN over and over spoils what another one writes as the same learner; it says so."""
    mount = mounted()
    gradients = mount.join("a") / "gradients"
    refused = program(REFUSED, gradients)
    hear(refused)
    told, said = 0, set()
    for attempt in itertools.count():
        if told >= 20 and attempt >= 300:
            break
        fd = os.open(gradients, os.O_WRONLY)
        ends = outcome(os.pwrite, fd, ONES, 0), outcome(os.close, fd)
        told += ends == ("done", "done")
        said |= set(ends)
    weights = array(mount.place("a") / "weights")
    assert (weights[: BLOCK // 4] == told).all() and weights.sum() == told * BLOCK // 4, said
    assert said <= {"done", "EBUSY", "EIO"}
    killed(refused)
