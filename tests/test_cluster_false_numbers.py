"""Numbers that nobody has reached, said under a role or a client's number that is not one's own: they are refused, and the
job goes on. A training goes on meanwhile."""

import pytest
from strangers import BLOCKS, CLIENTS, World
from test_cluster_bad_input import GRADIENT, NO_BASE, NO_PLAN, ONE, WHOLE
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


@pytest.mark.parametrize("over, number", [(0, FAR[0]), (FAR[1], FAR[2])])
def test_a_number_that_nobody_has_reached_stops_no_job(world, number, over):
    """Numbers of plans, from a stranger that poses as the coordinator."""
    with coordinates(world, over) as peer:
        version = world.cluster.partition(world.other, "m")["version"]
        for name, *fields in [("Drop", number), ("Conclude", number), start(number, version), start(number, FAR[-1])]:
            peer.say(name, *fields, request=number, epoch=world.epoch)
    world.trains()
    assert world.cluster.coordinator("m")["state"] != "failed"


@pytest.mark.parametrize("number", FAR[1:])
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
