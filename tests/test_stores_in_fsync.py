"""Mapped gradients that their program stores into while its fsync is under way, and memory taken for the first time."""

import mmap
import os
import threading
import time

import numpy as np
import pytest
from filetools import BLOCK, Threads, array, eventually, filled, finish, go, hear, program

SIZE = 4 << 20
# The one float that is NaN and 2.0 by turns: in the middle of a block.
AT = SIZE // 8 + 1000

# Joins, ships twos of which one is NaN now and then, says whether it was taken, and leaves.
TOGGLER = """
import errno
sys.setswitchinterval(1e-4)
learner, size, at, times = argv[0], *map(int, argv[1:])
twos = bytes([0, 0, 0, 64]) * (size // 4)
nan = float("nan")
while sys.stdin.readline():
    os.mkdir(learner)
    fd = os.open(learner + "/gradients", os.O_RDWR | os.O_DIRECT)
    memory = mmap.mmap(fd, size)
    memory[:] = twos
    floats = memoryview(memory).cast("f")
    goes_on = True
    def toggle():
        pause = 1
        while goes_on:
            floats[at] = nan
            for _ in range(pause): pass
            floats[at] = 2
            for _ in range(pause): pass
            pause = pause * 5 % 997
        floats[at] = 2
    say("joined")
    wait()
    toggler = threading.Thread(target=toggle)
    toggler.start()
    for turn in range(times):
        try:
            os.fsync(fd)
            said = "done"
            break
        except OSError as error:
            said = errno.errorcode[error.errno]
    goes_on = False
    toggler.join()
    say(said, turn)
    os.rmdir(learner)
    floats.release()
    memory.close()
    try:
        os.close(fd)
    except OSError:
        pass
    say("left")
"""


def uniform(values, *allowed):
    return values[0] in allowed and (values == values[0]).all()


@pytest.mark.parametrize("times", [1, 20], ids=["once", "until it is taken"])
@pytest.mark.parametrize("order", ["first", "last", "together"])
def test_nan_is_refused_or_accepted__that_comes_up_during_the_fsync(start_mount, order, times):
    """Whatever fsync says, the weights hold it or do not, without NaN, and what the others gave is exact."""
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=3, timeout=200)
    fd = os.open(mount.join("maps") / "gradients", os.O_RDWR | os.O_DIRECT)
    memory = np.frombuffer(mmap.mmap(fd, 0), "<f4")
    memory[:] = 1
    mount.join("writes")
    toggler = program(TOGGLER, mount.model / "learners" / "toggles", SIZE, AT, times)
    threads, fours, heard, before = Threads(), filled(mount, 4), [], filled(mount, 0)
    block = slice(AT // (BLOCK // 4) * (BLOCK // 4), (AT // (BLOCK // 4) + 1) * (BLOCK // 4))
    for step in range(1, 21):
        go(toggler)
        assert hear(toggler) == "joined"
        if order == "first":
            go(toggler)
            said, refused = hear(toggler).split()
        others = [threads.start(os.fsync, fd), threads.start(mount.contribute, fours, 0, "writes")]
        if order == "last":
            for other in others:
                other.result(300)
        if order != "first":
            go(toggler)
            said, refused = hear(toggler).split()
        for other in others:
            other.result(300)
        assert hear(toggler) == "left"
        assert said in ("done", "EINVAL")
        heard.append((said, int(refused)))
        assert mount.wait_for_version(step) == step
        weights = array(mount.place("writes") / "weights")
        assert not np.isnan(weights).any(), heard
        new, before = weights - before, weights
        taken = 7 if said == "done" else 5
        inside, outside = np.delete(new[block], AT - block.start), np.delete(new, block)
        assert uniform(outside, taken) and uniform(inside, 5, taken), heard
        assert new[AT] in (5, taken), heard
    memory = None
    os.close(fd)
    finish(toggler)


def test_mapped_gradients_ship_at_fsync__and_their_memory_stalls_nobody(start_mount):
    """Two learners open a large model to map for the first time; others read as before."""
    mount = start_mount(size="256MiB", reducer="sum", timeout=200, lease=0)
    places = [mount.join(name) for name in "ab"]
    opened, reads = threading.Event(), []

    def read():
        while not opened.is_set():
            start = time.monotonic()
            mount.version()
            reads.append(time.monotonic() - start)
            time.sleep(0.002)

    reader = Threads().start(read)
    eventually(lambda: len(reads) > 20)
    before, start = len(reads), time.monotonic()
    code = "fd = os.open(argv[0], os.O_RDWR | os.O_DIRECT)\nsay('open')\nwait()"
    learners = [program(code, place / "gradients") for place in places]
    try:
        for learner in learners:
            assert hear(learner) == "open"
    finally:
        opened.set()
    elapsed = time.monotonic() - start
    reader.result(300)
    # A reader that waited for the memory would wait for as long as the learners, also on a busy machine.
    assert max(reads[before:]) < max(0.5, elapsed / 2)
    for learner in learners:
        finish(learner)
