"""Converts between checkpoints of torch, first files of models, and snapshots of jobs.

    python -m gradfs.convert checkpoint.pt model.safetensors      the weights, as the first file of a model
    python -m gradfs.convert checkpoint.pt snapshot/              with the optimizer's state: gradfs up --from snapshot/
    python -m gradfs.convert model.safetensors snapshot/ --state optimizer.pt --names names    the same, of two files
    python -m gradfs.convert snapshot/ checkpoint.pt              and back, with the state by parameters' names
    python -m gradfs.convert snapshot/ checkpoint.pt --like old.pt    with the groups and numbers of old.pt

State is carried of Adam, AdamW, SGD, Adagrad and RMSprop, with steps, rates and other settings. Not carried are
schedulers, random generators, GradScalers, and whatever else a checkpoint has.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import arrays, first_file, job
from .errors import GradfsError, Refused
from .layout import BITS

# Where checkpoints keep weights and the optimizer.
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "weights")
_OPTIMIZER_KEYS = ("optimizer", "opt", "optimizer_state_dict", "optim")


class Kind(NamedTuple):
    """A reducer in torch's words: state of a tensor, settings by their names in `control/`, and what it can only be."""

    state: tuple[str, ...]
    settings: dict[str, str]
    fixed: dict[str, Any]


_ADAM, _EPS = ("exp_avg", "exp_avg_sq"), {"eps": "epsilon"}
_MOMENTUM = {"momentum": "momentum", "dampening": "dampening"}
_KINDS = {
    "adam": Kind(_ADAM, _EPS, {"amsgrad": False, "decoupled_weight_decay": False}),
    "adamw": Kind(_ADAM, _EPS, {"amsgrad": False, "decoupled_weight_decay": True}),
    "sgd": Kind((), {}, {"momentum": 0, "dampening": 0, "nesterov": False}),
    "momentum": Kind(("momentum_buffer",), _MOMENTUM, {"nesterov": False}),
    "nesterov": Kind(("momentum_buffer",), _MOMENTUM, {"nesterov": True}),
    "rmsprop": Kind(("square_avg",), {"alpha": "alpha", **_EPS}, {"momentum": 0, "centered": False}),
    "adagrad": Kind(("sum",), _EPS, {"lr_decay": 0}),
}
_BLOCK_SIZE = 256 << 10
_REDUCED = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
# Buffers that a checkpoint has among its weights: what the ranks average, and what they count.
_AVERAGED, _COUNTED = ("running_mean", "running_var"), ("num_batches_tracked",)
# The polynomial of CRC32C, reflected; and the bytes of a lane, and the blocks, which are computed side by side.
_POLYNOMIAL = 0x82F63B78
_LANE, _AT_ONCE = 1024, 64


class Checkpoint(NamedTuple):
    """Weights, the optimizer's state of each parameter by name, its groups with names, and how many steps it made."""

    weights: dict[str, Any]
    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(
        "gradfs.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a checkpoint of torch, a snapshot, or a safetensors file")
    parser.add_argument("to", type=Path, help="*.safetensors, *.pt, or a directory for a snapshot")
    parser.add_argument(
        "--optimizer", choices=("adam", "adamw"), help="which of the two, where the source does not tell"
    )
    parser.add_argument("--state", type=Path, help="a file with the optimizer's state, if the source has weights alone")
    parser.add_argument(
        "--names", type=Path, help="a file with the names of the optimizer's parameters in its order, one a line"
    )
    parser.add_argument(
        "--like", type=Path, help="a checkpoint whose optimizer has the wanted groups, with their settings and numbers"
    )
    options = parser.parse_args(arguments)
    try:
        names = options.names.read_text().splitlines() if options.names else None
        convert(options.source, options.to, options.optimizer, options.like, options.state, names)
    except (GradfsError, OSError, TypeError) as error:
        print(f"gradfs.convert: error: {error}", file=sys.stderr)
        return 1
    return 0


