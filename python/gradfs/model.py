"""A model of a mount."""

from __future__ import annotations

import contextlib
import errno
import json
import operator
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any, final

from . import arrays, learner
from .control import Control
from .errors import NotMounted, Refused, Timeout, explained
from .layout import Layout
from .learner import Contributor, Learner, Step
from .memory import Memory
from .places import Files, Place

_LAST_VERSION = 2**64 - 1


def open(path: str | os.PathLike[str]) -> Model:
    """Opens a model by the path of its directory, or of a mount that has one model alone.

    `gradfs://HOST:PORT/MODEL` opens one without a mount, by its registry's place; `etcd://A:2379,B:2379,C:2379/MODEL` one
    of a registry in an etcd.

    Raises NotMounted if there is none.
    """
    given = os.fspath(path)
    if given.startswith(("gradfs://", "etcd://", "etcds://")):
        from .network import Network

        given = given.rstrip("/")
        with explained(given, given, words=False):
            network = Network(given)
            return Model(network, given, Layout.parse(network.read(f"{given}/layout")))
    given, files = os.path.abspath(given), Files()
    directory = given
    with explained(given, given, words=False):
        if not os.path.exists(os.path.join(given, "layout")):
            models = [name for name in sorted(os.listdir(given)) if os.path.exists(os.path.join(given, name, "layout"))]
            if len(models) != 1:
                has = f"has the models {', '.join(models)}: name one of them" if models else "is no model of a mount"
                raise NotMounted(f"{given} {has}")
            directory = os.path.join(given, models[0])
        return Model(files, directory, Layout.parse(files.read(os.path.join(directory, "layout"))))


@final
class Model(Contributor):
    """A model: its weights, its settings, and the way to its next version.

    `pull`, `push` and `step` are those of the mount's own learner, which all programs of the mount share. Training
    takes a learner of its own: `join`.
    """

    def __init__(self, place: Place, path: str, layout: Layout) -> None:
        super().__init__(place, path, layout)
        self._control = Control(place, path)

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
            status: dict[str, Any] = json.loads(self._place.read(self._file("status.json")))
        return status

    def wait(self, newer_than: int | None = None, timeout: float | None = None) -> int:
        """Waits until a version is newer than the given one, or than the newest now, and returns its number.

        Raises Timeout after as many seconds. Without `timeout` it waits for as long as it takes. Raises RolledBack if
        the job was restored since the last call.
        """
        self._check()
        with self._explained("version"):
            version, is_newer = self._place.wait(self._model, newer_than, timeout, self._life)
        if not is_newer:
            than = version if newer_than is None else newer_than
            raise Timeout(f"no version newer than {than} within {timeout} s", errno.ETIMEDOUT)
        return version

    def view(self, name: str, plan: Mapping[str, Any] | None = None) -> Model:
        """Opens the view of this name, as a model. With a `plan`, it is made first.

        A plan says what the view has, such as `{"style": "hf-llama", "tp": 8, "rank": 3}`. Raises Busy if a view of
        this name exists, and Refused for a wrong plan, or without a mount.
        """
        self._check()
        if not isinstance(self._place, Files):
            raise Refused("views are directories of a mount, and this model is open without one")
        path = self._file(os.path.join("views", name))
        if plan is not None:
            with self._explained(f"view {name}"):
                os.mkdir(path)
            try:
                with explained(f"view {name}", self._model):
                    self._place.write(os.path.join(path, "plan"), json.dumps(plan))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.rmdir(path)
                raise
        return open(path)

    def publish(
        self,
        values: Mapping[str, Any] | Iterable[tuple[str, Any]],
        meta: Mapping[str, str] | None = None,
        part_of: str | None = None,
    ) -> int:
        """Makes whole new weights the next version, and returns the number of the newest version then.

        All tensors have to be given. Pairs of names and arrays are written one by one, so that they need not be in
        memory together. The job takes new weights with the reducer `assign`, or at version 0. `meta` says
        something of the version, such as its training step: texts by name, 4096 bytes in all, which `Weights.meta`
        shows to whoever reads it. Raises Refused if one is no text, or cannot be kept.

        In a view whose plan says which part it is, the tensors are a part of the set `part_of`, such as `"step-120"`.
        It returns when all parts have come, and are one version. Raises Timeout if one does not come.
        """
        self._check()
        _check_meta(meta or {})
        if part_of is not None:
            with explained("set", self._model):
                self._place.write(self._file("set"), part_of)
        parts: Iterable[Mapping[str, Any]] = (
            [values] if isinstance(values, Mapping) else (dict([one]) for one in values)
        )
        if isinstance(values, Mapping):
            self._check_all(values)
            arrays.checked(self.layout, values, "publish")
        with Step(self._place, self._file("publish"), self.layout, self._model, self._life) as step:
            written: set[str] = set()
            for part in parts:
                step.update(part)
                written.update(part)
            self._check_all(written)
            if meta:
                step._describe(meta)
        if part_of is None:
            return self.version
        # The view shows it only later than its model.
        with self._explained("version"):
            return int(self._place.read(self._file("../../version")))

    def _check_all(self, names: Collection[str]) -> None:
        missing = [name for name in self.layout if name not in names]
        if missing:
            raise Refused(f"publish: all tensors are needed, and these are missing: {', '.join(missing)}")

    def memfd(self, version: int | None = None) -> Memory:
        """Borrows the memory of a version that is here, or of the newest: a descriptor that no daemon stands behind.

        It waits for no step. `with model.memfd() as memory:` gives it back. Raises GradfsError with ENOENT if the version
        is gone, and with ENOMEM if programs hold as many versions as they may.
        """
        self._check()
        if version is not None and not 0 <= operator.index(version) <= _LAST_VERSION:
            raise Refused(f"memfd: {version} is no version")
        return Memory(self._place, self._model, version)

    def join(self, name: str | None = None) -> Learner:
        """Joins the job as a learner, of a free name if none is given.

        `with model.join() as learner:` leaves the job however the block ends. Raises Busy if the name is in use.
        """
        self._check()
        return learner.join(self._place, self._model, self.layout, name, self._life)

    def learner(self, path_or_name: str | os.PathLike[str]) -> Learner:
        """A learner that somebody else has made, as `gradfs run` does for a process (`GRADFS_LEARNER`).

        Its `with` leaves nothing. Raises Left if it is not there.
        """
        self._check()
        return learner.find(self._place, self._model, self.layout, path_or_name, self._life)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {self._model}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._model,)


# What a version keeps of metadata, in bytes of UTF-8: all of it, and a name.
_MOST_META, _LONGEST_NAME = 4096, 250


def _check_meta(meta: Mapping[str, str]) -> None:
    size = 0
    for name, text in meta.items():
        if not (isinstance(name, str) and isinstance(text, str)):
            raise Refused(f"publish: metadata has texts by name, and {name!r} is none: convert it by str() or JSON")
        try:
            length, more = len(name.encode()), len(text.encode())
        except UnicodeEncodeError:
            raise Refused(f"publish: the metadata {name!r} is no UTF-8") from None
        if "\0" in name + text:
            raise Refused(f"publish: the metadata {name!r} has a zero byte")
        if not 0 < length <= _LONGEST_NAME or name.startswith("gradfs."):
            raise Refused(
                f"publish: {name!r} is no name for metadata: use up to {_LONGEST_NAME} bytes, not 'gradfs.' in front"
            )
        size += length + more
    if size > _MOST_META:
        raise Refused(f"publish: the metadata takes {size} bytes, and a version keeps {_MOST_META}")
