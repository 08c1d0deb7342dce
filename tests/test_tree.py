"""The tree: names, sizes, attributes, and other forms of the weights."""

import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import pause
from filetools import (
    array, bf16, eventually, f32, fails, filled, finish, hear, program, raises, read_safetensors, said,
    write_safetensors
)


def mixed_tensors():
    return {
        "layer.0.weight": ("F32", (30, 1000), np.arange(30_000, dtype="<f4").tobytes()),
        "bias": ("F16", (999,), np.full(999, 2, "<f2").tobytes()),
        "count": ("I64", (5,), (np.arange(5, dtype="<i8") << 40).tobytes()),
        "scale": ("BF16", (2, 3), bf16(np.arange(6)).tobytes()),
    }


def test_a_model_is_a_directory(start_mount):
    before = time.time()
    mount = start_mount(size=400_012, reducer="sum", retain=1)
    assert sorted(os.listdir(mount.root)) == ["README", "model"]
    modes = {
        "weights": 0o644, "weights.safetensors": 0o444, "gradients": 0o600, "publish": 0o600, "hf": 0o755,
        "gradients.safetensors": 0o600, "publish.safetensors": 0o600, "device": 0o600,
        "version": 0o444, "durable_version": 0o444, "layout": 0o444, "status.json": 0o444, "error": 0o444, "settings.json": 0o644, "tensors": 0o755, "versions": 0o755, "learners": 0o755, "readers": 0o755, "views": 0o755, "control": 0o755,
        "snapshot": 0o400,
    }  # fmt: skip
    assert sorted(os.listdir(mount.model)) == sorted(modes)
    for name, mode in modes.items():
        stat = os.stat(mount.model / name)
        assert stat.st_mode & 0o7777 == mode, name
        assert (stat.st_uid, stat.st_gid) == (os.getuid(), os.getgid())
        assert os.path.isdir(mount.model / name) == (mode == 0o755)
    for name in ("weights", "gradients", "publish", "device"):
        assert os.stat(mount.model / name).st_size == 400_012
    for name in ("version", "weights.safetensors", "tensors/weights.npy", "control/learning_rate", "status.json", "layout"):
        path = mount.model / name
        assert os.stat(path).st_size == len(path.read_bytes()), name
    times = [os.stat(mount.model / "weights").st_mtime]
    for _ in range(2):
        time.sleep(0.02)
        mount.contribute(filled(mount, 1))
        mount.catch_up()
        times.append(os.stat(mount.model / "weights").st_mtime)
    assert before - 1 < times[0] < times[1] < times[2] < time.time() + 1
    assert os.stat(mount.model / "versions/1/weights").st_mtime == times[1]
    assert "weights" in (mount.root / "README").read_text()


def test_the_tree_is_fixed(start_mount, tmp_path):
    """Nothing can be made, removed, moved or given to others, but what is renamed onto files that take tensors by name."""
    mount = start_mount(size="256KiB", reducer="sum")
    model, learner = mount.model, mount.join("a")
    folders = [model / name for name in ("", "control", "tensors", "versions", "versions/0", "learners", "learners/a")]
    for place in (mount.root, *folders):
        new = place / "new"
        forbidden = [
            lambda: os.mknod(new, 0o600), lambda: os.mkfifo(new), lambda: os.symlink("/etc/passwd", new),
            lambda: os.link(model / "version", new), lambda: os.rename(model / "version", new), lambda: place.chmod(0o777),
            *([new.mkdir] if place.name != "learners" else []), *([place.rmdir] if place != learner else []),
        ]
        for act in forbidden:
            with raises(errno.EPERM, errno.EBUSY if place == mount.root else errno.EPERM):
                act()
        # A file that is made in control/ is a setting whose name is misspelt.
        fails(errno.ENOENT if place.name == "control" else errno.EPERM, new.write_text, "")
        assert not new.exists()
    files = ["weights", "weights.safetensors", "tensors/weights.npy", "gradients", "device", "version", "status.json",
             "versions/0/weights", "control/reducer", "../README", "learners/a/status"]  # fmt: skip
    for path in (model / name for name in files):
        for act in (
            path.unlink, lambda: path.rename(model / "moved"), lambda: path.chmod(0o777), lambda: os.chown(path, 4711, -1),
            lambda: os.setxattr(path, "user.x", b"1"), lambda: os.removexattr(path, "user.gradfs.version"),
        ):
            fails(errno.EPERM, act)
    fails(errno.EPERM, learner.rename, model / "learners/b")
    with raises(errno.EPERM, errno.EXDEV):
        (model / "version").rename(tmp_path / "stolen")
    for name in ("nothing", "versions/7", "versions/00", "tensors/x.npy", "control/speed", "learners/x"):
        fails(errno.ENOENT, os.stat, model / name)
    fails(errno.ENOTDIR, os.listdir, model / "weights")
    mount.contribute(f32(1), learner="a")
    assert mount.wait_for_version(1) == 1
    read_only = ["weights", "weights.safetensors", "tensors/weights.npy", "version", "status.json", "versions/1/weights",
                 "versions/1/weights.safetensors", "versions/1/version", "versions/1/tensors/weights.npy",
                 "learners/a/weights", "learners/a/version", "learners/a/status", "../README"]  # fmt: skip
    for path in (model / name for name in read_only):
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
            fails(errno.EACCES, os.open, path, flags)
        with raises(errno.EACCES, errno.EINVAL):
            os.open(path, os.O_WRONLY | os.O_APPEND)
        if path.name != "weights":
            fails(errno.EACCES, os.truncate, path, 0)
    said(mount, "weights is read-only", "assign", "control/reducer")


