"""Learners, and the contributions that they make."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any, final, overload

from . import arrays, errors
from .errors import Busy, Closed, Left, NotMounted, Refused, explained
from .layout import Layout, Tensor, elements
from .lives import Life
from .places import COUNTS, Place, Sink
from .weights import Weights

# The buffers that one call of pwritev takes: IOV_MAX of Linux.
_MOST_BUFFERS = 1024
# Bytes that one call begins with. What is converted takes as much memory, and the next tensor's.
_MOST_BYTES = 64 << 20
_numbers = itertools.count()


@final
class Step:
    """One contribution, which counts once and whole, or not at all.

    As a context manager it commits at the end of its block, and takes everything back if an exception leaves the
    block. Tensors may be written in any order, each element once. What a block does not write of a tensor counts as
    zero, and a tensor that nobody writes stays as it is.
    """

    def __init__(
        self, place: Place, path: str, layout: Layout, model: str, life: Life, learner: str | None = None
    ) -> None:
        self._layout, self._model, self._learner, self._life = layout, model, learner, life
        self._where = os.path.basename(path) if learner is None else f"learner {os.path.basename(learner)}"
        self._written: dict[str, list[tuple[int, int]]] = {}
        self._is_empty = True
        self._pid = os.getpid()
        self.committed = False
        """Whether the contribution counts."""
        with self._explained():
            self._sink = place.sink(path, life)
        self._end = weakref.finalize(self, _abandon, self._sink, self._pid)

    def __setitem__(self, name: str, value: Any) -> None:
        """Writes a whole tensor. Raises Refused, and writes nothing, if its name, shape or type does not fit."""
        self.update({name: value})

    def update(self, values: Mapping[str, Any]) -> None:
        """Writes whole tensors. Raises Refused, and writes nothing, if one of them does not fit."""
        self._check()
        found = arrays.checked(self._layout, values, self._where)
        self._claim([(tensor, 0, tensor.size) for tensor, _ in found])
        self._write([(tensor.offset, tensor, described) for tensor, described in found])

    def write(self, name: str, array: Any, start: int = 0) -> None:
        """Writes the elements of `array`, of any shape, over those of the tensor from number `start` on."""
        self._check()
        tensor = self._layout.get(name)
        if tensor is None:
            raise Refused(f"{self._where}: {name}: the model has no such tensor")
        described = arrays.describe(name, array)
        arrays.fits(tensor, described.dtype, None)
        stop = start + elements(described.shape)
        if start < 0 or stop > tensor.size:
            raise Refused(f"{name}: elements {start} to {stop} are not within the tensor's {tensor.size}")
        self._claim([(tensor, start, stop)])
        width = tensor.nbytes // tensor.size if tensor.size else 0
        self._write([(tensor.offset + start * width, tensor, described)])

    def _describe(self, meta: Mapping[str, str]) -> None:
        """Says something of the version that new weights make."""
        self._check()
        with self._explained():
            self._sink.describe(meta)

    def commit(self) -> None:
        """Ends the step: when this has returned, the contribution counts.

        After Timeout, and after Ctrl-C, it was taken back, and the step may be repeated. If the contribution counts
        after all, this returns as if nothing had happened; after Ctrl-C, `committed` says so. After RolledBack it is to
        be made anew, of the weights that are there now.
        """
        self._check()
        if self._is_empty:
            self.abort()
            raise Refused(f"{self._where}: the step has written nothing, so it is no contribution")
        done: list[None] = []
        try:
            try:
                self._sink.commit(done)
            finally:
                if done:
                    self.committed = True
                    self._close()
        except OSError as error:
            reason = self._life.ended(error) or errors.of(error, self._where, self._model, self._learner)
            self.abort()
            if not self.committed:
                raise reason from error
        except BaseException:
            if not self.committed:
                with contextlib.suppress(errors.GradfsError):
                    self._take_back()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the step was committed or taken back."""
        return not self._end.alive

    def abort(self) -> None:
        """Takes back all that was written, so that nothing of it counts. A step that has ended stays as it is."""
        if not self.has_ended and os.getpid() == self._pid:
            self._take_back()

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *reason: object) -> None:
        try:
            if reason[0] is None and not self.has_ended:
                self.commit()
        finally:
            with contextlib.suppress(errors.GradfsError):
                self.abort()

    def _take_back(self) -> None:
        try:
            self._sink.take_back()
        except OSError as error:
            reason = errors.of(error, self._where, self._model, self._learner)
            # The close drops it, too, where it is not under way to count.
            if error.errno != errno.EIO:
                return
            self.committed = COUNTS in str(reason)
            if not self.committed:
                raise reason from error
        finally:
            self._close()

    def _close(self) -> None:
        if self._end.detach() is not None:
            # What the step has written was committed or taken back. The close says nothing more.
            with contextlib.suppress(OSError):
                self._sink.close()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise Closed(f"{self._where}: the step belongs to process {self._pid}, from which this one was forked")
        if self.has_ended:
            raise Closed(f"{self._where}: the step has ended")

    def _claim(self, spans: list[tuple[Tensor, int, int]]) -> None:
        """Refuses elements that were written before, and remembers these."""
        for tensor, start, stop in spans:
            written = self._written.get(tensor.name, ())
            if any(start < other_stop and other_start < stop for other_start, other_stop in written):
                raise Refused(f"{self._where}: {tensor.name}: an element is written once in a step")
        for tensor, start, stop in spans:
            self._written.setdefault(tensor.name, []).append((start, stop))

    def _write(self, parts: list[tuple[int, Tensor, arrays.Described]]) -> None:
        """Writes what lies side by side by one call, in the order of the model."""
        run: list[memoryview] = []
        at = end = 0
        for offset, tensor, described in parts:
            piece = arrays.piece(described, tensor.dtype)
            if not piece.nbytes:
                continue
            if run and (offset != end or len(run) == _MOST_BUFFERS or end - at >= _MOST_BYTES):
                self._write_run(run, at)
                run = []
            if not run:
                at = end = offset
            run.append(piece)
            end += piece.nbytes
        if run:
            self._write_run(run, at)

    def _write_run(self, buffers: list[memoryview], at: int) -> None:
        self._is_empty = False
        with self._explained():
            while buffers:
                written = self._sink.write(buffers, at)
                at += written
                while buffers and written >= buffers[0].nbytes:
                    written -= buffers.pop(0).nbytes
                if buffers:
                    buffers[0] = buffers[0][written:]

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        return explained(self._where, self._model, self._learner, life=self._life)


