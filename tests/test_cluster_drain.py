"""A shard is drained: its blocks move to others while the job runs, as docs/operate/cluster.md promises it."""

import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from cluster import Shard
from conftest import gradfs_binary
from filetools import BLOCK, array, eventually, takes, write_safetensors
from wire import HEADER_BYTES, MESSAGES, REGISTRY, Peer

SIZE = 9 * BLOCK + 1236
ELEMENTS = SIZE // 4


@pytest.fixture
def apart(cluster):
    """Clusters of which no shard is the registry: call it with a number of shards, and whether a proxy is in front of
    the registry, which is `one.way` then."""
    registries = []

    def start(shards, proxied=False):
        one = cluster(0)
        registries.append(Shard(command="registry"))
        one.registry = registries[-1].address
        if proxied:
            one.way = one.proxy()
            one.way.target, one.registry = one.registry, one.way.address
        for _ in range(shards):
            one.add_shard()
        return one

    yield start
    for registry in registries:
        registry.kill()


def model(one, name="m", **settings):
    options = {"size": SIZE, "block_size": BLOCK, "reducer": "adam", "timeout": 20, "lease": 10, **settings}
    one.create(name, **options)
    return one


def shown(mount, learner=None):
    """The newest weights."""
    return np.frombuffer(mount.weights(learner), "<f4")


def train(one, steps, at=0):
    """Contributions of a mount of its own; the weights afterwards."""
    mount = one.mount()
    for step in range(at, at + steps):
        mount.contribute(np.random.default_rng(step).standard_normal(ELEMENTS).astype("<f4"))
    weights = shown(mount)
    assert mount.stop() == 0
    return weights


def drain(one, shard, *args, **options):
    done = one.run("drain", shard.address, *args, **options)
    assert done.returncode == 0, done.stderr
    assert ("it can be stopped" in done.stdout) == (one.registry != shard.address), done.stdout
    holds = one.ask(shard)
    assert holds["models"] == [] and holds["incoming"] == [], holds
    return done


def epochs(one):
    """Model -> block maps that shards hold a partition under."""
    found = {}
    for shard in one.shards:
        for partition in one.ask(shard)["models"] if shard.running() else []:
            found.setdefault(partition["name"], set()).add(partition["epoch"])
    return found


def other_than(one, *shards):
    return next(shard for shard in one.shards if shard not in shards)


def moving(one, coordinator):
    """How far the move is, as the coordinator says."""
    return one.partition(coordinator, "m")["coordinator"]["moving"]


def at_put(one, act):
    """`act` is given the first "put" of a new map to the registry, and each "answer" over that connection. What it returns
    goes on."""
    put, hit = bytes([MESSAGES["Registry"], REGISTRY["Put"]]), []

    def rule(connection, direction, data):
        if direction == "up" and not hit and data[HEADER_BYTES : HEADER_BYTES + 2] == put:
            hit.append(connection)
            return act("put", data)
        return act("answer", data) if direction == "down" and connection in hit else data

    one.way.rule = rule


def half_a_step(one, **settings):
    """The mount of a job of which `quick` has committed its step, and `slow` has not."""
    model(one, learners=2, reducer="sum", lease=0, **settings)
    mount = one.mount()
    mount.join("quick", "slow")
    mount.contribute(np.ones(ELEMENTS, "<f4"), learner="quick")
    return mount


@contextmanager
def held_up(one, **settings):
    """A job of which `quick` has committed its step, and `slow` has not; and its mount."""
    mount = half_a_step(one, **settings)
    yield mount
    mount.contribute(np.ones(ELEMENTS, "<f4"), learner="slow")
    assert (shown(mount, "slow") == 2).all() and (shown(mount, "quick") == 2).all(), "the job goes on where it is"
    assert mount.stop() == 0


@contextmanager
def draining(one, shard, *args):
    """`gradfs drain` as it waits for the step under way."""
    coordinator = one.coordinator_shard("m")
    words = [gradfs_binary(), "drain", shard.address, *args, "--registry", one.registry]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(list(map(str, words)), text=True, **pipes) as command:
        try:
            eventually(lambda: (moving(one, coordinator) or {}).get("stage") == "waiting for the step")
            yield command
        finally:
            command.kill()


