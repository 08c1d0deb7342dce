"""Why a call failed can be read where it failed: `error`, and the attribute `user.gradfs.error`."""

import errno
import gzip
import os
import pickle

import numpy as np
import pytest
from filetools import f32, fails, mounts, raises, write_safetensors

mounted = mounts(both=False, size=4096)


def error(place):
    """What the file says; the attribute says the same."""
    text = (place / "error").read_text()
    try:
        shown = os.getxattr(place / "gradients", "user.gradfs.error").decode() + "\n"
    except OSError as missing:
        assert missing.errno == errno.ENODATA
        shown = ""
    assert text == shown
    return text


def test_why_a_call_failed_is_read_where_it_failed(start_mount, tmp_path):
    numbers = {"first": ("F32", (512,), bytes(2048)), "second": ("F32", (16384,), bytes(65536))}
    model = write_safetensors(tmp_path / "model.safetensors", numbers)
    mount = start_mount(model=model, block_size="64KiB", reducer="sum")
    mount.join("a")
    place = mount.place("a")
    size = 2048 + 65536
    assert error(place) == error(mount.model) == ""

    fails(errno.EFBIG, mount.contribute, np.zeros(size // 4, "<f8"), learner="a")
    assert "float64, 2x the size; the model is F32" in error(place)
    assert error(mount.model) == "", "another learner"
    fails(errno.EINVAL, mount.contribute, b"abc", offset=2048, learner="a")
    assert "byte 2051" in error(place) and '"second"' in error(place)
    with raises(errno.EINVAL):
        mount.contribute(f32(float("nan")), offset=size - 4, learner="a")
    assert "block 1" in error(place) and '"second"' in error(place) and "NaN" in error(place)

    fd = os.open(place / "gradients", os.O_WRONLY)
    os.pwrite(fd, bytes(65536), 0)
    fails(errno.EINVAL, os.pwrite, fd, bytes(4), 65532)
    fails(errno.EINVAL, os.close, fd)
    assert "block 0" in error(place) and "0..65536" in error(place)
    mount.contribute(f32(1))
    assert "block 0" in error(place), "of another learner"


def test_an_error_is_gone_after_a_contribution_without_one(mounted):
    mount = mounted(lease=0)
    fails(errno.EFBIG, mount.contribute, f32(1), offset=4096)
    assert "an array of float64 is 2x the size" in error(mount.model)
    mount.contribute(b"")
    assert error(mount.model) != ""
    mount.contribute(f32(1))
    assert error(mount.model) == ""
    # A write that was refused fails the close, too.
    fd = os.open(mount.model / "gradients", os.O_WRONLY)
    os.pwrite(fd, bytes(4096), 0)
    fails(errno.EINVAL, os.pwrite, fd, f32(1), 0)
    fails(errno.EINVAL, os.close, fd)
    assert error(mount.model) != ""
    mount.contribute(f32(1))
    assert error(mount.model) == ""


@pytest.mark.also_on_network
def test_an_error_says_who_was_waited_for(start_mount):
    mount = start_mount(size=4096, reducer="sum", learners=2, timeout=1, lease=0)
    mount.join("here")
    mount.join("late")
    mount.contribute(f32(1), learner="here")
    fails(errno.ETIMEDOUT, mount.contribute, f32(1), learner="here")
    assert '"late"' in error(mount.place("here")) and "committed" in error(mount.place("here"))
    assert '"here" (' not in error(mount.place("here"))
    fails(errno.ETIMEDOUT, mount.weights, "here")
    assert '"late"' in error(mount.place("here"))


@pytest.mark.also_on_network
def test_an_error_says_who_was_waited_for__before_all_have_joined(start_mount):
    mount = start_mount(size=4096, reducer="sum", learners=3, timeout=1)
    mount.join("here")
    mount.contribute(f32(1), learner="here")
    fails(errno.ETIMEDOUT, mount.weights, "here")
    assert "1 of 3 learners have joined (control/learners)" in error(mount.place("here"))


def test_an_error_says_that_the_job_is_stopped(start_mount):
    mount = start_mount(size=4096, reducer="sum", min_learners=2, learners=2)
    mount.join("a")
    mount.join("b")
    mount.leave("b")
    fails(errno.ECANCELED, mount.contribute, f32(1), learner="a")
    assert "1 active learners, control/min_learners is 2" in error(mount.place("a"))


def test_files_with_headers_are_refused_by_name(mounted, tmp_path):
    mount = mounted(reducer="assign")
    np.save(tmp_path / "a.npy", f32(*range(100)))
    write_safetensors(tmp_path / "a.safetensors", {"a": ("F32", (100,), f32(*range(100)).tobytes())})
    np.savez(tmp_path / "a.zip", f32(*range(100)))
    (tmp_path / "a.zip.npz").rename(tmp_path / "a.zip")
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(f32(*range(100))))
    with gzip.open(tmp_path / "a.gzip", "wb") as file:
        file.write(np.random.default_rng(7).standard_normal(1000, "<f4").tobytes())
    kinds = {"npy": ".npy file", "safetensors": "safetensors file", "zip": "zip archive", "pickle": "pickle", "gzip": "gzip file"}
    for suffix, kind in kinds.items():
        data = (tmp_path / f"a.{suffix}").read_bytes()
        for name in ("gradients", "weights"):
            fd = os.open(mount.model / name, os.O_WRONLY)
            fails(errno.EINVAL, os.write, fd, data)
            # Programs go on after an error, and what they write then is not what was meant.
            os.pwrite(fd, f32(1), 0)
            fails(errno.EINVAL, os.close, fd)
            assert f"a {kind}" in (mount.model / "error").read_text()
    assert mount.version() == 0
    # Their arrays are taken.
    mount.contribute(np.load(tmp_path / "a.npy"))
    mount.catch_up()
    assert np.frombuffer(mount.weights(), "<f4")[:100].tolist() == list(range(100))
