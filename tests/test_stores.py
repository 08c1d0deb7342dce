"""Snapshots in stores: the shards of a job write them, and jobs go on from them, as docs/use/snapshots.md promises it."""

import errno
import json
import os
import re
import select
import signal
import shutil
import subprocess

import numpy as np
import pytest
from conftest import gradfs_binary  # noqa: F401
from filetools import BLOCK, eventually, flip
from patience import HANGS
from test_snapshots import (  # noqa: F401
    LEARNERS,
    SETTINGS,
    Job,
    gradient,
    join,
    manifest,
    model,
    owners,
    save,
    train,
    whole_on_shards,
)

SAVED = re.compile(r"gradfs: saved version (\d+) of m in (\S+): (\d+) bytes, of which (\d+) were written\n")


def snapshot(job, to, status=0):
    """Takes a snapshot, and returns its version, its bytes and those that were written; or why there is none."""
    done = job.cluster.run("snapshot", "m", "--to", to, "--wait")
    assert done.returncode == status, done.stdout + done.stderr
    if status:
        return done.stderr
    version, place, of, written = SAVED.fullmatch(done.stdout).groups()
    assert place == str(to)
    return int(version), int(of), int(written)


def version_of_pack(store, pack):
    """The version of the first snapshot that has data in a pack."""
    snapshots = sorted((store / "snapshots").glob("*.json"))
    return next(int(of.name.split("-v")[1].split("-")[0]) for of in snapshots if pack.name in of.read_text())


def publish(mount, weights):
    before = mount.version()
    (mount.model / "publish").write_bytes(weights)
    eventually(lambda: mount.version() > before)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_run_whose_shards_wrote_a_snapshot_goes_on_bit_equal(cluster, model, tmp_path, whole_on_shards, shards):
    first = Job(cluster, 2, model=model, **SETTINGS)
    train(first.mount, range(4))
    version, of, written = snapshot(first, tmp_path / "store")
    assert version == 4 and of == written > 3 * len(first.mount.weights())
    first.kill()
    second = Job(cluster, shards, "--from", tmp_path / "store")
    assert second.mount.weights() == whole_on_shards[0] and second.mount.version() == 4
    assert len(owners(second)) == shards and all(owners(second))
    train(second.mount, range(4, 8))
    assert second.mount.weights() == whole_on_shards[1] and second.mount.version() == 8
    assert snapshot(second, tmp_path / "store")[0] == 8


def test_a_snapshot_of_a_store_is_exported_as_save_writes_it(cluster, start_mount, gradfs, model, tmp_path, whole_on_shards):
    job, store = Job(cluster, 3, model=model, **SETTINGS), tmp_path / "store"
    train(job.mount, range(4))
    snapshot(job, store)
    assert job.cluster.run("save", "m", tmp_path / "saved").returncode == 0
    done = gradfs("snapshots", "export", store, tmp_path / "exported")
    assert done.returncode == 0 and "wrote version 4 of m" in done.stdout, done
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()
    ours, theirs = manifest(tmp_path / "exported"), manifest(tmp_path / "saved")
    for of_one_directory in ("id", "checksum", "files"):
        ours.pop(of_one_directory, None), theirs.pop(of_one_directory, None)
    assert ours == theirs
    job.kill()
    alone = start_mount("--from", store, name="m")
    assert alone.weights() == whole_on_shards[0]
    join(alone)
    train(alone, range(4, 8))
    assert alone.weights() == whole_on_shards[1]


def test_snapshots_are_listed_and_found_by_their_version(cluster, gradfs, model, tmp_path):
    job, store = Job(cluster, 2, model=model, **SETTINGS), tmp_path / "store"
    assert "no snapshot" in gradfs("snapshots", tmp_path).stdout
    weights = []
    for step in range(3):
        train(job.mount, [step])
        done = job.cluster.run("snapshot", "m", "--to", store)
        assert done.returncode == 0, done.stderr
        eventually(lambda: len(json.loads(gradfs("snapshots", store, "--json").stdout)) == step + 1)
        weights.append(job.mount.weights())
    listed = json.loads(gradfs("snapshots", store, "--json").stdout)
    assert [(of["version"], of["model"]) for of in listed] == [(1, "m"), (2, "m"), (3, "m")]
    assert gradfs("snapshots", store).stdout.count("version ") == 3
    job.kill()
    for version in (1, 3):
        done = gradfs("snapshots", "export", f"{store}#{version}", tmp_path / f"of{version}")
        assert done.returncode == 0, done.stderr
        assert weights[version - 1] in (tmp_path / f"of{version}" / "model.safetensors").read_bytes()
    again = Job(cluster, 1, "--from", f"{store}#2")
    assert again.mount.version() == 2 and again.mount.weights() == weights[1]
    done = gradfs("verify", f"{store}#9")
    assert done.returncode == 1 and "has no version 9" in done.stderr


