"""What a torch optimizer and its module say about a job: its settings, in the words of ``control/``.

`read` turns the optimizer's class, its parameter groups and the module's tensors into `control/` text. Everything that
would change the result, and for which gradfs has no setting, is refused by name.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from fnmatch import translate
from typing import Any

import torch

#: Bytes that ``control/tensors`` takes.
MOST_RULE_BYTES = 65536
#: Reducers by optimizer class. SGD is `sgd`, `momentum` or `nesterov`, by its groups.
_REDUCERS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
    torch.optim.RMSprop: "rmsprop",
    torch.optim.Adagrad: "adagrad",
}
#: Options that change the result, with the value at which they change nothing.
_REFUSED: dict[str, object] = {
    "maximize": False,
    "amsgrad": False,
    "centered": False,
    "lr_decay": 0,
    "initial_accumulator_value": 0,
}
#: Options that choose how torch computes, and not what.
_WITHOUT_MEANING = {"params", "lr", "weight_decay", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
_NUMBERS = {"learning_rate", "momentum", "dampening", "beta1", "beta2", "alpha", "epsilon", "weight_decay", "clip_norm"}


def single(number: object) -> float:
    """The number as the job keeps it: rounded to fp32."""
    return float(struct.unpack("f", struct.pack("f", float(number)))[0])  # type: ignore[arg-type]


def reducer_of(optimizer: torch.optim.Optimizer) -> str:
    """The reducer of an optimizer. TypeError names the classes that there are."""
    name = _REDUCERS.get(type(optimizer))
    if name is None:
        known = ", ".join(c.__name__ for c in _REDUCERS)
        raise TypeError(f"gradfs has no reducer for {type(optimizer).__name__}; it has those of {known}")
    first = optimizer.param_groups[0]
    for group in optimizer.param_groups:
        for option, harmless in _REFUSED.items():
            if group.get(option, harmless) != harmless:
                raise ValueError(
                    f"{type(optimizer).__name__} with {option}={group[option]!r}: gradfs has no such setting"
                )
        if name == "rmsprop" and group["momentum"]:
            raise ValueError(f"RMSprop with momentum={group['momentum']!r}: gradfs has no such setting")
        for option in sorted(set(group) - _WITHOUT_MEANING):
            if option in first and group[option] != first[option]:
                raise ValueError(
                    f"parameter groups have different {option} ({first[option]!r}, {group[option]!r}): "
                    "in a job only lr and weight_decay can differ"
                )
    if name == "sgd" and first["momentum"]:
        return "nesterov" if first["nesterov"] else "momentum"
    if name == "adam" and first.get("decoupled_weight_decay"):
        return "adamw"
    return name


def numbers_of(optimizer: torch.optim.Optimizer, reducer: str) -> dict[str, float]:
    """The settings that all tensors share. A rate is that of the first group with a rate above 0."""
    group = optimizer.param_groups[0]
    numbers = {"learning_rate": reference_rate(optimizer), "weight_decay": float(group["weight_decay"])}
    if reducer in ("momentum", "nesterov"):
        numbers["momentum"], numbers["dampening"] = float(group["momentum"]), float(group["dampening"])
    if "betas" in group:
        numbers["beta1"], numbers["beta2"] = (float(beta) for beta in group["betas"])
    if "alpha" in group:
        numbers["alpha"] = float(group["alpha"])
    if "eps" in group:
        numbers["epsilon"] = float(group["eps"])
    return numbers


def reference_rate(optimizer: torch.optim.Optimizer) -> float:
    """The rate that the job's `learning_rate` has: scales of tensors are relative to it."""
    return next((float(g["lr"]) for g in optimizer.param_groups if float(g["lr"]) > 0), 0.0)


