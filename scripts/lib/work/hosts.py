"""What runs on hosts of network namespaces, as programs: `hosts.py TASK ARGUMENTS`. Each says what it found as JSON in its
last line. All hosts are of one machine, and have one clock.

  steps, total      learners of whole numbers, and whether weights hold each step once (scripts/netns-cluster, tests)
  serve, ask        what a link does at best, one way and both ways at once (scripts/netns-cluster, the suite stall)
  wire              steps in each form by turns (the suite wire)
  train, stall      a trainer, and the learner whose waits are measured (the suite stall, asynchronous)
  overlap           a learner that computes (it sleeps), contributes and opens the new weights (stall, synchronous)
  publish, await    weights that are published piece by piece, and read on another host (stall)
"""

import json
import math
import mmap
import os
import random
import socket
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.dont_write_bytecode = True

from tasks import main, say, task  # noqa: E402


def contribute(path, data):
    """All of it by write(2), and the fsync that says whether it was taken; closing says it once more."""
    file = os.open(path, os.O_WRONLY)
    try:
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
    finally:
        os.close(file)


def set_control(model, name, value):
    Path(model, "control", name).write_text(value)


def status(model):
    return json.loads(Path(model, "status.json").read_text())


# Steps of whole numbers: what they add up to is known to the last bit.


def parts(rank, step, count):
    """What learner `rank` contributes in its step: a number each, exact in whatever order they are added."""
    import numpy

    return ((numpy.arange(count) % 97 + 1) * (rank + 1) + step % 7).astype(numpy.float32)


