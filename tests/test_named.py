"""Safetensors files that are written by tensors' names, and what libraries read: `hf/`, a learner's own forms."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from filetools import Threads, bf16, eventually, fails, killed, program, read_safetensors, write_safetensors
from patience import HANGS

HEADERS = {"b": ("F32", (3,)), "a": ("F32", (2, 5))}


def model_file(path, **tensors):
    zeros = {name: (dtype, shape, bytes(4 * int(np.prod(shape)))) for name, (dtype, shape) in HEADERS.items()}
    return write_safetensors(path, {**zeros, **tensors}, {"format": "pt", "note": "x"})


def filled_with(**values):
    """Tensors of the model, all elements of one value: what a file has of them, in this order."""
    shapes = {name: shape for name, (_, shape) in HEADERS.items()}
    return {name: ("F32", shapes[name], np.full(shapes[name], value, "<f4").tobytes()) for name, value in values.items()}


def bytes_of(tmp_path, tensors):
    return write_safetensors(tmp_path / "bytes", tensors).read_bytes()


def values(path):
    tensors, _ = read_safetensors(path.read_bytes())
    return {name: np.frombuffer(data, "<f4")[0] for name, (_, _, data) in tensors.items()}


def replace(place, name, data, temporary=".tmpAb12_x", closes_first=False):
    """Writes a file as safetensors 0.8 does: a temporary one that is renamed while it is open."""
    fd = os.open(place / temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, len(data))
        assert os.write(fd, data) == len(data)
        if closes_first:
            os.close(fd)
        os.rename(place / temporary, place / name)
    except BaseException:
        (place / temporary).unlink(missing_ok=True)
        raise
    finally:
        if not closes_first:
            os.close(fd)


def stream(place, name, data):
    with open(place / name, "wb") as file:
        file.write(data)


ways = pytest.mark.parametrize("write", [stream, replace])


@pytest.mark.also_on_network
@ways
def test_gradients_are_taken_by_names(start_mount, tmp_path, write):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum")
    learner = mount.join("x")
    write(learner, "gradients.safetensors", bytes_of(tmp_path, filled_with(a=2, b=1)))
    assert values(learner / "weights.safetensors") == {"a": 2, "b": 1}
    write(learner, "gradients.safetensors", bytes_of(tmp_path, filled_with(b=1)))
    assert values(learner / "weights.safetensors") == {"a": 2, "b": 2}
    learner.rmdir()
    write(mount.model, "gradients.safetensors", bytes_of(tmp_path, filled_with(a=1)))
    assert mount.wait_for_version(3) == 3
    mount.catch_up()
    assert values(mount.model / "weights.safetensors") == {"a": 3, "b": 2}


@pytest.mark.also_on_network
@ways
def test_weights_are_published_by_names(start_mount, tmp_path, write):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="assign")
    write(mount.model, "publish.safetensors", bytes_of(tmp_path, filled_with(b=4, a=7)))
    assert mount.wait_for_version(1) == 1
    mount.catch_up()
    assert values(mount.model / "weights.safetensors") == {"a": 7, "b": 4}
    write(mount.model, "publish.safetensors", bytes_of(tmp_path, filled_with(b=5)))
    assert mount.wait_for_version(2) == 2
    mount.catch_up()
    assert values(mount.model / "weights.safetensors") == {"a": 7, "b": 5}


def test_types_become_the_models_where_nothing_is_lost(start_mount, tmp_path):
    narrow = {"half": ("BF16", (4,), bytes(8)), "wide": ("F64", (4,), bytes(32))}
    mount = start_mount(model=model_file(tmp_path / "model.safetensors", **narrow), reducer="sum")
    learner = mount.join("x")
    gradients = {
        "a": ("BF16", (2, 5), bf16(np.full(10, 1.5, "<f4")).tobytes()),
        "b": ("F16", (3,), np.full(3, 0.5, "<f2").tobytes()),
        "half": ("F32", (4,), np.full(4, 1.001, "<f4").tobytes()),
        "wide": ("F32", (4,), np.full(4, 0.1, "<f4").tobytes()),
    }
    stream(learner, "gradients.safetensors", bytes_of(tmp_path, gradients))
    tensors, _ = read_safetensors((learner / "weights.safetensors").read_bytes())
    data = {name: of[2] for name, of in tensors.items()}
    assert data["a"] == np.full(10, 1.5, "<f4").tobytes() and data["b"] == np.full(3, 0.5, "<f4").tobytes()
    assert data["half"] == bf16(np.ones(4, "<f4")).tobytes(), "rounded as the model rounds"
    assert data["wide"] == np.full(4, np.float64(np.float32(0.1))).tobytes()


REFUSED = {
    "another name": ({"c": ("F32", (3,), bytes(12))}, 'no tensor "c"'),
    "another shape": ({"a": ("F32", (5, 2), bytes(40))}, '"a" has the shape [5, 2], and [2, 5]'),
    "a wider type": ({"b": ("F64", (3,), bytes(24))}, '"b" is F64, and F32'),
    "integers": ({"b": ("I32", (3,), bytes(12))}, '"b" is I32, and F32'),
}


@pytest.mark.also_on_network
@ways
def test_a_file_that_does_not_fit_is_refused_by_name(start_mount, tmp_path, write):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum")
    learner, good = mount.join("x"), filled_with(a=1)
    for what, (tensors, words) in REFUSED.items():
        fails(errno.EINVAL, write, learner, "gradients.safetensors", bytes_of(tmp_path, {**good, **tensors}))
        assert words in (learner / "error").read_text(), what
    whole = bytes_of(tmp_path, filled_with(a=1, b=1))
    for cut in (whole[:-1], whole[:20], whole + b"\0", b"\xff" * 64):
        fails(errno.EINVAL, write, learner, "gradients.safetensors", cut)
    assert not (learner / ".tmpAb12_x").exists()
    write(learner, "gradients.safetensors", whole)
    assert values(learner / "weights.safetensors") == {"a": 1, "b": 1}, "nothing of the others counts"
    assert (learner / "error").read_text() == ""


def test_a_stream_is_refused_at_the_write_that_shows_the_fault(start_mount, tmp_path):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum")
    learner = mount.join("x")
    bad = bytes_of(tmp_path, {"a": ("F32", (5, 2), bytes(40)), **filled_with(b=1)})
    fd = os.open(learner / "gradients.safetensors", os.O_WRONLY)
    header = int.from_bytes(bad[:8], "little") + 8
    assert os.write(fd, bad[: header - 1]) == header - 1
    fails(errno.EINVAL, os.write, fd, bad[header - 1 : header])
    fails(errno.EINVAL, os.close, fd)
    fd = os.open(learner / "gradients.safetensors", os.O_WRONLY)
    fails(errno.EINVAL, os.pwrite, fd, b"x", 100)
    fails(errno.EINVAL, os.close, fd)
    assert "front to back" in (learner / "error").read_text()
    fails(errno.EACCES, os.open, learner / "gradients.safetensors", os.O_RDONLY)
    fails(errno.EACCES, os.open, learner / "publish.safetensors", os.O_RDWR)


def test_a_named_file_that_is_taken_back_counts_nowhere(start_mount, tmp_path):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum")
    learner, data = mount.join("x"), bytes_of(tmp_path, filled_with(a=1, b=1))
    with open(learner / "gradients.safetensors", "wb", buffering=0) as file:
        file.write(data)
        file.truncate(0)
    assert mount.version() == 0
    with open(learner / "gradients.safetensors", "wb", buffering=0) as file:
        file.write(data[:-3])
        file.truncate(0)
        file.seek(0)
        file.write(data)
        os.fsync(file.fileno())
        file.seek(0)
        file.write(data)
    assert values(learner / "weights.safetensors") == {"a": 2, "b": 2}, "fsync ends one, close the other"
    subprocess.run(["cp", "-f", tmp_path / "bytes", learner / "gradients.safetensors"], check=True)
    assert values(learner / "weights.safetensors") == {"a": 3, "b": 3}


@pytest.mark.also_on_network
def test_a_named_file_follows_another_one_only_when_that_has_ended(start_mount, tmp_path):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum")
    learner, data = mount.join("x"), bytes_of(tmp_path, filled_with(a=1, b=1))
    fd = os.open(learner / "gradients.safetensors", os.O_WRONLY)
    os.write(fd, data[:-3])
    fails(errno.EINVAL, os.pwrite, fd, data, 0)
    fails(errno.EINVAL, os.close, fd)
    assert mount.version() == 0 and "front to back" in (learner / "error").read_text()


@ways
def test_what_was_published_as_a_learner_is_refused_where_it_was_written(start_mount, tmp_path, write):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="assign")
    learner = mount.join("x")
    nan = bytes_of(tmp_path, {"b": ("F32", (3,), np.full(3, np.nan, "<f4").tobytes())})
    fails(errno.EINVAL, write, learner, "publish.safetensors", nan)
    assert "NaN" in (learner / "error").read_text() and (mount.model / "error").read_text() == ""
    write(learner, "publish.safetensors", bytes_of(tmp_path, filled_with(b=2)))
    assert mount.version() == 1 and (learner / "error").read_text() == ""


def test_temporary_files_are_few_and_become_what_takes_tensors(start_mount, tmp_path):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum")
    learner, data = mount.join("x"), bytes_of(tmp_path, filled_with(a=1, b=1))
    for place, name in [(learner, "x.safetensors"), (learner, ".tmp"), (learner, "tmpabc"), (mount.model / "learners", ".tmpx")]:
        fails(errno.EPERM, (place / name).write_bytes, b"")
    files = [open(learner / f".tmp{i}", "x+b", buffering=0) for i in range(2)]
    fails(errno.ENOSPC, open, learner / ".tmpx", "xb")
    fails(errno.EEXIST, open, learner / ".tmp1", "xb")
    fails(errno.EFBIG, files[0].truncate, 100 << 20)
    assert not [name for name in os.listdir(learner) if name.startswith(".")], "no listing shows them"
    files[0].write(data)
    assert (learner / ".tmp0").read_bytes() == data and (learner / ".tmp0").stat().st_size == len(data)
    for target in (learner / "weights", learner / ".tmp9", learner / "gradients", mount.model / "gradients.safetensors"):
        fails(errno.EPERM, os.rename, learner / ".tmp0", target)
    fails(errno.EPERM, os.rename, learner / "gradients.safetensors", learner / ".tmp9")
    os.rename(learner / ".tmp0", learner / "gradients.safetensors")
    assert not (learner / ".tmp0").exists() and (learner / "gradients.safetensors").stat().st_size == 0
    fails(errno.EBUSY, files[0].write, data)
    files[0].close()
    assert values(learner / "weights.safetensors") == {"a": 1, "b": 1}
    files[1].write(data)
    (learner / ".tmp1").unlink()
    fails(errno.EBUSY, files[1].write, data)
    assert os.pread(files[1].fileno(), 10, 0) == b"", "no memory is held for a file without a name"
    fails(errno.EPERM, (learner / "weights").unlink)
    files[1].close()
    replace(learner, "gradients.safetensors", data, closes_first=True)
    assert mount.wait_for_version(2) == 2


def test_temporary_files_are_gone_with_their_process(start_mount, tmp_path):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum")
    learner = mount.join("x")
    keeps = "import sys; open(sys.argv[1], 'xb').write(b'x'); open(sys.argv[2], 'xb').close(); print('made', flush=True); input()"
    child = program(keeps, learner / ".tmpa", mount.model / ".tmpb")
    assert child.stdout.readline()
    assert (learner / ".tmpa").read_bytes() == b"x" and (mount.model / ".tmpb").exists()
    killed(child)
    eventually(lambda: not (learner / ".tmpa").exists() and not (mount.model / ".tmpb").exists())
    with open(learner / ".tmpa", "xb"):
        learner.rmdir()
        fails(errno.ENOENT, os.stat, learner / ".tmpa")
    assert mount.version() == 0


@pytest.mark.also_on_network
def test_a_rename_waits_for_no_other_learner(start_mount, tmp_path):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum", learners=2)
    first, second = mount.join("x", "y")
    data = bytes_of(tmp_path, filled_with(a=1, b=1))

    def renamed(place, temporary):
        file = open(place / temporary, "xb", buffering=0)
        file.write(data)
        os.rename(place / temporary, place / "gradients.safetensors")
        return file

    one = renamed(first, ".tmp1")
    two = renamed(first, ".tmp2")
    assert mount.version() == 0, "the other learner has not contributed"
    for _ in range(2):
        stream(second, "gradients.safetensors", data)
        open(second / "weights", "rb").close()
    one.close()
    two.close()
    assert mount.wait_for_version(2) == 2
    assert values(first / "weights.safetensors") == {"a": 4, "b": 4}


@pytest.mark.also_on_network
def test_a_learner_has_all_forms_of_its_weights(start_mount, tmp_path):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum")
    learner = mount.join("x")
    stream(learner, "gradients.safetensors", bytes_of(tmp_path, filled_with(a=3, b=2)))
    assert values(learner / "weights.safetensors") == {"a": 3, "b": 2}, "it waits for its own step"
    assert os.readlink(learner / "tensors") == "../../tensors"
    assert np.load(learner / "tensors/a.npy")[0, 0] == 3
    assert sorted(os.listdir(learner / "tensors")) == ["a.npy", "b.npy"]
    fails(errno.EACCES, os.open, learner / "weights.safetensors", os.O_WRONLY)


@pytest.mark.also_on_network
def test_a_learners_tensors_lead_to_its_own_step(start_mount, tmp_path):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum", learners=2)
    first, second = mount.join("x", "y")
    data = bytes_of(tmp_path, filled_with(a=1, b=1))
    threads = Threads()
    for version in range(1, 20):
        stream(first, "gradients.safetensors", data)
        assert np.load(second / "tensors/a.npy")[0, 0] == 2 * (version - 1), "it has no step that is on its way"
        mine = threads.start(np.load, first / "tensors/a.npy")
        stream(second, "gradients.safetensors", data)
        assert mine.result(HANGS)[0, 0] == 2 * version
        assert np.load(second / "tensors/b.npy")[0] == 2 * version
    fails(errno.ENOENT, os.stat, first / "tensors/c.npy")
    copied = tmp_path / "copied"
    subprocess.run(["cp", "-rL", first / "tensors", copied], check=True, timeout=HANGS)
    assert np.load(copied / "a.npy")[0, 0] == 38


def test_who_looks_at_a_learner_from_outside_waits_for_nothing(start_mount, tmp_path):
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum", learners=2, timeout=200)
    first, _ = mount.join("x", "y")
    with open(first / "gradients", "wb", buffering=0) as mine:
        mine.write(bytes(52))
        os.fsync(mine.fileno())
        # Another process waits for nothing, and this one for the other learner.
        listed = subprocess.run(["ls", "-lL", first, first / "tensors"], check=True, timeout=HANGS, capture_output=True)
        assert b"a.npy" in listed.stdout
        waits = Threads().start(os.listdir, first / "tensors")
        time.sleep(0.2)
        assert not waits.done()
        mount.leave("y")
        assert sorted(waits.result(HANGS)) == ["a.npy", "b.npy"]


COMPANIONS = {"config.json": b'{"a": 1}', "tokenizer.json": b"x" * 100_000, "adapter_config.json": b"{}"}


def checkpoint(place):
    place.mkdir()
    for name, contents in COMPANIONS.items():
        (place / name).write_bytes(contents)
    model_file(place / "model.safetensors")
    (place / "optimizer.pt").write_bytes(b"x")
    return place


def listing(place):
    return {path.name: path.read_bytes() for path in place.iterdir()}


def test_hf_is_a_checkpoint_that_libraries_load(start_mount, tmp_path):
    """Nothing but one file of weights, and the files of the directory that the model was made from."""
    place = checkpoint(tmp_path / "base")
    mount = start_mount(model=place, reducer="sum", retain=2)
    learner = mount.join("x")
    for version in range(3):
        for here in (mount.model / "hf", mount.model / f"versions/{version}/hf"):
            files = listing(here)
            weights = files.pop("model.safetensors")
            assert files == COMPANIONS and (here / "config.json").stat().st_mode & 0o777 == 0o444
            tensors, metadata = read_safetensors(weights)
            assert np.frombuffer(tensors["a"][2], "<f4")[0] == version and metadata["format"] == "pt"
        stream(learner, "gradients.safetensors", bytes_of(tmp_path, filled_with(a=1)))
        assert values(learner / "weights.safetensors")["a"] == version + 1
    fails(errno.EACCES, os.open, mount.model / "hf/config.json", os.O_WRONLY)
    fails(errno.ENOENT, os.stat, mount.model / "hf/optimizer.pt")


def test_files_of_a_directory_can_be_shown_beside_the_weights(start_mount, tmp_path):
    place = checkpoint(tmp_path / "base")
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), with_files=place)
    assert sorted(listing(mount.model / "hf")) == sorted([*COMPANIONS, "model.safetensors"])
    plain = start_mount(model=model_file(tmp_path / "model.safetensors"))
    assert sorted(listing(plain.model / "hf")) == ["model.safetensors"]


def test_the_safetensors_library_saves_into_a_mount__before_its_files_were_renamed(start_mount, tmp_path):
    """0.7 writes in place."""
    old = Path(sys.prefix) / "safetensors-0.7"
    if not old.exists():
        pytest.skip("safetensors 0.7 is not beside the newest one: scripts/setup run torch")
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum")
    learner = mount.join("x")
    code = f"""
