"""Snapshots: a job is saved while it runs, and goes on from there, as docs/use/snapshots.md promises it."""

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import MountFailed, gradfs_binary, ran
from filetools import BLOCK, Threads, eventually, fails, outcome, read_safetensors, takes, write_safetensors

# Two blocks and a bit of floats, then halves that begin in mid-block, then bytes that no reducer takes.
FLOATS, HALVES, OPAQUE = 40_001, 30_002, 50
SETTINGS = {"reducer": "adam", "learning_rate": 0.01, "deterministic": True, "block_size": BLOCK, "learners": 2}
LEARNERS = ["a", "b"]


@pytest.fixture
def model(tmp_path):
    numbers = np.random.default_rng(5)
    halves = (numbers.standard_normal(HALVES).astype("<f4").view("<u4") >> 16).astype("<u2")
    return write_safetensors(tmp_path / "m.safetensors", {
        "net.0.w": ("F32", (FLOATS,), numbers.standard_normal(FLOATS).astype("<f4").tobytes()),
        "net.1.w": ("BF16", (2, HALVES // 2), halves.tobytes()),
        "ids": ("U8", (OPAQUE,), bytes(range(OPAQUE))),
    }, {"format": "pt"})


def gradient(step, learner):
    numbers = np.random.default_rng([step, LEARNERS.index(learner)])
    halves = (numbers.standard_normal(HALVES).astype("<f4").view("<u4") >> 16).astype("<u2")
    return numbers.standard_normal(FLOATS).astype("<f4").tobytes() + halves.tobytes() + bytes(OPAQUE)


def join(mount):
    mount.join(*LEARNERS)


def train(mount, steps):
    for step in steps:
        Threads().run(*(lambda learner=learner: mount.contribute(gradient(step, learner), learner=learner)
                        for learner in LEARNERS))


def save(gradfs, *args, status=0):
    done = gradfs("save", *args)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def refused(start_mount, *args, **options):
    """What `gradfs up` says that mounts nothing."""
    with pytest.raises(MountFailed) as caught:
        start_mount(*args, **options)
    return str(caught.value)


@pytest.fixture
def whole(start_mount, model):
    """The weights after 4 steps and after 8, of a job that was never interrupted."""
    mount = start_mount(model=model, **SETTINGS)
    join(mount)
    train(mount, range(4))
    half = mount.weights()
    train(mount, range(4, 8))
    return half, mount.weights()


def test_a_run_that_was_saved_and_resumed_ends_bit_equal(start_mount, gradfs, model, tmp_path, whole):
    """Saved in the middle of a step, killed whole, and gone on with."""
    first = start_mount(model=model, **SETTINGS)
    join(first)
    train(first, range(4))
    # Taken, and in no version: it is not in the snapshot.
    first.contribute(gradient(4, "a"), learner="a")
    said = save(gradfs, first.model, tmp_path / "saved")
    assert manifest(tmp_path / "saved")["learners"] == [{"name": name, "incarnation": 1, "step": 4} for name in LEARNERS]
    assert said.startswith("gradfs: saved version 4 of m in ")
    first.kill()
    second = start_mount("--from", tmp_path / "saved", name="m")
    assert second.weights() == whole[0] and second.version() == 4
    assert {name: second.control(name) for name in SETTINGS if name != "block_size"} == {
        "reducer": "adam", "learning_rate": "0.01", "deterministic": "true", "learners": "2"
    }
    join(second)
    train(second, range(4, 8))
    assert second.weights() == whole[1] and second.version() == 8


def test_a_snapshot_of_the_first_format_is_read(start_mount, gradfs, tmp_path):
    """One that an older release has written: three steps of Adam."""
    old = Path(__file__).parent / "snapshots/format-1"
    mount = start_mount("--from", old, name="m")
    assert mount.version() == 3 and mount.control("reducer") == "adam"
    assert mount.weights() == (old / "model.safetensors").read_bytes()[-96:]
    assert gradfs("save", mount.model, tmp_path / "again").returncode == 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (old / name).read_bytes()
    mount.contribute(np.full(24, 0.5, "<f4").tobytes())
    assert mount.version() == 4
    assert gradfs("verify", old).returncode == 0


def test_a_snapshot_is_what_torch_and_safetensors_read(start_mount, gradfs, model, tmp_path):
    mount = start_mount(model=model, **SETTINGS)
    join(mount)
    train(mount, range(3))
    save(gradfs, mount.model, tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == ["manifest.json", "model.safetensors", "optimizer.safetensors"]
    tensors, metadata = read_safetensors((tmp_path / "saved/model.safetensors").read_bytes())
    assert b"".join(data for _, _, data in tensors.values()) == mount.weights() and metadata == {"format": "pt"}
    states, _ = read_safetensors((tmp_path / "saved/optimizer.safetensors").read_bytes())
    assert {name: (dtype, shape) for name, (dtype, shape, _) in states.items()} == {
        "exp_avg.net.0.w": ("F32", [FLOATS]), "exp_avg.net.1.w": ("F32", [2, HALVES // 2]),
        "exp_avg_sq.net.0.w": ("F32", [FLOATS]), "exp_avg_sq.net.1.w": ("F32", [2, HALVES // 2]),
        "master.net.1.w": ("F32", [2, HALVES // 2]),
        "step.net.0.w": ("F32", []), "step.net.1.w": ("F32", []),
    }
    m, v = np.zeros(FLOATS), np.zeros(FLOATS)
    for step in range(3):
        g = sum(np.frombuffer(gradient(step, learner)[: 4 * FLOATS], "<f4").astype("f8") for learner in LEARNERS) / 2
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    np.testing.assert_allclose(np.frombuffer(states["exp_avg.net.0.w"][2], "<f4"), m, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.frombuffer(states["exp_avg_sq.net.0.w"][2], "<f4"), v, rtol=1e-4, atol=1e-7)
    assert struct.unpack("<f", states["step.net.0.w"][2]) == (3,)
    masters = np.frombuffer(states["master.net.1.w"][2], "<f4")
    halves = np.frombuffer(tensors["net.1.w"][2], "<u2")
    np.testing.assert_allclose(masters, (halves.astype("<u4") << 16).view("<f4"), rtol=1 / 128)
    assert (masters.view("<u4") & 0xFFFF).any(), "masters have more bits than weights"
    about = manifest(tmp_path / "saved")
    assert (about["format"], about["version"], about["optimizer"], about["contributions"]) == (1, 3, "adam", 6)
    assert about["learners"] == [{"name": name, "incarnation": 1, "step": 3} for name in LEARNERS]
    assert about["settings"]["learning_rate"] == "0.01" and len(about["settings"]) == len(os.listdir(mount.model / "control"))
    assert about["steps"] == [[3, 3]], "three tensors in a row have three steps"


def test_a_large_model_is_saved_in_pieces_with_an_index(start_mount, gradfs, model, tmp_path, whole):
    first = start_mount(model=model, **SETTINGS)
    join(first)
    train(first, range(4))
    save(gradfs, "--piece-size", "64KiB", first.model, tmp_path / "saved")
    index = json.loads((tmp_path / "saved/model.safetensors.index.json").read_text())
    pieces = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert index["weight_map"] == {"net.0.w": pieces[0], "net.1.w": pieces[1], "ids": pieces[1]}
    first.kill()
    assert start_mount(model=tmp_path / "saved", name="m").weights() == whole[0], "a checkpoint like any other"
    second = start_mount("--from", tmp_path / "saved", name="m")
    join(second)
    train(second, range(4, 8))
    assert second.weights() == whole[1]


@pytest.mark.also_on_network
def test_the_job_goes_on_while_it_is_saved(start_mount, gradfs, tmp_path):
    """Whatever is under way: what is saved is one version in all of its parts."""
    mount = start_mount(size="8MiB", reducer="momentum", learning_rate=1, momentum=1, consistency="async")
    mount.join("busy")
    over, steps = threading.Event(), []

    def contribute():
        while not over.is_set():
            mount.contribute(np.ones(2 << 20, "<f4"), learner="busy")
            steps.append(time.monotonic())

    worker = Threads().start(contribute)
    try:
        for number in range(5):
            eventually(lambda at=len(steps): len(steps) > at + 2)
            folder = tmp_path / str(number)
            save(gradfs, mount.model, folder)
            about = manifest(folder)
            version = about["version"]
            tensors, _ = read_safetensors((folder / "model.safetensors").read_bytes())
            states, _ = read_safetensors((folder / "optimizer.safetensors").read_bytes())
            # Of momentum without friction: the buffer is v, and the weights are -v (v + 1) / 2.
            assert (np.frombuffer(states["momentum_buffer.weights"][2], "<f4") == version).all()
            assert (np.frombuffer(tensors["weights"][2], "<f4") == -version * (version + 1) / 2).all()
            assert about["learners"] == [{"name": "busy", "incarnation": 1, "step": version}]
    finally:
        over.set()
        worker.result(300)


def test_one_snapshot_of_a_model_is_open_at_a_time(start_mount, gradfs, model, tmp_path):
    """Each takes a copy of the model: programs that open every file cannot fill the memory."""
    mount = start_mount(model=model, **SETTINGS)
    with open(mount.model / "snapshot", "rb") as first:
        fails(errno.EBUSY, os.open, mount.model / "snapshot", os.O_RDONLY)
        said = save(gradfs, mount.model, tmp_path / "saved", status=1)
        assert "a snapshot of this model is open" in mount.stderr() and "wait until the other command has ended" in said
        assert first.read(8)
    for number in range(3):
        save(gradfs, mount.model, tmp_path / str(number))


# The number of the system call.
OPENAT = {"x86_64": 257, "aarch64": 56}[os.uname().machine]


@pytest.mark.parametrize("reads", [False, True])
def test_a_save_from_a_daemon_that_ends_says_so(start_mount, tmp_path, reads):
    mount = start_mount(size="256MiB", reducer="adam")
    folder = tmp_path / "large"
    command = subprocess.Popen([str(gradfs_binary()), "save", str(mount.model), str(folder)], stderr=subprocess.PIPE)
    # It waits for the copy in openat(2), or writes what it reads.
    opens = Path(f"/proc/{command.pid}/syscall")
    eventually(lambda: folder.is_dir() if reads else opens.read_text().startswith(f"{OPENAT} "))
    mount.kill()
    _, said = command.communicate(timeout=300)
    assert command.returncode == 1 and b"hint: the daemon of the mount has ended, and nothing was saved" in said, said
    assert not folder.exists()


def test_a_directory_holds_one_snapshot_unless_it_is_replaced(start_mount, gradfs, model, tmp_path):
    mount = start_mount(model=model, **SETTINGS)
    join(mount)
    folder = tmp_path / "saved"
    save(gradfs, "--piece-size", "64KiB", mount.model, folder)
    train(mount, range(1))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    said = save(gradfs, mount.model, folder, status=1)
    assert f"{folder} holds a snapshot already" in said and "--replace" in said
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    save(gradfs, "--replace", mount.model, folder)
    assert manifest(folder)["version"] == 1
    assert sorted(os.listdir(folder)) == ["manifest.json", "model.safetensors", "optimizer.safetensors"]


def test_a_save_that_fails_leaves_nothing(start_mount, tmp_path):
    """The disk is full at one of its files; at each number of bytes another one is the first that does not fit."""
    mount = start_mount(size="64KiB", reducer="adam")
    mount.contribute(np.ones(16 << 10, "<f4").tobytes())

    def limited(most):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    folder = tmp_path / "s"
    command = [str(gradfs_binary()), "save", str(mount.model), str(folder)]
    for most in (64, 1000, 66_000):
        done = ran(command, preexec_fn=lambda most=most: limited(most))
        assert done.returncode == 1 and "File too large" in done.stderr, done
        assert not folder.exists()
    folder.mkdir()
    done = ran(command, preexec_fn=lambda: limited(1000))
    assert done.returncode == 1 and not os.listdir(folder)
    assert ran(command).returncode == 0
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    done = ran([*command, "--replace"], preexec_fn=lambda: limited(1000))
    assert done.returncode == 1 and f"{folder}/model.safetensors." in done.stderr, done
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before, "the old one is still there"


def test_two_saves_do_not_write_into_one_directory_at_a_time(start_mount, gradfs, tmp_path):
    mount = start_mount(size="64KiB", reducer="adam")
    folder = tmp_path / "s"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    for replaces in ([], ["--replace"]):
        assert f"another gradfs save writes into {folder}" in save(gradfs, *replaces, mount.model, folder, status=1)
    os.close(fd)
    save(gradfs, mount.model, folder)


def test_a_save_leaves_alone_what_belongs_to_no_snapshot(start_mount, gradfs, model, tmp_path):
    """Such as the file that the model was loaded from."""
    mount = start_mount(model=model, **SETTINGS)
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("model.safetensors", "README.md"):
        (folder / name).write_text("mine")
    said = save(gradfs, mount.model, folder, status=1)
    assert f"{folder}/model.safetensors is there, and belongs to no snapshot" in said and "--replace" in said
    assert {file.name: file.read_text() for file in folder.iterdir()} == {"model.safetensors": "mine", "README.md": "mine"}
    save(gradfs, "--replace", mount.model, folder)
    assert manifest(folder)["version"] == 0 and (folder / "README.md").read_text() == "mine"


def damaged(folder, name, at):
    """Flips a bit."""
    with open(folder / name, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))


@pytest.fixture
def saved(start_mount, gradfs, model, tmp_path):
    mount = start_mount(model=model, **SETTINGS)
    join(mount)
    train(mount, range(2))
    save(gradfs, mount.model, tmp_path / "saved")
    mount.kill()
    return tmp_path / "saved"


@pytest.mark.parametrize("name, at, block", [
    ("model.safetensors", 3, None), ("model.safetensors", 4 * FLOATS, 2), ("optimizer.safetensors", -1, 10), ("manifest.json", 40, None),
])
def test_a_flipped_bit_is_refused_by_name(start_mount, cluster, saved, name, at, block):
    damaged(saved, name, at)
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    one = cluster(2)
    for said in (refused(start_mount, "--from", saved, name="m"), one.run("create", "m", "--from", saved).stderr):
        assert f"{saved}/{name}: " in said and (block is None or f"block {block} of it" in said), said
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before and one.status()["models"] == []


@pytest.mark.parametrize("lacks", ["manifest.json", "model.safetensors", "optimizer.safetensors"])
def test_half_a_directory_is_no_snapshot(start_mount, saved, lacks):
    (saved / lacks).unlink()
    said = refused(start_mount, "--from", saved, name="m")
    assert str(saved) in said and lacks in said


def ended_in_mid_save(mount, folder, number):
    """A save that a signal has ended, and what it said. One that was faster than the signal is made again."""
    for _ in range(50):
        command = subprocess.Popen([str(gradfs_binary()), "save", str(mount.model), str(folder)], stderr=subprocess.PIPE)
        while command.poll() is None and not (folder.is_dir() and any(folder.iterdir())):
            time.sleep(0.001)
        command.send_signal(number)
        _, said = command.communicate(timeout=300)
        if command.returncode:
            return command.returncode, said
        shutil.rmtree(folder)
    raise AssertionError("no signal came before the end of a save")


def test_half_a_directory_is_no_snapshot__of_a_command_that_was_killed(start_mount, gradfs, saved, tmp_path):
    """Nothing of it is one, nor in the way of the next."""
    mount = start_mount(size="64MiB", reducer="adam")
    folder = tmp_path / "large"
    assert ended_in_mid_save(mount, folder, signal.SIGKILL)[0] == -signal.SIGKILL
    assert not (folder / "manifest.json").exists()
    assert f"{folder} has no manifest.json" in refused(start_mount, "--from", folder, name="m")
    save(gradfs, mount.model, folder)
    assert sorted(os.listdir(folder)) == ["manifest.json", "model.safetensors", "optimizer.safetensors"]


def test_half_a_directory_is_no_snapshot__of_a_command_that_was_interrupted(start_mount, tmp_path):
    """It leaves nothing."""
    mount = start_mount(size="64MiB", reducer="adam")
    folder = tmp_path / "large"
    status, said = ended_in_mid_save(mount, folder, signal.SIGINT)
    assert status == 1 and b"was interrupted by SIGINT" in said
    assert not folder.exists()


def test_a_snapshot_of_another_model_is_refused_by_name(start_mount, cluster, saved, model, tmp_path):
    other = write_safetensors(tmp_path / "other.safetensors", {"net.0.w": ("F32", (FLOATS + 1,), bytes(4 * FLOATS + 4))})
    one = cluster(1)
    created = one.run("create", "m", "--from", saved, "--model", other)
    assert created.returncode == 1 and one.status()["models"] == []
    for said in (refused(start_mount, "--from", saved, model=other, name="m"), created.stderr):
        assert f"{saved}: a snapshot of another model" in said
        assert f'"net.0.w" of F32 [{FLOATS}]' in said and f'"net.0.w" of F32 [{FLOATS + 1}]' in said
    start_mount("--from", saved, model=model, name="m").stop()


def test_a_resumed_job_has_the_snapshots_settings_unless_others_are_given(start_mount, saved):
    mount = start_mount("--from", saved, name="n", learning_rate=0.5, block_size="128KiB")
    assert (mount.control("learning_rate"), mount.control("reducer"), mount.version()) == ("0.5", "adam", 2)
    join(mount)
    train(mount, range(2, 3))
    assert mount.version() == 3
    assert mount.status()["contributions"] == 6


# On a network.


class Job:
    """A model on so many shards, with both learners in one mount."""

    def __init__(self, cluster, shards, *args, **options):
        self.cluster = cluster(shards)
        self.cluster.create("m", *args, **options)
        self.mount = self.cluster.mount()
        join(self.mount)

    def kill(self):
        for one in (self.mount, *self.cluster.shards):
            one.kill()
        self.cluster.mounts, self.cluster.shards = [], []


def owners(job):
    return [job.cluster.partition(shard, "m")["blocks"] for shard in job.cluster.shards]


@pytest.fixture
def whole_on_shards(cluster, model):
    job = Job(cluster, 2, model=model, **SETTINGS)
    train(job.mount, range(4))
    half = job.mount.weights()
    train(job.mount, range(4, 8))
    return half, job.mount.weights()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_run_that_was_saved_and_resumed_ends_bit_equal__on_other_shards(cluster, model, tmp_path, whole_on_shards, shards):
    first = Job(cluster, 2, model=model, **SETTINGS)
    train(first.mount, range(4))
    done = first.cluster.run("save", "m", tmp_path / "saved")
    assert done.returncode == 0 and done.stdout.startswith("gradfs: saved version 4 of m in "), done
    first.kill()
    second = Job(cluster, shards, "--from", tmp_path / "saved")
    assert second.mount.weights() == whole_on_shards[0] and second.mount.version() == 4
    assert len(owners(second)) == shards and all(owners(second))
    train(second.mount, range(4, 8))
    assert second.mount.weights() == whole_on_shards[1] and second.mount.version() == 8
    again = tmp_path / "again"
    assert second.cluster.run("save", "m", again).returncode == 0
    assert manifest(again)["learners"] == [{"name": name, "incarnation": 2, "step": 4} for name in LEARNERS]


def test_a_run_that_was_saved_and_resumed_ends_bit_equal__from_shards_to_one_process(
    cluster, start_mount, gradfs, model, tmp_path, whole_on_shards
):
    """Saved by the directory in a mount, which knows where the shards are."""
    first = Job(cluster, 3, model=model, **SETTINGS)
    train(first.mount, range(4))
    save(gradfs, first.mount.model, tmp_path / "saved")
    first.kill()
    second = start_mount("--from", tmp_path / "saved", name="m")
    assert second.weights() == whole_on_shards[0]
    join(second)
    train(second, range(4, 8))
    assert second.weights() == whole_on_shards[1]


def test_a_shard_that_hangs_fails_the_save_and_not_the_job(cluster, model, tmp_path):
    job = Job(cluster, 2, model=model, **SETTINGS)
    train(job.mount, range(1))
    coordinator = job.cluster.coordinator_shard("m")
    other = next(shard for shard in job.cluster.shards if shard is not coordinator)
    with other.paused():
        with takes(0, 25):
            done = job.cluster.run("save", "m", tmp_path / "saved", timeout=300)
    assert done.returncode == 1 and other.address in done.stderr, done.stderr
    assert not (tmp_path / "saved").exists()
    # Calls fail at once until the mount has heard of the shard again.
    def goes_on(learner):
        def step():
            job.mount.contribute(gradient(1, learner), learner=learner)

        eventually(lambda: outcome(step) != "ETIMEDOUT")

    Threads().run(*(lambda learner=learner: goes_on(learner) for learner in LEARNERS))
    train(job.mount, range(2, 3))
    assert job.mount.version() == 3
    eventually(lambda: job.cluster.run("save", "m", tmp_path / "saved").returncode == 0, 30)
    assert manifest(tmp_path / "saved")["version"] == 3
