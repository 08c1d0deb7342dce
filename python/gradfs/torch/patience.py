"""How long a rank waits for others, and how it tells them that it works."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from gradfs.torch import process

#: A rank that works alone says so this many times as often as it must.
_SIGNS = 4


class Patience:
    """Whether a wait that has timed out is repeated.

    It is while the job waits for a learner, which it drops when that one is silent for ``control/patience``. Otherwise it
    is for as long as that after the last version.
    """

    def __init__(self, model: Path) -> None:
        self._model, self._version, self._deadline = model, -1, 0.0

    def goes_on(self) -> bool:
        """Whether to wait again. To be asked after each timeout."""
        now, status = time.monotonic(), json.loads((self._model / "status.json").read_text())
        if status["version"] != self._version or status["waits_for_learners"]:
            self._version, self._deadline = status["version"], now + seconds(self._model)
        return now <= self._deadline


def seconds(model: Path) -> float:
    """``control/patience``."""
    return float((model / "control" / "patience").read_text())


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """While its block runs, this rank works alone, as in an evaluation. The others wait for it, however long it takes.

    Without it, they go on without a rank that is silent for ``control/patience``. GradfsError before `remote`.
    """
    learner = process.learner()
    period = seconds(learner.parent.parent) / _SIGNS
    over = threading.Event()

    def tell() -> None:
        # Who has left hears of it at the next step.
        with contextlib.suppress(OSError):
            while not over.wait(period):
                os.utime(learner)

    # With patience 0 others wait for ever.
    teller = threading.Thread(target=tell, name="gradfs-busy", daemon=True) if period else None
    if teller is not None:
        os.utime(learner)
        teller.start()
    try:
        yield
    finally:
        over.set()
        if teller is not None:
            teller.join()
