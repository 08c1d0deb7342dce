"""What a publisher says of its version: what docs/use/files.md promises of `meta.json` and of attributes."""

import errno
import json
import mmap
import os

import numpy as np
import pytest
from filetools import BLOCK, SIZE, close, eventually, f32, fails, filled, mounts, read_safetensors, shell, write_safetensors

mounted = mounts(reducer="assign")


def meta(mount, version):
    return json.loads((mount.model / "versions" / str(version) / "meta.json").read_text())


def said(path):
    """What the attributes of a file say, besides those of gradfs."""
    names = [name for name in os.listxattr(path) if not name.startswith("user.gradfs.")]
    return {name.removeprefix("user."): os.getxattr(path, name).decode() for name in names}


def publish(mount, value, says=None, flags=os.O_WRONLY | os.O_TRUNC):
    fd = os.open(mount.model / "publish", flags)
    os.write(fd, filled(mount, value).tobytes())
    for name, text in (says or {}).items():
        os.setxattr(fd, f"user.{name}", text.encode())
    os.close(fd)


@pytest.mark.also_on_network
def test_a_publisher_says_something_of_its_version(mounted):
    mount = mounted(retain=3)
    publish(mount, 1, {"step": "7", "hash": "ä \n\"x\""})
    assert meta(mount, 1) == {"step": "7", "hash": "ä \n\"x\""} == said(mount.model / "weights")
    assert os.getxattr(mount.model / "weights.safetensors", "user.step") == b"7"
    size = (mount.model / "versions/1/meta.json").stat().st_size
    assert size == len((mount.model / "versions/1/meta.json").read_bytes()) > 0
    publish(mount, 2)
    assert meta(mount, 2) == {} == said(mount.model / "weights"), "it belongs to one version"
    publish(mount, 3, {"step": "9"})
    assert [meta(mount, version) for version in (0, 1, 2, 3)] == [{}, {"step": "7", "hash": "ä \n\"x\""}, {}, {"step": "9"}]
    assert said(mount.model / "versions/1/weights")["step"] == "7"
    mount.control("reducer", "sum")
    mount.contribute(f32(1))
    assert mount.version() == 4 and meta(mount, 4) == {}, "learners have made this one"


@pytest.mark.also_on_network
def test_a_publisher_says_something_of_its_version__in_each_commit(mounted):
    mount = mounted()
    fd = os.open(mount.model / "publish", os.O_RDWR | os.O_DIRECT)
    view = np.frombuffer(mmap.mmap(fd, SIZE), "<f4")
    for version, says in enumerate(({"step": "1"}, {}, {"step": "3", "note": ""}), 1):
        view[:] = version
        for name, text in says.items():
            os.setxattr(fd, f"user.{name}", text.encode())
        os.fsync(fd)
        assert mount.version() == version and said(mount.model / "weights") == says
    view[:] = np.nan
    os.setxattr(fd, "user.step", b"4")
    assert os.listxattr(fd)[-1] == "user.step" and os.getxattr(fd, "user.step") == b"4"
    fails(errno.EINVAL, os.fsync, fd)
    view[:] = 4
    os.fsync(fd)
    assert mount.version() == 4 and said(mount.model / "weights") == {"step": "4"}, "it was for what was refused, too"
    del view
    os.close(fd)
    fd = os.open(mount.model / "publish", os.O_WRONLY)
    os.write(fd, filled(mount, 9).tobytes())
    os.setxattr(fd, "user.step", b"9")
    os.ftruncate(fd, 0)
    os.pwrite(fd, filled(mount, 5).tobytes(), 0)
    os.close(fd)
    assert mount.version() == 5 and said(mount.model / "weights") == {}, "it was taken back"


def file_of(folder, tensors, metadata):
    return write_safetensors(folder / "published.safetensors", tensors, metadata).read_bytes()


@pytest.mark.also_on_network
def test_the_metadata_of_a_published_file_is_kept(start_mount, tmp_path):
    tensors = {"a": ("F32", (2, 5), bytes(40)), "b": ("F32", (3,), bytes(12))}
    own = {"long": "x" * 5000, "": "1", "note": "of the model"}
    model = write_safetensors(tmp_path / "m.safetensors", tensors, own)
    mount = start_mount(model=model, reducer="assign", retain=2)
    (mount.model / "publish.safetensors").write_bytes(file_of(tmp_path, tensors, {"format": "pt", "step": "5"}))
    assert mount.wait_for_version(1) == 1
    mount.catch_up()
    assert meta(mount, 1) == {"format": "pt", "step": "5"}
    # What is read from a mount can be published again.
    again, metadata = read_safetensors((mount.model / "weights.safetensors").read_bytes())
    assert "gradfs.version" in metadata and metadata["long"] == own["long"]
    (mount.model / "publish.safetensors").write_bytes(file_of(tmp_path, again, metadata))
    assert mount.wait_for_version(2) == 2
    mount.catch_up()
    assert meta(mount, 2) == {"format": "pt"}, "what all of the mount's files say is nothing of the version's"
    fd = os.open(mount.model / "publish.safetensors", os.O_WRONLY)
    fails(errno.EINVAL, os.write, fd, file_of(tmp_path, tensors, {"note": "x" * 4096}))
    fails(errno.EINVAL, os.close, fd)
    temporary = mount.model / ".tmp1"
    temporary.write_bytes(file_of(tmp_path, tensors, {"note": "x" * 4096}))
    fails(errno.EINVAL, os.rename, temporary, mount.model / "publish.safetensors")
    assert temporary.exists(), "nothing has changed"
    temporary.unlink()
    assert "metadata takes 4100 bytes, and a version keeps 4096" in (mount.model / "error").read_text()
    assert mount.version() == 2


