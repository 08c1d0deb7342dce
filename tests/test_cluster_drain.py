"""A shard is drained: its blocks move to others while the job runs, as docs/operate/cluster.md promises it."""

import itertools
import json
import os
import re
import signal
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
        for partition in one.ask(shard)["models"] if shard.process.poll() is None else []:
            found.setdefault(partition["name"], set()).add(partition["epoch"])
    return found


def coordinator_shard(one, name="m"):
    return one.coordinator_shard(name)


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
    mount.join("quick"), mount.join("slow")
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
    coordinator = coordinator_shard(one)
    words = [gradfs_binary(), "drain", shard.address, *args, "--registry", one.registry]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(list(map(str, words)), text=True, **pipes) as command:
        try:
            eventually(lambda: (moving(one, coordinator) or {}).get("stage") == "waiting for the step")
            yield command
        finally:
            command.kill()


def marked(one):
    return [shard["draining"] for shard in one.status()["shards"]]


def incoming(one):
    return [one.ask(shard)["incoming"] for shard in one.shards]


def drains_and_stops(apart, which):
    """Weights and optimizer state go on as if nothing had been. Whoever stays while another one takes the place keeps
    what it has, in the memory that it has."""
    quiet, one = model(apart(3)), model(apart(3))
    assert (train(one, 3) == train(quiet, 3)).all()
    coordinator = coordinator_shard(one)
    contributions = one.coordinator("m")["contributions"]
    gone = coordinator if which == "coordinator" else other_than(one, coordinator)
    before = {shard: one.partition(shard, "m") for shard in one.shards}
    new = one.add_shard() if which == "replaced" else None
    drain(one, gone)
    if new:
        assert one.partition(new, "m")["blocks"] == before[gone]["blocks"]
        stay = [shard for shard in before if shard is not gone]
        assert all(one.partition(shard, "m")["memory_bytes"] == before[shard]["memory_bytes"] for shard in stay)
    one._peers.clear()
    assert gone.stop() == 0
    assert (coordinator_shard(one) is coordinator) == (which != "coordinator")
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
    coordinator = coordinator_shard(one)
    drain(one, coordinator)
    one._peers.clear()
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
    one._peers.clear()
    assert [model["blocks"] for model in one.ask(one.shards[2])["models"]] == [10]
    for shard in gone:
        drain(one, shard)
        assert shard.stop() == 0
    mount = one.mount()
    assert (shown(mount) == before).all()


def test_a_move_that_fails_changes_nothing(apart):
    """A shard that was to take blocks stops in the middle, or one that has them does not answer."""
    one = model(apart(3), reducer="sum")
    coordinator = coordinator_shard(one)
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
    gone = other_than(one, coordinator_shard(one))
    with ThreadPoolExecutor() as pool:
        drains = pool.submit(one.run, "drain", gone.address, timeout=300)
        assert seen.wait(300)
        one.way.hold()
        time.sleep(1.5)
        assert not drains.done()
        one.way.release()
        done = drains.result(300)
    assert done.returncode == 0, done.stderr
    assert epochs(one) == {"m": {2}}
    mount = one.mount()
    assert (shown(mount) == before).all()


def test_an_unreachable_registry_keeps_a_model_where_it_is(apart):
    one = apart(3, proxied=True)
    model(one, reducer="sum")
    coordinator = coordinator_shard(one)
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
    gone = other_than(one, coordinator_shard(one))
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
    coordinator = coordinator_shard(one)
    gone = other_than(one, coordinator)
    new = other_than(one, coordinator, gone)

    def act(what, data):
        if what == "put":
            new.pause()
        return data

    at_put(one, act)
    with ThreadPoolExecutor() as pool:
        drains = pool.submit(one.run, "drain", gone.address, timeout=300)
        eventually(lambda: one.ask(coordinator)["models"][0]["epoch"] == 2, deadline=20)
        time.sleep(1)
        assert not drains.done()
        new.resume()
        done = drains.result(300)
    assert done.returncode == 0, done.stderr
    assert epochs(one) == {"m": {2}}
    mount = one.mount()
    assert (shown(mount) == before).all()


