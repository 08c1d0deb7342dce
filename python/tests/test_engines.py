"""Engines that load versions by a path. SGLang's server is a double with the requests and answers of 0.5.23."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest
from engines_support import server, tiny_llama

import gradfs
from gradfs.engines import pin, sglang, transformers, vllm


def published(model, value):
    return model.publish({name: numpy.full(tensor.shape, value, "f4") for name, tensor in model.layout.items()})


@pytest.fixture
def model(start, tmp_path):
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "config.json").write_text("{}")
    options = ("--reducer", "assign", "--with-files", tmp_path / "beside")
    return gradfs.open(start({"w": numpy.zeros(1000, "f4")}, *options))


def test_importing_engines_imports_no_framework():
    code = "import sys, gradfs.engines\nfrom gradfs.engines import prime_rl, sglang, transformers, vllm\n"
    code += (
        "print([name for name in ('torch', 'numpy', 'transformers', 'vllm', 'sglang', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_an_engine_that_is_not_installed_is_named(monkeypatch, model):
    for name in ("vllm", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    vllm.register.cache_clear()
    with pytest.raises(ImportError, match="gradfs.engines.vllm: vLLM 0.32 or newer is not installed"):
        vllm.register()
    with pytest.raises(ImportError, match="gradfs.engines.transformers: transformers is not installed"):
        transformers.from_pretrained(model.path)


def test_a_pinned_version_stays_for_other_processes(model):
    with pin(model.path) as pinned:
        for value in range(1, 5):
            published(model, value)
        assert pinned.version == 0 and model.version == 4
        code = (
            f"import os; print(sorted(os.listdir({pinned.hf!r})), sum(open({pinned.path + '/weights'!r}, 'rb').read()))"
        )
        done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
        assert done.stdout == "['config.json', 'model.safetensors'] 0\n"
    with pytest.raises(gradfs.Closed, match="version 0 was let go of"):
        _ = pinned.path
    with pin(model.path, 4) as pinned:
        assert pinned.version == 4
    with pytest.raises(gradfs.GradfsError, match="version 0 is not here") as error:
        pin(model.path, 0)
    assert error.value.errno == errno.ENOENT


# `UpdateWeightFromDiskReqInput` in sglang/srt/managers/io_struct.py of SGLang 0.5.23, without its `BaseReq`.
SGLANG_TAKES = {
    "model_path": str, "load_format": str, "abort_all_requests": bool, "weight_version": str, "is_async": bool,
    "torch_empty_cache": bool, "keep_pause": bool, "recapture_cuda_graph": bool, "token_step": int,
    "flush_cache": bool, "manifest": dict,
}  # fmt: skip


def sglang_that(told, model=None):
    """Answers of SGLang's route, and what it reads where it is told to load."""

    def answer(path, body):
        assert path == "/update_weights_from_disk" and "model_path" in body
        assert all(type(value) is SGLANG_TAKES[name] for name, value in body.items())
        if model is not None:
            # The version is passed while the server loads.
            published(model, model.version + 1)
        loaded = numpy.fromfile(Path(body["model_path"]).parent / "weights", "f4")
        told.append({**body, "value": loaded[0].item(), "files": sorted(os.listdir(body["model_path"]))})
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    return answer


def test_sglang_loads_a_version_that_stays_until_it_has_answered(model):
    told = []
    published(model, 1)
    with server(sglang_that(told, model)) as url:
        assert sglang.Server(url, flush_cache=False).update(model.path) == 1
    assert len(told) == 1 and model.version == 2
    assert told[0]["value"] == 1 and told[0]["weight_version"] == "1" and told[0]["flush_cache"] is False
    assert told[0]["files"] == ["config.json", "model.safetensors"]


def test_sglang_follows_a_model(model):
    told, stop = [], threading.Event()

    def answer(path, body):
        reply = sglang_that(told)(path, body)
        if len(told) == 3:
            stop.set()
        else:
            published(model, len(told))
        return reply

    with server(answer) as url:
        assert sglang.Server(url).follow(model.path, stop=stop, timeout=60) == 2
    assert [(one["weight_version"], one["value"]) for one in told] == [("0", 0), ("1", 1), ("2", 2)]


def test_what_an_engines_server_refuses_is_an_error_with_its_words(model):
    refusals = {"status": 400, "told": {"success": False, "message": "no such shape"}}
    with server(lambda *_: (refusals["status"], refusals["told"])) as url:
        with pytest.raises(gradfs.Refused, match=r"update_weights_from_disk: 400: .*no such shape"):
            sglang.Server(url).update(model.path)
        refusals.update(status=200)
        with pytest.raises(gradfs.Refused, match="has not loaded version 0: .*no such shape"):
            sglang.Server(url).update(model.path)
        refusals.update(status=500, told="worker died")
        with pytest.raises(gradfs.Refused, match='update_weights_from_disk: 500: "worker died"'):
            sglang.Server(url).update(model.path)
    with pytest.raises(gradfs.GradfsError, match="refused") as error:
        sglang.Server(url).update(model.path)
    assert error.value.errno == errno.ECONNREFUSED
    with pytest.raises(gradfs.Refused, match="no http:// or https:// URL"):
        sglang.Server("localhost:30000").update(model.path)


def test_an_engines_server_that_does_not_answer_is_a_timeout(model):
    release = threading.Event()
    with server(lambda *_: (200 if release.wait(60) else 500, {})) as url:
        begun = time.monotonic()
        with pytest.raises(gradfs.Timeout, match="no answer within 0.3 s"):
            sglang.Server(url, timeout=0.3).update(model.path)
        assert time.monotonic() - begun < 30
        release.set()