@contextmanager
def drained_meanwhile(one, gone):
    """The model moves off the shard, once."""
    with ThreadPoolExecutor() as pool:
        drains = pool.submit(one.run, "drain", gone.address)
        yield drains
        assert drains.result(300).returncode == 0, drains.result().stderr
    assert epochs(one) == {"m": {2}}


def marked(one):
    return [shard["draining"] for shard in one.status()["shards"]]


def incoming(one):
    return [one.ask(shard)["incoming"] for shard in one.shards]


def drains_and_stops(apart, which):
    """Weights and optimizer state go on as if nothing had been. Whoever stays while another one takes the place keeps
    what it has, in the memory that it has."""
    quiet, one = model(apart(3)), model(apart(3))
    assert (train(one, 3) == train(quiet, 3)).all()
    coordinator = one.coordinator_shard("m")
    contributions = one.coordinator("m")["contributions"]
    gone = coordinator if which == "coordinator" else other_than(one, coordinator)
    before = {shard: one.partition(shard, "m") for shard in one.shards}
    new = one.add_shard() if which == "replaced" else None
    drain(one, gone)
    if new:
        assert one.partition(new, "m")["blocks"] == before[gone]["blocks"]
        stay = [shard for shard in before if shard is not gone]
        assert all(one.partition(shard, "m")["memory_bytes"] == before[shard]["memory_bytes"] for shard in stay)
    assert gone.stop() == 0
    assert (one.coordinator_shard("m") is coordinator) == (which != "coordinator")
    assert one.coordinator("m")["contributions"] == contributions
    assert (train(one, 3, at=3) == train(quiet, 3, at=3)).all()
    status = one.status()
    assert [shard["address"] for shard in status["shards"]] == [s.address for s in one.shards if s is not gone]
    assert sum(shard["models"][0]["blocks"] for shard in status["shards"]) == 10
    assert epochs(one) == {"m": {2}}


def test_a_drained_shard_can_be_stopped_and_nothing_is_lost(apart):
    drains_and_stops(apart, "other")


def test_a_coordinator_that_is_drained_hands_the_job_over(apart):
    drains_and_stops(apart, "coordinator")


def test_another_shard_takes_the_place_of_a_drained_one(apart):
    drains_and_stops(apart, "replaced")


def test_optimizer_steps_of_tensors_move_with_the_model(apart, tmp_path):
    """Tensors that were written in different steps go on as if nothing had been, though the coordinator moves, too."""
    shapes = {"a": BLOCK // 4 + 100, "b": BLOCK // 2, "c": 50}
    zeros = {name: ("F32", (shape,), bytes(4 * shape)) for name, shape in shapes.items()}
    path = write_safetensors(tmp_path / "model.safetensors", zeros)

    def steps(one, names):
        mount = one.mount()
        for number, name in enumerate(names):
            at = 4 * sum(shape for other, shape in shapes.items() if other < name)
            mount.contribute(np.full(shapes[name], number + 1, "<f4"), offset=at)
        weights = mount.weights()
        assert mount.stop() == 0
        return weights

    quiet, one = (model(apart(3), size=None, model=path, weight_decay=0.1) for _ in range(2))
    assert steps(one, "abbc") == steps(quiet, "abbc")
    coordinator = one.coordinator_shard("m")
    drain(one, coordinator)
    assert coordinator.stop() == 0
    assert steps(one, "acb") == steps(quiet, "acb")


def test_all_models_of_a_shard_move_and_it_takes_no_more(apart):
    one = apart(3)
    for name in ("a", "b", "c"):
        model(one, name)
    gone = one.shards[1]
    assert "3 model(s) moved" in drain(one, gone).stdout
    assert [shard["draining"] for shard in one.status()["shards"]] == [False, True, False]
    # Said again, and by its number.
    done = one.run("drain", gone.number)
    assert done.returncode == 0 and "0 model(s) moved" in done.stdout, done.stderr
    model(one, "d", shards=2)
    assert one.ask(gone)["models"] == []
    assert epochs(one) == {"a": {2}, "b": {2}, "c": {2}, "d": {1}}


def test_a_shard_that_is_the_registry_is_said_to_have_to_stay(cluster):
    one = model(cluster(2))
    done = drain(one, one.shards[0])
    assert "it is the registry" in done.stdout
    train(one, 1)


def test_without_another_shard_nothing_moves(cluster):
    one = model(cluster(1))
    done = one.run("drain", one.shards[0].address)
    assert done.returncode == 1 and "start another shard first" in done.stderr, done.stderr
    train(one, 1)
    one.add_shard()
    # Now it goes on where it stopped.
    drain(one, one.shards[0])


def test_a_step_that_does_not_end_is_said_with_who_holds_it_up(apart):
    one = apart(2)
    with held_up(one):
        with takes(1, 6):
            done = one.run("drain", one.shards[1].address, "--timeout", 1)
        assert done.returncode == 1 and "waits for the learner(s) slow" in done.stderr, done.stderr
    assert epochs(one) == {"m": {1}}
    drain(one, one.shards[1])


def test_draining_two_shards_at_once_leaves_the_model_on_the_third(apart):
    one = model(apart(3))
    before = train(one, 2)
    gone = one.shards[:2]
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(lambda shard: one.run("drain", shard.address), gone))
    # Before the second was marked the first may have moved blocks there.
    assert all(end.returncode == 0 for end in ends), [end.stderr for end in ends]
    assert [model["blocks"] for model in one.ask(one.shards[2])["models"]] == [10]
    for shard in gone:
        drain(one, shard)
        assert shard.stop() == 0
    assert (shown(one.mount()) == before).all()


