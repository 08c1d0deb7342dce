"""What a shard's port is told by those who do not keep to docs/internals/protocol.md: they are refused with the reason, or cut
off, and nobody else notices. A training goes on meanwhile."""

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
import pytest
import wire
from cluster import Cluster
from filetools import BLOCK, eventually, takes
from patience import HANGS, Limit
from wire import Closed, Peer, body, frame

BLOCKS = 4
ALL_TENSORS = [(0, 1)]
# A commit names no pieces of blocks: all of each was written.
WHOLE = b"\1\0"
# No provisional plan, and no version that the learner has opened.
NO_PLAN = b"\0"
ONE = 0x3FF0_0000_0000_0000
# With values of no averaged tensor.
GRADIENT = (0, 0)
NO_BASE = b"\0"
HELLO_DEADLINE = 5
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


def refusal(peer, *fields):
    """The next answer is this refusal, and the connection ends."""
    answer = peer.hear_of("Refused")
    assert answer.fields[: len(fields)] == fields, answer
    assert peer.closes()


def no_frame(peer, what, expected, got):
    """The refusal names the fault of a frame in these words, and then the connection ends."""
    with takes(0, HELLO_DEADLINE / 2):
        answer = peer.hear_of("Refused")
        assert answer.fields[0] == "Frame", answer
        told = dict(zip(("what", "expected", "got"), answer.fields[1:]))
        assert what in told["what"] and expected in told["expected"] and got in told["got"], told
        assert peer.closes()


