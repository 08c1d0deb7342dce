"""What models are loaded from: Hugging Face checkpoints, whose several files are one model and whose directory names it,
tensors whose names are paths, and tensors of types that no reducer takes."""

import errno
import json
import os

import numpy as np
import pytest
from filetools import close, eventually, fails, ship_mapped, write_safetensors
from refusals import refused_up, safetensors, tensor

INDEX = "model.safetensors.index.json"
PARTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def values(begin, count):
    return np.arange(begin, begin + count, dtype="<f4")


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with two files and their index; the file that is second in name has the tensors that are first."""
    folder = tmp_path / "Tiny-3.1-8B"
    folder.mkdir()
    first = {name: ("F32", (count,), values(begin, count).tobytes()) for name, begin, count in [("z", 0, 10), ("y", 10, 6)]}
    second = {"a": ("F32", (2, 4), values(16, 8).tobytes())}
    for name, tensors in zip(PARTS, (first, second), strict=True):
        write_safetensors(folder / name, tensors, {"format": "pt"})
    index = {"metadata": {"total_size": 96}, "weight_map": {"a": PARTS[1], "z": PARTS[0], "y": PARTS[0]}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("what", ["directory", "index", "other_index", "variant"])
@pytest.mark.also_on_network
def test_a_checkpoint_of_several_files_is_one_model(start_mount, checkpoint, what):
    """With its files one behind the other, in the order of their names."""
    if what == "other_index":
        (checkpoint / INDEX).rename(checkpoint / "diffusion_pytorch_model.safetensors.index.json")
    if what == "variant":
        (checkpoint / INDEX).rename(checkpoint / "model.safetensors.index.fp16.json")
        (checkpoint / f"{INDEX}.bak").write_text("none")
    mount = start_mount(model=checkpoint / INDEX if what == "index" else checkpoint, name="tiny")
    assert mount.weights() == values(0, 24).tobytes()
    assert (np.load(mount.model / "tensors/a.npy") == values(16, 8).reshape(2, 4)).all()


def test_a_checkpoint_of_several_files_is_one_model__called_as_its_directory(gradfs, checkpoint, tmp_path):
    for model in (checkpoint, f"{checkpoint}/", checkpoint / INDEX):
        done = gradfs("up", "--dry-run", model, tmp_path)
        assert done.returncode == 0 and done.stdout.startswith("Tiny-3.1-8B: 96 bytes"), done


def test_a_checkpoint_of_several_files_is_one_model__nor_are_files_of_one_name_mixed_up(gradfs, tmp_path):
    for folder in ("policy", "value"):
        (tmp_path / folder).mkdir()
        write_safetensors(tmp_path / folder / "model.safetensors", {"a": ("F32", (4,), values(0, 4).tobytes())})
    files = [tmp_path / folder / "model.safetensors" for folder in ("policy", "value")]
    done = gradfs("up", "--dry-run", *files, tmp_path)
    assert done.returncode == 0 and [line.split(":")[0] for line in done.stdout.splitlines() if ":" in line] == [
        "policy", "value"
    ], done
    # One alone keeps its name.
    assert gradfs("up", "--dry-run", files[0], tmp_path).stdout.startswith("model: ")


WHOLE = {"a": PARTS[1], "z": PARTS[0], "y": PARTS[0]}


@pytest.mark.parametrize(("weight_map", "missing", "words"), [
    ({**WHOLE, "a": PARTS[0]}, None, [PARTS[0], "lacks", '"a"']),
    ({**WHOLE, "b": PARTS[1]}, None, [PARTS[1], "lacks", '"b"']),
    ({**WHOLE, "y": PARTS[1]}, None, [PARTS[0], '"y"', "the index does not place"]),
    ({**WHOLE, "a": "../other.safetensors"}, None, ["../other.safetensors", "in the same directory"]),
    (WHOLE, PARTS[1], [PARTS[1], "No such file"]),
    (WHOLE, INDEX, ["2 safetensors files of one model", INDEX, "copy the checkpoint again"]),
    (None, None, [INDEX, "weight_map"]),
], ids=["elsewhere", "lacks", "unlisted", "outside", "no_file", "no_index", "no_map"])
def test_a_checkpoint_that_is_not_whole_is_refused(gradfs, checkpoint, mnt, weight_map, missing, words):
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": weight_map} if weight_map else {"metadata": {}}))
    if missing:
        (checkpoint / missing).unlink()
    refused_up(gradfs, mnt, checkpoint, words=words)


def test_a_checkpoint_that_is_not_whole_is_refused__and_a_directory_without_one(gradfs, tmp_path, mnt):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused_up(gradfs, mnt, empty, words=["there is no safetensors file in", str(empty)])


NESTED = {"encoder/0/weight": (30, 1000), "head": (50,), "encoder/0/bias": (1000,), "encoder/1/weight": (7,), "encoder": (3,)}
TREE = {
    "": (["encoder"], ["encoder.npy", "head.npy"]),
    "encoder": (["0", "1"], []),
    "encoder/0": ([], ["bias.npy", "weight.npy"]),
    "encoder/1": ([], ["weight.npy"]),
}


@pytest.fixture
def nested(start_mount, tmp_path):
    """Starts a mount of these tensors; gives it with their values, which count up, and where each of them begins."""

    def start(**options):
        tensors, offsets, at = {}, {}, 0
        for name, shape in NESTED.items():
            tensors[name], offsets[name] = values(at, int(np.prod(shape))).reshape(shape), 4 * at
            at += tensors[name].size
        path = tmp_path / "nested.safetensors"
        write_safetensors(path, {name: ("F32", value.shape, value.tobytes()) for name, value in tensors.items()})
        return start_mount(model=path, **{"reducer": "sum", "timeout": 20, **options}), tensors, offsets

    return start


def check_tree(top, expected):
    """Names, kinds, links and modes, `.` and `..`, and what the tensors hold."""
    found = {os.path.relpath(path, top): (sorted(dirs), sorted(files)) for path, dirs, files in os.walk(top)}
    assert {"" if path == "." else path: inside for path, inside in found.items()} == TREE
    inodes = set()
    for path, (dirs, files) in TREE.items():
        stat = (top / path).stat()
        assert (oct(stat.st_mode), stat.st_nlink) == (oct(0o40755), 2 + len(dirs)), path
        inodes.add(stat.st_ino)
        for name in dirs:
            assert os.path.samestat((top / path / name / "..").stat(), stat)
        for name in files:
            stat = (top / path / name).stat()
            assert (oct(stat.st_mode), stat.st_nlink) == (oct(0o100444), 1), name
            inodes.add(stat.st_ino)
    assert len(inodes) == len(TREE) + len(expected)
    for name, value in expected.items():
        assert np.array_equal(np.load(top / f"{name}.npy"), value), name
        assert np.array_equal(np.load(top / f"{name}.npy", mmap_mode="r"), value), name
    for name in ("0", "encoder/head.npy", "encoder/0.npy", "encoder/0/weight", "encoder/2", "weight.npy"):
        assert not (top / name).exists(), name
    return inodes


@pytest.mark.also_on_network
def test_tensor_names_with_slashes_are_directories(nested):
    mount, tensors, offsets = nested(retain=1)
    top = mount.model / "tensors"
    at_start = check_tree(top, tensors)
    check_tree(mount.model / "versions/0/tensors", tensors)
    # A mapping keeps its version, and so does an open directory.
    name, before = "encoder/0/weight", {name: value.copy() for name, value in tensors.items()}
    mapped = np.load(top / f"{name}.npy", mmap_mode="r")
    held = [os.open(where / "encoder/0", os.O_RDONLY) for where in (top, mount.model / "versions/0/tensors")]
    inodes = [at_start]
    for version in (1, 2):
        mount.contribute(np.ones(NESTED[name], "<f4"), offsets[name])
        mount.catch_up()
        tensors[name] += 1
        assert np.array_equal(np.load(top / f"{name}.npy"), tensors[name])
        assert np.array_equal(mapped, before[name])
        inodes.append(check_tree(top, tensors))
        inodes.append(check_tree(mount.model / f"versions/{version}/tensors", tensors))
    check_tree(mount.model / "versions/1/tensors", {**tensors, name: tensors[name] - 1})
    assert len(set.union(*inodes)) == sum(map(len, inodes)), "inodes of one version are those of another"
    eventually(lambda: not (mount.model / "versions/0").exists())
    for fd in held:
        assert sorted(os.listdir(fd)) == ["bias.npy", "weight.npy"]
    with open(os.open("weight.npy", os.O_RDONLY, dir_fd=held[1]), "rb") as file:
        assert np.array_equal(np.load(file), before[name])
    close(*held)
    fails(errno.EPERM, (top / "encoder/2").mkdir)
    fails(errno.EACCES, open, top / "head.npy", "r+b")


@pytest.mark.also_on_network
def test_tensor_names_with_slashes_are_directories__and_are_trained(nested):
    """By writers and by mappings; patterns of frozen tensors go by the whole name, and `*` goes past a slash."""
    mount, tensors, offsets = nested(frozen=["enc*/weight"])
    size = sum(value.nbytes for value in tensors.values())
    ship_mapped(mount.model, np.ones(size // 4, "<f4"))
    mount.contribute(np.ones(1000, "<f4"), offsets["encoder/0/bias"])
    mount.catch_up()
    for name, more in [("head", 1), ("encoder", 1), ("encoder/0/bias", 2)]:
        tensors[name] += more
    check_tree(mount.model / "tensors", tensors)
    fails(errno.EINVAL, mount.control, "frozen", "weight")
    mount.control("frozen", "encoder/?/bias")
    mount.contribute(np.ones(size // 4, "<f4"))
    mount.catch_up()
    for name in set(tensors) - {"encoder/0/bias"}:
        tensors[name] += 1
    check_tree(mount.model / "tensors", tensors)


@pytest.mark.parametrize(("names", "words"), [
    (["a/../../b"], ['"a/../../b"', "path component"]), (["n/" * 1024 + "a"], ["n/n/n", "2048"]),
    (["a.npy/x", "a"], ['"a"', '"a.npy/x"', '"a.npy"']),
], ids=["climbing", "long", "file and directory"])
def test_tensor_names_that_are_no_paths_are_refused(gradfs, tmp_path, mnt, names, words):
    model = tmp_path / "model.safetensors"
    write_safetensors(model, {name: ("F32", (4,), bytes(16)) for name in names})
    refused_up(gradfs, mnt, model, words=[*words, "rename"])
    # Nor do they get into a registry, whether there is one or not.
    done = gradfs("create", "nested", "--model", model, "--registry", "127.0.0.1:9")
    assert done.returncode != 0 and all(word in done.stderr for word in [*words, "rename"]), done.stderr


def test_tensors_that_cannot_be_trained_are_named(start_mount, gradfs, tmp_path, mnt):
    """One warning for all of them; integers have no gradients, so nobody misses theirs."""
    model = tmp_path / "mixed.safetensors"
    names = [f"wide{number}" for number in range(6)]
    tensors = {"a": tensor(0, 32), "counter": tensor(32, 40, dtype="I64", shape=[1])}
    for number, name in enumerate(names):
        tensors[name] = tensor(40 + 16 * number, 56 + 16 * number, dtype="C64", shape=[2])
    model.write_bytes(safetensors(tensors, bytes(40 + 16 * len(names))))
    mount = start_mount(model=model)
    [line] = [line for line in mount.stderr().splitlines() if "never trained" in line]
    assert "WARN" in line and "wide0 is C64" in line and "and 2 more" in line and "counter" not in line, line

    model.write_bytes(safetensors({"a": tensor(0, 32, dtype="I64", shape=[4])}, bytes(32)))
    refused_up(gradfs, mnt, model, words=["no tensor can be trained", "a is I64", "--reducer assign"], code=2)
    mount = start_mount(model=model, reducer="assign")
    assert mount.weights() == bytes(32)
    fails(errno.EINVAL, mount.control, "reducer", "sgd")
    assert mount.control("reducer") == "assign"
