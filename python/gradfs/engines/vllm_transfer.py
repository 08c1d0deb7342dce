"""The two sides of vLLM's weight transfer, as of its interface in 0.32 and 0.33. This imports vLLM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from gradfs import changes, model
from gradfs.changes import Changes
from gradfs.engines.vllm import BACKEND
from gradfs.errors import Refused
from gradfs.weights import Weights


@dataclass
class GradfsInitInfo(WeightTransferInitInfo):
    """Where a worker of vLLM finds the model: a path that all workers have, or `gradfs://HOST:PORT/MODEL`."""

    path: str
    changes: bool = True
    timeout: float = 600.0


@dataclass
class GradfsUpdateInfo(WeightTransferUpdateInfo):
    """The version that all workers take, so that none has another one."""

    version: int


class GradfsEngine(WeightTransferEngine[GradfsInitInfo, GradfsUpdateInfo]):
    """The worker's side. It reads a version where it lies, or the elements alone that differ from its last one."""

    init_info_cls = GradfsInitInfo
    update_info_cls = GradfsUpdateInfo
    # What it holds of a draft model, the base of changes would not tell.
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._of: model.Model | None = None
        self._takes_changes, self._timeout = True, 0.0
        self._has: tuple[int, int] | None = None
        self.last_was_whole: bool | None = None
        """Whether the last update brought all tensors."""

    def init_transfer_engine(self, init_info: GradfsInitInfo) -> None:
        self.shutdown()
        self._of = model.open(init_info.path)
        self._takes_changes, self._timeout = init_info.changes, init_info.timeout

    def start_weight_update(self) -> None:
        """Does nothing: whether the weights come whole is known once they are here."""

    def finish_weight_update(self) -> None:
        """Does nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        # vLLM's own waits for a device that workers on CPUs do not have.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GradfsUpdateInfo) -> None:
        if self._of is None:
            raise Refused("gradfs: init_weight_transfer_engine comes first")
        of, version = self._of, update_info.version
        if of.version < version:
            of.wait(newer_than=version - 1, timeout=self._timeout)
        update, self._has = self._changed_or_whole(of, version), None
        with contextlib.closing(update):
            if update.version != version:
                raise Refused(f"gradfs: version {version} was passed by {update.version}: publish one at a time")
            if isinstance(update, Changes):
                self._load_changes(update)
            else:
                self._load_whole(update)
            self._has, self.last_was_whole = (version, update.epoch), update.is_whole

    def shutdown(self) -> None:
        if self._of is not None:
            self._of.close()
        self._of = self._has = None

    def _changed_or_whole(self, of: model.Model, version: int) -> Weights | Changes:
        if self._takes_changes and self._has is not None and self._has_plain_weights():
            base, epoch = self._has
            found = changes.since(of._place, of.path, of.layout, version, base)
            # vLLM marks what stays by NaN, so it takes changes of floating-point tensors alone.
            if found is not None and found.epoch == epoch and not any(_is_unmarked(one) for one in found.values()):
                return found
        return of.pull()

    def _has_plain_weights(self) -> bool:
        # On CPUs and of quantized models, vLLM computes with packed copies.
        return self.device.type != "cpu" and self.model_config.quantization is None

    def _load_whole(self, weights: Weights) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(weights.torch().items()))
        finalize_layerwise_reload(self.model, self.model_config)

    def _load_changes(self, update: Changes) -> None:
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        patches = []
        for name, (indices, values) in update.items():
            flat, shape = values.torch(), update.layout[name].shape
            patches.append(CheckpointWeightPatch(name, shape, flat.dtype, flat, indices.torch()))
        load_checkpoint_weight_patches(self.model, patches)


def _is_unmarked(change: changes.Change) -> bool:
    flat = change.values.torch()
    return not flat.is_floating_point() or bool(torch.isnan(flat).any())


@dataclass
class GradfsTrainerInitInfo(TrainerInitInfo):
    """Where the trainer publishes, and what workers are told: `GradfsInitInfo`."""

    backend: ClassVar[str] = BACKEND

    path: str
    changes: bool = True
    timeout: float = 600.0


class GradfsTrainerEngine(TrainerWeightTransferEngine[GradfsTrainerInitInfo]):
    """The trainer's side. It publishes whole tensors: a mount finds out itself what has changed."""

    init_info_cls = GradfsTrainerInitInfo

    def __init__(self, info: GradfsTrainerInitInfo, client: Any, source: Any) -> None:
        if source is None:
            raise Refused("gradfs: the trainer's side takes a WeightSource")
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._of = model.open(info.path) if info.is_sender else None

    @classmethod
    def trainer_init(cls, init_info: GradfsTrainerInitInfo, *, client: Any, source: Any = None) -> GradfsTrainerEngine:
        engine = cls(init_info, client, source)
        if engine._of is not None:
            told = {"path": engine._of.path, "changes": init_info.changes, "timeout": init_info.timeout}
            client.init_weight_transfer_engine(told)
        return engine

    def send_weights(self) -> None:
        if self._of is None:
            # The others' part of what gathers sharded tensors.
            for _ in _full(self.source):
                pass
            return
        version = self._of.publish((name, tensor.detach().cpu()) for name, tensor in _full(self.source))
        self.client.start_weight_update()
        self.client.update_weights({"version": version})
        self.client.finish_weight_update(str(version))

    def shutdown(self) -> None:
        if self._of is not None:
            self._of.close()


def _full(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The source's whole tensors. Sources of vLLM 0.32 are iterable themselves."""
    yield from source.iter_full() if hasattr(source, "iter_full") else source
