"""Blocks are lost, and the job goes on with newer weights than its snapshot has, which a mount still shows, as
docs/operate/failures.md promises it."""

import errno
import json

import numpy as np
import pytest
from filetools import eventually, fails, write_safetensors
from test_recovery import SIZE, SOON, WHO, Job, apart, restarted  # noqa: F401

# Offers are waited for besides.
LIMIT = 2 * SOON


def newest(one, store, **settings):
    """Snapshots are taken when that is said, in each life."""
    return Job(one, store, on_loss="restore-newest", snapshot_every=0, **settings)


def saved(job):
    done = job.one.run("snapshot", "m", "--wait")
    assert done.returncode == 0, done.stderr
    job.is_durable()


def beyond(job, snapshot, steps, step=None):
    """So many steps that a snapshot has, and then steps that none has. Returns the version."""
    step = step or job.step
    for _ in range(snapshot):
        step()
    saved(job)
    for _ in range(steps):
        step()
    return job.mount.version()


def comes_back(job, mount=None, restored=1):
    mount = mount or job.mount
    eventually(lambda: json.loads((mount.model / "status.json").read_text())["restored"] == restored, deadline=LIMIT)


def step_of(mount):
    """The optimizer steps behind the newest version."""
    return mount.version() - int(mount.control("schedule_start"))


def older(job):
    """By how many versions the log of a shard says that optimizer state is older."""
    said = [line.split("optimizer state is ")[1] for line in job.log().splitlines() if "versions older" in line]
    return [int(words.split()[0]) for words in said]


@WHO
def test_a_job_goes_on_with_the_newest_weights_of_a_living_mount(apart, tmp_path, who):  # noqa: F811
    job = newest(apart(4), tmp_path / "store", shards=4)
    reader = job.one.mount(models=["m"])
    assert beyond(job, snapshot=2, steps=3) == 5
    contributions = job.mount.status()["contributions"]
    job.one_of(who).kill()
    comes_back(job)
    assert job.shown() == 5 and step_of(job.mount) == 5, "nothing is undone"
    assert job.mount.status()["contributions"] == contributions == 5
    assert older(job) == [3] and "the weights that this mount had" in job.mount.stderr() + reader.stderr()
    job.goes_on(who)
    assert job.shown() == 6 and step_of(job.mount) == 6
    comes_back(job, reader)
    eventually(lambda: job.shown(reader) == 6)
    # A snapshot of this life counts as any other.
    beyond(job, snapshot=1, steps=1)
    job.other().kill()
    comes_back(job, restored=2)
    assert job.shown() == step_of(job.mount) == 8 and sorted(older(job)) == [1, 3]
    # And again before it has a snapshot of its own.
    job.step()
    job.other().kill()
    comes_back(job, restored=3)
    assert job.shown() == step_of(job.mount) == 9 and sorted(older(job)) == [1, 2, 3]


def test_a_mount_that_reads_has_the_weights_when_all_shards_and_the_learner_die(apart, tmp_path):  # noqa: F811
    """What the publisher has said of them goes on with them."""
    one = apart(2, state=tmp_path / "registry")
    job = newest(one, tmp_path / "store", shards=2, reducer="assign")
    publisher, reader = job.mount, one.mount(models=["m"])

    def publish(value):
        with open(publisher.model / "publish", "wb", buffering=0) as file:
            file.write(np.full(SIZE // 4, value, "<f4").tobytes())

    publish(1)
    saved(job)
    publish(2)
    eventually(lambda: job.shown(reader) == 2)
    publisher.kill()
    for process in (one.table, *one.shards):
        process.kill()
    one.table.start()
    for shard in list(one.shards):
        restarted(one, shard)
    comes_back(job, reader)
    assert job.shown(reader) == 2 and step_of(reader) == 2


def test_masters_are_made_of_newer_weights_and_optimizer_state_is_that_of_the_snapshot(apart, tmp_path):  # noqa: F811
    """Momentum with steps of 1: all numbers here are exact in bf16."""
    size = SIZE // 2
    file = write_safetensors(tmp_path / "m.safetensors", {"w": ("BF16", [size // 2], bytes(size))})
    settings = {"reducer": "momentum", "learning_rate": 1, "momentum": 0.5, "learners": 1}
    job = newest(apart(3), tmp_path / "store", model=file, **settings)
    ones = np.full(size // 2, 0x3F80, "<u2").tobytes()

    def step():
        with open(job.model / "gradients", "wb", buffering=0) as gradients:
            gradients.write(ones)

    def shown():
        (value,) = set(np.frombuffer(job.read("weights"), "<u2").tolist())
        return float(np.array([value << 16], "<u4").view("<f4")[0])

    job.step = step
    assert beyond(job, snapshot=2, steps=2) == 4 and shown() == -6.125
    job.other().kill()
    comes_back(job)
    assert shown() == -6.125
    step()
    # The momentum of the snapshot is 1.5, and that of the newest version 1.875.
    assert shown() == -6.125 - (0.5 * 1.5 + 1)


def test_newer_weights_and_deterministic_exclude_each_other(apart, tmp_path):  # noqa: F811
    job = newest(apart(1), tmp_path / "store", shards=1)
    fails(errno.EINVAL, job.mount.control, "deterministic", "true")
    assert "set on_loss to restore" in job.read("error").decode()
    job.mount.control("on_loss", "restore")
    job.mount.control("deterministic", "true")
    fails(errno.EINVAL, job.mount.control, "on_loss", "restore-newest")
    assert job.mount.control("on_loss") == "restore"


@pytest.mark.parametrize("why", ["only a part of the model is there", "it is not set any more"])
def test_without_a_mount_that_has_newer_weights_the_snapshot_counts(apart, tmp_path, why):  # noqa: F811
    job = newest(apart(3), tmp_path / "store")
    job.step()
    saved(job)
    if "set" in why:
        job.mount.control("on_loss", "restore")
    beyond(job, snapshot=1, steps=3)
    other = job.one.mount("--tensors", "*", models=["m"])
    if "part" in why:
        job.one.mounts.remove(job.mount)
        job.mount.clean_up()
    job.other().kill()
    comes_back(job, other)
    assert job.shown(other) == 2 and older(job) == []
