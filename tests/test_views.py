"""Views: what docs/use/files/views.md promises of them."""

import errno
import json
import os
import select
import subprocess
import threading

import ml_dtypes
import numpy as np
import pytest
from filetools import BLOCK, close, eventually, fails, raises
from safetensors import safe_open
from safetensors.numpy import save_file

BF16 = ml_dtypes.bfloat16
LAYERS = 2


def llama():
    """Tensors with the names of Llama, of odd sizes."""
    rng, tensors = np.random.default_rng(1), {}

    def add(name, *shape):
        tensors[name] = rng.standard_normal(shape).astype(BF16)

    add("model.embed_tokens.weight", 520, 64)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        add(f"{at}.self_attn.q_proj.weight", 64, 64)
        add(f"{at}.self_attn.k_proj.weight", 32, 64)
        add(f"{at}.self_attn.v_proj.weight", 32, 64)
        add(f"{at}.self_attn.o_proj.weight", 64, 64)
        add(f"{at}.mlp.gate_proj.weight", 168, 64)
        add(f"{at}.mlp.up_proj.weight", 168, 64)
        add(f"{at}.mlp.down_proj.weight", 64, 168)
        add(f"{at}.input_layernorm.weight", 64)
    add("lm_head.weight", 520, 64)
    return tensors


@pytest.fixture
def job(start_mount, tmp_path):
    def start(tensors=None, **settings):
        save_file(tensors or llama(), tmp_path / "m.safetensors")
        return start_mount(model=tmp_path / "m.safetensors", block_size=BLOCK, **{"reducer": "assign", **settings})

    return start


def view(mount, name, plan):
    place = mount.model / "views" / name
    place.mkdir(exist_ok=True)
    (place / "plan").write_text(json.dumps(plan) + "\n")
    return place


