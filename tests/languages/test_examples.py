"""The examples train to the weights that one process without the mount comes to; --check holds them to it.

scripts/quickstart runs the NumPy example with two learners; here are the other cases.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from patience import HANGS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE = HANGS


@pytest.fixture
def digits(start_mount, tmp_path):
    """Directory of the untrained model in a mount."""
    pytest.importorskip("sklearn")
    file = tmp_path / "digits.safetensors"
    example("make_digits_model.py", str(file))
    return start_mount(model=file).model


def example(script, *arguments, status=0):
    __tracebackhide__ = True
    command = [sys.executable, EXAMPLES / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if done.returncode != status:
        pytest.fail(f"{script} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


@pytest.mark.parametrize("flags", [[], ["--mmap"]], ids=["write", "mmap"])
def test_three_learners_in_numpy(digits, flags):
    out = example("train_digits.py", digits, "--learners", "3", "--batch", "96", "--epochs", "10", "--check", *flags)
    assert "check passed" in out


def test_two_learners_in_torch(digits):
    pytest.importorskip("torch")
    pytest.importorskip("safetensors.torch")
    assert "check passed" in example("train_torch.py", digits, "--epochs", "5", "--check")


def test_running_statistics_of_batch_norm_are_averaged(start_mount, tmp_path):
    """A network with BatchNorm learns in its learners as it does in one process, and is as good when it is evaluated."""
    for module in ("sklearn", "torch", "safetensors.torch"):
        pytest.importorskip(module)
    file = tmp_path / "digits.safetensors"
    example("make_digits_model.py", file, "--convolutional")
    model = start_mount(model=file).model
    assert "check passed" in example("train_torch.py", model, "--epochs", "5", "--check")
    assert (model / "control" / "tensors").read_text() == "*.running_* reducer=average\n"
    for name in ("norm1.running_mean", "norm2.running_mean"):
        assert np.load(model / "tensors" / f"{name}.npy").any(), name


def test_the_check_can_fail(digits):
    out = example("train_digits.py", digits, "--epochs", "1", "--check", status=1)
    assert "check FAILED: the accuracy is" in out


def test_a_wrong_directory_is_named(tmp_path):
    pytest.importorskip("sklearn")
    out = example("train_digits.py", tmp_path / "nothing", status=2)
    assert "is not a model in a gradfs mount" in out
