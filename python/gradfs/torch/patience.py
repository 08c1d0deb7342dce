"""How long a rank waits for others, and how it tells them that it works."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from gradfs.errors import explained
from gradfs.torch import process

#: A rank that works alone says so this many times as often as it must.
_SIGNS = 4
#: Seconds after which it looks whether the patience is another one.
_LONGEST = 30.0


class Patience:
    """Whether a wait that has timed out is repeated.

    It is while the job waits for learners, each of which it drops when that one is silent for ``control/patience``.
    Otherwise it is for as long as that after the first timeout, and, `for_versions`, after the last version. With patience
    0, it always is.
    """

    def __init__(self, model: Path, for_versions: bool = False) -> None:
        self._model, self._for_versions = model, for_versions
        self._seen: object = None
        self._deadline = 0.0

    def goes_on(self) -> bool:
        """Whether to wait again. To be asked after each timeout."""
        now, status = time.monotonic(), json.loads((self._model / "status.json").read_text())
        patience = seconds(self._model)
        seen = status["version"] if self._for_versions else True
        if seen != self._seen or status["waits_for_learners"] or status["waits_for_more_learners"]:
            self._seen, self._deadline = seen, now + patience
        return now <= self._deadline or not patience


def seconds(model: Path) -> float:
    """``control/patience``."""
    return float((model / "control" / "patience").read_text())


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """While its block runs, this rank works alone, as in an evaluation. The others wait for it, however long it takes.

    Without it, they go on without a rank that is silent for ``control/patience``. GradfsError before `remote`.
    """
    learner = process.learner()
    model = learner.parent.parent
    with explained(f"busy of {learner.name}", str(model), str(learner)):
        os.utime(learner)
        period = _period(model)
    over = threading.Event()

    def tell() -> None:
        wait = period
        while not over.wait(wait):
            # Who has left hears of it at the next step.
            with contextlib.suppress(OSError):
                os.utime(learner)
                wait = _period(model)

    teller = threading.Thread(target=tell, name="gradfs-busy", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _period(model: Path) -> float:
    """Seconds between two signs of life. With patience 0 others wait for ever."""
    return min(seconds(model) / _SIGNS or _LONGEST, _LONGEST)