def shown(place):
    """The tensors of a view. Its files say the same of them."""
    with safe_open(place / "weights.safetensors", "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    data, dtypes = (place / "weights").read_bytes(), {}
    for line in (place / "layout").read_text().splitlines():
        name, dtype, _, offset = line.split("\t")
        raw = tensors[name].tobytes()
        assert data[int(offset) : int(offset) + len(raw)] == raw, name
        dtypes[name] = dtype
    assert set(dtypes) == set(tensors) and sum(of.nbytes for of in tensors.values()) == len(data)
    return tensors


def publish(mount, tensors):
    """New weights, by the tensors' offsets."""
    data = bytearray(mount.weights())
    for line in (mount.model / "layout").read_text().splitlines():
        name, _, _, offset = line.split("\t")
        raw = tensors[name].tobytes()
        data[int(offset) : int(offset) + len(raw)] = raw
    fd = os.open(mount.model / "publish", os.O_WRONLY)
    assert os.write(fd, data) == len(data)
    os.close(fd)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def number(place):
    return int((place / "version").read_text())


@pytest.mark.also_on_network
def test_a_view_has_what_its_plan_says(job):
    rng = np.random.default_rng(2)
    tensors = {
        "a": rng.standard_normal((33, 50)).astype("<f4"),
        "b": rng.standard_normal((33, 20)).astype("<f4"),
        "n": np.arange(77, dtype="<i8"),
        "h": rng.standard_normal((5, 6)).astype(BF16),
        "l.0.w": rng.standard_normal(9).astype("<f4"),
        "l.1.w": rng.standard_normal(9).astype("<f4"),
    }
    mount = job(tensors)
    assert os.listdir(mount.model / "views") == []
    a, b = tensors["a"], tensors["b"]
    plan = {
        "tensors": [
            {"name": "slice", "from": "a", "slice": {"0": [3, 30], "1": [1, 2]}},
            {"name": "split", "from": "a", "split": {"dim": 1, "of": 5, "part": 4}},
            {"name": "transpose", "from": "a", "transpose": True},
            {"name": "concat", "concat": [{"from": "b", "slice": {"1": [2, 9]}}, {"from": "a"}], "dim": 1},
            {"name": "turned", "concat": [{"from": "b", "transpose": True}, {"from": "a", "transpose": True}]},
            {"name": "narrow", "from": "a", "cast": "bf16"},
            {"name": "wide/h", "from": "h", "cast": "f32"},
            {"from": "n"},
            {"name": "layers.*.weight", "from": "l.*.w"},
        ]
    }
    place = view(mount, "mine", plan)
    expected = {
        "slice": a[3:30, 1:2],
        "split": a[:, 40:],
        "transpose": a.T,
        "concat": np.concatenate([b[:, 2:9], a], axis=1),
        "turned": np.concatenate([b.T, a.T]),
        "narrow": a.astype(BF16),
        "wide/h": tensors["h"].astype("<f4"),
        "n": tensors["n"],
        "layers.0.weight": tensors["l.0.w"],
        "layers.1.weight": tensors["l.1.w"],
    }
    has = shown(place)
    assert set(has) == set(expected)
    for name, values in expected.items():
        assert same(has[name], np.ascontiguousarray(values)), name
    assert same(np.load(place / "tensors/transpose.npy"), np.ascontiguousarray(a.T))
    assert same(np.load(place / "tensors/wide/h.npy"), expected["wide/h"])
    assert (place / "hf/model.safetensors").read_bytes() == (place / "weights.safetensors").read_bytes()
    files = ["hf", "layout", "plan", "tensors", "version", "versions", "weights", "weights.safetensors"]
    assert sorted(os.listdir(place)) == files
    assert json.loads((place / "plan").read_text()) == plan
    mapped = np.memmap(place / "weights", mode="r")
    assert mapped.tobytes() == (place / "weights").read_bytes()
    fails(errno.EACCES, os.open, place / "weights", os.O_WRONLY)
    for name in ("gradients", "publish", "learners", "control", "readers", "views", "device"):
        fails(errno.ENOENT, os.stat, place / name)
    assert [of["id"] for of in mount.status()["views"]] == ["mine"]


@pytest.mark.also_on_network
def test_the_ranks_of_a_style_are_the_model_together(job):
    model = llama()
    mount = job(model)
    for tp in (2, 4):
        places = [view(mount, f"r{rank}of{tp}", {"style": "hf-llama", "tp": tp, "rank": rank}) for rank in range(tp)]
        ranks = [shown(place) for place in places]
        for name, values in model.items():
            parts = [rank[name] for rank in ranks]
            if name.endswith("norm.weight"):
                assert all(same(part, values) for part in parts), name
                continue
            axis = 1 if "o_proj" in name or "down_proj" in name else 0
            assert same(np.concatenate(parts, axis=axis), values), name


def test_a_style_fuses_modules(job):
    model = llama()
    plan = {"style": "hf-llama", "tp": 2, "rank": 1, "heads": 4, "kv_heads": 2, "fuse": ["qkv", "gate_up"]}
    has = shown(view(job(model), "mine", plan))
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        q, k, v, gate, up = (model[f"{at}.{of}.weight"] for of in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"))
        assert same(has[f"{at}.self_attn.qkv_proj.weight"], np.concatenate([q[32:], k[16:], v[16:]]))
        assert same(has[f"{at}.mlp.gate_up_proj.weight"], np.concatenate([gate[84:], up[84:]]))
        assert f"{at}.self_attn.q_proj.weight" not in has


@pytest.mark.also_on_network
@pytest.mark.parametrize("passthrough", [True, False])
def test_each_version_of_the_model_is_one_of_the_view_with_its_number(job, passthrough):
    model = llama()
    mount = job(model, no_passthrough=not passthrough, retain=2)
    place = view(mount, "mine", {"tensors": [{"name": "t", "from": "lm_head.weight", "transpose": True}]})
    assert number(place) == 0
    fd = os.open(place / "version", os.O_RDONLY)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    before = os.open(place / "weights", os.O_RDONLY)
    first = os.pread(before, 1 << 30, 0)
    for version in range(1, 6):
        assert os.pread(fd, 99, 0) == f"{version - 1}\n".encode() and not poll.poll(0)
        model["lm_head.weight"] = np.full((520, 64), version).astype(BF16)
        publish(mount, model)
        assert poll.poll(20_000)
        eventually(lambda: number(place) == version)
        assert (shown(place)["t"] == version).all()
        assert os.getxattr(place / "weights", "user.gradfs.version") == str(version).encode()
    assert sorted(os.listdir(place / "versions"), key=int) == ["3", "4", "5"]
    assert (place / "versions/4/weights").read_bytes() == np.full(520 * 64, 4).astype(BF16).tobytes()
    assert os.pread(before, 1 << 30, 0) == first, "an open file keeps its version"
    assert mount.status()["views"] == [{"id": "mine", "version": 5, "size_bytes": 520 * 64 * 2}]
    close(fd, before)


def test_changes_of_a_view_are_those_of_its_layout(job):
    model = llama()
    mount = job(model, retain=1)
    place = view(mount, "mine", {"tensors": [{"name": "t", "from": "lm_head.weight", "slice": {"0": [100, 400]}}]})
    versions = [shown(place)["t"]]
    for version in range(1, 4):
        # Others change, too, and these are not in the view.
        model["lm_head.weight"][100 + version, version] += 1
        model["lm_head.weight"][:50] += 1
        publish(mount, model)
        eventually(lambda: number(place) == version)
        versions.append(shown(place)["t"])
    for base in (2, 0):
        with safe_open(place / f"versions/3/changes-since-{base}.safetensors", "np") as file:
            old = versions[base].copy().reshape(-1)
            indices = file.get_tensor("t.indices")
            old[indices] = file.get_tensor("t.values")
            assert same(old, versions[3].reshape(-1)) and len(indices) == 3 - base
    fails(errno.ENOENT, os.stat, place / "versions/3/changes-since-9.safetensors")


@pytest.mark.also_on_network
def test_a_reader_of_a_view_sees_one_version_in_every_byte(job):
    tensors = {"w": np.zeros((600, 700), dtype="<f4")}
    mount = job(tensors)
    place = view(mount, "mine", {"tensors": [{"from": "w", "transpose": True}]})
    done, seen = threading.Event(), set()

    def read():
        while not done.is_set():
            with open(place / "weights", "rb") as file:
                values = np.frombuffer(file.read(), "<f4")
                assert values.min() == values.max()
                assert int(os.getxattr(file.fileno(), "user.gradfs.version")) == values[0]
                seen.add(values[0])

    failed = []

    def reader():
        try:
            read()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=reader) for _ in range(3)]
    [thread.start() for thread in threads]
    for version in range(1, 60):
        publish(mount, {"w": np.full((600, 700), version, dtype="<f4")})
    eventually(lambda: number(place) == 59)
    eventually(lambda: 59 in seen or failed)
    done.set()
    [thread.join() for thread in threads]
    assert not failed and len(seen) > 2, (failed, seen)


