"""A model without a mount: `gradfs://HOST:PORT/MODEL`, by the C library."""

from __future__ import annotations

import _thread
import ctypes
import errno
import json
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from .errors import NotMounted, Worded, named
from .lives import Life
from .places import COUNTS, Loan, Sink, Version, mapped

_LIBRARY = "libmodelio.so.0"
# Seconds that a call waits in C before signals are looked at.
_SLICE = 0.2
# Seconds for what is answered at once, unless the job is out of reach. Waits for others take `control/timeout`.
_PROMPT = 30.0
# Milliseconds that a call can be given.
_LONGEST_MS = 0xFFFFFFFF
_handle, _text, _size, _ms = ctypes.c_int64, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint32
_CALLS: dict[str, list[Any]] = {
    "connect": [_text, ctypes.c_void_p, ctypes.POINTER(_handle)],
    "close": [_handle],
    "get": [_handle, _text, ctypes.c_void_p, _size],
    "set": [_handle, _text, _text, _ms],
    "wait_version": [_handle, ctypes.c_uint64, _ms, ctypes.POINTER(ctypes.c_uint64)],
    "open_weights": [_handle, _ms, ctypes.POINTER(_handle)],
    "open_version": [_handle, ctypes.c_uint64, _ms, ctypes.POINTER(_handle)],
    "weights": [_handle, ctypes.c_void_p],
    "memfd": [_handle, ctypes.c_int],
    "join": [_handle, _text, _ms, ctypes.POINTER(_handle)],
    "write": [_handle, ctypes.c_void_p, _size, ctypes.c_uint64, _ms],
    "commit": [_handle, _ms],
    "abort": [_handle, _ms],
    "touch": [_handle],
    "publish": [_handle, ctypes.POINTER(_handle)],
}


class _Version(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("size", ctypes.c_uint64), ("version", ctypes.c_uint64), ("epoch", ctypes.c_uint64),
    ]  # fmt: skip


_library: ctypes.CDLL | None = None


def _loaded() -> ctypes.CDLL:
    """The library of this package, else the system's."""
    global _library
    if _library is None:
        own = os.environ.get("MODELIO_LIBRARY") or os.path.join(os.path.dirname(__file__), _LIBRARY)
        try:
            library = ctypes.CDLL(own if os.path.exists(own) else _LIBRARY)
        except OSError as error:
            words = f"models without a mount need {_LIBRARY}, which scripts/library builds: {error}"
            raise NotMounted(words, errno.ENOSYS) from error
        for name, arguments in _CALLS.items():
            call = getattr(library, f"modelio_{name}")
            call.argtypes, call.restype = arguments, ctypes.c_ssize_t if name == "get" else ctypes.c_int
        library.modelio_error.restype = _text
        _library = library
    return _library


def _call(name: str, *arguments: Any) -> int:
    """Calls the library, without the interpreter's lock. Raises OSError with its words."""
    library = _loaded()
    answer: int = getattr(library, f"modelio_{name}")(*arguments)
    if answer < 0:
        raise Worded(-answer, (library.modelio_error() or b"").decode())
    return answer


def _opened(name: str, *arguments: Any) -> int:
    handle = _handle()
    _call(name, *arguments, ctypes.byref(handle))
    return handle.value


def _waited(timeout: float, call: Callable[[int], int]) -> int:
    """Calls with milliseconds to wait, again and again, so that a signal's exception comes soon."""
    end = time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        try:
            return call(max(0, int(min(left, _SLICE) * 1000)))
        except OSError as error:
            if error.errno != errno.ETIMEDOUT or left <= _SLICE:
                raise


