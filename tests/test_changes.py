"""Pulling what has changed: what docs/operate/network.md promises of it."""

import errno
import mmap
import os
import threading

import ml_dtypes
import numpy as np
import pytest
from filetools import BLOCK, close, eventually
from patience import Limit
from safetensors.numpy import save_file

BF16 = ml_dtypes.bfloat16
ELEMENTS = 40 * BLOCK // 2 + 1000
SIZE = 2 * ELEMENTS


@pytest.fixture
def models(tmp_path):
    """A file with a model of bf16 in three tensors, and its values in their order."""
    values = np.random.default_rng(1).standard_normal(ELEMENTS).astype(BF16)
    cuts = [ELEMENTS // 3, ELEMENTS // 2 + 1]
    save_file(dict(zip("abc", np.split(values, cuts))), tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors", values


def change(values, share, seed):
    changed = values.copy()
    bits = changed.view("<u2")
    bits[np.random.default_rng(seed).random(len(bits)) < share] ^= 1
    return changed


def publish(mount, values, name="publish"):
    fd = os.open(mount.model / name, os.O_WRONLY)
    data = values.tobytes()
    assert os.write(fd, data) == len(data)
    os.close(fd)


def pulled(mount):
    payload = mount.status()["payload"]
    return payload["pulled_bytes"], payload["pull_patched_bytes"]


def read(mount):
    return np.frombuffer((mount.model / "weights").read_bytes(), BF16)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_mount_pulls_what_has_changed(cluster, models, transport, shards):
    file, values = models
    if (transport, shards) == ("shm", 1):
        pytest.skip("such a mount shows the shard's memory, and pulls nothing")
    one = cluster(shards)
    one.create("m", model=file, block_size=BLOCK, reducer="assign", timeout=200)
    writes, reads = [one.mount(model="m", transport=transport) for _ in range(2)]
    held, before = [], pulled(reads)
    for version in range(1, 8):
        # Nothing, one in a hundred, and a dense run beside those.
        values = change(values, 0 if version == 3 else 0.01, version)
        if version == 5:
            values[ELEMENTS // 2 : ELEMENTS // 2 + BLOCK] *= -1
        publish(writes, values)
        eventually(lambda: reads.seen() == version)
        assert (read(reads) == values).all(), version
        held.append((os.open(reads.model / "weights", os.O_RDONLY), values.tobytes()))
        # A buffer that is held is never patched.
        if len(held) == 3:
            fd, data = held.pop(0)
            assert os.pread(fd, SIZE, 0) == data
            os.close(fd)
    came, patched = (after - then for after, then in zip(pulled(reads), before))
    assert patched >= 6.9 * SIZE - 2 * 3 * BLOCK and came < 0.2 * SIZE, (came / SIZE, patched / SIZE)
    close(*(fd for fd, _ in held))


@pytest.mark.parametrize("way", ["publish", "weights", "mapped"])
def test_a_publisher_sends_what_has_changed(cluster, models, way):
    file, values = models
    one = cluster(2)
    one.create("m", model=file, block_size=BLOCK, reducer="assign", timeout=200)
    writes, reads = [one.mount(model="m", transport="tcp") for _ in range(2)]
    sent = lambda: writes.status()["payload"]["pushed_bytes"]  # noqa: E731
    before = sent()
    for version in range(1, 6):
        values = change(values, 0.01, version)
        if way == "mapped":
            fd = os.open(writes.model / "publish", os.O_RDWR)
            with mmap.mmap(fd, SIZE) as memory:
                memory[:] = values.tobytes()
                os.fsync(fd)
            os.close(fd)
        else:
            publish(writes, values, way)
        eventually(lambda: reads.seen() == version)
        assert (read(reads) == values).all() and (read(writes) == values).all(), version
    assert 0 < sent() - before < 0.06 * 5 * SIZE
    # Without them, all of it goes.
    (writes.model / "control/delta").write_text("off\n")
    before = sent()
    publish(writes, values, "publish")
    assert sent() - before >= SIZE


def test_a_mount_that_lags_behind_pulls_the_changes_of_several_versions_at_once(cluster, models):
    file, values = models
    one = cluster(1)
    one.create("m", model=file, block_size=BLOCK, reducer="assign", timeout=200, pull="on-demand", changes=3)
    writes, reads = [one.mount(model="m", transport="tcp") for _ in range(2)]
    assert (read(reads) == values).all()
    for behind, is_known in [(1, True), (3, True), (4, False), (2, True)]:
        before = pulled(reads)
        for seed in range(behind):
            values = change(values, 0.002, 100 * behind + seed)
            publish(writes, values)
        eventually(lambda: reads.version() == writes.version())
        assert (read(reads) == values).all()
        came, patched = (after - then for after, then in zip(pulled(reads), before))
        assert (came < 0.1 * SIZE, patched == SIZE) == (is_known, is_known), (behind, came / SIZE)
        said = reads.status()["pull"]
        assert said["whole_blocks"] == (0 if is_known else said["blocks"]), said


def test_delta_off_pulls_all(cluster, models):
    file, values = models
    one = cluster(1)
    one.create("m", model=file, block_size=BLOCK, reducer="assign", timeout=200)
    writes, reads = [one.mount(model="m", transport="tcp") for _ in range(2)]
    for delta, is_whole in [("off", True), ("auto", False)]:
        (writes.model / "control" / "delta").write_text(delta)
        eventually(lambda: (reads.model / "control" / "delta").read_text() == f"{delta}\n")
        before, values = pulled(reads), change(values, 0.01, 7 + is_whole)
        publish(writes, values)
        eventually(lambda: reads.seen() == writes.version())
        assert (read(reads) == values).all()
        came, patched = (after - then for after, then in zip(pulled(reads), before))
        assert (came >= SIZE, patched == 0) == (is_whole, is_whole)


def test_optimizer_steps_on_bf16_are_pulled_by_what_they_change(cluster, models):
    file, values = models
    one = cluster(1)
    one.create("m", model=file, block_size=BLOCK, reducer="adamw", learning_rate=1e-5, timeout=200, nonfinite="reject")
    trains, reads = [one.mount(model="m", transport="tcp") for _ in range(2)]
    before = pulled(reads)
    gradient = np.random.default_rng(3).standard_normal(ELEMENTS).astype(BF16)
    for step in range(1, 4):
        trains.contribute(gradient.view("<u2"))
        eventually(lambda: reads.seen() == step)
        assert trains.weights() == (reads.model / "weights").read_bytes()
    came, patched = (after - then for after, then in zip(pulled(reads), before))
    changed = (read(reads).view("<u2") != values.view("<u2")).mean()
    assert 0 < changed < 0.2 and patched == 3 * SIZE and came < 1.5 * SIZE, (changed, came / SIZE)


def test_publishers_on_two_mounts_do_not_wait_for_what_the_shards_lack(cluster, models):
    file, values = models
    one = cluster(1)
    one.create("m", model=file, block_size=BLOCK, reducer="assign", timeout=200)
    mounts = [one.mount(model="m", transport="tcp") for _ in range(2)]
    limit = Limit(10)

    def publishes(mount):
        made = 0
        while made < 20:
            try:
                publish(mount, values)
                made += 1
            except OSError as error:
                # The other one was first.
                assert error.errno == errno.EBUSY

    # Each makes a version while the other one's is on its way.
    threads = [threading.Thread(target=publishes, args=[mount]) for mount in mounts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not limit.over(), limit.taken()
    assert mounts[0].version() == 40