def test_a_new_owner_that_nobody_tells_asks_the_registry(apart):
    """The coordinator that is drained ends in the very moment in which the new map comes into force."""
    one = apart(3, proxied=True)
    model(one, reducer="sum")
    before = train(one, 2)
    coordinator = coordinator_shard(one)

    def act(what, data):
        if what == "put":
            return data
        # The registry has the new map; nobody else knows.
        coordinator.kill()

    at_put(one, act)
    done = one.run("drain", coordinator.address, timeout=300)
    assert done.returncode in (0, 1)
    one._peers.clear()
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
    gone = other_than(one, coordinator_shard(one))
    for _ in range(3):
        one.run("drain", gone.address, "--timeout", 1)
    drain(one, gone)
    train(one, 1)


# -- drains that are taken back


def test_a_drain_that_fails_before_anything_moved_leaves_no_mark(cluster):
    one = model(cluster(1))
    done = one.run("drain", one.shards[0].address)
    assert done.returncode == 1 and "nothing has moved, and the shard takes models as before" in done.stderr, done.stderr
    assert marked(one) == [False]
    model(one, "another")


def test_a_drain_that_fails_when_something_moved_says_how_to_take_it_back(apart):
    one = apart(3)
    gone = one.shards[1]
    with held_up(one):
        model(one, "a")
        done = one.run("drain", gone.address, "--timeout", 2)
        assert done.returncode == 1, done.stderr
        assert "1 model(s) have moved already (a)" in done.stderr and f"--cancel {gone.number}" in done.stderr, done.stderr
        assert marked(one) == [False, True, False]
        refused = one.run("create", "b", "--size", SIZE, "--shards", 3)
        assert refused.returncode == 1 and "only 2 take models" in refused.stderr, refused.stderr
        assert f"draining: shard {gone.number} at {gone.address}" in refused.stderr, refused.stderr
        done = one.run("drain", "--cancel", gone.number)
        assert done.returncode == 0, done.stderr
        assert "1 model(s) have blocks there (m)" in done.stdout and "stay where they are (a)" in done.stdout, done.stdout
        assert marked(one) == [False] * 3
        assert epochs(one) == {"a": {2}, "m": {1}}
    model(one, "b", shards=3)
    # Once more changes nothing.
    done = one.run("drain", "--cancel", gone.address)
    assert done.returncode == 0 and "as before" in done.stdout, done.stdout


def test_a_drain_is_cancelled_while_it_moves(apart):
    """Another command cancels it; the command that drains names the outcome."""
    one = apart(3)
    with held_up(one):
        gone = other_than(one, coordinator_shard(one))
        with draining(one, gone) as command:
            with takes(0, 4):
                done = one.run("drain", "--cancel", gone.address)
            assert done.returncode == 0 and "1 model(s) have blocks there (m)" in done.stdout, done
            out, err = command.communicate(timeout=300)
            assert command.returncode == 1 and "was stopped" in err, (out, err)
        assert marked(one) == [False] * 3 and epochs(one) == {"m": {1}}
        eventually(lambda: incoming(one) == [[]] * 3)
    drain(one, gone)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_drain_stops_what_it_moves(apart, number):
    one = apart(3)
    with held_up(one):
        gone = other_than(one, coordinator_shard(one))
        with draining(one, gone) as command, takes(0, 4):
            command.send_signal(number)
            out, err = command.communicate(timeout=300)
            assert command.returncode == 1 and "was stopped" in err and "takes models as before" in err, (out, err)
        assert marked(one) == [False] * 3 and epochs(one) == {"m": {1}}
        eventually(lambda: incoming(one) == [[]] * 3)
    drain(one, gone)


