"""Steps through mounts over TCP in scripts/bench-net, against those of the library in the same run.

A step pushes all gradients, has the version that they make, and copies it to a buffer of the program's own. The gradients
are stored anew before each step where they have to be: in the library's staging region, in the mapped `gradients`, or in
a buffer of the program that it gives to write(2). So what a mount adds is the kernel, and the daemon between the program and the library.
"""

import statistics
from contextlib import ExitStack

import net_gradfs
from machine import MIB
from report import milliseconds, ratio

SIZE = 64 * MIB
WARM_UP = 3
# By contender: how gradients go in.
WAYS = {"stored": "mapped", "written": "written"}
FIGURES = {"stored": ("mount_tcp_step_vs_library", 1.15), "written": ("mount_tcp_written_step_vs_library", 1.5)}


def measure(binaries, quiet, rounds):
    """Medians of a step in seconds, by contender."""
    found = {}
    with ExitStack() as stack:
        contenders = {"library": net_gradfs.library(stack, binaries, SIZE, learners=1)}
        for name, way in WAYS.items():
            contenders[name] = net_gradfs.mount(stack, binaries[0], SIZE, 1, 1, way, ("--transport", "tcp"))
        for turn in range(WARM_UP + rounds):
            for name, contender in contenders.items():
                quiet.wait()
                took = contender.round("read_step")
                if turn >= WARM_UP:
                    found.setdefault(name, []).append(took.seconds)
                if turn in (0, WARM_UP + rounds - 1):
                    contender.check()
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def figures(medians):
    """The ratios."""
    library, found = medians["library"], []
    for way, (name, target) in FIGURES.items():
        words = milliseconds(medians[way]), milliseconds(library)
        found.append(ratio(name, medians[way] / library, target, *words, op="<="))
    return found
