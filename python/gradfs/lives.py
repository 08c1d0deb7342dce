"""The life of a model that an object knows. A job that is restored from its newest snapshot begins another one."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable

from .errors import GONE, RolledBack, Worded
from .places import Place

# How the C library's words begin, for a connection whose job was restored.
_RESTORED = "the job was restored"
# Seconds for which an inode's number cannot be that of another life. A mount uses numbers again after 2 s.
_SURE = 1.0


class Life:
    """What an object knows of its model's life, so that it hears of each restoration once.

    `heard` is called before it does: it opens anew what is open of the life before. Who hears as a learner has heard as
    the model `of` which it is one, too.
    """

    def __init__(self, place: Place, model: str, of: Life | None = None) -> None:
        self._place, self._model, self._of = place, model, of
        about = place.about(model)
        self.epoch = about.epoch if about else None
        self._inodes: dict[str, int] = {}
        self._looked = 0.0
        self._heard: Callable[[], Callable[[], None] | None] = lambda: None

    def tell(self, heard: Callable[[], None]) -> None:
        """Calls a method, whose object is not kept alive by this."""
        self._heard = weakref.WeakMethod(heard)

    def check(self, name: str, file: int) -> None:
        """Raises RolledBack if a file that was opened just now is of another life. It costs a call of fstat."""
        inode = os.fstat(file).st_ino
        now = time.monotonic()
        if self._inodes.get(name) != inode or now - self._looked > _SURE:
            self.look()
            self._inodes[name] = inode
        self._looked = now

    def look(self) -> None:
        """Raises RolledBack if the model was restored since this object has heard of it."""
        if (restored := self._restored()) is not None:
            raise restored

    def is_over(self) -> bool:
        """Whether another one has begun, of which this object has not heard."""
        about = self._place.about(self._model)
        return about is not None and about.epoch != self.epoch

    def ended(self, error: OSError) -> RolledBack | None:
        """What an error means, if it is that of a life that is over."""
        if error.errno not in GONE:
            return None
        if isinstance(error, Worded):
            # A connection belongs to one life, and stays there.
            return self._said() if str(error.strerror).startswith(_RESTORED) else None
        return self._restored()

    def _restored(self) -> RolledBack | None:
        about, before = self._place.about(self._model), self.epoch
        if about is None or about.epoch == before:
            return None
        said = self._said()
        self.epoch = about.epoch
        if before is None or not said.restored:
            # It is seen for the first time, or somebody has made another model.
            return None
        self._inodes.clear()
        try:
            if (heard := self._heard()) is not None:
                heard()
        except BaseException:
            self.epoch = before
            raise
        if self._of is not None:
            self._of.epoch = self.epoch
        return said

    def _said(self) -> RolledBack:
        (version, _, meta), restored = self._place.restoration(self._model)
        words = (
            f"{self._model}: the job was restored, and goes on from version {version}: what came after its newest "
            "snapshot is undone. Pull weights anew, and go back to the step that they are of"
        )
        return RolledBack(words, version, restored, meta)
