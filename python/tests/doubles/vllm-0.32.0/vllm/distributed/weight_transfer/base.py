"""Follows vllm/distributed/weight_transfer/base.py of vLLM 0.32.0."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch

TInitInfo = TypeVar("TInitInfo")
TUpdateInfo = TypeVar("TUpdateInfo")
TTrainerInitInfo = TypeVar("TTrainerInitInfo")


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: "tuple[int, ...]"


class WeightSource(ABC):
    @abstractmethod
    def metadata(self): ...

    @abstractmethod
    def __iter__(self): ...


class ModuleSource(WeightSource):
    def __init__(self, module):
        self._of = module

    def metadata(self):
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self._of.named_parameters()]

    def __iter__(self):
        return iter(self._of.named_parameters())


@dataclass
class WeightTransferInitInfo(ABC):
    pass


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]

    rank: int = field(kw_only=True)

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if not getattr(cls, "backend", None):
            raise TypeError(f"{cls.__name__} has no backend")

    @property
    def is_sender(self):
        return self.rank == 0


@dataclass
class WeightTransferUpdateInfo(ABC):
    pass


@dataclass
class WeightTransferInitRequest:
    init_info: "dict[str, Any]" = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    update_info: "dict[str, Any] | list[dict[str, Any]]" = field(default_factory=dict)


class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    """The worker's side."""

    supports_draft_weight_update = True
    defers_processing = False

    def __init__(self, config, vllm_config, device, model):
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config
        self._of_the_engine = model, self.model_config

    def drain_pending(self):
        pass

    def set_weight_update_target(self, model, model_config):
        self.model, self.model_config = model, model_config

    def reset_weight_update_target(self):
        self.model, self.model_config = self._of_the_engine

    def parse_init_info(self, init_dict):
        return _made(self.init_info_cls, init_dict)

    def parse_update_info(self, update_dict):
        return _made(self.update_info_cls, update_dict)

    @abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abstractmethod
    def start_weight_update(self): ...

    @abstractmethod
    def finish_weight_update(self): ...

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))
        torch.accelerator.synchronize()

    @abstractmethod
    def receive_weights(self, update_info): ...

    @abstractmethod
    def shutdown(self): ...


@runtime_checkable
class VLLMWeightSyncClient(Protocol):
    def init_weight_transfer_engine(self, init_info): ...

    def start_weight_update(self): ...

    def update_weights(self, update_info): ...

    def finish_weight_update(self, weight_version=None): ...


class TrainerWeightTransferEngine(ABC, Generic[TTrainerInitInfo]):
    """The trainer's side."""

    def __init__(self, *, client, source=None, is_sender=True):
        self.client, self.source, self.is_sender = client, source, is_sender

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info, *, client, source=None): ...

    @abstractmethod
    def send_weights(self): ...

    def shutdown(self):
        pass


def _made(kind, fields):
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error
