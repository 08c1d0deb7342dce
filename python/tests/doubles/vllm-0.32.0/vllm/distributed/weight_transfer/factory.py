"""Follows vllm/distributed/weight_transfer/factory.py of vLLM 0.32.0."""

import importlib
from typing import ClassVar


class _Registered:
    _registry: ClassVar[dict]

    @classmethod
    def register_engine(cls, name, module_path_or_cls, class_name=None):
        if name in cls._registry:
            raise ValueError(f"{name} is registered")
        if isinstance(module_path_or_cls, str) and class_name is None:
            raise ValueError(f"{name}: a module without the name of a class")
        cls._registry[name] = lambda: (
            getattr(importlib.import_module(module_path_or_cls), class_name) if class_name else module_path_or_cls
        )

    @classmethod
    def _of(cls, backend):
        if backend not in cls._registry:
            raise ValueError(f"{backend} is none of {sorted(cls._registry)}")
        return cls._registry[backend]()


class WeightTransferEngineFactory(_Registered):
    _registry: ClassVar[dict] = {}

    @classmethod
    def create_engine(cls, config, vllm_config, device, model):
        return cls._of(config.backend)(config, vllm_config, device, model)


class WeightTransferTrainerFactory(_Registered):
    _registry: ClassVar[dict] = {}

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        return cls._of(init_info.backend).trainer_init(init_info=init_info, client=client, source=source)