class _Write:
    """A learner's contribution, or new weights."""

    def __init__(self, handle: int, timeout: float, is_own: bool) -> None:
        self._handle, self._ms, self._is_own = handle, min(int(timeout * 1000), _LONGEST_MS), is_own
        self._began = False
        self._done: list[None] = []
        # The commit of another thread, if it was started, and its end, which is rung.
        self._started: list[int] = []
        self._ended: list[None] = []
        self._bell = _thread.allocate_lock()

    def write(self, buffers: list[memoryview], at: int) -> int:
        self._began = True
        written = 0
        for buffer in buffers:
            _call("write", self._handle, _address(buffer), buffer.nbytes, at + written, self._ms)
            written += buffer.nbytes
        return written

    def describe(self, meta: Mapping[str, str]) -> None:
        for name, text in meta.items():
            _call("set", self._handle, f"user.{name}".encode(), text.encode(), self._ms)

    def commit(self, done: list[None]) -> None:
        failures: list[OSError] = []

        def commit() -> None:
            try:
                _call("commit", self._handle, self._ms)
                self._began = False
                done.append(None)
            except OSError as failure:
                failures.append(failure)
            finally:
                self._ended.append(None)
                self._bell.release()

        # A signal's exception ends the wait of this thread, and not the call. It is known whether the call has begun.
        self._done = done
        self._bell.acquire(False)
        self._started.extend(map(_thread.start_new_thread, (commit,), ((),)))
        self._await_end()
        if failures:
            raise failures[0]

    def _await_end(self) -> None:
        # An exception of a signal may leave any lock held, also those inside of threading.Event. This one may be.
        while not self._ended:
            self._bell.acquire(timeout=_SLICE)

    def take_back(self) -> None:
        if self._began:
            _call("abort", self._handle, self._ms)
        if self._started:
            # It was withdrawn, or counts.
            self._await_end()
            if self._done:
                raise Worded(errno.EIO, f"the contribution {COUNTS}")

    def close(self) -> None:
        if self._is_own:
            _call("close", self._handle)
        elif self._began:
            _call("abort", self._handle, self._ms)


def _address(buffer: memoryview) -> int:
    """The address of memory that may be for reading alone."""
    view = _Buffer()
    _get_buffer(buffer, ctypes.byref(view), 0)
    address: int = view.buf
    # The memoryview keeps the memory.
    _release_buffer(ctypes.byref(view))
    return address


