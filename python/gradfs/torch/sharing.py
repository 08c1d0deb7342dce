"""Which samples a learner takes. They are shared anew when learners come and go."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from gradfs import job
from gradfs.torch import process

#: Seconds for which a look at the learners is good.
LOOK = 0.5
#: Seconds for which the coordinator's list is good, while as many learners contribute to each version.
ASK = 5.0


class Share(Sampler[int]):
    """This learner's part of `data`, as torch's `DistributedSampler` has it while the learners stay the same.

    When one comes or goes, what is left of the epoch is shared among those that there are then. A learner that was late
    may take some samples a second time, or leave some out. Loaders that fetch ahead see a change that much later.
    """

    def __init__(
        self,
        data: Sized,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        members: Callable[[], list[str]] | None = None,
    ) -> None:
        self.data, self.shuffle, self.seed, self.drop_last = data, shuffle, seed, drop_last
        self.epoch = 0
        self._members = members or _learners

    def set_epoch(self, epoch: int) -> None:
        """Shuffles the next pass otherwise."""
        self.epoch = epoch

    def __len__(self) -> int:
        of = len(self._members())
        return len(self.data) // of if self.drop_last else math.ceil(len(self.data) / of)

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order: list[int] = torch.randperm(len(self.data), generator=generator).tolist()
        else:
            order = list(range(len(self.data)))
        members = self._members()
        order = self._whole(order, len(members))
        taken = 0
        while taken < len(order):
            now = self._members()
            if now != members:
                members, taken, order = now, 0, self._whole(order[taken:], len(now))
                continue
            yield order[taken + members.index(_name())]
            taken += len(members)

    def _whole(self, order: list[int], of: int) -> list[int]:
        """The order, cut or repeated so that all learners take as many."""
        if self.drop_last or not order:
            return order[: len(order) // of * of]
        return (order * (1 + of))[: math.ceil(len(order) / of) * of]


def share(data: Sized | DataLoader[object], **options: Any) -> Share | DataLoader[object]:
    """A sampler for a dataset, or a loader like the one given that takes this learner's share of its dataset.

    `shuffle`, `seed` and `drop_last` are those of `DistributedSampler`: a loader that shuffles does so by `seed`. A loader
    with a sampler or batch sampler of its own, or of an iterable dataset, is TypeError: give its dataset, and build the
    loader from the sampler.
    """
    if not isinstance(data, DataLoader):
        return Share(data, **options)
    if data.batch_size is None or isinstance(data.dataset, IterableDataset):
        raise TypeError("share takes a loader of a map-style dataset that makes its batches itself")
    sampler, size = data.sampler, len(cast(Sized, data.dataset))
    shuffled = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size
    if not shuffled and type(sampler) is not SequentialSampler:
        name = type(sampler).__name__
        raise TypeError(
            f"share takes a loader of all samples, in order or shuffled, and this one's {name} chooses others"
        )
    return DataLoader(
        data.dataset,
        batch_size=data.batch_size,
        sampler=Share(cast(Sized, data.dataset), **{"shuffle": shuffled, **options}),
        num_workers=data.num_workers,
        collate_fn=data.collate_fn,
        pin_memory=data.pin_memory,
        drop_last=data.drop_last,
        timeout=data.timeout,
        worker_init_fn=data.worker_init_fn,
        persistent_workers=data.persistent_workers,
        multiprocessing_context=data.multiprocessing_context,
        generator=data.generator,
        prefetch_factor=data.prefetch_factor,
        pin_memory_device=data.pin_memory_device,
    )


def _name() -> str:
    return process.learner().name


def _learners() -> list[str]:
    """The job's learners, in an order that all of them see: that of the ranks."""
    attached = process.attached()
    on_one_host = attached is None or attached.world.on_one_host
    return _listed(process.learner(), on_one_host, time.monotonic() // LOOK)


@functools.lru_cache(maxsize=1)
def _listed(learner: Path, on_one_host: bool, moment: float) -> list[str]:
    if on_one_host:
        names = frozenset(entry.name for entry in learner.parent.iterdir())
    else:
        # A mount has directories of its own learners alone.
        model = learner.parent.parent
        contributed = json.loads((model / "status.json").read_text())["contributions_of_newest_version"]
        names = _on_all_hosts(model, contributed, time.monotonic() // ASK)
    return sorted(names | {learner.name}, key=lambda name: (len(name), name))


@functools.lru_cache(maxsize=1)
def _on_all_hosts(model: Path, contributed: int, moment: float) -> frozenset[str]:
    status = json.loads(job.command("status", "--json", str(model)))
    return frozenset(member["id"] for of in status["models"] for member in of["learners"])
