"""Snapshots in a bucket of an S3 server, over a way that does harm, as docs/operate/stores.md promises it."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import threading

import numpy as np
import pytest
from buckets import Bucket, Server, cuts, drops, flips, loses, promises, refuses, without
from conftest import gradfs_binary
from filetools import Threads, eventually
from patience import HANGS, Limit
from test_snapshots import SETTINGS, Job, join, model, owners, train, whole_on_shards  # noqa: F401
from test_stores import durable, listed, publish, snapshot

NUMBERS = itertools.count(1)
SLOW_DOWN = refuses(503, "SlowDown", "Please reduce your request rate.")
BAD_SIGNATURE = refuses(403, "SignatureDoesNotMatch", "The request signature we calculated does not match.")


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def bucket(server, monkeypatch):
    bucket = Bucket(server, f"bucket-{next(NUMBERS)}")
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    yield bucket
    bucket.way.close()


@pytest.fixture
def cluster(bucket, cluster):
    """Its processes are killed at the end: a last snapshot would wait for a bucket that does harm."""
    started = []

    def start(*args, **options):
        started.append(cluster(*args, **options))
        return started[-1]

    yield start
    for one in started:
        for process in (*one.mounts, *one.shards):
            process.kill()
        one.mounts, one.shards = [], []


@pytest.fixture
def saved(cluster, model, bucket):  # noqa: F811
    """A job with a snapshot of version 1."""
    job = Job(cluster, 2, model=model, **SETTINGS)
    train(job.mount, range(1))
    assert snapshot(job, bucket.url)[0] == 1
    return job


def refused(done, *words):
    """A command has failed, and says why in one line. A hint may follow."""
    assert done.returncode == 1, done
    error, *hints = done.stderr.splitlines()
    assert error.startswith("gradfs: error: ") and all(word in error for word in words), done.stderr
    assert all(line.startswith("gradfs: hint: ") for line in hints), done.stderr


def stands(gradfs, bucket, *versions):
    """The snapshots of these versions are there, and the newest one is whole."""
    bucket.way.heal()
    assert listed(gradfs, bucket.url) == list(versions)
    done = gradfs("verify", bucket.url)
    assert done.returncode == 0 and f"version {versions[-1]} of m is as it was written" in done.stdout, done


def goes_on(job):
    """The job makes a step."""
    before = job.mount.version()
    train(job.mount, [before])
    assert job.mount.version() == before + 1


@pytest.mark.parametrize("shards", [1, 3])
def test_a_run_whose_shards_wrote_a_snapshot_goes_on_bit_equal__from_a_bucket(
    cluster, gradfs, model, bucket, whole_on_shards, shards  # noqa: F811
):
    first = Job(cluster, 2, model=model, **SETTINGS)
    train(first.mount, range(4))
    version, of, written = snapshot(first, bucket.url)
    assert version == 4 and of == written > 3 * len(first.mount.weights())
    stands(gradfs, bucket, 4)
    names = bucket.objects()
    assert {re.fullmatch(r"jobs/m/(\w+)/[\w.-]+", name)[1] for name in names} == {"claims", "packs", "snapshots"}
    assert not [name for name in names if re.search(r"begun|packs/\S+\.json", name)], "nothing is left of its parts"
    first.kill()
    second = Job(cluster, shards, "--from", bucket.url)
    assert second.mount.weights() == whole_on_shards[0] and second.mount.version() == 4
    assert len(owners(second)) == shards and all(owners(second))
    train(second.mount, range(4, 8))
    assert second.mount.weights() == whole_on_shards[1] and second.mount.version() == 8
    assert snapshot(second, bucket.url)[0] == 8
    stands(gradfs, bucket, 4, 8)


def test_a_snapshot_of_a_store_is_exported_as_save_writes_it__from_a_bucket(
    cluster, gradfs, model, bucket, tmp_path  # noqa: F811
):
    job = Job(cluster, 3, model=model, **SETTINGS)
    train(job.mount, range(4))
    snapshot(job, bucket.url)
    assert job.cluster.run("save", "m", tmp_path / "saved").returncode == 0
    done = gradfs("snapshots", "export", f"{bucket.url}#4", tmp_path / "exported")
    assert done.returncode == 0 and "wrote version 4 of m" in done.stdout, done
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()


def test_a_job_of_one_process_goes_on_from_a_bucket_and_ends_in_order(
    cluster, start_mount, model, bucket, whole_on_shards  # noqa: F811
):
    """A signal ends it as any other: it unmounts, and takes a last snapshot."""
    first = Job(cluster, 2, model=model, **SETTINGS)
    train(first.mount, range(4))
    snapshot(first, bucket.url)
    first.kill()
    alone = start_mount("--from", bucket.url, name="m", snapshot_to=bucket.url)
    assert alone.weights() == whole_on_shards[0]
    join(alone)
    train(alone, range(4, 8))
    assert alone.weights() == whole_on_shards[1]
    assert alone.stop() == 0
    again = start_mount("--from", bucket.url, name="m")
    assert again.weights() == whole_on_shards[1]
    assert again.stop() == 0


def test_up_with_a_state_goes_on_by_itself__in_a_bucket(start_mount, gradfs, model, bucket):  # noqa: F811
    weights = None
    for seen in range(2):
        alone = start_mount(model, state=bucket.url, name="m", **{**SETTINGS, "snapshot_every": 1})
        assert alone.version() == 2 * seen and alone.control("snapshot_to") == bucket.url
        assert seen == 0 or alone.weights() == weights
        join(alone)
        train(alone, range(2 * seen, 2 * seen + 2))
        eventually(lambda: durable(alone) == alone.version())
        weights = alone.weights()
        alone.kill()
    assert listed(gradfs, bucket.url)[-1] == 4


def test_a_second_signal_ends_a_shard_that_takes_its_last_snapshot(cluster, gradfs, model, bucket):  # noqa: F811
    job, may_go_on = Job(cluster, 1, model=model, snapshot_to=bucket.url, snapshot_every=0, **SETTINGS), threading.Event()
    assert job.cluster.run("snapshot", "m", "--wait").returncode == 0
    train(job.mount, range(1))
    last = bucket.way.harm(lambda exchange: may_go_on.wait(HANGS), "PUT")
    process = job.cluster.shards[0].process
    process.send_signal(signal.SIGTERM)
    try:
        eventually(lambda: last.hit)
        assert process.poll() is None
        limit = Limit(HANGS)
        while process.poll() is None and not limit.over():
            process.send_signal(signal.SIGTERM)
            # Two signals within a second are one.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.5)
        assert process.poll() == 130 and "SIGTERM again: exiting at once" in job.cluster.shards[0].stderr()
    finally:
        may_go_on.set()
    stands(gradfs, bucket, 0)


def test_a_shard_whose_store_hangs_ends_within_its_time(cluster, model, bucket):  # noqa: F811
    one, may_go_on = cluster(0), threading.Event()
    shard = one.add_shard("--stop-timeout", "2")
    one.create("m", model=model, snapshot_to=bucket.url, snapshot_every=0, **SETTINGS)
    bucket.way.harm(lambda exchange: may_go_on.wait(HANGS), "PUT")
    limit = Limit(20)
    shard.process.send_signal(signal.SIGTERM)
    try:
        assert shard.process.wait(HANGS) == 1 and not limit.over()
        assert "no last snapshot was saved" in shard.stderr()
    finally:
        may_go_on.set()


def test_a_create_from_a_bucket_that_is_interrupted_leaves_nothing(saved, bucket):
    """It says so itself: the signal does not kill it."""
    asked, may_go_on = threading.Event(), threading.Event()

    def waits(exchange):
        asked.set()
        may_go_on.wait(20)
        exchange.answer(*exchange.ask())

    bucket.way.harm(waits, "GET", "^[^?]*/packs/")
    words = ["create", "other", "--from", bucket.url, "--registry", saved.cluster.registry]
    command = subprocess.Popen([str(gradfs_binary()), *words], stderr=subprocess.PIPE, text=True)
    assert asked.wait(100)
    command.send_signal(signal.SIGINT)
    may_go_on.set()
    _, said = command.communicate(timeout=300)
    assert command.returncode == 1 and "was interrupted by SIGINT" in said, (command.returncode, said)
    assert saved.cluster.status()["models"] == ["m"]


def test_a_job_takes_snapshots_as_its_settings_say__into_a_bucket(cluster, gradfs, model, bucket):  # noqa: F811
    options = {"snapshot_to": bucket.url, "snapshot_every": 1, "snapshot_keep": 2, **SETTINGS}
    job = Job(cluster, 2, model=model, **options)
    eventually(lambda: durable(job.mount) == 0)
    for version in range(1, 4):
        train(job.mount, [version - 1])
        eventually(lambda version=version: durable(job.mount) == version)
    eventually(lambda: listed(gradfs, bucket.url) == [2, 3])
    # The packs of the others have gone.
    eventually(lambda: len([name for name in bucket.objects() if "/packs/" in name]) == 4)
    stands(gradfs, bucket, 2, 3)


def test_two_jobs_do_not_save_into_one_store__of_a_bucket(cluster, gradfs, model, bucket):  # noqa: F811
    """They find it free at one time, and of two that make the first claim one succeeds."""
    jobs = [Job(cluster, 1, model=model, **SETTINGS) for _ in range(2)]
    both = threading.Barrier(2, timeout=100)

    def meets(exchange):
        both.wait()
        exchange.answer(*exchange.ask())

    harm = bucket.way.harm(meets, "PUT", "/claims/", times=2)
    words = ("snapshot", "m", "--to", bucket.url, "--wait")
    done = Threads().run(*(lambda job=job: job.cluster.run(*words) for job in jobs))
    assert len(harm.hit) == 2 and harm.hit[0] == harm.hit[1]
    assert sorted(one.returncode for one in done) == [0, 1], done
    loser = next(one for one in done if one.returncode)
    refused(loser, bucket.url, 'has the snapshots of model "m"')
    assert len([name for name in bucket.objects() if "/claims/" in name]) == 1
    stands(gradfs, bucket, 0)
    # What is beside it in the bucket is free.
    assert snapshot(jobs[done.index(loser)], f"{bucket.url}2")[0] == 0
    assert listed(gradfs, f"{bucket.url}2") == [0] and listed(gradfs, bucket.url) == [0]


def test_a_store_that_lets_two_writers_make_one_object_is_refused(cluster, model, bucket):  # noqa: F811
    def ignores(exchange):
        exchange.headers.pop("if-none-match")
        exchange.answer(*exchange.ask())

    job = Job(cluster, 1, model=model, **SETTINGS)
    bucket.way.harm(ignores, "PUT", "/claims/")
    done = job.cluster.run("snapshot", "m", "--to", bucket.url, "--wait")
    refused(done, bucket.url, "lets two writers make one object")
    goes_on(job)


def test_a_job_that_goes_on_takes_its_store_over__in_a_bucket(cluster, saved, bucket, gradfs):
    second = Job(cluster, 1, "--from", bucket.url)
    assert "has gone on from there" in snapshot(saved, bucket.url, status=1)
    goes_on(second)
    assert snapshot(second, bucket.url)[0] == 2
    stands(gradfs, bucket, 1, 2)


FAULTS = {"500": refuses(500, "InternalError"), "503": SLOW_DOWN}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_bucket_refuses_for_a_moment_is_asked_again(cluster, gradfs, model, bucket, fault):  # noqa: F811
    """Each request of all kinds fails once."""
    job = Job(cluster, 1, model=model, **SETTINGS)
    train(job.mount, range(1))
    harm = bucket.way.harm(FAULTS[fault], times=1, each=True)
    assert snapshot(job, bucket.url)[0] == 1
    weights = job.mount.weights()
    assert listed(gradfs, bucket.url) == [1]
    assert gradfs("verify", bucket.url).returncode == 0
    assert {method for method, _ in harm.hit} >= {"GET", "PUT"} and len(harm.hit) == len(set(harm.hit)) > 8
    job.kill()
    again = bucket.way.harm(FAULTS[fault], "GET", times=2, each=True)
    assert Job(cluster, 1, "--from", bucket.url).mount.weights() == weights
    assert again.hit


def test_the_job_goes_on_while_a_bucket_is_busy(saved, bucket, gradfs):
    """It says SlowDown to all. So that no client gives up, the last answer waits until the job has gone on."""
    goes_on(saved)
    has_gone_on = threading.Event()

    def is_busy(exchange):
        if len(harm.hit) >= 3:
            has_gone_on.wait(20)
        SLOW_DOWN(exchange)

    harm = bucket.way.harm(is_busy, times=4)
    command = Threads().start(snapshot, saved, bucket.url)
    eventually(lambda: len(harm.hit) >= 3)
    for _ in range(3):
        goes_on(saved)
    assert not command.done()
    has_gone_on.set()
    # It is taken when the store answers.
    assert command.result(300)[0] == 5 and len(harm.hit) == 4
    stands(gradfs, bucket, 1, 5)


def test_a_connection_that_ends_before_the_answer_is_made_again(saved, bucket, gradfs):
    """What is asked a second time does no harm."""
    goes_on(saved)
    harm = bucket.way.harm(drops, times=1, each=True)
    assert snapshot(saved, bucket.url)[0] == 2
    assert {method for method, _ in harm.hit} == {"GET", "PUT", "POST"}
    harm.hit.clear()
    assert gradfs("verify", bucket.url).returncode == 0 and harm.hit
    stands(gradfs, bucket, 1, 2)


@pytest.mark.parametrize("name", ["/claims/", "/packs/.*begun$", "/packs/.*[0-9]$", "/packs/.*json$", "/snapshots/"])
def test_an_answer_that_is_lost_loses_no_snapshot(cluster, model, bucket, gradfs, name):  # noqa: F811
    """The object is there, and its writer does not know."""
    job = Job(cluster, 1, model=model, **SETTINGS)
    harm = bucket.way.harm(loses, "PUT", name, times=1)
    assert snapshot(job, bucket.url)[0] == 0
    assert len(harm.hit) == 1
    stands(gradfs, bucket, 0)
    goes_on(job)
    assert snapshot(job, bucket.url)[0] == 1
    stands(gradfs, bucket, 0, 1)


BODIES = {"cut": cuts, "shorter than it says": promises(100), "longer than it says": promises(-100), "flipped": flips}
ANSWERS = {"pack": "^[^?]*/packs/", "description": "^[^?]*/snapshots/", "list": r"\?.*/snapshots/$"}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_is_cut_or_short_is_never_taken_for_data(saved, bucket, gradfs, body, answer):
    """A command reads the rest, or refuses by name. A model is made of the right bytes or not at all."""
    weights, registry = saved.mount.weights(), saved.cluster.registry
    for name, fault in (("tagged", BODIES[body]), ("untagged", without("ETag", BODIES[body]))):
        # Which object it is says its tag.
        reads_on = body == "cut" and answer != "list" and name == "tagged"
        # A bit of a list may be of no importance.
        may_ignore = (body, answer) == ("flipped", "list")
        for words in (["verify", bucket.url], ["create", name, "--from", bucket.url, "--registry", registry]):
            bucket.way.heal()
            harm = bucket.way.harm(fault, "GET", ANSWERS[answer], times=1)
            done = gradfs(*words)
            assert len(harm.hit) == 1, "the body came that way"
            # What a shard does not get of a pack, the command reads and sends.
            is_sent = answer == "pack" and words[0] == "create"
            assert may_ignore or (done.returncode == 0) == (reads_on or is_sent), done
            if done.returncode:
                refused(done, "packs/" if answer == "pack" else "snapshots")
        is_there = name in saved.cluster.status()["models"]
        assert is_there == (done.returncode == 0)
        if is_there:
            assert saved.cluster.mount(models=[name]).weights() == weights
    stands(gradfs, bucket, 1)


@pytest.mark.parametrize("method, name", [("GET", r"\?.*claims"), ("PUT", "/packs/.*[0-9]$"), ("PUT", "/snapshots/")])
def test_a_bucket_that_refuses_fails_the_snapshot_alone(saved, bucket, gradfs, method, name):
    """At once, for to ask again is of no use. The snapshot before stands."""
    goes_on(saved)
    harm = bucket.way.harm(BAD_SIGNATURE, method, name)
    done = saved.cluster.run("snapshot", "m", "--to", bucket.url, "--wait")
    refused(done, bucket.url, "403", "SignatureDoesNotMatch")
    assert harm.hit and len(harm.hit) == len(set(harm.hit))
    goes_on(saved)
    stands(gradfs, bucket, 1)
    assert snapshot(saved, bucket.url)[0] == 3
    stands(gradfs, bucket, 1, 3)


def test_a_bucket_that_refuses_to_delete_keeps_all_snapshots(cluster, gradfs, model, bucket):  # noqa: F811
    """The log says it. When it may be done, the next snapshot does it."""
    options = {"snapshot_to": bucket.url, "snapshot_every": 0, "snapshot_keep": 1, **SETTINGS}
    job = Job(cluster, 1, model=model, **options)
    harm = bucket.way.harm(BAD_SIGNATURE, "POST", r"\?delete")

    def takes():
        done = job.cluster.run("snapshot", "m", "--wait")
        assert done.returncode == 0, done
        goes_on(job)

    takes()
    takes()
    assert len(harm.hit) >= 2
    eventually(lambda: "older snapshots, or parts of one, are not removed" in job.cluster.shards[0].stderr())
    stands(gradfs, bucket, 0, 1)
    takes()
    eventually(lambda: listed(gradfs, bucket.url) == [2])
    eventually(lambda: len([name for name in bucket.objects() if "/packs/" in name]) == 1)


def test_wrong_credentials_are_said_in_one_line(saved, bucket, gradfs, cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    for words in (
        ["snapshots", bucket.url],
        ["verify", bucket.url],
        ["snapshots", "export", bucket.url, tmp_path / "exported"],
        ["create", "other", "--from", bucket.url, "--registry", saved.cluster.registry],
    ):
        refused(gradfs(*words), bucket.url, "403", "InvalidAccessKeyId")
    assert saved.cluster.status()["models"] == ["m"] and not (tmp_path / "exported").exists()
    # Those of the shards count for what they write.
    goes_on(saved)
    assert snapshot(saved, bucket.url)[0] == 2
    other = Job(cluster, 1, size="64KiB", reducer="sum", learners=2)
    done = other.cluster.run("snapshot", "m", "--to", f"{bucket.url}2", "--wait")
    refused(done, f"{bucket.url}2", "InvalidAccessKeyId")


def test_a_bucket_that_is_not_there_is_said_in_one_line(saved, bucket, gradfs, tmp_path):
    nowhere = "s3://no-bucket/jobs"
    for words in (
        ["snapshots", nowhere],
        ["verify", nowhere],
        ["snapshots", "export", nowhere, tmp_path / "exported"],
        ["create", "other", "--from", nowhere, "--registry", saved.cluster.registry],
        ["snapshot", "m", "--to", nowhere, "--wait", "--registry", saved.cluster.registry],
    ):
        refused(gradfs(*words), nowhere, "404", "NoSuchBucket")
    assert saved.cluster.status()["models"] == ["m"]
    goes_on(saved)
    assert snapshot(saved, bucket.url)[0] == 2
    stands(gradfs, bucket, 1, 2)


def test_a_job_tries_again_when_its_bucket_refuses(cluster, gradfs, model, bucket):  # noqa: F811
    """The log says it once."""
    job = Job(cluster, 1, model=model, snapshot_to=bucket.url, snapshot_every=1, **SETTINGS)
    eventually(lambda: durable(job.mount) == 0)
    harm = bucket.way.harm(BAD_SIGNATURE)
    goes_on(job)
    (shard,) = job.cluster.shards

    def told():
        return job.cluster.coordinator("m")["snapshots"]

    eventually(lambda: told()["failures"] == 2)
    goes_on(job)
    assert durable(job.mount) == 0 and "SignatureDoesNotMatch" in told()["why"] and len(harm.hit) >= 2
    assert shard.stderr().count("no snapshot was saved, and the job goes on") == 1, shard.stderr()
    bucket.way.heal()
    eventually(lambda: durable(job.mount) == 2)
    assert told()["why"] is None
    stands(gradfs, bucket, 0, 2)


# More than two parts.
LARGE = 20 << 20


@pytest.fixture
def large(cluster):
    job = Job(cluster, 1, size=LARGE, block_size="1MiB", reducer="assign")
    weights = np.random.default_rng(7).standard_normal(LARGE // 4).astype("<f4").tobytes()
    publish(job.mount, weights)
    return job, weights


def test_a_part_of_a_pack_that_fails_is_sent_again(cluster, gradfs, bucket, large):
    """Also if the answer is an error with the status of a success."""
    job, weights = large
    begins = bucket.way.harm(SLOW_DOWN, "POST", r"\?uploads", times=1)
    parts = bucket.way.harm(refuses(500, "InternalError"), "PUT", "/packs/.*[0-9]$", times=1)
    ends = bucket.way.harm(refuses(200, "InternalError"), "POST", r"\?uploadId", times=1)
    version, of, written = snapshot(job, bucket.url)
    assert of == written >= LARGE and all(len(harm.hit) == 1 for harm in (begins, parts, ends))
    assert bucket.way.count("PUT", "/packs/.*[0-9]$") == 1 + 3 and bucket.way.count("POST", "/packs/") == 2 + 2
    assert bucket.uploads() == []
    stands(gradfs, bucket, version)
    job.kill()
    assert Job(cluster, 1, "--from", bucket.url).mount.weights() == weights


def test_a_pack_of_which_a_part_is_refused_is_given_up(bucket, large):
    """The bucket keeps no half of it."""
    job, _ = large
    bucket.way.harm(BAD_SIGNATURE, "PUT", "/packs/.*[0-9]$", times=1)
    done = job.cluster.run("snapshot", "m", "--to", bucket.url, "--wait")
    refused(done, bucket.url, "SignatureDoesNotMatch")
    assert bucket.uploads() == [] and not [name for name in bucket.objects() if "snapshots/" in name]
    assert snapshot(job, bucket.url)[0] == job.mount.version()


def test_unmount_waits_while_a_last_snapshot_is_written(start_mount, gradfs, model, bucket, tmp_path):  # noqa: F811
    mount, may_go_on = start_mount(model, state=bucket.url, snapshot_every=0, name="m", **SETTINGS), threading.Event()
    join(mount)
    train(mount, range(1))

    def is_slow(exchange):
        may_go_on.wait(HANGS)
        exchange.answer(*exchange.ask())

    bucket.way.harm(is_slow, "PUT", "packs/")
    said = tmp_path / "said"
    with open(said, "wb") as log:
        command = subprocess.Popen([gradfs_binary(), "unmount", mount.root], stderr=log)
    try:
        eventually(lambda: "is unmounted" in said.read_text(), deadline=HANGS)
        # A test beside this one may have made a mount namespace meanwhile.
        is_copied = "has a copy of the mount" in said.read_text()
        assert is_copied or command.poll() is None and "it may be writing a last snapshot" in said.read_text()
        assert not os.path.ismount(mount.root)
    finally:
        may_go_on.set()
    assert command.wait(HANGS) == (1 if is_copied else 0)
    if is_copied:
        # It ends when that namespace does.
        mount.kill()
        return
    assert mount.process.wait(HANGS) == 0
    stands(gradfs, bucket, 1)
