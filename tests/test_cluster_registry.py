"""The registry is restarted, and models are deleted while shards hang, as docs/operate/cluster.md promises it."""

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cluster import Shard
from filetools import BLOCK, Threads, eventually, give, takes
from wire import HEADER_BYTES, MESSAGES, REGISTRY

SIZE = 8 * BLOCK + 1236
# Shards speak to the registry every 2.5 s, and a mount or a command takes a moment.
HEARD = 8


class Registry:
    """A registry of its own, that can be killed and restarted at the same address."""

    def __init__(self):
        self.process = Shard(command="registry")
        self.address = self.process.address
        self.gone = []

    def kill(self):
        self.process.kill()

    def start(self):
        self.gone.append(self.process)
        self.process = Shard(command="registry", listen=self.address)

    def anew(self):
        self.kill()
        self.start()


@pytest.fixture
def apart(cluster):
    """Clusters of which no shard is the registry: `one.table` is."""
    tables = []

    def start(shards):
        one = cluster(0)
        one.table = Registry()
        tables.append(one.table)
        one.registry = one.table.address
        for _ in range(shards):
            one.add_shard()
        return one

    yield start
    for table in tables:
        for process in (*table.gone, table.process):
            process.clean_up()


def model(one, name="m", **settings):
    options = {"size": SIZE, "block_size": BLOCK, "reducer": "sum", "timeout": 20, "lease": 10, **settings}
    one.create(name, **options)
    return one


def shown(mount):
    values = np.frombuffer(mount.weights(), "<f4")
    assert (values == values[0]).all(), f"torn: {sorted(set(values.tolist()))}"
    return values[0]


def addresses(one):
    """Number -> address, as the registry lists them."""
    return {shard["shard"]: shard["address"] for shard in one.status()["shards"]}


def knows(one, *names):
    """Waits until the registry knows these models, and all shards that live."""
    living = {shard.address for shard in one.shards if shard.running()}

    def all_there():
        status = one.status()
        listed = {shard["address"] for shard in status["shards"]}
        return status["models"] == sorted(names) and living <= listed

    eventually(all_there, deadline=HEARD)


class Training:
    """Two learners, each on a mount of its own, that make one step after the other."""

    def __init__(self, one):
        self.mounts = [one.mount(), one.mount()]
        self.steps = [0, 0]
        self.errors = []
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self._train, args=(which,)) for which in (0, 1)]
        for thread in self.threads:
            thread.start()
        self.goes_on()

    def _train(self, which):
        try:
            while not self.over.is_set():
                give(self.mounts[which], 1)
                self.steps[which] += 1
                time.sleep(0.03)
        except OSError as error:
            self.errors.append(error)

    def goes_on(self, steps=5, deadline=15):
        before = list(self.steps)
        eventually(
            lambda: self.errors or all(now >= was + steps for now, was in zip(self.steps, before)), deadline=deadline
        )
        assert not self.errors, self.errors

    def end(self):
        """Nothing was lost, and nothing counted twice."""
        self.over.set()
        for thread in self.threads:
            thread.join(300)
        assert not self.errors, self.errors
        # A learner may have stopped one step after the other. Its last version is made when `timeout` is over.
        for mount in self.mounts:
            eventually(lambda: shown(mount) >= sum(self.steps))
            assert shown(mount) == sum(self.steps)


def test_a_registry_that_is_restarted_gets_the_shards_and_models_again(apart):
    one = model(apart(3), consistency="async")
    numbers = addresses(one)
    training = Training(one)
    one.table.kill()
    training.goes_on()
    assert one.run("status").returncode == 1
    one.table.start()
    first = one.run("mount", "/nonexistent", "m")
    assert first.returncode == 1
    knows(one, "m")
    assert addresses(one) == numbers
    training.goes_on()
    # Clients that come now find the model, and may leave.
    late = one.mount()
    give(late, 0)
    assert late.stop() == 0
    # It can be moved.
    drained = one.run("drain", one.shards[0].address)
    assert drained.returncode == 0 and "it can be stopped" in drained.stdout, drained.stderr
    assert one.ask(one.shards[0])["models"] == []
    training.goes_on()
    # And once more, after the move: shards announce the newer block map, and the shard stays drained.
    one.table.anew()
    knows(one, "m")
    assert [shard["address"] for shard in one.status()["shards"] if shard["draining"]] == [one.shards[0].address]
    training.goes_on()
    training.end()
    assert one.run("delete", "m").stdout == "gradfs: deleted m\n"
    assert all(one.ask(shard)["models"] == [] for shard in one.shards)


