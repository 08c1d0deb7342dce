"""What has changed, as files: what docs/use/files.md promises of `changes-since-<m>` and of `gradfs apply`."""

import errno
import os
import shutil
import threading

import ml_dtypes
import numpy as np
import pytest
from conftest import gradfs_binary, ran
from filetools import BLOCK, close, eventually, fails
from patience import Limit
from safetensors import safe_open
from safetensors.numpy import save_file

BF16 = ml_dtypes.bfloat16
# Odd sizes, of several types: elements of most tensors lie across the ends of blocks and of lines.
SHAPES = {"wide": ("<f8", 3001), "a": ("<f4", 12_345), "b": (BF16, (301, 333)), "c": (BF16, 2 * BLOCK + 7), "flags": ("u1", 777)}


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(1)
    tensors = {}
    for name, (dtype, shape) in SHAPES.items():
        values = rng.standard_normal(shape)
        tensors[name] = (abs(values) * 50).astype("u1") if dtype == "u1" else values.astype(dtype)
    save_file(tensors, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def placed(mount, data):
    """The tensors in a model's bytes."""
    data, tensors = bytearray(data), {}
    for line in (mount.model / "layout").read_text().splitlines():
        name, _, shape, offset = line.split("\t")
        dtype = np.dtype(SHAPES[name][0])
        count = int(np.prod([int(n) for n in shape.strip("[]").split(",") if n]))
        tensors[name] = np.frombuffer(memoryview(data)[int(offset) : int(offset) + count * dtype.itemsize], dtype)
    return data, tensors


def weights(mount, version):
    return (mount.model / "versions" / str(version) / "weights").read_bytes()


def publish(mount, data):
    fd = os.open(mount.model / "publish", os.O_WRONLY)
    assert os.write(fd, data) == len(data)
    os.close(fd)


def change(mount, seed, share=0.01):
    """Publishes a version in which a share of the elements has changed, and none of `flags` or the first of `a`."""
    data, tensors = placed(mount, mount.weights())
    rng = np.random.default_rng(seed)
    for name, values in tensors.items():
        if name != "flags":
            bits = values.view(f"<u{values.dtype.itemsize}")
            bits[rng.random(len(bits)) < share] ^= 1
    publish(mount, bytes(data))
    return bytes(data)


def changes(mount, version, base, of="safetensors"):
    return mount.model / "versions" / str(version) / f"changes-since-{base}.{of}"


def check_sparse(mount, path, old, new, is_exact=True):
    """The file brings a copy of the old version to the new one, and names the elements that differ."""
    (data, before), (_, after) = placed(mount, old), placed(mount, new)
    with safe_open(path, "np") as file:
        listed = set(file.keys())
        assert listed == {f"{name}.{what}" for name in before for what in ("indices", "values") if f"{name}.indices" in listed}
        for name, values in before.items():
            bits, new_bits = (of.view(f"<u{of.dtype.itemsize}") for of in (values, after[name]))
            differing = np.flatnonzero(bits != new_bits)
            if f"{name}.indices" not in listed:
                assert len(differing) == 0, name
                continue
            indices, put = (file.get_tensor(f"{name}.indices"), file.get_tensor(f"{name}.values"))
            assert indices.dtype == np.int32 and put.dtype == values.dtype and (np.diff(indices) > 0).all()
            assert np.isin(differing, indices).all() and (not is_exact or len(differing) == len(indices)), name
            values[indices] = put
    assert bytes(data) == new
    assert path.stat().st_size == len(path.read_bytes())


@pytest.mark.also_on_network
@pytest.mark.parametrize("passthrough", [True, False])
def test_changes_since_a_version_are_a_sparse_safetensors_file(start_mount, model, passthrough):
    mount = start_mount(model=model, reducer="assign", retain=8, block_size=BLOCK, no_passthrough=not passthrough)
    versions = [mount.weights()]
    for seed in range(4):
        versions.append(change(mount, seed))
    for base, version in [(3, 4), (1, 4), (0, 1), (0, 3)]:
        check_sparse(mount, changes(mount, version, base), versions[base], versions[version])
    with safe_open(changes(mount, 4, 1), "np") as file:
        assert (file.metadata()["gradfs.base"], file.metadata()["gradfs.version"]) == ("1", "4")
        assert "flags.indices" not in file.keys()
    # It shows up in no listing, so that nobody copies all pairs.
    assert not [name for name in os.listdir(mount.model / "versions/4") if name.startswith("changes")]


@pytest.mark.also_on_network
def test_changes_are_those_of_the_bytes_that_were_written_last(start_mount, model):
    """Blocks are compared while others are written, and some of them are written again."""
    mount = start_mount(model=model, reducer="assign", retain=1, block_size=BLOCK)
    rng = np.random.default_rng(7)
    before = mount.weights()
    for version in range(1, 21):
        data, tensors = placed(mount, before)
        for values in tensors.values():
            bits = values.view(f"<u{values.dtype.itemsize}")
            bits[rng.random(len(bits)) < rng.choice([0, 0.001, 0.3])] ^= 1
        fd = os.open(mount.model / "publish", os.O_WRONLY)
        # All of it, often with other bytes first, in one piece or in many.
        for drafts in range(version % 4):
            draft = bytearray(data)
            draft[::64] = bytes(byte ^ 1 for byte in draft[::64])
            at = 0 if drafts else int(rng.integers(len(data)))
            os.pwrite(fd, draft[at : at + 3 * BLOCK], at)
        piece = int(rng.choice([BLOCK, 3 * BLOCK, len(data)]))
        for at in range(0, len(data), piece):
            os.pwrite(fd, data[at : at + piece], at)
        if version % 3 == 0:
            os.pwrite(fd, data[100:BLOCK], 100)
        os.close(fd)
        mount.wait_for_version(version)
        assert mount.weights() == bytes(data)
        check_sparse(mount, changes(mount, version, version - 1), before, bytes(data))
        before = bytes(data)


def test_changes_are_those_since_the_version_before_whoever_publishes_meanwhile(start_mount, model):
    mount = start_mount(model=model, reducer="assign", retain=2, block_size=BLOCK)
    for version in range(2, 12, 2):
        fd = os.open(mount.model / "publish", os.O_WRONLY)
        data, tensors = placed(mount, mount.weights())
        tensors["a"].view("<u4")[version::100] ^= 1
        half = len(data) // 2
        os.pwrite(fd, data[:half], 0)
        between = change(mount, version)
        os.pwrite(fd, data[half:], half)
        fails(errno.EBUSY, os.fsync, fd)
        os.pwrite(fd, data, 0)
        os.close(fd)
        mount.wait_for_version(version)
        check_sparse(mount, changes(mount, version, version - 1), between, bytes(data))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_mounts_over_a_network_ask_all_shards_what_has_changed(cluster, model, gradfs, tmp_path, transport, shards):
    one = cluster(shards)
    one.create("m", model=model, block_size=BLOCK, reducer="assign", timeout=200, retain=1)
    writes, reads = [one.mount(model="m", transport=transport) for _ in range(2)]
    versions = [writes.weights()]
    for seed in range(4):
        versions.append(change(writes, seed))
    eventually(lambda: reads.seen() == 4)
    # Version 3 is in memory, version 1 is not: an element may have changed back, and the shards' records do not tell.
    for base in (3, 1):
        check_sparse(reads, changes(reads, 4, base), versions[base], versions[4], is_exact=base == 3)
        assert changes(reads, 4, base).stat().st_size < 0.12 * len(versions[0])
    (tmp_path / "copy").write_bytes(versions[1])
    assert gradfs("apply", changes(reads, 4, 1, "patch"), tmp_path / "copy").returncode == 0
    assert (tmp_path / "copy").read_bytes() == versions[4]


def test_whole_blocks_are_compared_where_the_older_version_is_in_memory(start_mount, model):
    mount = start_mount(model=model, reducer="sgd", learning_rate=0.5, retain=1, block_size=BLOCK)
    # All of fp32 counts as changed after a step of an optimizer.
    before = mount.weights()
    data, tensors = placed(mount, bytes(len(before)))
    tensors["a"][100:200] = 1
    mount.contribute(bytes(data))
    after = mount.weights()
    assert before != after
    check_sparse(mount, changes(mount, 1, 0), before, after)
    mount.contribute(bytes(data))
    assert not (mount.model / "versions/0").exists()
    check_sparse(mount, changes(mount, 2, 0), before, mount.weights(), is_exact=False)


@pytest.mark.also_on_network
def test_changes_that_are_not_known_are_not_there_and_error_says_why(start_mount, model):
    mount = start_mount(model=model, reducer="assign", retain=1, changes=2, block_size=BLOCK)
    for seed in range(4):
        change(mount, seed)
    assert changes(mount, 4, 2).exists() and changes(mount, 4, 2, "patch").exists()
    for of in ("safetensors", "patch"):
        fails(errno.ENOENT, os.stat, changes(mount, 4, 1, of))
        said = (mount.model / "error").read_text()
        assert "from version 1 to 4" in said and "control/changes" in said, said
    assert "from version 1 to 4" in mount.stderr()
    for name in ("4.patch", "5.patch", "03.patch", "+3.patch", "3", "x.patch", "-1.safetensors", "3.npy", "9999999.patch"):
        fails(errno.ENOENT, os.stat, mount.model / f"versions/4/changes-since-{name}")
    for base in (4, 5):
        fails(errno.ENOENT, os.stat, changes(mount, 4, base))
        assert f"version {base} is not older than version 4" in (mount.model / "error").read_text()
    fails(errno.ENOENT, os.stat, mount.model / "versions/2/changes-since-1.patch")
    fails(errno.EACCES, os.open, changes(mount, 4, 3), os.O_WRONLY)


@pytest.mark.also_on_network
def test_an_open_file_of_changes_keeps_its_bytes(start_mount, model, gradfs, tmp_path):
    mount = start_mount(model=model, reducer="assign", retain=1, max_versions=6, block_size=BLOCK)
    versions = [mount.weights(), change(mount, 0)]
    paths = [changes(mount, 1, 0, of) for of in ("safetensors", "patch")]
    held = [(os.open(path, os.O_RDONLY), path.read_bytes()) for path in paths]
    for seed in range(1, 6):
        versions.append(change(mount, seed, 0.2))
    assert not (mount.model / "versions/1").exists()
    for fd, data in held:
        assert os.fstat(fd).st_size == len(data) == len(os.pread(fd, len(data) + 1, 0))
        for offset in range(0, len(data), 4099):
            assert os.pread(fd, 5000, offset) == data[offset : offset + 5000]
    (tmp_path / "copy").write_bytes(versions[0])
    assert gradfs("apply", f"/proc/{os.getpid()}/fd/{held[1][0]}", tmp_path / "copy").returncode == 0
    assert (tmp_path / "copy").read_bytes() == versions[1]
    close(*(fd for fd, _ in held))


@pytest.fixture
def patched(start_mount, model, tmp_path):
    """A patch from version 0 to 3, a copy of version 0, and all versions."""
    mount = start_mount(model=model, reducer="assign", retain=3, block_size=BLOCK)
    versions = [mount.weights(), *(change(mount, seed) for seed in range(3))]
    shutil.copyfile(changes(mount, 3, 0, "patch"), tmp_path / "patch")
    (tmp_path / "copy").write_bytes(versions[0])
    return tmp_path / "patch", tmp_path / "copy", versions, mount


@pytest.mark.parametrize("flags", [(), ("--in-place",)])
def test_apply_brings_a_copy_to_the_newer_version(patched, gradfs, flags):
    patch, copy, versions, _ = patched
    copy.chmod(0o640)
    with copy.open("rb") as old:
        assert gradfs("apply", *flags, patch, copy).returncode == 0
        assert os.path.samestat(os.fstat(old.fileno()), copy.stat()) == bool(flags)
    for _ in range(2):
        # It can be run again.
        done = gradfs("apply", *flags, patch, copy)
        assert done.returncode == 0 and "is version 3 (from 0" in done.stdout, done.stderr
        assert copy.read_bytes() == versions[3]
    assert copy.stat().st_mode & 0o777 == 0o640
    assert patch.stat().st_size < 0.06 * len(versions[0])


@pytest.mark.parametrize("flags", [(), ("--in-place",)])
def test_apply_refuses_what_does_not_fit_and_changes_nothing(patched, gradfs, flags):
    patch, copy, versions, mount = patched

    def refuses(patch, copy, *words):
        before, beside = copy.read_bytes(), sorted(os.listdir(copy.parent))
        done = gradfs("apply", *flags, patch, copy)
        assert done.returncode == 1 and all(word in done.stderr for word in words), done.stderr
        assert copy.read_bytes() == before and sorted(os.listdir(copy.parent)) == beside

    # One byte that the patch does not write.
    wrong = bytearray(versions[0])
    same = np.flatnonzero(np.frombuffer(versions[0], "u1") == np.frombuffer(versions[3], "u1"))
    wrong[same[len(same) // 2]] ^= 1
    (copy.parent / "wrong").write_bytes(wrong)
    refuses(patch, copy.parent / "wrong", "no copy of version 0")
    shutil.copyfile(mount.model / "versions/0/weights.safetensors", copy.parent / "named")
    refuses(patch, copy.parent / "named", "weights.safetensors has a header")
    data = patch.read_bytes()
    damaged = copy.parent / "damaged"
    for cut in (0, 10, 64, 100, len(data) - 1):
        damaged.write_bytes(data[:cut])
        refuses(damaged, copy, "cannot apply")
    damaged.write_bytes(data + b"x")
    refuses(damaged, copy, "cannot apply")
    rng = np.random.default_rng(5)
    for at in [0, 8, 16, 40, 48, 57, 64, 70, *rng.integers(64, len(data), 12)]:
        other = bytearray(data)
        other[at] ^= 0x10
        damaged.write_bytes(other)
        refuses(damaged, copy)
    refuses(copy, copy, "no patch of gradfs")


def test_apply_follows_a_link_and_refuses_directories(patched, gradfs):
    patch, copy, versions, _ = patched
    link = copy.parent / "link"
    link.symlink_to(copy)
    assert gradfs("apply", patch, link).returncode == 0
    assert link.is_symlink() and copy.read_bytes() == versions[3]
    done = gradfs("apply", patch, copy.parent)
    assert done.returncode == 1 and "no regular file" in done.stderr
    assert gradfs("apply", patch, copy.parent / "none").returncode == 1


def test_apply_takes_over_what_a_killed_one_has_left(patched):
    patch, copy, versions, _ = patched
    # In a container all have the same process number.
    left = copy.with_name(".copy.gradfs-1")
    left.write_bytes(b"x" * 10)
    done = ran(["unshare", "-pf", "--mount-proc", gradfs_binary(), "apply", patch, copy])
    assert done.returncode == 0, done.stderr
    assert copy.read_bytes() == versions[3] and not left.exists()
    left.symlink_to(patch)
    done = ran(["unshare", "-pf", "--mount-proc", gradfs_binary(), "apply", patch, copy])
    assert done.returncode == 1 and ".copy.gradfs-1" in done.stderr


def test_apply_refuses_a_pipe(patched, gradfs, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: open(tmp_path / "pipe", "wb").close())
    writer.start()
    done = gradfs("apply", tmp_path / "pipe", patched[1])
    writer.join()
    assert done.returncode == 1 and "no regular file" in done.stderr and "save the patch" in done.stderr


def test_many_programs_read_files_of_changes_at_once(start_mount, model):
    mount = start_mount(model=model, reducer="assign", retain=12, max_versions=20, block_size=BLOCK)
    for seed in range(12):
        change(mount, seed, 0.2)
    held = os.open(changes(mount, 12, 11), os.O_RDONLY)
    size, wrong = os.fstat(held).st_size, []

    def read(number):
        try:
            for turn in range(24):
                base = (number + turn) % 12
                with open(changes(mount, 12, base, ("patch", "safetensors")[turn % 2]), "rb") as file:
                    assert len(file.read()) == os.fstat(file.fileno()).st_size
        except Exception as error:  # noqa: BLE001
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert os.fstat(held).st_size == size
    os.close(held)


def test_changes_of_versions_in_memory_wait_for_no_shard(cluster, model):
    one = cluster(1)
    one.create("m", model=model, block_size=BLOCK, reducer="assign", timeout=200, retain=2)
    mount = one.mount(model="m", transport="tcp")
    versions = [mount.weights(), change(mount, 1), change(mount, 2)]
    with one.shards[0].paused():
        limit = Limit(20)
        check_sparse(mount, changes(mount, 2, 1), versions[1], versions[2])
        assert not limit.over()
