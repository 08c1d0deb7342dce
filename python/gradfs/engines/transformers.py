"""transformers: modules of `from_pretrained`, and of torch in general, that take a version in place."""

from __future__ import annotations

import os
from typing import Any, Callable

from gradfs import arrays
from gradfs.changes import Changes
from gradfs.engines.pinned import pin
from gradfs.errors import Refused
from gradfs.weights import Weights


def from_pretrained(
    path: str | os.PathLike[str], auto_class: Any = None, version: int | None = None, **options: Any
) -> tuple[Any, int]:
    """Loads the newest version of a model, or the given one, and returns the module and the version's number.

    `auto_class` is `AutoModelForCausalLM` unless another one is given. `options` are for its `from_pretrained`.
    """
    if auto_class is None:
        try:
            from transformers import AutoModelForCausalLM as auto_class
        except ImportError as error:
            raise ImportError("gradfs.engines.transformers: transformers is not installed") from error
    with pin(path, version) as pinned:
        return auto_class.from_pretrained(pinned.hf, **options), pinned.version


def load(
    update: Weights | Changes, module: Any, rename: Callable[[str], str | None] | None = None
) -> int:  # fmt: skip
    """Copies a version, or what changed in it, into the parameters and buffers of a module, on any device.

    Returns the version's number. Tensors are found by their names in `state_dict()`, and `rename` gives another name, or
    None for what the module does not have. Tied weights have one of their names, or all of them with equal values.
    Raises Refused, and changes nothing, if the module has no such tensor, or one that the version lacks, or if a shape
    differs.
    """
    import torch

    there = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if torch.is_tensor(tensor)}
    names = {name: rename(name) if rename else name for name in update.layout}
    targets = {name: there.get(of) for name, of in names.items() if of is not None}
    wrong = [f"{name}: the module has no {names[name]}" for name, tensor in targets.items() if tensor is None]
    found = {name: tensor for name, tensor in targets.items() if tensor is not None}
    wrong += [
        f"{name}: the shape is {list(tensor.shape)}, and {list(update.layout[name].shape)} in the model"
        for name, tensor in found.items()
        if tuple(tensor.shape) != update.layout[name].shape
    ]
    covered = {_memory(tensor) for tensor in found.values()}
    wrong += [f"{name}: the model has no such tensor" for name, one in there.items() if _memory(one) not in covered]
    if not wrong:
        wrong += _untied(update, found)
    if wrong:
        raise Refused(f"load: {'; '.join(wrong)}")
    with torch.no_grad():
        for name, tensor in found.items():
            if isinstance(update, Weights):
                tensor.detach().copy_(update[name].torch())
            elif name in update:
                arrays.put_torch(*update[name], tensor)
    return update.version


def _memory(tensor: Any) -> tuple[Any, ...]:
    """Equal for tensors that are one."""
    return str(tensor.device), tensor.data_ptr() or id(tensor), tuple(tensor.shape), tensor.stride()


def _untied(update: Weights | Changes, found: dict[str, Any]) -> list[str]:
    """Tensors of the model that differ, but are one in the module."""
    first: dict[Any, str] = {}
    pairs = [(first.setdefault(_memory(tensor), name), name) for name, tensor in found.items()]
    return [
        f"{one} and {name} are one tensor in the module, and differ in version {update.version}"
        for one, name in pairs
        if one != name and _bytes(update, one) != _bytes(update, name) and _differ(update, found[name], one, name)
    ]


def _differ(update: Weights | Changes, tensor: Any, *names: str) -> bool:
    """Whether the tensor would have other values by the one name than by the other. Lists of changes may have elements
    that have not changed."""
    if isinstance(update, Weights):
        return True
    import torch

    made = [tensor.detach().clone() for _ in names]
    for one, name in zip(made, names):
        if name in update:
            arrays.put_torch(*update[name], one)
    bits = [one.flatten().view(torch.uint8) for one in made]
    return not torch.equal(*bits)


def _bytes(update: Weights | Changes, name: str) -> list[memoryview]:
    views = [update[name]] if isinstance(update, Weights) else update.get(name, ())
    return [view.memory for view in views]