def test_a_move_that_fails_changes_nothing(apart):
    """A shard that was to take blocks stops in the middle, or one that has them does not answer."""
    one = model(apart(3), reducer="sum")
    coordinator = one.coordinator_shard("m")
    gone, other = [shard for shard in one.shards if shard is not coordinator]
    for hung in (other, gone):
        before = train(one, 1)
        hung.pause()
        with takes(1, 25):
            done = one.run("drain", gone.address, "--timeout", 3, timeout=300)
        assert done.returncode == 1 and hung.address in done.stderr, done.stderr
        hung.resume()
        assert epochs(one) == {"m": {1}}
        assert (train(one, 1, at=1) != before).any()
        eventually(lambda: all(one.ask(shard)["incoming"] == [] for shard in one.shards), deadline=20)
    drain(one, gone)


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_registry_whose_answer_is_lost_is_asked_until_it_says(apart, lost):
    """Whether the new map is in force is not known for a while: the job waits, and then goes on under one map."""
    one = apart(3, proxied=True)
    model(one, reducer="sum")
    before = train(one, 2)
    seen = threading.Event()

    def act(what, data):
        # The answer never comes, nor does anything else for a while.
        seen.set()
        return data if (what, lost) == ("put", "answer") else None

    at_put(one, act)
    gone = other_than(one, one.coordinator_shard("m"))
    with drained_meanwhile(one, gone) as drains:
        assert seen.wait(300)
        one.way.hold()
        time.sleep(1.5)
        assert not drains.done()
        one.way.release()
    assert (shown(one.mount()) == before).all()


def test_an_unreachable_registry_keeps_a_model_where_it_is(apart):
    one = apart(3, proxied=True)
    model(one, reducer="sum")
    coordinator = one.coordinator_shard("m")
    gone = other_than(one, coordinator)
    mount = one.mount()
    one.way.hold()
    peer = one.ask(coordinator)["models"][0]
    asking = Peer(coordinator.address)
    assert asking.greet("admin").name == "Welcome"
    answer = asking.request("Move", "m", peer["generation"], gone.number, 20_000, 0, epoch=0)
    assert answer.name == "Refused" and "registry" in str(answer.fields), answer
    asking.socket.close()
    # The job goes on without it.
    mount.contribute(np.ones(ELEMENTS, "<f4"))
    assert (shown(mount) == 1).all()
    one.way.release()
    drain(one, gone)