def scales_of(optimizer: torch.optim.Optimizer, before: list[float] | None = None) -> list[float]:
    """Each group's rate, relative to `reference_rate`. While all rates are 0, the scales stay as they were before."""
    reference = reference_rate(optimizer)
    groups = optimizer.param_groups
    if reference == 0:
        if before is not None and len(before) == len(groups):
            return before
        initial = [float(g.get("initial_lr", 0)) for g in groups]
        reference = next((rate for rate in initial if rate > 0), 0.0)
        return [rate / reference if reference else 1.0 for rate in initial]
    scales = [float(g["lr"]) / reference for g in groups]
    if before is not None and len(before) == len(scales):
        # Rounding of a schedule is no change: rules are long, and the job would be told at each step.
        scales = [b if abs(a - b) <= 1e-6 * max(a, b) else a for a, b in zip(scales, before)]
    return scales


def rules_of(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    averaged: Iterable[str],
    frozen: Iterable[str],
    scales: list[float],
) -> list[str]:
    """Lines for ``control/tensors``, one a tensor that differs from the model's settings, as few as patterns allow.

    `names` has the tensors of the job. ValueError if they take more than `MOST_RULE_BYTES`.
    """
    decay = float(optimizer.param_groups[0]["weight_decay"])
    words = {name: "" for name in names.values()}
    words.update((name, "frozen") for name in frozen)
    words.update((name, "reducer=average") for name in averaged)
    for group, scale in zip(optimizer.param_groups, scales):
        told = []
        if single(group["weight_decay"]) != single(decay):
            told.append(f"weight_decay={float(group['weight_decay'])!r}")
        if single(scale) != 1:
            told.append(f"learning_rate_scale={scale!r}")
        for tensor in group["params"]:
            if tensor in names and not words[names[tensor]]:
                words[names[tensor]] = " ".join(told)
    rules = []
    covered: set[str] = set()
    for name, word in words.items():
        if not word or name in covered:
            continue
        pattern, matches = _widest(name, word, words)
        covered |= matches
        rules.append(f"{pattern} {word}")
    if sum(len(rule.encode()) + 1 for rule in rules) > MOST_RULE_BYTES:
        raise ValueError(
            f"rules for single tensors take more than {MOST_RULE_BYTES} bytes: "
            "use fewer parameter groups, or leave frozen tensors out of the job"
        )
    return rules


def _widest(name: str, word: str, words: Mapping[str, str]) -> tuple[str, set[str]]:
    """A pattern that matches `name` and as many others of the same `word` as it can, and no tensor of another one."""
    escaped = re.sub(r"\s", "?", name)
    prefix, _, last = escaped.rpartition(".")
    anywhere = re.sub(r"\d+", "*", prefix)
    candidates = ["*", f"*.{last}", f"{anywhere}.{last}", f"{anywhere}.*", f"{prefix}.*", re.sub(r"\d+", "*", escaped)]
    best = (escaped, {name})
    for pattern in candidates:
        matcher = re.compile(translate(pattern.replace("[", "[[]")))
        matches = {other for other in words if matcher.match(other)}
        if name in matches and len(matches) > len(best[1]) and all(words[other] == word for other in matches):
            best = (pattern, matches)
    return best


def text_of(numbers: Mapping[str, float], rules: Iterable[str]) -> dict[str, str]:
    """Settings as the files of ``control/`` take them."""
    return {**{name: repr(value) for name, value in numbers.items()}, "tensors": "\n".join(rules)}


def same(name: str, one: str, other: str) -> bool:
    """Whether two texts of a setting mean the same to the job, which keeps numbers in fp32."""
    if name in _NUMBERS:
        try:
            return single(one) == single(other)
        except ValueError:
            return False
    if name == "tensors":
        return _parsed(one) == _parsed(other)
    return one.strip().lower() == other.strip().lower()


def _parsed(rules: str) -> list[tuple[str, frozenset[tuple[str, Any]]]]:
    parsed = []
    for line in filter(str.strip, rules.splitlines()):
        pattern, *told = line.split()
        words = [word.partition("=") for word in told]
        parsed.append((pattern, frozenset((k, v if k == "reducer" or not v else single(v)) for k, _, v in words)))
    return parsed
