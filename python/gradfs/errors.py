"""The exceptions of this package.

Each `OSError` of a mount's file becomes one of them. Its text has the words of the file `error`, and `errno` the number.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lives import Life

__all__ = ["Busy", "Closed", "GradfsError", "Left", "NotMounted", "Refused", "RolledBack", "Stopped", "Timeout"]


class GradfsError(Exception):
    """Base of all exceptions here. `errno` is the number of the failed call, or None."""

    errno: int | None

    def __init__(self, words: str, errno: int | None = None) -> None:
        super().__init__(words)
        self.errno = errno

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.errno)


class Refused(GradfsError, ValueError):
    """Content that does not fit the model: a name, shape, type or value. Nothing has changed."""


class Timeout(GradfsError, TimeoutError):
    """A wait reached its deadline. What was to be contributed was taken back, so the step may be repeated."""


class Left(GradfsError):
    """The learner is not in the job any more. Join again."""


class RolledBack(Left):
    """Blocks were lost, and the job goes on from its newest snapshot. What came after that is undone.

    It is raised once for each learner and restoration. On a mount, the learner is in the job again under its name, and
    the same objects go on. A connection without a mount has ended: open the model anew.
    """

    def __init__(self, words: str, to_version: int, restored: int, extra: Mapping[str, str]) -> None:
        super().__init__(words, errno.ENOTCONN)
        self.to_version = to_version
        """The version that the job goes on from, as it is numbered now."""
        self.restored = restored
        """How often the job was restored. Without a mount it is 0, as nobody says it there."""
        self.extra = dict(extra)
        """What the publisher has said of the version: its `meta`."""

    @property
    def to_step(self) -> int | None:
        """The `step` that the publisher has said the version is of. None if it has said none."""
        step = self.extra.get("step", "")
        return int(step) if step.isdecimal() else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.to_version, self.restored, self.extra)


class NotMounted(GradfsError):
    """The path is no model, or its daemon has ended."""


class Busy(GradfsError):
    """Something else is under way that has to end first, or the name is in use."""


class Closed(GradfsError):
    """The object was closed, or belongs to the parent of this process."""


class Stopped(GradfsError):
    """The job is stopped, or has lost what it needs to go on."""


class Worded(OSError):
    """An error whose text says all there is to say."""


_KINDS: dict[int, type[GradfsError]] = {
    errno.EINVAL: Refused,
    errno.EFBIG: Refused,
    errno.EACCES: Refused,
    errno.EPERM: Refused,
    errno.ENAMETOOLONG: Refused,
    errno.ETIMEDOUT: Timeout,
    errno.EBUSY: Busy,
    errno.EAGAIN: Busy,
    errno.EEXIST: Busy,
    errno.EIO: Stopped,
    errno.ECANCELED: Stopped,
}
# What a file gives whose learner, model or daemon has gone.
GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN, errno.ECONNABORTED, errno.EHOSTUNREACH}
# The kernel or the C library gives these without asking the daemon, so that `error` says nothing of them.
_WITHOUT_WORDS = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EMFILE, errno.EBADF, errno.ECONNABORTED}


def of(error: OSError, doing: str, model: str, learner: str | None = None, words: bool = True) -> GradfsError:
    """The exception for a failed call on a file of `model`, or of the directory of one of its learners.

    `doing` begins the text. With `words`, the file `error` is read for the reason.
    """
    number = error.errno or 0
    text = error.strerror or "" if isinstance(error, Worded) else ""
    if not text and words and number not in _WITHOUT_WORDS:
        with contextlib.suppress(OSError):
            text = read(os.path.join(_speaker(learner or model), "error")).strip()
    kind = _KINDS.get(number, GradfsError)
    if number == errno.EBADF and text:
        kind = Closed
    if number in GONE:
        is_left = learner is not None and (number == errno.ENOTCONN if text else _is_there(model))
        kind = Left if is_left else NotMounted
        if not text:
            text = "the learner is no longer in the job" if kind is Left else f"no model answers at {model}"
    return kind(f"{doing}: {text or error.strerror or error}", error.errno)


def _speaker(directory: str) -> str:
    """The directory whose `error` tells of this one. A view has none: its model tells."""
    model, views = os.path.split(os.path.dirname(directory))
    is_view = views == "views" and os.path.isdir(os.path.join(model, "control"))
    return model if is_view else directory


def named(words: str, number: int) -> GradfsError:
    """The exception for an error with words of its own."""
    return _KINDS.get(number, GradfsError)(words, number)


@contextlib.contextmanager
def explained(
    doing: str, model: str, learner: str | None = None, words: bool = True, life: Life | None = None
) -> Iterator[None]:
    """Makes an `OSError` of its block one of the exceptions here: RolledBack, if the `life` is over."""
    try:
        yield
    except GradfsError:
        raise
    except OSError as error:
        restored = life.ended(error) if life is not None else None
        raise restored or of(error, doing, model, learner, words) from error


def read(path: str) -> str:
    """The text of a small file."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def _is_there(model: str) -> bool:
    try:
        read(os.path.join(model, "version"))
    except OSError:
        return False
    return True