def test_what_a_young_registry_does_not_know_it_may_not_have_heard_of(apart):
    one = model(apart(2))
    for shard in one.shards:
        shard.pause()
    one.table.anew()
    try:
        refused = one.run("delete", "m")
    finally:
        for shard in one.shards:
            shard.resume()
    assert refused.returncode == 1 and "was started 0 s ago" in refused.stderr, refused.stderr
    knows(one, "m")
    assert one.run("delete", "m").returncode == 0


def test_a_newcomer_takes_nobodys_number(apart):
    """It announces itself first to a registry that was restarted."""
    one = model(apart(2), consistency="async")
    numbers = addresses(one)
    training = Training(one)
    for shard in one.shards:
        shard.pause()
    one.table.anew()
    newcomer = one.add_shard()
    assert newcomer.number in numbers, "nobody else has said so yet"
    for shard in one.shards[:2]:
        shard.resume()
    # Coordinators that reconnect ask for numbers: they must not take the newcomer for another.
    eventually(lambda: len(addresses(one)) == 3, deadline=2 * HEARD)
    now = addresses(one)
    assert {number: now[number] for number in numbers} == numbers
    eventually(lambda: one.ask(newcomer)["shard"] not in numbers, deadline=HEARD)
    knows(one, "m")
    training.goes_on()
    assert one.coordinator("m")["state"] != "failed"
    training.end()
    assert one.run("drain", one.shards[0].address).returncode == 0, "the newcomer takes its place"
    assert [model["name"] for model in one.ask(newcomer)["models"]] == ["m"]


def test_a_coordinator_stays_with_the_shard_that_has_the_blocks(apart):
    """A stranger that has its number is not taken for it, though the connection was lost meanwhile."""
    one = apart(0)
    proxy = one.proxy()
    one.add_shard()
    one.add_shard(proxy=proxy)
    model(one, consistency="async", timeout=200)
    assert one.coordinator_shard("m") is one.shards[0]
    training = Training(one)
    # Away for as long as the registry is new, and the connections with it.
    proxy.hold()
    proxy.reset()
    one.table.kill()
    one.shards[1].pause()
    one.table.start()
    newcomer = Shard("--registry", one.registry)
    one.shards.append(newcomer)
    time.sleep(3)
    one.shards[1].resume()
    proxy.release()
    proxy.reset()
    training.goes_on(deadline=30)
    assert one.coordinator("m")["state"] != "failed"
    training.end()
    # One that was restarted at the same address has lost them.
    held = one.shards[1]
    held.kill()
    anew = Shard("--advertise", proxy.address, "--registry", one.registry)
    one.shards[1] = anew
    proxy.target = anew.address
    eventually(lambda: one.coordinator("m")["state"] == "failed", deadline=HEARD)


def test_a_name_that_is_anothers_since_is_said(apart):
    one = model(apart(2), consistency="async")
    training = Training(one)
    for shard in one.shards:
        shard.pause()
    one.table.anew()
    try:
        one.add_shard()
        model(one)
    finally:
        for shard in one.shards[:2]:
            shard.resume()
    coordinator = next(shard for shard in one.shards[:2] if one.partition(shard, "m")["coordinator"])
    eventually(lambda: "another model's" in (one.partition(coordinator, "m")["not_in_registry"] or ""), deadline=HEARD)
    assert "the name is another model's" in coordinator.stderr()
    refused = [shard for shard in one.shards if "which has blocks of models" in shard.stderr()]
    assert [one.ask(shard)["not_listed"] is not None for shard in refused] == [True], "the newcomer has its number"
    training.goes_on()
    training.end()


