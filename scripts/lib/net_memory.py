"""Memory of a shard process by the number of learners, for scripts/bench-net.

Each connection has buffers of fixed size: headers to be sent, and one payload that is added from cache. They are
counted out, by what they are in libmodelio/src/transport/frames/.
"""

import statistics
from contextlib import ExitStack

import net_gradfs
from against import NEW, OLD, PASSES, Comparison
from machine import MIB
from net_baselines import CONNECTIONS
from report import Figure

SIZE = 16 * MIB
BLOCK = 256 << 10
MANY = 32
STEPS = 4
TARGET = 1.05

# Of a connection for blocks: HEADS, and a payload of a block.
BUFFERS = (32 << 10) + BLOCK


def _after_steps(binaries, learners):
    with ExitStack() as stack:
        gradfs = net_gradfs.library(stack, binaries, SIZE, learners, block_size=BLOCK)
        for _ in range(STEPS):
            gradfs.round("step")
        gradfs.check()
        return net_gradfs.resident_bytes(gradfs.cluster.shards[0].pid)


def measure(binaries):
    """(the figure, its Comparisons): what a shard takes with many learners, over what it takes with one.

    `binaries` are by side; with two of them there are several passes."""
    found = {side: [] for side in binaries}
    order = list(binaries)
    for _ in range(PASSES if len(binaries) > 1 else 1):
        for side in order:
            found[side].append([_after_steps(binaries[side], learners) for learners in (MANY, 1)])
        order.reverse()
    fixed = [learners * CONNECTIONS * BUFFERS for learners in (MANY, 1)]
    ratios = {
        side: [(many - fixed[0]) / (one - fixed[1]) for many, one in rounds] for side, rounds in found.items()
    }
    name = f"shard_rss_{MANY}_vs_1_learners"
    taken = [statistics.median(one[index] for one in found[NEW]) for index in range(2)]
    words = [f"{(whole - part) / MIB:.1f} MiB + {part / MIB:.1f}" for whole, part in zip(taken, fixed)]
    figure = Figure(name, statistics.median(ratios[NEW]), "ratio", TARGET, "<=", *words)
    if OLD not in binaries:
        return figure, []
    new, old = ([[value] for value in ratios[side]] for side in (NEW, OLD))
    return figure, [Comparison([name], new, old, "{:.3f}".format)]
