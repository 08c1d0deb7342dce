"""verl's checkpoint engine, called as its manager calls it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy
import pytest

import gradfs

base = pytest.importorskip("verl.checkpoint_engine.base")
torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "verl"))


@pytest.fixture
def model(start):
    return gradfs.open(start({"w": numpy.zeros(8, "f4"), "b": numpy.zeros(2, "f4")}, "--reducer", "assign"))


def engines(model, actors, workers, **options):
    """Engines of all ranks, made by the name of the backend and connected by their topology."""
    from verl.utils.import_utils import import_external_libs

    import_external_libs("gradfs_verl")
    made = [
        base.CheckpointEngineRegistry.new("gradfs", bucket_size=1 << 20, path=model.path, **options)
        for _ in range(actors + workers)
    ]
    connect(made, actors)
    return made[:actors], made[actors:]


def connect(made, actors):
    metadata = [engine.prepare() for engine in made]
    topology = type(made[0]).build_topology(actors, len(made) - actors, metadata)
    for group, arguments in zip((made[:actors], made[actors:]), topology):
        for rank, engine in enumerate(group):
            engine.init_process_group(**{name: values[rank] for name, values in arguments.items()})


def pairs(value):
    yield "b", torch.full((2,), value, requires_grad=True)
    yield "w", torch.full((8,), value, requires_grad=True)


async def received(engine, step):
    return {name: tensor.clone() async for name, tensor in engine.receive_weights(global_steps=step)}


async def updated(senders, receivers, value, step):
    sent = [engine.send_weights(pairs(value), global_steps=step) for engine in senders]
    got = [asyncio.create_task(received(engine, step)) for engine in receivers]
    await asyncio.sleep(0.1)
    await asyncio.gather(*sent)
    return await asyncio.gather(*got)


def test_workers_of_verl_get_the_weights_of_each_update(model):
    senders, receivers = engines(model, 2, 2)
    for step in (1, 2):
        for tensors in asyncio.run(updated(senders, receivers, float(step), step)):
            assert set(tensors) == {"w", "b"} and all((tensor == step).all() for tensor in tensors.values())
        assert model.version == step
        for engine in (*senders, *receivers):
            engine.finalize()
        connect([*senders, *receivers], 2)


def test_workers_of_verl_refuse_the_weights_of_another_step(model):
    senders, receivers = engines(model, 1, 1, timeout=0.2)
    with pytest.raises(gradfs.Timeout, match="no version newer than 0"):
        asyncio.run(received(receivers[0], 5))
    asyncio.run(senders[0].send_weights(pairs(1.0), global_steps=4))
    with pytest.raises(gradfs.Refused, match="version 1 is of step 4, and not of 5"):
        asyncio.run(received(receivers[0], 5))
