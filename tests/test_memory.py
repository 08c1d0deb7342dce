"""What models take of memory: the accounts in `status.json`, and what is given back."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import REPOSITORY, gradfs_binary, write_all
from filetools import BLOCK, close, eventually, ship_mapped
from patience import Limit

# At the end: what the tests call by the same name is theirs.
sys.path.append(str(REPOSITORY / "scripts/lib"))

import memory_group  # noqa: E402

MIB = 1 << 20
SIZE = 128 * MIB
ACCOUNTS = {"versions", "state", "sums", "residuals", "staging", "connections", "views"}


@pytest.fixture
def group(monkeypatch, tmp_path):
    """The memory of all daemons that are started from when this is called."""
    with memory_group.group("test") as group:

        def begin():
            monkeypatch.setenv("GRADFS_BIN", str(group.starts(tmp_path / "gradfs-in-group", gradfs_binary())))
            return group

        yield begin


class Learners:
    """Processes of the group that contribute ones."""

    def __init__(self, mount, group, count):
        self.processes = []
        for number in range(count):
            directory = mount.model / "learners" / f"l{number}"
            directory.mkdir()
            command = [sys.executable, REPOSITORY / "scripts/lib/work/learner.py", directory]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.processes.append(process)
            group.add(process.pid)
        self.answers()

    def answers(self):
        assert all(process.stdout.readline() for process in self.processes)

    def step(self, how):
        for line in (f"set_way {how}", "prepare", "round step"):
            for process in self.processes:
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
            self.answers()

    def anonymous_bytes(self):
        return sum(memory_group.anonymous_bytes(process.pid) for process in self.processes)

    def end(self):
        for process in self.processes:
            process.stdin.close()
            process.wait(300)


@pytest.fixture
def learners():
    """Call it as Learners(...)."""
    started = []
    yield lambda *args: started.append(Learners(*args)) or started[-1]
    for one in started:
        one.end()


def settled(mount, group, learners):
    """The accounts, and what the kernel says, once they no longer change: threads take and give back memory."""
    before, limit = None, Limit(10)
    while True:
        now = mount.status()["memory"], group.bytes() - learners.anonymous_bytes()
        if now == before or limit.over():
            return now
        before = now
        time.sleep(0.2)


@pytest.mark.parametrize(
    "where, reducer, count",
    [("up", "sum", 1), ("up", "adam", 2), ("tcp", "sum", 1), ("tcp", "sum", 2), ("shm", "sum", 1), ("int8", "sum", 1)],
)
def test_the_accounts_of_memory_add_up_to_what_the_kernel_says(group, start_mount, cluster, learners, where, reducer, count):
    options = {"size": SIZE, "reducer": reducer, "learners": count}
    if where == "up":
        group = group()
        mount = start_mount(**options)
    else:
        one = cluster(1, **options, wire="int8" if where == "int8" else "full")
        group = group()
        mount = one.mount(transport="tcp" if where == "int8" else where)
    learners = learners(mount, group, count)
    for how in ("written", "written", "mapped"):
        learners.step(how)
    accounts, taken = settled(mount, group, learners)
    assert set(accounts) == ACCOUNTS
    # What a daemon has besides is of no model: tables, and stacks and heaps of its threads.
    assert sum(accounts.values()) == pytest.approx(taken, rel=0.05), (accounts, taken / MIB)
    assert (accounts["state"] > 0) == (reducer == "adam")
    assert accounts["residuals"] == (2 * SIZE if where == "int8" else 0)


def contribute(directory, size):
    write_all(directory / "gradients", bytes(size))


@pytest.mark.parametrize("where", ["up", "tcp", "shm"])
def test_a_buffer_that_a_reader_made_necessary_goes_when_versions_do_without_it(start_mount, cluster, where):
    size = MIB
    options = {"size": size, "block_size": BLOCK, "reducer": "sum"}
    if where == "up":
        mount = start_mount(**options)
        versions = lambda: mount.status()["memory"]["versions"]  # noqa: E731
    else:
        one = cluster(1, **options)
        mount = one.mount(transport=where)
        versions = lambda: one.partition(one.shards[0], "m")["memory"]["versions"]  # noqa: E731
    directory = mount.model / "learners" / "a"
    directory.mkdir()
    held = [os.open(mount.model / "weights", os.O_RDONLY)]
    for version in range(1, 4):
        contribute(directory, size)
        assert mount.wait_for_version(version) == version
        held.append(os.open(mount.model / "weights", os.O_RDONLY))
    if where != "tcp":  # The mount shows what the shard has, and its readers hold that.
        assert versions() >= 4 * size
    close(*held)
    for version in range(4, 14):
        contribute(directory, size)
        assert mount.wait_for_version(version) == version
    eventually(lambda: versions() <= 3 * size)
    assert mount.status()["memory"]["versions"] <= 3 * size


def test_a_learners_staging_goes_with_it_and_when_it_maps(start_mount):
    size = MIB
    mount = start_mount(size=size, block_size=BLOCK, reducer="sum", learners=2)
    one, other = (mount.model / "learners" / name for name in "ab")
    one.mkdir(), other.mkdir()
    staging = lambda: mount.status()["memory"]["staging"]  # noqa: E731

    def both(of_one, of_other):
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(of_one, one), pool.submit(of_other, other)]:
                done.result()

    def writes(directory):
        contribute(directory, size)

    def maps(directory):
        ship_mapped(directory, bytes(size))

    assert staging() == 0, "nobody has contributed"
    both(writes, writes)
    eventually(lambda: staging() == 2 * size)
    both(maps, writes)
    assert staging() == 3 * size, "it may go on writing"
    both(maps, writes)
    eventually(lambda: staging() == 2 * size)
    other.rmdir()
    eventually(lambda: staging() == size)
    one.rmdir()
    eventually(lambda: staging() == 0)
