"""Blocks with and without a checksum over TCP: `--checksum` of mounts and shards, as docs/operate/network.md describes it."""

import numpy as np
import pytest
import wire
from filetools import array, takes
from test_cluster_failures import ELEMENTS, give, model, only

BLOCKS = {"up": {"Push"}, "down": {"Block", "BlockAhead"}}
# The flag of a frame whose payload has no checksum.
UNCHECKED = 1


class Frames:
    """A rule for a proxy that notes the frames of connections for blocks: (direction, message, flags, checksum, payload).
    It changes nothing, except one byte of a payload on the way that `spoil` names."""

    def __init__(self):
        self.seen = []
        self.way = None
        self._unread = {}

    def spoil(self, way):
        """Changes one byte of the next payload in this direction."""
        self.way = way

    def __call__(self, connection, direction, data):
        if connection.role != "data":
            return data
        unread = self._unread.setdefault((connection, direction), bytearray())
        before = len(unread)
        unread += data
        at = 0
        while len(unread) - at >= wire.HEADER_BYTES:
            head = bytes(unread[at : at + wire.HEADER_BYTES])
            magic, flags, body, payload, crc, *_ = wire.HEADER.unpack(head[: wire.HEADER.size])
            assert magic == b"GF" and wire.crc32c(head[: wire.HEADER.size]) == int.from_bytes(head[-4:], "little")
            start = at + wire.HEADER_BYTES + body
            end = start + payload
            here = range(max(start, before), min(end, len(unread)))
            if direction == self.way and here:
                unread[here[0]] ^= 0x10
                self.way = None
            if len(unread) < end:
                break
            name = wire.NAMES[wire.Reading(bytes(unread[at + wire.HEADER_BYTES : start])).number()]
            self.seen.append((direction, name, flags, crc, bytes(unread[start:end])))
            at = end
        passed = bytes(unread[before:])
        del unread[:at]
        return passed


def proxied(cluster, shard):
    """A model on one shard with this `--checksum`, and the frames that pass a proxy before it."""
    one = cluster(0)
    proxy = one.proxy()
    one.add_shard("--checksum", shard, proxy=proxy)
    proxy.rule = Frames()
    return model(one), proxy.rule


@pytest.mark.parametrize("shard", ["on", "off"])
@pytest.mark.parametrize("mount", ["on", "off"])
def test_each_end_decides_whether_its_blocks_have_a_checksum(cluster, mount, shard):
    one, frames = proxied(cluster, shard)
    mounted = one.mount(checksum=mount)
    for step in (1, 2, 3):
        give(mounted, step)
        assert only(mounted) == step * (step + 1) // 2
    for direction, choice in {"up": mount, "down": shard}.items():
        passed = [frame[1:] for frame in frames.seen if frame[0] == direction]
        assert {name for name, _, _, payload in passed if payload} <= BLOCKS[direction]
        assert all(flags == 0 for _, flags, _, payload in passed if not payload)
        blocks = [(flags, crc, payload) for _, flags, crc, payload in passed if payload]
        assert blocks
        for flags, crc, payload in blocks:
            assert (flags, crc) == ((0, wire.crc32c(payload)) if choice == "on" else (UNCHECKED, 0))
    pushed = {value for _, name, *_, payload in frames.seen if name == "Push" for value in np.frombuffer(payload, "<f4")}
    assert pushed == {1, 2, 3}

    status = mounted.status()
    assert status["shards"][0]["checksum"] == mount
    assert (status["payload"]["unchecked_bytes"] > 0) == (shard == "off")
    told = one.status()["shards"][0]
    assert told["checksum"] == shard
    assert (told["models"][0]["payload"]["unchecked_bytes"] > 0) == (mount == "off")
    assert ("without checksums" in one.run("status").stdout) == (shard == "off")


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("checksum", ["on", "off"])
def test_a_wrong_byte_of_a_block_is_noticed_if_the_block_has_a_checksum(cluster, checksum, way):
    """Without one it is taken as it came."""
    choices = {"up": "on", "down": "on", way: checksum}
    one, frames = proxied(cluster, choices["down"])
    mounted = one.mount(checksum=choices["up"])
    give(mounted, 1)
    assert only(mounted) == 1
    frames.spoil(way)
    with takes(0, 8):
        give(mounted, 10)
        mounted.catch_up()
        weights = array(mounted.model / "weights")
    assert frames.way is None and len(weights) == ELEMENTS
    wrong = np.flatnonzero(weights != 11)
    found = any("checksum of the " in one.get("connection_lost_because", "") for one in mounted.status()["shards"])
    assert (len(wrong), found) == ((0, True) if checksum == "on" else (1, False)), weights[wrong]
