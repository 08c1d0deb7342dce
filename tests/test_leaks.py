"""Thousands of opens and closes, joins and leaves, reads and kills leave nothing behind."""

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
from patience import Limit

ONE = struct.pack("<f", 1.0)
BLOCK = 64 << 10


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


def small(start_mount, **options):
    return start_mount(**{"size": BLOCK, "block_size": "64KiB", "reducer": "sum", **options})


def cycle(path, flags, count, data=None):
    for _ in range(count):
        fd = os.open(path, flags)
        if data:
            os.write(fd, data)
        elif flags == os.O_RDONLY:
            os.read(fd, 16)
        os.close(fd)


FILES = ["weights", "weights.safetensors", "tensors/weights.npy", "version", "status.json", "control/learning_rate", "versions/1/weights"]


@pytest.mark.parametrize("way", ["passthrough", "no_passthrough"])
def test_opening_to_read_leaks_nothing(start_mount, way):
    mount = small(start_mount, no_passthrough=way == "no_passthrough")
    mount.contribute(ONE)
    for name in FILES:
        cycle(mount.model / name, os.O_RDONLY, 200)
    with Bounds(mount):
        for name in FILES:
            cycle(mount.model / name, os.O_RDONLY, times(10_000 if name in ("weights", "version") else 2_500))


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_DIRECT], ids=["write_only", "read_write", "memory"])
def test_opening_gradients_for_nothing_leaks_nothing(start_mount, flags):
    mount = small(start_mount)
    cycle(mount.model / "gradients", flags, 200)
    with Bounds(mount):
        cycle(mount.model / "gradients", flags, times(10_000))
        cycle(mount.model / "device", flags, times(2_000))
        assert mount.version() == 0


