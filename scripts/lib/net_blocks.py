"""Push and pull against the size of the model's blocks, for scripts/bench-net (over TCP and over shared memory) and
scripts/bench-rdma.

Pipelined: a model of many blocks is pushed and pulled with as many blocks on their way as fit. Synchronous: a model of one
block is, so that each block waits for the one before, with all that a push has to do besides (grant, plan,
conclusion). Blocks are 64 KiB to 4 MiB: there are no others.

Every size and transport is a cluster that lives through the whole race, so that slow moments of the machine hit all.
"""

import random
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Optional

import net_gradfs
from machine import GIB, MIB

SIZES = [64 << shift << 10 for shift in range(7)]
WHATS = ("push", "pull")
TRANSPORTS = {"tcp": (), "shm": ("--shm",)}


@dataclass(frozen=True)
class Way:
    """How a contender's turn goes: pushes and pulls that bring its memory and connections back, then those counted."""

    model: Optional[int]
    rounds: int
    before: int
    counted: int


# Without a model's size it is that of a block.
WAYS = {"pipelined": Way(64 * MIB, 25, 1, 2), "sync": Way(None, 11, 4, 8)}
# Rounds before, in which every buffer is used for the first time.
WARM_UP = 2
# Of all clusters of the race with the larger models: gradients, versions at either end, a shard's sums; as found.
MEMORY = len(SIZES) * len(TRANSPORTS) * WAYS["pipelined"].model * 11 + GIB


def _turn(gradfs, way, found):
    """Adds the rates, GB/s, to found[what]."""
    for index in range(way.before + way.counted):
        for what in WHATS:
            took = gradfs.round(what)
            if index >= way.before:
                found[what].append(took.bytes / took.seconds / 1e9)


def race(names, start, way, quiet):
    """{(size, name): {what: [GB/s]}}; `start(stack, name, size, model)` starts a contender, a net_gradfs.Gradfs."""
    found = {(size, name): {what: [] for what in WHATS} for size in SIZES for name in names}
    with ExitStack() as stack:
        contenders = {(size, name): start(stack, name, size, way.model or size) for size, name in found}
        # The order differs from round to round, and is the same in every run.
        shuffle = random.Random(0).shuffle
        order = list(contenders)
        for turn in range(WARM_UP + way.rounds):
            quiet.wait()
            shuffle(order)
            for contender in order:
                rates = found[contender] if turn >= WARM_UP else {what: [] for what in WHATS}
                _turn(contenders[contender], way, rates)
        for gradfs in contenders.values():
            gradfs.check()
    return found


def measure(binaries, quiet):
    """{(what, transport, way): {size: GB/s}}, medians."""

    def start(stack, name, size, model):
        return net_gradfs.library(stack, binaries, model, 1, block_size=size, options=TRANSPORTS[name])

    return medians({name: race(TRANSPORTS, start, way, quiet) for name, way in WAYS.items()}, TRANSPORTS)


def medians(found, transports):
    """{(what, transport, way): {size: GB/s}} of the races of all ways."""
    return {
        (what, transport, name): {size: statistics.median(found[name][size, transport][what]) for size in SIZES}
        for what in WHATS
        for transport in transports
        for name in found
    }
