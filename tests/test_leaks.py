"""Thousands of opens and closes, joins and leaves, reads and kills leave nothing behind."""

import contextlib
import itertools
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filetools import BLOCK, eventually, opened, outcome, ship_mapped
from patience import Limit
from refusals import ONE, small


def usage(mount):
    """The daemon's descriptors, threads and memory (bytes), and the versions in its status."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{mount.pid}/status").read_text().splitlines() if ":" in line
    )
    kib = {name: int(status[name].split()[0]) << 10 for name in ("VmRSS", "VmSize")}
    shown = mount.status()
    return {
        "fds": len(os.listdir(f"/proc/{mount.pid}/fd")),
        "threads": int(status["Threads"]),
        "maps": len(Path(f"/proc/{mount.pid}/maps").read_text().splitlines()),
        "rss": kib["VmRSS"],
        "buffers": shown["version_buffers"]["existing"],
        "versions": len(shown["versions_in_memory"]),
        **{name: shown[name] for name in ("open_files", "watched_processes", "pollers") if name in shown},
    }


def times(count):
    """How often a thing is done: a quarter of it, unless scripts/test --long asks for all."""
    return count if os.environ.get("GRADFS_TEST_LONG") else count // 4


def settle(mount, most, deadline=5):
    """The daemon's usage once it is at most `most`, or its usage at the deadline."""
    limit = Limit(deadline)
    while True:
        now = usage(mount)
        if all(now[name] <= bound for name, bound in most.items()) or limit.over():
            return now
        time.sleep(0.05)


class Bounds:
    """No leak: after the body the daemon holds no more than before, but for `rss` bytes and `slack` of the rest:
    spare buffers, worker threads and the allocator's arenas come when they are first needed."""

    def __init__(self, mount, rss=4 << 20, slack=8, **extra):
        self.mount, self.rss, self.slack, self.extra = mount, rss, slack, extra

    def __enter__(self):
        self.before = usage(self.mount)

    def __exit__(self, kind, *_):
        if kind is not None:
            return
        self.extra.setdefault("maps", 4 * self.slack)
        most = {name: value + self.extra.get(name, self.slack) for name, value in self.before.items()}
        most["rss"] = self.before["rss"] + self.rss
        after = settle(self.mount, most)
        grown = {name: (self.before[name], after[name]) for name in most if after[name] > most[name]}
        assert not grown, f"before, after: {grown}"
        assert self.mount.running() and "panicked" not in self.mount.stderr()
        version = self.mount.version()
        self.mount.contribute(ONE)
        assert self.mount.wait_for_version(version + 1) == version + 1


def opens(path, *flags, data=None):
    for flag in flags:
        fd = os.open(path, flag)
        if data:
            os.write(fd, data)
        elif flag == os.O_RDONLY:
            os.read(fd, 16)
        os.close(fd)


FILES = ["weights", "weights.safetensors", "tensors/weights.npy", "version", "status.json", "control/learning_rate", "versions/0/weights"]


def reads(mount, _):
    for name in FILES:
        opens(mount.model / name, os.O_RDONLY)


def reads_through_the_daemon(mount, number):
    reads(mount, number)


def opens_for_nothing(mount, _):
    opens(mount.model / "gradients", os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_DIRECT)
    opens(mount.model / "device", os.O_WRONLY)
    assert mount.version() == 0


