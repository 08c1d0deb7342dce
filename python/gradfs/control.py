"""The settings of a job, as a mapping of the files in `control/`."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from .errors import GradfsError, Refused, explained
from .places import Place

# Rules and patterns, one a line. Only these may be empty.
_LISTS = ("frozen", "tensors")


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
        with explained(f"control/{name} = {text!r} (the log of the mount says why)", self._model, words=False):
            try:
                self._place.write(self._path(name), f"{text}\n" if text or name not in _LISTS else "")
            except OSError as error:
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
        """Writes all settings, or raises Refused that says which one failed, with the others as they were.

        `reducer` goes first, as it brings its defaults. Settings that depend on each other may come in any order.
        Values that are in force already are not written again. A reducer that is set back has lost its optimizer's state.
        """
        for other in others:
            settings = {**dict(other), **settings}
        before = {name: self[name] for name in settings}
        left = sorted(settings, key=lambda name: name != "reducer")
        while left:
            failures: dict[str, Refused] = {}
            for name in left:
                try:
                    if not _is_equal(self[name], _text(settings[name])):
                        self[name] = settings[name]
                except Refused as error:
                    failures[name] = error
                except BaseException:
                    self._restore(before)
                    raise
            if len(failures) == len(left):
                self._restore(before)
                raise Refused("; ".join(map(str, failures.values())), failures[left[0]].errno) from failures[left[0]]
            left = list(failures)

    def _restore(self, before: Mapping[str, str]) -> None:
        """Sets what it was before an update that has failed. Each pass may allow what the one before could not set."""
        for _ in before:
            for name, text in sorted(before.items(), key=lambda pair: pair[0] != "reducer"):
                with contextlib.suppress(GradfsError):
                    if self[name] != text:
                        self[name] = text

    def _path(self, name: str) -> str:
        if "/" in name or name.startswith("."):
            raise self._unknown(name)
        return os.path.join(self._model, "control", name)

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


def _is_equal(text: str, other: str) -> bool:
    """Whether two texts are one value. Numbers are kept in fp32, and may be written in several ways."""
    if text == other:
        return True
    try:
        return struct.pack("f", float(text)) == struct.pack("f", float(other))
    except (ValueError, OverflowError):
        return False
