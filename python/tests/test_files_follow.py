from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import numpy
import pytest
from conftest import HANGS, binary, until

import gradfs


@pytest.fixture
def model(start):
    return gradfs.open(start({"w": numpy.zeros(3, "f4")}, "--reducer", "assign"))


def test_follow_yields_each_newer_version(model):
    seen = []
    for weights in gradfs.follow(model.path, timeout=60):
        seen.append((weights.version, weights["w"].numpy()[0].item()))
        if len(seen) == 4:
            break
        model.publish({"w": numpy.full(3, len(seen), "f4")})
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_follow_skips_versions_that_came_meanwhile_and_pins_the_one_it_shows(model):
    seen = []
    for weights in gradfs.follow(model.path, newer_than=-1, timeout=60):
        for _ in range(3 if not seen else 0):
            model.publish({"w": numpy.ones(3, "f4")})
        seen.append((weights.version, weights["w"].numpy()[0].item()))
        if len(seen) == 2:
            break
    # Without a mount, `follow` has a connection of its own, which may hear of the last one later.
    first, (version, value) = seen
    assert first == (0, 0) and value == 1 and (version == 3 or "://" in model.path)


def test_follow_waits_for_what_is_newer(model):
    timer = threading.Timer(0.1, lambda: model.publish({"w": numpy.ones(3, "f4")}))
    timer.start()
    assert next(gradfs.follow(model.path, newer_than=0, timeout=60)).version == 1
    timer.join()


def test_follow_ends_at_its_timeout(model):
    with pytest.raises(gradfs.Timeout):
        next(gradfs.follow(model.path, newer_than=0, timeout=0.05))


def test_follow_gives_each_newest_version_to_a_function(model):
    stop, seen = threading.Event(), []

    def apply(version, tensors):
        assert tensors.is_whole and tensors.version == version
        seen.append((version, tensors["w"].numpy()[0].item()))
        if version == 3:
            stop.set()
        else:
            model.publish({"w": numpy.full(3, version + 1, "f4")})

    assert gradfs.follow(model.path, apply, timeout=60, stop=stop) == 3
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_what_a_function_gets_is_pinned_and_not_copied(model):
    def apply(version, tensors):
        view = tensors["w"].numpy()
        assert tensors["w"].numpy().ctypes.data == view.ctypes.data
        for _ in range(3):
            model.publish({"w": numpy.ones(3, "f4")})
        assert not view.any()
        raise KeyError("done")

    with pytest.raises(KeyError, match="done"):
        gradfs.follow(model.path, apply)


def test_follow_with_a_function_ends_at_its_timeout(model):
    with pytest.raises(gradfs.Timeout, match="newer than 0 within 0.4 s"):
        gradfs.follow(model.path, lambda *_: None, timeout=0.4)


def test_an_exception_of_the_function_ends_it_unless_it_is_told(model):
    def apply(version, tensors):
        raise ValueError(f"not {version}")

    with pytest.raises(ValueError, match="not 0"):
        gradfs.follow(model.path, apply)
    stop, failed = threading.Event(), []

    def on_error(version, error):
        failed.append((version, str(error)))
        model.publish({"w": numpy.ones(3, "f4")})
        if len(failed) == 2:
            stop.set()

    gradfs.follow(model.path, apply, stop=stop, timeout=60, on_error=on_error)
    assert failed == [(0, "not 0"), (1, "not 1")]


def test_a_follower_runs_in_a_thread_until_its_block_ends(model):
    here = numpy.full(3, -1, "f4")
    with gradfs.Follower(model.path, lambda _, tensors: tensors.copy_to({"w": here})) as follower:
        assert follower.wait(0, timeout=60) == 0
        version = model.publish({"w": numpy.full(3, 5, "f4")})
        assert follower.wait(version, timeout=60) == version == follower.version
        assert (here == 5).all()
        with pytest.raises(gradfs.Timeout, match="version 9 was not applied: not within 0.05 s"):
            follower.wait(9, timeout=0.05)
    before = threading.active_count()
    assert not [thread for thread in threading.enumerate() if thread.name == "gradfs-follower"], before
    with pytest.raises(gradfs.Timeout, match="it was stopped"):
        follower.wait(9, timeout=60)


def test_what_ends_the_thread_of_a_follower_is_raised_where_one_waits(model):
    def apply(version, tensors):
        raise ValueError("no")

    follower = gradfs.Follower(model.path, apply)
    follower.__enter__()
    with pytest.raises(ValueError, match="no"):
        follower.wait(0, timeout=60)
    with pytest.raises(ValueError, match="no"):
        follower.close()


