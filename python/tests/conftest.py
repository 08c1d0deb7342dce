"""Mounts for the tests. The binary is $GRADFS_BIN, or `gradfs` on PATH.

def test_something(start):
    model = gradfs.open(start({"w": numpy.zeros(4, "f4")}, "--reducer", "sgd"))
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gradfs

# A program or a condition that takes longer than this hangs. No promise is measured by it.
HANGS = 120.0


def binary():
    found = os.environ.get("GRADFS_BIN") or shutil.which("gradfs")
    if found is None:
        pytest.skip("there is no gradfs: set GRADFS_BIN")
    return found


@pytest.fixture
def start(tmp_path):
    """Starts a mount of a model with these tensors, and returns the path of the model."""
    mounts = []

    def start_mount(tensors, *options, snapshot=False):
        number = len(mounts)
        file = tmp_path / f"files{number}" / "model.safetensors"
        if isinstance(tensors, (str, Path)):
            source = tensors
        else:
            source = gradfs.create_from(tensors, file)
        mount = tmp_path / f"mount{number}"
        mount.mkdir()
        log = tmp_path / f"log{number}"
        command = [binary(), "up", "--background", "--log-file", log, "--timeout", "30", *options]
        command += ["--from", source, mount] if snapshot else ["--name", "model", source, mount]
        subprocess.run(list(map(str, command)), check=True, timeout=HANGS, capture_output=True)
        mounts.append(mount)
        return str(mount / "model")

    yield start_mount
    for mount in mounts:
        subprocess.run([binary(), "unmount", "--lazy", str(mount)], check=False, timeout=HANGS, capture_output=True)


@pytest.fixture
def program(tmp_path):
    """Runs a Python program with gradfs, and returns its process. It is killed at the end, if it still runs."""
    running = []

    def run(text, *arguments, **options):
        file = tmp_path / f"program{len(running)}.py"
        file.write_text(text)
        paths = [str(Path(gradfs.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        process = subprocess.Popen(
            [sys.executable, str(file), *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        running.append(process)
        return process

    yield run
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until(condition):
    """Waits until the condition holds."""
    deadline = time.monotonic() + HANGS
    while not (result := condition()):
        assert time.monotonic() < deadline, "this takes too long"
        time.sleep(0.01)
    return result