@pytest.mark.also_on_network
def test_a_wrong_plan_is_refused_and_the_view_stays(job):
    mount = job()
    empty = mount.model / "views/empty"
    empty.mkdir()
    assert os.listdir(empty) == ["plan"] and (empty / "plan").read_text() == ""
    good = view(mount, "good", {"tensors": [{"from": "lm_head.weight"}]})
    plan, before = (good / "plan").read_text(), (good / "weights").read_bytes()
    weight = "lm_head.weight"
    for wrong, words in [
        ({"tensors": [{"from": "nothing"}]}, 'no tensor "nothing"'),
        ({"tensors": [{"from": weight, "slice": {"0": [0, 521]}}]}, "has no slice [0, 521]"),
        ({"tensors": [{"from": weight, "cast": "f8_e4m3"}]}, "cannot be cast to F8_E4M3"),
        ({"tensors": [{"from": weight}, {"from": weight}]}, "two tensors are named"),
        ({"tensors": [{"from": weight}, {"name": "x", "from": weight}], "rest": True, "all": True}, "the plan overlaps"),
        ({"tensors": [{"from": weight}], "all": True}, "leaves out parts of tensor"),
        ({"style": "hf-llama", "tp": 16}, "its dimension 0 has 520, which 16 does not divide"),
        ({"style": "hf-llama", "tp": 2, "rank": 2}, "no rank 2 of 2"),
        ({"style": "other"}, "unknown variant"),
        ({}, "the plan has no tensor"),
        ([], "not a plan"),
    ]:
        for place in (empty, good):
            for end in ("\n", ""):
                with raises(errno.EINVAL):
                    (place / "plan").write_text(json.dumps(wrong) + end)
                assert words in (mount.model / "error").read_text(), (wrong, (mount.model / "error").read_text())
    for text in (b"{", b"\xff\n", b"{}" + b" " * (1 << 20)):
        with raises(errno.EINVAL):
            (good / "plan").write_bytes(text)
    assert os.listdir(empty) == ["plan"]
    assert (good / "plan").read_text() == plan and (good / "weights").read_bytes() == before
    for name in (".x", "a b", "x" * 65):
        fails(errno.EINVAL, os.mkdir, mount.model / "views" / name)
    fails(errno.EEXIST, os.mkdir, good)
    fails(errno.EPERM, os.mkdir, good / "sub")
    with raises(errno.EPERM):
        (good / "other").write_text("")
    assert [of["version"] for of in mount.status()["views"]] == [None, 0]