def test_what_has_not_changed_is_not_written_again(cluster, tmp_path):
    size = 64 * BLOCK
    job = Job(cluster, 2, size=size, dtype="bf16", block_size=BLOCK, reducer="assign")
    weights = bytearray(np.random.default_rng(3).integers(0, 255, size, dtype="u1").tobytes())
    weights[1::2] = bytes(b & 0x3F for b in weights[1::2])
    publish(job.mount, bytes(weights))
    _, of, written = snapshot(job, tmp_path / "store")
    assert of == written
    assert snapshot(job, tmp_path / "store")[1:] == (of, 0)
    weights[5 * BLOCK] ^= 1
    publish(job.mount, bytes(weights))
    # The block, and its masters.
    assert snapshot(job, tmp_path / "store")[1:] == (of, 3 * BLOCK)
    job.kill()
    assert Job(cluster, 1, "--from", tmp_path / "store").mount.weights() == bytes(weights)


def test_a_flipped_bit_or_half_a_pack_is_named_and_nothing_is_made_of_it(cluster, gradfs, model, tmp_path):
    job, store = Job(cluster, 2, model=model, **SETTINGS), tmp_path / "store"
    train(job.mount, range(1))
    snapshot(job, store)
    done = gradfs("verify", store)
    assert done.returncode == 0 and "version 1 of m is as it was written" in done.stdout, done
    pack = max((store / "packs").iterdir(), key=lambda pack: pack.stat().st_size)
    whole = pack.read_bytes()
    flipped = bytearray(whole)
    flipped[BLOCK + 7] ^= 4
    for damaged, said in ((bytes(flipped), "of block "), (whole[: len(whole) // 2], pack.name)):
        pack.write_bytes(damaged)
        for words in (["verify", store], ["create", "other", "--from", store, "--registry", job.cluster.registry]):
            done = gradfs(*words)
            assert done.returncode == 1 and said in done.stderr and pack.name in done.stderr, done
        assert "other" not in job.cluster.status()["models"]
    pack.write_bytes(whole)
    description = next((store / "snapshots").iterdir())
    description.write_text(description.read_text().replace('"version":1', '"version":2'))
    done = gradfs("verify", store)
    assert done.returncode == 1 and description.name in done.stderr, done


def test_a_snapshot_that_cannot_be_written_says_why_and_the_job_goes_on(cluster, model, tmp_path):
    job = Job(cluster, 2, model=model, **SETTINGS)
    train(job.mount, range(1))
    (tmp_path / "file").write_text("no directory")
    for to, why in ((tmp_path / "file", "file"), ("/proc/nowhere", "/proc/nowhere"), ("s5://bucket", "s5")):
        assert why in snapshot(job, to, status=1)
    train(job.mount, range(1, 2))
    assert job.mount.version() == 2
    assert snapshot(job, tmp_path / "store")[0] == 2
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["claims", "packs", "snapshots"]
    shutil.rmtree(tmp_path / "store" / "packs")
    assert snapshot(job, tmp_path / "store")[0] == 2


def listed(gradfs, store):
    return [of["version"] for of in json.loads(gradfs("snapshots", store, "--json").stdout)]


def durable(mount):
    text = (mount.model / "durable_version").read_text()
    return int(text) if text else None


def test_a_job_takes_snapshots_as_its_settings_say(cluster, gradfs, model, tmp_path):
    store = tmp_path / "store"
    job = Job(cluster, 2, model=model, snapshot_to=store, snapshot_every=3, snapshot_keep=9, **SETTINGS)
    eventually(lambda: durable(job.mount) == 0)
    train(job.mount, range(2))
    assert durable(job.mount) == 0
    train(job.mount, [2])
    eventually(lambda: durable(job.mount) == 3)
    job.mount.control("snapshot_every", "0")
    train(job.mount, range(3, 8))
    job.mount.control("snapshot_every", "1s")
    eventually(lambda: durable(job.mount) == 8)
    assert listed(gradfs, store) == [0, 3, 8]
    assert job.mount.status()["durable_version"] == 8
    told = job.cluster.ask(job.cluster.coordinator_shard("m"))["models"][0]["coordinator"]["snapshots"]
    assert told["durable_version"] == 8 and told["failures"] == 0 and told["bytes"] >= told["written_bytes"] > 0
    assert "newest snapshot: version 8, " in job.cluster.run("status").stdout
    for name, wrong in (("snapshot_to", "store"), ("snapshot_every", "often"), ("snapshot_keep", 0)):
        with pytest.raises(OSError, match="Invalid argument"):
            job.mount.control(name, wrong)


def test_fsync_of_version_waits_until_it_is_durable(cluster, start_mount, model, tmp_path):
    def synced(mount, name="version"):
        with open(mount.model / name) as file:
            os.fsync(file.fileno())
        return (mount.model / "durable_version").read_text().strip()

    settings = {**SETTINGS, "snapshot_every": 0}
    job = Job(cluster, 2, model=model, snapshot_to=tmp_path / "store", **settings)
    mounts = {"shards": job.mount}
    mounts["up"] = start_mount(model=model, name="m", snapshot_to=tmp_path / "alone", **settings)
    join(mounts["up"])
    for mount in mounts.values():
        assert (mount.model / "durable_version").read_text() == ""
        for step in range(2):
            train(mount, [step])
            version = mount.version()
            eventually(lambda: synced(mount, ["version", "durable_version"][step]) == str(version))
    mount = job.mount
    mount.control("snapshot_to", "")
    train(mount, [2])
    with pytest.raises(OSError) as caught:
        synced(mount)
    assert caught.value.errno == errno.EINVAL and "snapshot_to" in (mount.model / "error").read_text()
    mount.control("snapshot_to", "/proc/none")
    with pytest.raises(OSError) as caught:
        synced(mount)
    assert caught.value.errno == errno.EIO and "/proc/none" in (mount.model / "error").read_text()
    # The shards need no last snapshot.
    mount.control("snapshot_to", "")


def test_durable_version_says_which_version_has_a_snapshot(cluster, model, tmp_path):
    job = Job(cluster, 2, model=model, **SETTINGS)
    other = job.cluster.mount()
    assert durable(job.mount) is None and durable(other) is None
    with open(other.model / "durable_version") as file:
        assert file.read() == ""
        poll = select.poll()
        poll.register(file, select.POLLPRI | select.POLLERR)
        assert poll.poll(100) == []
        other.control("snapshot_to", tmp_path / "store")
        assert poll.poll(30_000)
        file.seek(0)
        assert file.read() == "0\n"
    eventually(lambda: durable(job.mount) == 0)


def test_a_snapshot_is_taken_by_command_into_the_jobs_own_store(cluster, gradfs, model, tmp_path):
    job = Job(cluster, 2, model=model, **SETTINGS)
    done = job.cluster.run("snapshot", "m", "--wait")
    assert done.returncode == 1 and "control/snapshot_to" in done.stderr, done
    job.mount.control("snapshot_every", 0)
    job.mount.control("snapshot_to", tmp_path / "store")
    train(job.mount, range(1))
    done = job.cluster.run("snapshot", "m", "--wait")
    assert done.returncode == 0 and "saved version 1 of m" in done.stdout, done
    assert listed(gradfs, tmp_path / "store") == [1]
    train(job.mount, range(1, 2))
    assert job.cluster.run("snapshot", "m").returncode == 0
    eventually(lambda: listed(gradfs, tmp_path / "store") == [1, 2])


def test_older_snapshots_go_and_what_others_need_stays(cluster, gradfs, tmp_path):
    size, store = 64 * BLOCK, tmp_path / "store"
    options = {"dtype": "bf16", "block_size": BLOCK, "reducer": "assign", "snapshot_every": 0, "snapshot_keep": 2}
    job = Job(cluster, 2, size=size, snapshot_to=store, **options)
    weights = bytearray(size)
    for version in range(1, 6):
        weights[version * BLOCK + 1] = 0x40
        publish(job.mount, bytes(weights))
        done = job.cluster.run("snapshot", "m", "--wait")
        assert done.returncode == 0, done.stderr
        assert listed(gradfs, store) == list(range(max(1, version - 1), version + 1))
    # Most data are those of the first snapshot.
    assert sum(pack.stat().st_size for pack in (store / "packs").iterdir()) < 4 * size
    assert job.cluster.run("delete", "m").returncode == 0 and listed(gradfs, store) == [4, 5]
    job.kill()
    assert Job(cluster, 1, "--from", store).mount.weights() == bytes(weights)
    assert gradfs("verify", f"{store}#4").returncode == 0


def test_a_snapshot_that_writes_all_anew_does_not_need_those_before(cluster, gradfs, tmp_path):
    size, store = 8 * BLOCK, tmp_path / "store"
    options = {"dtype": "bf16", "block_size": BLOCK, "reducer": "assign", "snapshot_every": 0, "snapshot_keep": 9}
    job = Job(cluster, 2, size=size, snapshot_full_every=2, **options)
    weights, all_written = bytearray(size), []
    for version in range(1, 5):
        weights[version] = 0x40
        publish(job.mount, bytes(weights))
        said, of, written = snapshot(job, store)
        assert said == version
        all_written.append(of == written)
    assert all_written == [True, False, True, False]
    for pack in (store / "packs").iterdir():
        if version_of_pack(store, pack) == 1:
            flip(pack)
    verified = [gradfs("verify", f"{store}#{version}").returncode == 0 for version in range(1, 5)]
    assert verified == [False, False, True, True]


def test_a_model_is_deleted_with_its_snapshots_if_they_are_its_own(cluster, gradfs, model, tmp_path):
    store = tmp_path / "store"
    first = Job(cluster, 2, model=model, snapshot_to=store, snapshot_every=0, **SETTINGS)
    snapshot(first, store)
    (store / "packs" / "notes").write_text("of somebody else")
    second = Job(cluster, 1, "--from", store)
    done = first.cluster.run("delete", "m", "--snapshots")
    assert done.returncode == 1 and "has gone on from there" in done.stderr, done.stderr
    train(first.mount, range(1))
    snapshot(second, store)
    done = second.cluster.run("delete", "m", "--snapshots")
    assert done.returncode == 0 and f"removed 2 snapshot(s) from file://{store}" in done.stdout, done
    assert [str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()] == ["packs/notes"]
    first.mount.control("snapshot_to", tmp_path / "other")
    assert snapshot(first, store)[0] == 1
    without = Job(cluster, 1, model=model, **SETTINGS)
    done = without.cluster.run("delete", "m", "--snapshots")
    assert done.returncode == 1 and "snapshot_to" in done.stderr, done.stderr
    train(without.mount, range(1))


def test_two_jobs_do_not_save_into_one_store(cluster, model, tmp_path):
    first, second = (Job(cluster, 1, model=model, **SETTINGS) for _ in range(2))
    snapshot(first, tmp_path / "store")
    why = snapshot(second, tmp_path / "store", status=1)
    assert "has the snapshots of model \"m\"" in why, why
    assert snapshot(first, tmp_path / "store")[0] == 0


def test_a_job_that_goes_on_takes_its_store_over(cluster, gradfs, model, tmp_path):
    first = Job(cluster, 2, model=model, **SETTINGS)
    train(first.mount, range(2))
    snapshot(first, tmp_path / "store")
    second = Job(cluster, 1, "--from", tmp_path / "store")
    assert "has gone on from there" in snapshot(first, tmp_path / "store", status=1)
    train(second.mount, range(2, 3))
    assert snapshot(second, tmp_path / "store")[0] == 3
    # A copy under another name is another job, which does not save there.
    second.mount.control("snapshot_to", tmp_path / "store")
    eventually(lambda: durable(second.mount) == 3)
    assert gradfs("create", "copy", "--from", tmp_path / "store", "--registry", second.cluster.registry).returncode == 0
    copy = second.cluster.mount(models=["copy"])
    assert (copy.root / "copy/control/snapshot_to").read_text().strip() == ""
    assert snapshot(second, tmp_path / "store")[0] == 3


def test_up_with_a_state_goes_on_by_itself(start_mount, gradfs, model, tmp_path):
    store, learners = tmp_path / "state", {**SETTINGS, "snapshot_every": 1}
    for seen in range(3):
        mount = start_mount(model, state=store, name="m", **learners)
        assert mount.version() == 2 * seen and mount.control("snapshot_to") == str(store)
        join(mount)
        train(mount, range(2 * seen, 2 * seen + 2))
        eventually(lambda: durable(mount) == mount.version())
        weights = mount.weights()
        # The last one ends by itself.
        mount.kill() if seen < 2 else mount.stop()
    assert listed(gradfs, store)[-1] == 6
    mount = start_mount(state=store, size="1MiB", name="m")
    assert mount.weights() == weights, "what is said of a blank model is for the first time"
    for other in ("--from", "--snapshot-to"):
        done = gradfs("up", "--state", store, other, tmp_path, model, tmp_path / "mnt")
        assert done.returncode == 2 and "exclude each other" in done.stderr, done
    done = gradfs("up", "--snapshot-to", store, model, model, "--name", "a", "--name", "b", tmp_path / "mnt")
    assert done.returncode == 2 and "snapshots of one model" in done.stderr, done


def test_up_with_the_state_of_another_model_or_a_damaged_one_is_refused(start_mount, gradfs, model, tmp_path):
    store, mnt = tmp_path / "state", tmp_path / "mnt"
    mnt.mkdir()
    first = start_mount(model, state=store, name="m", **{**SETTINGS, "snapshot_every": 1})
    join(first)
    for step in range(2):
        train(first, [step])
        eventually(lambda: durable(first) == first.version())
    first.stop()
    done = gradfs("up", "--state", store, model, "--name", "other", mnt)
    assert done.returncode == 1 and "the snapshots of model \"m\"" in done.stderr and "--name m" in done.stderr, done
    (newest,) = (store / "snapshots").glob("*-v2-*.json")
    newest.write_text(newest.read_text()[:200])
    done = gradfs("up", "--state", store, model, "--name", "m", mnt)
    assert done.returncode == 1 and newest.name in done.stderr and f"--from {store}#VERSION" in done.stderr, done
    older = start_mount("--from", f"{store}#1", snapshot_to=store, name="m")
    assert older.version() == 1
    join(older)
    train(older, range(1, 2))
    older.stop()
    assert start_mount(state=store, size="1MiB", name="m").version() == 2


def test_a_job_of_one_process_takes_snapshots_and_a_last_one_when_it_stops(start_mount, gradfs, model, tmp_path):
    store = tmp_path / "store"
    first = start_mount(model, snapshot_to=store, snapshot_every=2, name="m", **SETTINGS)
    join(first)
    eventually(lambda: durable(first) == 0)
    train(first, range(2))
    eventually(lambda: durable(first) == 2)
    train(first, range(2, 3))
    weights = first.weights()
    first.stop()
    assert listed(gradfs, store) == [0, 2, 3]
    second = start_mount("--from", store, name="m")
    assert second.weights() == weights and second.control("snapshot_to") == str(store)
    join(second)
    train(second, range(3, 5))
    eventually(lambda: durable(second) == 5)
    seen = eventually(lambda: second.status()["snapshots"])
    assert seen["durable_version"] == 5 and seen["failures"] == 0 and seen["bytes"] >= seen["written_bytes"] > 0
    assert 0 <= seen["age_seconds"] < HANGS and seen["why"] is None


def test_files_of_others_in_a_store_are_left_alone(cluster, gradfs, model, tmp_path):
    job, store = Job(cluster, 1, model=model, snapshot_every=0, snapshot_keep=1, **SETTINGS), tmp_path / "store"
    for folder in ("packs", "snapshots"):
        (store / folder).mkdir(parents=True)
    others = [store / name for name in ("packs/thesis.tar", "packs/0123.begun", "snapshots/notes.json", "snapshots/._x.json")]
    for other in others:
        other.write_text("mine")
    job.mount.control("snapshot_to", store)
    for step in range(3):
        train(job.mount, [step])
        done = job.cluster.run("snapshot", "m", "--wait")
        assert done.returncode == 0, done.stderr
        assert listed(gradfs, store) == [step + 1]
    assert [other.read_text() for other in others] == ["mine"] * 4


def test_another_place_has_its_snapshot_at_once(cluster, gradfs, model, tmp_path):
    job = Job(cluster, 1, model=model, snapshot_to=tmp_path / "a", **SETTINGS)
    eventually(lambda: listed(gradfs, tmp_path / "a") == [0])
    job.mount.control("snapshot_to", f"{tmp_path}/b/")
    eventually(lambda: listed(gradfs, tmp_path / "b") == [0])
    # Another spelling is the same place.
    train(job.mount, [0])
    done = job.cluster.run("snapshot", "m", "--to", f"file://{tmp_path}/b", "--wait")
    assert done.returncode == 0 and durable(job.mount) == 1, done
    with pytest.raises(OSError, match="Invalid argument"):
        job.mount.control("snapshot_to", f"{tmp_path}/b#3")


def test_a_failed_snapshot_leaves_nothing(cluster, model, tmp_path):
    job, store = Job(cluster, 2, model=model, **SETTINGS), tmp_path / "store"
    snapshot(job, store)
    left = sorted(store.rglob("*"))
    other = next(shard for shard in job.cluster.shards if shard is not job.cluster.coordinator_shard("m"))
    train(job.mount, [0])
    with other.paused():
        done = job.cluster.run("snapshot", "m", "--to", store, "--wait", timeout=300)
    assert done.returncode == 1 and other.address in done.stderr, done.stderr
    assert sorted(store.rglob("*")) == left


def test_shards_that_are_told_to_end_take_a_last_snapshot(cluster, gradfs, model, tmp_path, whole_on_shards):
    job, store = Job(cluster, 3, model=model, snapshot_to=tmp_path / "store", snapshot_every=0, **SETTINGS), tmp_path / "store"
    train(job.mount, range(4))
    for shard in job.cluster.shards:
        shard.process.send_signal(signal.SIGTERM)
    # Until all have been told, one may try to hand its blocks to the others.
    ended = [shard.process.wait(90) for shard in job.cluster.shards]
    assert ended == [0, 0, 0], "\n".join(shard.stderr() for shard in job.cluster.shards)
    assert listed(gradfs, store)[-1] == 4
    job.kill()
    assert Job(cluster, 2, "--from", store).mount.weights() == whole_on_shards[0]


def test_a_shard_that_does_not_see_the_store_is_sent_its_blocks(cluster, model, tmp_path, whole_on_shards):
    """The command sees the store where the shards see an empty directory."""
    job, store, seen = Job(cluster, 2, model=model, snapshot_every=0, **SETTINGS), tmp_path / "store", tmp_path / "seen"
    train(job.mount, range(4))
    snapshot(job, store)
    seen.mkdir()
    words = [gradfs_binary(), "create", "again", "--from", seen, "--registry", job.cluster.registry]
    script = 'mount --bind "$0" "$1"; shift; exec "$@"'
    created = subprocess.run(["unshare", "-m", "sh", "-c", script, store, seen, *words], capture_output=True, text=True, timeout=HANGS)
    assert created.returncode == 0 and not os.listdir(seen), created.stderr
    assert created.stderr.count("so its blocks are sent") == 2
    assert job.cluster.mount(models=["again"]).weights() == whole_on_shards[0]


def test_a_last_snapshot_that_fails_ends_a_shard_with_1(cluster, model, tmp_path):
    job = Job(cluster, 1, model=model, snapshot_every=0, snapshot_to="/proc/nowhere", **SETTINGS)
    (shard,) = job.cluster.shards
    shard.process.send_signal(signal.SIGTERM)
    assert shard.process.wait(90) == 1
    assert "no last snapshot was saved" in shard.stderr() and "/proc/nowhere" in shard.stderr()