def test_an_engines_server_that_answers_byte_by_byte_is_a_timeout(model):
    over = threading.Event()

    def drip(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
            while not over.wait(0.05):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=[listener])
        thread.start()
        try:
            with pytest.raises(gradfs.Timeout, match="no answer within 0.5 s"):
                sglang.Server(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5).update(model.path)
        finally:
            over.set()
            thread.join(60)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def llama(request, start, tmp_path):
    """A model, the module that it was made of, and whether two of its weights are one."""
    module = tiny_llama(tmp_path / "checkpoint", request.param)
    options = ("--with-files", tmp_path / "checkpoint", "--reducer", "assign", "--retain", "2")
    return gradfs.open(start(tmp_path / "checkpoint" / "model.safetensors", *options)), module, request.param


def shifted(model, by):
    with model.pull() as weights:
        return model.publish({name: tensor + by for name, tensor in weights.torch().items()})


def same(module, other, by=0.0):
    torch = pytest.importorskip("torch")
    mine, theirs = module.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.allclose(mine[name], theirs[name] + by) for name in mine)


def test_transformers_loads_a_version_by_its_path(llama):
    model, first, _ = llama
    shifted(model, 1)
    newest, version = transformers.from_pretrained(model.path)
    assert version == 1 and same(newest, first, 1)
    older, version = transformers.from_pretrained(model.path, version=0)
    assert version == 0 and same(older, first)


def test_a_loaded_module_takes_each_version_in_place(llama):
    torch = pytest.importorskip("torch")
    model, first, is_tied = llama
    module, _ = transformers.from_pretrained(model.path)
    places = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    assert is_tied == (places["lm_head.weight"] == places["model.embed_tokens.weight"])
    assert is_tied == ("lm_head.weight" not in model.layout)
    follower = gradfs.Follower(model.path, lambda _, update: transformers.load(update, module), changes=True)
    for step in range(3):
        assert follower.poll() and same(module, first, step)
        shifted(model, 1)
    assert places == {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    ids = torch.tensor([[1, 2, 3]])
    fresh, _ = transformers.from_pretrained(model.path)
    assert follower.poll()
    assert torch.equal(module(ids).logits, fresh(ids).logits)
    narrow = tiny_half(module)
    with model.pull() as weights:
        transformers.load(weights, narrow)
    assert same(narrow.float(), fresh.bfloat16().float())


def tiny_half(module):
    import copy

    return copy.deepcopy(module).bfloat16()


def test_a_module_takes_what_has_changed(llama, tmp_path):
    torch = pytest.importorskip("torch")
    from gradfs import first_file
    from gradfs.places import Version

    model, first, _ = llama
    name = "model.embed_tokens.weight"
    parts = {f"{name}.indices": torch.tensor([0, 65]), f"{name}.values": torch.tensor([5.0, 6.0])}
    first_file.write(tmp_path / "c.safetensors", parts, {})
    file = memoryview(bytearray((tmp_path / "c.safetensors").read_bytes()))
    module, _ = transformers.from_pretrained(model.path)
    assert transformers.load(gradfs.Changes(model.layout, Version(1, 1, {}), 0, file), module) == 1
    changed = module.state_dict()[name]
    assert (changed[0, 0], changed[1, 1]) == (5, 6)
    # Of one tensor with two names, one list may have elements that have not changed.
    if "lm_head.weight" in model.layout:
        module.lm_head.weight = module.model.embed_tokens.weight
        parts |= {
            "lm_head.weight.indices": torch.tensor([0, 2, 65]),
            "lm_head.weight.values": torch.tensor([5.0, 0, 6.0]),
        }
        parts["lm_head.weight.values"][1] = changed[0, 2]
        first_file.write(tmp_path / "tied.safetensors", parts, {})
        file = memoryview(bytearray((tmp_path / "tied.safetensors").read_bytes()))
        assert transformers.load(gradfs.Changes(model.layout, Version(1, 1, {}), 0, file), module) == 1
        parts["lm_head.weight.values"][1] += 1
        first_file.write(tmp_path / "differ.safetensors", parts, {})
        file = memoryview(bytearray((tmp_path / "differ.safetensors").read_bytes()))
        with pytest.raises(gradfs.Refused, match="are one tensor in the module, and differ"):
            transformers.load(gradfs.Changes(model.layout, Version(1, 1, {}), 0, file), module)
        return
    with torch.no_grad():
        for (row, column), value in zip([(0, 0), (1, 1)], first.state_dict()[name][[0, 1], [0, 1]]):
            changed[row, column] = value
    assert same(module, first)


def test_a_module_that_does_not_fit_is_refused_and_stays(llama):
    torch = pytest.importorskip("torch")
    model, first, is_tied = llama
    shifted(model, 1)
    with model.pull() as weights:
        module, _ = transformers.from_pretrained(model.path, version=0)
        module.model.norm.weight = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(gradfs.Refused, match=r"model.norm.weight: the shape is \[3\], and \[64\]"):
            transformers.load(weights, module)
        module, _ = transformers.from_pretrained(model.path, version=0)
        module.model.extra = torch.nn.Linear(2, 2)
        with pytest.raises(gradfs.Refused, match="model.extra.weight: the model has no such tensor"):
            transformers.load(weights, module)
        del module.model.extra
        with pytest.raises(gradfs.Refused, match="model.norm.weight: the module has no model.norm.other"):
            transformers.load(weights, module, lambda name: name.replace("norm.weight", "norm.other"))
        if not is_tied:
            # Only one of the two is what this version has.
            module.lm_head.weight = module.model.embed_tokens.weight
            with pytest.raises(gradfs.Refused, match="are one tensor in the module, and differ in version 1"):
                transformers.load(weights, module)
    assert torch.equal(module.model.embed_tokens.weight, first.model.embed_tokens.weight)
