"""A model of a mount."""

from __future__ import annotations

import errno
import json
import os
import select
import time
from collections.abc import Mapping
from typing import Any, final

from . import arrays, learner
from .control import Control
from .errors import NotMounted, Refused, Timeout, explained, read
from .layout import Layout
from .learner import Contributor, Learner, Step
from .memory import Memory

# Seconds that one call of poll waits. It could take 24 days.
_LONGEST_POLL = 3600.0


def open(path: str | os.PathLike[str]) -> Model:
    """Opens a model by the path of its directory, or of a mount that has one model alone.

    Raises NotMounted if there is none.
    """
    given = os.fspath(path)
    if given.startswith("gradfs://"):
        raise Refused(f"{given}: models are opened by their path in a mount; mount it first (gradfs mount)")
    given = os.path.abspath(given)
    directory = given
    with explained(given, given, words=False):
        if not os.path.exists(os.path.join(given, "layout")):
            models = [name for name in sorted(os.listdir(given)) if os.path.exists(os.path.join(given, name, "layout"))]
            if len(models) != 1:
                has = f"has the models {', '.join(models)}: name one of them" if models else "is no model of a mount"
                raise NotMounted(f"{given} {has}")
            directory = os.path.join(given, models[0])
        return Model(directory, Layout.parse(read(os.path.join(directory, "layout"))))


@final
class Model(Contributor):
    """A model: its weights, its settings, and the way to its next version.

    `pull`, `push` and `step` are those of the mount's own learner, which all programs of the mount share. Training
    takes a learner of its own: `join`.
    """

    def __init__(self, path: str, layout: Layout) -> None:
        super().__init__(path, layout)
        self._control = Control(path)

    @property
    def name(self) -> str:
        return os.path.basename(self._model)

    @property
    def control(self) -> Control:
        """The settings of the job."""
        self._check()
        return self._control

    @property
    def status(self) -> dict[str, Any]:
        """What `status.json` has: the job's state, learners, settings and more."""
        self._check()
        with self._explained("status.json"):
            status: dict[str, Any] = json.loads(read(self._file("status.json")))
        return status

    def wait(self, newer_than: int | None = None, timeout: float | None = None) -> int:
        """Waits until a version is newer than the given one, or than the newest now, and returns its number.

        Raises Timeout after as many seconds. Without `timeout` it waits for as long as it takes.
        """
        self._check()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._explained("version"):
            file = os.open(self._file("version"), os.O_RDONLY | os.O_CLOEXEC)
            try:
                poll = select.poll()
                poll.register(file, select.POLLIN)
                while True:
                    version = int(os.pread(file, 32, 0))
                    if newer_than is None:
                        newer_than = version
                    if version > newer_than:
                        return version
                    left = _LONGEST_POLL if deadline is None else deadline - time.monotonic()
                    if left <= 0:
                        raise Timeout(f"no version newer than {newer_than} within {timeout} s", errno.ETIMEDOUT)
                    poll.poll(min(left, _LONGEST_POLL) * 1000 + 1)
            finally:
                os.close(file)

    def publish(self, values: Mapping[str, Any], meta: Mapping[str, str] | None = None) -> int:
        """Makes whole new weights the next version, and returns the number of the newest version then.

        All tensors have to be given. The job takes new weights with the reducer `assign`, or at version 0.
        """
        self._check()
        if meta is not None:
            raise Refused("publish: this gradfs keeps no metadata of new weights")
        missing = [name for name in self.layout if name not in values]
        if missing:
            raise Refused(f"publish: all tensors are needed, and these are missing: {', '.join(missing)}")
        arrays.checked(self.layout, values, "publish")
        with Step(self._file("publish"), self.layout, self._model) as step:
            step.update(values)
        return self.version

    def memfd(self, version: int | None = None) -> Memory:
        """Borrows the memory of a version that is here, or of the newest: a descriptor that no daemon stands behind.

        It waits for no step. `with model.memfd() as memory:` gives it back. Raises GradfsError with ENOENT if the
        version is gone, and with ENOMEM if programs hold as many versions as they may.
        """
        self._check()
        return Memory(self._model, version)

    def join(self, name: str | None = None) -> Learner:
        """Joins the job as a learner, of a free name if none is given.

        `with model.join() as learner:` leaves the job however the block ends. Raises Busy if the name is in use.
        """
        self._check()
        return learner.join(self._model, self.layout, name)

    def learner(self, path_or_name: str | os.PathLike[str]) -> Learner:
        """A learner that somebody else has made, as `gradfs run` does for a process (`GRADFS_LEARNER`).

        Its `with` leaves nothing. Raises Left if it is not there.
        """
        self._check()
        return learner.find(self._model, self.layout, path_or_name)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {self._model}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._model,)
