"""gradfs's protocol for tests that speak it over raw sockets: docs/internals/protocol.md, whose tables say the numbers."""

import re
import socket
import struct
import time
from collections import namedtuple
from pathlib import Path

from patience import HANGS

DOCUMENT = Path(__file__).resolve().parent.parent / "docs/internals/protocol.md"
HEADER = struct.Struct("<2sHIIIQQI")  # Without its own checksum.
# What this speaks.
HEADER_BYTES = HEADER.size + 4
PROTOCOL = 17
ROLES = {"control": 0, "data": 1, "coordinator": 2, "admin": 3, "relay": 4}


def _numbers(what):
    """Name -> number of the tables with this title in their second column."""
    numbers = {}
    for table in re.split(r"\n\n", DOCUMENT.read_text()):
        if table.startswith(f"| no. | {what} |"):
            numbers.update((name, int(number)) for number, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", table, re.M))
    return numbers


MESSAGES = _numbers("message")
NAMES = {number: name for name, number in MESSAGES.items()}
REGISTRY = _numbers("request to the registry")
REFUSALS = {number: name for name, number in _numbers("refusal").items()}
# Fields of refusals: u a number, s a text.
REFUSAL_FIELDS = {
    "Protocol": "uu", "NoModel": "s", "Generation": "suu", "Exists": "s", "Epoch": "uu", "NotMine": "u",
    "NoVersion": "uu", "Role": "s", "Control": "s", "Other": "s", "Frame": "sss",
    "Deleted": "s", "NumberTaken": "us", "NoRdma": "s", "Plan": "uu", "Moving": "u",
}
SHARD_REFUSALS = [
    ("unknown learner", "u"), ("name taken", "s"), ("too many learners", "u"), ("step out of order", "uu"),
    ("bad block", "uu"), ("out of range", ""), ("not finite", "u"), ("stopped", "uu"), ("timed out", "s"),
    ("interrupted", ""), ("unreachable", ""), ("out of memory", "s"), ("not allowed", "s"), ("lost", "s"),
    ("out of open files", "s"), ("scattered", "u"),
]

_CRC = []
for _byte in range(256):
    for _ in range(8):
        _byte = (_byte >> 1) ^ (0x82F63B78 if _byte & 1 else 0)
    _CRC.append(_byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out + bytes([number]))


def field(value):
    """Postcard: numbers as varints, texts and lists with their length in front, tuples one field after the other."""
    match value:
        case None:
            return bytes([0])
        case bool():
            return bytes([value])
        case int():
            return varint(value)
        case str():
            return varint(len(value.encode())) + value.encode()
        case list():
            return varint(len(value)) + b"".join(map(field, value))
        case tuple():
            return b"".join(map(field, value))
        case bytes():
            return value
    raise TypeError(value)


def body(name, *fields):
    return varint(MESSAGES[name]) + field(fields)


def frame(body, payload=b"", request=0, epoch=0, *, magic=b"GF", flags=0, lengths=None, crcs=(0, 0, 0)):
    """A frame; `lengths` are told instead of the true ones, `crcs` spoil the checksums of header, body, payload."""
    body_len, payload_len = lengths or (len(body), len(payload))
    payload_crc = (crc32c(payload) if payload else 0) ^ crcs[2]
    head = HEADER.pack(magic, flags, body_len, payload_len, payload_crc, request, epoch, crc32c(body) ^ crcs[1])
    return head + struct.pack("<I", crc32c(head) ^ crcs[0]) + body + payload


class Reading:
    """Fields of a body, one after the other."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def number(self):
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def text(self):
        length = self.number()
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def fields(self, kinds):
        return tuple(self.number() if kind == "u" else self.text() for kind in kinds)


# `fields` are a refusal's name and fields; other messages keep their Reading.
Message = namedtuple("Message", "name fields request epoch payload")


def decode(header, data, payload):
    magic, flags, _, _, payload_crc, request, epoch, body_crc = HEADER.unpack(header[: HEADER.size])
    assert (magic, flags) == (b"GF", 0) and struct.unpack("<I", header[HEADER.size :])[0] == crc32c(header[:36])
    assert body_crc == crc32c(data) and payload_crc == (crc32c(payload) if payload else 0)
    reading = Reading(data)
    name = NAMES[reading.number()]
    fields = reading
    if name == "Refused":
        what = REFUSALS[reading.number()]
        if what == "Shard":
            words, kinds = SHARD_REFUSALS[reading.number()]
            fields = (words, *reading.fields(kinds))
        else:
            fields = (what, *reading.fields(REFUSAL_FIELDS[what]))
    return Message(name, fields, request, epoch, payload)


class Closed(Exception):
    """The peer has ended the connection."""


class Peer:
    """A raw connection to a shard. Every wait ends after HANGS seconds, with a failure."""

    def __init__(self, address):
        host, port = address.rsplit(":", 1)
        # Of IPv6 in brackets.
        self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout=HANGS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        """Bytes; a connection that is over already is found by the next receive."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def say(self, name, *fields, payload=b"", request=0, epoch=1):
        self.send(frame(body(name, *fields), payload, request, epoch))

    def _read(self, count):
        data = bytearray()
        while len(data) < count:
            try:
                more = self.socket.recv(count - len(data))
            except ConnectionResetError as error:
                raise Closed from error
            if not more:
                raise Closed
            data += more
        return bytes(data)

    def hear(self, deadline=HANGS):
        """The next message but pings; Closed when there is none any more."""
        end = time.monotonic() + deadline
        while True:
            self.socket.settimeout(max(end - time.monotonic(), 0.001))
            header = self._read(HEADER_BYTES)
            body_len, payload_len = struct.unpack_from("<II", header, 4)
            message = decode(header, self._read(body_len), self._read(payload_len))
            if message.name == "Ping":
                self.say("Pong", epoch=0)
            elif message.name != "Pong":
                return message

    def hear_of(self, *names, deadline=HANGS):
        """The next message with one of these names."""
        end = time.monotonic() + deadline
        while (message := self.hear(end - time.monotonic())).name not in names:
            pass
        return message

    def closes(self, deadline=HANGS):
        """Whether the connection ends; what comes before is passed over."""
        try:
            while True:
                self.hear(deadline)
        except Closed:
            return True
        except TimeoutError:
            return False

    def greet(self, role, model="", generation=0, client=1, epoch=1, protocol=PROTOCOL):
        """Says hello; returns the answer, Welcome or Refused."""
        hello = (protocol, ROLES[role], model, generation, client)
        self.say("Hello", *hello, epoch=0 if role == "admin" else epoch)
        return self.hear()

    def request(self, name, *fields, payload=b"", request=1, epoch=1):
        """The answer to a request."""
        self.say(name, *fields, payload=payload, request=request, epoch=epoch)
        while (answer := self.hear()).request != request:
            pass
        return answer
