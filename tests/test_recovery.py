"""Blocks are lost, and the job goes on from its newest snapshot by itself, as docs/operate/failures.md promises it."""

import contextlib
import errno
import json
import os
import re
import select
import signal
import subprocess
import threading

import numpy as np
import pytest
from cluster import Cluster, Shard
from conftest import all_of, gradfs_binary, pause
from filetools import BLOCK, Threads, eventually, fails, flip, outcome, raises, write_safetensors
from patience import HANGS, Limit
from test_buckets import bucket, server  # noqa: F401
from test_cluster_registry import Registry
from test_etcd import etcd  # noqa: F401

SIZE = 9 * BLOCK
# From the death of a process until the next step has succeeded.
SOON = 10
# So long a shard of which nothing is heard counts as living.
LEASE = 10
# So long a restored job waits for learners, once one is back.
COME_BACK = 5


class Table(Registry):
    """A registry of its own that keeps what it knows in a file."""

    def __init__(self, file):
        self.options = ["--registry-state", file]
        self.process = Shard(*self.options, command="registry")
        self.address, self.gone = self.process.address, []

    def start(self):
        self.gone.append(self.process)
        self.process = Shard(*self.options, command="registry", listen=self.address)


def end(one):
    """Mounts end in order, and shards are killed: what they have is in stores, or lost on purpose."""
    shards = [*one.gone, *one.shards]
    all_of(mount.clean_up for mount in one.mounts)
    one.mounts = []
    all_of(shard.kill for shard in shards)
    for shard in shards:
        assert "panicked" not in shard.stderr(), shard.stderr()


@pytest.fixture
def apart():
    """Clusters of which no shard is the registry: `one.table` is. Nobody is waited for at the end."""
    clusters = []

    def start(shards, state=None, registry=None):
        one = Cluster(0)
        one.gone, one.table = [], None
        clusters.append(one)
        if registry is None:
            one.table = Registry() if state is None else Table(state)
        one.registry = registry or one.table.address
        for _ in range(shards):
            one.add_shard()
        return one

    yield start
    all_of([lambda one=one: end(one) for one in clusters] + [one.clean_up for one in clusters])
    for one in clusters:
        for process in (*one.table.gone, one.table.process) if one.table else ():
            process.kill()


def restarted(one, shard):
    """A new process at the address of a killed one."""
    one.gone.append(shard)
    one.shards[one.shards.index(shard)] = new = Shard("--registry", one.registry, listen=shard.address)
    return new


