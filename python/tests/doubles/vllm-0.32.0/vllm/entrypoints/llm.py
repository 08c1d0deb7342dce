"""Follows vllm/entrypoints/llm.py and vllm/entrypoints/rl/offline.py of vLLM 0.32.0.

The one worker is in this process, and the choice is greedy.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from vllm.config import ModelConfig, VllmConfig, WeightTransferConfig
from vllm.model_executor.model_loader import Loaded
from vllm.plugins import load_general_plugins
from vllm.v1.worker.gpu_worker import Worker


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    detokenize: bool = True
    ignore_eos: bool = False


class LLM:
    def __init__(self, model, *, weight_transfer_config, **_):
        from transformers import AutoModelForCausalLM

        load_general_plugins()
        config = VllmConfig(ModelConfig(model), WeightTransferConfig(**weight_transfer_config))
        self._worker = Worker(config, Loaded(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)))
        driver = SimpleNamespace(worker=self._worker)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=driver))
        self._version = "default"

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [getattr(self._worker, method)(*args, **(kwargs or {}))]

    def init_weight_transfer_engine(self, request):
        self.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": request.init_info})

    def start_weight_update(self):
        self.collective_rpc("start_weight_update")

    def update_weights(self, request):
        self.collective_rpc("update_weights", kwargs={"update_info": request.update_info})

    def finish_weight_update(self, weight_version=None):
        self.collective_rpc("finish_weight_update")
        if weight_version is not None:
            self._version = weight_version

    def get_weight_version(self):
        return self._version

    def reset_prefix_cache(self):
        """Does nothing: no prefix is kept."""

    @torch.no_grad()
    def generate(self, prompts, sampling_params, *, use_tqdm=True):
        return [self._sampled(prompt["prompt_token_ids"], sampling_params.max_tokens) for prompt in prompts]

    def _sampled(self, prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self._worker.model.of(torch.tensor([tokens])).logits[0, -1].argmax()))
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens[len(prompt) :])])
