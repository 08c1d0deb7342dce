"""Strangers that ask and ask, and take no answer: what they take of a shard, and what they leave to others."""

import contextlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import wire
from filetools import eventually
from patience import HANGS
from strangers import BLOCKS, of_module, world  # noqa: F401
from wire import body, frame


class Watched:
    """The most threads and memory that a process has meanwhile, beyond those that it had before.

    Threads that the kernel adds for io_uring are not the process's doing."""

    def __init__(self, pid):
        self._process = Path(f"/proc/{pid}")
        self._before, self._rss_before = self._now()
        self.threads, self.rss = Counter(), 0
        self._over = threading.Event()

    def _now(self):
        names = Counter()
        for task in (self._process / "task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                names[(task / "comm").read_text().strip()] += 1
        for kernels in [name for name in names if name.startswith("iou-")]:
            del names[kernels]
        fields = dict(line.split(":", 1) for line in (self._process / "status").read_text().splitlines())
        return names, int(fields["VmRSS"].split()[0]) << 10

    def _watch(self):
        while not self._over.wait(0.005):
            names, rss = self._now()
            more = names - self._before
            self.threads = max(self.threads, more, key=Counter.total)
            self.rss = max(self.rss, rss - self._rss_before)

    def __enter__(self):
        self._watcher = ThreadPoolExecutor(1).submit(self._watch)
        return self

    def __exit__(self, *_):
        self._over.set()
        self._watcher.result(300)


MIB = 1 << 20
AT_ONCE = 4
# Who floods by what; threads and bytes that a connection may take by that, as docs/internals/protocol.md states the limits. Those of
# requests that take time are for all connections of an address.
FLOODS = {
    "status": ("admin", ("Status",), 0, 33 * MIB),
    "fetch": ("admin", ("Fetch", "generation", "epoch", "version", 0, b"\0"), 0, 33 * MIB),
    "move": ("admin", ("Move", "m", "generation", 999, 60_000), 1, 16 * MIB),
    "abandon": ("admin", ("Abandon", "generation", 1), 8 // AT_ONCE, 16 * MIB),
    "create": ("admin", ("Create",), 8 // AT_ONCE, 65 * MIB),
    "ping": ("data", ("Ping",), 0, 33 * MIB),
    "pull of what comes": ("data", ("Pull", 1 << 40, 0, BLOCKS, None), 0, 16 * MIB),
    "pull of what is": ("data", ("Pull", "version", 0, BLOCKS, None), 0, 33 * MIB),
}


@pytest.mark.parametrize("what", FLOODS)
def test_floods_take_no_more_than_their_limits(world, what):
    """Of those who ask and ask and take no answer. Others go on meanwhile, and it is all given back."""
    role, (name, *fields), threads, memory = FLOODS[what]
    shard = world.coordinator
    words = {
        "generation": world.generation, "epoch": world.epoch, "version": world.cluster.partition(shard, "m")["version"],
    }
    fields = [words.get(field, field) for field in fields]
    payload = bytes(MIB) if what == "create" else b""
    peers = [world.peer(role, shard) for _ in range(AT_ONCE)]
    epoch = 0 if role == "admin" else world.epoch
    one = frame(body(name, *fields), payload, 7, epoch)
    many = one * max((256 << 10) // len(one), 1)

    def flood(peer):
        """Sends it until nobody listens any more, or it was sent often."""
        peer.socket.settimeout(0.7)
        sent = 0
        try:
            while sent < 64 * MIB:
                sent += peer.socket.send(many[sent % len(one) :])
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            pass
        return sent

    with Watched(shard.pid) as watched, ThreadPoolExecutor(AT_ONCE) as floods:
        sent = list(floods.map(flood, peers))
        world.trains()
    assert min(sent) > 0
    # What connections share: threads of the model that trains, and its versions that are being read.
    assert watched.threads.total() <= AT_ONCE * threads + 8, watched.threads
    assert watched.rss <= AT_ONCE * memory + 32 * MIB, watched.rss / MIB
    for peer in peers:
        peer.socket.close()
    world.trains()


def long_put(world, peer):
    """The frame of a `Put` that the registry reads as a whole before it refuses it: its record is valid, and of 6 MiB."""
    known = peer.request("Registry", wire.REGISTRY["Model"], "m", request=1, epoch=0).payload
    reading = wire.Reading(known)
    assert (reading.text(), reading.number(), reading.number()) == ("m", world.generation, 1)
    tensor = (reading.text(), reading.text(), [reading.number() for _ in range(reading.number())])
    empty = [(f"empty.{number:040}", "F32", [0]) for number in range(120_000)]
    record = wire.field(("m", world.generation, [tensor, *empty])) + known[reading.at :]
    # It would replace a record of epoch 0.
    return frame(body("Registry", wire.REGISTRY["Put"], b"\1\0"), record, request=2)


def test_floods_take_no_more_than_their_limits__and_long_records_leave_a_training_its_pace(world):
    """Of a tenth at least: the registry has blocks of the model, too."""
    registry, sent, over = world.cluster.shards[0], Counter(), threading.Event()
    refused = ("Epoch", world.epoch, 0)
    with world.peer("admin", registry) as peer:
        put = long_put(world, peer)
    # It takes a while to make, and a peer that is silent for so long counts as dead.
    with world.peer("admin", registry) as peer:
        peer.send(put)
        assert len(put) > 6 * MIB and peer.hear_of("Refused").fields == refused

    def flood(number):
        with world.peer("admin", registry) as peer:
            while not over.is_set():
                peer.send(put)
                assert peer.hear_of("Refused").fields == refused
                sent[number] += 1

    before = world.trains(steps=100)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        floods = [pool.submit(flood, number) for number in range(AT_ONCE)]
        try:
            eventually(lambda: len(sent) == AT_ONCE)
            meanwhile = world.trains(steps=100)
        finally:
            over.set()
        for one in floods:
            one.result(HANGS)
    after = world.trains(steps=100)
    assert meanwhile < 10 * max(before, after), (before, meanwhile, after)


def test_floods_take_no_more_than_their_limits__and_answers_about_changes_are_long(cluster):
    one, size = cluster(1), 32 * MIB
    one.create("m", size=size, dtype="bf16", reducer="assign", timeout=200)
    mount = one.mount(model="m")
    bits = np.zeros(size // 2, "<u2")
    for value in (1, 2):
        # Positions of every eighth element take 2 MiB.
        bits[::8] = value
        (mount.model / "publish").write_bytes(bits.tobytes())
    eventually(lambda: mount.seen() == 2)
    shard = one.shards[0]
    partition = one.partition(shard, "m")
    ask = frame(body("ChangedSince", partition["generation"], 1, 2, 0), b"", 7, 0)
    with Watched(shard.pid) as watched, wire.Peer(shard.address) as peer:
        assert peer.greet("admin").name == "Welcome"
        assert peer.request("ChangedSince", partition["generation"], 1, 2, 0, epoch=0).payload
        peer.send(ask * 120)
        with pytest.raises(wire.Closed):
            while (answer := peer.hear()).name != "Refused":
                assert answer.name in ("ChangedBlocks", "Ping")
            assert "requests at once" in str(answer.fields)
            peer.hear()
    assert watched.rss <= 65 * MIB + 32 * MIB, watched.rss / MIB
