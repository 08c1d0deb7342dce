"""gradfs: a parameter server that is mounted, for Python.

    import gradfs

    model = gradfs.open("/mnt/job/model")
    with model.join() as learner:
        for batch in batches:
            with learner.pull() as weights:
                gradients = backward(weights.torch(), batch)
            learner.push(gradients)

Importing this imports no array library. `gradfs.torch` is imported when it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from .changes import Change, Changes
from .errors import (
    Busy,
    Closed,
    GradfsError,
    Left,
    NotMounted,
    Refused,
    RolledBack,
    Stopped,
    Timeout,
)
from .first_file import create_from
from .following import Follower, follow
from .layout import Layout, Tensor
from .learner import Learner, Step
from .memory import Memory
from .model import Model, open
from .weights import View, Weights

__version__ = "0.1.0"

__all__ = [
    "Busy", "Change", "Changes", "Closed", "Follower", "GradfsError", "Layout", "Learner", "Left", "Memory", "Model",
    "NotMounted", "Refused", "RolledBack", "Step", "Stopped", "Tensor", "Timeout", "View", "Weights", "create_from",
    "follow", "open", "publish",
]  # fmt: skip


def publish(
    path: str | os.PathLike[str],
    values: Mapping[str, Any] | Iterable[tuple[str, Any]],
    meta: Mapping[str, str] | None = None,
) -> int:
    """Makes whole new weights, such as a state_dict, the next version of a model. See Model.publish."""
    return open(path).publish(values, meta)


def __getattr__(name: str) -> Any:
    if name == "torch":
        import importlib

        return importlib.import_module("gradfs.torch")
    raise AttributeError(f"module 'gradfs' has no attribute {name!r}")
