"""libmodelio for C and C++: it is linked, found by pkg-config, and used without a mount."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import gradfs_binary
from patience import HANGS

SOURCES = Path(__file__).parent.parent / "libmodelio" / "c"
STRICT = ["-Wall", "-Wextra", "-Werror"]
SANITIZED = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def ran(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=HANGS, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Where it is installed: what cargo has built beside the program, linked as users get it."""
    built = max(gradfs_binary().parent.glob("deps/libmodelio-*.a"), key=lambda path: path.stat().st_mtime)
    with_rdma = b"ibv_open_device" in built.read_bytes()
    if shutil.which("pkg-config") is None:
        pytest.skip("there is no pkg-config")
    prefix = tmp_path_factory.mktemp("library")
    ran("scripts/library", "--archive", built, *(["--features", "rdma"] if with_rdma else []), prefix, cwd=SOURCES.parent.parent)
    return prefix


@pytest.fixture
def compiled(library, tmp_path):
    """Compiles a program as a user does."""
    places = {**os.environ, "PKG_CONFIG_PATH": str(library / "lib/pkgconfig")}
    flags = ran("pkg-config", "--cflags", "--libs", "modelio", env=places).split()

    def compile(source, *more):
        compiler = "g++" if source.suffix == ".cpp" else "gcc"
        program = tmp_path / source.stem
        ran(compiler, *STRICT, *more, source, "-o", program, "-pthread", *flags, f"-Wl,-rpath,{library}/lib")
        return program

    return compile


def model(cluster, shards=2, **settings):
    one = cluster(shards)
    one.create("m", size=1 << 20, reducer="sgd", learning_rate=1, **settings)
    return f"gradfs://{one.registry}/m"


def test_a_c_program_trains_without_a_mount(cluster, compiled):
    program = compiled(SOURCES / "examples/train.c", "-std=c11")
    losses = re.findall(r"loss ([0-9.]+)$", ran(program, model(cluster), 3), re.M)
    # With a rate of 1, one step is enough.
    assert [float(loss) for loss in losses] == [1, 0, 0]


def test_a_cpp_program_trains_without_a_mount(cluster, compiled):
    program = compiled(SOURCES / "examples/train.cpp", "-std=c++17")
    losses = re.findall(r"loss ([0-9.]+)$", ran(program, model(cluster), 3), re.M)
    assert [float(loss) for loss in losses] == [1, 0, 0]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_right_and_wrong_calls_are_answered_and_nothing_leaks(cluster, compiled, tmp_path, transport):
    program = compiled(SOURCES / "tests/calls.c", "-std=gnu11", *SANITIZED)
    empty = tmp_path / "empty"
    empty.touch()
    # Without a lease, who does not leave stays.
    url = model(cluster, lease=0)
    assert "as they should" in ran(program, url, empty, transport)
    assert empty.read_bytes() == np.ones(1 << 18, "f4").tobytes()
    # Its last learner has left, though it was not closed: nobody waits for it.
    trains = compiled(SOURCES / "examples/train.c", "-std=c11")
    assert "version 5" in ran(trains, url, 2)


def test_symbols_have_versions_and_nothing_else_is_exported(library):
    names = ran("nm", "-D", "--defined-only", library / "lib/libmodelio.so").split("\n")
    exported = [line.split()[-1] for line in names if line]
    assert "modelio_connect@@MODELIO_0" in exported
    assert all(name.startswith("modelio_") or name == "MODELIO_0" for name in exported)
    assert "libmodelio.so.0" in ran("readelf", "-d", library / "lib/libmodelio.so")
