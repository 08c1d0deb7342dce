from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from conftest import HANGS, binary, until
from test_files_rolled_back import cluster  # noqa: F401

import gradfs
from gradfs import convert
from gradfs.first_file import create_from

torch = pytest.importorskip("torch")

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-6),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 2)


class Wide(torch.nn.Module):
    """Several blocks of weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(200, 300)
        self.norm = torch.nn.LayerNorm(300)
        self.last = torch.nn.Linear(300, 8)


def step(net, optimizer, number):
    generator = torch.Generator().manual_seed(number)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def trained(make, steps, groups=None, net=None):
    net = net or Net()
    optimizer = make(groups(net) if groups else net.parameters())
    for number in range(steps):
        step(net, optimizer, number)
    return net, optimizer


def saved(tmp_path, net, optimizer, name="old.pt"):
    path = tmp_path / name
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def run(*arguments):
    return convert.main(list(map(str, arguments)))


def close(one, other):
    assert set(one) == set(other)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reducer", OPTIMIZERS)
def test_a_job_goes_on_from_torchs_optimizer_and_torch_from_the_job(reducer, start, tmp_path):
    net, optimizer = trained(OPTIMIZERS[reducer], 3)
    old = saved(tmp_path, net, optimizer)
    assert run(old, tmp_path / "snapshot", "--optimizer", "adamw" if reducer == "adamw" else "adam") == 0

    model = gradfs.open(start(tmp_path / "snapshot", snapshot=True))
    assert model.control["reducer"] == reducer
    step(net, optimizer, 3)
    with model.join() as learner:
        learner.push({name: parameter.grad for name, parameter in net.named_parameters()})
        with learner.pull() as weights:
            close(weights.torch(), net.state_dict())
        again = [binary(), "save", model.path, str(tmp_path / "again")]
        subprocess.run(again, check=True, timeout=HANGS, capture_output=True)

    assert run(tmp_path / "again", tmp_path / "new.pt", "--like", old) == 0
    new = torch.load(tmp_path / "new.pt", weights_only=True)
    successor = Net()
    successor.load_state_dict(new["model"])
    its = OPTIMIZERS[reducer](successor.parameters())
    its.load_state_dict(new["optimizer"])
    step(net, optimizer, 4)
    step(successor, its, 4)
    close(dict(successor.named_parameters()), dict(net.named_parameters()))


def decayed(net):
    """The groups of transformers' Trainer: biases and norms have no weight decay."""
    named = list(net.named_parameters())
    return [
        {"params": [pair for pair in named if pair[1].dim() > 1], "weight_decay": 0.1},
        {"params": [pair for pair in named if pair[1].dim() < 2], "weight_decay": 0.0},
    ]


def nameless(net):
    return [{**group, "params": [value for _, value in group["params"]]} for group in decayed(net)]


def error(net, exact):
    """The largest error of a weight, as a share of its tensor's largest."""
    pairs = zip(net.parameters(), exact.parameters())
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


