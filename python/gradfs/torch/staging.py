"""How gradients reach the job, and weights the module.

`Copied` writes gradients after backward, and reads weights into the module's own memory. `Mapped` has gradients in the
job's memory, so that a bucket travels while backward goes on, and shows the module each version without a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gradfs import places
from gradfs.errors import explained
from gradfs.layout import Layout, Tensor
from gradfs.lives import Life
from gradfs.torch.patience import Patience

#: Pieces of memory that one pwritev or preadv takes.
MOST_PIECES = 1024
#: Bytes of a bucket: small enough that the last one of backward is not long, and several blocks of the default size.
BUCKET_BYTES = 1 << 20


@dataclass(eq=False)
class Slot:
    """A parameter or buffer of the module, and its place in the job."""

    tensor: torch.Tensor
    at: Tensor
    #: The gradient as the last backward has left it, and its count of changes.
    grad: torch.Tensor | None = None
    grad_version: int = 0
    #: How often backward has completed the gradient in this step.
    completed: int = 0
    bucket: Bucket | None = None

    def is_changed(self, times: int = 0) -> bool:
        """Whether somebody has changed the gradient more than so many times since backward has completed it."""
        grad = self.tensor.grad
        if not self.completed or grad is None:
            return self.completed > 0
        return grad is not self.grad or grad._version > self.grad_version + times

    def forget(self) -> None:
        self.grad, self.completed = None, 0


@dataclass(eq=False)
class Bucket:
    """Neighbours in the job's bytes, which travel together."""

    begin: int
    end: int
    slots: list[Slot] = field(default_factory=list)
    buffers: list[Slot] = field(default_factory=list)
    missing: int = 0


