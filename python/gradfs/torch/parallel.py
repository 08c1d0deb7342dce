"""`DistributedDataParallel` with the face of torch's, for scripts that have it. `remote` does the communication."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from gradfs.errors import GradfsError
from gradfs.torch import process


class Sync:
    """Whether the next backward ends a step. A module's wrapper and its optimizer share it."""

    def __init__(self) -> None:
        self.accumulates = False
        self.is_remote = False


_of_module: WeakKeyDictionary[torch.nn.Module, Sync] = WeakKeyDictionary()


def sync_of(module: torch.nn.Module) -> Sync:
    return _of_module.setdefault(module, Sync())


def share_sync(module: torch.nn.Module) -> Sync:
    """That of a module, which all wrappers inside it have from now on."""
    sync = sync_of(module)
    for inner in module.modules():
        if isinstance(inner, DistributedDataParallel):
            inner._sync = sync
    return sync


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside wrappers of gradfs and of torch.compile. TypeError for one that would communicate, too."""
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise TypeError("this module is in torch's DistributedDataParallel: take gradfs.torch's")
        compiled = getattr(module, "_orig_mod", None)
        if isinstance(compiled, torch.nn.Module):
            module = compiled
        elif isinstance(module, DistributedDataParallel):
            module = module.module
        else:
            return module


class DistributedDataParallel(torch.nn.Module):
    """A module that `remote` keeps equal on all learners. Options of torch's wrapper mean nothing here."""

    def __init__(self, module: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.module = module
        self._sync = sync_of(unwrapped(module))

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if self.training and torch.is_grad_enabled() and not self._sync.is_remote and process.get_world_size() > 1:
            raise GradfsError(
                "this module would train alone: call gradfs.torch.remote(optimizer, module) before the first step"
            )
        return self.module(*arguments, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward adds to gradients that a later backward completes."""
        before, self._sync.accumulates = self._sync.accumulates, True
        try:
            yield
        finally:
            self._sync.accumulates = before
