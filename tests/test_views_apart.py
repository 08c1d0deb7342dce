"""Mounts that hold views of a model, or some of its tensors, and nothing else of it: docs/use/files/views.md."""

import errno
import json
import os

import pytest
from conftest import MountFailed, ran
from filetools import BLOCK, eventually, fails
from safetensors.numpy import save_file
from test_views import llama, publish, same, shown, view

RANK = {"style": "hf-llama", "tp": 2, "rank": 1}
# Rows and columns, turned and changed.
MIXED = {
    "tensors": [
        {"name": "turned", "from": "model.layers.0.mlp.down_proj.weight", "slice": {"1": [5, 100]}, "transpose": True},
        {"name": "wide", "from": "lm_head.weight", "split": {"dim": 1, "of": 4, "part": 3}, "cast": "F32"},
    ]
}


@pytest.fixture
def job(cluster, tmp_path):
    """A model on two shards, and a mount of all of it."""
    one = cluster(2)
    save_file(llama(), tmp_path / "m.safetensors")
    one.create("m", model=tmp_path / "m.safetensors", block_size=BLOCK, reducer="assign")
    return one, one.mount(models=["m"])


def status(mount):
    return json.loads((mount.model / "status.json").read_text())


def test_views_of_a_model_that_is_not_here_are_as_of_one_that_is(job):
    one, whole = job
    apart = one.mount(models=["m"], views_only=True)
    places = [[view(mount, name, plan) for name, plan in (("rank", RANK), ("mixed", MIXED))] for mount in (whole, apart)]
    tensors = llama()
    for version in range(3):
        if version:
            tensors = {name: tensor * -1 + version for name, tensor in tensors.items()}
            publish(whole, tensors)
        for ours, theirs in zip(*places):
            eventually(lambda: all((place / "version").read_text() == f"{version}\n" for place in (ours, theirs)))
            ours, theirs = shown(ours), shown(theirs)
            assert set(ours) == set(theirs) and all(same(ours[name], theirs[name]) for name in ours)


def test_a_mount_of_views_reads_and_holds_no_more_than_they_need(job):
    one, whole = job
    apart = one.mount(models=["m"], views_only=True)
    assert status(apart)["payload"]["pulled_bytes"] == 0
    place = view(apart, "rank", RANK)
    size, pulled = (place / "weights").stat().st_size, [0, status(apart)["payload"]["pulled_bytes"]]
    for version in range(1, 4):
        publish(whole, {name: tensor * -1 + version for name, tensor in llama().items()})
        eventually(lambda: (place / "version").read_text() == f"{version}\n")
        pulled.append(status(apart)["payload"]["pulled_bytes"])
    now = status(apart)
    # All shards are asked again if one of them was not ready for the version, or has ended its connection.
    read = [after - before for before, after in zip(pulled, pulled[1:])]
    assert min(read) == size < 0.6 * now["size_bytes"], read
    assert (now["version_buffers"]["existing"], now["memory"]["versions"], now["versions_in_memory"]) == (0, 0, [])


def test_a_mount_of_views_alone_has_nothing_else_of_its_model(job):
    one, whole = job
    apart = one.mount(models=["m"], views_only=True)
    beside = {
        "views", "version", "durable_version", "layout", "readers", "learners", "control", "settings.json", "status.json", "error",
    }
    assert set(os.listdir(apart.model)) == beside
    for name in set(os.listdir(whole.model)) - beside:
        fails(errno.ENOENT, os.stat, apart.model / name)
    fails(errno.EACCES, os.mkdir, apart.model / "learners/a")
    assert "need a mount of the model" in (apart.model / "error").read_text()
    (apart.model / "control/retain").write_text("1")
    # Another mount hears of it a little later.
    eventually(lambda: (whole.model / "control/retain").read_text() == "1\n")
    (apart.model / "readers/r").mkdir()
    (apart.model / "readers/r/applied").write_text("0")
    eventually(lambda: (whole.model / "readers/applied").read_text() == "0\n")
    publish(whole, llama())
    eventually(lambda: (apart.model / "version").read_text() == "1\n")


