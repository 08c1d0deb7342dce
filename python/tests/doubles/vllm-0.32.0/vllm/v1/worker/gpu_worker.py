"""Follows vllm/v1/worker/gpu_worker.py of vLLM 0.32.0: the worker's part of weight updates."""

import torch

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import reload_weights


class Worker:
    def __init__(self, vllm_config, model):
        self._config, self.model, self._is_active = vllm_config, model, False
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            vllm_config.weight_transfer_config, vllm_config, torch.device("cpu"), model
        )

    def init_weight_transfer_engine(self, init_info):
        engine = self.weight_transfer_engine
        engine.init_transfer_engine(engine.parse_init_info(init_info))

    def start_weight_update(self):
        if self._is_active:
            raise RuntimeError("an update is active")
        self.weight_transfer_engine.start_weight_update()
        self._is_active = True

    def update_weights(self, update_info):
        if not self._is_active:
            raise RuntimeError("no update is active")
        try:
            self.weight_transfer_engine.update_weights(update_info)
        except BaseException:
            self._is_active = False
            self.weight_transfer_engine.reset_weight_update_target()
            raise

    def finish_weight_update(self):
        if not self._is_active:
            raise RuntimeError("no update is active")
        self.weight_transfer_engine.finish_weight_update()
        self.weight_transfer_engine.reset_weight_update_target()
        self._is_active = False

    def reload_weights(self, weights_iterator=None, weights_path=None, is_checkpoint_format=True):
        reload_weights(self._config, self.model, weights_iterator, weights_path, is_checkpoint_format)