def convert(
    source: Path,
    to: Path,
    optimizer: str | None = None,
    like: Path | None = None,
    state: Path | None = None,
    names: list[str] | None = None,
) -> None:
    """Converts `source` to what the name of `to` says. Raises Refused for what cannot be carried.

    `state` is a file with the optimizer's state, and `names` has the names of its parameters in its order.
    """
    import torch

    if (source / "manifest.json").exists() or (source.suffix == ".safetensors" and state is None):
        if to.suffix not in {".pt", ".pth"}:
            raise Refused(f"{to}: a snapshot becomes a checkpoint of torch: name a .pt file")
        result = _of_snapshot(source) if source.is_dir() else {"model": _tensors(source)}
        if like is not None and "optimizer" in result:
            result["optimizer"] = _numbered(result["optimizer"], _of_torch(like, None, names))
        with first_file.replacing(to) as file:
            torch.save(result, file)
        return
    checkpoint = _of_torch(source, state, names)
    if not checkpoint.weights:
        raise Refused(f"{source} has no weights under {', '.join(_MODEL_KEYS)}")
    if to.suffix == ".safetensors":
        first_file.create_from(checkpoint.weights, to)
    elif checkpoint.groups:
        _write_snapshot(checkpoint, to, optimizer)
    else:
        raise Refused(f"{state or source} has no optimizer's state: convert it to a .safetensors file, or give --state")


def _loaded(path: Path) -> Mapping[str, Any]:
    """What a file of torch or safetensors holds."""
    import torch

    if path.suffix == ".safetensors":
        return _tensors(path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, Mapping):
        raise Refused(f"{path} is no checkpoint: it holds a {type(found).__name__}")
    return found


def _of_torch(path: Path, state_of: Path | None, names_of: list[str] | None) -> Checkpoint:
    """The checkpoint of a file, whose optimizer may be in another one. A file of an optimizer alone has no weights."""
    import torch

    found = _loaded(path)
    weights = next((found[key] for key in _MODEL_KEYS if isinstance(found.get(key), Mapping)), found)
    kept = found if state_of is None else _loaded(state_of)
    inner = next((kept[key] for key in _OPTIMIZER_KEYS if isinstance(kept.get(key), Mapping)), None)
    optimizer = kept if "param_groups" in kept else inner
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    if tensors and all(name.startswith("module.") for name in tensors):
        tensors = {name[len("module.") :]: value for name, value in tensors.items()}
    tensors = dict(first_file.unique(tensors))
    if optimizer is None:
        return Checkpoint(tensors, {}, [])
    groups = [dict(group) for group in optimizer["param_groups"]]
    # In a safetensors file, tensors have lost the order of parameters.
    names = _names(state_of or path, {} if path.suffix == ".safetensors" else tensors, groups, names_of)
    if missing := sorted(set(names.values()) - set(tensors or names.values())):
        raise Refused(f"{path} has no weight {missing[0]}, which the optimizer has; {_HOW_TO_NAME}")
    state = {names[key]: dict(value) for key, value in optimizer["state"].items()}
    for group in groups:
        group["params"] = [names[key] for key in group["params"]]
    for name, key, value in ((name, *pair) for name, values in state.items() for pair in values.items()):
        if tensors and key != "step" and value is not None and value.shape != tensors[name].shape:
            raise Refused(f"{state_of or path}: the optimizer's {key} of {name} is not of that tensor; {_HOW_TO_NAME}")
    return Checkpoint(tensors, state, groups)


_HOW_TO_NAME = "give --names, or make the optimizer of named_parameters(), so that the checkpoint has the names"


def _names(
    path: Path, weights: Mapping[str, Any], groups: list[dict[str, Any]], given: list[str] | None
) -> dict[Any, str]:
    """The names of an optimizer's parameters, which torch numbers in the order in which it got them."""
    keys = [key for group in groups for key in group["params"]]
    if given is not None:
        if not len(given) == len(set(given)) == len(keys):
            raise Refused(f"{path} has {len(keys)} parameters, and --names has {len(set(given))} different names")
        return {key: name.removeprefix("module.") for key, name in zip(keys, given)}
    if all(isinstance(key, str) for key in keys):
        return {key: key.removeprefix("module.") for key in keys}
    if all("param_names" in group for group in groups):
        own = [name.removeprefix("module.") for group in groups for name in group["param_names"]]
        return dict(zip(keys, own))
    names = [name for name in weights if name.rpartition(".")[2] not in _AVERAGED + _COUNTED]
    if len(groups) > 1 or len(names) != len(keys):
        raise Refused(f"{path}: nothing tells which of the optimizer's {len(keys)} parameters is which; {_HOW_TO_NAME}")
    return dict(zip(keys, names))


