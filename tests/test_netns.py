"""Training over a network: hosts of network namespaces (scripts/netns-cluster), delay, loss, and partitions.

Skipped with the reason where such hosts are not permitted.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import REPOSITORY, gradfs_binary, ran
from patience import HANGS

# At the end: what the tests call by the same name is theirs.
sys.path.append(str(REPOSITORY / "scripts/lib"))

from machine import CannotBeHad  # noqa: E402
from netns import Cluster, Hosts, Link, require_permission  # noqa: E402

SCRIPT = REPOSITORY / "scripts/netns-cluster"
NOT_PERMITTED = 77
SIZE = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def permitted():
    try:
        require_permission()
    except CannotBeHad as why:
        pytest.skip(str(why))


@pytest.fixture
def cluster():
    """Starts hosts with a shard each and hosts with a mount each, and a model that is the sum of its contributions."""
    made = []

    def start(shards, learners, link=Link(), mounts=True, **options):
        names = [f"shard{i}" for i in range(shards)], [f"learner{i}" for i in range(learners)]
        hosts = Hosts([*names[0], *names[1]], link)
        made.append(hosts)
        hosts.__enter__()
        settings = {"size": SIZE, "reducer": "sum", "learners": learners, **options}
        create = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        return Cluster.of(hosts, gradfs_binary(), *create, shards=shards, mounts=names[1] if mounts else ())

    yield start
    for hosts in made:
        hosts.close()


def start_learner(cluster, rank, steps, *options):
    """A learner on the host of its number, that takes `steps` steps of known numbers."""
    host = f"learner{rank}"
    words = ["--rank", rank, "--steps", steps, *options]
    return cluster.hosts.work(host, "hosts.py", "steps", cluster.model(host), *words)


def outcome(cluster, *taken):
    """What differs from the sum of so many steps of each learner, and the version, seen on the first learner's host."""
    words = ["total", cluster.model("learner0"), "--taken", *taken]
    return cluster.hosts.work("learner0", "hosts.py", *words).found(HANGS)


def steps_said(learner):
    return learner.said().count("step ")


def wait_until(condition, what, deadline=HANGS):
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"not within {deadline} s: {what}"
        time.sleep(0.02)


def namespaces(pid):
    """The remains of hosts that a process has made."""
    return [path.name for path in Path("/run/netns").glob(f"gradfs-{pid}-*")]


def environment():
    return {**os.environ, "GRADFS_BIN": str(gradfs_binary())}


def test_training_over_delay_and_loss_equals_one_process():
    """The digits: two learners and two shards on hosts of their own, 1 ms and 0.1% loss each way."""
    command = [SCRIPT, "demo", "--delay", "1ms", "--loss", "0.1%", "--epochs", "5", "--deadline", str(HANGS)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=2 * HANGS, check=False)
    if done.returncode == NOT_PERMITTED:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check passed" in done.stdout and "1 ms, 0.1% loss" in done.stderr
    accuracy = float(re.search(r"test accuracy ([0-9.]+)$", done.stdout, re.MULTILINE)[1])
    assert accuracy >= 0.96


def test_many_learners_take_many_steps(cluster):
    """More connections than a shard has version buffers, each of which has pulled another version last."""
    four = cluster(1, 4, size=9 * (256 << 10) + 4)
    learners = [start_learner(four, rank, 60) for rank in range(4)]
    assert [learner.found(HANGS)["taken"] for learner in learners] == [60] * 4
    assert outcome(four, 60, 60, 60, 60) == {"wrong": 0, "version": 60, "largest": 0}