class _Buffer(ctypes.Structure):
    """Python's Py_buffer."""

    _fields_ = [
        ("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    ]  # fmt: skip


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.c_void_p]
_release_buffer.restype = None


class _Mapping(mmap.mmap):
    """The memory of a version, which is held until nothing refers to this."""

    def keep(self, handle: int) -> None:
        self.handle = handle
        _mappings.add(self)
        weakref.finalize(self, _close_all, handle, {}, os.getpid())


_mappings: weakref.WeakSet[_Mapping] = weakref.WeakSet()


def _forks() -> None:
    """What a child has mapped is never used again, for nobody hears when it lets go."""
    for mapping in list(_mappings):
        os.close(_call("memfd", mapping.handle, 1))


os.register_at_fork(before=_forks, after_in_child=_mappings.clear)


class _Loan:
    """The memory of a version in this process."""

    def __init__(self, weights: int) -> None:
        self._weights = weights
        info = _Version()
        _call("weights", weights, ctypes.byref(info))
        self.version, self.epoch, self.size = info.version, info.epoch, info.size
        self.file = _call("memfd", weights, 0)
        # Nobody has given it back.
        self._end = weakref.finalize(self, _keep_unused, weights, os.getpid())

    def end(self, gives_back: bool) -> None:
        if gives_back and self._end.detach():
            _call("close", self._weights)
        self._end()


def _keep_unused(weights: int, pid: int) -> None:
    """Somebody may read these weights for as long as they want to."""
    if os.getpid() == pid:
        os.close(_call("memfd", weights, 1))
        _call("close", weights)


class Network:
    """A connection to a model. Its learners are this process's own."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._learners: dict[str, int] = {}
        self._joining = threading.Lock()
        self._model = _opened("connect", self._url.encode(), None)
        self._end = weakref.finalize(self, _close_all, self._model, self._learners, os.getpid())

    def read(self, path: str) -> str:
        handle, name = self._of(path)
        size = _call("get", handle, name, None, 0)
        while True:
            text = ctypes.create_string_buffer(size + 1)
            now = _call("get", handle, name, text, size)
            if now <= size:
                return text.raw[:now].decode()
            size = now

    def write(self, path: str, text: str) -> None:
        handle, name = self._of(path)
        _waited(_PROMPT, lambda ms: _call("set", handle, name, text.encode(), ms))

    def names(self, path: str) -> list[str]:
        return self.read(path).split()

    def wait(self, model: str, newer_than: int | None, timeout: float | None, life: Life) -> tuple[int, bool]:
        version = ctypes.c_uint64()
        if newer_than is None:
            newer_than = int(self.read(f"{model}/version"))
        # Before version 0 there is none.
        if newer_than < 0:
            return int(self.read(f"{model}/version")), True
        at_most = math.inf if timeout is None else max(0.0, timeout)
        try:
            _waited(at_most, lambda ms: _call("wait_version", self._model, newer_than, ms, ctypes.byref(version)))
        except OSError as error:
            if error.errno != errno.ETIMEDOUT:
                raise
            return version.value, False
        return version.value, True

    def about(self, model: str) -> Version | None:
        # A connection belongs to one life of the model.
        return None

    def restoration(self, model: str) -> tuple[Version, int]:
        now = Network(self._url)
        loan = now.lend(model, None)
        loan.end(True)
        meta = json.loads(now.read(f"{self._url}/versions/{loan.version}/meta.json"))
        restored = json.loads(now.read(f"{self._url}/status.json")).get("restored", 0)
        return Version(loan.version, loan.epoch, meta), restored

    def map(self, path: str, size: int, copies: bool) -> tuple[Version, memoryview]:
        handle, _ = self._of(path)
        opened = _handle()
        _waited(self._timeout(), lambda ms: _call("open_weights", handle, ms, ctypes.byref(opened)))
        try:
            info = _Version()
            _call("weights", opened, ctypes.byref(info))
            meta = json.loads(self.read(f"{self._url}/versions/{info.version}/meta.json"))
            version = Version(info.version, info.epoch, meta)
            if copies:
                bytes_there = (ctypes.c_char * size).from_address(info.data)
                weakref.finalize(bytes_there, _close_all, opened.value, {}, os.getpid())
                return version, memoryview(bytes_there).cast("B")
            file = _call("memfd", opened, 0)
            try:
                memory = mapped(file, size, _Mapping)
            finally:
                os.close(file)
            memory.keep(opened.value)
        except BaseException:
            _call("close", opened)
            raise
        return version, memoryview(memory)

    def changes(self, model: str, version: int, base: int) -> tuple[Version, memoryview]:
        raise FileNotFoundError(errno.ENOENT, "without a mount, versions come whole", model)

    def lend(self, model: str, version: int | None) -> Loan:
        try:
            if version is None:
                weights = _opened("open_weights", self._model, int(_PROMPT * 1000))
            else:
                weights = _opened("open_version", self._model, version, int(_PROMPT * 1000))
        except Worded as error:
            raise named(f"memfd: {error.strerror}", error.errno or 0) from None
        try:
            return _Loan(weights)
        except BaseException:
            _call("close", weights)
            raise

    def sink(self, path: str, life: Life) -> Sink:
        handle, name = self._of(path)
        if name == b"publish":
            return _Write(_opened("publish", self._model), self._timeout(), True)
        if handle == self._model:
            with self._joining:
                # As a mount has one of its own.
                if "" not in self._learners:
                    self._learners[""] = _opened("join", self._model, None, int(_PROMPT * 1000))
                handle = self._learners[""]
        return _Write(handle, self._timeout(), False)

    def join(self, path: str) -> None:
        name = os.path.basename(path)
        self._learners[name] = _opened("join", self._model, name.encode(), int(_PROMPT * 1000))

    def leave(self, path: str) -> None:
        handle = self._learners.pop(os.path.basename(path), None)
        if handle is not None:
            _call("close", handle)

    def touch(self, path: str) -> None:
        handle, _ = self._of(f"{path}/")
        _call("touch", handle)

    def _timeout(self) -> float:
        return float(self.read(f"{self._url}/control/timeout"))

    def _of(self, path: str) -> tuple[int, bytes]:
        name = path[len(self._url) + 1 :]
        if name in ("gradients", "weights", "error"):
            return self._learners.get("", self._model), name.encode()
        if not name.startswith("learners/"):
            return self._model, name.encode()
        _, learner, name = name.split("/", 2)
        if learner not in self._learners:
            raise Worded(errno.ENOTCONN, f"learner {learner} is not one of this process")
        return self._learners[learner], name.encode()


def _close_all(model: int, learners: dict[str, int], pid: int) -> None:
    if os.getpid() == pid:
        for handle in [*learners.values(), model]:
            _loaded().modelio_close(handle)
