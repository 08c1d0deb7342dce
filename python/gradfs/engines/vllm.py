"""vLLM: weights by its weight transfer, or by reloading a checkpoint.

The package registers the backend `gradfs` with vLLM (`--weight-transfer-config '{"backend": "gradfs"}'`), in each
process that loads plugins. A trainer calls `trainer`. Without one, `reload` loads versions by a path.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from gradfs.engines.pinned import pin

BACKEND = "gradfs"
_TRANSFER = "gradfs.engines.vllm_transfer"


@functools.cache
def register() -> None:
    """Makes vLLM know the weight transfer backend `gradfs`, once. vLLM calls this where it loads plugins."""
    factories = _vllm("vllm.distributed.weight_transfer.factory")
    factories.WeightTransferEngineFactory.register_engine(BACKEND, _TRANSFER, "GradfsEngine")
    factories.WeightTransferTrainerFactory.register_engine(BACKEND, _TRANSFER, "GradfsTrainerEngine")


def trainer(
    path: str | os.PathLike[str],
    client: Any,
    source: Any,
    *,
    rank: int = 0,
    changes: bool = True,
    timeout: float = 600.0,
) -> Any:
    """The trainer's side: `send_weights()` publishes the weights of `source`, and has vLLM take that version.

    `client` and `source` are vLLM's, such as `HTTPVLLMWeightSyncClient` and `ModuleSource`. Each rank of a trainer
    makes one, and rank 0 publishes. Workers have `timeout` seconds to see a version. They read the elements alone that
    differ, where the mount knows these; `changes=False` is for models whose loaders in vLLM take no such patches.
    """
    register()
    factories, transfer = _vllm("vllm.distributed.weight_transfer.factory"), _vllm(_TRANSFER)
    info = transfer.GradfsTrainerInitInfo(os.fspath(path), changes, timeout, rank=rank)
    return factories.WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def reload(llm: Any, path: str | os.PathLike[str], timeout: float = 600.0) -> int:
    """Has an `LLM` of this host load the newest version, forgets cached prefixes, and returns the version's number."""
    with pin(path) as version:
        llm.collective_rpc("reload_weights", timeout=timeout, kwargs={"weights_path": version.hf})
    llm.reset_prefix_cache()
    return version.version


def _vllm(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"gradfs.engines.vllm: vLLM 0.32 or newer is not installed: {error}") from error
