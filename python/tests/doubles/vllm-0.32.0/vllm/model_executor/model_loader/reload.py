"""Follows vllm/model_executor/model_loader/reload/ of vLLM 0.32.0: layerwise.py and inplace.py."""

from pathlib import Path

from safetensors.torch import load_file

from vllm.model_executor.model_loader import put


def initialize_layerwise_reload(model):
    model.kept = []


def finalize_layerwise_reload(model, model_config):
    kept, model.kept = model.kept, None
    put(kept)


def reload_weights(vllm_config, model, weights_iterator, weights_path, is_checkpoint_format):
    assert weights_iterator is None and is_checkpoint_format
    vllm_config.model_config.model = weights_path
    initialize_layerwise_reload(model)
    for file in sorted(Path(weights_path).glob("*.safetensors")):
        model.load_weights(load_file(file).items())
    finalize_layerwise_reload(model, vllm_config.model_config)
