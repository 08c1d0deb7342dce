from __future__ import annotations

import json
import os

import numpy
import pytest

import gradfs

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")


def loaded(path):
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118 - no mapping


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.narrow = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.strided = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_the_first_file_has_parameters_once_and_persistent_buffers(tmp_path):
    net = Net()
    path = gradfs.create_from(net, tmp_path / "net.safetensors")
    tensors, metadata = loaded(path)
    buffers = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(tensors) == {name for name, _ in net.named_parameters()} | buffers
    assert "head.weight" not in tensors and metadata == {"format": "pt"}
    state = net.state_dict()
    for name, tensor in tensors.items():
        assert tensor.dtype == state[name].dtype and torch.equal(tensor, state[name]), name


def test_a_mount_takes_the_first_file(start):
    net = Net()
    with gradfs.open(start(net)).pull() as weights:
        state = net.state_dict()
        assert all(torch.equal(view.torch(), state[name]) for name, view in weights.items())


def test_a_state_dict_has_tied_tensors_once(tmp_path):
    tensors, _ = loaded(gradfs.create_from(Net().state_dict(), tmp_path / "net.safetensors"))
    assert "embedding.weight" in tensors and "head.weight" not in tensors


def test_mappings_of_numpy_arrays_are_written(tmp_path):
    path = gradfs.create_from({"w": numpy.arange(3.0), "b": numpy.array(True)}, tmp_path)
    assert path == tmp_path / "model.safetensors"
    tensors, _ = loaded(path)
    assert tensors["w"].tolist() == [0, 1, 2] and tensors["b"].item() is True


def test_config_and_tokenizer_are_kept_beside_it(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in "config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json", "model.safetensors", "a.py":
        (source / name).write_text(name)
    path = gradfs.create_from({"w": numpy.zeros(3)}, tmp_path / "new", files_from=source)
    assert sorted(os.listdir(path.parent)) == [
        "adapter_config.json", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert (path.parent / "config.json").read_text() == "config.json"


def test_files_and_checkpoints_are_taken_as_they_are(tmp_path):
    path = gradfs.create_from({"w": numpy.zeros(3)}, tmp_path / "model.safetensors")
    assert gradfs.create_from(path, tmp_path / "no") == path
    assert gradfs.create_from(tmp_path, tmp_path / "no") == tmp_path
    assert not (tmp_path / "no").exists()
    for wrong, words in [(tmp_path / "a.pt", "convert it first"), (tmp_path / "none", "is no safetensors file")]:
        with pytest.raises(gradfs.Refused, match=words):
            gradfs.create_from(wrong, tmp_path / "no")


def test_a_failure_leaves_the_file_before(tmp_path):
    path = gradfs.create_from({"w": numpy.zeros(3)}, tmp_path)
    before = path.read_bytes()
    for wrong, kind in [({"w": object()}, TypeError), ({}, gradfs.Refused), ({"w": torch.ones(2, device="meta")}, gradfs.Refused)]:
        with pytest.raises(kind):
            gradfs.create_from(wrong, tmp_path)
    with pytest.raises(TypeError, match="no torch module"):
        gradfs.create_from(3, tmp_path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["model.safetensors"]


def test_offsets_are_aligned_and_begin_at_0(tmp_path):
    path = gradfs.create_from({"a": numpy.zeros(1, "u1"), "b": numpy.zeros(1, "f8"), "c": numpy.zeros(1, "f2")}, tmp_path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert [header[name]["data_offsets"] for name in "bca"] == [[0, 8], [8, 10], [10, 11]]
