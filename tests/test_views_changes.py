"""Views of models that are not here, as they pull and publish what has changed: docs/use/files/views.md and parts.md."""

import json
import mmap
import os
import signal

import ml_dtypes
import numpy as np
import pytest
from conftest import pause
from filetools import BLOCK, eventually
from safetensors.numpy import save_file
from test_views import publish, same, shown, view

BF16 = ml_dtypes.bfloat16
SHAPES = {"rows": (BF16, (700, 512)), "columns": (BF16, (512, 800)), "wide": ("<f4", (300, 400)), "flags": ("u1", (4096,))}
PLAN = {
    "tensors": [
        {"from": "rows", "split": {"dim": 0, "of": 4, "part": 1}},
        {"from": "columns", "split": {"dim": 1, "of": 4, "part": 2}},
        {"name": "turned", "from": "rows", "slice": {"1": [5, 100]}, "transpose": True},
        {"name": "widened", "from": "columns", "slice": {"0": [0, 100]}, "cast": "F32"},
        {"name": "both", "from": "columns", "slice": {"0": [100, 200]}, "cast": "F32", "transpose": True},
        {"from": "wide", "slice": {"0": [7, 150], "1": [3, 201]}},
        {"from": "flags"},
    ]
}
# The most bytes of an element of a patch: its value, and where it is. An element of fp32 may be two.
ELEMENT = 16
# The least patch, and the bytes of the model in a request.
HEAD, REQUEST = 12, 256 << 10


def made(tensors):
    """What the plan makes of a version, by NumPy, and the same with the model's types."""
    rows, columns, wide = (tensors[name] for name in ("rows", "columns", "wide"))
    raw = {
        "rows": np.split(rows, 4)[1],
        "columns": np.split(columns, 4, axis=1)[2],
        "turned": rows[:, 5:100].T,
        "widened": columns[:100],
        "both": columns[100:200].T,
        "wide": wide[7:150, 3:201],
        "flags": tensors["flags"],
    }
    cast = {name: raw[name].astype("<f4") for name in ("widened", "both")}
    return {name: np.ascontiguousarray(of) for name, of in {**raw, **cast}.items()}, raw


def bits(values):
    return np.ascontiguousarray(values).view(f"<u{values.dtype.itemsize}")


def change(tensors, share, seed):
    rng, changed = np.random.default_rng(seed), {}
    for name, values in tensors.items():
        changed[name] = values.copy()
        of = changed[name].view(f"<u{values.dtype.itemsize}")
        of[rng.random(of.shape) < share] ^= 1
    return changed


