"""A version's directory that stays, for programs that load weights by a path."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import weakref
from typing import final

from gradfs import model
from gradfs.errors import Closed, GradfsError, Refused, explained
from gradfs.model import Model

# How often the newest version may be passed by the next one before it is opened.
_TRIES = 100


def pin(path: str | os.PathLike[str], version: int | None = None) -> Pinned:
    """Holds a version of a mounted model that is here, or the newest one, until `close()`.

    Raises GradfsError with ENOENT if the version is not here.
    """
    return Pinned(model.open(path), version)


@final
class Pinned:
    """One version, held in memory. Its files are in `path`, for all processes of this user on this host."""

    def __init__(self, of: Model, version: int | None = None) -> None:
        if "://" in of.path:
            raise Refused(f"{of.path}: paths to versions take a mount", errno.EINVAL)
        self.model = of.path
        self._file = _opened(of, version)
        self._end = weakref.finalize(self, os.close, self._file)
        with explained("version", of.path):
            about = json.loads(os.getxattr(f"/proc/self/fd/{self._file}/weights", "user.gradfs.about"))
        self.version: int = about["version"]
        """The number of the version."""

    @property
    def path(self) -> str:
        """The directory, which leads to this version as long as it is held."""
        if not self._end.alive:
            raise Closed(f"version {self.version} was let go of")
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def hf(self) -> str:
        """The Hugging Face checkpoint in it."""
        return f"{self.path}/hf"

    def close(self) -> None:
        """Lets go of the version."""
        self._end()

    def __enter__(self) -> Pinned:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


def _opened(of: Model, version: int | None) -> int:
    for _ in range(_TRIES):
        newest = of.version if version is None else version
        with contextlib.suppress(FileNotFoundError):
            return os.open(os.path.join(of.path, "versions", str(newest)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if version is not None:
            break
    raise GradfsError(f"{of.path}: version {newest} is not here (control/retain keeps older ones)", errno.ENOENT)