def test_a_poll_applies_what_is_newer_and_waits_for_nothing(model):
    seen = []
    follower = gradfs.Follower(model.path, lambda version, _: seen.append(version))
    assert follower.poll() and not follower.poll()
    version = model.publish({"w": numpy.ones(3, "f4")})
    while follower.version != version:
        follower.poll()
    assert seen[0] == 0 and seen[-1] == version and not follower.poll()
    follower.close()


def test_pairs_are_published_one_by_one_and_all_or_none(start):
    model = gradfs.open(start({"a": numpy.zeros(2, "f4"), "b": numpy.zeros(3, "f4")}, "--reducer", "assign"))
    assert model.publish((name, numpy.full(size, 7, "f4")) for name, size in (("b", 3), ("a", 2))) == 1
    for wrong, reason in [
        ([("a", numpy.ones(2, "f4"))], "these are missing: b"),
        ([("a", numpy.ones(2, "f4")), ("c", numpy.ones(3, "f4"))], "c: the model has no such tensor"),
        ([("a", numpy.ones(2, "f4")), ("b", numpy.ones(2, "f4"))], r"b: the shape is \[2\]"),
    ]:
        with pytest.raises(gradfs.Refused, match=reason):
            model.publish(iter(wrong))
    with model.pull() as weights:
        assert weights.version == 1 and (weights["a"].numpy() == 7).all() and (weights["b"].numpy() == 7).all()


def test_a_reader_without_its_directory_is_refused(model):
    if "://" not in model.path and (Path(model.path) / "readers").exists():
        pytest.skip("this mount has readers/")
    with pytest.raises(gradfs.Refused, match=r"has no directory readers/, which reader='engine' needs"):
        gradfs.follow(model.path, lambda *_: None, reader="engine")


@pytest.mark.mounted
def test_a_reader_says_what_it_has_applied(model):
    readers = Path(model.path) / "readers"
    with gradfs.Follower(model.path, lambda *_: None, reader="engine") as follower:
        assert (readers / "engine").is_dir()
        follower.wait(0, timeout=60)
        version = model.publish({"w": numpy.ones(3, "f4")})
        follower.wait(version, timeout=60)
        assert int((readers / "engine" / "applied").read_text()) == version
        with pytest.raises(gradfs.Busy, match="rmdir"):
            gradfs.Follower(model.path, lambda *_: None, reader="engine")
    assert not (readers / "engine").exists()


@pytest.mark.mounted
def test_a_reader_that_the_job_has_lost_begins_anew(model):
    reader = Path(model.path) / "readers" / "engine"
    with gradfs.Follower(model.path, lambda *_: None, reader="engine") as follower:
        follower.wait(0, timeout=60)
        reader.rmdir()
        version = model.publish({"w": numpy.ones(3, "f4")})
        follower.wait(version, timeout=60)
        assert int((reader / "applied").read_text()) == version
        reader.rmdir()


@pytest.mark.mounted
def test_follow_gives_changes_where_the_mount_has_them(start):
    model = gradfs.open(start({"w": numpy.zeros(300_000, "f4"), "b": numpy.zeros(4, "f4")}, "--reducer", "assign"))
    kinds, here = [], {"w": numpy.full(300_000, -1, "f4"), "b": numpy.full(4, -1, "f4")}

    def apply(version, tensors):
        kinds.append((version, tensors.is_whole))
        tensors.copy_to(here)

    follower = gradfs.Follower(model.path, apply, changes=True)
    follower.poll()
    weights = {"w": numpy.zeros(300_000, "f4"), "b": numpy.zeros(4, "f4")}
    weights["w"][[3, 299_999]] = 5
    model.publish(weights)
    assert follower.poll()
    assert kinds == [(0, True), (1, False)]
    for name, array in weights.items():
        assert (here[name] == array).all()


def test_a_model_that_was_made_anew_is_followed_from_its_first_version(mounted, tmp_path):
    model = gradfs.open(mounted({"w": numpy.zeros(3, "f4")}, "--reducer", "assign"))
    registry, seen = model.status["registry"], []
    follower = gradfs.Follower(model.path, lambda version, of: seen.append((version, of["w"].numpy().tolist())))
    for _ in range(2):
        version = model.publish({"w": numpy.ones(3, "f4")})
    assert follower.poll() and not follower.poll()
    source = gradfs.create_from({"w": numpy.full(5, 7, "f4")}, tmp_path / "other.safetensors")
    layout, at = Path(model.path) / "layout", ["--registry", registry]
    subprocess.run([binary(), "delete", "model", *at], check=True, timeout=HANGS, capture_output=True)
    until(lambda: not layout.exists())
    create = [binary(), "create", "model", "--model", str(source), "--reducer", "assign", *at]
    subprocess.run(create, check=True, timeout=HANGS, capture_output=True)
    until(layout.exists)
    assert follower.poll() and not follower.poll()
    assert seen == [(version, [1.0] * 3), (0, [7.0] * 5)]