def most(old, new):
    """The most bytes that one reading of what has changed in the view takes, and all bytes that it is made of."""
    (_, old), (_, new) = made(old), made(new)
    changed = sum(int((bits(old[name]) != bits(new[name])).sum()) for name in new)
    size = sum(of.nbytes for of in new.values())
    requests = 2 * (len(new) + size // REQUEST)
    return changed * ELEMENT + requests * HEAD, size


def payload(mount):
    return json.loads((mount.model / "status.json").read_text())["payload"]


def pulled(mount):
    return payload(mount)["pulled_bytes"]


@pytest.fixture
def start(cluster, tmp_path):
    """A model on two shards, a mount of all of it, and one of a view alone."""

    def begin(**settings):
        one, rng, tensors = cluster(2), np.random.default_rng(4), {}
        for name, (dtype, shape) in SHAPES.items():
            values = rng.standard_normal(shape)
            tensors[name] = (abs(values) * 50).astype("u1") if dtype == "u1" else values.astype(dtype)
        save_file(tensors, tmp_path / "m.safetensors")
        one.create("m", model=tmp_path / "m.safetensors", block_size=BLOCK, reducer="assign", timeout=200, **settings)
        whole, apart = one.mount(models=["m"], transport="tcp"), one.mount(models=["m"], views_only=True)
        return tensors, whole, apart, view(apart, "v", PLAN)

    return begin


def shows(place, version, tensors):
    eventually(lambda: (place / "version").read_text() == f"{version}\n")
    ours, (wanted, _) = shown(place), made(tensors)
    assert set(ours) == set(wanted) and all(same(ours[name], wanted[name]) for name in wanted), version


def test_a_view_pulls_what_has_changed_of_what_it_needs(start):
    tensors, whole, apart, place = start()
    shows(place, 0, tensors)
    held, fd = made(tensors)[0], os.open(place / "weights", os.O_RDONLY)
    layout, read = [line.split("\t") for line in (place / "layout").read_text().splitlines()], []
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
        for version, share in enumerate([0.001, 0.02, 0, 0.001, 0.3, 0.001, 1, 0.001], 1):
            before, old = pulled(apart), tensors
            tensors = change(tensors, share, version)
            publish(whole, tensors)
            shows(place, version, tensors)
            bound, size = most(old, tensors)
            if share <= 0.02:
                assert bound < size / (10 if share < 0.02 else 4), "the bound says something"
                read.append((pulled(apart) - before) / bound)
            # Who has an older version mapped keeps it.
            for name, _, _, offset in layout:
                raw = held[name].tobytes()
                assert memory[int(offset) : int(offset) + len(raw)] == raw, name
    os.close(fd)
    # All shards are asked again if one of them was not ready for the version, or has ended its connection.
    assert sorted(read)[len(read) // 2] <= 1, read


def test_a_view_that_lags_behind_pulls_the_changes_of_several_versions_at_once(start):
    tensors, whole, apart, place = start(changes=3)
    version = 0
    for behind, is_known in [(2, True), (3, True), (5, False), (1, True)]:
        shows(place, version, tensors)
        before, old = payload(apart), tensors
        pause(apart.pid)
        for seed in range(behind):
            tensors = change(tensors, 0.001, 100 * behind + seed)
            publish(whole, tensors)
        version += behind
        os.kill(apart.pid, signal.SIGCONT)
        shows(place, version, tensors)
        now, (bound, size) = payload(apart), most(old, tensors)
        came, patched = (now[key] - before[key] for key in ("pulled_bytes", "pull_patched_bytes"))
        assert (came >= size) == (not is_known), (behind, came, bound, size)
        assert (patched >= size) == is_known, (behind, patched, size)


@pytest.mark.parametrize("name, off, on", [("delta", "off", "auto"), ("changes", "0", "4")])
def test_without_changes_a_view_is_pulled_whole(start, name, off, on):
    tensors, whole, apart, place = start()
    shows(place, 0, tensors)
    version = 0
    for value, is_whole in [(off, True), (on, False)]:
        (whole.model / "control" / name).write_text(value)
        eventually(lambda: (apart.model / "control" / name).read_text() == f"{value}\n")
        # The first version after that may come from before.
        for _ in range(2):
            before, old, version = pulled(apart), tensors, version + 1
            tensors = change(tensors, 0.001, version)
            publish(whole, tensors)
            shows(place, version, tensors)
        assert (pulled(apart) - before >= most(old, tensors)[1]) == is_whole


def test_a_view_that_rounds_pulls_all_of_what_it_rounds(start):
    tensors, whole, apart, _ = start()
    plan = {"tensors": [{"from": "wide", "cast": "BF16"}, {"from": "rows"}]}
    place, read = view(apart, "rounded", plan), []
    (apart.model / "views/v").rmdir()
    for version in range(1, 4):
        before, tensors = pulled(apart), change(tensors, 0.001, version)
        publish(whole, tensors)
        eventually(lambda: (place / "version").read_text() == f"{version}\n")
        ours = shown(place)
        assert same(ours["wide"], tensors["wide"].astype(BF16)) and same(ours["rows"], tensors["rows"])
        read.append(pulled(apart) - before)
    assert tensors["wide"].nbytes < min(read) < tensors["wide"].nbytes + tensors["rows"].nbytes / 10


def test_ranks_publish_what_has_changed_of_their_parts(start):
    tensors, whole, apart, _ = start()
    (apart.model / "views/v").rmdir()
    plan = {"tensors": [{"from": "*"}], "publish": {"part": 0, "of": 1}}
    place = view(apart, "all", plan)

    def give(version):
        data = bytearray((place / "weights").stat().st_size)
        for line in (place / "layout").read_text().splitlines():
            name, _, _, offset = line.split("\t")
            raw = tensors[name].tobytes()
            data[int(offset) : int(offset) + len(raw)] = raw
        (place / "set").write_text(f"set-{version}")
        before, fd = payload(apart)["pushed_bytes"], os.open(place / "publish", os.O_WRONLY)
        assert os.write(fd, data) == len(data)
        os.close(fd)
        eventually(lambda: (place / "version").read_text() == f"{version}\n")
        assert (place / "weights").read_bytes() == data
        eventually(lambda: whole.seen() == version)
        for name, values in tensors.items():
            assert (whole.model / "tensors" / f"{name}.npy").read_bytes().endswith(values.tobytes()), name
        return payload(apart)["pushed_bytes"] - before

    size = sum(of.nbytes for of in tensors.values())
    for version in range(1, 5):
        old, tensors = tensors, change(tensors, 0 if version == 3 else 0.001, version)
        changed = sum(int((bits(old[name]) != bits(tensors[name])).sum()) for name in tensors)
        assert give(version) <= changed * ELEMENT + 2 * (len(tensors) + size // REQUEST) * HEAD < size / 10
    # Without them, all of it goes.
    (apart.model / "control/delta").write_text("off")
    eventually(lambda: (apart.model / "control/delta").read_text() == "off\n")
    tensors = change(tensors, 0.001, 5)
    assert give(5) == size
