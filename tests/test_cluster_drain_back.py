"""A drain that is taken back, and mounts that live through one, as docs/operate/cluster.md promises it."""

import itertools
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import pause
from filetools import BLOCK, array, eventually, takes
from test_cluster_drain import (
    ELEMENTS, SIZE, apart, drain, drained_meanwhile, draining, epochs, half_a_step, held_up, incoming, marked, model,  # noqa: F401
    moving, other_than, shown, train,
)


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
        gone = other_than(one, one.coordinator_shard("m"))
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
        gone = other_than(one, one.coordinator_shard("m"))
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
    gone = other_than(one, one.coordinator_shard("m"))
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
        gone = other_than(one, one.coordinator_shard("m"))
        with takes(1.4, 6):
            done = one.run("drain", gone.address, *(["--hold", hold] if hold else []))
        assert done.returncode == 1 and "1.5s for which the job may be held" in done.stderr, done.stderr
        assert "waits for the learner(s) slow" in done.stderr and "--hold" in done.stderr, done.stderr
        assert marked(one) == [False] * 3
    drain(one, gone)


def test_a_drain_that_is_repeated_while_memory_is_taken_goes_on(apart):
    """The attempt before has been given up, but neither has reached the shard yet."""
    one = model(apart(3))
    gone, slow = [shard for shard in one.shards if shard is not one.coordinator_shard("m")]
    before = train(one, 1)
    slow.pause()
    done = one.run("drain", gone.address, "--timeout", 1)
    assert done.returncode == 1 and slow.address in done.stderr, done.stderr
    with drained_meanwhile(one, gone) as drains:
        time.sleep(0.5)
        slow.resume()
    assert (shown(one.mount()) == before).all()


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
    gone = other_than(one, one.coordinator_shard("m"))
    with takes(0, 5):
        done = one.run("drain", gone.address)
    assert done.returncode == 1 and "cannot be moved" in done.stderr and "less metadata" in done.stderr, done.stderr
    assert marked(one) == [False, False] and incoming(one) == [[], []]


def test_status_tells_of_a_move(apart):
    one = apart(2)
    mount = half_a_step(one)
    coordinator = one.coordinator_shard("m")
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

    coordinator = one.coordinator_shard("m")
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
        one.shards.remove(gone)
        assert gone.stop() == 0
        gone.clean_up()
    for _ in range(2):
        number = next(steps)
        assert step(jobs[1], number) == step(jobs[0], number), number
    assert epochs(one) == {"m": {4}} and epochs(quiet) == {"m": {1}}


def test_a_reader_that_was_away_while_the_model_moved_finds_it(apart):
    """The shards that it knows are all gone when it looks."""
    one = model(apart(1), reducer="sum", consistency="async")
    mount = one.mount()
    mount.contribute(np.ones(ELEMENTS, "<f4"))
    pause(mount.pid)
    one.add_shard()
    gone = one.shards[0]
    drain(one, gone)
    assert gone.stop() == 0
    os.kill(mount.pid, signal.SIGCONT)
    writer = one.mount()
    writer.contribute(np.ones(ELEMENTS, "<f4"))
    eventually(lambda: mount.seen() == 2, deadline=30)
    assert (array(mount.model / "weights") == 2).all()