@pytest.mark.parametrize("way", ["passthrough", "no_passthrough"])
def test_contributions_leak_nothing(start_mount, way):
    mount = small(start_mount, no_passthrough=way == "no_passthrough")
    cycle(mount.model / "gradients", os.O_WRONLY, 200, ONE)
    with Bounds(mount):
        cycle(mount.model / "gradients", os.O_WRONLY, times(5_000), ONE)
        cycle(mount.model / "gradients", os.O_WRONLY, times(5_000), ONE * (BLOCK // 4))
    assert mount.version() == 201 + 2 * times(5_000)


@pytest.mark.parametrize("way", ["passthrough", "no_passthrough"])
def test_publications_leak_nothing(start_mount, way):
    """Opened for nothing, written, mapped and published, and mapped while others still are; looked up, too."""
    mount = small(start_mount, reducer="assign", no_passthrough=way == "no_passthrough")
    path = mount.model / "publish"

    def publish_mapped(count):
        for _ in range(count):
            fd = os.open(path, os.O_RDWR | os.O_DIRECT)
            with mmap.mmap(fd, BLOCK) as mapping:
                mapping[:] = ONE * (BLOCK // 4)
                os.fsync(fd)
            os.close(fd)

    def all_ways(count):
        for _ in range(count):
            os.stat(path)
        cycle(path, os.O_WRONLY, count)
        cycle(path, os.O_RDWR, count)
        cycle(path, os.O_WRONLY, count, ONE)
        publish_mapped(count)

    all_ways(100)
    with Bounds(mount):
        all_ways(times(1_500))


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
    limit = Limit(5)
    while maps() > 0 and not limit.over():
        time.sleep(0.02)
    assert maps() == 0


def test_refused_contributions_leak_nothing(start_mount):
    mount = small(start_mount)
    nan = struct.pack("<f", float("nan"))

    def refuse(data):
        fd = os.open(mount.model / "gradients", os.O_WRONLY)
        for call in (lambda: os.write(fd, data), lambda: os.close(fd)):
            try:
                call()
            except OSError:
                pass

    for data in (nan, nan * (BLOCK // 4), bytes(BLOCK + 4)):
        refuse(data)
    version = mount.version()
    with Bounds(mount):
        for _ in range(times(700)):
            for data in (nan, nan * (BLOCK // 4)):
                refuse(data)
        assert mount.version() == version


def test_settings_leak_nothing(start_mount):
    mount = small(start_mount)
    for i in range(100):
        mount.control("learning_rate", i)
    with Bounds(mount):
        for i in range(times(2_500)):
            mount.control("learning_rate", i)
            if i % 10 == 0:
                mount.control("reducer", ["sum", "adam", "momentum"][i // 10 % 3])
        mount.control("reducer", "sum")


def test_refused_calls_leak_nothing(start_mount):
    mount = small(start_mount)

    def wrong():
        for call in (
            lambda: os.open(mount.model / "gradients", os.O_RDONLY),
            lambda: os.open(mount.model / "weights.safetensors", os.O_WRONLY),
            lambda: os.open(mount.model / "none", os.O_RDONLY),
            lambda: os.open(mount.model / "new", os.O_CREAT | os.O_WRONLY),
            lambda: os.mkdir(mount.model / "x"),
            lambda: os.mkdir(mount.model / "learners/.x"),
            lambda: os.truncate(mount.model / "gradients", 5),
            lambda: os.stat(mount.model / "versions/777/weights"),
        ):
            with pytest.raises(OSError):
                call()

    for _ in range(50):
        wrong()
    with Bounds(mount):
        for _ in range(times(1_000)):
            wrong()


def test_versions_leak_nothing_while_readers_come_and_go(start_mount):
    """Readers hold a version for a moment in every way there is."""
    import mmap

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
    mount = small(start_mount, timeout=1)
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


def test_readers_of_tensors_never_meet_estale(start_mount):
    mount = small(start_mount, max_versions=64)
    stop, failures = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                (mount.model / "tensors/weights.npy").read_bytes()
            except OSError as error:
                failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(40):
            mount.contribute(ONE)
    finally:
        stop.set()
        for reader in readers:
            reader.join(300)
    assert not failures, failures[:3]


def test_versions_held_to_the_limit_are_given_back(start_mount):
    mount = small(start_mount, max_versions=6, timeout=0.3)
    for _ in range(3):
        held = []
        with pytest.raises(TimeoutError):
            for _ in range(16):
                held.append(os.open(mount.model / "weights", os.O_RDONLY))
                mount.contribute(ONE)
        assert "max_versions" in mount.stderr()
        for fd in held:
            os.close(fd)
        mount.control("timeout", 10)
        version = mount.version()
        for _ in range(20):
            mount.contribute(ONE)
        assert mount.version() >= version + 20
        assert mount.status()["version_buffers"]["existing"] <= 6
        mount.control("timeout", 0.3)


def learn(mount, name, data=ONE):
    mount.join(name)
    mount.contribute(data, learner=name)
    (mount.place(name) / "status").read_text()
    mount.weights(learner=name)
    mount.leave(name)


@pytest.mark.parametrize("names", ["one_name", "many_names"])
def test_learners_that_join_and_leave_leak_nothing(start_mount, names):
    """One process plays all of them, as a launcher does."""
    mount = small(start_mount)
    for i in range(20):
        learn(mount, "a")
    with Bounds(mount):
        for i in range(times(500)):
            learn(mount, "a" if names == "one_name" else f"a{i}")
    assert os.listdir(mount.model / "learners") == ["mount"]


def test_learners_that_map_their_gradients_leak_nothing(start_mount):
    import mmap

    mount = small(start_mount)

    def once():
        mount.join("a")
        fd = os.open(mount.place("a") / "gradients", os.O_RDWR | os.O_DIRECT)
        with mmap.mmap(fd, BLOCK) as memory:
            memory[:4] = ONE
            os.fsync(fd)
        os.close(fd)
        mount.leave("a")

    for _ in range(20):
        once()
    with Bounds(mount):
        for _ in range(200):
            once()


def test_polling_leaks_nothing(start_mount):
    mount = small(start_mount)

    def once(i):
        fd = os.open(mount.model / "version", os.O_RDONLY)
        os.read(fd, 16)
        poller = select.poll()
        poller.register(fd, select.POLLIN | select.POLLPRI)
        assert poller.poll(0) == []
        if i % 10 == 0:
            mount.contribute(ONE)
            assert poller.poll(5_000) != []
        os.close(fd)

    for i in range(20):
        once(i)
    with Bounds(mount):
        for i in range(times(1_000)):
            once(i)
        mount.contribute(ONE)


def test_polling_without_a_new_version_leaks_nothing(start_mount):
    """Nothing is published: what the pollers left behind must stay bounded."""
    mount = small(start_mount)
    fd = os.open(mount.model / "version", os.O_RDONLY)
    os.read(fd, 16)
    with Bounds(mount):
        for _ in range(times(6_000)):
            poller = select.poll()
            poller.register(fd, select.POLLIN | select.POLLPRI)
            assert poller.poll(0) == []
    os.close(fd)


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
        deadline = time.monotonic() + 300
        while os.listdir(mount.model / "learners"):
            assert time.monotonic() < deadline, "a killed learner is still in the job"
            time.sleep(0.02)


def test_processes_that_come_and_go_are_not_watched_for_ever(start_mount):
    mount = small(start_mount)
    command = ["dd", "if=/dev/zero", f"of={mount.model}/gradients", "bs=64k", "count=1", "conv=notrunc", "status=none"]
    for _ in range(5):
        subprocess.run(command, check=True, timeout=300)
    with Bounds(mount):
        for _ in range(100):
            subprocess.run(command, check=True, timeout=300)
    assert mount.version() == 106


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
    mine = [path for path in locks() - before if path.read_text().strip() in pids]
    assert not mine, f"lock files of ended daemons: {mine}"