def test_metadata_that_cannot_be_kept_is_refused(mounted):
    mount = mounted()
    path = mount.model / "publish"
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, filled(mount, 1).tobytes())
    os.setxattr(fd, "user.step", b"1")
    wrong = [
        ("user.a\nb", b"1"), ("user.long", b"x" * 4096), ("user.bytes", b"\xff"),
        ("user.zero", b"a\0"),
    ]  # fmt: skip
    for name, value in wrong:
        fails(errno.EINVAL, os.setxattr, fd, name, value)
    assert "zero byte" in (mount.model / "error").read_text()
    for kind in ("security.selinux", "trusted.other"):
        fails(errno.EOPNOTSUPP, os.setxattr, fd, kind, b"1")
    for other in (path, mount.model / "weights", mount.model / "control/reducer", mount.model / "versions/0/weights"):
        fails(errno.EPERM, os.setxattr, other, "user.step", b"2")
    fails(errno.EPERM, os.removexattr, path, "user.step")
    os.close(fd)
    assert mount.version() == 1 and meta(mount, 1) == {"step": "1"}
    fails(errno.ENODATA, os.getxattr, mount.model / "weights", "user.other")
    assert sorted(os.listxattr(mount.model / "versions/1/meta.json")) == ["user.gradfs.epoch", "user.gradfs.version", "user.step"]
    fails(errno.EACCES, os.open, mount.model / "versions/1/meta.json", os.O_WRONLY)


def test_attributes_of_a_copied_file_are_no_metadata(mounted, tmp_path):
    mount = mounted(retain=3)
    publish(mount, 1, {"step": "1"})
    for source, says in ((mount.model / "weights", {"step": "1"}), (mount.model / "versions/0/weights", {})):
        shell('cp --preserve=xattr "$1" "$2"', source, mount.model / "publish")
        assert said(mount.model / "weights") == says and (mount.model / "error").read_text() == ""


def test_one_attribute_has_all_that_names_a_version(mounted):
    mount = mounted()
    publish(mount, 1, {"step": "1"})
    about = json.loads(os.getxattr(mount.model / "weights", "user.gradfs.about"))
    epoch = int(os.getxattr(mount.model / "weights", "user.gradfs.epoch"))
    assert about == {"version": 1, "epoch": epoch, "meta": {"step": "1"}}
    assert "user.gradfs.about" not in os.listxattr(mount.model / "weights")


@pytest.mark.parametrize(("transport", "shards"), [("tcp", 2), ("shm", 2), ("shm", 1)])
def test_each_mount_hears_what_a_publisher_says(cluster, transport, shards):
    one = cluster(shards, size=SIZE, block_size=BLOCK, reducer="assign", retain=2)
    a, b = (one.mount(transport=transport) for _ in range(2))
    held = []
    for version in range(1, 4):
        publish(a, version, {"step": str(version)})
        eventually(lambda version=version: b.version() == version)
        assert meta(a, version) == meta(b, version) == {"step": str(version)}
        held.append(os.open(b.model / "weights", os.O_RDONLY))
    assert [os.getxattr(fd, "user.step") for fd in held] == [b"1", b"2", b"3"]
    late = one.mount(transport=transport)
    assert said(late.model / "weights") == {"step": "3"}, "who comes later hears it, too"
    close(*held)


def test_a_snapshot_keeps_what_a_publisher_has_said(start_mount, gradfs, tmp_path):
    mount = start_mount(size=4096, reducer="assign")
    publish(mount, 1, {"step": "41"})
    assert gradfs("save", mount.model, tmp_path / "saved").returncode == 0
    again = start_mount("--from", tmp_path / "saved", name="m")
    assert again.version() == 1 and meta(again, 1) == {"step": "41"}
    epochs = {os.getxattr(mount.model / "weights", "user.gradfs.epoch") for mount in (mount, again)}
    assert len(epochs) == 2, "a restored job begins another one"