def _reducer(group: Mapping[str, Any], wanted: str | None) -> str:
    if "betas" in group:
        is_decoupled = group.get("decoupled_weight_decay")
        if wanted is None and is_decoupled is None and group["weight_decay"]:
            raise Refused("the checkpoint does not tell Adam from AdamW: give --optimizer")
        return ("adamw" if is_decoupled else "adam") if is_decoupled is not None else wanted or "adam"
    if "nesterov" in group:
        return "nesterov" if group["nesterov"] else "momentum" if group["momentum"] else "sgd"
    for key, reducer in (("centered", "rmsprop"), ("lr_decay", "adagrad")):
        if key in group:
            return reducer
    raise Refused(f"gradfs has no optimizer with the settings {', '.join(group)}")


def _settings(groups: list[dict[str, Any]], reducer: str, weights: Mapping[str, Any]) -> dict[str, str]:
    """The settings of the job: those of the first group, and rules for the tensors of others."""
    first, kind = groups[0], _KINDS[reducer]
    rules = []
    for group in groups:
        for key, value in {**kind.fixed, "maximize": False}.items():
            if group.get(key, value) != value:
                raise Refused(f"gradfs has no {reducer} with {key}={group[key]}")
        for key in ("betas", *kind.settings):
            if group.get(key) != first.get(key):
                raise Refused(f"gradfs has one {key} for all tensors, and the checkpoint has several")
        if group is not first:
            if not first["lr"]:
                raise Refused("the first group's rate is 0, so those of the others are no multiples of it")
            rule = f"weight_decay={float(group['weight_decay'])!r} learning_rate_scale={group['lr'] / first['lr']!r}"
            rules += [f"{_pattern(name)} {rule}" for name in group["params"]]
    numbers = {"learning_rate": first["lr"], "weight_decay": first["weight_decay"]}
    numbers.update({name: first[key] for key, name in kind.settings.items()})
    if "betas" in first:
        numbers["beta1"], numbers["beta2"] = first["betas"]
    trained = {name for group in groups for name in group["params"]}
    others = [name for name, value in weights.items() if name not in trained and _is_reduced(name, value)]
    averaged = [name for name in others if _is_averaged(name)]
    rules += [f"{_pattern(name)} reducer=average" for name in averaged]
    frozen = [_pattern(name) for name in others if name not in averaged]
    texts = {name: repr(float(value)) for name, value in numbers.items()}
    return {"reducer": reducer, "tensors": "\n".join(rules), "frozen": "\n".join(frozen), **texts}


def _pattern(name: str) -> str:
    """A name as a pattern, in which `?` stands for a space."""
    return "".join("?" if letter.isspace() else letter for letter in name)


def _is_averaged(name: str) -> bool:
    return name.rpartition(".")[2] in _AVERAGED


def _is_reduced(name: str, value: Any) -> bool:
    return arrays.describe(name, value).dtype in _REDUCED


