"""`gradfs trace`: a timeline of learners, plans, blocks and versions, as docs/operate/metrics.md promises."""

import errno
import json
import os
import re
import signal
import subprocess
import time

import pytest
from conftest import gradfs_binary
from filetools import BLOCK, Threads, array, eventually, fails, filled

SIZE = 8 * BLOCK
PAUSE = 0.05


def tracing(mount, path, seconds):
    """`gradfs trace`, begun."""
    command = [gradfs_binary(), "trace", mount.root, "--seconds", str(seconds), "-o", path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # It is made once the trace has begun.
    eventually(lambda: list(path.parent.glob(f"{path.name}.part-{process.pid}")))
    return process


def traced(process, path, status=0):
    """What it has written."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == status, err
    assert re.fullmatch(r"gradfs: traced \S+ for \d+\.\d s: \S+, \d+ bytes; open it in \S+\n", out), out
    document = json.loads(path.read_text())
    assert not list(path.parent.glob("*.part*"))
    return document


class Timeline:
    """The slices of a document, by process and thread; that they nest and have no negative length is checked."""

    def __init__(self, document):
        names, self.threads, self.instants, self.models = {}, {}, [], set()
        for event in document["traceEvents"]:
            if event["ph"] == "M" and event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = event["args"]["name"]
            elif event["ph"] == "M" and event["name"] == "process_name":
                self.models.add(event["args"]["name"])
        for event in document["traceEvents"]:
            assert event["ph"] in "MXi", event
            if event["ph"] == "i":
                self.instants.append(event)
            if event["ph"] != "X":
                continue
            assert event["ts"] >= 0 and event["dur"] >= 0, event
            assert event["ts"] + event["dur"] <= document["otherData"]["seconds"] * 1e6 + 1000, event
            self.threads.setdefault(names[event["pid"], event["tid"]], []).append(event)
        for name, slices in self.threads.items():
            around = []
            for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
                # Rounding of what is exact to the nanosecond.
                around = [end for end in around if end > one["ts"] + 0.0005]
                assert all(one["ts"] + one["dur"] <= end + 0.0005 for end in around), (name, one)
                around.append(one["ts"] + one["dur"])

    def of(self, thread, name=""):
        """The slices of a thread, and of further ones of that name, whose names begin so."""
        of_thread = [slices for one, slices in self.threads.items() if re.fullmatch(rf"{thread}( \(\d+\))?", one)]
        return [one for slices in of_thread for one in slices if one["name"].startswith(name)]

    def seconds(self, thread, name):
        return sum(one["dur"] for one in self.of(thread, name)) / 1e6


def train(mount, steps):
    """Two learners, one of which computes for longer."""

    def learn(name, pause):
        for _ in range(steps):
            time.sleep(pause)
            mount.contribute(filled(mount, 1), learner=name)
            array(mount.place(name) / "weights")

    Threads().run(lambda: learn("fast", 0), lambda: learn("slow", PAUSE))


def of_training(document, steps, shards, network):
    """Holds a trace to what has been trained while it ran."""
    seen = Timeline(document)
    assert document["otherData"]["lost_events"] == 0
    for name in ("fast", "slow"):
        learner = f"learner {name}"
        assert len(seen.of(learner, "commit")) == steps and len(seen.of(learner, "write")) >= steps
        assert len(seen.of(learner, "stall")) >= steps
    # The one that waits for the other one stalls, and that one computes. On a network fsync waits, elsewhere open.
    assert seen.seconds("learner fast", "commit" if network else "open") > 0.6 * PAUSE * steps
    assert seen.seconds("learner fast", "stall") > 0.6 * PAUSE * steps
    assert seen.seconds("learner slow", "compute") > 0.9 * PAUSE * (steps - 1)
    assert seen.seconds("learner slow", "open") < 0.5 * PAUSE * steps
    plans = [one for one in seen.of("plans", "plan ") if one["args"]["ends"] == "version"]
    assert sorted(one["args"]["version"] for one in plans) == list(range(1, steps + 1))
    assert len(seen.of("plans", "blocks")) >= steps and len(seen.of("plans", "conclude")) == steps
    made = {one["args"]["plan"] for one in plans}
    sent = [one for shard in shards for one in seen.of(f"blocks to shard {shard}")]
    for plan in made:
        blocks = [one["args"]["block"] for one in sent if one["args"]["plan"] == plan]
        assert sorted(blocks) == list(range(SIZE // BLOCK)), plan
    shown = [one["args"]["version"] for one in seen.instants if one["name"].startswith("version ")]
    assert shown == list(range(1, steps + 1))
    assert len(seen.of("versions", "bubble")) == steps
    if network:
        assert len(seen.of("versions", "pull ")) == steps
    return seen


@pytest.mark.one_process
def test_a_trace_shows_learners_plans_blocks_and_versions__in_one_process(start_mount, tmp_path):
    mount, steps = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2), 5
    mount.join("fast", "slow")
    process = tracing(mount, tmp_path / "t.json", 2)
    train(mount, steps)
    document = traced(process, tmp_path / "t.json")
    seen = of_training(document, steps, [0], network=False)
    assert seen.models == {"model model"} and 1.9 < document["otherData"]["seconds"] < 4


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_trace_shows_learners_plans_blocks_and_versions(cluster, tmp_path, transport):
    one, steps = cluster(2), 5
    one.create("m", size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=200)
    mount = one.mount(transport=transport)
    mount.join("fast", "slow")
    process = tracing(mount, tmp_path / "t.json", 2)
    train(mount, steps)
    shards = [shard["id"] for shard in mount.status()["shards"]]
    seen = of_training(traced(process, tmp_path / "t.json"), steps, shards, network=True)
    pulled = [one for shard in shards for one in seen.of(f"blocks from shard {shard}")]
    for version in range(1, steps + 1):
        blocks = [one["args"]["block"] for one in pulled if one["args"]["version"] == version]
        assert sorted(blocks) == list(range(SIZE // BLOCK)), version
    assert len(seen.models) == 1


def test_a_trace_ends_early_with_what_it_has(start_mount, tmp_path):
    mount, threads = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", learners=2, timeout=200), Threads()
    mount.join("fast", "slow")
    mount.contribute(filled(mount, 1), learner="fast")
    process = tracing(mount, tmp_path / "t.json", 600)
    waits = threads.start(array, mount.place("fast") / "weights")
    eventually(lambda: any(one["id"] == "fast" and one["stall_seconds"] > 0.2 for one in mount.status()["learners"]))
    process.send_signal(signal.SIGINT)
    # A wait that goes on is in it, as far as it has come.
    seen = Timeline(traced(process, tmp_path / "t.json"))
    assert seen.seconds("learner fast", "stall") > 0.15 and seen.seconds("learner fast", "open") > 0.15
    mount.contribute(filled(mount, 1), learner="slow")
    waits.result(300)


@pytest.mark.one_process
def test_one_trace_of_a_mount_runs_at_a_time(start_mount, gradfs, tmp_path):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum")
    path = tmp_path / "t.json"
    path.write_text("before")
    process = tracing(mount, tmp_path / "other.json", 600)
    refused = gradfs("trace", mount.root, "--seconds", "1", "-o", path)
    assert refused.returncode == 1 and "runs at a time" in refused.stderr and "busy" in refused.stderr, refused.stderr
    assert path.read_text() == "before" and sorted(os.listdir(tmp_path)) == ["other.json.part-%d" % process.pid, "t.json"]
    # One that is killed ends, too.
    process.kill()
    process.communicate()
    ended = gradfs("trace", mount.root, "--seconds", "0.1", "-o", path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(path.read_text())["traceEvents"]
    assert mount.running()


@pytest.mark.one_process
def test_a_trace_that_cannot_begin_changes_nothing(start_mount, gradfs, tmp_path):
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum")
    path = tmp_path / "t.json"
    for words, status, said in [
        ([tmp_path], 1, "nothing is mounted on"),
        ([tmp_path / "none"], 1, "does not exist"),
        (["/proc"], 1, "not of gradfs"),
        ([mount.root, "--seconds", "0"], 2, "above 0"),
        ([mount.root, "--seconds", "-1"], 2, "above 0"),
        ([mount.root, "--seconds", "4000"], 2, "up to 3600"),
        ([], 2, "MOUNT"),
    ]:
        refused = gradfs("trace", *words, "-o", path)
        assert refused.returncode == status and said in refused.stderr, refused.stderr
    for target in (tmp_path, tmp_path / "no" / "t.json"):
        refused = gradfs("trace", mount.root, "--seconds", "0.1", "-o", target)
        assert refused.returncode == 1 and f"cannot write {target}" in refused.stderr, refused.stderr
    assert os.listdir(tmp_path) == []
    # The file behind it is in no listing, and only read.
    assert ".trace" not in os.listdir(mount.root)
    for flags in (os.O_WRONLY, os.O_RDWR):
        fails(errno.EACCES, os.open, mount.root / ".trace", flags)
    assert os.stat(mount.root / ".trace").st_mode & 0o7777 == 0o400
    assert json.loads((mount.root / ".trace").read_text())["traceEvents"]
