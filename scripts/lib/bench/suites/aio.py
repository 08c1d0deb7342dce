"""Measures queues of asynchronous requests against fio, and the Python package against the C library, in turn on this host.

  aio_read_vs_fio     `weights` of a mount with 16 reads under way, of 64 KiB and of 1 MiB: GiB/s over fio's by io_uring with the same
                      depth and size, the worse of both
  aio_write_vs_fio    one contribution and its commit, likewise, with direct I/O
  python_vs_c_abi     `push` and `pull` of a model without a mount: the C library's time over Python's, the worse of both
  memfd_vs_tmpfs      random reads of 4 KiB of a version's memory, lent by the mount, over those of a file in tmpfs
"""

import mmap
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack

from machine import GIB, MIB, ROOT, Failed, finished, own_python, require, require_memory, say
from programs import output_of
from report import Figure, ratio, times, worst

from bench import fio, jobs

DEPTH, SIZES = 16, {"64k": 64 << 10, "1m": MIB}


class Lines:
    """A program that answers each line by its seconds. It ends with `stack`."""

    def __init__(self, stack, command, env):
        self.process = subprocess.Popen(
            [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        stack.callback(self.stop)

    def ask(self, line):
        print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            self.process.wait(10)
            raise Failed(f"{line}: the program has ended with {self.process.returncode}")
        return float(answer)

    def stop(self):
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def files(bench, binary, program, size, count):
    """Reads and writes of files against fio's: the ratios of each size."""
    rows = {"read": [], "write": []}
    with ExitStack() as stack:
        model = stack.enter_context(jobs.up(binary, bench.work / "mount", size, "--reducer", "sum"))
        own = Lines(stack, [program], {})
        for what, file, job in (
            ("read", "weights", "weights-read-io_uring"),
            ("write", "gradients", "gradients-write-io_uring"),
        ):
            for words, block in SIZES.items():
                say(f"{what}s of {words}")
                found = jobs.turns(
                    {
                        "fio": lambda job=job, words=words: [size / GIB / fio.run(job, model, words, size)],
                        "aio": lambda: [own.ask(f"{what} {model / file} {DEPTH} {block}")],
                    },
                    count,
                    warm_up=1,
                    order="alternate",
                )
                seconds = jobs.medians(found)
                rows[what].append(times(f"aio_{what}_{words}_vs_fio", seconds["aio"], seconds["fio"]))
    return rows


def python(bench, binary, program, prefix, size, count):
    """Pushes and pulls without a mount, by C and by Python."""
    with ExitStack() as stack:
        cluster = jobs.Cluster(stack, binary, bench.work / "cluster", size)
        url = f"gradfs://{cluster.registry}/{jobs.MODEL}"
        env = {"MODELIO_LIBRARY": str(prefix / "lib" / "libmodelio.so.0"), "PYTHONPATH": str(ROOT / "python")}
        found = {}
        commands = [
            ("c", [program, url]),
            ("python", [own_python(), ROOT / "scripts/lib/bench/parts/aio_push.py", url]),
        ]
        for turn in range(count + 1):
            # Only one of them is a learner at a time: the other would be waited for.
            commands.reverse()
            for name, command in commands:
                with ExitStack() as inner:
                    peer = Lines(inner, command, env)
                    # One after the other: what a copy leaves in the caches is written back in the time of the next act.
                    for what in ("push", "pull"):
                        for step in range(6):
                            seconds = peer.ask(what)
                            # The first of each takes its memory.
                            if turn and step > 1:
                                found.setdefault((what, name), []).append(seconds)
    seconds = jobs.medians(found)
    return [
        times(f"python_{what}_vs_c_abi", seconds[what, "python"], seconds[what, "c"]) for what in ("push", "pull")
    ]


def reads(file, size, count):
    """Seconds of so many reads of 4 KiB at random places."""
    places = [4096 * random.randrange(size // 4096) for _ in range(count)]
    memory = mmap.mmap(-1, 4096)
    begun = time.perf_counter()
    for place in places:
        os.preadv(file, [memory], place)
    return time.perf_counter() - begun


def memory(bench, binary, size, count):
    """Random reads of a lent version against those of a file in tmpfs."""
    sys.path.insert(0, str(ROOT / "python"))
    import gradfs

    with ExitStack() as stack:
        model = stack.enter_context(jobs.up(binary, bench.work / "lends", size))
        lent = stack.enter_context(gradfs.open(model).memfd())
        tmpfs = os.memfd_create("tmpfs")
        stack.callback(os.close, tmpfs)
        weights = os.open(model / "weights", os.O_RDONLY)
        stack.callback(os.close, weights)
        os.sendfile(tmpfs, weights, 0, size)
        for at in range(os.fstat(tmpfs).st_size, size, GIB):
            os.sendfile(tmpfs, weights, at, size - at)
        acts = {"memfd": lent.fileno(), "tmpfs": tmpfs, "weights": weights}
        found = jobs.turns(
            {name: lambda file=file: [reads(file, size, 100_000)] for name, file in acts.items()}, count, 1, "shuffled"
        )
    return jobs.medians(found)


def run(bench):
    binary = bench.gradfs().resolve()
    require("fio", "g++")
    require_memory(4 * GIB)
    size, count = (256 * MIB, 5) if bench.quick else (GIB, 9)
    prefix = ROOT / "target" / "library"
    if not bench.only_look:
        finished("scripts/library", "--profile", "dist")
    program = bench.work / "aio"
    output_of(
        "gcc", "-O2", ROOT / "scripts/lib/bench/parts/aio.c", "-o", program, f"-I{prefix}/include", f"-L{prefix}/lib",
        "-lmodelio", f"-Wl,-rpath,{prefix}/lib",
    )  # fmt: skip
    rows = files(bench, binary, program, size, count)
    say("push and pull without a mount")
    pairs = python(bench, binary, program, prefix, 256 * MIB, 8 if bench.quick else 24)
    say("random reads of 4 KiB")
    seconds = memory(bench, binary, 256 * MIB, count)
    found = [worst(f"aio_{what}_vs_fio", rows[what], 0.95) for what in rows]
    found.append(worst("python_vs_c_abi", pairs, 0.95))
    micro = {name: f"{value * 10:.2f} us" for name, value in seconds.items()}
    found.append(ratio("memfd_vs_tmpfs", seconds["tmpfs"] / seconds["memfd"], 0.9, micro["memfd"], micro["tmpfs"]))
    found.append(Figure("weights_4k_us", seconds["weights"] * 10, "us"))
    return [*found, *sum(rows.values(), []), *pairs]
