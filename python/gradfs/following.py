"""Each new version of a model, one after the other."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, Callable, Union, final, overload

from . import changes, model
from .changes import Changes
from .errors import GradfsError, Refused, RolledBack, Timeout, explained
from .layout import Layout
from .model import Model
from .weights import Weights

Update = Union[Weights, Changes]
# Seconds after which a wait looks whether it is to stop.
_SLICE = 0.25
# Seconds in which a thread that is told to stop should have ended.
_PATIENCE = 60.0


@final
class Follower:
    """Gives the newest version of a model to `apply(version, tensors)`, again for each newer one.

    `run()` does so in this thread, and `poll()` once. `with Follower(…) as follower:` does so in a thread of its own,
    until the block ends. `gradfs.follow` explains the arguments. `take` is for engines that need something else than
    tensors: it gets the model, and gives what `apply` is called with.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        apply: Callable[[int, Any], object],
        *,
        newer_than: int | None = None,
        timeout: float | None = None,
        stop: threading.Event | None = None,
        changes: bool = False,
        reader: str | None = None,
        on_error: Callable[[int, Exception], object] | None = None,
        take: Callable[[Model], Any] | None = None,
    ) -> None:
        self._model = model.open(path)
        self._apply, self._on_error, self._timeout = apply, on_error, timeout
        self._take = take or (self._changed_or_whole if changes else Model.pull)
        self._seen = _Seen(newer_than)
        self._base: tuple[int, int] | None = None
        self._reader = None if reader is None else _Reader(self._model, reader)
        self._stop = stop or threading.Event()
        self._thread: threading.Thread | None = None
        self._changed, self._has_ended = threading.Condition(), False
        self.version: int | None = None
        """The version that was applied last."""
        self.error: BaseException | None = None
        """What has ended `run`."""

    def run(self) -> int | None:
        """Applies versions until it is stopped, and returns the last one. Raises Timeout, and what `apply` raises."""
        try:
            while self._await_newer():
                self._next()
            if self._reader is not None:
                self._reader.leave()
        except BaseException as error:
            self.error = error
            if self._reader is not None:
                # What has ended it says more.
                with contextlib.suppress(GradfsError):
                    self._reader.leave()
            raise
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()
        return self.version

    def poll(self) -> bool:
        """Applies the newest version if it is newer than the last one, without waiting, and says whether it was.

        A program that calls this between its own steps needs no lock around the weights.
        """
        self._seen.begins_anew(self._model)
        if self._model.version <= self._seen.version:
            return False
        self._next()
        return True

    def wait(self, version: int, timeout: float) -> int:
        """Waits until this version or a newer one was applied, and returns its number.

        Raises Timeout after as many seconds, and what has ended the thread.
        """

        def is_there() -> bool:
            return self.version is not None and self.version >= version

        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or is_there(), timeout)
            if self.version is not None and is_there():
                return self.version
        if self.error is not None:
            raise self.error
        why = "it was stopped" if self._has_ended else f"not within {timeout} s"
        raise Timeout(f"version {version} was not applied: {why}", errno.ETIMEDOUT)

    def close(self) -> None:
        """Stops the thread, and waits for it. Raises what has ended it, and Timeout while `apply` runs on."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                raise Timeout(f"apply has not returned within {_PATIENCE} s", errno.ETIMEDOUT)
        elif self._reader is not None:
            self._reader.leave()
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Follower:
        self._thread = threading.Thread(target=self._run_quietly, name="gradfs-follower", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception:
            # That of the block says more.
            if error is None:
                raise

    def _run_quietly(self) -> None:
        # `wait` and `close` raise it.
        with contextlib.suppress(BaseException):
            self.run()

    def _await_newer(self) -> bool:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while not self._stop.is_set():
            left = _SLICE if deadline is None else deadline - time.monotonic()
            if self._seen.has_newer(self._model, left, self._timeout):
                return True
        return False

    def _next(self) -> None:
        taken = _taken(self._model, self._take)
        try:
            self._seen.takes(taken)
            # After an apply that failed, nobody knows what its weights are.
            self._base = None
            try:
                self._apply(taken.version, taken)
            except Exception as error:
                if self._on_error is None:
                    raise
                self._on_error(taken.version, error)
                return
            if isinstance(taken, (Weights, Changes)):
                self._base = taken.version, taken.epoch
        finally:
            taken.close()
        try:
            if self._reader is not None:
                self._reader.applied(taken.version)
        finally:
            with self._changed:
                self.version = taken.version
                self._changed.notify_all()

    def _changed_or_whole(self, of: Model) -> Update:
        if self._base is None:
            return of.pull()
        base, epoch = self._base
        # Whole weights are right, too, where the next version comes just now.
        found = changes.since(of._place, of.path, of.layout, of.version, base)
        return found if found is not None and found.epoch == epoch else of.pull()


class _Seen:
    """The version that was taken last, of which life of the model."""

    def __init__(self, version: int | None) -> None:
        self.version = -1 if version is None else version
        self.epoch: int | None = None

    def takes(self, taken: Any) -> None:
        self.version, self.epoch = taken.version, getattr(taken, "epoch", None)

    def begins_anew(self, of: Model) -> bool:
        """Whether the model was made anew, or restored. Then any version of it is a new one."""
        about = of._place.about(of.path)
        if self.epoch is None or about is None or about.epoch == self.epoch:
            return False
        self.version, self.epoch = -1, None
        of.layout = Layout.parse(of._place.read(f"{of.path}/layout"))
        return True

    def has_newer(self, of: Model, left: float, timeout: float | None) -> bool:
        """Waits for a newer version, for a while. Raises Timeout if no time is `left` of the `timeout`."""
        try:
            of.wait(newer_than=self.version, timeout=max(0.0, min(left, _SLICE)))
        except RolledBack:
            self.version, self.epoch = -1, None
            return False
        except Timeout:
            if not self.begins_anew(of) and left <= 0:
                words = f"no version newer than {self.version} within {timeout} s"
                raise Timeout(words, errno.ETIMEDOUT) from None
            return False
        return True


def _taken(of: Model, take: Callable[[Model], Any]) -> Any:
    """What is taken of a model. If it was restored just then, it is taken again: followers go on by themselves."""
    try:
        return take(of)
    except RolledBack:
        return take(of)


class _Reader:
    """A reader that the mount knows of, which says what it has applied."""

    def __init__(self, of: Model, name: str) -> None:
        readers = os.path.join(of.path, "readers")
        if "://" in of.path or not os.path.isdir(readers):
            raise Refused(f"{of.path} has no directory readers/, which reader={name!r} needs", errno.ENOENT)
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise Refused(f"{name!r} is no name for a reader", errno.EINVAL)
        self._of, self._path, self._pid, self._is_left = of, os.path.join(readers, name), os.getpid(), False
        with explained(f"reader {name} (if it is left of a program that was killed, rmdir {self._path})", of.path):
            os.mkdir(self._path)

    def applied(self, version: int) -> None:
        with explained("applied", self._of.path):
            try:
                self._tell(version)
            except FileNotFoundError:
                # A mount that was out of reach for longer than the lease has lost its readers.
                os.mkdir(self._path)
                self._tell(version)

    def _tell(self, version: int) -> None:
        self._of._place.write(os.path.join(self._path, "applied"), f"{version}\n")

    def leave(self) -> None:
        if not self._is_left and os.getpid() == self._pid:
            self._is_left = True
            # A mount that was out of reach may have lost it.
            with explained("readers", self._of.path), contextlib.suppress(FileNotFoundError):
                os.rmdir(self._path)


@overload
def follow(
    path: str | os.PathLike[str], *, newer_than: int | None = None, timeout: float | None = None
) -> Iterator[Weights]: ...


@overload
def follow(
    path: str | os.PathLike[str], apply: Callable[[int, Any], object], *, newer_than: int | None = None,
    timeout: float | None = None, **options: Any,
) -> int | None: ...  # fmt: skip


def follow(
    path: str | os.PathLike[str],
    apply: Callable[[int, Any], object] | None = None,
    *,
    newer_than: int | None = None,
    timeout: float | None = None,
    **options: Any,
) -> Iterator[Weights] | int | None:
    """Follows a model: each time the newest version, if it is newer than `newer_than`, and those between are skipped.

    Without `apply` it yields the `Weights` of each version, which stay in memory while the body of the loop runs.

    With `apply` it calls `apply(version, tensors)` for each. `tensors` are `Weights`, views of the version's memory,
    which stays until the call returns. With `changes=True` they are `Changes` wherever the mount knows what differs
    from the version that was applied before; `tensors.is_whole` tells the two apart, and `tensors.copy_to(arrays)` is
    right for both. `stop` is an event that ends it, and it returns the last version. An exception of `apply` ends it,
    unless there is `on_error(version, error)`; after one, the next version comes whole. `reader` is a name under which
    the mount shows what was applied last. `Follower` has the same for threads and for programs with loops of their own.

    Raises Timeout if no newer version comes within `timeout` seconds.
    """
    if apply is not None:
        return Follower(path, apply, newer_than=newer_than, timeout=timeout, **options).run()
    if options:
        raise TypeError(f"follow: {', '.join(options)} are for apply, and there is none")
    return _each(path, newer_than, timeout)


def _each(path: str | os.PathLike[str], newer_than: int | None, timeout: float | None) -> Iterator[Weights]:
    of, seen = model.open(path), _Seen(newer_than)
    while True:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not seen.has_newer(of, deadline - time.monotonic(), timeout):
            pass
        with _taken(of, Model.pull) as weights:
            seen.takes(weights)
            yield weights
