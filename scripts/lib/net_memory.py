"""Memory of a shard process by the number of learners, for scripts/bench-net.

With one learner a shard adds nothing up, and so takes no sum. With many it takes two. The figure has them.
"""

import statistics
from contextlib import ExitStack

import net_gradfs
from against import NEW, OLD, PASSES, Comparison
from machine import MIB
from report import Figure

SIZE = 16 * MIB
BLOCK = 256 << 10
MANY = 32
STEPS = 4
TARGET = 1.05


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
    ratios = {side: [many / one for many, one in rounds] for side, rounds in found.items()}
    name = f"shard_rss_{MANY}_vs_1_learners"
    taken = [statistics.median(one[index] for one in found[NEW]) for index in range(2)]
    words = [f"{bytes_ / MIB:.1f} MiB" for bytes_ in taken]
    figures = [Figure(name, statistics.median(ratios[NEW]), "ratio", TARGET, "<=", *words)]
    comparisons = []
    if OLD in binaries:
        new, old = ([[value] for value in ratios[side]] for side in (NEW, OLD))
        comparisons.append(Comparison([name], new, old, "{:.3f}".format))
    return figures, comparisons
