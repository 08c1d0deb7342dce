"""TRL: the weights of `AsyncGRPOTrainer` go through a model, and vLLM's servers load each version from its path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, final

from gradfs import model
from gradfs.engines.pinned import Pinned
from gradfs.engines.server import Server
from gradfs.errors import Closed
from gradfs.model import Model


@final
class VllmServer(Server):
    """A server of vLLM in its development mode (`VLLM_SERVER_DEV_MODE=1`), which reloads versions from their paths.

    Requests under way end first, and cached prefixes are forgotten. After a failure, the server stays paused, as its
    weights may be those of two versions.
    """

    def load(self, version: Pinned) -> int:
        self.pause()
        self.reload(version)
        self.resume()
        return version.version

    def reload(self, version: Pinned) -> None:
        """The same for a server that is paused."""
        told = {"weights_path": version.hf}
        self.post("/collective_rpc", {"method": "reload_weights", "timeout": self._timeout, "kwargs": told})
        self.post("/reset_prefix_cache", {})

    def pause(self) -> None:
        """Lets requests under way end, and takes no others."""
        self.post("/pause?mode=wait", {})

    def resume(self) -> None:
        """Takes requests again."""
        self.post("/resume", {})


@final
class WeightTransfer:
    """`AsyncGRPOTrainer(…, weight_transfer=WeightTransfer(path, VllmServer(url)))`: TRL's `WeightTransferProtocol`.

    Each sync makes a version, which the servers load while they are paused. Without servers, whoever samples follows the
    model by itself. The trainer has to send all tensors of the model, so none of its parameters may be frozen.
    """

    def __init__(self, path: str | os.PathLike[str], *servers: VllmServer) -> None:
        self._path, self._servers = os.fspath(path), servers
        self._of: Model | None = None
        self.version: int | None = None
        """The version that was sent last."""

    def init_weight_transfer(self) -> None:
        """Opens the model."""
        self._of = model.open(self._path)

    def pause(self) -> None:
        """Pauses the servers."""
        for server in self._servers:
            server.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publishes what the trainer sends, and has the servers load it."""
        if self._of is None:
            raise Closed("init_weight_transfer comes first")
        self.version = self._of.publish((name, tensor.detach().cpu()) for name, tensor in iterator)
        if self._servers:
            with Pinned(self._of) as version:
                for server in self._servers:
                    server.reload(version)

    def resume(self) -> None:
        """Has the servers go on."""
        for server in self._servers:
            server.resume()

    def destroy(self) -> None:
        """Lets go of the model."""
        if self._of is not None:
            self._of.close()
        self._of = None