def test_a_model_that_is_deleted_while_it_moves_is_not_said_to_have_moved(apart):
    one = apart(3)
    mount = half_a_step(one)
    gone = other_than(one, coordinator_shard(one))
    with draining(one, gone) as command:
        assert one.run("delete", "m").returncode == 0
        out, err = command.communicate(timeout=300)
        assert command.returncode == 0 and "0 model(s) moved" in out and "m was deleted meanwhile" in out, (out, err)
    eventually(lambda: incoming(one) == [[]] * 3)
    mount.kill()


@pytest.mark.parametrize("hold", ["1.5", None])
def test_a_job_is_held_no_longer_than_it_may(apart, hold):
    """By itself for half of what commits wait, whatever the drain's own deadline is."""
    one = apart(3)
    with held_up(one, timeout=20 if hold else 3):
        gone = other_than(one, coordinator_shard(one))
        with takes(1.4, 6):
            done = one.run("drain", gone.address, *(["--hold", hold] if hold else []))
        assert done.returncode == 1 and "1.5s for which the job may be held" in done.stderr, done.stderr
        assert "waits for the learner(s) slow" in done.stderr and "--hold" in done.stderr, done.stderr
        assert marked(one) == [False] * 3
    drain(one, gone)


def test_a_drain_that_is_repeated_while_memory_is_taken_goes_on(apart):
    """The attempt before has been given up, but neither has reached the shard yet."""
    one = model(apart(3))
    gone, slow = [shard for shard in one.shards if shard is not coordinator_shard(one)]
    before = train(one, 1)
    slow.pause()
    done = one.run("drain", gone.address, "--timeout", 1)
    assert done.returncode == 1 and slow.address in done.stderr, done.stderr
    with ThreadPoolExecutor() as pool:
        drains = pool.submit(one.run, "drain", gone.address, timeout=300)
        time.sleep(0.5)
        slow.resume()
        done = drains.result(300)
    assert done.returncode == 0, done.stderr
    mount = one.mount()
    assert (shown(mount) == before).all() and epochs(one) == {"m": {2}}


def test_a_model_whose_block_map_is_too_long_to_be_told_stays(apart, tmp_path):
    """The refusal comes at once: the job is not held, and no memory is taken."""
    one = apart(2)
    path = tmp_path / "m.safetensors"
    tensor = {"dtype": "F32", "shape": [ELEMENTS], "data_offsets": [0, SIZE]}

    def write(metadata):
        header = json.dumps({"__metadata__": {"long": "x" * metadata}, "w": tensor}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(SIZE))

    # A record that is just short enough by itself.
    most = 16 << 20
    write(most)
    refused = one.run("create", "m", "--model", path, "--block-size", BLOCK)
    length = int(re.search(r"record of (\d+) bytes", refused.stderr)[1])
    write(most - (length - most) - 20)
    one.create("m", model=path, block_size=BLOCK)
    gone = other_than(one, coordinator_shard(one))
    with takes(0, 5):
        done = one.run("drain", gone.address)
    assert done.returncode == 1 and "cannot be moved" in done.stderr and "less metadata" in done.stderr, done.stderr
    assert marked(one) == [False, False] and incoming(one) == [[], []]


def test_status_tells_of_a_move(apart):
    one = apart(2)
    mount = half_a_step(one)
    coordinator = coordinator_shard(one)
    gone = other_than(one, coordinator)
    with draining(one, gone) as command:
        assert moving(one, coordinator)["off"] == gone.number
        said = one.run("status").stdout
        assert f"moves off shard {gone.number}: waiting for the step" in said and "draining" in said, said
        mount.contribute(np.ones(ELEMENTS, "<f4"), learner="slow")
        mount.stop()
        assert command.wait(300) == 0
    assert moving(one, coordinator) is None


