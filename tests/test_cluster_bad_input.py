"""What a shard's port is told by those who do not keep to docs/internals/protocol.md: they are refused with the reason, or cut
off, and nobody else notices. A training goes on meanwhile."""

import contextlib
import itertools
import socket
import struct
import threading
import time

import pytest
import wire
from filetools import BLOCK, eventually, takes
from strangers import BLOCKS, of_module, world  # noqa: F401
from wire import Peer, body, frame

ALL_TENSORS = [(0, 1)]
# A commit names no pieces of blocks: all of each was written.
WHOLE = b"\1\0"
# No provisional plan, and no version that the learner has opened.
NO_PLAN = b"\0"
NO_META = b"\0"
ONE = 0x3FF0_0000_0000_0000
# With values of no averaged tensor.
GRADIENT = (0, 0)
NO_BASE = b"\0"
HELLO_DEADLINE = 5


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
    "much": (b"much" * 500_000, "magic", "0x4647", "0x756d"),
    "body beyond the limit": (frame(body("Ping"), lengths=(1 << 31, 0)), "body", "at most 4096", "2147483648"),
    "payload before the greeting": (frame(body("Ping"), lengths=(1, 1 << 30)), "payload", "at most 0", "1073741824"),
    "more than a message": (frame(body("Ping") + b"x"), "body", "no more", "1 bytes more"),
    "damaged header": (frame(body("Status"), crcs=(1, 0, 0)), "checksum of the header", "0x", "0x"),
    "a hello cut in its fields": (frame(body("Hello", wire.PROTOCOL, 0)), "body", "a message", "end of buffer"),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_ends_its_own_connection_alone(world, case):
    data, *wrong = GARBAGE[case]
    for shard in world.cluster.shards:
        with world.peer(shard=shard) as peer:
            peer.send(data)
            no_frame(peer, *wrong)


def test_garbage_ends_its_own_connection_alone__however_long_it_is(world):
    """Somebody who goes on talking is not listened to for long."""
    with world.peer() as peer, takes(0, 4), pytest.raises((BrokenPipeError, ConnectionResetError)):
        peer.socket.settimeout(4)
        while True:
            peer.socket.sendall(b"much" * 10_000)


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


@pytest.mark.parametrize("role", ["control", "data"])
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
        ("data", "Hello", (wire.PROTOCOL, 0, "m", 0, 0)), ("admin", "Join", ("x",)), ("control", "Conclude", (1,)),
        (None, "Join", ("x",)),
    ],  # fmt: skip
)
def test_a_message_of_another_role_is_refused_by_name(world, role, name, fields):
    with world.peer(role) as peer:
        peer.say(name, *fields, request=3, epoch=0 if role == "admin" else world.epoch)
        answer = peer.hear_of("Refused")
        assert answer.fields == ("Role", name) and answer.request == 3


BLOCK_BYTES = bytes(BLOCK)
HALF = ("Frame", "payload of Push", f"{BLOCK} bytes", f"{BLOCK // 2}")


@pytest.mark.parametrize("blocks, length, expected", [([4000], BLOCK, ("NotMine", 4000)), (range(BLOCKS), BLOCK // 2, HALF)])
def test_blocks_that_do_not_fit_are_refused(world, blocks, length, expected):
    answers = []
    for shard in world.cluster.shards:
        for number in blocks:
            with world.peer("data", shard) as peer:
                peer.say("Push", 1, number, False, False, payload=bytes(length), epoch=world.epoch)
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
        peer.say("Pull", 0, 0, BLOCKS, None, epoch=world.epoch)
        answer = peer.hear_of("Refused", "Block")
        assert answer.name == "Refused" and answer.fields[:2] == ("NoVersion", 0) and answer.fields[2] > 0
        # Blocks that are none of this shard's are none of the answer.
        newest = world.cluster.partition(world.coordinator, "m")["version"]
        peer.say("Pull", newest, 4000, 4001, None, epoch=world.epoch)
        peer.say("Probe", 1, epoch=world.epoch)
        assert peer.hear_of("Missing", "Block").name == "Missing"
    with world.peer("data") as peer:
        peer.say("Pull", 1, 3, 3, None, epoch=world.epoch)
        no_frame(peer, "blocks of Pull", "a set", "3")
    with world.peer("data") as peer:
        # A version that never comes is waited for, and holds nobody up; too many such are refused.
        for _ in range(300):
            peer.say("Pull", 1 << 40, 0, 1, None, epoch=world.epoch)
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
        assert ask("Assign", 1, [(0, BLOCKS)], 100, NO_PLAN, NO_META)[0] == "not allowed"


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


@pytest.mark.parametrize("ranges", [[(2, 2)], [(0, 2), (1, 3)]])
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
        ("Load", (5, 0, b"\0"), b"1234", "NoModel"),
        ("FetchCopy", (5, 7, 0, b"\0"), b"", "Other"),
        ("BeginAt", (5,), b"no record", "Other"),
        ("ChangedSince", (5, 1, 2, 0), b"", "NoModel"),
        ("ReadParts", (5, 1, None, [(0, 4, 4, 1)]), b"", "NoModel"),
        # Of no bytes, overlapping, past the end of numbers, too long, too many.
        ("ReadParts", (5, 1, None, []), b"", "Frame"),
        ("ReadParts", (5, 1, None, [(0, 0, 4, 1)]), b"", "Frame"),
        ("ReadParts", (5, 1, None, [(0, 4, 3, 2)]), b"", "Frame"),
        ("ReadParts", (5, 1, None, [(2**64 - 2, 4, 4, 1)]), b"", "Frame"),
        ("ReadParts", (5, 1, None, [(0, 4, 8, 2**63)]), b"", "Frame"),
        ("ReadParts", (5, 1, None, [(0, 1, 1, 1)] * 4097), b"", "Frame"),
    ],
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