def test_a_shard_that_is_refused_its_number_is_shown(apart):
    """Its own model goes on, and it is listed again once the other one has no blocks under the number."""
    one = model(apart(1), consistency="async")
    first = one.shards[0]
    training = Training(one)
    first.pause()
    one.table.anew()
    try:
        second = one.add_shard()
        assert second.number == first.number
        model(one, "n")
    finally:
        first.resume()
    eventually(lambda: one.status()["refused"], deadline=HEARD)
    (refused,) = one.status()["refused"]
    assert (refused["shard"], refused["address"]) == (first.number, first.address)
    assert [held["name"] for held in refused["models"]] == ["m"]
    assert f"is that of the shard at {second.address}" in refused["refused_because"]
    assert addresses(one) == {second.number: second.address}
    shown = one.run("status").stdout
    assert f"shard {first.number} at {first.address}: not listed: number {first.number} is that of" in shown, shown
    training.goes_on()
    assert one.run("delete", "n").returncode == 0
    knows(one, "m")
    assert one.status()["refused"] == []
    training.goes_on()
    training.end()
    # One that asks no more is forgotten.
    first.stop()
    eventually(lambda: f"at {first.address}: " not in one.run("status").stdout, deadline=15)


def test_a_registry_in_a_shard_comes_back_with_the_others(cluster):
    """Its own blocks are lost; models that have none there are found again, and the others can be deleted."""
    one = cluster(1)
    home = one.shards[0]
    others = [one.add_shard(), one.add_shard()]
    model(one, "everywhere")
    assert one.run("drain", home.address).returncode == 0
    model(one, "elsewhere")
    moved = [one.partition(shard, "everywhere")["blocks"] for shard in others]
    assert sum(moved) == 9
    home.kill()
    one.shards[0] = Shard(listen=home.address)
    assert one.shards[0].number == home.number
    knows(one, "elsewhere", "everywhere")
    mount = one.mount(models=["elsewhere"])
    give(mount, 2)
    assert shown(mount) == 2


def test_a_hung_shard_drops_the_partition_of_a_deleted_model(apart):
    one = model(apart(2))
    coordinator = one.coordinator_shard("m")
    for hung in [next(shard for shard in one.shards if shard is not coordinator), coordinator]:
        if one.run("status").stdout.endswith("no models\n"):
            model(one)
        with hung.paused():
            deleted = one.run("delete", "m", timeout=300)
            assert deleted.returncode == 0 and deleted.stdout == "gradfs: deleted m\n"
            said = [line for line in deleted.stderr.splitlines() if "not confirmed" in line]
            assert len(said) == 1 and hung.address in said[0], deleted.stderr
        eventually(lambda: one.ask(hung)["models"] == [], deadline=HEARD)


@pytest.mark.parametrize("owners", [1, 2])
def test_a_deleted_model_does_not_come_back_with_a_shard_that_hung(apart, owners):
    """Neither the registry nor the coordinator knows; a shard that was told does, with a partition of the model or
    without."""
    one = model(apart(2), shards=owners)
    coordinator = one.coordinator_shard("m")
    with coordinator.paused():
        assert one.run("delete", "m", timeout=300).returncode == 0
        one.table.anew()
        other = next(shard for shard in one.shards if shard is not coordinator)
        eventually(lambda: other.address in addresses(one).values(), deadline=HEARD)
        # Its record of deleted models goes with it.
        time.sleep(1)
    eventually(lambda: one.ask(coordinator)["models"] == [], deadline=2 * HEARD)
    assert one.status()["models"] == []
    model(one)


