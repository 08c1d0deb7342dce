"""The time of a step of a small model, against bare sockets: a part of scripts/bench-small.

One learner, one shard. A step contributes gradients to the whole model, and has the weights that hold them. The sockets
do no more than that (scripts/baselines/src/bin/sockets.rs): over one TCP connection of loopback, a thread that blocks
receives the gradients, adds them to the weights, and sends those. send(2) and socket buffers of 1 MiB are the fastest of
what was tried; sendfile(2) is slower at these sizes.

The library's gradients and weights are where they travel from and to, as those of the sockets are. It pulls each version
as soon as it is out, as mounts do. The learner of a mount copies its gradients to the mapped file, and reads the weights
into a buffer of its own.
"""

import statistics
import time
from contextlib import ExitStack

import machine
import net_baselines
import net_gradfs
import switches
from report import microseconds, ratio

SIZES = (64 << 10, 1 << 20)
# Steps of a turn, from which the others take over.
STEPS = 100
WARM_UP = 3
SOCKETS = "sockets"
# The figure of each contender, and its target. With a mount over TCP the same bytes cross the same sockets.
FIGURES = {
    "tcp": ("small_step_tcp_vs_sockets", 2.0),
    "shm": ("small_step_shm_vs_sockets", 1.2),
    "mount, tcp": ("small_step_mount_vs_sockets", 2.5),
    "mount, shm": ("small_step_mount_shm_vs_sockets", None),
}


def build(only_look):
    """Builds the library's learner and the sockets, or takes those there are; gives their paths."""
    (learner,) = machine.build("bench_learner", only_look=only_look)
    return learner, net_baselines.build(grpc=False, only_look=only_look)


class Rounds:
    """Learners that are asked for rounds: the library's, and those of the sockets."""

    def __init__(self, rival):
        self._rival = rival
        (self._learner,) = rival.learners

    def steps(self, count):
        """Does so many; gives the seconds of each."""
        self._learner.tell(f"repeat {count} step")
        self._rival.pushes += count
        return self._learner.answer("step", time.monotonic() + net_baselines.ROUND_DEADLINE)["seconds"]

    def check(self):
        """Ends the run unless the weights are right."""
        self._rival.check()


def _contenders(stack, binaries, baselines, size):
    found = {SOCKETS: Rounds(stack.enter_context(net_baselines.sockets(baselines, size, 1, connections=1)))}
    for transport, options in (("tcp", ()), ("shm", ("--shm",))):
        library = net_gradfs.library(stack, binaries, size, 1, options=("--pulls", "eager", *options))
        found[transport] = Rounds(library)
        job = stack.enter_context(switches.job(binaries[0], transport, size))
        # It checks the weights of each step.
        found[f"mount, {transport}"] = stack.enter_context(switches.Learner(job.model, "stored"))
    return found


def measure(binaries, baselines, quiet, turns):
    """{(size, contender): median of a step in seconds}."""
    found = {}
    for size in SIZES:
        with ExitStack() as stack:
            contenders = _contenders(stack, binaries, baselines, size)
            for turn in range(WARM_UP + turns):
                for name, contender in contenders.items():
                    quiet.wait()
                    seconds = contender.steps(STEPS)
                    if turn >= WARM_UP:
                        found.setdefault((size, name), []).extend(seconds)
            for contender in contenders.values():
                if isinstance(contender, Rounds):
                    contender.check()
        machine.say(f"steps of {size >> 10} KiB against sockets")
    return {key: statistics.median(seconds) for key, seconds in found.items()}


def figures(medians):
    """The ratios of each size, and the larger one, which is what has a target."""
    found = []
    for name, (figure, target) in FIGURES.items():
        rows = []
        for size in SIZES:
            ours, other = medians[size, name], medians[size, SOCKETS]
            words = microseconds(ours * 1e6), microseconds(other * 1e6)
            rows.append(ratio(f"{figure}_{size >> 10}kib", ours / other, None, *words))
        worst = max(rows, key=lambda row: row.value)
        found += [*rows, ratio(figure, worst.value, target, worst.ours, worst.other, op="<=")]
    return found
