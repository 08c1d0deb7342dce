"""What models are loaded from: Hugging Face checkpoints, whose several files are one model and whose directory names it, and
tensors of types that no reducer takes."""

import json

import numpy as np
import pytest
from filetools import write_safetensors
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


@pytest.mark.parametrize("what", ["directory", "index", "other_index"])
@pytest.mark.also_on_network
def test_a_checkpoint_of_several_files_is_one_model(start_mount, checkpoint, what):
    """With its files one behind the other, in the order of their names."""
    if what == "other_index":
        (checkpoint / INDEX).rename(checkpoint / "diffusion_pytorch_model.safetensors.index.json")
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


def damaged(checkpoint, fault):
    index = json.loads((checkpoint / INDEX).read_text())
    match fault:
        case "elsewhere":
            index["weight_map"]["a"] = PARTS[0]
        case "lacks":
            index["weight_map"]["b"] = PARTS[1]
        case "unlisted":
            index["weight_map"].update(y=PARTS[1])
        case "outside":
            index["weight_map"]["a"] = "../other.safetensors"
        case "no_file":
            (checkpoint / PARTS[1]).unlink()
        case "no_index":
            (checkpoint / INDEX).unlink()
            return
        case "no_map":
            index = {"metadata": {}}
    (checkpoint / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(("fault", "words"), [
    ("elsewhere", [PARTS[0], "lacks", '"a"']),
    ("lacks", [PARTS[1], "lacks", '"b"']),
    ("unlisted", [PARTS[0], '"y"', "the index does not have there"]),
    ("outside", ["../other.safetensors", "no file beside it"]),
    ("no_file", [PARTS[1], "No such file"]),
    ("no_index", ["2 safetensors files of one model", INDEX, "copy the checkpoint again"]),
    ("no_map", [INDEX, "weight_map"]),
])
def test_a_checkpoint_that_is_not_whole_is_refused(gradfs, checkpoint, tmp_path, fault, words):
    damaged(checkpoint, fault)
    refused_up(gradfs, tmp_path, checkpoint, words=words, code=1)


def test_a_checkpoint_that_is_not_whole_is_refused__and_a_directory_without_one(gradfs, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused_up(gradfs, tmp_path, empty, words=["there is no safetensors file in", str(empty)], code=1)


def test_tensors_that_cannot_be_trained_are_named(start_mount, gradfs, tmp_path):
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

    model.write_bytes(safetensors({"a": tensor(0, 32, dtype="F8_E4M3", shape=[32])}, bytes(32)))
    refused_up(gradfs, tmp_path, model, words=["no tensor can be trained", "a is F8_E4M3", "--reducer assign"], code=2)
    assert start_mount(model=model, reducer="assign").weights() == bytes(32)
