"""Types of the package: it says that it is typed, and users' checkers believe it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "gradfs"
#: Seconds after which a checker hangs.
HANGS = 300


def _ran(module: str, *arguments: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: scripts/setup run torch")
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_is_typed(tmp_path: Path) -> None:
    assert (PACKAGE / "py.typed").exists()
    _ran("mypy", "--strict", "--cache-dir", str(tmp_path), "gradfs")


def test_the_package_has_no_lints() -> None:
    _ran("ruff", "check", "--no-cache", "gradfs", "tests")
    _ran("ruff", "format", "--no-cache", "--check", "gradfs")