def test_a_plan_of_a_program_that_has_exited_is_applied(job):
    mount = job()
    place = mount.model / "views/mine"
    place.mkdir()
    # The program's exit closes the file, or the shell that has opened it does.
    plan = '{"tensors": [{"from": "lm_head.weight"}]}'
    for script in ("exec cat > $1", "exec 3> $1; cat >&3", "cat | tee $1 > /dev/null"):
        done = subprocess.run(["sh", "-c", script, "sh", place / "plan"], input=plan.encode(), timeout=60)
        assert done.returncode == 0
        eventually(lambda: (place / "plan").read_text() == plan and (place / "weights").exists())
        place.rmdir()
        place.mkdir()


def test_another_plan_replaces_the_first(job):
    model = llama()
    mount = job(model)
    place = view(mount, "mine", {"tensors": [{"from": "lm_head.weight"}]})
    old = os.open(place / "weights", os.O_RDONLY)
    data = os.pread(old, 1 << 30, 0)
    view(mount, "mine", {"tensors": [{"from": "model.layers.*.input_layernorm.weight"}]})
    assert set(shown(place)) == {f"model.layers.{layer}.input_layernorm.weight" for layer in range(LAYERS)}
    assert os.pread(old, 1 << 30, 0) == data, "who has the file open keeps it"
    assert sorted(os.listdir(place / "tensors")) == [f"model.layers.{layer}.input_layernorm.weight.npy" for layer in range(LAYERS)]
    model["model.layers.0.input_layernorm.weight"][:] = 7
    publish(mount, model)
    eventually(lambda: number(place) == 1)
    assert (shown(place)["model.layers.0.input_layernorm.weight"] == 7).all()
    os.close(old)


@pytest.mark.also_on_network
def test_rmdir_removes_a_view_and_open_files_keep_their_memory(job):
    model = llama()
    mount = job(model)
    place = view(mount, "mine", {"tensors": [{"from": "lm_head.weight"}]})
    fd = os.open(place / "weights", os.O_RDONLY)
    mapped = np.memmap(place / "weights", mode="r")
    place.rmdir()
    fails(errno.ENOENT, os.stat, place / "weights")
    fails(errno.ENOENT, os.rmdir, place)
    assert os.listdir(mount.model / "views") == [] and mount.status()["views"] == []
    for version in range(1, 4):
        publish(mount, {**model, "lm_head.weight": np.full((520, 64), version).astype(BF16)})
    assert os.pread(fd, 1 << 30, 0) == model["lm_head.weight"].tobytes() == mapped.tobytes()
    again = view(mount, "mine", {"tensors": [{"from": "lm_head.weight"}]})
    assert number(again) == 3 and (shown(again)["lm_head.weight"] == 3).all()
    close(fd)


def test_a_view_takes_the_memory_of_two_versions(job):
    mount = job({"w": np.zeros((64, 16384), dtype="<f4")})
    place = view(mount, "mine", {"tensors": [{"from": "w"}]})
    size = (place / "weights").stat().st_size

    def taken():
        maps = (line.split() for line in open(f"/proc/{mount.pid}/maps") if "gradfs-view" in line)
        return sum(int(end, 16) - int(start, 16) for start, end in (line[0].split("-") for line in maps))

    for version in range(1, 12):
        publish(mount, {"w": np.full((64, 16384), version, dtype="<f4")})
        eventually(lambda: number(place) == version)
        assert (place / "weights").read_bytes()[:4] == np.float32(version).tobytes()
    eventually(lambda: taken() <= 2 * size)
    assert mount.status()["memory"]["views"] == 2 * size
    place.rmdir()
    eventually(lambda: taken() == 0)
    assert mount.status()["memory"]["views"] == 0


def test_views_come_and_go_without_end(job):
    mount = job()
    plan = {"tensors": [{"from": "lm_head.weight"}]}
    expected = (view(mount, "stays", plan) / "weights").read_bytes()
    held = os.open(mount.model / "views/stays/weights", os.O_RDONLY)

    def comes(name):
        """The room of those before is free only after a while."""
        try:
            view(mount, name, plan)
        except OSError as error:
            assert error.errno == errno.ENOSPC, (error, (mount.model / "error").read_text())
            return False
        return True

    for number in range(600):
        name = f"v{number}"
        eventually(lambda name=name: comes(name))
        place = mount.model / "views" / name
        assert (place / "weights").read_bytes() == expected and len(os.listdir(place)) > 5
        place.rmdir()
    assert os.pread(held, len(expected), 0) == expected
    os.close(held)


def test_a_model_has_256_views_at_most(job):
    mount = job()
    for number in range(256):
        (mount.model / f"views/v{number}").mkdir()
    fails(errno.EDQUOT, os.mkdir, mount.model / "views/more")
    (mount.model / "views/v7").rmdir()
    (mount.model / "views/more").mkdir()