import sys; sys.path.insert(0, {str(old)!r})
import numpy, safetensors, safetensors.numpy
assert safetensors.__version__.startswith("0.7"), safetensors.__version__
ones = numpy.ones(3, "f4")
safetensors.numpy.save_file({{"b": ones, "a": numpy.full((2, 5), 2, "f4")}}, {str(learner / "gradients.safetensors")!r})
loaded = safetensors.numpy.load_file({str(learner / "weights.safetensors")!r})
assert (loaded["a"] == 2).all() and (loaded["b"] == 1).all()
open({str(mount.model / "control/reducer")!r}, "w").write("assign\\n")
safetensors.numpy.save_file(dict(b=3 * ones), {str(mount.model / "publish.safetensors")!r})
assert (safetensors.numpy.load_file({str(mount.model / "hf/model.safetensors")!r})["b"] == 3).all()
try:
    safetensors.numpy.save_file(dict(c=ones), {str(learner / "gradients.safetensors")!r})
except safetensors.SafetensorError as error:
    assert "Invalid argument" in str(error), error
else:
    raise AssertionError("it has no c")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert 'no tensor "c"' in (learner / "error").read_text()


def test_the_safetensors_library_saves_into_a_mount(start_mount, tmp_path):
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    mount = start_mount(model=model_file(tmp_path / "model.safetensors"), reducer="sum")
    learner = mount.join("x")
    library.save_file({"b": torch.ones(3), "a": torch.full((2, 5), 2.0)}, learner / "gradients.safetensors")
    loaded = library.load_file(learner / "weights.safetensors")
    assert loaded["a"].eq(2).all() and loaded["b"].eq(1).all()
    with pytest.raises(Exception, match="Invalid argument"):
        library.save_file({"c": torch.ones(3)}, learner / "gradients.safetensors")
    assert 'no tensor "c"' in (learner / "error").read_text()
    assert not list(learner.glob(".tmp*"))
