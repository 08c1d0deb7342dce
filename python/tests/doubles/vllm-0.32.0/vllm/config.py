"""Follows vllm/config/weight_transfer.py, and the parts of vllm/config/vllm.py that engines get, of vLLM 0.32.0."""

from dataclasses import dataclass, field


@dataclass
class WeightTransferConfig:
    backend: str = "nccl"


@dataclass
class ParallelConfig:
    world_size: int = 1


@dataclass
class ModelConfig:
    model: str
    quantization: "str | None" = None


@dataclass
class VllmConfig:
    model_config: ModelConfig
    weight_transfer_config: "WeightTransferConfig | None" = None
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
