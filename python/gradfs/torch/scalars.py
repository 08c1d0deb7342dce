"""A few numbers that all learners of a job share, by the file ``learners/<id>/all_reduce``.

All learners have to make the same calls in the same order. A call returns when all active learners have made theirs; a
learner that leaves is not waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Union

import torch

from gradfs import job
from gradfs.errors import GradfsError, Timeout, explained
from gradfs.torch import process
from gradfs.torch.patience import Patience

#: Numbers that a call may have.
MOST_NUMBERS = 64
#: Bytes of an answer: a double is at most 24 characters, and a space.
_ANSWER_BYTES = 32 * MOST_NUMBERS

_Number = Union[int, float, bool]


class ReduceOp:
    """The operations of `all_reduce`, under the names of `torch.distributed`."""

    SUM = "sum"
    AVG = "mean"
    MIN = "min"
    MAX = "max"


def mean(value: _Number) -> float:
    """The mean of the learners' values."""
    return reduce("mean", [float(value)])[0]


def any(flag: _Number) -> bool:
    """Whether the flag of any learner is true."""
    return reduce("max", [float(bool(flag))])[0] > 0


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> None:
    """Returns when all learners have come to it. Before `remote`, all ranks of this host.

    GradfsError before `remote` if ranks are on several hosts.
    """
    if process.attached() is not None:
        reduce("sum", [0.0])
    else:
        job.barrier(process.next_barrier())


def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> None:
    """Replaces each of at most 64 elements by the `op` of the learners' elements. It computes in fp64.

    Gradients go by `remote`: for more elements, or another `op`, ValueError.
    """
    name = {"avg": "mean"}.get(getattr(op, "name", str(op)).lower(), getattr(op, "name", str(op)).lower())
    if name not in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX):
        raise ValueError(f"all_reduce has sum, avg, min and max, and no {op}")
    if async_op:
        raise ValueError("all_reduce has no async_op: call it without")
    if not 0 < tensor.numel() <= MOST_NUMBERS or tensor.is_complex():
        raise ValueError(
            f"all_reduce takes 1 to {MOST_NUMBERS} real numbers, and not {tensor.numel()} of {tensor.dtype}: "
            "gradients are averaged by gradfs.torch.remote"
        )
    numbers = tensor.detach().to("cpu", torch.float64).flatten().tolist()
    with torch.no_grad():
        tensor.copy_(torch.tensor(reduce(name, numbers), dtype=torch.float64).view(tensor.shape))


def broadcast(tensor: torch.Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> None:
    """Gives all learners the at most 64 elements of the rank `src`."""
    if process.get_rank() != src:
        with torch.no_grad():
            tensor.zero_()
    all_reduce(tensor, async_op=async_op)


def reduce(op: str, numbers: Iterable[float], opened: Callable[[Path], int] | None = None) -> list[float]:
    """`op` (sum, mean, min, max) of each number, over the learners.

    Refused if others have made another call. Timeout after ``control/patience`` and ``control/timeout``, unless the job
    waits for a learner that says that it works.
    `opened` stands for the open of the file, for tests.
    """
    values = [float(number) for number in numbers]
    learner = process.learner()
    if process.get_world_size() == 1:
        return values
    model = learner.parent.parent
    path = learner / "all_reduce"
    line = f"{op} {' '.join(map(repr, values))}\n".encode()
    life = process.life()
    with explained(f"all_reduce by {learner.name}", str(model), str(learner), life=life):
        try:
            file = opened(path) if opened else os.open(path, os.O_RDWR)
        except FileNotFoundError:
            if learner.is_dir():
                raise GradfsError(f"this gradfs has no {path}: a newer one adds up numbers of learners") from None
            raise
        try:
            if life is not None:
                life.check("all_reduce", file)
            answer = _answer(file, line, model)
        finally:
            os.close(file)
    return [float(word) for word in answer.split()]


def _answer(file: int, line: bytes, model: Path) -> bytes:
    """Gives the line, and waits for the others. It gives it again while one of them evaluates or saves.

    What was given in vain does not count.
    """
    patience = Patience(model)
    while True:
        try:
            os.write(file, line)
            return os.pread(file, _ANSWER_BYTES, 0)
        except TimeoutError as error:
            if not patience.goes_on():
                raise Timeout(f"others have not made the same call: {error}", error.errno) from error
