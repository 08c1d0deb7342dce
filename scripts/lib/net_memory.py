"""Memory of a shard process by the number of learners, for scripts/bench-net.

Each connection has buffers of fixed size: headers to be sent, and one payload that is added from cache. The figure has
them, and a second one counts them out, by what they are in libmodelio/src/transport/frames/.
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
    """(figures, Comparisons): what a shard takes with many learners, over what it takes with one.

    `binaries` are by side; with two of them there are several passes."""
    found = {side: [] for side in binaries}
    order = list(binaries)
    for _ in range(PASSES if len(binaries) > 1 else 1):
        for side in order:
            found[side].append([_after_steps(binaries[side], learners) for learners in (MANY, 1)])
        order.reverse()
    fixed = [learners * CONNECTIONS * BUFFERS for learners in (MANY, 1)]
    figures, comparisons = [], []
    for suffix, less, target in (("", (0, 0), TARGET), ("_less_buffers", fixed, None)):
        name = f"shard_rss_{MANY}_vs_1_learners{suffix}"
        ratios = {
            side: [(many - less[0]) / (one - less[1]) for many, one in rounds] for side, rounds in found.items()
        }
        taken = [statistics.median(one[index] for one in found[NEW]) - less[index] for index in range(2)]
        words = [f"{bytes_ / MIB:.1f} MiB" for bytes_ in taken]
        figures.append(Figure(name, statistics.median(ratios[NEW]), "ratio", target, "<=" if target else None, *words))
        if OLD in binaries and target:
            new, old = ([[value] for value in ratios[side]] for side in (NEW, OLD))
            comparisons.append(Comparison([name], new, old, "{:.3f}".format))
    return figures, comparisons
