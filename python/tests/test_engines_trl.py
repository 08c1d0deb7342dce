"""TRL's protocol, with servers that are doubles of vLLM's."""

from __future__ import annotations

import inspect
import os
import sys
from collections import defaultdict
from pathlib import Path

import numpy
import pytest
from engines_support import server

import gradfs

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "trl"))
from gradfs_transfer import VllmServer, WeightTransfer


@pytest.fixture
def model(start):
    return gradfs.open(start({"w": numpy.zeros(8, "f4"), "b": numpy.zeros(2, "f4")}, "--reducer", "assign"))


def pairs(value):
    yield "b", torch.full((2,), value, requires_grad=True)
    yield "w", torch.full((8,), value, requires_grad=True)


def synced(transfer, value):
    """The calls of a sync, in TRL's order."""
    transfer.pause()
    transfer.send_weights(pairs(value))
    transfer.resume()


def test_weights_of_trl_become_versions_that_servers_load(model):
    told = []

    def answer(path, body):
        at = body.get("kwargs", {}).get("weights_path")
        told.append((path, at and numpy.fromfile(f"{at}/../weights", "f4").tolist()))
        return 200, {"results": [None]}

    with server(answer) as one, server(answer) as other:
        transfer = WeightTransfer(model.path, VllmServer(one), VllmServer(other))
        with pytest.raises(gradfs.Closed, match="init_weight_transfer comes first"):
            transfer.send_weights(pairs(1.0))
        transfer.init_weight_transfer()
        synced(transfer, 2.0)
        transfer.destroy()
    pause, load, resume = ("/pause?mode=wait", None), ("/collective_rpc", [2.0] * 10), ("/resume", None)
    reset = ("/reset_prefix_cache", None)
    assert told == [pause, pause, load, reset, load, reset, resume, resume]
    assert transfer.version == model.version == 1


def test_weights_of_trl_need_no_server(model):
    transfer = WeightTransfer(model.path)
    transfer.init_weight_transfer()
    for value in (1.0, 2.0):
        synced(transfer, value)
    assert transfer.version == 2 and (model.pull()["w"].numpy() == 2).all()
    with pytest.raises(gradfs.Refused, match="these are missing: w"):
        transfer.send_weights(iter([("b", torch.zeros(2))]))


def test_a_trainer_of_trl_syncs_its_weights_as_versions(model):
    trainer = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    accelerate = pytest.importorskip("accelerate")
    module = torch.nn.Module()
    module.w, module.b = (torch.nn.Parameter(torch.full((size,), 3.0)) for size in (8, 2))
    transfer = WeightTransfer(model.path)
    transfer.init_weight_transfer()
    # What a sync takes of a trainer. The rest wants a model to train, and a server.
    syncing = object.__new__(trainer.AsyncGRPOTrainer)
    syncing.accelerator, syncing.model, syncing.weight_transfer = accelerate.Accelerator(cpu=True), module, transfer
    syncing.rollout_worker, syncing.model_version = None, 0
    syncing._lora_sync, syncing._metrics = False, {"train": defaultdict(list)}
    for value in (3.0, 4.0):
        with torch.no_grad():
            module.w.fill_(value)
        syncing._sync_weight()
        with model.pull() as weights:
            assert (weights["w"].numpy() == value).all() and (weights["b"].numpy() == 3).all()
    assert transfer.version == model.version == syncing.model_version == 2


def test_the_transfer_has_what_trl_calls():
    trainer = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    protocol = trainer.WeightTransferProtocol
    calls = {name: one for name, one in vars(protocol).items() if inspect.isfunction(one) and not name.startswith("_")}
    assert {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"} == set(calls)
    for name, call in calls.items():
        assert list(inspect.signature(getattr(WeightTransfer, name)).parameters) == list(
            inspect.signature(call).parameters
        )


def test_a_server_of_vllm_reloads_a_version_while_it_is_paused(model):
    told = []

    def answer(path, body):
        told.append((path, body))
        return 200, {"results": [None]}

    with server(answer) as url:
        assert VllmServer(url, timeout=30).update(model.path) == 0
    (pause, _), (rpc, body), (reset, _), (resume, _) = told
    assert (pause, rpc, reset, resume) == ("/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/resume")
    assert body["method"] == "reload_weights" and body["timeout"] == 30
    assert body["kwargs"]["weights_path"].startswith(f"/proc/{os.getpid()}/fd/")