def contributes(mount, number):
    mount.contribute(ONE * (1 if number % 2 else BLOCK // 4))


def publishes(mount, _):
    """Opened for nothing, written, mapped and published, and looked up, too."""
    path = mount.model / "publish"
    os.stat(path)
    opens(path, os.O_WRONLY, os.O_RDWR)
    opens(path, os.O_WRONLY, data=ONE)
    with opened(path, os.O_RDWR | os.O_DIRECT) as fd, mmap.mmap(fd, BLOCK) as mapping:
        mapping[:] = ONE * (BLOCK // 4)
        os.fsync(fd)


def is_refused(mount, _):
    nan = struct.pack("<f", float("nan"))
    for data in (nan, nan * (BLOCK // 4), bytes(BLOCK + 4)):
        fd = os.open(mount.model / "gradients", os.O_WRONLY)
        for call in (lambda: os.write(fd, data), lambda: os.close(fd)):
            outcome(call)
    for call in (
        lambda: os.open(mount.model / "gradients", os.O_RDONLY), lambda: os.open(mount.model / "none", os.O_RDONLY),
        lambda: os.open(mount.model / "weights.safetensors", os.O_WRONLY), lambda: os.mkdir(mount.model / "learners/.x"),
        lambda: os.open(mount.model / "new", os.O_CREAT | os.O_WRONLY), lambda: os.mkdir(mount.model / "x"),
        lambda: os.truncate(mount.model / "gradients", 5), lambda: os.stat(mount.model / "versions/777/weights"),
    ):  # fmt: skip
        with pytest.raises(OSError):
            call()
    assert mount.version() == 0


def sets(mount, number):
    mount.control("learning_rate", number)
    if number % 10 == 0:
        mount.control("reducer", ["sum", "adam", "momentum"][number // 10 % 3])
    mount.control("reducer", "sum")


def learns(mount, number):
    """One process plays all learners, as a launcher does."""
    for name in ("a", f"a{number}"):
        place = mount.join(name)
        mount.contribute(ONE, learner=name)
        (place / "status").read_text()
        mount.weights(learner=name)
        ship_mapped(place, ONE * (BLOCK // 4))
        mount.leave(name)


def polls(mount, number):
    with opened(mount.model / "version", os.O_RDONLY) as fd:
        os.read(fd, 16)
        poller = select.poll()
        poller.register(fd, select.POLLIN | select.POLLPRI)
        assert poller.poll(0) == []
        # For a while nothing is published: what pollers leave behind must stay bounded.
        if number > 900 and number % 10 == 0:
            mount.contribute(ONE)
            assert poller.poll(5_000) != []


def runs_dd(mount, _):
    command = ["dd", "if=/dev/zero", f"of={mount.model}/gradients", "bs=64k", "count=1", "conv=notrunc", "status=none"]
    subprocess.run(command, check=True, timeout=300)


OFTEN = {
    reads: 3_000, reads_through_the_daemon: 1_000, opens_for_nothing: 2_500, contributes: 8_000, publishes: 1_500, is_refused: 1_000, sets: 2_500, learns: 400,
    polls: 4_000, runs_dd: 300,
}  # fmt: skip


@pytest.mark.parametrize("act", OFTEN, ids=lambda act: act.__name__)
def test_nothing_is_left_behind_of_whoever(start_mount, act):
    reducer, through = "assign" if act is publishes else "sum", act is reads_through_the_daemon
    mount = small(start_mount, reducer=reducer, no_passthrough=through, size=BLOCK)
    for number in range(20):
        act(mount, number)
    with Bounds(mount):
        for number in range(times(OFTEN[act])):
            act(mount, number)
    assert set(os.listdir(mount.model / "learners")) <= {mount.own()}


def test_the_memory_of_a_mapped_publication_goes_with_its_file(start_mount):
    mount = start_mount(size="64MiB", reducer="assign")

    def maps():
        return Path(f"/proc/{mount.pid}/maps").read_text().count("gradfs-publish")

    assert maps() == 0
    fds = [os.open(mount.model / "publish", os.O_RDWR | os.O_DIRECT) for _ in range(3)]
    for fd in fds:
        with mmap.mmap(fd, 64 << 20) as mapping:
            mapping[:4] = ONE
            os.fsync(fd)
    assert maps() == 3
    for fd in fds:
        os.close(fd)
    eventually(lambda: maps() == 0)


def test_versions_leak_nothing_while_readers_come_and_go(start_mount):
    """Readers hold a version for a moment in every way there is."""
    mount = small(start_mount, size=4 * BLOCK, retain=2)
    stop, failures = threading.Event(), []

    def read(name, mapped):
        while not stop.is_set():
            try:
                fd = os.open(mount.model / name, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                if mapped:
                    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
                        first, last = memory[-4 * BLOCK:-4 * BLOCK + 4], memory[-4:]
                else:
                    size = os.fstat(fd).st_size
                    first, last = os.pread(fd, 4, size - 4 * BLOCK), os.pread(fd, 4, size - 4)
                if first != last:
                    failures.append((name, first, last))
            except BaseException as error:
                failures.append((name, error))
            finally:
                os.close(fd)

    readers = [
        threading.Thread(target=read, args=args)
        for args in [("weights", False), ("weights", True), ("weights.safetensors", False), ("tensors/weights.npy", True)]
    ]
    full = ONE * BLOCK
    for _ in range(50):
        mount.contribute(full)
    # A reader that gets no turn holds its version while many others are made: there come as many buffers as there may
    # be, and stay, each with a descriptor.
    room = 16 - mount.status()["version_buffers"]["existing"]
    with Bounds(mount, rss=8 << 20, buffers=room, fds=8 + room):
        for reader in readers:
            reader.start()
        for _ in range(times(2_000)):
            mount.contribute(full)
        stop.set()
        for reader in readers:
            reader.join(300)
        assert not failures, failures[:3]
        assert mount.version() == 50 + times(2_000)
        # The kernel keeps names of old versions until the daemon has it drop them.
        mount.contribute(full)
        most = {"versions": 3 + 2}
        assert settle(mount, most)["versions"] <= most["versions"], mount.status()["versions_in_memory"]
    assert mount.status()["version_buffers"]["existing"] <= 16


@pytest.mark.parametrize("where", ["tensors", "versions"])
def test_a_tensor_that_was_open_while_a_version_came_frees_its_own(start_mount, where):
    """A reader that is one version behind each time: nothing is open at the end of a step."""
    mount = small(start_mount, size=BLOCK, timeout=1)
    for step in range(60):
        place = mount.model / "tensors" if where == "tensors" else mount.model / "versions" / str(step) / "tensors"
        fd = os.open(place / "weights.npy", os.O_RDONLY)
        try:
            mount.contribute(ONE)
        except OSError as error:
            os.close(fd)
            pytest.fail(f"step {step}: {error}; in memory: {mount.status()['versions_in_memory']}\n{mount.stderr()[-300:]}")
        os.close(fd)
    assert mount.version() == 60
    assert settle(mount, {"versions": 3})["versions"] <= 3


VICTIM = """
import mmap, os, sys
model = sys.argv[1]
w = os.open(model + '/weights', os.O_RDONLY); m = mmap.mmap(w, 0, prot=mmap.PROT_READ)
s = os.open(model + '/status.json', os.O_RDONLY); v = os.open(model + '/version', os.O_RDONLY)
g = os.open(model + '/gradients', os.O_RDWR | os.O_DIRECT); n = mmap.mmap(g, 0); n[:4] = b'abcd'
os.pwrite(g, b'\\0\\0\\x80\\x3f' * int(sys.argv[2]), 0)
print('ready', flush=True)
while True: os.pread(s, 4096, 0); os.pread(w, 4096, 0); m[:4]
"""


def test_killed_readers_and_writers_leak_nothing(start_mount):
    mount = small(start_mount, size=2 * BLOCK)

    turns = itertools.count()

    def kill(count):
        victims = [
            subprocess.Popen(
                [sys.executable, "-S", "-c", VICTIM, mount.model, str([10, BLOCK // 4][next(turns) % 2])], stdout=subprocess.PIPE
            )
            for _ in range(count)
        ]
        for victim in victims:
            assert victim.stdout.readline() == b"ready\n"
            victim.send_signal(signal.SIGKILL)
        for victim in victims:
            victim.wait(300)
            victim.stdout.close()

    kill(1)
    time.sleep(1)
    with Bounds(mount):
        for _ in range(50):
            kill(1)
        assert mount.version() == 0
        eventually(lambda: not os.listdir(mount.model / "learners"))


def test_mounting_again_and_again_leaves_nothing(tmp_path, gradfs):
    """No lock files, no directories, no mounts."""
    from conftest import Mount

    places = [Path("/run/gradfs"), Path(f"/tmp/gradfs-{os.geteuid()}")]

    def locks():
        return {path for place in places if place.is_dir() for path in place.iterdir()}

    before = locks()
    roots, pids = set(), set()
    for _ in range(5):
        mount = Mount(size=BLOCK, block_size="64KiB", reducer="sum")
        roots.add(str(mount.root))
        pids.add(str(mount.pid))
        assert mount.stop() == 0
        mount.clean_up()
    table = Path("/proc/self/mountinfo").read_text()
    assert not [root for root in roots if root in table]
    # Other tests kill theirs meanwhile.
    mine = []
    for path in locks() - before:
        with contextlib.suppress(FileNotFoundError):
            mine += [path] if path.read_text().strip() in pids else []
    assert not mine, f"lock files of ended daemons: {mine}"