def test_partitions_that_nobody_coordinates_any_more_can_be_deleted(apart):
    one = model(apart(2))
    coordinator = one.coordinator_shard("m")
    other = next(shard for shard in one.shards if shard is not coordinator)
    one.table.kill()
    coordinator.kill()
    one.table.start()
    # It waits for the coordinator for some time.
    eventually(lambda: one.status()["models"] == ["m"], deadline=25)
    deleted = one.run("delete", "m")
    assert deleted.returncode == 0 and "not confirmed" in deleted.stderr, deleted.stderr
    assert one.ask(other)["models"] == []


def test_a_shard_that_was_left_and_that_nobody_tells_gives_its_partition_up(apart):
    """It hung when the model moved off it, for so long that it was given up."""
    one = apart(0)
    way = one.proxy()
    way.target, one.registry = one.registry, way.address
    for _ in range(3):
        one.add_shard()
    model(one)
    coordinator = one.coordinator_shard("m")
    left = next(shard for shard in one.shards if shard is not coordinator)
    put = bytes([MESSAGES["Registry"], REGISTRY["Put"]])

    def rule(connection, direction, data):
        if direction == "up" and data[HEADER_BYTES : HEADER_BYTES + 2] == put:
            left.pause()
        return data

    way.rule = rule
    with ThreadPoolExecutor() as pool:
        drained = pool.submit(one.run, "drain", left.address, timeout=300).result(300)
        # It has moved; but only the shard itself can say that nothing is left there.
        assert drained.returncode == 1 and "does not answer" in drained.stderr, drained.stderr
    assert one.partition(coordinator, "m")["epoch"] == 2
    left.resume()
    assert one.partition(left, "m")["epoch"] == 1
    eventually(lambda: one.ask(left)["models"] == [], deadline=30)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_model_that_is_made_while_the_registry_is_away_is_there_or_not(apart, comes_back):
    """The last word of `gradfs create` is for the registry: that has some time to come back; else nothing is left."""
    one = apart(2)
    first, second = sorted(one.shards, key=lambda shard: shard.number)
    second.pause()
    threads = Threads()
    try:
        made = threads.start(lambda: one.run("create", "m", "--size", SIZE, "--block-size", BLOCK, "--reducer", "sum", "--shards", 2))
        eventually(lambda: one.ask(first)["models"], deadline=HEARD)
        one.table.kill()
    finally:
        second.resume()
    if comes_back:
        time.sleep(1)
        one.table.start()
    done = made.result(300)
    if comes_back:
        assert done.returncode == 0, done.stderr
        knows(one, "m")
        mount = one.mount(models=["m"])
        give(mount, 3)
        assert shown(mount) == 3
        return
    assert done.returncode == 1, done.stderr
    assert "cannot create m" in done.stderr or "cannot be asked" in done.stderr, done.stderr
    assert all(one.ask(shard)["models"] == [] for shard in one.shards)
    one.table.start()
    eventually(lambda: len(one.status()["shards"]) == 2, deadline=HEARD)
    assert one.status()["models"] == []
    model(one)


def test_a_port_of_a_shard_that_was_just_killed_can_be_listened_on(cluster):
    one = cluster(1)
    for _ in range(5):
        shard = one.shards[0]
        shard.process.send_signal(signal.SIGKILL)
        one.shards[0] = Shard(listen=shard.address)
        shard.kill()


def test_a_port_that_is_taken_is_refused_soon(gradfs):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with takes(0.9, 4):
            done = gradfs("shard", "--listen", "127.0.0.1:%d" % taken.getsockname()[1])
        assert done.returncode == 1 and "cannot listen" in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("size", ["1TiB", "4000TiB"])
def test_a_model_of_any_size_is_refused_soon(cluster, size):
    """Before anything is made of so many blocks, or memory is taken."""
    one = cluster(1)
    with takes(0, 4):
        done = one.run("create", "huge", "--size", size)
    assert done.returncode in (1, 2) and ("blocks" in done.stderr or "memory" in done.stderr), done.stderr
    assert one.ask(one.shards[0])["models"] == []