# The bytes; their fault, the expected value, the received value.
GARBAGE = {
    "http": (b"GET / HTTP/1.1\r\nHost: shard\r\n\r\n" + b" " * 40, "magic", "0x4647", "0x4547"),
    "zeros": (bytes(4096), "magic", "0x4647", "0x0000"),
    "much": (b"much" * 500_000, "magic", "0x4647", "0x756d"),
    "another magic": (frame(body("Ping"), magic=b"gf"), "magic", "0x4647", "0x6667"),
    "unknown flags": (frame(body("Ping"), flags=1), "flags", "0x0000", "0x0001"),
    "body beyond the limit": (frame(body("Ping"), lengths=(1 << 31, 0)), "body", "at most 4096", "2147483648"),
    "payload before the greeting": (
        frame(body("Ping"), lengths=(1, 1 << 30)), "payload", "at most 0", "1073741824"
    ),
    "an empty body": (frame(b""), "body", "a message", "end of buffer"),
    "no message": (frame(b"\xff\xff\xff\xff\x7f"), "body", "a message", ""),
    "an unknown message": (frame(wire.varint(200)), "body", "a message", ""),
    "more than a message": (frame(body("Ping") + b"x"), "body", "no more", "1 bytes more"),
    "damaged header": (frame(body("Status"), crcs=(1, 0, 0)), "checksum of the header", "0x", "0x"),
    "damaged body": (frame(body("Status"), crcs=(0, 1, 0)), "checksum of the body", "0x", "0x"),
    "a hello cut in its fields": (frame(body("Hello", wire.PROTOCOL, 0)), "body", "a message", "end of buffer"),
    "a hello with a long name": (frame(body("Hello", wire.PROTOCOL, 0, "x" * 5000, 0, 0)), "body", "at most 4096", "5007"),
    "a hello with bad text": (frame(body("Hello", wire.PROTOCOL, 0) + b"\x02\xff\xfe\x00\x00"), "body", "a message", ""),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_ends_its_own_connection_alone(world, case):
    data, *wrong = GARBAGE[case]
    for shard in world.cluster.shards:
        with world.peer(shard=shard) as peer:
            peer.send(data)
            no_frame(peer, *wrong)


def test_garbage_ends_its_own_connection_alone__at_random(world):
    random = Random(int(os.environ.get("GRADFS_TEST_SEED", 0))).randbytes(4096)
    random = b"no" + random if random[:2] == b"GF" else random
    with world.peer() as peer:
        peer.send(random)
        no_frame(peer, "magic", "0x4647", f"{int.from_bytes(random[:2], 'little'):#06x}")
    with world.peer() as peer:
        peer.say("Join", "x", request=1)
        refusal(peer, "Role", "Join")
    # Somebody who goes on talking hears why, and is not listened to for long.
    with world.peer() as peer, takes(0, 4):
        peer.socket.settimeout(4)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while True:
                peer.socket.sendall(random * 16)


def test_those_who_are_turned_away_are_named_in_the_log(world):
    """Not all of them: a peer that sends rubbish would fill the log."""
    shard = world.other

    def turned_away():
        with world.peer(shard=shard) as peer:
            peer.send(b"GET / HTTP/1.0\r\n\r\n" + b" " * 40)
            no_frame(peer, "magic", "0x4647", "0x4547")
        return shard.stderr()

    # Others may have used up the lines of the last ten seconds.
    log = eventually(lambda: (said := turned_away()) and "turned away: magic: expected 0x4647, got 0x4547" in said and said, 20)
    assert "127.0.0.1:" in log
    before = log.count("turned away")
    for _ in range(100):
        log = turned_away()
    assert log.count("turned away") - before <= 20


def test_half_a_hello_and_silence_ends_after_its_deadline(world):
    hello = frame(body("Hello", wire.PROTOCOL, wire.ROLES["admin"], "", 0, 0))
    peers = [world.peer() for _ in range(3)]
    for peer, part in zip(peers, (hello[:20], hello[:-3], b"")):
        peer.send(part)
    world.trains()
    with takes(HELLO_DEADLINE - 2, HELLO_DEADLINE + 3):
        for peer in peers:
            with peer:
                assert peer.closes()


@pytest.mark.parametrize("role", ["control", "data", "coordinator", "admin"])
def test_another_protocol_is_refused_by_name(world, role):
    with world.peer() as peer:
        answer = peer.greet(role, "m", world.generation, epoch=world.epoch, protocol=wire.PROTOCOL + 1)
        assert answer.name == "Refused" and answer.fields == ("Protocol", wire.PROTOCOL, wire.PROTOCOL + 1)
        assert peer.closes()


@pytest.mark.parametrize("role", ["control", "data", "coordinator"])
def test_another_model_generation_or_epoch_is_refused_by_name(world, role):
    shard = world.coordinator if role == "control" else world.other
    for greeting, epoch, *expected in [
        (("nope", world.generation), world.epoch, "NoModel", "nope"),
        (("m", world.generation ^ 1), world.epoch, "Generation", "m", world.generation, world.generation ^ 1),
        (("m", world.generation), world.epoch + 5, "Epoch", world.epoch, world.epoch + 5),
    ]:
        with Peer(shard.address) as peer:
            answer = peer.greet(role, *greeting, epoch=epoch)
            assert answer.name == "Refused" and answer.fields == tuple(expected)
            assert peer.closes()


def test_control_of_a_model_is_with_its_coordinator(world):
    with Peer(world.other.address) as peer:
        answer = peer.greet("control", "m", world.generation, epoch=world.epoch)
        assert answer.name == "Refused" and answer.fields[0] == "Other" and "does not coordinate" in answer.fields[1]
        assert peer.closes()


def test_who_claims_to_coordinate_does_not_last(world):
    """A shard that coordinates refuses another coordinator; another one listens to its true coordinator again when that
    comes back."""
    with Peer(world.coordinator.address) as peer:
        answer = peer.greet("coordinator", "m", world.generation, epoch=world.epoch)
        assert answer.name == "Refused" and "coordinates" in answer.fields[1]
    with world.peer("coordinator", world.other):
        world.trains()
    world.trains()


@pytest.mark.parametrize("role", ["control", "data"])
def test_a_message_of_another_epoch_is_refused(world, role):
    with world.peer(role) as peer:
        peer.say("Probe" if role == "data" else "Join", *((1,) if role == "data" else ("e",)), request=9, epoch=9)
        refusal(peer, "Epoch", world.epoch, 9)


@pytest.mark.parametrize(
    "role, name, fields",
    [
        ("data", "Join", ("x",)),
        ("data", "Conclude", (1,)),
        ("data", "Status", ()),
        ("data", "Hello", (wire.PROTOCOL, 0, "m", 0, 0)),
        ("admin", "Join", ("x",)),
        ("admin", "Pull", (0, 0, 1)),
        ("admin", "Drop", (1,)),
    ],
)
def test_a_message_of_another_role_is_refused_by_name(world, role, name, fields):
    with world.peer(role) as peer:
        peer.say(name, *fields, request=3, epoch=0 if role == "admin" else world.epoch)
        answer = peer.hear_of("Refused")
        assert answer.fields == ("Role", name) and answer.request == 3


@pytest.mark.parametrize("name, fields", [("Status", ()), ("Probe", (1,)), ("Conclude", (1,)), ("Create", ())])
def test_a_message_of_another_role_is_refused_by_name__of_a_client(world, name, fields):
    with world.peer("control") as peer:
        if name == "Create":
            peer.say(name, payload=b"x", request=3, epoch=world.epoch)
            no_frame(peer, "payload of Create", "0 bytes", "1")
            return
        answer = peer.request(name, *fields, request=3, epoch=world.epoch)
        assert answer.name == "Refused" and answer.fields == ("Role", name)


BLOCK_BYTES = bytes(BLOCK)
HALF = ("Frame", "payload of Push", f"{BLOCK} bytes", f"{BLOCK // 2}")
TWICE = ("Frame", "payload of Push", f"{BLOCK} bytes", f"{2 * BLOCK}")


@pytest.mark.parametrize(
    "case, push, length, expected",
    [
        ("a block beyond the model", (1, 4000, False), BLOCK, ("NotMine", 4000)),
        ("half a block", (1, None, False), BLOCK // 2, HALF),
        ("a wide block of a model that is not", (1, None, True), 2 * BLOCK, TWICE),
    ],
)
def test_blocks_that_do_not_fit_are_refused(world, case, push, length, expected):
    plan, block, wide = push
    answers = []
    for shard in world.cluster.shards:
        for number in range(BLOCKS) if block is None else [block]:
            with world.peer("data", shard) as peer:
                peer.say("Push", plan, number, wide, False, payload=bytes(length), epoch=world.epoch)
                answers.append(peer.hear_of("Refused").fields)
                assert peer.closes()
    # Of the blocks of the model, each shard looks at the lengths of its own.
    assert expected in [answer[: len(expected)] for answer in answers]
    assert {answer[0] for answer in answers} <= {expected[0], "NotMine"}, answers


def test_blocks_of_plans_that_do_not_exist_change_nothing(world):
    """An old one's are passed over. A coming one's wait for it, though not for long, and hold nobody else up."""
    corrupt = struct.pack("<f", 1e9) * (BLOCK // 4)
    owned = []
    with world.peer("data") as old, world.peer("data") as coming:
        for block in range(BLOCKS):
            with world.peer("data") as peer:
                peer.say("Push", 1, block, False, False, payload=corrupt, epoch=world.epoch)
                peer.say("Probe", 1, epoch=world.epoch)
                answer = peer.hear_of("Missing", "Refused")
                assert answer.name == "Missing" or answer.fields == ("NotMine", block)
                owned += [block] if answer.name == "Missing" else []
        old.say("Probe", 1, epoch=world.epoch)
        assert old.hear_of("Missing").fields.fields("uu") == (1, 0)
        with takes(2, 6):
            for block in range(BLOCKS):
                # Blocks of other shards would end the connection.
                if block in owned:
                    coming.say("Push", 1 << 40, block, False, False, payload=corrupt, epoch=world.epoch)
            coming.say("Probe", 1, epoch=world.epoch)
            world.trains()
            assert coming.hear_of("Missing").fields.fields("uu") == (1, 0)


def test_a_payload_with_a_wrong_checksum_ends_the_connection(world):
    for shard in world.cluster.shards:
        for block in range(BLOCKS):
            with world.peer("data", shard) as peer:
                push = body("Push", 1, block, False, False)
                corrupt = frame(push, BLOCK_BYTES, epoch=world.epoch, crcs=(0, 0, 1))
                peer.send(corrupt)
                answer = peer.hear_of("Refused")
                if answer.fields != ("NotMine", block):
                    right, told = wire.crc32c(BLOCK_BYTES), wire.crc32c(BLOCK_BYTES) ^ 1
                    wrong = ("checksum of the payload", f"{told:#010x}", f"{right:#010x}")
                    assert answer.fields == ("Frame", *wrong)
                assert peer.closes()


def test_pulls_of_what_is_not_there_are_refused(world):
    with world.peer("data") as peer:
        world.trains()
        peer.say("Pull", 0, 0, BLOCKS, epoch=world.epoch)
        answer = peer.hear_of("Refused", "Block")
        assert answer.name == "Refused" and answer.fields[:2] == ("NoVersion", 0) and answer.fields[2] > 0
        # Blocks that are none of this shard's are none of the answer.
        newest = world.cluster.partition(world.coordinator, "m")["version"]
        peer.say("Pull", newest, 4000, 4001, epoch=world.epoch)
        peer.say("Probe", 1, epoch=world.epoch)
        assert peer.hear_of("Missing", "Block").name == "Missing"
    with world.peer("data") as peer:
        peer.say("Pull", 1, 3, 3, epoch=world.epoch)
        no_frame(peer, "blocks of Pull", "a set", "3")
    with world.peer("data") as peer:
        # A version that never comes is waited for, and holds nobody up; too many such are refused.
        for _ in range(300):
            peer.say("Pull", 1 << 40, 0, 1, epoch=world.epoch)
        assert peer.closes()


def test_requests_that_make_no_sense_are_refused(world):
    """Requests to the coordinator: each answer names the fault, and the connection stays."""
    with world.peer("control") as peer:
        asked = iter(range(1, 100))

        def ask(name, *fields):
            answer = peer.request(name, *fields, request=next(asked), epoch=world.epoch)
            return answer.fields if answer.name == "Refused" else answer.name

        assert ask("Join", "t") == ("name taken", "t")
        assert ask("Leave", 12345, 0) == ("unknown learner", 12345)
        assert ask("Open", 12345) == ("unknown learner", 12345)
        coordinator = world.cluster.coordinator("m")
        (other,) = [learner["id"] for learner in coordinator["learners"] if learner["name"] == "t"]
        for name, fields in [
            ("Leave", (other, 0)), ("Open", (other,)), ("Abort", (other,)), ("Withdraw", (other,)),
            ("Commit", (other, 1, [(0, BLOCKS)], ALL_TENSORS, WHOLE, GRADIENT, ONE, 100, False, NO_PLAN, NO_BASE)),
        ]:
            assert ask(name, *fields) == ("unknown learner", other), "another client's learner"
        kind, why = ask("SetControl", "reducer", "median")
        assert kind == "Control" and "median" in why
        assert ask("SetControl", "no_such", "1")[0] == "Control"
        assert ask("WithdrawAssign", 5) == "Done"
        assert ask("Assign", 1, [(0, BLOCKS)], 100, NO_PLAN)[0] == "not allowed"


def test_a_learner_of_a_stray_client_commits_out_of_order(world):
    with world.peer("control") as peer:
        joined = peer.request("Join", "stray", request=1, epoch=world.epoch)
        assert joined.name == "Joined"
        learner = joined.fields.number()
        commit = peer.request("Commit", learner, 7, [(0, BLOCKS)], ALL_TENSORS, WHOLE, GRADIENT, ONE, 100, False, NO_PLAN, NO_BASE, request=2, epoch=world.epoch)
        assert commit.name == "Refused" and commit.fields == ("step out of order", 7, 1)
        for request, outside in enumerate([([(0, BLOCKS + 1)], ALL_TENSORS), ([(0, BLOCKS)], [(0, 2)])], 3):
            answer = peer.request("Commit", learner, 1, *outside, WHOLE, GRADIENT, ONE, 100, False, NO_PLAN, NO_BASE, request=request, epoch=world.epoch)
            assert answer.name == "Refused" and answer.fields == ("out of range",)
        again = peer.request("Join", "stray", request=1, epoch=world.epoch)
        assert again.name == "Joined" and again.fields.number() == learner, "a request that is repeated is answered again"
        assert peer.request("Leave", learner, 0, request=5, epoch=world.epoch).name == "Done"


OVERSIZED = {
    "control": [(2 << 20, 0), (1, (256 << 10) + 1)],
    "data": [(2 << 20, 0), (4, 2 * BLOCK + 1), (4, 16 << 20), (4, (1 << 32) - 1)],
    "admin": [(2 << 20, 0), (1, (16 << 20) + 1), ((1 << 32) - 1, (1 << 32) - 1)],
}

# Of body and payload.
LIMITS = {"control": (1 << 20, 256 << 10), "data": (1 << 20, 2 * BLOCK), "admin": (1 << 20, 16 << 20)}


@pytest.mark.parametrize("role", OVERSIZED)
def test_lengths_beyond_their_limits_end_the_connection(world, role):
    """Before anything of that length comes, or is allocated."""
    for lengths in OVERSIZED[role]:
        with world.peer(role) as peer:
            name, fields = ("Push", (1, 0, False, False)) if role == "data" else ("Ping", ())
            peer.send(frame(body(name, *fields), epoch=world.epoch, lengths=lengths))
            too_long = next(str(length) for length, limit in zip(lengths, LIMITS[role]) if length > limit)
            no_frame(peer, "", "at most", too_long)


@pytest.mark.parametrize("ranges", [[(2, 2)], [(3, 1)], [(0, 2), (1, 3)], [(0, 1), (1, 2)], [(5, 6), (0, 1)]])
def test_blocks_that_are_no_set_end_the_connection(world, ranges):
    with world.peer("control") as peer:
        peer.say("Commit", 1, 1, ranges, ALL_TENSORS, WHOLE, GRADIENT, ONE, 100, False, NO_PLAN, NO_BASE, request=1, epoch=world.epoch)
        no_frame(peer, "blocks of Commit", "a set", "")
    with world.peer("control") as peer:
        peer.say("Commit", 1, 1, [(0, BLOCKS)], ranges, WHOLE, GRADIENT, ONE, 100, False, NO_PLAN, NO_BASE, request=1, epoch=world.epoch)
        no_frame(peer, "blocks of Commit", "a set", "")


def test_a_grant_that_nobody_answers_holds_the_job_up_for_the_lease_alone(world):
    """A client that commits and sends nothing is gone when its lease is over; its step counts for nobody."""
    world.mount.control("lease", 1)
    with world.peer("control") as peer:
        joined = peer.request("Join", "liar", request=1, epoch=world.epoch)
        learner = joined.fields.number()
        peer.say("Commit", learner, 1, [(0, BLOCKS)], ALL_TENSORS, WHOLE, GRADIENT, ONE, 5000, False, NO_PLAN, NO_BASE, request=2, epoch=world.epoch)
        peer.hear_of("Grant")
        # And says no more: its connection is given up, or it is.
        world.trains()
    world.mount.control("lease", 60)


def test_a_grant_that_nobody_answers_holds_the_job_up_for_the_lease_alone__of_a_client_that_pings(world):
    """Signs of life are no contribution: the client is given up, and the log names its learner."""
    world.mount.control("lease", 1)
    ends = threading.Event()
    with world.peer("control") as peer:
        learner = peer.request("Join", "liar", request=1, epoch=world.epoch).fields.number()
        peer.say("Commit", learner, 1, [(0, BLOCKS)], ALL_TENSORS, WHOLE, GRADIENT, ONE, 60_000, False, NO_PLAN, NO_BASE, request=2, epoch=world.epoch)
        peer.hear_of("Grant")

        def pings():
            with contextlib.suppress(OSError, Closed):
                while not ends.wait(0.2):
                    peer.say("Ping", epoch=world.epoch)

        pinging = threading.Thread(target=pings)
        pinging.start()
        try:
            world.trains(deadline=25)
        finally:
            ends.set()
            pinging.join()
    eventually(lambda: "the client of liar was granted" in world.coordinator.stderr())
    world.mount.control("lease", 60)


def test_pins_hold_a_job_up_for_half_of_the_time_at_most(world):
    """Whoever repeats them, and under whatever number of a snapshot."""
    ends, held = threading.Event(), []

    def pins():
        for snapshot in itertools.count(4711):
            for holds in (False, True):
                with world.peer("admin", shard) as peer:
                    answer = peer.request("Pin", world.generation, world.epoch, snapshot % 3, 0, holds, request=1, epoch=0)
                    held.append(holds and answer.name == "Pinned")
            if ends.wait(0.3):
                return

    with contextlib.ExitStack() as stack:
        for shard in world.cluster.shards:
            pinning = threading.Thread(target=pins)
            pinning.start()
            stack.callback(pinning.join)
        stack.callback(ends.set)
        eventually(lambda: any(held), 10)
        # The first pins of all shards end within 10 s.
        world.trains(deadline=30)


def test_a_save_soon_after_another_one_waits_for_its_turn(world, tmp_path):
    """The job has stood still for a second, and runs for as long before the next snapshot."""
    shard = world.coordinator
    with world.peer("admin", shard) as peer:
        for request, holds in enumerate((False, True), 1):
            answer = peer.request("Pin", world.generation, world.epoch, 815, 0, holds, request=request, epoch=0)
            assert answer.name in ("Done", "Pinned"), answer
        time.sleep(1)
        assert peer.request("Release", world.generation, 815, request=3, epoch=0).name == "Done"
    saved = world.cluster.run("save", "m", tmp_path / "snapshot")
    assert saved.returncode == 0, saved.stderr


@pytest.mark.parametrize(
    "name, fields, payload, expected",
    [
        ("Create", (), b"no record", "Other"),
        ("Create", (), bytes(100_000), "Other"),
        ("Loaded", (5,), b"", "NoModel"),
        ("Load", (5, 0, b"\0"), b"1234", "NoModel"),
        ("Pin", (5, 1, 7, 2, False), b"", "NoModel"),
        ("Pin", (5, 1, 7, 2, True), b"", "NoModel"),
        ("Copy", (5, 7, 1, 2), b"", "Other"),
        ("FetchCopy", (5, 7, 0, b"\0"), b"", "Other"),
        ("Capture", ("none", 5, 1), b"", "NoModel"),
        ("BeginAt", (5,), b"no record", "Other"),
    ],
    # Of the long payload, the name of its case would be longer than an environment may be.
    ids=itertools.count(),
)
def test_records_and_loads_that_are_none_are_refused(world, name, fields, payload, expected):
    with world.peer("admin") as peer:
        peer.say(name, *fields, payload=payload, request=2, epoch=0)
        assert peer.hear_of("Refused").fields[0] == expected


def test_another_generation_is_not_deleted(world):
    with world.peer("admin") as peer:
        answer = peer.request("Delete", "m", world.generation ^ 1, request=1, epoch=0)
        assert answer.fields == ("Generation", "m", world.generation, world.generation ^ 1)


def test_the_registry_refuses_what_is_none(world):
    with world.peer("admin", world.cluster.shards[0]) as peer:
        ask = lambda n, what, *fields, payload=b"": peer.request(  # noqa: E731
            "Registry", wire.REGISTRY[what], *fields, payload=payload, request=n, epoch=0
        )
        assert ask(1, "Announce", 0, "nowhere", "h", False, "", 1000, False).fields[0] == "Other"
        assert ask(2, "Announce", 0, "h:1", "h", False, "", 0, False).fields[0] == "Other"
        assert ask(3, "Drain", 900).fields[0] == "Other"
        assert ask(4, "Model", "nope").fields == ("NoModel", "nope")
        assert ask(5, "Put", b"\0", payload=b"no record").fields[0] == "Other"
        assert ask(6, "Delete", "m", world.generation ^ 1).fields[0] == "Generation"
    with world.peer("admin", world.cluster.shards[1]) as peer:
        answer = peer.request("Registry", wire.REGISTRY["Models"], request=1, epoch=0)
        assert answer.name == "Refused" and world.cluster.registry in answer.fields[1]


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
# Who floods by what; threads and bytes that a connection may take by that, as docs/internals/protocol.md states the limits.
# Those of requests that take time are for all connections of an address.
FLOODS = {
    "status": ("admin", ("Status",), 0, 33 * MIB),
    "fetch": ("admin", ("Fetch", "generation", "epoch", "version", 0, b"\0"), 0, 33 * MIB),
    "move": ("admin", ("Move", "m", "generation", 999, 60_000), 1, 16 * MIB),
    "abandon": ("admin", ("Abandon", "generation", 1), 8 // AT_ONCE, 16 * MIB),
    "create": ("admin", ("Create",), 8 // AT_ONCE, 65 * MIB),
    "ping": ("data", ("Ping",), 0, 33 * MIB),
    "pull of what comes": ("data", ("Pull", 1 << 40, 0, BLOCKS), 0, 16 * MIB),
    "pull of what is": ("data", ("Pull", "version", 0, BLOCKS), 0, 33 * MIB),
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


def test_a_crowd_of_strangers_keeps_nobody_out(world):
    """Many connections that say nothing, and many that come and go."""
    host, port = world.coordinator.address.rsplit(":", 1)
    crowd = [socket.create_connection((host, int(port)), timeout=5) for _ in range(200)]
    world.trains()
    for one in crowd[:100]:
        one.close()
    with world.peer("admin") as peer:
        assert peer.request("Status", epoch=0).name == "Text"
    for one in crowd[100:]:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
