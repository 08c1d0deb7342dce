"""Settings that nobody has set are torch's."""

import inspect
import re

import pytest
from conftest import REPOSITORY

torch = pytest.importorskip("torch")

# The reducers that torch has, with what torch calls their settings.
NAMES = {"lr": "learning_rate", "eps": "epsilon", **{name: name for name in ("weight_decay", "alpha", "dampening")}}
OPTIMIZERS = {
    "sgd": "SGD", "momentum": "SGD", "nesterov": "SGD", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
}  # fmt: skip
# In some releases torch's SGD has no default for it, and in later ones this.
RATE_OF_SGD = 1e-3


def of_torch(reducer):
    """The defaults of torch, by our names."""
    parameters = inspect.signature(getattr(torch.optim, OPTIMIZERS[reducer])).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    found = {ours: defaults[theirs] for theirs, ours in NAMES.items() if theirs in defaults}
    if OPTIMIZERS[reducer] == "SGD" and not isinstance(found["learning_rate"], float):
        found["learning_rate"] = RATE_OF_SGD
    if "betas" in defaults:
        found["beta1"], found["beta2"] = defaults["betas"]
    return found


def test_defaults_are_torchs(start_mount):
    """For a job that begins with a reducer, and for one whose reducer is changed."""
    changed = start_mount(size="64KiB")
    for reducer in OPTIMIZERS:
        expected = of_torch(reducer)
        assert len(expected) >= 3 and "learning_rate" in expected
        changed.control("reducer", reducer)
        for mount in (start_mount(size="64KiB", reducer=reducer), changed):
            got = {name: float(mount.control(name)) for name in expected}
            assert got == expected, reducer


def test_defaults_are_torchs__and_the_table_shows_them(start_mount):
    text = (REPOSITORY / "docs/use/settings.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text.split("## All control files")[1], re.MULTILINE)
    mounts = {}
    for name, default in rows:
        first, *own = default.split("; ")
        for reducer, value in [("sgd", first), *(one.split(": ") for one in own)]:
            if reducer not in mounts:
                mounts[reducer] = start_mount(size="64KiB", reducer=reducer)
            shown = "" if value == "empty" else value
            assert mounts[reducer].control(name) == shown, (reducer, name)
    assert len(rows) == len(list((mounts["sgd"].model / "control").iterdir()))
