"""A model that is trained all the time, for tests of what strangers tell its shards."""

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cluster import Cluster
from filetools import BLOCK
from patience import HANGS, Limit
from wire import Peer

BLOCKS = 4
CLIENTS = itertools.count(1000)


class World:
    """A model on two shards that a mount trains all the time."""

    def __init__(self):
        self.cluster = Cluster(2)
        self.cluster.create("m", size=BLOCKS * BLOCK, block_size=BLOCK, reducer="sum", timeout=200)
        self.mount = self.cluster.mount()
        # With its gradients open it stays, also while a test shortens the lease.
        self._open = os.open(self.mount.join("t") / "gradients", os.O_WRONLY)
        partition = self.cluster.partition(self.cluster.shards[0], "m")
        self.generation, self.epoch = partition["generation"], partition["epoch"]
        self.coordinator = self.cluster.coordinator_shard("m")
        self.other = next(shard for shard in self.cluster.shards if shard is not self.coordinator)
        self.steps, self._over = 0, threading.Event()
        self._learner = ThreadPoolExecutor(1).submit(self._learn)

    def _learn(self):
        ones = np.ones(BLOCKS * BLOCK // 4, "<f4")
        while not self._over.is_set():
            self.mount.contribute(ones, learner="t")
            self.steps += 1
            values = np.frombuffer((self.mount.place("t") / "weights").read_bytes(), "<f4")
            assert (values == self.steps).all(), f"step {self.steps}: {sorted(set(values.tolist()))}"
            time.sleep(0.005)

    def trains(self, deadline=HANGS, steps=2):
        """Waits for so many more steps; returns the seconds that they take."""
        wanted, limit = self.steps + steps, Limit(deadline)
        while self.steps < wanted:
            if self._learner.done():
                self._learner.result()
            assert not limit.over(), "the training does not go on"
            time.sleep(0.002)
        return limit.taken()

    def peer(self, role=None, shard=None):
        """A connection, greeted in a role as a client of its own: answers to a client's requests are kept."""
        client = next(CLIENTS)
        peer = Peer((shard or self.coordinator).address)
        if role is not None:
            hello = ("", 0) if role == "admin" else ("m", self.generation)
            welcome = peer.greet(role, *hello, client=client, epoch=self.epoch)
            assert welcome.name == "Welcome", welcome
        return peer

    def end(self):
        self._over.set()
        try:
            self._learner.result(300)
        finally:
            os.close(self._open)
            self.cluster.clean_up()


@pytest.fixture(scope="module")
def of_module():
    world = World()
    yield world
    world.end()


@pytest.fixture
def world(of_module):
    """Training goes on through the test and after it; nobody is left in the job."""
    of_module.trains()
    names = {learner["name"] for learner in of_module.cluster.coordinator("m")["learners"]}
    yield of_module
    of_module.trains()
    steps, coordinator = of_module.steps, of_module.cluster.coordinator("m")
    assert {learner["name"] for learner in coordinator["learners"]} == names
    assert coordinator["contributions"] >= steps and coordinator["state"] in ("running", "reducing", "forming")