def python_with_gradfs(monkeypatch):
    """The command finds this interpreter, and this package."""
    monkeypatch.setenv("PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(Path(gradfs.__file__).parents[1]))


@pytest.mark.parametrize("reducer", ["adam", "adamw", "momentum"])
def test_steps_by_torch_then_gradfs_then_torch_lead_where_those_of_torch_do(
    reducer,
    cluster,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """Weights and state are in two files, the groups have no names, and the job is on shards."""
    net, optimizer = trained(OPTIMIZERS[reducer], 10, nameless, Wide())
    create_from(net, tmp_path / "net.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "names").write_text("".join(f"{name}\n" for group in decayed(net) for name, _ in group["params"]))
    names = ["--names", tmp_path / "names"]
    python_with_gradfs(monkeypatch)

    one = cluster()
    with_state = ["--optimizer-state", tmp_path / "optimizer.pt", "--optimizer-names", tmp_path / "names"]
    settings = ["--block-size=64KiB", "--shards=3", "--reducer", reducer]
    one.command("create", "trained", "--model", tmp_path / "net.safetensors", *with_state, *settings)
    until((one.mount / "trained").exists)
    model = gradfs.open(one.mount / "trained")
    assert model.control["reducer"] == reducer
    exact, its = trained(OPTIMIZERS[reducer], 10, nameless, Wide().double())
    with model.join() as learner:
        for number in range(10, 25):
            step(net, optimizer, number)
            step(exact, its, number)
            learner.push({name: parameter.grad for name, parameter in net.named_parameters()})
        with learner.pull() as weights:
            ours = Wide()
            ours.load_state_dict(weights.torch())
    # As ps-backend/tests/golden.rs has it: what fp32 makes of it in torch, or a millionth.
    assert error(net, exact) > 0 and error(ours, exact) <= max(error(net, exact), 1e-6)

    one.command("save", "trained", tmp_path / "again")
    assert run(tmp_path / "again", tmp_path / "new.pt", "--like", tmp_path / "optimizer.pt", *names) == 0
    new = torch.load(tmp_path / "new.pt", weights_only=True)
    close(new["model"], ours.state_dict())
    ours, successor = trained(OPTIMIZERS[reducer], 0, nameless, ours)
    successor.load_state_dict(new["optimizer"])
    for number in range(25, 30):
        for its_net, its_optimizer in (net, optimizer), (exact, its), (ours, successor):
            step(its_net, its_optimizer, number)
    assert error(ours, exact) <= max(error(net, exact), 1e-6)


def test_groups_with_names_become_rules(start, tmp_path):
    def groups(net):
        named = list(net.named_parameters())
        decayed = [(name, value) for name, value in named if value.dim() > 1]
        return [
            {"params": decayed, "weight_decay": 0.5},
            {"params": [pair for pair in named if pair[1].dim() < 2], "weight_decay": 0.0, "lr": 0.001},
        ]

    net, optimizer = trained(OPTIMIZERS["adamw"], 2, groups)
    if "param_names" not in optimizer.state_dict()["param_groups"][0]:
        pytest.skip("this torch keeps no names of parameters")
    old = saved(tmp_path, net, optimizer)
    assert run(old, tmp_path / "snapshot", "--optimizer", "adamw") == 0
    model = gradfs.open(start(tmp_path / "snapshot", snapshot=True))
    assert "first.bias weight_decay=0 learning_rate_scale=0.1" in model.control["tensors"].splitlines()
    step(net, optimizer, 2)
    with model.join() as learner:
        learner.push({name: parameter.grad for name, parameter in net.named_parameters()})
        with learner.pull() as weights:
            close(weights.torch(), net.state_dict())


def test_a_checkpoint_without_an_optimizer_becomes_a_first_file(tmp_path):
    net = Net()
    torch.save({f"module.{name}": value for name, value in net.state_dict().items()}, tmp_path / "a.pt")
    assert run(tmp_path / "a.pt", tmp_path / "a.safetensors") == 0
    assert run(tmp_path / "a.safetensors", tmp_path / "b.pt") == 0
    close(torch.load(tmp_path / "b.pt", weights_only=True)["model"], net.state_dict())


def test_state_by_names_is_taken_as_it_is_given(tmp_path):
    old = saved(tmp_path, *trained(OPTIMIZERS["adagrad"], 2))
    assert run(old, tmp_path / "one") == 0
    assert run(tmp_path / "one", tmp_path / "named.pt") == 0
    named = torch.load(tmp_path / "named.pt", weights_only=True)
    assert named["optimizer"]["state"]["first.weight"]["step"] == 2
    assert run(tmp_path / "named.pt", tmp_path / "two") == 0
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "two")]
    for key in "settings", "steps", "optimizer", "files":
        assert manifests[0][key] == manifests[1][key]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.SGD(p, lr=1, maximize=True), "maximize=True"),
        (lambda p: torch.optim.RMSprop(p, momentum=0.5), "rmsprop with momentum=0.5"),
        (lambda p: torch.optim.RMSprop(p, centered=True), "centered=True"),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.5), "lr_decay=0.5"),
        (lambda p: torch.optim.Rprop(p), "gradfs has no optimizer with the settings"),
    ],
    ids=["amsgrad", "maximize", "momentum", "centered", "lr_decay", "rprop"],
)
def test_what_gradfs_cannot_do_is_refused_by_name(make, words, tmp_path, capsys):
    old = saved(tmp_path, *trained(make, 1))
    assert run(old, tmp_path / "snapshot") == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "snapshot").exists()


