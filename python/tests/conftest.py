"""Models for the tests: in mounts, and without one. The binary is $GRADFS_BIN, or `gradfs` on PATH.

Tests of the files below run in both places, unless they are marked `mounted`. Without a mount, the package calls the C
library, $MODELIO_LIBRARY: these tests are its conformance, too.

def test_something(start):
    model = gradfs.open(start({"w": numpy.zeros(4, "f4")}, "--reducer", "sgd"))
"""

from __future__ import annotations

import os
import re
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


IN_BOTH = {f"test_files_{name}" for name in ("control", "follow", "learners", "memory", "pull", "push")}


def pytest_generate_tests(metafunc):
    if "start" in metafunc.fixturenames:
        both = metafunc.module.__name__ in IN_BOTH and metafunc.definition.get_closest_marker("mounted") is None
        places = ["mount", "network"] if both else ["mount"]
        metafunc.parametrize("start", places, indirect=True, ids=None if both else [""])


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The C library, as scripts/library links what cargo has built beside the program."""
    if "MODELIO_LIBRARY" not in os.environ:
        built = list(Path(binary()).parent.glob("deps/libmodelio-*.a"))
        if not built:
            pytest.skip("there is no libmodelio.a beside gradfs: cargo build -p modelio-c")
        built = max(built, key=lambda path: path.stat().st_mtime)
        rdma = ["--features", "rdma"] if b"ibv_open_device" in built.read_bytes() else []
        prefix = tmp_path_factory.mktemp("library")
        script = Path(__file__).parents[2] / "scripts" / "library"
        subprocess.run([script, "--archive", built, *rdma, prefix], check=True, timeout=HANGS, capture_output=True)
        os.environ["MODELIO_LIBRARY"] = str(prefix / "lib" / "libmodelio.so.0")
    return os.environ["MODELIO_LIBRARY"]


@pytest.fixture
def start(tmp_path, request):
    """Starts a model with these tensors, and returns its path for `gradfs.open`."""
    if getattr(request, "param", "mount") == "network":
        yield request.getfixturevalue("start_without_mount")
    else:
        yield from _mounted(tmp_path)


@pytest.fixture
def shards():
    """The shards that the test has started, in their order."""
    running = []
    yield running
    for shard in running:
        shard.terminate()
        shard.wait(HANGS)


@pytest.fixture
def start_without_mount(tmp_path, library, shards):
    """Starts a shard with a model of these tensors, and returns the model's URL."""

    def start_shards(tensors, *options):
        number = len(shards)
        source = gradfs.create_from(tensors, tmp_path / f"files{number}" / "model.safetensors")
        said = tmp_path / f"shard{number}"
        with said.open("w") as output:
            shards.append(subprocess.Popen([binary(), "shard", "--listen", "127.0.0.1:0"], stdout=output))
        found = until(lambda: re.search(r"listens on ([^ ,;]+)", said.read_text()))
        command = [binary(), "create", "model", "--registry", found[1], "--model", source, "--timeout", "30", *options]
        subprocess.run(list(map(str, command)), check=True, timeout=HANGS, capture_output=True)
        return f"gradfs://{found[1]}/model"

    return start_shards


@pytest.fixture
def mounted(start_without_mount, tmp_path):
    """Starts shards with a model, and returns its path on a mount of theirs."""
    mount = tmp_path / "mount"

    def start(tensors, *options):
        registry = start_without_mount(tensors, *options).split("/")[2]
        mount.mkdir()
        command = [binary(), "mount", "--registry", registry, "--background", "--log-file", tmp_path / "log", mount]
        subprocess.run(list(map(str, command)), check=True, timeout=HANGS, capture_output=True)
        return str(mount / "model")

    yield start
    subprocess.run([binary(), "unmount", "--lazy", str(mount)], check=False, timeout=HANGS, capture_output=True)


def _mounted(tmp_path):
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

    def run(text, *arguments, environ=None, **options):
        file = tmp_path / f"program{len(running)}.py"
        file.write_text(text)
        paths = [str(Path(gradfs.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(environ or {})}
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
