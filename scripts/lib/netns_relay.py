"""The link of hosts in network namespaces: a process that holds frames back.

    netns_relay.py DELAY LOSS RATE MTU OUT PORTS...

It runs in the switch's namespace. Frames that come in by `PORTS` go out through the bridge `OUT`, later, and some
not at all; the bridge itself must not take them. So that is what a host sends; what it receives comes from the bridge
directly.

Frames are moved by recvmmsg(2) and sendmmsg(2) through ctypes, many at a time and without a look at each: one by one,
Python would be the slowest part of the network.
"""

import ctypes
import errno
import os
import random
import select
import socket
import sys
import time
from collections import deque

# What one system call moves, and with a rate, what may go out at once.
MOST_FRAMES, FRAMES_IN_TURN = 64, 16
# What a frame is longer than the MTU, and the multiple that room for one is.
HEADER, LINE = 18, 64
# What waits in sockets until it is looked at, and what waits for its turn at a rate; the rest is lost.
BUFFER, QUEUE = 16 << 20, 4 << 20

# struct mmsghdr and struct iovec of 64-bit Linux, in words.
MESSAGE, MESSAGE_IOV, MESSAGE_IOVLEN, MESSAGE_LENGTH = 8, 2, 3, 7
IOV, IOV_LENGTH = 2, 1

ETH_P_ALL = 0x0003
SOL_PACKET, PACKET_IGNORE_OUTGOING = 263, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
PR_SET_TIMERSLACK = 29

_libc = ctypes.CDLL(None, use_errno=True)


class Batch:
    """Frames that came together, in memory that is used again."""

    def __init__(self, room, frame):
        """Room for `room` frames of up to `frame` bytes."""
        self.room = room
        self.slab = ctypes.create_string_buffer(room * frame)
        self.messages = (ctypes.c_uint64 * (room * MESSAGE))()
        iovs = (ctypes.c_uint64 * (room * IOV))()
        for i in range(room):
            iovs[i * IOV] = ctypes.addressof(self.slab) + i * frame
            self.messages[i * MESSAGE + MESSAGE_IOV] = ctypes.addressof(iovs) + i * IOV * 8
            self.messages[i * MESSAGE + MESSAGE_IOVLEN] = 1
        self.iovs = iovs
        # Strided views: lengths are moved without a loop.
        self.space = memoryview(iovs).cast("B").cast("Q")[IOV_LENGTH::IOV]
        self.lengths = memoryview(self.messages).cast("B").cast("Q")[MESSAGE_LENGTH::MESSAGE]
        self.full = memoryview(frame.to_bytes(8, "little") * room).cast("Q")
        self.frames, self.due, self.lost = 0, 0.0, []

    def receive(self, source):
        """Takes what is there, without waiting; whether that was something."""
        self.space[:] = self.full
        got = _libc.recvmmsg(source.fileno(), self.messages, self.room, socket.MSG_DONTWAIT, None)
        # ENETDOWN is said once for an interface that is taken down.
        if got < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ENETDOWN):
            raise OSError(ctypes.get_errno(), "recvmmsg")
        self.frames = max(got, 0)
        self.space[: self.frames] = self.lengths[: self.frames]
        return self.frames > 0

    def bytes(self):
        """How many there are."""
        return sum(self.lengths[: self.frames])

    def send(self, target):
        """Sends all that is not lost. What does not fit is dropped, as a switch does."""
        first = 0
        for end in (*self.lost, self.frames):
            while first < end:
                at = ctypes.byref(self.messages, first * MESSAGE * 8)
                sent = _libc.sendmmsg(target.fileno(), at, end - first, socket.MSG_DONTWAIT)
                first += max(sent, 1)
            first = end + 1


class Port:
    """What one host sends."""

    def __init__(self, name, room, frame, loss):
        """`loss` is the share of frames that are lost, each whatever became of others."""
        self.socket, self.chance = packet_socket(name, ETH_P_ALL), random.Random(name)
        self.room, self.frame, self.loss = room, frame, loss
        self.waiting, self.free, self.free_at, self.queued = deque(), [], 0.0, 0

    def take(self, delay, seconds_a_byte):
        """Receives what is there and puts it into the queue."""
        while True:
            batch = self.free.pop() if self.free else Batch(self.room, self.frame)
            if not batch.receive(self.socket):
                self.free.append(batch)
                return
            now = time.monotonic()
            frames = range(batch.frames if self.loss else 0)
            batch.lost = [frame for frame in frames if self.chance.random() < self.loss]
            size = batch.bytes() if seconds_a_byte else 0
            if self.queued + size > QUEUE:
                self.free.append(batch)
                continue
            self.queued += size
            self.free_at = max(now, self.free_at) + size * seconds_a_byte
            batch.due = self.free_at + delay
            self.waiting.append(batch)

    def give(self, target):
        """Sends what is due; when the next is, or nothing."""
        while self.waiting:
            batch = self.waiting[0]
            if batch.due > time.monotonic():
                return batch.due
            batch.send(target)
            self.queued -= batch.bytes() if self.queued else 0
            self.free.append(self.waiting.popleft())
        return None


def packet_socket(interface, protocol):
    """A raw socket on `interface`; with protocol 0 it only sends."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    for level, option in ((socket.SOL_SOCKET, SO_RCVBUFFORCE), (socket.SOL_SOCKET, SO_SNDBUFFORCE)):
        made.setsockopt(level, option, BUFFER)
    made.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    made.bind((interface, protocol))
    return made


def relay(ports, target, delay, rate):
    """Goes on until the process ends."""
    seconds_a_byte = 8 / rate if rate else 0
    sockets = {port.socket: port for port in ports}
    dues = {}
    while True:
        wait = max(0, min(dues.values()) - time.monotonic()) if dues else None
        for readable in select.select(sockets, (), (), wait)[0]:
            sockets[readable].take(delay, seconds_a_byte)
        for port in ports:
            due = port.give(target)
            if due is None:
                dues.pop(port, None)
            else:
                dues[port] = due


def main():
    mtu, out, *names = sys.argv[4:]
    delay, loss, rate = map(float, sys.argv[1:4])
    # Waits are to end when they are due, not 50 microseconds later.
    _libc.prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)
    os.nice(-10)
    room = FRAMES_IN_TURN if rate else MOST_FRAMES
    frame = -(-(int(mtu) + HEADER) // LINE) * LINE
    ports = [Port(name, room, frame, loss) for name in names]
    target = packet_socket(out, 0)
    print("ready", flush=True)
    relay(ports, target, delay, rate)


if __name__ == "__main__":
    main()
