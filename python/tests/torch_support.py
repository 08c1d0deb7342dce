"""What the tests of gradfs.torch and of the launcher share."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ddp"
#: Seconds after which a program hangs. Nothing here takes a tenth of it on an idle machine.
HANGS = 300
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def needs_a_mount() -> pytest.MarkDecorator:
    """Skips tests of real mounts where there is no FUSE or no program."""
    from gradfs import job
    from gradfs.errors import GradfsError

    try:
        job.binary()
    except GradfsError as error:
        return pytest.mark.skip(reason=str(error))
    return pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="there is no /dev/fuse")


def environment(**more: str) -> dict[str, str]:
    """The environment of a program: without what a launcher of these tests may have set."""
    environ = {k: v for k, v in os.environ.items() if k not in _LAUNCHERS and not k.startswith("SLURM_")}
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), environ.get("PYTHONPATH", "")])
    return {**environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def written(to: Path, code: str) -> Path:
    """A program of the code, which begins with what all of them import."""
    begin = """
        import os, signal, sys, time
        import torch
        import gradfs.torch as dist
        from gradfs.torch import DistributedDataParallel as DDP
        torch.set_num_threads(1)
        torch.manual_seed(0)
    """
    to.write_text(textwrap.dedent(begin) + textwrap.dedent(code))
    return to


def launch(n: int, program: Path, *arguments: str, options: tuple[str, ...] = (), **environ: str) -> Any:
    """Runs `python -m gradfs.launch`, in the program's directory."""
    command = [sys.executable, "-m", "gradfs.launch", "-n", str(n), *options, str(program), *arguments]
    return run(command, program.parent, **environ)


def torchrun(n: int, program: Path, *arguments: str, **environ: str) -> Any:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    return run([*command, str(program), *arguments], program.parent, **environ)


def run(command: list[str], at: Path, **environ: str) -> Any:
    done = subprocess.run(
        command, cwd=at, env=environment(**environ), capture_output=True, text=True, timeout=HANGS, check=False
    )
    print(done.stdout, done.stderr, sep="\n")
    return done


def succeeded(done: Any) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@contextmanager
def alone(monkeypatch: pytest.MonkeyPatch | None = None) -> Iterator[Any]:
    """gradfs.torch in this process, as rank 0 of 1. The job ends with the block."""
    import gradfs.torch as dist

    before = {name: os.environ.pop(name) for name in _LAUNCHERS if name in os.environ}
    dist.init_process_group("gloo")
    try:
        yield dist
    finally:
        dist.destroy_process_group()
        os.environ.update(before)


def changed_lines(one: Path, other: Path) -> int:
    """Lines of one file that differ in the other: changed, added or removed."""
    matcher = difflib.SequenceMatcher(
        None, one.read_text().splitlines(), other.read_text().splitlines(), autojunk=False
    )
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def mounts() -> set[str]:
    """The mount points of gradfs on this machine."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return {line.split()[1] for line in lines if line.split()[2] == "fuse.gradfs"}