def test_a_misspelt_setting_is_said_with_the_nearest_name(start_mount):
    mount = start_mount(size="64KiB")
    fails(errno.ENOENT, (mount.model / "control/learningrate").write_text, "1")
    eventually(lambda: 'control/ has no setting "learningrate": did you mean learning_rate?' in mount.stderr())
    fails(errno.ENOENT, (mount.model / "control/nonsense").write_text, "1")
    eventually(lambda: 'control/ has no setting "nonsense"' in mount.stderr())
    assert "did you mean" not in mount.stderr().split("nonsense")[1]


def test_mode_and_owner_that_a_file_has_can_be_set(start_mount, tmp_path):
    mount = start_mount(size="64KiB", reducer="sum")
    source = tmp_path / "gradient"
    source.write_bytes(filled(mount, 1).tobytes())
    for path in (mount.join("a") / "gradients", mount.model / "weights", mount.model / "control", mount.root):
        has = path.stat()
        path.chmod(has.st_mode & 0o7777)
        os.chown(path, has.st_uid, has.st_gid)
        os.chown(path, -1, has.st_gid)
        fails(errno.EPERM, path.chmod, has.st_mode & 0o7777 ^ 0o100)
    source.chmod((mount.place("a") / "gradients").stat().st_mode & 0o7777)
    shutil.copy(source, mount.place("a") / "gradients")
    assert mount.wait_for_version(1) == 1


def test_tensors_are_npy(start_mount, tmp_path):
    tensors = mixed_tensors()
    mount = start_mount(model=write_safetensors(tmp_path / "mixed.safetensors", tensors), reducer="sum")
    assert mount.model.name == "mixed"
    folder = mount.model / "tensors"
    assert sorted(os.listdir(folder)) == sorted(f"{name}.npy" for name in tensors)
    for name, (dtype, shape, data) in tensors.items():
        loaded = np.load(folder / f"{name}.npy")
        assert loaded.shape == shape and loaded.tobytes() == data
        assert np.load(folder / f"{name}.npy", mmap_mode="r").tobytes() == data
        kind = {"F32": "<f4", "F16": "<f2", "I64": "<i8"}.get(dtype)
        assert kind is None or loaded.dtype == kind
        assert (folder / f"{name}.npy").read_bytes()[-len(data) :] == data


def test_layout_has_the_order_of_weights(start_mount, tmp_path):
    tensors = mixed_tensors()
    mount = start_mount(model=write_safetensors(tmp_path / "mixed.safetensors", tensors), reducer="sum")
    weights, names = mount.weights(), []
    for line in (mount.model / "layout").read_text().splitlines():
        name, dtype, shape, offset = line.split("\t")
        data = tensors[name][2]
        assert (dtype, tuple(json.loads(shape))) == tensors[name][:2]
        assert weights[int(offset) : int(offset) + len(data)] == data
        names.append((int(offset), name))
    assert sorted(names) == names and {name for _, name in names} == set(tensors)
    fails(errno.EACCES, (mount.model / "layout").write_text, "")


