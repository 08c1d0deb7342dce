"""Follows verl/checkpoint_engine/base.py of verl 0.9.1."""

from abc import ABC, abstractmethod
from typing import ClassVar


class CheckpointEngineRegistry:
    _registry: ClassVar[dict] = {}

    @staticmethod
    def register(backend):
        def registered(engine):
            CheckpointEngineRegistry._registry[backend] = engine
            return engine

        return registered

    @classmethod
    def get(cls, backend):
        if backend not in cls._registry:
            raise ValueError(f"{backend} is none of {sorted(cls._registry)}")
        return cls._registry[backend]

    @classmethod
    def new(cls, backend, *args, **kwargs):
        return cls.get(backend)(*args, **kwargs)


class CheckpointEngine(ABC):
    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self): ...

    @classmethod
    @abstractmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata): ...

    @abstractmethod
    def init_process_group(self, **kwargs): ...

    @abstractmethod
    def finalize(self): ...

    @abstractmethod
    async def send_weights(self, weights, global_steps=None): ...

    @abstractmethod
    async def receive_weights(self, global_steps=None): ...