@task(("model", Path), rank=0, steps=1, pause=0.0, stay=False)
def steps(options):
    """A learner that takes steps until --steps, or until a call fails: it says how long each took, and which failed."""
    import numpy

    directory = options.model / "learners" / f"learner{options.rank}"
    weights = numpy.empty((options.model / "weights").stat().st_size // 4, numpy.float32)
    directory.mkdir()
    taken, took, failed = 0, [], None
    print("joined", flush=True)
    try:
        for step in range(options.steps):
            gradient = parts(options.rank, step, len(weights))
            begun = time.monotonic()
            contribute(directory / "gradients", gradient)
            taken += 1
            with open(directory / "weights", "rb", buffering=0) as file:
                file.readinto(weights)
            took.append(time.monotonic() - begun)
            print(f"step {taken}", flush=True)
            time.sleep(options.pause)
    except OSError as error:
        failed = error.strerror
    if not options.stay and failed is None:
        directory.rmdir()
    say({"taken": taken, "seconds": took, "failed": failed})


@task(("model", Path), taken=[])
def total(options):
    """Whether the weights hold each of the given numbers of steps once: --taken has one for each learner."""
    import numpy

    weights = numpy.fromfile(options.model / "weights", numpy.float32)
    expected = numpy.zeros_like(weights)
    for rank, taken in enumerate(options.taken):
        for step in range(taken):
            expected += parts(rank, step, len(weights))
    version = int((options.model / "version").read_text())
    wrong = int((weights != expected).sum())
    say({"wrong": wrong, "version": version, "largest": float(numpy.abs(weights - expected).max())})


# Both ways at once: the server takes so many bytes, sends so many, or does both, and answers with one byte whatever it has
# taken all of.
SOCKETS_PORT, CHUNK = 7000, 64 << 10
PUSH, PULL, BOTH = b"<", b">", b"="


def _take(connection, size):
    buffer = bytearray(CHUNK)
    while size > 0:
        got = connection.recv_into(buffer, min(size, CHUNK))
        if not got:
            raise ConnectionError("the peer has ended the connection")
        size -= got


def _move(connection, data, sends, takes):
    """Sends `data`, takes as many bytes, or both at once."""
    sending = threading.Thread(target=connection.sendall, args=(data if sends else b"",))
    sending.start()
    _take(connection, len(data) if takes else 0)
    sending.join()


@task(("size", int))
def serve(options):
    data = bytes(options.size)
    with socket.create_server(("", SOCKETS_PORT)) as listener:
        print("ready", flush=True)
        connection, _ = listener.accept()
        with connection:
            while word := connection.recv(1):
                _move(connection, data, word != PUSH, word != PULL)
                connection.sendall(b".")


@task("host", ("size", int), ("rounds", int))
def ask(options):
    data, took = bytes(options.size), {"push": [], "pull": [], "both": []}
    with socket.create_connection((options.host, SOCKETS_PORT)) as connection:
        for _ in range(options.rounds):
            for name, word in (("push", PUSH), ("pull", PULL), ("both", BOTH)):
                begin = time.monotonic()
                connection.sendall(word)
                _move(connection, data, word != PULL, word != PUSH)
                _take(connection, 1)
                took[name].append(time.monotonic() - begin)
    say({name: statistics.median(times) for name, times in took.items()})


@task("model", ("rounds", int), "forms*")
def wire(options):
    """Medians of a push, a pull and a step of the whole model, by form."""
    import numpy

    model, found = options.model, {form: [] for form in options.forms}
    data = numpy.random.default_rng(1).standard_normal(os.path.getsize(f"{model}/weights") // 4, numpy.float32)
    for _ in range(options.rounds):
        for form in options.forms:
            set_control(model, "wire", form)
            # The first step takes memory.
            for counts in (False, True):
                begin = time.monotonic()
                contribute(f"{model}/gradients", data)
                pushed = time.monotonic()
                assert len(Path(model, "weights").read_bytes()) == data.nbytes
                if counts:
                    found[form].append((pushed - begin, time.monotonic() - pushed, time.monotonic() - begin))
            used = status(model)["shards"][0]["wire"]
            assert used == form, f"{used} in place of {form}"
    names = "push", "pull", "step"
    say({form: dict(zip(names, map(statistics.median, zip(*times)))) for form, times in found.items()})


# The asynchronous part of stall. Numbers that a contribution has, unless it has the whole model; all but the trainer's first
# are zero. So the first weight counts the trainer's contributions, and tells a version's age: line *n* of a file has the
# time of the *n*-th one.
FEW, INTERVAL = 1024, 0.04
SHORTEST, LONGEST, JITTER = 0.4, 0.8, 0.2


@task("model", "times")
def train(options):
    """Makes versions, until it is ended."""
    import numpy

    data = numpy.zeros(FEW, numpy.float32)
    data[0] = 1
    with open(options.times, "w", buffering=1) as file:
        print("trains", flush=True)
        while True:
            begin = time.monotonic()
            contribute(f"{options.model}/gradients", data)
            print(time.monotonic(), file=file)
            time.sleep(max(0.0, begin + INTERVAL - time.monotonic()))


def opened(model):
    """How many contributions of the trainer are in the newest version, and when it was open. All of it is read."""
    import numpy

    with open(f"{model}/weights", "rb", buffering=0) as file:
        have = time.monotonic()
        return int(numpy.fromfile(file, numpy.float32)[0]), have


@task("model", "times", "policy", ("steps", int), ("first", int), ("whole", int))
def stall(options):
    """A turn of some steps, of a `whole` in which compute times drift once to the longest and back."""
    model, policy, count = options.model, options.policy, options.steps
    set_control(model, "pull", {"after-push": "on-demand", "whole": "adaptive"}.get(policy, policy))
    data = bytes(os.path.getsize(f"{model}/weights") if policy == "whole" else 4 * FEW)
    # Weights that a thread opens at once, for the next step.
    pool = ThreadPoolExecutor(1) if policy == "after-push" else None
    rng, newest = random.Random(options.first), pool and pool.submit(opened, model)
    opens, stalled, begin, before = [], 0.0, None, 0
    # The first step follows another policy.
    for step in range(-1, count):
        if step == 0:
            begin, stalled, before = time.monotonic(), 0.0, status(model)["pull"]["pulls"]
        asked = time.monotonic()
        if newest:
            # Pulled while the last step was computed; the next one is pulled while this one is.
            number, have = newest.result()[0], time.monotonic()
            newest = pool.submit(opened, model)
        else:
            number, have = opened(model)
        drift = 0.5 - 0.5 * math.cos(math.tau * (options.first + step) / options.whole)
        time.sleep((SHORTEST + (LONGEST - SHORTEST) * drift) * rng.uniform(1 - JITTER, 1 + JITTER))
        computed = time.monotonic()
        contribute(f"{model}/gradients", data)
        # Reading what is open, and waking up late beside other programs, are no waits for the network.
        stalled += have - asked + time.monotonic() - computed
        if step >= 0:
            opens.append((have, number))
    took, pulled = time.monotonic() - begin, status(model)["pull"]["pulls"] - before
    if pool:
        pool.shutdown()
    made = [float(line) for line in Path(options.times).read_text().split("\n")[:-1]]
    ages = [have - made[number - 1] for have, number in opens]
    say({"age": sum(ages) / count, "stall": stalled / took, "pulls": pulled / count})


class Written:
    """Chunks by write(2). A step opens the file."""

    def __init__(self, learner, data):
        self.path, self.data = f"{learner}/gradients", data

    def begin(self):
        self.file = os.open(self.path, os.O_WRONLY)

    def chunk(self, start, end):
        os.pwrite(self.file, self.data[start:end], start)

    def end(self):
        os.fsync(self.file)
        os.close(self.file)


class Fallocate:
    """Chunks that are stored into the mapped file, and are final then."""

    def __init__(self, learner, data):
        self.data, self.file = data, os.open(f"{learner}/gradients", os.O_RDWR | os.O_DIRECT)
        self.memory = mmap.mmap(self.file, len(data))

    def begin(self):
        """It stays open."""

    def chunk(self, start, end):
        self.memory[start:end] = self.data[start:end]
        os.posix_fallocate(self.file, start, end - start)

    def end(self):
        os.fsync(self.file)


# The first steps fill buffers and are not measured.
WARM = 2


@task("learner", "way", ("size", int), ("chunks", int), ("compute", float), ("steps", int))
def overlap(options):
    """The seconds of each step, of which so many were spent computing, in handing equal chunks over (`write`), each after
    its share of `compute`, in fsync or close (`end`), and in open."""
    size, chunks, found = options.size, options.chunks, []
    way = {"written": Written, "fallocate": Fallocate}[options.way](options.learner, memoryview(bytes(size)))
    print("ready", flush=True)
    for _ in range(WARM + options.steps):
        began = time.monotonic()
        way.begin()
        computed = written = 0.0
        for chunk in range(chunks):
            begin = time.monotonic()
            time.sleep(options.compute / chunks)
            slept = time.monotonic()
            way.chunk(size * chunk // chunks, size * (chunk + 1) // chunks)
            computed, written = computed + slept - begin, written + time.monotonic() - slept
        begin = time.monotonic()
        way.end()
        ended = time.monotonic()
        os.close(os.open(f"{options.learner}/weights", os.O_RDONLY))
        over = time.monotonic()
        taken = {"step": over - began, "compute": computed, "write": written, "end": ended - begin, "open": over - ended}
        found.append(taken)
    say(found[WARM:])


@task("model", ("size", int), ("piece", int), ("pause", float), ("value", int))
def publish(options):
    """Writes bytes of a value to `publish`, piece by piece after a pause each; says when it began."""
    data, begin = bytes([options.value]) * options.piece, time.monotonic()
    file = os.open(f"{options.model}/publish", os.O_WRONLY)
    for _ in range(options.size // options.piece):
        time.sleep(options.pause)
        assert os.write(file, data) == len(data)
    os.close(file)
    say({"at": begin})


@task("model", ("version", int))
def await_(options):
    """Waits for a version, which has bytes of its number, and reads all of it; says when it had that."""
    print("waits", flush=True)
    while int(Path(options.model, "version").read_text()) < options.version:
        time.sleep(0.002)
    weights = Path(options.model, "weights").read_bytes()
    end = time.monotonic()
    assert set(weights) == {options.version}, "these are other weights"
    say({"at": end})


if __name__ == "__main__":
    main(__doc__)
