"""Each new version of a model, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator

from . import model
from .weights import Weights


def follow(
    path: str | os.PathLike[str], newer_than: int | None = None, timeout: float | None = None
) -> Iterator[Weights]:
    """Yields the newest version, if it is newer than the given one, and then each newer one.

    The weights stay in memory while the body of the loop runs. Versions that came meanwhile are skipped but for the
    newest. Raises Timeout if none comes within as many seconds.
    """
    of = model.open(path)
    seen = -1 if newer_than is None else newer_than
    while True:
        of.wait(newer_than=seen, timeout=timeout)
        with of.pull() as weights:
            seen = weights.version
            yield weights