class Contributor:
    """What a model and a learner have in common: weights to pull, and gradients to push."""

    def __init__(
        self, place: Place, model: str, layout: Layout, learner: str | None = None, of: Life | None = None
    ) -> None:
        self.layout = layout
        self._life = Life(place, model, of)
        self._life.tell(self._begin_anew)
        self._place = place
        self._model, self._learner = model, learner
        self.path = learner or model
        """The directory."""
        self._lock = threading.Lock()
        self._step: weakref.ref[Step] | None = None
        self._is_closed = False

    @property
    def version(self) -> int:
        """The number of the newest version."""
        self._check()
        with self._explained("version"):
            return int(self._place.read(self._file("version")))

    @property
    def error(self) -> str:
        """Why the last call was refused, in words. It is empty if none was since the last contribution."""
        self._check()
        with self._explained("error"):
            return self._place.read(self._file("error")).strip()

    @overload
    def pull(self) -> Weights: ...

    @overload
    def pull(self, out: Mapping[str, Any]) -> int: ...

    def pull(self, out: Mapping[str, Any] | None = None) -> Weights | int:
        """The newest version, once it holds the last step that was made here.

        Without `out`, it is mapped: see Weights. Otherwise its tensors are copied into the arrays of `out`, some of them
        or all, and the number of the version is returned. Raises Timeout after `control/timeout`; then ask again. Raises
        RolledBack if the job was restored since the last call.
        """
        self._check()
        copies = out is not None
        path, life = self._file("weights"), self._life
        weights = Weights(self._place, path, self.layout, self._model, self._learner, copies, life)
        if weights.epoch != life.epoch:
            life.look()
        if out is None:
            return weights
        with weights:
            weights.copy_to(out)
        return weights.version

    def step(self) -> Step:
        """Begins a contribution. Raises Busy if another thread has begun one and not ended it.

        Raises RolledBack if the job was restored since the last call: gradients are then of weights that are undone.
        """
        self._check()
        self._check_process()
        with self._lock:
            before = self._step() if self._step is not None else None
            if before is not None and not before.has_ended:
                raise Busy(f"{self.path}: another step has begun, and has to end first", errno.EBUSY)
            step = Step(self._place, self._file("gradients"), self.layout, self._model, self._life, self._learner)
            self._step = weakref.ref(step)
        return step

    def push(self, values: Mapping[str, Any]) -> None:
        """Makes one contribution of whole tensors. Raises Refused, and writes nothing, if one of them does not fit."""
        self._check()
        # An open of the mount's own gradients joins the job, and then others wait for it.
        arrays.checked(self.layout, values, self.path)
        with self.step() as step:
            step.update(values)

    def close(self) -> None:
        """No call is taken any more."""
        self._is_closed = True

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _explained(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return explained(doing, self._model, self._learner, False, self._life)

    def _begin_anew(self) -> None:
        """The job was restored. A step that has begun is of the life before, and counts for nothing."""
        step = self._step() if self._step is not None else None
        if step is not None:
            with contextlib.suppress(errors.GradfsError):
                step.abort()

    def _check(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.path} was closed here")

    def _check_process(self) -> None:
        """Refuses a process that must not contribute in the name of another one."""


@final
class Learner(Contributor):
    """A learner of a job. `with` leaves the job at the end of its block, however that ends.

    A learner that was found and not made, as by `Model.learner`, stays. A process that was forked from the one with
    the learner can pull, but neither contribute nor leave.
    """

    def __init__(
        self, place: Place, model: str, layout: Layout, path: str, is_own: bool, of: Life | None = None
    ) -> None:
        super().__init__(place, model, layout, path, of)
        self._pid = os.getpid()
        self._incarnation: list[Any] = [None]
        with self._explained(f"learner {self.name}"):
            self._incarnation[0] = self._status()["incarnation"]
        about = self._incarnation, self._life, self._pid
        self._leave = weakref.finalize(self, _leave, place, path, *about) if is_own else None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def status(self) -> dict[str, str | int | float]:
        """The lines of the learner's file `status`."""
        self._check()
        with self._explained("status"):
            return self._status()

    @property
    def weight(self) -> float:
        """How much a contribution counts: the samples behind it, for example. A new one counts from the next step."""
        self._check()
        with self._explained("weight"):
            return float(self._place.read(self._file("weight")))

    @weight.setter
    def weight(self, value: float) -> None:
        self._check()
        with explained(f"weight {value}", self._model, self._learner):
            self._place.write(self._file("weight"), f"{float(value)!r}\n")

    def touch(self) -> None:
        """Says that the learner works on something else, such as an evaluation.

        Others wait for a silent learner up to `control/patience`, and longer for one that says so more often than that.
        """
        self._check()
        with self._explained("touch"):
            self._place.touch(self.path)

    def close(self) -> None:
        """Leaves the job, if `Model.join` made this learner. An open step is taken back."""
        super().close()
        if self._leave is not None:
            self._leave()

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Learner {self.path}>"

    def _begin_anew(self) -> None:
        super()._begin_anew()
        # The mount has had it join again. If it could not, the next call says so.
        with contextlib.suppress(OSError, KeyError):
            self._incarnation[0] = self._status()["incarnation"]

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Closed(f"{self.path} belongs to process {self._pid}, from which this one was forked: join again")

    def _status(self) -> dict[str, str | int | float]:
        pairs = (line.split(": ", 1) for line in self._place.read(self._file("status")).splitlines() if ": " in line)
        return {key: _number(value) if key not in ("id", "phase", "job") else value for key, value in pairs}


def join(place: Place, model: str, layout: Layout, name: str | None, of: Life) -> Learner:
    """Makes a learner, of a free name if none is given."""
    while True:
        chosen = name if name is not None else _free_name()
        path = os.path.join(model, "learners", chosen)
        try:
            with explained(f"join as {chosen}", model, words=False, life=of):
                place.join(path)
        except Busy as error:
            if name is not None or error.errno != errno.EEXIST:
                raise
            continue
        try:
            return Learner(place, model, layout, path, True, of)
        except BaseException:
            with contextlib.suppress(OSError):
                place.leave(path)
            raise


def find(place: Place, model: str, layout: Layout, path_or_name: str | os.PathLike[str], of: Life) -> Learner:
    """A learner that somebody else has made."""
    given = os.fspath(path_or_name)
    path = given if "/" in given else os.path.join(model, "learners", given)
    if os.path.realpath(os.path.dirname(path)) != os.path.realpath(os.path.join(model, "learners")):
        raise NotMounted(f"{given} is no learner of {model}")
    if not os.path.isdir(path):
        raise Left(f"there is no learner {os.path.basename(path)} in {model}", errno.ENOENT)
    return Learner(place, model, layout, path, False, of)


def _free_name() -> str:
    host = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in os.uname().nodename)
    return f"{host[:32] or 'learner'}-{os.getpid()}-{next(_numbers)}"


def _leave(place: Place, path: str, incarnation: list[Any], life: Life, pid: int) -> None:
    """Takes a learner out of its job, unless it belongs to another process, or its name to another learner."""
    if os.getpid() != pid:
        return
    with contextlib.suppress(OSError):
        try:
            lines = place.read(os.path.join(path, "status")).splitlines()
        except OSError as error:
            # A learner that was dropped still has a directory for this process, which rmdir takes away.
            if error.errno != errno.ENOTCONN:
                raise
            lines = []
        # In a life of which it has not heard, the mount has had it join again under another incarnation.
        if not lines or f"incarnation: {incarnation[0]}" in lines or life.is_over():
            place.leave(path)


def _abandon(sink: Sink, pid: int) -> None:
    """Takes back the step of an object that nobody has ended, also when the interpreter exits."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            try:
                sink.take_back()
            finally:
                sink.close()


def _number(text: str) -> str | int | float:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