def _write_snapshot(checkpoint: Checkpoint, to: Path, optimizer: str | None) -> None:
    """Writes a snapshot as `gradfs save` does: the manifest comes last."""
    import torch

    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise Refused(f"{to} is there already: name a new directory")
    reducer = _reducer(checkpoint.groups[0], optimizer)
    settings = _settings(checkpoint.groups, reducer, checkpoint.weights)
    described = {name: arrays.describe(name, value) for name, value in checkpoint.weights.items()}
    # The order in which a model's tensors lie.
    names = sorted(described, key=lambda name: -BITS[described[name].dtype])
    trained = {name for group in checkpoint.groups for name in group["params"]}
    averaged = {name for name in names if _is_averaged(name) and name not in trained}
    state: dict[str, Any] = {}
    steps = []
    for name in names:
        weight, dtype = checkpoint.weights[name], described[name].dtype
        kept = checkpoint.state.get(name, {})
        has_state = any(kept.get(kind) is not None for kind in _KINDS[reducer].state)
        steps.append(int(kept.get("step", has_state)))
        if dtype not in _REDUCED:
            continue
        wide = torch.float64 if dtype == "F64" else torch.float32
        for kind in () if name in averaged else _KINDS[reducer].state:
            value = kept.get(kind)
            state[f"{kind}.{name}"] = torch.zeros(weight.shape, dtype=wide) if value is None else value.to(wide)
        state[f"step.{name}"] = torch.tensor(float(steps[-1]))
        if BITS[dtype] < 32:
            state[f"master.{name}"] = weight.to(torch.float32)
    to.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"}
    first_file.write(to / "model.safetensors", {name: checkpoint.weights[name] for name in names}, metadata)
    first_file.write(to / "optimizer.safetensors", state, {})
    manifest = {
        "format": 1, "model": "model", "version": max(steps, default=0), "optimizer": reducer,
        "steps": [[len(list(run)), count] for count, run in itertools.groupby(steps)], "contributions": max(steps),
        "learners": [], "unlisted": 0, "settings": settings, "block_size": _BLOCK_SIZE,
        "tensors": [[name, described[name].dtype, list(described[name].shape)] for name in names],
        "metadata": metadata, "id": os.urandom(8).hex(),
        "files": [_checked(to / name) for name in ("model.safetensors", "optimizer.safetensors")],
    }  # fmt: skip
    if averaged:
        kinds = ["average" if name in averaged else reducer for name in names]
        manifest["reducers"] = [[len(list(run)), kind] for kind, run in itertools.groupby(kinds)]
    text = json.dumps(manifest, separators=(",", ":"))[:-1].encode()
    with first_file.replacing(to / "manifest.json") as file:
        file.write(text + f',\n"checksum": "{crc32c(text):08x}"}}\n'.encode())


def _of_snapshot(path: Path) -> dict[str, Any]:
    """A checkpoint with the optimizer's state by the names of parameters, as torch.distributed.checkpoint has it."""
    import torch

    manifest = json.loads((path / "manifest.json").read_text())
    if manifest["format"] != 1:
        raise Refused(f"{path} has format {manifest['format']}, and this release reads format 1")
    weights: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for name in (entry["name"] for entry in manifest["files"]):
        # A save that was killed at its end leaves the snapshot's identity behind some names.
        file = path / name if (path / name).exists() else path / f"{name}.{manifest.get('id')}"
        if name.endswith(".safetensors"):
            (kept if name.startswith("optimizer") else weights).update(_tensors(file))
    if job.extra_of(path).exists():
        # The job has the first values of counters.
        weights.update(torch.load(job.extra_of(path), weights_only=True)["counters"])
    settings, reducer = manifest["settings"], manifest["optimizer"]
    kinds = [kind for count, kind in manifest.get("reducers", []) for _ in range(count)]
    averaged = {name for (name, *_), kind in zip(manifest["tensors"], kinds) if kind == "average"}
    others = {*kinds} - {reducer, "average"}
    if reducer not in _KINDS or others:
        raise Refused(f"torch has no optimizer for {', '.join(sorted(others)) or reducer}")
    # Values of narrow types are rounded in `weights`. The optimizer's masters are not.
    result: dict[str, Any] = {"model": weights, "version": manifest["version"]}
    masters = {key.partition(".")[2]: value for key, value in kept.items() if key.startswith("master.")}
    if masters:
        result["masters"] = masters
    frozen = set(settings["frozen"].split())
    names = [name for name in weights if f"step.{name}" in kept and name not in frozen | averaged]
    state: dict[str, dict[str, Any]] = {}
    for name in names:
        # torch makes the state at the first step of a parameter, and Adagrad's at once.
        if not kept[f"step.{name}"] and reducer != "adagrad":
            continue
        state[name] = {kind: kept[f"{kind}.{name}"] for kind in _KINDS[reducer].state}
        if "eps" in _KINDS[reducer].settings:
            state[name]["step"] = kept[f"step.{name}"].to(torch.float32)
    numbers = {key: float(settings[name]) for key, name in _KINDS[reducer].settings.items()}
    group: dict[str, Any] = {"params": names, **numbers, **_KINDS[reducer].fixed}
    group.update(lr=float(settings["learning_rate"]), weight_decay=float(settings["weight_decay"]))
    if reducer in ("adam", "adamw"):
        group["betas"] = float(settings["beta1"]), float(settings["beta2"])
    if settings["tensors"]:
        result["rules"] = settings["tensors"].splitlines()
    result["optimizer"] = {"state": state if _KINDS[reducer].state else {}, "param_groups": [group]}
    return result