def test_a_mount_of_some_tensors_shows_them_and_reads_no_others(job):
    one, whole = job
    apart = one.mount(models=["m"], tensors=["model.layers.1.*_proj.weight", "lm_?ead.weight"])
    assert {"weights", "weights.safetensors", "tensors", "layout", "version"} < set(os.listdir(apart.model))
    for name in ("gradients", "publish", "learners", "control", "views"):
        fails(errno.ENOENT, os.stat, apart.model / name)
    fails(errno.EACCES, os.open, apart.model / "weights", os.O_WRONLY)
    tensors = llama()
    for version in range(3):
        if version:
            tensors = {name: tensor * -1 + version for name, tensor in tensors.items()}
            publish(whole, tensors)
        eventually(lambda: (apart.model / "version").read_text() == f"{version}\n")
        ours = shown(apart.model)
        wanted = [name for name in tensors if name.startswith("model.layers.1.") and "_proj" in name or name == "lm_head.weight"]
        assert set(ours) == set(wanted) and all(same(ours[name], tensors[name]) for name in wanted)
    now = status(apart)
    assert now["size_bytes"] == sum(tensors[name].nbytes for name in wanted)
    assert now["version_buffers"]["existing"] <= 2


def test_a_mount_of_some_tensors_tells_of_its_model(job):
    one, whole = job
    apart = one.mount(models=["m"], tensors=["lm_head.weight"])
    now, beside = status(apart), status(whole)
    for key in ("registry", "state", "control"):
        assert now[key] == beside[key] is not None, key
    assert [of["id"] for of in now["shards"]] == [of["id"] for of in beside["shards"]] and len(now["shards"]) == 2
    assert all(of["address"] and of["transport"] != "in-process" for of in now["shards"])
    assert now["payload"]["pulled_bytes"] >= now["size_bytes"] == llama()["lm_head.weight"].nbytes < beside["size_bytes"]
    # Its readers are the model's.
    (apart.model / "readers/r").mkdir()
    (apart.model / "readers/r/applied").write_text("0")
    eventually(lambda: (whole.model / "readers/applied").read_text() == "0\n")
    assert (apart.model / "readers/applied").read_text() == "0\n" and [of["id"] for of in status(apart)["readers"]] == ["r"]
    fails(errno.EINVAL, (apart.model / "readers/r/applied").write_text, "9")
    assert "version 9" in (apart.model / "error").read_text()
    (apart.model / "readers/r").rmdir()
    assert set(os.listdir(apart.model / "readers")) == {"applied"}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"tensors": ["nothing.*"]}, 'no tensor of the model matches "nothing.*"'),
        ({"tensors": ["lm_head.weight"], "views_only": True}, "two ways to show a part"),
        ({"views_only": True, "nbd": "127.0.0.1:0"}, "--nbd serves whole models"),
        ({"views_only": True, "via": "auto"}, "--via is of mounts that pull whole versions"),
        ({"tensors": ["lm_head.weight"], "via": "auto"}, "--via is of mounts that pull whole versions"),
    ],
    ids=["no tensor", "both", "nbd", "views and via", "tensors and via"],
)
def test_a_mount_that_would_show_what_it_does_not_hold_is_refused(job, options, words):
    one, _ = job
    with pytest.raises(MountFailed) as failed:
        one.mount(models=["m"], **options)
    assert words in str(failed.value)


def test_a_shell_hears_that_no_view_was_made(cluster, tmp_path):
    one = cluster(1)
    save_file(llama(), tmp_path / "m.safetensors")
    one.create("m", model=tmp_path / "m.safetensors", block_size=BLOCK, reducer="assign", timeout=2)
    apart = one.mount(models=["m"], views_only=True)
    place = apart.model / "views/rank"
    place.mkdir()
    with one.shards[0].paused():
        done = ran(["sh", "-c", f"echo '{json.dumps(RANK)}' > {place}/plan"])
    assert done.returncode != 0 and done.stderr, done
    assert os.listdir(place) == ["plan"] and (place / "plan").read_text() == ""
    done = ran(["sh", "-c", f"echo '{json.dumps(RANK)}' > {place}/plan && cat {place}/version"])
    assert (done.returncode, done.stdout) == (0, "0\n"), done