class Host:
    """The host's memory of tensors that lie elsewhere, or not in one piece. It is kept, and pinned for GPUs."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def of(self, offset: int, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for the tensor with this place in the job: its own where that will do."""
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor.detach()
        kept = self._kept.get(offset)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[offset] = kept
        return kept

    def fetch(self, given: Iterable[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
        """The tensors, each with its place, in the host's memory. GPUs copy all of them at once."""
        pairs = [(offset, tensor.detach(), self.of(offset, tensor)) for offset, tensor in given]
        self._copied([(held, tensor) for _, tensor, held in pairs])
        return [(offset, held) for offset, _, held in pairs]

    def bring(self, given: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Gives the tensors what has been read into their memory here."""
        self._copied([(tensor.detach(), self.of(offset, tensor)) for offset, tensor in given])

    def _copied(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        pairs = [(to, of) for to, of in pairs if to.device != of.device or to.data_ptr() != of.data_ptr()]
        with torch.no_grad():
            for to, of in pairs:
                to.copy_(of, non_blocking=True)
        for device in {each.device for pair in pairs for each in pair if each.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


class Files:
    """The files of a learner. Each wait ends as `Patience` says."""

    def __init__(self, learner: Path) -> None:
        self.learner, self.model = learner, learner.parent.parent
        self.layout = Layout.parse((self.model / "layout").read_text())
        self.host = Host()
        self.life = Life(places.Files(), str(self.model))

    def explained(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return explained(f"{doing} of {self.learner.name}", str(self.model), str(self.learner), life=self.life)

    def patiently(self, call: Callable[[], int]) -> int:
        """The call's result. A timeout is repeated while the job waits for a learner that may still come.

        Timeout if no version was made for ``control/patience`` seconds, and nobody is waited for.
        """
        patience = Patience(self.model, for_versions=True)
        while True:
            try:
                return call()
            except TimeoutError:
                if not patience.goes_on():
                    raise

    def sync(self, file: int) -> None:
        def call() -> int:
            os.fsync(file)
            return 0

        self.patiently(call)

    def version(self) -> int:
        return int((self.model / "version").read_text())

    def open_weights(self) -> int:
        """A descriptor of the version with this learner's last step."""
        path = self.learner / "weights"
        return self.patiently(lambda: os.open(path, os.O_RDONLY))

    def open_gradients(self, flags: int) -> int:
        """A descriptor that belongs to this life of the model. Raises RolledBack if another one has begun."""
        file = os.open(self.learner / "gradients", flags)
        try:
            self.life.check(f"gradients {flags}", file)
        except BaseException:
            os.close(file)
            raise
        return file

    def read(self, slots: Iterable[Slot]) -> None:
        """Reads weights into the tensors' own memory."""
        with self.explained("reading weights"), _closing(self.open_weights()) as file:
            given = [(slot.at.offset, slot.tensor) for slot in slots if slot.at.nbytes]
            for offset, pieces in _runs((at, memory(self.host.of(at, tensor))) for at, tensor in given):
                _wholly(os.preadv, file, pieces, offset)
            self.host.bring(given)


class Copied:
    """Contributions by write(2). A tensor without a gradient is left out, so it stays as it is."""

    name = "copied"

    def __init__(self, files: Files, trained: list[Slot], buffers: list[Slot]) -> None:
        self.files, self.trained, self.buffers = files, trained, buffers
        self._file = -1

    def ship(self) -> None:
        """Contributes all gradients and float buffers. Nothing of them counts if it raises."""
        with self.files.explained("a step"):
            if self._file < 0:
                self._file = self.files.open_gradients(os.O_WRONLY)
            given = [(slot.at.offset, slot.tensor.grad) for slot in self.trained if slot.tensor.grad is not None]
            given += [(slot.at.offset, slot.tensor) for slot in self.buffers]
            try:
                held = self.files.host.fetch((at, t) for at, t in sorted(given, key=_offset) if t.numel())
                for offset, pieces in _runs((at, memory(tensor)) for at, tensor in held):
                    _wholly(os.pwritev, self._file, pieces, offset)
                self.files.sync(self._file)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, 0)
                raise

    def complete(self, slot: Slot) -> None:
        """Takes a gradient as backward has left it. Here it stays where it is."""

    def pull(self) -> None:
        self.files.read([*self.trained, *self.buffers])

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def forget_in_child(self) -> None:
        self.close()


class Mapped:
    """Contributions from the job's own memory: gradients are views of it, and weights are views of a version."""

    name = "mapped"

    def __init__(self, files: Files, trained: list[Slot], buffers: list[Slot]) -> None:
        self.files, self.trained, self.buffers = files, trained, buffers
        self._writes = Copied(files, trained, buffers)
        self._views: dict[Slot, torch.Tensor] = {}
        self.buckets = _buckets(trained, buffers)
        with files.explained("mapping gradients"):
            #: Final bytes are named through a descriptor of their own: closing it takes them back.
            self._file, self._sender = self._opened(), self._opened()
            self._memory = mmap.mmap(self._file, files.layout.nbytes, mmap.MAP_SHARED)
        for slot in [*trained, *buffers]:
            if slot.at.nbytes:
                self._views[slot] = view_of(self._memory, slot)

    def _opened(self) -> int:
        return self.files.open_gradients(os.O_RDWR | os.O_DIRECT)

    def complete(self, slot: Slot) -> None:
        """Moves a gradient into the mapping, where a later backward of the same step adds to it."""
        grad, view = slot.tensor.grad, self._views.get(slot)
        if grad is not None and view is not None and grad is not view:
            with torch.no_grad():
                view.copy_(grad)
            slot.tensor.grad = view

    def send(self, bucket: Bucket) -> None:
        """Says that the bytes of a bucket are final, so that they travel."""
        self._take_buffers(bucket.buffers)
        with self.files.explained("final bytes"):
            os.posix_fallocate(self._sender, bucket.begin, bucket.end - bucket.begin)

    def take_back(self) -> None:
        """Nothing of what was sent in this step counts."""
        os.close(self._sender)
        self._sender = self._opened()

    def ship(self) -> None:
        if any(slot.tensor.grad is None for slot in self.trained):
            # A mapping is a gradient of every tensor. What was not used in this step has none, so this step is written.
            return self._writes.ship()
        for slot in self.trained:
            self.complete(slot)
        self._take_buffers(self.buffers)
        with self.files.explained("a step"):
            try:
                self.files.sync(self._file)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, 0)
                raise

    def pull(self) -> None:
        files = self.files
        with files.explained("reading weights"), _closing(files.open_weights()) as file:
            version = mmap.mmap(file, files.layout.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        with torch.no_grad():
            for slot in self.trained:
                if slot.at.nbytes:
                    slot.tensor.data = view_of(version, slot)
            for slot in self.buffers:
                if slot.at.nbytes:
                    slot.tensor.copy_(view_of(version, slot))

    def close(self) -> None:
        """Gives the module memory of its own, with the weights and gradients that it shows."""
        for slot in self.trained:
            slot.tensor.data = slot.tensor.data.clone()
            if slot.tensor.grad is not None and slot.tensor.grad is self._views.get(slot):
                slot.tensor.grad = slot.tensor.grad.clone()
            slot.forget()
        self._views.clear()
        self.forget_in_child()
        with contextlib.suppress(BufferError):
            self._memory.close()

    def forget_in_child(self) -> None:
        self._writes.close()
        for file in (self._sender, self._file):
            if file >= 0:
                os.close(file)
        self._file = self._sender = -1

    def _take_buffers(self, slots: list[Slot]) -> None:
        with torch.no_grad():
            for slot in slots:
                if slot in self._views:
                    self._views[slot].copy_(slot.tensor)


def give_back_freed() -> None:
    """Has the C library give memory that was freed back to the system. glibc keeps weights and copies otherwise."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def can_map(layout: Layout, trained: list[Slot], status: dict[str, object]) -> bool:
    """Whether mapping can pay: reads bypass the daemon, tensors are plain memory, and most bytes are trained."""
    plain = all(slot.tensor.device.type == "cpu" and slot.tensor.is_contiguous() for slot in trained)
    most = sum(slot.at.nbytes for slot in trained) >= 0.75 * layout.nbytes
    return plain and most and bool(trained) and bool(status.get("passthrough"))


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def view_of(memory: mmap.mmap, slot: Slot) -> torch.Tensor:
    """The slot's tensor in memory that has the layout of the job."""
    dtype, shape = slot.tensor.dtype, slot.tensor.shape
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=slot.at.offset).view(shape)


def _buckets(trained: list[Slot], buffers: list[Slot]) -> list[Bucket]:
    buckets: list[Bucket] = []
    mine = {*trained}
    for slot in sorted([*trained, *buffers], key=lambda slot: slot.at.offset):
        end = slot.at.offset + slot.at.nbytes
        if not slot.at.nbytes:
            continue
        last = buckets[-1] if buckets else None
        if last is None or last.end != slot.at.offset or last.end - last.begin >= BUCKET_BYTES:
            last = Bucket(slot.at.offset, end)
            buckets.append(last)
        last.end = end
        (last.slots if slot in mine else last.buffers).append(slot)
        slot.bucket = last
    return buckets


def _offset(given: tuple[int, torch.Tensor]) -> int:
    return given[0]


def _runs(pieces: Iterable[tuple[int, memoryview]]) -> Iterator[tuple[int, list[memoryview]]]:
    """Pieces that follow each other in the file, together, with the offset of the first."""
    begin, end, run = 0, -1, list[memoryview]()
    for offset, piece in pieces:
        if offset != end or len(run) == MOST_PIECES:
            if run:
                yield begin, run
            begin, run = offset, []
        run.append(piece)
        end = offset + piece.nbytes
    if run:
        yield begin, run


def _wholly(
    call: Callable[[int, list[memoryview], int], int], file: int, pieces: list[memoryview], offset: int
) -> None:
    """Repeats a call that moves fewer bytes than it could."""
    while pieces:
        moved = call(file, pieces, offset)
        if moved == 0:
            raise OSError(f"the file ends at {offset}")
        offset += moved
        while pieces and moved >= pieces[0].nbytes:
            moved -= pieces.pop(0).nbytes
        if pieces and moved:
            pieces[0] = pieces[0][moved:]


@contextlib.contextmanager
def _closing(file: int) -> Iterator[int]:
    try:
        yield file
    finally:
        os.close(file)
