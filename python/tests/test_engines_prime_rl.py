"""prime-rl's side of a directory of broadcasts, as in its release 0.8.0: `find_latest` is `get_latest_ckpt_step`, and
`taken` what its orchestrator and its worker of vLLM do with a step."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy
import pytest

import gradfs
from gradfs.engines import prime_rl

SIZE = 1000
# A worker is a process of its own, which reads the checkpoint's files by the path of the directory.
WORKER = """
import glob, sys
from safetensors import safe_open
[file] = glob.glob(sys.argv[1] + "/*.safetensors")
with safe_open(file, "np") as tensors:
    print({name: tensors.get_tensor(name).mean().item() for name in tensors.keys()})
"""


@pytest.fixture
def model(start, tmp_path):
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "config.json").write_text("{}")
    options = ("--reducer", "assign", "--with-files", tmp_path / "beside")
    return gradfs.open(start({"w": numpy.zeros(SIZE, "f4")}, *options))


def published(model, value, **meta):
    return model.publish({"w": numpy.full(SIZE, value, "f4")}, meta=meta)


def find_latest(broadcasts):
    steps = sorted(int(step.name.split("_")[-1]) for step in broadcasts.glob("step_*"))
    return next((step for step in reversed(steps) if (broadcasts / f"step_{step}" / "STABLE").exists()), None)


def taken(broadcasts, number):
    step = broadcasts / f"step_{number}"
    (step / "NCCL_READY").touch()
    done = subprocess.run([sys.executable, "-c", WORKER, step.as_posix()], check=True, capture_output=True, timeout=120)
    return done.stdout.decode().strip()


@contextmanager
def offered(model, broadcasts, **options):
    """A thread that offers, and a function that waits for a step as the orchestrator does, which polls."""
    stop, ended, errors = threading.Event(), threading.Event(), []

    def run():
        try:
            prime_rl.offer(model.path, broadcasts, stop=stop, **options)
        except gradfs.GradfsError as error:
            errors.append(error)
        finally:
            ended.set()

    def awaited(number):
        deadline = time.monotonic() + 60
        while find_latest(broadcasts) != number and not ended.wait(0.01):
            assert time.monotonic() < deadline
        if errors:
            raise errors[0]
        return taken(broadcasts, number)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield awaited
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def test_versions_are_steps_of_prime_rls_broadcasts(model, tmp_path):
    broadcasts = tmp_path / "run_default" / "broadcasts"
    with offered(model, broadcasts) as awaited:
        assert awaited(0) == "{'w': 0.0}"
        assert sorted(os.listdir(broadcasts / "step_0")) == ["NCCL_READY", "STABLE", "config.json", "model.safetensors"]
        for value in (1, 2, 3):
            published(model, value)
            assert awaited(value) == f"{{'w': {value}.0}}"
        # The one before is still there, for it may be being loaded, and no other one.
        assert sorted(os.listdir(broadcasts)) == ["step_2", "step_3"]
        assert taken(broadcasts, 2) == "{'w': 2.0}"
        assert model.version == 3 and os.listdir(f"{model.path}/versions") == ["3"]
    assert os.listdir(broadcasts) == []


def test_a_step_of_prime_rl_has_the_number_that_the_publisher_says(model, tmp_path):
    with offered(model, tmp_path / "b", keep=1) as awaited:
        awaited(0)
        published(model, 1, step="40")
        assert awaited(40) == "{'w': 1.0}" and os.listdir(tmp_path / "b") == ["step_40"]
        # As of a model that was restored.
        published(model, 2, step="20")
        assert awaited(20) == "{'w': 2.0}" and os.listdir(tmp_path / "b") == ["step_20"]
        published(model, 3, step="last")
        with pytest.raises(gradfs.Refused, match="version 3: its step is 'last', which is no number"):
            awaited(3)
    assert os.listdir(tmp_path / "b") == []


def test_steps_of_prime_rl_that_are_others_stay(model, tmp_path):
    (tmp_path / "b" / "step_7").mkdir(parents=True)
    (tmp_path / "b" / "step_7" / "STABLE").touch()
    # One whose program was killed.
    (tmp_path / "b" / "step_7" / "model.safetensors").symlink_to("/proc/1/fd/99/hf/model.safetensors")
    with offered(model, tmp_path / "b") as awaited:
        assert awaited(0) == "{'w': 0.0}" and os.listdir(tmp_path / "b") == ["step_0"]
    (tmp_path / "b" / "step_8").mkdir()
    (tmp_path / "b" / "step_8" / "STABLE").touch()
    (tmp_path / "b" / "step_8" / "model.safetensors").write_text("weights")
    with pytest.raises(gradfs.GradfsError, match="step_8 has files that are no links") as error:
        prime_rl.offer(model.path, tmp_path / "b")
    assert error.value.errno == errno.EEXIST and sorted(os.listdir(tmp_path / "b" / "step_8")) == [
        "STABLE",
        "model.safetensors",
    ]
    with pytest.raises(gradfs.Refused, match="keep is 0"):
        prime_rl.offer(model.path, tmp_path / "b", keep=0)
