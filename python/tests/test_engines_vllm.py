"""vLLM itself, on CPUs: a tiny model samples with each version that its weight transfer brings."""

from __future__ import annotations

import os

import pytest
from engines_support import tiny_llama

import gradfs
from gradfs.engines import vllm as engine_of

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

PROMPTS = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [7, 5, 40, 6]}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """An engine that has loaded version 0 from the files that the model is made of, and the module of these."""
    import vllm

    checkpoint = tmp_path_factory.mktemp("checkpoint")
    module = tiny_llama(checkpoint)
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    engine_of.register()
    yield checkpoint, module, vllm.LLM(
        model=str(checkpoint), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64,
        max_num_seqs=2, weight_transfer_config={"backend": "gradfs"},
    )  # fmt: skip


@pytest.fixture
def model(start, llm):
    checkpoint, _, _ = llm
    options = ("--with-files", checkpoint, "--reducer", "assign")
    return gradfs.open(start(checkpoint / "model.safetensors", *options))


def sampled(llm):
    """The tokens that vLLM chooses, greedily, without what it has kept of the prompts."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    wanted = SamplingParams(temperature=0, max_tokens=6, detokenize=False, ignore_eos=True)
    return [list(done.outputs[0].token_ids) for done in llm.generate(PROMPTS, wanted, use_tqdm=False)]


def expected(module):
    """The same of the module itself."""
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt["prompt_token_ids"])
        with torch.no_grad():
            for _ in range(6):
                tokens.append(int(module(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens[len(prompt["prompt_token_ids"]) :])
    return found


def trained(module, seed):
    """A module with other weights, and other choices."""
    import copy

    changed = copy.deepcopy(module)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    assert expected(changed) != expected(module)
    return changed


class Client:
    """vLLM's side for a trainer in the same process: its four calls, on an `LLM`."""

    def __init__(self, llm):
        self._llm = llm

    def init_weight_transfer_engine(self, init_info):
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info))

    def start_weight_update(self):
        self._llm.start_weight_update()

    def update_weights(self, update_info):
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._llm.update_weights(WeightTransferUpdateRequest(update_info))

    def finish_weight_update(self, weight_version=None):
        self._llm.finish_weight_update(weight_version)


def worker_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine


def test_vllm_samples_with_the_weights_that_a_trainer_sends(llm, model):
    from vllm.distributed.weight_transfer import ModuleSource, VLLMWeightSyncClient

    _, module, engine = llm
    client = Client(engine)
    assert isinstance(client, VLLMWeightSyncClient)
    for step in range(2):
        changed = trained(module, step)
        trainer = engine_of.trainer(model.path, client, ModuleSource(changed))
        trainer.send_weights()
        assert sampled(engine) == expected(changed)
        assert model.version == step + 1 and engine.get_weight_version() == str(step + 1)
        assert worker_of(engine).last_was_whole
        trainer.shutdown()


def test_vllm_takes_the_elements_alone_that_have_changed(llm, model, monkeypatch):
    """The mount's part is a double where it has no changes: they are computed of the two versions."""
    from vllm.distributed.weight_transfer import ModuleSource

    from gradfs.engines.vllm_transfer import GradfsEngine

    _, module, engine = llm
    trainer = engine_of.trainer(model.path, Client(engine), ModuleSource(module))
    trainer.send_weights()
    changed = trained(module, 3)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            # vLLM packs the matrices of linear layers on CPUs. What it does not pack it changes in place.
            keep = torch.ones_like(parameter, dtype=torch.bool)
            if "embed" in name or "norm" in name:
                keep[::3] = False
            parameter.copy_(torch.where(keep, module.get_parameter(name), parameter))
    with model.pull() as before:
        old = {name: tensor.clone() for name, tensor in before.torch().items()}
    by_hand(monkeypatch, model, old)
    trainer.source = ModuleSource(changed)
    with monkeypatch.context() as here:
        here.setattr(GradfsEngine, "_has_plain_weights", lambda self: True)
        trainer.send_weights()
    assert worker_of(engine).last_was_whole is False
    assert sampled(engine) == expected(changed) != expected(module)
    trainer.source = ModuleSource(module)
    trainer.send_weights()
    assert worker_of(engine).last_was_whole is True and sampled(engine) == expected(module)


def by_hand(monkeypatch, model, old):
    """Computes changes of what `old` is and what the newest version is, where the mount has no file of them."""
    from gradfs import changes, first_file
    from gradfs.places import Version

    real = changes.since

    def since(place, path, layout, version, base):
        if (found := real(place, path, layout, version, base)) is not None:
            return found
        parts = {}
        with model.pull() as weights:
            about = Version(weights.version, weights.epoch, {})
            for name, tensor in weights.torch().items():
                if len(differ := (tensor != old[name]).flatten().nonzero().flatten()):
                    parts[f"{name}.indices"], parts[f"{name}.values"] = differ.int(), tensor.flatten()[differ]
        first_file.write(model_file := at / "changes.safetensors", parts, {})
        return changes.Changes(layout, about, base, memoryview(bytearray(model_file.read_bytes())))

    import tempfile
    from pathlib import Path

    at = Path(tempfile.mkdtemp())
    monkeypatch.setattr(changes, "since", since)


def test_vllm_refuses_a_version_that_was_passed(llm, model):
    from vllm.distributed.weight_transfer import ModuleSource

    _, module, engine = llm
    trainer = engine_of.trainer(model.path, Client(engine), ModuleSource(module))
    trainer.send_weights()
    model.publish(module.state_dict())
    engine.start_weight_update()
    with pytest.raises(Exception, match="version 1 was passed by 2"):
        trainer.client.update_weights({"version": 1})
    engine.start_weight_update()
    with pytest.raises(Exception, match="no version newer than 8"):
        engine_of.trainer(model.path, Client(engine), ModuleSource(module), timeout=0.1)
        trainer.client.update_weights({"version": 9})
    # After a failure, the next one comes whole.
    trainer.send_weights()
    assert worker_of(engine).last_was_whole and sampled(engine) == expected(module)


def test_vllm_reloads_the_newest_version(llm, model):
    _, module, engine = llm
    changed = trained(module, 5)
    model.publish(changed.state_dict())
    assert engine_of.reload(engine, model.path) == 1
    assert sampled(engine) == expected(changed)
