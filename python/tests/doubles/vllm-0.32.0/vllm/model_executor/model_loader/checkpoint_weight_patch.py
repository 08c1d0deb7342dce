"""Follows vllm/model_executor/model_loader/checkpoint_weight_patch.py of vLLM 0.32.0."""

import math
from typing import NamedTuple
from unittest import mock

import torch


class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: "tuple[int, ...]"
    dtype: torch.dtype
    values: torch.Tensor
    indices: "torch.Tensor | None" = None


def load_checkpoint_weight_patches(model, patches, *, max_chunk_bytes=512 << 20, validate_unique_indices=True):
    """Loads sparse patches as tensors with NaN where nothing changes. Whole patches are none of gradfs's."""
    weights = []
    for name, shape, dtype, values, indices in patches:
        assert name and indices is not None and max_chunk_bytes > 0
        if not dtype.is_floating_point or indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: {dtype} at {indices.dtype}")
        if not (values.ndim == indices.ndim == 1 and len(values) == len(indices)) or values.isnan().any():
            raise ValueError(f"{name}: values and indices")
        if len(indices) and not 0 <= indices.min() <= indices.max() < math.prod(shape):
            raise ValueError(f"{name}: an index is not within the tensor")
        if validate_unique_indices and len(indices.unique()) != len(indices):
            raise ValueError(f"{name}: an index is there twice")
        masked = torch.full((math.prod(shape),), math.nan, dtype=dtype)
        masked[indices.long()] = values
        weights.append((name, masked.view(shape)))
    plain = torch.Tensor.copy_

    def where_not_nan(to, source, non_blocking=False):
        return plain(to, torch.where(source.isnan(), to, source.to(to.dtype)))

    with mock.patch.object(torch.Tensor, "copy_", where_not_nan), mock.patch.object(model, "takes_patches", True):
        return model.load_weights(weights)
