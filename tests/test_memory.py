"""What models take of memory: the accounts in `status.json`, and what is given back."""

import subprocess
import sys
import time

import pytest
from conftest import REPOSITORY, gradfs_binary

# At the end: what the tests call by the same name is theirs.
sys.path.append(str(REPOSITORY / "scripts/lib"))

import memory_group  # noqa: E402

MIB = 1 << 20
SIZE = 128 * MIB
ACCOUNTS = {"versions", "state", "sums", "staging", "connections"}


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
            command = [sys.executable, "-S", REPOSITORY / "scripts/lib/memory_work.py", directory]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.processes.append(process)
            group.add(process.pid)
        self.answers()

    def answers(self):
        assert all(process.stdout.readline() for process in self.processes)

    def step(self, how):
        for process in self.processes:
            process.stdin.write(f"{how}\n")
            process.stdin.flush()
        self.answers()

    def anonymous_bytes(self):
        return sum(memory_group.anonymous_bytes(process.pid) for process in self.processes)

    def end(self):
        for process in self.processes:
            process.stdin.close()
            process.wait(20)


@pytest.fixture
def learners():
    """Call it as Learners(...)."""
    started = []
    yield lambda *args: started.append(Learners(*args)) or started[-1]
    for one in started:
        one.end()


def settled(mount, group, learners):
    """The accounts, and what the kernel says, once they no longer change: threads take and give back memory."""
    before, end = None, time.monotonic() + 10
    while True:
        now = mount.status()["memory"], group.bytes() - learners.anonymous_bytes()
        if now == before or time.monotonic() > end:
            return now
        before = now
        time.sleep(0.2)


@pytest.mark.parametrize(
    "where, reducer, count", [("up", "sum", 1), ("up", "adam", 2), ("tcp", "sum", 1), ("tcp", "sum", 2), ("shm", "sum", 1)]
)
def test_the_accounts_of_memory_add_up_to_what_the_kernel_says(group, start_mount, cluster, learners, where, reducer, count):
    options = {"size": SIZE, "reducer": reducer, "learners": count}
    if where == "up":
        group = group()
        mount = start_mount(**options)
    else:
        one = cluster(1)
        one.create("m", **options)
        group = group()
        mount = one.mount(transport=where)
    learners = learners(mount, group, count)
    for how in ("written", "written", "mapped"):
        learners.step(how)
    accounts, taken = settled(mount, group, learners)
    assert set(accounts) == ACCOUNTS
    # What a daemon has besides is of no model: tables, and stacks and heaps of its threads.
    assert sum(accounts.values()) == pytest.approx(taken, rel=0.05), (accounts, taken / MIB)
    assert (accounts["state"] > 0) == (reducer == "adam")