def test_a_registry_that_is_gone_when_all_is_moved_leaves_the_job_where_it_is(apart):
    """All blocks are there, and the coordinator's state is handed over: it goes on where it was, with the clients that it
    has."""
    one = apart(3, proxied=True)
    mount = half_a_step(one)
    gone = other_than(one, one.coordinator_shard("m"))
    with draining(one, gone) as command:
        there, one.way.target = one.way.target, "127.0.0.1:1"
        one.way.reset()
        mount.contribute(np.ones(ELEMENTS, "<f4"), learner="slow")
        _, err = command.communicate(timeout=300)
    assert command.returncode == 1 and "registry" in err, err
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: mount.contribute(np.ones(ELEMENTS, "<f4"), learner=name), ("quick", "slow")))
    assert (array(mount.place("quick") / "weights") == 4).all()
    assert epochs(one) == {"m": {1}}
    one.way.target = there
    assert mount.stop() == 0
    eventually(lambda: one.run("status").returncode == 0)
    eventually(lambda: all(one.ask(shard)["incoming"] == [] for shard in one.shards))
    eventually(lambda: len(one.status()["shards"]) == 3, deadline=15)
    drain(one, gone)


def test_a_shard_that_stops_answering_after_the_switch_is_told_when_it_does(apart):
    """The new map is in force from the moment in which the registry has it, whenever others learn of it."""
    one = apart(3, proxied=True)
    model(one, reducer="sum")
    before = train(one, 2)
    coordinator = one.coordinator_shard("m")
    gone = other_than(one, coordinator)
    new = other_than(one, coordinator, gone)

    def act(what, data):
        if what == "put":
            new.pause()
        return data

    at_put(one, act)
    with drained_meanwhile(one, gone) as drains:
        eventually(lambda: one.ask(coordinator)["models"][0]["epoch"] == 2, deadline=20)
        time.sleep(1)
        assert not drains.done()
        new.resume()
    assert (shown(one.mount()) == before).all()


def test_a_new_owner_that_nobody_tells_asks_the_registry(apart):
    """The coordinator that is drained ends in the very moment in which the new map comes into force."""
    one = apart(3, proxied=True)
    model(one, reducer="sum")
    before = train(one, 2)
    coordinator = one.coordinator_shard("m")

    def act(what, data):
        if what == "put":
            return data
        # The registry has the new map; nobody else knows.
        coordinator.kill()

    at_put(one, act)
    done = one.run("drain", coordinator.address, timeout=300)
    assert done.returncode in (0, 1)
    eventually(lambda: epochs(one) == {"m": {2}}, deadline=20)
    mount = one.mount()
    assert (shown(mount) == before).all()
    mount.contribute(np.ones(ELEMENTS, "<f4"))


def test_deleting_a_model_while_it_moves_leaves_nothing_of_it(apart):
    """Whichever comes first."""
    one = apart(3)
    for round in range(6):
        name = f"m{round}"
        one.create(name, size="8MiB", block_size=BLOCK, reducer="adam")
        shard = one.shards[1 + round % 2]
        if one.status()["shards"][1 + round % 2]["draining"]:
            continue
        with ThreadPoolExecutor() as pool:
            drains = pool.submit(one.run, "drain", shard.address, timeout=300)
            time.sleep(0.01 * round)
            deleted = one.run("delete", name, timeout=300)
            drained = drains.result(300)
        assert deleted.returncode == 0, deleted.stderr
        assert drained.returncode in (0, 1), drained.stderr
        holds = lambda: [(one.ask(shard)["models"], one.ask(shard)["incoming"]) for shard in one.shards]
        eventually(lambda: holds() == [([], [])] * 3, deadline=15)
        # It takes models again only under a new number: another one takes its place here.
        assert shard.stop() == 0
        one.shards.remove(shard)
        one.add_shard()


def test_a_failed_drain_is_repeated_by_the_same_command(apart):
    one = model(apart(3))
    gone = other_than(one, one.coordinator_shard("m"))
    for _ in range(3):
        one.run("drain", gone.address, "--timeout", 1)
    drain(one, gone)
    train(one, 1)
