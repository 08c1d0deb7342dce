"""Measures how often the threads of a small job wait: voluntary context switches a step, and a step's time.

A learner on files of `gradfs mount`, one shard, and a model of 64 KiB. A step contributes gradients and reads the weights
that hold them, so it has no bytes to speak of: it is messages, and threads that wake each other. What is counted is the
waiting of all threads of the learner, the mount and the shard (/proc/PID/task/TID/status).

  stored   the gradients are stored into the mapped file, and fsync contributes them
  written  open, write and close contribute them

With --against, an older binary does the same in turn.

After that the time of a step is compared with bare sockets that do the same work, in models of 64 KiB and 1 MiB: the library
over TCP and shared memory, and files of a mount (stored) over either. Over one TCP connection of loopback, a thread that
blocks receives the gradients, adds them to the weights, and sends those. send(2) and socket buffers of 1 MiB are the
fastest of what was tried; sendfile(2) is slower at these sizes. The library's gradients and weights are where they travel
from and to, as those of the sockets are. It pulls each version as soon as it is out, as mounts do. The learner of a mount
copies its gradients to the mapped file, and reads the weights into a buffer of its own.
"""

import re
import statistics
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from machine import Failed, say
from report import Figure, microseconds, table, times, worst

from bench import baselines, jobs
from bench.against import NEW, sides

AGAINST = None
TARGETS = {"tcp": 12.0, "shm": 8.0}
TRANSPORTS, WAYS = tuple(TARGETS), ("stored", "written")
PASSES, SIZE = 3, 64 << 10
# Memory of versions is taken meanwhile, and connections come about.
WARM_UP = 100
# Of the race: sizes, steps of a turn, from which the others take over, and turns before those that count.
SIZES, STEPS, WARM_UP_TURNS = (64 << 10, 1 << 20), 100, 3
# The figure of each contender, and its target. With a mount over TCP the same bytes cross the same sockets.
FIGURES = {
    "tcp": ("small_step_tcp_vs_sockets", 2.0),
    "shm": ("small_step_shm_vs_sockets", 1.2),
    "mount, tcp": ("small_step_mount_vs_sockets", 2.5),
    "mount, shm": ("small_step_mount_shm_vs_sockets", None),
}


def switches_of(pids):
    """{(process, thread): voluntary context switches so far}, by names without numbers."""
    counts = Counter()
    for process, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                status = (task / "status").read_text()
            except OSError:
                # It has just ended.
                continue
            name = re.search(r"^Name:\t(.*)$", status, re.M)[1]
            count = re.search(r"^voluntary_ctxt_switches:\t(\d+)$", status, re.M)[1]
            counts[process, re.sub(r"-\d+$", "", name)] += int(count)
    return counts


def in_microseconds(seconds):
    return microseconds(seconds * 1e6)


def mounted(stack, bench, gradfs, transport, size):
    """A shard with a mount: the model's directory, and their processes."""
    place = bench.work / f"{transport}-{size}-{len(list(bench.work.iterdir()))}"
    cluster = jobs.Cluster(stack, gradfs, place, size)
    model, daemon = cluster.mount(stack, "--transport", transport)
    return model, {"mount": daemon.pid, "shard": cluster.pids()[0]}


def waits(bench, binaries):
    """{(transport, way, side): [(switches a step by thread, median seconds), one a pass]}."""
    found, steps = {}, 500 if bench.quick else 2000
    for turn in range(PASSES):
        for transport in TRANSPORTS:
            for side, binary in binaries.items():
                with ExitStack() as stack:
                    model, pids = mounted(stack, bench, binary, transport, SIZE)
                    for way in WAYS:
                        with ExitStack() as of_way:
                            one = jobs.on_model(of_way, model, way)
                            one.repeat(WARM_UP)
                            both = {"learner": one.peers[0].process.pid, **pids}
                            before = switches_of(both)
                            seconds = one.repeat(steps)
                            after = switches_of(both)
                        after.subtract(before)
                        a_step = {name: count / steps for name, count in after.items()}
                        found.setdefault((transport, way, side), []).append((a_step, statistics.median(seconds)))
        say(f"turn {turn + 1} of {PASSES}")
    return found


def medians_of(found):
    """{case: (switches a step, seconds)}, and the table of who waits."""
    medians = {
        case: [statistics.median(of(one) for one in passes) for of in (lambda one: sum(one[0].values()), lambda one: one[1])]
        for case, passes in found.items()
    }
    rows = []
    for name in sorted({name for passes in found.values() for a_step, _ in passes for name in a_step}):
        cells = [statistics.median(a_step.get(name, 0) for a_step, _ in passes) for passes in found.values()]
        if max(cells) >= 0.05:
            rows.append([" ".join(name), *(f"{cell:.1f}" for cell in cells)])
    rows.append(["all", *(f"{total:.1f}" for total, _ in medians.values())])
    rows.append(["step, us", *(f"{seconds * 1e6:.0f}" for _, seconds in medians.values())])
    header = [" ".join(key if key[2] != NEW else key[:2]) for key in found]
    print(table(["waits of", *header], rows), end="\n\n")
    return medians


def against_sockets(bench, gradfs, program, binaries):
    """The ratios of each size, and the larger one, which is what has a target."""
    found = {}
    for size in SIZES:
        with ExitStack() as stack:
            contenders = {"sockets": baselines.sockets(stack, binaries, size, 1, connections=1)}
            for transport, options in (("tcp", ()), ("shm", ("--shm",))):
                cluster = jobs.Cluster(stack, gradfs, bench.work / f"library-{transport}-{size}", size)
                options = ("--pulls", "eager", *options)
                contenders[transport] = jobs.library(stack, cluster, program, options=options)
                model, _ = mounted(stack, bench, gradfs, transport, size)
                contenders[f"mount, {transport}"] = jobs.on_model(stack, model, "stored")
            acts = {(size, name): lambda one=one: one.repeat(STEPS) for name, one in contenders.items()}
            found |= jobs.turns(acts, 7 if bench.quick else 21, WARM_UP_TURNS, rivals=contenders.values())
        say(f"steps of {size >> 10} KiB against sockets")
    medians, figures = jobs.medians(found), []
    for name, (figure, target) in FIGURES.items():
        rows = [
            times(f"{figure}_{size >> 10}kib", medians[size, name], medians[size, "sockets"], op="<=", words=in_microseconds)
            for size in SIZES
        ]
        figures += [*rows, worst(figure, rows, target, "<=")]
    return figures


def run(bench):
    gradfs = bench.gradfs()
    medians = medians_of(waits(bench, sides(gradfs, bench.against)))
    ours = {case[:2]: of for case, of in medians.items() if case[2] == NEW}
    figures = [
        Figure(f"switches_{transport}_{way}", count, "switches/step", TARGETS[transport], "<=", f"{count:.1f} a step")
        for (transport, way), (count, _) in ours.items()
    ]
    for (transport, way), (_, seconds) in ours.items():
        value = seconds * 1e6
        figures.append(Figure(f"small_step_{transport}_{way}", value, "us", ours=f"{value:.0f} us"))
    try:
        (program,), binaries = bench.binaries("bench_learner"), baselines.build("sockets", only_look=bench.only_look)
    except Failed as error:
        say(f"steps are not compared with sockets: {error}")
        return figures
    return figures + against_sockets(bench, gradfs, program, binaries)