# -- mounts that live through it


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("which", ["coordinator", "other"])
def test_learners_go_on_while_a_shard_is_drained(apart, transport, which):
    """Every contribution counts once; nobody gets an error."""
    one = model(apart(3), learners=2, reducer="sum")
    mounts = [one.mount(transport=transport) for _ in range(2)]
    for i, mount in enumerate(mounts):
        mount.join(f"l{i}")
    counts, last = [0, 0], []

    def learn(i):
        while not last or counts[i] < last[0]:
            mounts[i].contribute(np.ones(ELEMENTS, "<f4"), learner=f"l{i}")
            counts[i] += 1
            weights = array(mounts[i].place(f"l{i}") / "weights")
            assert (weights == weights[0]).all() and weights[0] >= 2 * counts[i], "its own step is in it"

    coordinator = coordinator_shard(one)
    gone = coordinator if which == "coordinator" else other_than(one, coordinator)
    with ThreadPoolExecutor() as pool:
        learners = [pool.submit(learn, i) for i in range(2)]
        try:
            eventually(lambda: min(counts) > 5, deadline=15)
            drain(one, gone)
            after = min(counts)
            eventually(lambda: min(counts) > after + 5, deadline=15)
            assert gone.stop() == 0
        finally:
            last.append(max(counts) + 5)
        for learner in learners:
            learner.result(300)
    one._peers.clear()
    assert counts == [last[0]] * 2 and one.coordinator("m")["contributions"] == 2 * last[0]
    for mount in mounts:
        assert (shown(mount) == 2 * last[0]).all()
        assert gone.address not in [shard["address"] for shard in mount.status()["shards"]]


@pytest.mark.parametrize("reducer", ["adam", "momentum"])
def test_a_job_outlives_all_its_shards(apart, reducer):
    """Each is replaced by another one while the learners go on: the bits are those of a job that was left alone."""
    steps = itertools.count(1)

    def contribution(learner, step):
        return np.random.default_rng((learner, step)).standard_normal(ELEMENTS).astype("<f4")

    quiet = model(apart(2), learners=2, reducer=reducer)
    one = model(apart(2), learners=2, reducer=reducer)
    jobs = [[job.mount(transport=way) for way in ("tcp", "shm")] for job in (quiet, one)]
    for mounts in jobs:
        for i, mount in enumerate(mounts):
            mount.join(f"l{i}")

    def step(mounts, number):
        def give(i):
            mounts[i].contribute(contribution(i, number), learner=f"l{i}")
            return array(mounts[i].place(f"l{i}") / "weights").tobytes()

        with ThreadPoolExecutor() as pool:
            first, second = pool.map(give, range(2))
        assert first == second
        return first

    for _ in range(3):
        gone = one.shards[0]
        one.add_shard()
        with ThreadPoolExecutor() as pool:
            drains = pool.submit(drain, one, gone)
            while not drains.done():
                number = next(steps)
                assert step(jobs[1], number) == step(jobs[0], number), number
            drains.result(300)
        one._peers.clear()
        one.shards.remove(gone)
        assert gone.stop() == 0
        gone.clean_up()
    for _ in range(2):
        number = next(steps)
        assert step(jobs[1], number) == step(jobs[0], number), number
    assert epochs(one) == {"m": {4}} and epochs(quiet) == {"m": {1}}


def test_a_reader_that_was_away_while_the_model_moved_finds_it(apart):
    """The shards that it knows are all gone when it looks."""
    one = model(apart(1), reducer="sum")
    mount = one.mount()
    mount.contribute(np.ones(ELEMENTS, "<f4"))
    os.kill(mount.pid, 19)
    one.add_shard()
    gone = one.shards[0]
    drain(one, gone)
    assert gone.stop() == 0
    one._peers.clear()
    os.kill(mount.pid, 18)
    writer = one.mount()
    writer.contribute(np.ones(ELEMENTS, "<f4"))
    eventually(lambda: array(mount.model / "weights")[0] == 2, deadline=30)
