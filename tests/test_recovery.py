"""Blocks are lost, and the job goes on from its newest snapshot by itself, as docs/operate/failures.md promises it."""

import contextlib
import errno
import json
import os
import re
import select
import shutil
import threading

import numpy as np
import pytest
from cluster import Cluster, Shard, run
from conftest import all_of, pause
from filetools import BLOCK, Threads, eventually, fails, outcome, raises, said
from patience import HANGS, Limit
from test_cluster_registry import Registry
from test_etcd import etcd  # noqa: F401

SIZE = 9 * BLOCK
# From the death of a process until the next step has succeeded.
SOON = 10
# So long a shard of which nothing is heard counts as living.
LEASE = 10


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

    def __init__(self, one, store, shards=3, mount=(), **settings):
        self.one, self.store = one, store
        settings = {"reducer": "sum", "snapshot_to": store, "snapshot_every": 1, "lease": 5, "learners": 1, **settings}
        one.create("m", *([] if "model" in settings else ["--size", SIZE]), block_size=BLOCK, shards=shards, **settings)
        self.mount = one.mount(*mount, models=["m"])
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
        return self.one.coordinator_shard("m")

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
    job = Job(apart(3), tmp_path / "store")
    job.steps(5)
    silent = job.other()
    with silent.paused():
        job.goes_on("silent", limit=LEASE + SOON)
        assert job.shown() == 6 and job.restored() == 1
    eventually(lambda: models_of(job.one, silent) == [], deadline=SOON)
    for _ in range(3):
        job.step()
    assert job.shown() == 9 and job.restored() == 1


def test_a_coordinator_that_was_passed_over_takes_nothing_of_the_life_before(apart, tmp_path):
    """It has all blocks, so nobody contradicts it. A mount that has slept beside it has a contribution for it."""
    job = Job(apart(2), tmp_path / "store", shards=1, lease=60, consistency="async")
    late = job.one.mount(models=["m"])
    job.step(late)
    job.steps(4)
    eventually(lambda: job.shown(late) == 5)
    coordinator, threads = job.coordinator(), Threads()
    with coordinator.paused():
        waits = threads.start(outcome, job.step, late)
        pause(late.pid)
        job.goes_on("silent coordinator", limit=LEASE + SOON)
        assert job.shown() == 6
    os.kill(late.pid, 18)
    assert waits.result(HANGS) == "ENOTCONN", late.stderr() + (late.model / "error").read_text()
    eventually(lambda: models_of(job.one, coordinator) == [], deadline=SOON)
    eventually(lambda: job.shown(late) == 6)
    job.step(late)
    eventually(lambda: job.shown() == 7)


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
    job = Job(apart(3), tmp_path / "store", learners=2)
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


def test_a_learner_that_is_lost_with_a_shard_is_waited_for_no_longer_than_the_lease(apart, tmp_path):
    job = Job(apart(3), tmp_path / "store", learners=2, lease=3)
    other = job.one.mount(models=["m"])
    job.mount.join("a"), other.join("b")
    for _ in range(3):
        Threads().run(lambda: job.step(learner="a"), lambda: job.step(other, "b"))
    job.is_durable()
    job.other().kill()
    other.kill()
    job.goes_on("a lost learner", learner="a", limit=3 + SOON)
    assert job.shown(learner="a") == 7
    job.step(learner="a")
    assert job.shown(learner="a") == 8