@pytest.mark.parametrize("no_passthrough", [False, True])
def test_weights_safetensors_is_the_same_version(start_mount, tmp_path, no_passthrough):
    tensors = mixed_tensors()
    path = write_safetensors(tmp_path / "mixed.safetensors", tensors, {"made": "by a test"})
    mount = start_mount(model=path, reducer="sum", no_passthrough=no_passthrough)
    for version in range(3):
        data = (mount.model / "weights.safetensors").read_bytes()
        parts, metadata = read_safetensors(data)
        assert metadata["made"] == "by a test" and int(metadata["gradfs.version"]) == version
        assert data.endswith(mount.weights())
        assert {name: (dtype, tuple(shape)) for name, (dtype, shape, _) in parts.items()} == {
            name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()
        }
        for name, (_, _, part) in parts.items():
            assert np.load(mount.model / "tensors" / f"{name}.npy").tobytes() == part
            if version == 0:
                assert part == tensors[name][2]
        file = open(mount.model / "weights.safetensors", "rb", buffering=0)
        mount.contribute(f32(1), offset=len(mount.weights()) // 8 * 4 if version else 40)
        with file:
            assert file.read() == data
    # What it was loaded from can be loaded from it.
    again = tmp_path / "again.safetensors"
    again.write_bytes((mount.model / "weights.safetensors").read_bytes())
    assert start_mount(model=again).weights() == mount.weights()


def test_several_models_in_one_mount(start_mount, tmp_path):
    files = []
    for i, name in enumerate(("policy", "value")):
        data = np.full(1000 * (i + 1), i, "<f4")
        tensors = {"w": ("F32", data.shape, data.tobytes())}
        files.append(write_safetensors(tmp_path / f"{name}.safetensors", tensors))
    mount = start_mount(model=files, reducer="sum")
    assert sorted(os.listdir(mount.root)) == ["README", "policy", "value"]
    policy, value = mount.models
    with open(policy / "gradients", "wb") as file:
        file.write(np.full(1000, 5, "<f4").tobytes())
    assert (array(policy / "weights") == 5).all() and (array(value / "weights") == 1).all()
    assert [(model / "version").read_text() for model in mount.models] == ["1\n", "0\n"]
    (value / "control" / "carry").write_text("0.5")
    assert (policy / "control" / "carry").read_text() == "1\n"
    assert len({os.stat(model / "weights").st_ino for model in mount.models}) == 2


def test_retained_versions(start_mount):
    mount = start_mount(size=400_012, reducer="sum", retain=2)
    assert os.listdir(mount.model / "versions") == ["0"]
    held = open(mount.model / "versions" / "0" / "weights", "rb", buffering=0)
    for version in range(1, 6):
        mount.contribute(filled(mount, 1))
        mount.catch_up()
        kept = [str(v) for v in range(max(0, version - 2), version + 1)]
        shown = os.listdir(mount.model / "versions")
        assert sorted(set(shown) - ({"0"} if version > 2 else set())) == kept
        for name in kept:
            folder = mount.model / "versions" / name
            assert sorted(os.listdir(folder)) == ["hf", "meta.json", "tensors", "version", "weights", "weights.safetensors"]
            assert (folder / "version").read_text() == f"{name}\n"
            assert (array(folder / "weights") == int(name)).all()
            assert (np.load(folder / "tensors" / "weights.npy") == int(name)).all()
            assert (folder / "weights.safetensors").read_bytes().endswith((folder / "weights").read_bytes())
            fails(errno.EACCES, os.open, folder / "weights", os.O_WRONLY)
    with held:
        assert not any(held.readall()), "held open, it can be read on"
    fails(errno.ENOENT, os.stat, mount.model / "versions" / "2")
    mount.control("retain", 0)
    mount.contribute(filled(mount, 1))
    eventually(lambda: os.listdir(mount.model / "versions") == ["6"])


WAITER = """
import select
fd = os.open(argv[0], os.O_RDONLY)
for kind in argv[1:]:
    os.pread(fd, 100, 0)
    say("waits")
    if kind == "poll":
        poller = select.poll(); poller.register(fd, select.POLLIN)
        ready = poller.poll(10_000)
    elif kind == "epoll":
        poller = select.epoll(); poller.register(fd, select.EPOLLIN)
        ready = poller.poll(10)
    else:
        ready = select.select([fd], [], [], 10)[0]
    say(len(ready), os.pread(fd, 100, 0).decode())
"""


@pytest.mark.parametrize("file", ["version", "learners/a/version"])
def test_version_wakes_pollers(start_mount, file):
    mount = start_mount(size="256KiB", reducer="sum")
    mount.join("a")
    kinds = ["poll", "select", "epoll", "poll"]
    waiters = [program(WAITER, mount.model / file, *kinds) for _ in range(3)]
    for version in range(1, len(kinds) + 1):
        for waiter in waiters:
            assert hear(waiter) == "waits"
        time.sleep(0.05)
        mount.contribute(filled(mount, 1), learner="a")
        for waiter in waiters:
            assert hear(waiter) == f"1 {version}"
            waiter.stdout.readline()
    for waiter in waiters:
        finish(waiter)
    fd = os.open(mount.model / "version", os.O_RDONLY)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(0) == [], "what it says is known"
    mount.contribute(filled(mount, 1), learner="a")
    assert poller.poll(2000) and poller.poll(0), "until it is read"
    assert os.pread(fd, 9, 0) == b"5\n" and poller.poll(0) == []
    os.close(fd)


def test_xattrs_describe_the_data(start_mount, tmp_path):
    mount = start_mount(model=write_safetensors(tmp_path / "mixed.safetensors", mixed_tensors()), reducer="sum", retain=1)

    def xattrs(name):
        path = mount.model / name
        return {key.removeprefix("user.gradfs."): os.getxattr(path, key).decode() for key in os.listxattr(path)}

    mount.contribute(f32(1))
    mount.catch_up()
    epoch = xattrs("weights").pop("epoch")
    assert xattrs("weights") == {"version": "1", "epoch": epoch, "dtype": "mixed"}
    assert xattrs("tensors/scale.npy") == {"version": "1", "epoch": epoch, "dtype": "BF16", "shape": "[2, 3]"}
    assert xattrs("versions/0/weights") == {"version": "0", "epoch": epoch, "dtype": "mixed"}
    assert xattrs("version") == {"version": "1"}
    for name in ("weights", "gradients", "control/carry"):
        fails(errno.ENODATA, os.getxattr, mount.model / name, "user.other")
        for kind in ("security.selinux", "system.posix_acl_access", "trusted.other"):
            fails(errno.EOPNOTSUPP, os.getxattr, mount.model / name, kind)
    blank = start_mount(size=4096, dtype="bf16")
    path = blank.model / "gradients"
    assert os.getxattr(path, "user.gradfs.dtype") == b"BF16"
    assert os.getxattr(path, "user.gradfs.shape") == b"[2048]"


def many_tensors(path, count=300, below=""):
    """More tensors than fit into one answer to a listing."""
    return write_safetensors(path, {f"{below}t{i}": ("F32", (1,), f32(i).tobytes()) for i in range(count)})


@pytest.mark.parametrize("below", ["", "a/b/"], ids=["tensors", "below"])
def test_what_a_listing_has_shown_is_not_asked_for_again(start_mount, tmp_path, below):
    mount = start_mount(model=many_tensors(tmp_path / "many.safetensors", below=below), reducer="sum")
    folder = os.open(mount.model / "tensors" / below, os.O_RDONLY | os.O_DIRECTORY)
    listed = sorted(os.listdir(folder))
    assert len(listed) == 300
    look = "import os\nfor name in os.listdir(): os.lstat(name)"
    # The first of all says that attributes are wanted, too: the kernel asks for both together then.
    subprocess.run([sys.executable, "-c", look], cwd=f"/proc/self/fd/{folder}", pass_fds=[folder], timeout=300, check=True)
    look = f"import os\nprint(sum(os.lstat(f't{{i}}.npy', dir_fd={folder}).st_size for i in range(300)))"
    pause(mount.pid)
    try:
        asked = subprocess.run(
            [sys.executable, "-c", look], pass_fds=[folder], capture_output=True, text=True, timeout=300, check=True
        )
    finally:
        os.kill(mount.pid, signal.SIGCONT)
        os.close(folder)
    assert int(asked.stdout) == sum((mount.model / "tensors" / below / name).stat().st_size for name in listed)


def test_tensors_lead_to_the_version_that_was_told(start_mount, tmp_path):
    """The kernel has the name all the time, for others use it, more of them than there are cores."""
    mount = start_mount(model=many_tensors(tmp_path / "many.safetensors"), reducer="sum")
    tensor, steps = mount.model / "tensors" / "t0.npy", 300
    told = {
        "version": "int(open(f'{model}/version').read())",
        "xattr": "int(os.getxattr(f'{model}/version', 'user.gradfs.version'))",
        "status": "json.load(open(f'{model}/status.json'))['version']",
        "weights": "int(np.fromfile(f'{model}/weights', 'f4', 1)[0])",
    }
    readers = [
        program(
            "import json\nimport numpy as np\n"
            "model, steps = argv[0], int(argv[1])\n"
            f"while (told := {how}) < steps:\n"
            "    shown = np.load(f'{model}/tensors/t0.npy')[0]\n"
            "    assert shown >= told, (shown, told)\n",
            mount.model,
            steps,
        )
        for how in told.values()
        for _ in range(2)
    ]
    for step in range(1, steps + 1):
        assert int(os.getxattr(tensor, "user.gradfs.version")) == step - 1
        mount.contribute(f32(1))
        mount.catch_up()
        assert int(os.getxattr(tensor, "user.gradfs.version")) == step
    for each in readers:
        finish(each)


def test_a_directory_in_use_keeps_its_version(start_mount, tmp_path):
    mount = start_mount(model=many_tensors(tmp_path / "many.safetensors"), reducer="sum")
    held = os.open(mount.model / "tensors", os.O_RDONLY)
    for step in range(1, 6):
        mount.contribute(f32(1))
        mount.catch_up()
        for name in ("t0.npy", "t1.npy", "t0.npy"):
            fd = os.open(name, os.O_RDONLY, dir_fd=held)
            assert int(os.getxattr(fd, "user.gradfs.version")) == 0
            os.close(fd)
        assert np.load(mount.model / "tensors" / "t0.npy")[0] == step
    os.close(held)


def test_a_listing_holds_no_version(start_mount, tmp_path):
    mount = start_mount(model=many_tensors(tmp_path / "many.safetensors"), reducer="sum", max_versions=4, timeout=2)
    folder = mount.model / "tensors"
    for step in range(12):
        listing = os.scandir(folder)
        sizes = [next(listing).stat().st_size for _ in range(20)]
        mount.contribute(f32(1))  # Some names are looked up before, others after their version is an old one.
        with listing:
            sizes += [entry.stat().st_size for entry in listing]
        assert len(sizes) == 300 and min(sizes) > 4
        mount.catch_up()
        assert np.load(folder / "t0.npy")[0] == step + 1
    mount.contribute(f32(1))
    eventually(lambda: len(mount.status()["versions_in_memory"]) <= 2)


def test_statfs_counts_version_buffers(start_mount):
    mount = start_mount(size="1MiB", max_versions=8, retain=1, reducer="sum")
    stat = os.statvfs(mount.root)
    assert stat.f_frsize * stat.f_blocks == 8 << 20 and stat.f_frsize * stat.f_bavail == 7 << 20
    mount.contribute(filled(mount, 1))
    mount.catch_up()
    assert os.statvfs(mount.model).f_bavail * stat.f_frsize == 6 << 20
    df = subprocess.run(["df", mount.root], capture_output=True, text=True, timeout=300, check=True)
    assert str(mount.root) in df.stdout
    before = os.statvfs(mount.root)
    assert 0.9 * before.f_files < before.f_favail == before.f_ffree < before.f_files, "no monitor sees them used up"
    mount.join("a")
    assert os.statvfs(mount.root).f_ffree < before.f_ffree
    mount.control("max_learners", 8)
    few = os.statvfs(mount.root)
    assert few.f_ffree == 6 * (before.f_ffree // 4095) and few.f_files < before.f_files, "of eight learners, two have joined"


def test_status_tells_what_the_job_does(start_mount):
    mount = start_mount(size="1MiB", reducer="sum", learners=2)
    assert mount.status()["state"] == "forming"
    mount.join(*"ab")
    mount.contribute(filled(mount, 1), learner="a")
    # Over a network the coordinator tells of it within half a second.
    status = eventually(lambda: (now := mount.status())["committed_for_next_version"] == 1 and now)
    assert (status["state"], status["version"]) == ("running", 0)
    learners = [(learner["id"], learner["step"], learner["phase"]) for learner in status["learners"]]
    assert learners == [("a", 1, "committed"), ("b", 0, "idle")]
    assert status["control"]["reducer"] == "sum" and status["size_bytes"] == 1 << 20
    mount.contribute(filled(mount, 1), learner="b")
    mount.catch_up()
    status = mount.status()
    assert (status["version"], status["contributions"]) == (1, 2)
    assert status["traffic"]["written_bytes"] == 2 << 20
    assert "step: 1\n" in (mount.place("a") / "status").read_text()
