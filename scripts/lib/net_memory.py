"""Memory of a shard process by the number of learners, for scripts/bench-net.

Each connection has buffers of fixed size: headers to be sent, and one payload that is added from cache. They are
counted out, by what they are in libmodelio/src/transport/frames/.
"""

from contextlib import ExitStack

import net_gradfs
from machine import MIB
from report import Figure

SIZE = 16 * MIB
BLOCK = 256 << 10
MANY = 32
STEPS = 4
TARGET = 1.05

# Of a connection for blocks: HEADS, and a payload of a block. Each learner has that many by default.
BUFFERS = (32 << 10) + BLOCK
CONNECTIONS = 2


def _after_steps(binaries, learners):
    with ExitStack() as stack:
        gradfs = net_gradfs.library(stack, binaries, SIZE, learners, block_size=BLOCK)
        for _ in range(STEPS):
            gradfs.round("step")
        gradfs.check()
        return net_gradfs.resident_bytes(gradfs.cluster.shards[0].pid)


def figure(binaries):
    """The ratio of what a shard takes with many learners to what it takes with one."""
    found = []
    for learners in (MANY, 1):
        fixed = learners * CONNECTIONS * BUFFERS
        found.append((_after_steps(binaries, learners) - fixed, fixed))
    words = [f"{taken / MIB:.1f} MiB + {fixed / MIB:.1f}" for taken, fixed in found]
    return Figure(f"shard_rss_{MANY}_vs_1_learners", found[0][0] / found[1][0], "ratio", TARGET, "<=", *words)
