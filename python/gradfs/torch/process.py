"""The process's place in its job, under the names of `torch.distributed`."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradfs import job
from gradfs.errors import GradfsError

if TYPE_CHECKING:
    from gradfs.lives import Life
    from gradfs.torch.optimizer import RemoteOptimizer


class _Process:
    """What this process has joined. One job a process, as with `torch.distributed`."""

    def __init__(self) -> None:
        self.world: job.World | None = None
        self.attached: job.Attached | None = None
        self.optimizer: RemoteOptimizer | None = None
        self.pid = os.getpid()
        self.barriers = 0


_process = _Process()


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    **options: Any,
) -> None:
    """Finds out rank and world size. `remote` joins the job.

    `backend`, `init_method`, `timeout` and other options mean nothing here, and are accepted. A `rank` and `world_size`
    that are given stand for what a launcher has not set.
    """
    given: dict[str, object] = {}
    if rank >= 0 and world_size > 0:
        given.update(RANK=rank, WORLD_SIZE=world_size)
    if init_method and init_method.startswith("tcp://"):
        address, _, port = init_method[len("tcp://") :].rpartition(":")
        given.update(MASTER_ADDR=address, MASTER_PORT=port)
    for name, value in given.items():
        os.environ.setdefault(name, str(value))
    _process.world = job.world()


def is_available() -> bool:
    """True: `torch.distributed` answers alike."""
    return True


def is_initialized() -> bool:
    """Whether `init_process_group` has been called, and `destroy_process_group` not since."""
    return _process.world is not None


def get_rank(group: Any = None) -> int:
    """This process's number, from 0."""
    return _world().rank


def get_world_size(group: Any = None) -> int:
    """The number of processes that the launcher has started."""
    return _world().size


def destroy_process_group(group: Any = None) -> None:
    """Leaves the job. The module keeps its weights. The last process on a host ends the mount."""
    if _process.pid == os.getpid():
        if _process.optimizer is not None:
            _process.optimizer.close()
        if _process.attached is not None:
            _process.attached.leave()
    _process.world = _process.attached = _process.optimizer = None


def joined(attached: job.Attached, optimizer: RemoteOptimizer) -> None:
    """Notes the job that this process takes part in, and has it left at exit."""
    if _process.attached is None:
        atexit.register(destroy_process_group)
    _process.attached, _process.optimizer, _process.pid = attached, optimizer, os.getpid()
    _process.world = attached.world


def attached() -> job.Attached | None:
    """The job of this process, if `remote` has been called."""
    return _process.attached


def check_free() -> None:
    """GradfsError if this process has an optimizer in a job already."""
    if _process.optimizer is not None and _process.pid == os.getpid() and not _process.optimizer.is_closed:
        raise GradfsError(
            "this process trains by gradfs.torch.remote already: it is for one module and one optimizer a process, "
            "until close()"
        )


def next_barrier() -> int:
    """The number of the next barrier before the job begins."""
    _process.barriers += 1
    return _process.barriers


def learner() -> Path:
    """The directory of this process's learner. GradfsError before `remote`."""
    if _process.attached is None or _process.attached.learner is None:
        raise GradfsError("the job begins with gradfs.torch.remote(optimizer, module): call it first")
    return _process.attached.learner


def life() -> Life | None:
    """What this process's optimizer knows of its model's life."""
    return None if _process.optimizer is None else _process.optimizer.files.life


def _world() -> job.World:
    return _process.world if _process.world is not None else job.world()
