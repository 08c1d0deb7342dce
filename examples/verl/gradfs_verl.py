"""verl: the checkpoint engine `gradfs`, as of its interface in 0.9. This imports verl.

actor_rollout_ref.rollout.checkpoint_engine.backend: gradfs
actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module: gradfs_verl
actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gradfs.path: /mnt/job/model
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from gradfs import model
from gradfs.errors import Refused
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

# Who publishes says by this of which step the weights are.
_STEP = "global_steps"


@CheckpointEngineRegistry.register("gradfs")
class GradfsCheckpointEngine(CheckpointEngine):
    """Rank 0 of the actor publishes a version. The workers of the rollout read it where it lies.

    `path` is the model's on each host, or `gradfs://HOST:PORT/MODEL`. `timeout` are the seconds in which workers have
    to see a version.
    """

    def __init__(self, bucket_size: int, path: str, timeout: float = 600.0, is_master: bool = False) -> None:
        # Nothing goes through a bucket, and the topology says who publishes.
        del bucket_size, is_master
        self._of, self._timeout = model.open(path), timeout
        self._rank, self._newer_than = -1, -1

    def prepare(self) -> dict[str, Any]:
        """The version before this update."""
        return {"version": self._of.version}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 of the actor is the publisher, the other actors are -1, and the rollout counts on from 1."""
        newer_than = metadata[0]["version"]
        actors = [0] + [-1] * (actor_wg_world_size - 1)
        workers = list(range(1, rollout_world_size + 1))
        return tuple({"rank": ranks, "newer_than": [newer_than] * len(ranks)} for ranks in (actors, workers))  # type: ignore[return-value]

    def init_process_group(self, rank: int, newer_than: int) -> None:
        """Takes what the topology says."""
        self._rank, self._newer_than = rank, newer_than

    def finalize(self) -> None:
        """Keeps the model open for the next update."""

    async def send_weights(self, weights: Iterator[tuple[str, Any]], global_steps: int | None = None) -> None:
        """Publishes the weights, as rank 0. Other ranks of the actor take part in what gathers them."""
        if self._rank == 0:
            self._of.publish(((name, one.detach().cpu()) for name, one in weights), {_STEP: str(global_steps)})
        else:
            for _ in weights:
                pass

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """The tensors of the version that is published now, as views of its memory."""
        await asyncio.to_thread(self._of.wait, self._newer_than, self._timeout)
        with self._of.pull() as weights:
            if (step := weights.meta.get(_STEP)) != str(global_steps):
                raise Refused(f"verl: version {weights.version} is of step {step}, and not of {global_steps}")
            for name, view in weights.items():
                yield name, view.torch()