class Job:
    """A sum of ones: the weights say how many contributions are part of them."""

    def __init__(self, one, store, shards=3, name="m", **settings):
        self.one, self.store, self.name = one, store, name
        settings = {"reducer": "sum", "snapshot_to": store, "snapshot_every": 1, "lease": 5, "learners": 1, **settings}
        one.create(name, *([] if "model" in settings else ["--size", SIZE]), block_size=BLOCK, shards=shards, **settings)
        self.mount = one.mount(models=[name])
        self.model = self.mount.model

    def read(self, name):
        return (self.model / name).read_bytes()

    def number(self, name):
        return int(self.read(name) or -1)

    def shown(self, mount=None, learner=None):
        values = np.frombuffer(((mount or self.mount).place(learner) / "weights").read_bytes(), "<f4")
        assert (values == values[0]).all(), f"torn: {sorted(set(values.tolist()))}"
        return int(values[0])

    def step(self, mount=None, learner=None):
        """One contribution of ones."""
        place = (mount or self.mount).place(learner)
        with open(place / "gradients", "wb", buffering=0) as file:
            file.write(np.ones(SIZE // 4, "<f4").tobytes())
            os.fsync(file.fileno())

    def is_durable(self):
        """Waits until there is a snapshot of the newest version. Returns its number."""
        version = self.mount.version()
        eventually(lambda: self.number("durable_version") >= version)
        return version

    def steps(self, number):
        """So many, until they are durable. Returns the version."""
        for _ in range(number):
            self.step()
        return self.is_durable()

    def restored(self, mount=None):
        return (mount or self.mount).status()["restored"]

    def goes_on(self, what="", limit=SOON, mount=None, learner=None):
        """Takes a step as soon as one succeeds. What is asked meanwhile fails with ENOTCONN alone. Returns the seconds."""
        mount, limit, seen = mount or self.mount, Limit(limit), []
        while True:
            try:
                self.step(mount, learner)
                break
            except OSError as error:
                self.why = (mount.model / "error").read_text()
                seen.append((errno.errorcode[error.errno], self.why))
            assert not limit.over(), f"{set(seen)}\n{mount.stderr()}"
        print(f"{what}: {limit.taken():.1f} s until the next step")
        assert {name for name, _ in seen} <= {"ENOTCONN"}, f"{len(seen)} errors: {set(seen)}\n{mount.stderr()}"
        return limit.taken()

    def log(self):
        """What the shards that live have said."""
        return "".join(shard.stderr() for shard in self.one.shards)

    def coordinator(self):
        return self.one.coordinator_shard(self.name)

    def other(self):
        """A shard that does not coordinate."""
        coordinator = self.coordinator()
        return next(shard for shard in self.one.shards if shard is not coordinator and shard.running())

    def one_of(self, who):
        return self.coordinator() if who == "coordinator" else self.other()


WHO = pytest.mark.parametrize("who", ["another", "coordinator"])


@WHO
def test_a_job_comes_back_by_itself_when_a_shard_dies(apart, tmp_path, who):
    job = Job(apart(3), tmp_path / "store")
    before = job.steps(5)
    held = os.open(job.model / "weights", os.O_RDONLY)
    job.one_of(who).kill()
    job.goes_on(who)
    assert job.shown() == 6 and job.number("version") == (1 << 20) + 1 > before
    assert job.restored() == 1
    assert "the model goes on from its newest snapshot" in job.why
    assert np.frombuffer(os.pread(held, SIZE, 0), "<f4").max() == 5
    os.close(held)
    assert f"restored from version {before}" in job.log() and "it goes on as version 1048576" in job.log()


@WHO
def test_a_shard_that_is_restarted_at_once_leads_to_a_restoration(apart, tmp_path, who):
    job = Job(apart(3), tmp_path / "store")
    job.steps(5)
    dead = job.one_of(who)
    dead.kill()
    restarted(job.one, dead)
    job.goes_on(who)
    assert job.shown() == 6 and job.restored() == 1


def test_a_job_outlives_the_death_of_all_its_processes(apart, tmp_path):
    """The mount alone lives, and goes on without being mounted again."""
    job = Job(apart(3, state=tmp_path / "registry"), tmp_path / "store")
    job.steps(5)
    one = job.one
    for process in (one.table, *one.shards):
        process.kill()
    one.table.start()
    for shard in list(one.shards):
        restarted(one, shard)
    job.goes_on("all", limit=2 * SOON)
    assert job.shown() == 6 and job.restored() == 1


def models_of(one, shard):
    return [model["name"] for model in one.ask(shard)["models"]]


def test_a_silent_shard_is_passed_over_after_its_lease_and_counts_no_more(apart, tmp_path):
    """It has all blocks of one job, and so nobody contradicts it; a mount that has slept beside it has a contribution for
    it. Of the other job it has some."""
    one, threads = apart(3), Threads()
    some = Job(one, tmp_path / "some")
    whole = Job(one, tmp_path / "whole", shards=1, name="n", lease=60, consistency="async")
    late = one.mount(models=["n"])
    whole.step(late)
    whole.steps(4), some.steps(5)
    eventually(lambda: whole.shown(late) == 5)
    silent = whole.coordinator()
    with silent.paused():
        waits = threads.start(outcome, whole.step, late)
        pause(late.pid)
        threads.run(
            lambda: some.goes_on("some blocks on a silent shard", limit=LEASE + SOON),
            lambda: whole.goes_on("all blocks on a silent shard", limit=LEASE + SOON),
        )
        eventually(lambda: [(job.shown(), job.restored()) for job in (some, whole)] == [(6, 1)] * 2, deadline=SOON)
    os.kill(late.pid, signal.SIGCONT)
    assert waits.result(HANGS) == "ENOTCONN", late.stderr() + (late.model / "error").read_text()
    eventually(lambda: models_of(one, silent) == [], deadline=SOON)
    eventually(lambda: whole.shown(late) == 6)
    for job, mount in ((whole, late), (some, some.mount)):
        job.step(mount)
        # With async, an open does not wait for the step.
        eventually(lambda job=job, mount=mount: job.shown(mount) == 7)
        assert job.restored() == 1


RESTORED = re.compile(r"restored from version (\d+) in \S+ s: it goes on as version (\d+)")


def restorations(job):
    """The version that each life has begun from, and its number there."""
    log = "".join(shard.stderr() for shard in (*job.one.gone, *job.one.shards))
    return sorted(((int(of), int(at)) for of, at in RESTORED.findall(log)), key=lambda one: one[1])


def exported(gradfs, job, version):
    """The contributions in a snapshot."""
    to = job.store.parent / f"of{version}"
    if not to.exists():
        done = gradfs("snapshots", "export", f"{job.store}#{version}", to)
        assert done.returncode == 0, done.stderr
    values = np.frombuffer((to / "model.safetensors").read_bytes()[-SIZE:], "<f4")
    assert (values == values[0]).all()
    return int(values[0])


class Trainer:
    """A learner on a mount of its own. It counts what was acknowledged in each life: by a directory of that life, which
    leads nowhere else."""

    def __init__(self, job):
        self.job, self.mount = job, job.one.mount(models=["m"])
        self.taken, self.errnos, self.over, self.trouble = {}, [], threading.Event(), None
        self.thread = threading.Thread(target=self._train)
        self.thread.start()

    def _train(self):
        try:
            while not self.over.is_set():
                with contextlib.suppress(FileNotFoundError):
                    self._live()
        except BaseException as trouble:
            self.trouble = trouble

    def _live(self):
        place = os.open(self.mount.model, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.fdopen(os.open("status.json", os.O_RDONLY, dir_fd=place), "rb") as file:
                life = json.loads(file.read())["restored"]
            while not self.over.is_set():
                fd = os.open("gradients", os.O_WRONLY, dir_fd=place)
                try:
                    os.write(fd, np.ones(SIZE // 4, "<f4").tobytes())
                    os.fsync(fd)
                finally:
                    with contextlib.suppress(OSError):
                        os.close(fd)
                self.taken[life] = self.taken.get(life, 0) + 1
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise
            self.errnos.append(error.errno)
        finally:
            os.close(place)

    def number(self, life):
        assert self.trouble is None, self.trouble
        return self.taken.get(life, 0)


def test_what_was_acknowledged_since_the_newest_snapshot_is_undone_and_all_else_counts_once(apart, gradfs, tmp_path):
    numbers = np.random.default_rng(11)
    job = Job(apart(3), tmp_path / "store", consistency="async", snapshot_every=3, snapshot_keep=1000)
    trainers = [Trainer(job) for _ in range(2)]
    lives, durable = 4, []
    for life in range(lives):
        steps = int(numbers.integers(5, 40))
        limit = Limit(3 * SOON)
        while min(trainer.number(life) for trainer in trainers) < steps:
            assert not limit.over(), [(trainer.taken, trainer.errnos, trainer.mount.stderr()) for trainer in trainers]
            threading.Event().wait(0.01)
        if life + 1 < lives:
            durable.append(exported(gradfs, job, int(job.read("durable_version"))))
            dead = job.one.shards[int(numbers.integers(3))]
            dead.kill()
            if numbers.integers(2):
                job.one.add_shard()
                job.one.gone.append(dead)
                job.one.shards.remove(dead)
            else:
                restarted(job.one, dead)
    for trainer in trainers:
        trainer.over.set()
        trainer.thread.join(HANGS)
        assert set(trainer.errnos) <= {errno.ENOTCONN}, trainer.errnos
    job.is_durable()
    begins = [0]
    for version, at in restorations(job):
        assert at == len(begins) << 20
        begins.append(exported(gradfs, job, version))
    assert len(begins) == lives
    for life in range(lives):
        taken = sum(trainer.number(life) for trainer in trainers)
        print(f"life {life}: from {begins[life]}, and {taken} acknowledged")
        if life + 1 < lives:
            # Of what was under way when a shard died, at most one of each learner is in a snapshot.
            assert begins[life] <= begins[life + 1] <= begins[life] + taken + 2
            assert begins[life + 1] >= durable[life]
        else:
            assert job.shown() == begins[life] + taken


def test_learners_join_again_by_themselves(apart, tmp_path):
    job = Job(apart(3), tmp_path / "store", learners=2, deterministic=True)
    mounts = {"a": job.mount, "b": job.one.mount(models=["m"])}
    for name, mount in mounts.items():
        mount.join(name)

    def both(call, *arguments, **options):
        Threads().run(*(lambda n=name, m=mount: call(*arguments, mount=m, learner=n, **options) for name, mount in mounts.items()))

    for _ in range(3):
        both(job.step)
    job.is_durable()
    job.other().kill()
    both(job.goes_on, "two learners")
    assert job.shown(learner="a") == 8
    assert {of["name"] for of in job.one.coordinator("m")["learners"]} == {"a", "b"}
    assert all(os.listdir(mount.model / "learners") == [name] for name, mount in mounts.items())
    both(job.step)
    assert job.shown(learner="a") == 10


def test_learners_keep_their_weights(apart, tmp_path):
    job = Job(apart(3), tmp_path / "store")
    place = job.mount.join("a")
    (place / "weight").write_text("3\n")
    job.step(learner="a")
    assert job.shown(learner="a") == 3
    job.is_durable()
    job.other().kill()
    job.goes_on("a learner with a weight", learner="a")
    assert job.shown(learner="a") == 6 and (place / "weight").read_text() == "3\n"


def test_readers_begin_again_by_themselves(apart, tmp_path):
    job = Job(apart(3), tmp_path / "store", hold_for_readers=1)
    place = job.one.mount(models=["m"]).model / "readers" / "infer-0"
    place.mkdir()
    job.steps(5)
    (place / "applied").write_text("5\n")
    job.is_durable()
    job.other().kill()
    # It has applied nothing in this life, so nobody waits for it.
    job.goes_on("a reader")
    eventually(lambda: place.is_dir() and (place / "applied").read_text() == "", deadline=SOON)
    job.step()
    newest = job.mount.version()
    (place / "applied").write_text(f"{newest}\n")
    eventually(lambda: (job.mount.model / "readers" / "applied").read_text() == f"{newest}\n", deadline=SOON)


def test_a_learner_that_is_lost_with_a_shard_is_waited_for_no_longer_than_the_others_need(apart, tmp_path):
    job = Job(apart(3), tmp_path / "store", learners=2)
    other = job.one.mount(models=["m"])
    job.mount.join("a"), other.join("b")
    for _ in range(3):
        Threads().run(lambda: job.step(learner="a"), lambda: job.step(other, "b"))
    job.is_durable()
    job.other().kill()
    other.kill()
    job.goes_on("a lost learner", learner="a", limit=COME_BACK + SOON)
    assert job.shown(learner="a") == 7
    job.step(learner="a")
    assert job.shown(learner="a") == 8


def packs(job, version):
    """The objects with the data of a snapshot."""
    (about,) = (job.store / "snapshots").glob(f"*-v{version}-*.json")
    names = re.findall(r'"name":"(packs/[^"]+)"', about.read_text())
    return [about, *(job.store / name for name in names)]


@pytest.mark.parametrize("damage", ["a flipped bit", "a missing pack", "half a pack", "a description that is cut"])
def test_a_damaged_snapshot_is_passed_over_for_the_one_before(apart, tmp_path, damage):
    job = Job(apart(3), tmp_path / "store", snapshot_keep=9)
    before, newest = job.steps(4), job.steps(1)
    job.mount.control("snapshot_every", 0)
    about, *of = packs(job, newest)
    if damage == "a flipped bit":
        flip(of[1])
    elif damage == "a missing pack":
        of[1].unlink()
    elif damage == "half a pack":
        os.truncate(of[1], of[1].stat().st_size // 2)
    else:
        about.write_text(about.read_text()[:200])
    job.other().kill()
    job.goes_on(damage)
    # Damaged data are noticed when a life has begun with them, which is lost at once.
    ((version, begins),) = restorations(job)
    assert job.shown() == 5 and version == before and begins in (1 << 20, 2 << 20)
    (line,) = [line for line in job.log().splitlines() if "a snapshot was passed over" in line]
    assert f"version {newest}: " in line and (of[1].name in line or about.name in line), line


def test_a_damaged_claim_is_taken_over_by_the_job_that_is_restored(apart, tmp_path):
    job = Job(apart(3), tmp_path / "store")
    job.steps(4)
    for claim in (job.store / "claims").iterdir():
        flip(claim)
    job.other().kill()
    job.goes_on("a damaged claim")
    assert job.shown() == 5
    job.is_durable()


def lost_by(job):
    """A shard dies, and an empty one takes its address."""
    dead = job.other()
    dead.kill()
    return restarted(job.one, dead)


@pytest.mark.parametrize("why", ["on_loss", "no snapshot yet", "no store"])
def test_a_job_that_is_not_restored_fails_as_before(apart, tmp_path, why):
    (tmp_path / "file").write_text("no directory")
    settings = {"on_loss": {"on_loss": "fail"}, "no snapshot yet": {"snapshot_to": tmp_path / "file"}, "no store": {"snapshot_to": None}}
    job = Job(apart(3), tmp_path / "store", shard_patience=2, **settings[why])
    for _ in range(3):
        job.step()
    reader = job.one.mount(models=["m"])
    eventually(lambda: job.shown(reader) == 3)
    if why == "on_loss":
        job.is_durable()
    lost_by(job)
    eventually(lambda: outcome(job.step) == "EIO", deadline=2 * SOON)
    eventually(lambda: job.mount.status()["state"] == "failed", deadline=SOON)
    fails(errno.EIO, job.step)
    assert job.shown(reader) == 3 and job.restored() == 0 and "restored from" not in job.log()


def test_a_store_that_cannot_be_read_is_tried_again(apart, tmp_path):
    job = Job(apart(3), tmp_path / "store")
    job.steps(5)
    job.mount.control("snapshot_every", 0)
    job.store.rename(tmp_path / "away")
    job.other().kill()
    waits = Threads().start(outcome, job.step)
    eventually(lambda: "which is tried again" in job.log())
    status = eventually(lambda: (now := job.one.run("status")).returncode == 3 and now)
    print(status.stdout)
    # More tries, of which each of the two shards tells once.
    threading.Event().wait(3)
    assert job.log().count("which is tried again") <= 2 and not waits.done()
    (tmp_path / "away").rename(job.store)
    assert waits.result(HANGS) == "ENOTCONN"
    job.goes_on("a store that was away")
    assert job.shown() == 6 and job.restored() == 1


def test_a_store_without_a_snapshot_takes_the_place_of_none(apart, tmp_path):
    """Another store is named, and nothing can be written there: the job goes on from the one before."""
    job = Job(apart(3), tmp_path / "store")
    job.steps(3)
    job.mount.control("snapshot_to", "/proc/none")
    eventually(lambda: "no snapshot was saved" in job.log())
    # The coordinator tells the registry of its store every 2.5 s.
    threading.Event().wait(3)
    dead = job.other()
    dead.kill()
    job.goes_on("another store")
    assert job.shown() == 4 and job.restored() == 1


def test_the_status_says_that_a_model_is_restored(apart, bucket):  # noqa: F811
    """And another shard goes on when the one that restores it dies."""
    job, may_go_on = Job(apart(4), bucket.url, shards=2), threading.Event()
    job.steps(5)
    job.mount.control("snapshot_every", 0)

    def waits(exchange):
        may_go_on.wait(HANGS)
        exchange.answer(*exchange.ask())

    held = bucket.way.harm(waits, "GET", "/packs/.*[0-9]$")
    try:
        job.other().kill()
        told = eventually(lambda: "it is restored from its newest snapshot by shard" in (now := job.one.run("status")).stdout and now)
        assert told.returncode == 3
        eventually(lambda: job.mount.status()["state"] == "restoring" and held.hit)
        (begins,) = [shard for shard in job.one.shards if "the model is restored" in shard.stderr()]
        begins.kill()
    finally:
        may_go_on.set()
    job.goes_on("a restorer that dies", limit=2 * SOON)
    assert job.shown() == 6
    (restorer,) = [shard for shard in job.one.shards if "restored from version 5" in shard.stderr()]
    assert restorer is not begins


@WHO
def test_a_shard_that_is_told_to_end_hands_its_blocks_over(apart, tmp_path, who):
    """Each step meanwhile succeeds. So it is for a model without a store."""
    job = Job(apart(3), tmp_path / "store")
    job.one.create("n", "--size", SIZE, block_size=BLOCK, shards=3, reducer="sum", learners=1)
    steps, shard = job.steps(2), job.one_of(who)
    shard.process.send_signal(signal.SIGTERM)
    while shard.running():
        job.step()
        steps += 1
    assert shard.process.wait() == 0
    assert {"gradfs: m has moved to other shards", "gradfs: n has moved to other shards"} <= set(shard.stdout().splitlines())
    job.step()
    assert job.shown() == job.number("version") == steps + 1 and job.restored() == 0
    other = job.one.mount(models=["n"])
    job.step(other)
    assert job.shown(other) == other.version() == 1


def test_nothing_is_undone_when_a_shard_is_told_to_end_and_no_other_is_there(apart, tmp_path):
    job = Job(apart(1), tmp_path / "store", shards=1)
    job.steps(2)
    job.mount.control("snapshot_every", 0)
    for _ in range(3):
        job.step()
    shard = job.coordinator()
    assert job.shown() == 5 and shard.stop() == 0
    assert "gradfs: version 5 of m is in its store" in shard.stdout()
    restarted(job.one, shard)
    job.goes_on("SIGTERM")
    assert job.shown() == 6 and job.restored() == 1


def test_another_model_of_the_name_is_no_restored_one(apart, tmp_path):
    job = Job(apart(3), tmp_path / "store", lease=60)
    job.mount.join("a")
    job.steps(0)
    held = os.open(job.mount.place("a") / "gradients", os.O_WRONLY)
    job.mount.control("snapshot_every", 0)
    job.store.rename(tmp_path / "away")
    job.other().kill()
    one = job.one
    eventually(lambda: one.run("delete", "m").returncode == 0)
    one.create("m", size=SIZE, block_size=BLOCK, reducer="sum", snapshot_to=tmp_path / "away", snapshot_every=1)
    (tmp_path / "away").rename(job.store)
    eventually(lambda: outcome(os.write, held, bytes(BLOCK)) == "EIO", deadline=2 * SOON)
    outcome(os.close, held)
    eventually(lambda: outcome(job.step) == "done")
    assert job.mount.version() == job.shown() == 1 and job.restored() == 0
    assert not job.mount.place("a").exists()
    assert "restored from" not in job.log()


def test_a_model_that_is_deleted_while_it_is_restored_does_not_come_back(apart, tmp_path):
    job = Job(apart(3), tmp_path / "store")
    job.steps(5)
    job.mount.control("snapshot_every", 0)
    job.store.rename(tmp_path / "away")
    job.other().kill()
    eventually(lambda: "which is tried again" in job.log())
    done = job.one.run("delete", "m")
    assert done.returncode == 0, done.stderr
    (tmp_path / "away").rename(job.store)
    eventually(lambda: not job.model.exists(), deadline=2 * SOON)
    # A pause after a failure, and the time after which another shard restores it.
    threading.Event().wait(4)
    assert job.one.status()["models"] == [] and "restored from" not in job.log()
    assert all(models_of(job.one, shard) == [] for shard in job.one.shards if shard.running())


def test_a_job_comes_back_again_and_again(apart, tmp_path):
    """Also before anything has happened since. Whether it does so can be changed."""
    job = Job(apart(4), tmp_path / "store", shards=4, on_loss="fail")
    job.steps(2)
    fails(errno.EINVAL, job.mount.control, "on_loss", "often")
    job.mount.control("on_loss", "restore")
    before = job.steps(1)
    job.other().kill()
    eventually(lambda: "restored from version" in job.log())
    job.other().kill()
    eventually(lambda: job.log().count("restored from version") == 2)
    job.goes_on("two in a row")
    assert job.shown() == 4 and job.restored() == 2
    assert restorations(job)[0][0] == before and [at for _, at in restorations(job)] == [1 << 20, 2 << 20]
    job.is_durable()
    job.coordinator().kill()
    job.goes_on("the third")
    assert job.shown() == 5 and job.restored() == 3 and job.number("version") == (3 << 20) + 1


ADAM = {
    "reducer": "adam", "learning_rate": 0.01, "schedule": "cosine(12)", "warmup": 3, "deterministic": True,
    "block_size": BLOCK, "size": SIZE,
}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_adam_goes_on_bit_equal_from_a_snapshot_on_other_shards(apart, tmp_path, start_mount, dtype):
    """With its moments, its steps and its learning rate, and masters of 16-bit weights, whatever numbers the versions have."""

    def adam_step(mount, step):
        numbers = np.random.default_rng([7, step]).standard_normal(SIZE // 4).astype("<f4")
        # The upper halves of numbers are what bf16 has.
        mount.contribute(numbers.tobytes() if dtype == "f32" else np.tile(numbers.view("<u2")[1::2], 2).tobytes())

    alone = start_mount(dtype=dtype, **ADAM)
    for step in range(8):
        adam_step(alone, step)
    one = apart(3)
    one.create("m", dtype=dtype, snapshot_to=tmp_path / "store", snapshot_every=1, **ADAM)
    mount = one.mount(models=["m"])
    for step in range(4):
        adam_step(mount, step)
    eventually(lambda: (mount.model / "durable_version").read_text() == "4\n")
    one.coordinator_shard("m").kill()
    with raises(errno.ENOTCONN):
        adam_step(mount, 4)
    for step in range(4, 8):
        adam_step(mount, step)
    assert mount.weights() == alone.weights() and mount.version() == (1 << 20) + 4
    assert len({shard.address for shard in one.shards if shard.running() and models_of(one, shard)}) == 2
    rate = [json.loads((of.model / "status.json").read_text())["learning_rate"] for of in (mount, alone)]
    assert rate[0] == rate[1], rate


def follows(job, *places):
    """These places of mounts show the job before and after a shard dies, and what is open keeps its version."""

    def show(value):
        def all_of_it(place):
            with contextlib.suppress(FileNotFoundError):
                values = np.fromfile(place / "weights", "<f4")
                return values.size and (values == value).all()

        for place in places:
            eventually(lambda place=place: all_of_it(place), deadline=SOON)

    job.steps(3)
    show(3)
    held = [os.open(place / "weights", os.O_RDONLY) for place in places]
    job.other().kill()
    job.goes_on("follows")
    for fd in held:
        assert (np.frombuffer(os.pread(fd, SIZE, 0), "<f4") == 3).all()
        os.close(fd)
    show(4)


@pytest.fixture
def tensors(tmp_path):
    """A model of two tensors."""
    half = np.zeros(SIZE // 8, "<f4").tobytes()
    return write_safetensors(tmp_path / "m.safetensors", {name: ("F32", (SIZE // 8,), half) for name in "ab"})


def test_mounts_of_some_tensors_and_followers_go_on(apart, tmp_path, tensors):
    job, told = Job(apart(3), tmp_path / "store", model=tensors), tmp_path / "told"
    with open(told, "w") as out:
        following = subprocess.Popen([gradfs_binary(), "follow", "--now", job.model], stdout=out)
    try:
        follows(job, job.one.mount(models=["m"], tensors=["b"]).model)
        eventually(lambda: told.read_text().endswith(f"\n{(1 << 20) + 1}\n"), deadline=SOON)
        assert {int(number) for number in told.read_text().split()} <= {0, 1, 2, 3, 1 << 20, (1 << 20) + 1}
    finally:
        following.kill()
        following.wait()


def test_views_follow(apart, tmp_path, tensors):
    job = Job(apart(3), tmp_path / "store", model=tensors)
    places = [mount.model / "views" / "half" for mount in (job.mount, job.one.mount(models=["m"], views_only=True))]
    for place in places:
        place.mkdir()
        (place / "plan").write_text('{"tensors": [{"name": "a", "from": "a", "slice": {"0": [5, 100]}}]}\n')
    follows(job, *places)


def test_a_job_comes_back_with_its_registry_in_an_etcd(apart, etcd, tmp_path):  # noqa: F811
    """Also while one of three members is dead."""
    three = etcd()
    job = Job(apart(3, registry=three.url), tmp_path / "store")
    job.steps(5)
    job.one_of("coordinator").kill()
    job.goes_on("etcd")
    assert job.shown() == 6 and job.restored() == 1
    job.is_durable()
    three.kill(three.leader())
    job.other().kill()
    job.goes_on("two of three etcds", limit=2 * SOON)
    assert job.shown() == 7 and job.restored() == 2


@pytest.mark.parametrize("knows", ["a state file", "a shard that lives"])
def test_a_registry_that_dies_with_its_shard_restores_when_it_is_back(apart, tmp_path, knows):
    one = apart(0)
    state = ["--registry-state", tmp_path / "registry"] if knows == "a state file" else []
    first = Shard(*state)
    one.shards.append(first)
    one.registry = first.address
    for _ in range(2):
        one.add_shard()
    job = Job(one, tmp_path / "store")
    if knows != "a state file" and job.coordinator() is first:
        assert one.run("drain", first.number).returncode == 0
        assert one.run("drain", first.number, "--cancel").returncode == 0
    job.steps(5)
    first.kill()
    one.gone.append(first)
    one.shards[0] = Shard(*state, listen=first.address)
    if knows == "a shard that lives" and not models_of(one, job.coordinator()):
        pytest.fail("nobody knows it")
    job.goes_on(knows, limit=2 * SOON)
    assert job.shown() == 6


def test_numbers_of_versions_are_used_once_and_polls_wake_up(apart, tmp_path):
    job = Job(apart(3), tmp_path / "store", retain=2)
    before = job.steps(5)
    old = set(os.listdir(job.model / "versions"))
    assert str(before) in old
    files = [open(job.model / name, "rb", buffering=0) for name in ("version", "durable_version")]
    poll = select.poll()
    for file in files:
        assert int(file.read()) == before
        poll.register(file, select.POLLPRI)
    assert poll.poll(0) == []
    woken = Threads().start(poll.poll, 1000 * SOON)
    job.other().kill()
    job.goes_on("polls")
    assert woken.result(HANGS) != []
    for file in files:
        eventually(lambda: int((job.model / "version").read_text()) == (1 << 20) + 1)
        file.close()
    assert not old & set(os.listdir(job.model / "versions"))
    fails(errno.ENOENT, os.listdir, job.model / "versions" / str(before))


def test_what_is_open_of_the_life_before_is_enotconn_until_it_is_opened_anew(apart, tmp_path):
    job = Job(apart(3), tmp_path / "store")
    job.steps(3)
    weights = os.open(job.model / "weights", os.O_RDONLY)
    gradients = os.open(job.model / "gradients", os.O_WRONLY)
    os.pwrite(gradients, np.full(BLOCK // 4, 100, "<f4").tobytes(), 0)
    job.other().kill()
    fails(errno.ENOTCONN, os.fsync, gradients)
    assert outcome(os.pwrite, gradients, bytes(BLOCK), BLOCK) == outcome(os.fsync, gradients) == "ENOTCONN"
    os.close(gradients)
    assert (np.frombuffer(os.pread(weights, SIZE, 0), "<f4") == 3).all()
    os.close(weights)
    # Nothing of what was begun in the life before counts.
    job.goes_on("handles")
    assert job.shown() == 4