def test_a_partition_longer_than_the_lease_makes_the_others_go_on(cluster):
    """Acknowledged contributions of the mount that is cut off count once; others count once or not at all."""
    two = cluster(2, 2, lease=5, timeout=200)
    learners = [start_learner(two, rank, 40, "--pause", "0.02") for rank in range(2)]
    wait_until(lambda: steps_said(learners[1]) >= 5, "five steps")
    two.hosts.set_port("learner1", "down")
    begun = time.monotonic()
    other = learners[0].found(HANGS)
    assert (other["taken"], other["failed"]) == (40, None)
    assert time.monotonic() - begun > 3, "it waited for the lease"
    two.hosts.set_port("learner1", "up")
    cut_off = learners[1].found(HANGS)
    assert cut_off["failed"] and 5 <= cut_off["taken"] < 40, cut_off
    ends = [outcome(two, 40, taken) for taken in (cut_off["taken"], cut_off["taken"] + 1)]
    assert [end["wrong"] for end in ends].count(0) == 1, ends


def test_a_mount_waits_for_its_first_version_as_long_as_some_of_it_comes(cluster):
    patience = 10
    one = cluster(1, 1, mounts=False, size=32 << 20)
    one.hosts.limit(20e6)
    begun = time.monotonic()
    one.mount("learner0")
    assert time.monotonic() - begun > patience, "that link was no slow one"
    assert outcome(one, 0) == {"wrong": 0, "version": 0, "largest": 0}


def test_what_has_changed_is_compressed_where_the_link_is_behind(cluster, tmp_path):
    size, share, file = 16 << 20, 0.1, tmp_path / "weights"
    two = cluster(1, 2, size=size, dtype="bf16", reducer="assign", timeout=200)
    two.hosts.limit(50e6)
    values = np.random.default_rng(0).normal(0, 0.02, size // 2).astype(ml_dtypes.bfloat16).view("u2")

    def publish(version):
        values.tofile(file)
        before = two.hosts.sent("learner0")
        reader = two.hosts.work("learner1", "sync.py", "read", two.model("learner1"), version, file)
        reader.wait_for("waits")
        two.hosts.work("learner0", "sync.py", "publish", two.model("learner0"), file).found(HANGS)
        # It has compared all bytes.
        reader.found(HANGS)
        return two.hosts.sent("learner0") - before

    first = publish(1)
    assert first >= size, first / size
    sent = []
    for version in range(2, 6):
        changed = np.random.default_rng(version).permutation(len(values))[: int(share * len(values))]
        values[changed] ^= 1
        # Each goes as the gap before it and its value.
        sent.append(publish(version) / (3 * len(changed)))
    assert 0.4 < min(sent) < 0.85, sent


def test_hosts_are_gone_when_it_is_interrupted(tmp_path):
    """Namespaces, programs on the hosts, and files."""
    with open(tmp_path / "said", "w+") as said:
        env = {**environment(), "TMPDIR": str(tmp_path)}
        process = subprocess.Popen([SCRIPT, "up", "--delay", "1ms"], stdout=said, stderr=subprocess.STDOUT, env=env)
        try:
            wait_until(
                lambda: "Ctrl-C ends it" in (tmp_path / "said").read_text() or process.poll() is not None, "hosts"
            )
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert len(namespaces(process.pid)) == 5
            inside = re.findall(r"nsenter --target (\d+)", (tmp_path / "said").read_text())
            assert len(inside) == 4
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 130
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(300)
    assert namespaces(process.pid) == []
    assert not [pid for pid in inside if Path(f"/proc/{pid}").exists()]
    assert [path.name for path in tmp_path.iterdir()] == ["said"]


def test_a_command_runs_on_a_host_and_its_status_is_kept():
    command = [SCRIPT, "run", "--shards", "1", "--learners", "1", "--size", "64KiB", "--", "sh", "-c"]
    script = "cat $MODEL/version; hostname=$(cat /proc/sys/kernel/hostname); echo $hostname; exit 7"
    done = ran([*command, script], env=environment())
    assert (done.returncode, done.stdout) == (7, "0\nlearner1\n"), done.stderr


@pytest.mark.parametrize("option", ["--delay=5parsecs", "--loss=100%", "--shards=0"])
def test_nonsense_is_refused(option):
    done = ran([SCRIPT, "demo", option])
    assert done.returncode == 2 and option.split("=")[0] in done.stderr, done
