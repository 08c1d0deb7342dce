"""Numbers that nobody has reached, said under a role or a client's number that is not one's own: they are refused, and the
job goes on. A training goes on meanwhile."""

import pytest
from test_cluster_bad_input import BLOCKS, CLIENTS, GRADIENT, NO_BASE, NO_PLAN, ONE, WHOLE, World, refusal
from wire import Closed, Peer

FAR = [1 << 63, (1 << 64) - 2, (1 << 64) - 1]
ADD = b"\0\0"


@pytest.fixture(scope="module")
def world():
    world = World()
    yield world
    world.trains()
    world.end()


def coordinates(world, over):
    """Somebody connects to the shard that does not coordinate as its coordinator, and says so many plans are over."""
    peer = Peer(world.other.address)
    welcome = peer.greet("coordinator", "m", world.generation, client=over, epoch=world.epoch)
    assert welcome.name == "Welcome", welcome
    return peer


def connects(world, client):
    """Somebody connects under the number of a client."""
    peer = Peer(world.coordinator.address)
    assert peer.greet("control", "m", world.generation, client=client, epoch=world.epoch).name == "Welcome"
    return peer


def start(plan, base, sources=()):
    return ("Start", plan, base, ADD, list(sources), False)


@pytest.mark.parametrize("over", [0, *FAR])
@pytest.mark.parametrize("number", FAR)
def test_a_number_that_nobody_has_reached_stops_no_job(world, number, over):
    """Numbers of plans, from a stranger that poses as the coordinator."""
    with coordinates(world, over) as peer:
        version = world.cluster.partition(world.other, "m")["version"]
        for name, *fields in [("Drop", number), ("Conclude", number), start(number, version), start(number, FAR[-1])]:
            peer.say(name, *fields, request=number, epoch=world.epoch)
    world.trains()
    assert world.cluster.coordinator("m")["state"] != "failed"


def test_a_number_that_nobody_has_reached_stops_no_job__of_the_next_plans(world):
    for ahead in range(1, 4):
        for what in ("Drop", "Start"):
            world.trains()
            # About where the job is; with the learner at work, some of it meets a plan under way.
            with coordinates(world, 0) as peer:
                for plan in range(1, ahead + 1):
                    newest = lambda: world.cluster.partition(world.other, "m")["version"]
                    order = ("Drop", plan) if what == "Drop" else start(plan, newest())
                    peer.say(order[0], *order[1:], request=plan, epoch=world.epoch)
            world.trains()


def test_a_number_that_nobody_has_reached_stops_no_job__which_is_refused_by_name(world):
    with coordinates(world, 5) as peer:
        for name, *fields in [("Drop", 1 << 40), start(1 << 40, 0)]:
            peer.say(name, *fields, request=9, epoch=world.epoch)
            answer = peer.hear_of("Refused")
            assert answer.fields == ("Plan", 1 << 40, 5) and answer.request == 9, answer
    for role, name, fields in [("control", "Ready", (FAR[0],)), ("control", "NonFinitePayload", (FAR[0], 1, 0))]:
        with world.peer(role) as peer:
            answer = peer.request(name, *fields, request=3, epoch=world.epoch)
            assert answer.fields == ("Role", name)
    with coordinates(world, 0) as peer:
        peer.say("Ready", FAR[0], request=3, epoch=world.epoch)
        assert peer.hear_of("Refused").fields == ("Role", "Ready")


@pytest.mark.parametrize("number", FAR)
def test_a_client_goes_on_after_somebody_has_used_its_number(world, number):
    client = next(CLIENTS)
    with connects(world, client) as peer:
        joined = peer.request("Join", f"n{client}", request=1, epoch=world.epoch)
        learner = joined.fields.number()
    with connects(world, client) as stranger:
        refused = stranger.request("Abort", learner, request=number, epoch=world.epoch)
        assert refused.name == "Refused" and f"{number} is too far ahead" in refused.fields[1], refused
        stranger.say("Over", number, request=0, epoch=world.epoch)
        # Its connection ends.
        stranger.say("AckThrough", number, number, epoch=world.epoch)
        with pytest.raises(Closed):
            stranger.hear_of("Refused")
    with connects(world, client) as peer:
        again = peer.request("Join", f"n{client}", request=1, epoch=world.epoch)
        assert again.name == "Joined" and again.fields.number() == learner, "the answer was not heard"
        commit = ("Commit", learner, number, [(0, BLOCKS)], [(0, 1)], WHOLE, GRADIENT, ONE, 100, False, NO_PLAN, NO_BASE)
        assert peer.request(*commit, request=2, epoch=world.epoch).fields == ("step out of order", number, 1)
        assert peer.request("Leave", learner, 0, request=3, epoch=world.epoch).name == "Done"


@pytest.mark.parametrize("number", [1 << 20, 1 << 31])
@pytest.mark.parametrize(
    "lie", ["a refused request", "a request of its learner", "everything is acknowledged", "nothing is made"]
)
def test_a_client_goes_on_after_somebody_has_used_its_number__also_one_that_it_may_have_reached(world, number, lie):
    client = next(CLIENTS)
    with connects(world, client) as peer:
        learner = peer.request("Join", f"n{client}", request=1, epoch=world.epoch).fields.number()
    with connects(world, client) as stranger:
        match lie:
            case "a refused request":
                assert stranger.request("Open", 1 << 31, request=number, epoch=world.epoch).name == "Refused"
            case "a request of its learner":
                assert stranger.request("Abort", learner, request=number, epoch=world.epoch).name in ("Done", "Refused")
            case "everything is acknowledged":
                stranger.request("Open", 1 << 31, request=number, epoch=world.epoch)
                stranger.say("AckThrough", number, number, epoch=world.epoch)
            case "nothing is made":
                stranger.say("AckThrough", 0, 0, epoch=world.epoch)
        stranger.request("Open", 1 << 31, request=number + 1, epoch=world.epoch)
    with connects(world, client) as peer:
        peer.say("AckThrough", 0, 1, epoch=world.epoch)
        again = peer.request("Join", f"n{client}", request=1, epoch=world.epoch)
        assert again.name == "Joined" and again.fields.number() == learner, "the answer was not heard"
        peer.say("AckThrough", 1, 1, epoch=world.epoch)
        assert peer.request("Open", learner, request=2, epoch=world.epoch).name == "Opened"
        assert peer.request("Abort", learner, request=3, epoch=world.epoch).name == "Done"
        assert peer.request("Leave", learner, 0, request=4, epoch=world.epoch).name == "Done"


def test_a_number_that_nobody_has_reached_stops_no_job__of_an_epoch(world):
    for number in FAR:
        with world.peer("control") as peer:
            peer.say("Join", "e", request=1, epoch=number)
            refusal(peer, "Epoch", world.epoch, number)
        with Peer(world.other.address) as peer:
            answer = peer.greet("coordinator", "m", world.generation, epoch=number)
            assert answer.fields == ("Epoch", world.epoch, number)
