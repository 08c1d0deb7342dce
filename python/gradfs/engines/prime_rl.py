"""prime-rl: versions as steps of a directory of weight broadcasts, in the layout of its 0.8.0."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from pathlib import Path
from typing import Any, final

from gradfs.engines.pinned import Pinned
from gradfs.errors import GradfsError, Refused
from gradfs.following import Follower
from gradfs.model import Model

# It comes last and goes first. prime-rl looks at no step without it.
_STABLE = "STABLE"
# What prime-rl puts into a step itself.
_MARKERS = (_STABLE, "NCCL_READY")


def offer(
    path: str | os.PathLike[str], broadcasts: str | os.PathLike[str], *, keep: int = 2, **options: Any
) -> int | None:
    """Offers each newest version as a step of the directory `broadcasts`, until it is stopped. Returns the last one.

    The directory `step_<n>` has links to the files of the version's Hugging Face checkpoint. `n` is the `step` in its
    meta, else the version's number. The newest `keep` steps stay, and so do their versions; in the end all of them go.
    The options are those of `gradfs.follow`, without `changes`.
    """
    if keep < 1:
        raise Refused(f"offer: keep is {keep}, and at least 1", errno.EINVAL)
    steps = _Steps(Path(broadcasts), keep)
    try:
        return Follower(path, lambda _, version: steps.add(version), take=_Version, **options).run()
    finally:
        steps.leave(0)


@final
class _Version:
    """A version that stays while it is a step."""

    def __init__(self, of: Model) -> None:
        self.pinned, self.is_step = Pinned(of), False
        self.version = self.pinned.version

    def close(self) -> None:
        if not self.is_step:
            self.pinned.close()

    def step(self) -> int:
        with open(f"{self.pinned.path}/meta.json", encoding="utf-8") as file:
            said = json.load(file).get("step", str(self.version))
        if not re.fullmatch("[0-9]{1,18}", said):
            raise Refused(f"version {self.version}: its step is {said!r}, which is no number", errno.EINVAL)
        return int(said)


@final
class _Steps:
    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep
        self._versions: dict[int, _Version] = {}
        directory.mkdir(parents=True, exist_ok=True)
        # Links of a program that has ended lead nowhere, and prime-rl takes the highest step.
        for left in directory.glob("step_*"):
            _remove(left)

    def add(self, version: _Version) -> None:
        number, files = version.step(), version.pinned.hf
        # Of a model that was restored, the later steps do not count.
        for later in [one for one in self._versions if one >= number]:
            self._end(later)
        step = self._directory / f"step_{number}"
        _remove(step)
        step.mkdir()
        self._versions[number], version.is_step = version, True
        for name in os.listdir(files):
            (step / name).symlink_to(f"{files}/{name}")
        (step / _STABLE).touch()
        self.leave(self._keep)

    def leave(self, keep: int) -> None:
        """Removes all steps but the newest."""
        for number in sorted(self._versions)[: max(0, len(self._versions) - keep)]:
            self._end(number)

    def _end(self, number: int) -> None:
        version = self._versions.pop(number)
        try:
            _remove(self._directory / f"step_{number}")
        finally:
            version.is_step = False
            version.close()


def _remove(step: Path) -> None:
    """Removes links and markers, the one that counts first. Raises GradfsError if there is anything else."""
    with contextlib.suppress(FileNotFoundError):
        own = [one for one in step.iterdir() if one.is_symlink() or one.name in _MARKERS]
        if len(own) < sum(1 for _ in step.iterdir()):
            raise GradfsError(f"{step} has files that are no links to a version", errno.EEXIST)
        for one in sorted(own, key=lambda one: one.name != _STABLE):
            one.unlink()
        step.rmdir()
