"""The settings of a job, as a mapping of the files in `control/`."""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from .errors import Worded, explained
from .places import Place

# Rules and patterns, one a line. Only these may be empty.
_LISTS = ("frozen", "tensors")
# Letters of the names of settings that an error has.
_MOST_SAID = 200


class Control(MutableMapping[str, Any]):
    """Settings by name. Values read back as text; numbers, bools and lists of lines are written as the files want them.

    A setting counts from the next version of which nothing has been computed yet. A wrong value raises Refused and
    changes nothing. There is no setting to delete.
    """

    def __init__(self, place: Place, model: str) -> None:
        self._place, self._model = place, model

    def __getitem__(self, name: str) -> str:
        with explained(f"control/{name}", self._model, words=False):
            try:
                return self._place.read(self._path(name)).rstrip("\n")
            except OSError as error:
                raise self._missing(name, error) from None

    def __setitem__(self, name: str, value: Any) -> None:
        text = _text(value)
        with explained(f"control/{name} = {text!r}", self._model, words=False):
            try:
                self._place.write(self._path(name), f"{text}\n" if text or name not in _LISTS else "")
            except OSError as error:
                if error.errno == errno.EINVAL and not isinstance(error, Worded):
                    error = Worded(errno.EINVAL, f"{error.strerror}: {self._reason(name)}")
                raise self._missing(name, error) from None

    def __delitem__(self, name: str) -> None:
        raise TypeError("a setting cannot be deleted: write another value")

    def __iter__(self) -> Iterator[str]:
        with explained("control", self._model, words=False):
            return iter(sorted(self._place.names(os.path.join(self._model, "control"))))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"<Control of {self._model}>"

    def update(self, *others: Any, **settings: Any) -> None:
        """Writes all settings as one change, in any order. If one is wrong, Refused says why, and none is changed."""
        for other in others:
            settings = {**dict(other), **settings}
        known = set(self)
        for name in settings:
            if name not in known:
                raise self._unknown(name)
        text = json.dumps({name: _text(value) for name, value in settings.items()}, ensure_ascii=False)
        with explained(f"settings.json of {', '.join(settings)}"[:_MOST_SAID], self._model):
            self._place.write(os.path.join(self._model, "settings.json"), f"{text}\n")

    def _path(self, name: str) -> str:
        if "/" in name or name.startswith("."):
            raise self._unknown(name)
        return os.path.join(self._model, "control", name)

    def _reason(self, name: str) -> str:
        """Why a value was refused. Other calls on the model have their reasons in the same file."""
        with contextlib.suppress(OSError):
            words = self._place.read(os.path.join(self._model, "error")).strip()
            if words.startswith(f"control/{name}:"):
                return words
        return "the log of the mount says why"

    def _missing(self, name: str, error: OSError) -> BaseException:
        return self._unknown(name) if error.errno == errno.ENOENT and list(self) else error

    def _unknown(self, name: str) -> BaseException:
        near = difflib.get_close_matches(name, list(self), 1)
        return KeyError(f"there is no setting {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")


def _text(value: Any) -> str:
    """A value as its file wants it."""
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return "\n".join(map(str, value))
    return str(value).rstrip("\n")
