"""vLLM's weight transfer: an engine samples with each version of a tiny model that a trainer sends.

The engine is vLLM itself, on CPUs, where it is installed. Where it is not, it is a double with its interface at 0.32.0.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from engines_support import Package, assert_implements, tiny_llama

import gradfs
from gradfs.engines import vllm as engine_of

if sys.version_info < (3, 11):
    pytest.skip("vLLM 0.32 needs Python 3.11", allow_module_level=True)
torch = pytest.importorskip("torch")

VLLM = Package("vllm", "0.32.0")
PROMPTS = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [7, 5, 40, 6]}]


@pytest.fixture(scope="module", autouse=True, params=[VLLM], ids=lambda package: package.id)
def package(request, tmp_path_factory):
    """vLLM or its double, for which the entry points of gradfs are installed."""
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {of}" for name, of in points.items())]
    installed = tmp_path_factory.mktemp("installed")
    about = installed / "entry_points_of_gradfs-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: entry-points-of-gradfs\nVersion: 0\n")
    (about / "entry_points.txt").write_text("\n".join(lines))
    with request.param.importable("gradfs.engines.vllm_transfer"), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(installed)
        if request.param.is_double:
            engine_of.register.cache_clear()
        yield request.param
    if request.param.is_double:
        engine_of.register.cache_clear()


@pytest.fixture(scope="module")
def llm(package, tmp_path_factory):
    """An engine that has loaded version 0 from the files that the model is made of, and the module of these."""
    import vllm

    checkpoint = tmp_path_factory.mktemp("checkpoint")
    module = tiny_llama(checkpoint)
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    yield checkpoint, module, vllm.LLM(
        model=str(checkpoint), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64,
        max_num_seqs=2, weight_transfer_config={"backend": "gradfs"},
    )  # fmt: skip


@pytest.fixture(params=["one_process", "shards"])
def model(request, llm):
    """The model in a mount that has the job itself, or in a mount of shards."""
    checkpoint, _, _ = llm
    if request.param == "one_process":
        start, options = request.getfixturevalue("start"), ("--with-files", checkpoint)
    else:
        start, options = request.getfixturevalue("mounted"), ()
    return gradfs.open(start(checkpoint / "model.safetensors", "--reducer", "assign", *options))


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


def assert_has(llm, module, package):
    """vLLM packs weights of linear layers on CPUs, so what it samples shows them. A double shows the bytes, too."""
    assert sampled(llm) == expected(module)
    if package.is_double:
        held, wanted = worker_of(llm).model.of.state_dict(), module.state_dict()
        assert held.keys() == wanted.keys() and all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_a_double_of_vllm_has_its_interface(package):
    of_double, real = package.interfaces(
        "vllm.distributed.weight_transfer.base",
        "vllm.distributed.weight_transfer.factory",
        "vllm.model_executor.model_loader.checkpoint_weight_patch",
    )
    assert of_double == real


@pytest.mark.parametrize("model", ["one_process"], indirect=True)
def test_vllm_has_the_backend_by_the_entry_point_of_the_package(package, llm, model):
    from vllm.distributed.weight_transfer import ModuleSource, base

    from gradfs.engines import vllm_transfer

    _, module, engine = llm
    assert type(worker_of(engine)) is vllm_transfer.GradfsEngine
    assert_implements(vllm_transfer.GradfsEngine, base.WeightTransferEngine)
    assert_implements(vllm_transfer.GradfsTrainerEngine, base.TrainerWeightTransferEngine)
    with pytest.raises(ValueError, match="nowhere"):
        worker_of(engine).parse_init_info({"path": "/", "nowhere": 1})
    changed = trained(module, 6)
    engine_of.trainer(model.path, Client(engine), ModuleSource(changed)).send_weights()
    assert_has(engine, changed, package)


def test_vllm_samples_with_the_weights_that_a_trainer_sends(package, llm, model):
    from vllm.distributed.weight_transfer import ModuleSource, VLLMWeightSyncClient

    _, module, engine = llm
    client = Client(engine)
    assert isinstance(client, VLLMWeightSyncClient)
    for step in range(2):
        changed = trained(module, step)
        trainer = engine_of.trainer(model.path, client, ModuleSource(changed))
        other = engine_of.trainer(model.path, client, ModuleSource(changed), rank=1)
        other.send_weights()
        assert model.version == step
        trainer.send_weights()
        assert_has(engine, changed, package)
        assert model.version == step + 1 and engine.get_weight_version() == str(step + 1)
        assert worker_of(engine).last_was_whole
        trainer.shutdown()
        other.shutdown()


def test_vllm_takes_the_elements_alone_that_have_changed(package, llm, model, monkeypatch):
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
    differ = {name: one != module.get_parameter(name) for name, one in changed.named_parameters()}
    trainer.source, loaded = ModuleSource(changed), []
    with monkeypatch.context() as here:
        load = GradfsEngine._load_changes
        here.setattr(GradfsEngine, "_has_plain_weights", lambda self: True)
        here.setattr(GradfsEngine, "_load_changes", lambda self, one: loaded.append(dict(one)) or load(self, one))
        trainer.send_weights()
        assert worker_of(engine).last_was_whole is False
    # Elements may be listed that have not changed, but not most of them.
    of_update = {name: one.indices.torch().tolist() for name, one in loaded[0].items()}
    for name, of_tensor in differ.items():
        assert set(of_tensor.flatten().nonzero().flatten().tolist()) <= set(of_update.get(name, []))
    assert sum(map(len, of_update.values())) < sum(map(torch.numel, differ.values())) / 10
    assert expected(changed) != expected(module)
    assert_has(engine, changed, package)
    trainer.source = ModuleSource(module)
    trainer.send_weights()
    assert worker_of(engine).last_was_whole is True
    assert_has(engine, module, package)


def test_vllm_refuses_a_version_that_was_passed(package, llm, model):
    from vllm.distributed.weight_transfer import ModuleSource

    _, module, engine = llm
    trainer = engine_of.trainer(model.path, Client(engine), ModuleSource(module))
    trainer.send_weights()
    changed = trained(module, 4)
    model.publish(changed.state_dict())
    engine.start_weight_update()
    with pytest.raises(Exception, match="version 1 was passed by 2"):
        trainer.client.update_weights({"version": 1})
    assert_has(engine, module, package)
    engine.start_weight_update()
    with pytest.raises(Exception, match="no version newer than 8"):
        engine_of.trainer(model.path, Client(engine), ModuleSource(module), timeout=0.1)
        trainer.client.update_weights({"version": 9})
    # After a failure, the next one comes whole.
    trainer.source = ModuleSource(changed)
    trainer.send_weights()
    assert worker_of(engine).last_was_whole
    assert_has(engine, changed, package)


@pytest.mark.parametrize("model", ["one_process"], indirect=True)
def test_vllm_reloads_the_newest_version(package, llm, model):
    _, module, engine = llm
    changed = trained(module, 5)
    model.publish(changed.state_dict())
    assert engine_of.reload(engine, model.path) == 1
    assert_has(engine, changed, package)
