"""Follows `load_weights` in vllm/model_executor/models/llama.py of vLLM 0.32.0."""

import torch


class Loaded(torch.nn.Module):
    """A model of transformers. Between the two calls of a reload, it keeps what it is given, as vLLM's layers do.

    Other weights than patches take a reload, as they do where vLLM packs them.
    """

    def __init__(self, of):
        super().__init__()
        self.of, self.kept, self.takes_patches = of, None, False

    def load_weights(self, weights):
        weights = [(self.of.get_parameter(name), name, tensor) for name, tensor in weights]
        if self.kept is not None:
            self.kept += weights
        elif self.takes_patches:
            put(weights)
        else:
            raise RuntimeError("whole weights take a reload")
        return {name for _, name, _ in weights}


@torch.no_grad()
def put(weights):
    for parameter, name, tensor in weights:
        if parameter.shape != tensor.shape:
            raise ValueError(f"{name}: {list(tensor.shape)}")
        parameter.copy_(tensor)
