"""Follows vllm/distributed/weight_transfer/__init__.py of vLLM 0.32.0."""

from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

__all__ = [
    "ModuleSource",
    "ParamMeta",
    "TrainerWeightTransferEngine",
    "VLLMWeightSyncClient",
    "WeightSource",
    "WeightTransferEngine",
    "WeightTransferEngineFactory",
    "WeightTransferTrainerFactory",
]