def test_groups_without_names_are_refused(tmp_path, capsys):
    old = saved(tmp_path, *trained(OPTIMIZERS["sgd"], 1, lambda net: [{"params": net.first.parameters()}, {"params": net.last.parameters()}]))
    assert run(old, tmp_path / "snapshot") == 1
    said = capsys.readouterr().err
    assert "nothing tells which" in said and "--names" in said
    for given, words in (
        (["first.weight"] * 4, "has 4 parameters, and --names has 1 different names"),
        (["first.weight", "first.bias", "last.weight", "nowhere"], "has no weight nowhere"),
        (["first.bias", "first.weight", "last.weight", "last.bias"], ""),
    ):
        (tmp_path / "names").write_text("\n".join(given))
        assert run(old, tmp_path / "snapshot", "--names", tmp_path / "names") == (1 if words else 0)
        assert words in capsys.readouterr().err


def test_state_beside_safetensors_needs_names(tmp_path, capsys):
    """There tensors have no order."""
    net, optimizer = trained(OPTIMIZERS["adam"], 1, lambda net: net.first.parameters())
    create_from(net.first, tmp_path / "model.safetensors")
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "optimizer.pt")
    state = ["--state", tmp_path / "optimizer.pt"]
    assert run(tmp_path / "model.safetensors", tmp_path / "snapshot", *state) == 1
    assert "nothing tells which" in capsys.readouterr().err
    (tmp_path / "names").write_text("bias\nweight\n")
    assert run(tmp_path / "model.safetensors", tmp_path / "snapshot", *state, "--names", tmp_path / "names") == 1
    assert "exp_avg of bias is not of that tensor" in capsys.readouterr().err
    assert run(tmp_path / "optimizer.pt", tmp_path / "snapshot", "--names", tmp_path / "names") == 1
    assert "has no weights under" in capsys.readouterr().err


def test_create_says_why_it_cannot_take_the_state(tmp_path, monkeypatch):
    net, optimizer = trained(OPTIMIZERS["adam"], 1)
    model = create_from(net, tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")

    def refused(*words):
        state = ["--optimizer-state", tmp_path / "optimizer.pt", "--registry", "127.0.0.1:1"]
        command = [binary(), "create", "m", *state, *words]
        done = subprocess.run(list(map(str, command)), check=False, timeout=HANGS, capture_output=True, text=True)
        assert done.returncode != 0
        return done.stderr

    python_with_gradfs(monkeypatch)
    assert "nothing tells which" in refused("--model", model)
    assert "--optimizer-state needs --model" in refused()
    assert "--optimizer-state and --from exclude each other" in refused("--from", tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert "there is no python3" in refused("--model", model)
    python = tmp_path / "bin" / "python3"
    python.write_text("#!/bin/sh\necho 'No module named gradfs' >&2\nexit 1\n")
    python.chmod(0o755)
    assert "or convert where it is: python -m gradfs.convert" in refused("--model", model)


def test_what_is_there_stays(tmp_path, capsys):
    old = saved(tmp_path, *trained(OPTIMIZERS["sgd"], 1))
    (tmp_path / "snapshot").mkdir()
    create_from({"w": numpy.zeros(1)}, tmp_path / "snapshot")
    assert run(old, tmp_path / "snapshot") == 1
    assert "is there already" in capsys.readouterr().err


def test_the_command_runs_as_a_module(tmp_path, program):
    old = saved(tmp_path, *trained(OPTIMIZERS["sgd"], 1))
    text = "import runpy, sys\nsys.argv[0] = 'convert'\nrunpy.run_module('gradfs.convert', run_name='__main__')\n"
    process = program(text, old, tmp_path / "a.safetensors")
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    assert (tmp_path / "a.safetensors").exists() and sys.executable


def test_crc32c_is_castagnolis():
    assert convert.crc32c(b"123456789") == 0xE3069283
    assert convert.crc32c(b"") == 0
    assert convert.crc32c(b"a") == 0xC1D04330
    assert convert.crc32c(bytes(32)) == 0x8A9136AA
    assert convert.crc32c(b"\0") == 0x527D5351


def test_crc32c_is_castagnolis__of_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "_BLOCK_SIZE", 1000)
    data = numpy.random.default_rng(1).bytes(2 * convert._AT_ONCE * 1000 + 3003)
    (tmp_path / "file").write_bytes(data)
    blocks = [data[at : at + 1000] for at in range(0, len(data), 1000)]
    assert convert._checked(tmp_path / "file")["crc32c"] == "".join(f"{slowly(block):08x}" for block in blocks)
    assert [convert.crc32c(data[:size]) for size in range(3, 2100, 97)] == [slowly(data[:size]) for size in range(3, 2100, 97)]


def slowly(data):
    """The CRC32C, a bit at a time."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ 0x82F63B78 * (state & 1)
    return state ^ 0xFFFFFFFF