def _numbered(optimizer: dict[str, Any], like: Checkpoint) -> dict[str, Any]:
    """The state with the groups, settings and numbers of another checkpoint, for `load_state_dict`."""
    count = itertools.count()
    groups = [{**group, "params": [(name, next(count)) for name in group["params"]]} for group in like.groups]
    pairs = [pair for group in groups for pair in group["params"]]
    missing = [name for name, _ in pairs if name not in optimizer["param_groups"][0]["params"]]
    if missing or not pairs:
        raise Refused(f"--like: not in the snapshot: {', '.join(missing) or 'an optimizer'}")
    state = {number: optimizer["state"][name] for name, number in pairs if name in optimizer["state"]}
    for group in groups:
        group["params"] = [number for _, number in group["params"]]
    return {"state": state, "param_groups": groups}


def _tensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file."""
    return {name: view.torch() for name, view in first_file.views(memoryview(bytearray(path.read_bytes()))).items()}


def _checked(path: Path) -> dict[str, Any]:
    sums: list[int] = []
    with open(path, "rb") as file:
        for blocks in iter(lambda: file.read(_AT_ONCE * _BLOCK_SIZE), b""):
            whole = len(blocks) // _BLOCK_SIZE * _BLOCK_SIZE
            sums += _sums(blocks[:whole], _BLOCK_SIZE) if whole else []
            sums += [crc32c(blocks[whole:])] if whole < len(blocks) else []
    return {"name": path.name, "bytes": path.stat().st_size, "crc32c": "".join(f"{one:08x}" for one in sums)}


def crc32c(data: bytes) -> int:
    """The CRC32C of some bytes."""
    if len(data) >= 4:
        return _sums(data, len(data))[0]
    state, table = 0xFFFFFFFF, _table(8)
    for byte in data:
        state = int(table[(state ^ byte) & 255]) ^ state >> 8
    return state ^ 0xFFFFFFFF


def _sums(data: bytes, size: int) -> list[int]:
    """The CRC32C of each block of `size` bytes, which is 4 at least."""
    import numpy

    # Zeros in front change nothing, and inverted first bytes are as good as a state of ones.
    zeros = -size % _LANE
    padded = numpy.zeros((len(data) // size, zeros + size), "u1")
    padded[:, zeros:] = numpy.frombuffer(data, "u1").reshape(-1, size)
    padded[:, zeros : zeros + 4] ^= 255
    # Lanes of all blocks side by side, two bytes a time.
    table = _table(16)
    lanes = numpy.zeros(padded.size // _LANE, "u4")
    for column in numpy.ascontiguousarray(padded.reshape(-1).view("<u2").reshape(-1, _LANE // 2).T):
        lanes = table[(lanes ^ column) & 0xFFFF] ^ lanes >> 16
    # And then each block's lanes one behind the other.
    over = _over_lane()
    state = numpy.zeros(len(padded), "u4")
    for lane in numpy.ascontiguousarray(lanes.reshape(len(padded), -1).T):
        state = over[0][state & 0xFFFF] ^ over[1][state >> 16] ^ lane
    return [int(one) for one in state ^ 0xFFFFFFFF]


@functools.cache
def _table(bits: int) -> Any:
    """What so many bits make of a state of zeros."""
    import numpy

    values = numpy.arange(1 << bits, dtype="u4")
    for _ in range(bits):
        values = numpy.where(values & 1, values >> 1 ^ _POLYNOMIAL, values >> 1)
    return values.astype("u4")


@functools.cache
def _over_lane() -> Any:
    """What a lane of zeros makes of each half of a state."""
    import numpy

    halves = numpy.arange(1 << 16, dtype="u4")
    table, values = _table(16), numpy.stack([halves, halves << 16])
    for _ in range(_LANE // 2):
        values = table[values & 0xFFFF] ^ values >> 16
    return values


if __name__ == "__main__":
    sys.exit(main())
