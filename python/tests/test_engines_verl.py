"""verl's checkpoint engine, called as its manager calls it.

The interface is verl's where it is installed. Where it is not, it is a double with that of 0.9.1.
"""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import numpy
import pytest
from engines_support import Package, assert_implements

import gradfs

torch = pytest.importorskip("torch")

VERL = Package("verl", "0.9.1")


@pytest.fixture(scope="module", autouse=True, params=[VERL], ids=lambda package: package.id)
def package(request):
    """verl or its double, and `gradfs_verl` in the path, as for the workers of a job."""
    with request.param.importable("gradfs_verl"), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).resolve().parents[2] / "examples" / "verl")
        yield request.param


@pytest.fixture(params=["one_process", "shards"])
def model(request):
    """The model in a mount that has the job itself, or in a mount of shards."""
    start = request.getfixturevalue("start" if request.param == "one_process" else "mounted")
    return gradfs.open(start({"w": numpy.zeros(8, "f4"), "b": numpy.zeros(2, "f4")}, "--reducer", "assign"))


def engines(model, actors, workers, **options):
    """Engines of all ranks, made by the name of the backend and connected by their topology."""
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs

    import_external_libs("gradfs_verl")
    options.update(bucket_size=1 << 20, path=model.path)
    made = [CheckpointEngineRegistry.new("gradfs", is_master=rank == 0, **options) for rank in range(actors)]
    made += [CheckpointEngineRegistry.new("gradfs", **options) for _ in range(workers)]
    connect(made, actors)
    return made[:actors], made[actors:]


def connect(made, actors):
    metadata = [engine.prepare() for engine in made]
    topology = type(made[0]).build_topology(actors, len(made) - actors, metadata)
    for group, arguments in zip((made[:actors], made[actors:]), topology):
        for rank, engine in enumerate(group):
            engine.init_process_group(**{name: values[rank] for name, values in arguments.items()})


def sent(step):
    """The tensors of a step, whose elements are all different."""
    return {"b": torch.arange(2.0) + 100 * step, "w": torch.arange(8.0) - 100 * step}


def pairs(step):
    for name, tensor in sent(step).items():
        yield name, tensor.requires_grad_()


async def received(engine, step):
    return {name: tensor.clone() async for name, tensor in engine.receive_weights(global_steps=step)}


async def updated(senders, receivers, step):
    sending = [engine.send_weights(pairs(step), global_steps=step) for engine in senders]
    got = [asyncio.create_task(received(engine, step)) for engine in receivers]
    await asyncio.sleep(0.1)
    await asyncio.gather(*sending)
    return await asyncio.gather(*got)


def assert_are(tensors, step):
    wanted = sent(step)
    assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_a_double_of_verl_has_its_interface(package):
    of_double, real = package.interfaces("verl.checkpoint_engine.base", "verl.utils.import_utils")
    assert of_double == real


def test_verl_has_the_backend_by_its_module(model):
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

    senders, receivers = engines(model, 2, 1)
    backend = CheckpointEngineRegistry.get("gradfs")
    assert {type(one) for one in (*senders, *receivers)} == {backend}
    assert_implements(backend, CheckpointEngine)
    assert backend.wire_format == "named_tensors"
    # What the topology says is passed by name.
    for kwargs in backend.build_topology(2, 1, [one.prepare() for one in (*senders, *receivers)]):
        inspect.signature(senders[0].init_process_group).bind(**kwargs)
        assert {len(values) for values in kwargs.values()} <= {1, 2}
    for tensors in asyncio.run(updated(senders, receivers, 3)):
        assert_are(tensors, 3)


def test_workers_of_verl_get_the_weights_of_each_update(model):
    senders, receivers = engines(model, 2, 2)
    for step in (1, 2):
        for tensors in asyncio.run(updated(senders, receivers, step)):
            assert_are(tensors, step)
        assert model.version == step
        for engine in (*senders, *receivers):
            engine.finalize()
        connect([*senders, *receivers], 2)


def test_workers_of_verl_refuse_the_weights_of_another_step(model):
    senders, receivers = engines(model, 1, 1, timeout=0.2)
    with pytest.raises(gradfs.Timeout, match="no version newer than 0"):
        asyncio.run(received(receivers[0], 5))
    asyncio.run(senders[0].send_weights(pairs(4), global_steps=4))
    with pytest.raises(gradfs.Refused, match="version 1 is of step 4, and not of 5"):
        asyncio.run(received(receivers[0], 5))
    assert_are(asyncio.run(received(receivers[0], 4)), 4)
