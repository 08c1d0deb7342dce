"""Measures training in torch by gradfs.torch against DistributedDataParallel over gloo, in turn on this host.

A transformer of 33M parameters and a ResNet of 11M, each by two and by four processes of one thread, with a fused AdamW, all
started by `python -m gradfs.launch`. DDP has gradient_as_bucket_view=True. A step is that of the slowest rank.

  torch_step_vs_ddp_2       the transformer with two processes: a step of DDP over one of gradfs
  torch_step_vs_ddp_others  the worst of the same of the ResNet with two, and of both with four
  torch_io_share            the share of opt.step() in a step of gradfs, of the transformer with two
  torch_memory_vs_ddp       memory of all its processes, the daemon included, over DDP's; it is proportional (PSS), but each
                            memfd counts once and whole, whoever maps it

Batches are such that communication and the optimizer take 25 to 35% of DDP's step: DDP alone is tried first. What they took
is printed: forward and backward alone have turns, too. In the end a batch has one loss on all ranks of a job, and nearly that with the other one.
"""

import json
import os
import re
import select
import socket
import statistics
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

from machine import GIB, ROOT, Failed, own_python, require_memory, say
from programs import ROUND_DEADLINE, STOP_DEADLINE, Program
from report import Figure, ratio, times, worst

from bench import jobs

QUICK = "the transformer with two processes alone: below 45 s once it is built"
STEP = ROOT / "scripts" / "lib" / "bench" / "parts" / "torch_step.py"
# Words of a rank's text, or its images, with which DDP is tried first; and what these are multiples of.
TRIED = {("transformer", 2): (88, 8), ("resnet", 2): (2, 1), ("transformer", 4): (72, 8), ("resnet", 4): (2, 1)}
SHARE, AIM, NEAR = (0.25, 0.35), 0.3, 0.02
TRIES, SETTLES = 4, 5
# Steps: gradfs tries both of its ways of staging in the first twelve.
WARM_UP, TURN = 14, 3


class Job:
    """The ranks of a job and their launcher. They end with `stack`."""

    def __init__(self, stack, bench, binary, kind, network, ranks, size):
        # The job that finds the size may have had the same one.
        self.directory = Path(tempfile.mkdtemp(prefix=f"{network}-{ranks}-{kind}-", dir=bench.work))
        self.lines = []
        path = self.directory / "suite"
        command = [own_python(), "-m", "gradfs.launch", "--job-dir", self.directory, "-n", ranks]
        command += [STEP, path, kind, network, size]
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python"), "GRADFS_BIN": str(binary)}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(ranks)
            self.program = Program(command, self.directory / "ranks.log", env=env)
            stack.callback(self.stop)
            for _ in range(ranks):
                self.program.wait_until(lambda: select.select([listener], [], [], 0)[0])
                connection, _ = listener.accept()
                connection.settimeout(ROUND_DEADLINE)
                self.lines.append(connection.makefile("rw"))
        self.parameters = self.answers()[0]

    def answers(self):
        try:
            return [json.loads(lines.readline()) for lines in self.lines]
        except (OSError, ValueError) as error:
            raise Failed(f"{self.program.name}: no answer: {self.program.said()[-2000:]}") from error

    def ask(self, what, count=1):
        """What all ranks answer: of each time, what each of them has found."""
        for lines in self.lines:
            print(what, count, file=lines, flush=True)
        return list(zip(*self.answers()))

    def stop(self):
        """The end of their lines is that of ranks."""
        for lines in self.lines:
            lines.close()
        with suppress(Failed):
            self.program.finish(STOP_DEADLINE)
        self.program.stop()

    def memory(self):
        """Of all processes that have the job's directory in their command line."""
        sums, memfds = Counter(), {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(FileNotFoundError, ProcessLookupError):
                process = Path("/proc", pid)
                if str(self.directory) in (process / "cmdline").read_text():
                    for kind, size in re.findall(r"(Pss_\w+): +(\d+)", (process / "smaps_rollup").read_text()):
                        sums[kind] += int(size) << 10
                    files = [file.stat() for file in (process / "fd").iterdir() if "/memfd:" in os.readlink(file)]
                    memfds |= {file.st_ino: 512 * file.st_blocks for file in files}
        # Mappings of a memfd are shared memory, also by the mount, where smaps has another name for it.
        return sums["Pss_Anon"] + sums["Pss_File"] + max(sums["Pss_Shmem"], sum(memfds.values()))


def fitting(bench, binary, network, ranks):
    """A size with which communication and the optimizer take their share of DDP's step: tried until that was seen."""
    size, unit = TRIED[network, ranks]
    for _ in range(1 if bench.quick else TRIES):
        with ExitStack() as stack:
            job = Job(stack, bench, binary, "ddp", network, ranks, size)
            job.ask("step", SETTLES)
            took = jobs.turns({what: lambda what=what: job.ask(what, TURN) for what in ("step", "local")}, 3)
        step, local = (statistics.median(max(each)[0] for each in took[what]) for what in ("step", "local"))
        if SHARE[0] <= 1 - local / step <= SHARE[1]:
            break
        size = max(unit, round(size * (step - local) * (1 / AIM - 1) / local / unit) * unit)
    return size


def measure(bench, binary, network, ranks):
    """Both jobs in turn: the ratio of steps, the share of opt.step(), the ratio of memory, and other figures."""
    size = fitting(bench, binary, network, ranks)
    with ExitStack() as stack:
        both = ddp, gradfs = [Job(stack, bench, binary, kind, network, ranks, size) for kind in ("ddp", "gradfs")]
        for job in both:
            job.ask("step", WARM_UP)
        whats = {"ddp": (ddp, "step"), "gradfs": (gradfs, "step"), "local": (ddp, "local")}
        acts = {"theirs": lambda: [ddp.memory()], "ours": lambda: [gradfs.memory()]}
        acts |= {name: lambda job=job, what=what: job.ask(what, TURN) for name, (job, what) in whats.items()}
        found = jobs.turns(acts, 2 if bench.quick else 7, order="alternate")
        ((loss_there, _), *_), ((loss, staging), *_) = checks = [job.ask("check")[0] for job in both]
    if any(one != of[0] for of in checks for one in of) or abs(loss / loss_there - 1) > NEAR:
        raise Failed(f"{network}: ranks of DDP and of gradfs have different weights, with losses and ways: {checks}")
    theirs, ours = (statistics.median(found.pop(name)) for name in ("theirs", "ours"))
    seconds = jobs.medians({name: [max(step)[0] for step in steps] for name, steps in found.items()})
    io = statistics.median(part / whole for step in found["gradfs"] for whole, part in step)
    share, name = 1 - seconds["local"] / seconds["ddp"], f"torch_{network}_{ranks}"
    of = f"{size} words" if network == "transformer" else f"{size} images"
    words = f"{network}, {ddp.parameters / 1e6:.1f}M parameters, {ranks} processes, {of}, {staging}: opt.step() takes"
    words += f" {io:.0%} of a step of gradfs; communication and optimizer take {share:.0%} of DDP's"
    print(words if SHARE[0] <= share <= SHARE[1] else f"{words}, and should take 25 to 35%", flush=True)
    figures = [Figure(f"{name}_{kind}_ms", value * 1e3, "ms") for kind, value in seconds.items()]
    figures.append(Figure(f"{name}_ddp_share", share, "share"))
    io = Figure("torch_io_share", io, "share", 0.2, "<=", f"{io:.1%}")
    words = f"{ours / GIB:.2f} GiB", f"{theirs / GIB:.2f} GiB"
    memory = ratio("torch_memory_vs_ddp", ours / theirs, 1.0, *words, "<=")
    return times(name, seconds["gradfs"], seconds["ddp"]), io, memory, figures


def run(bench):
    binary = bench.gradfs().resolve()
    require_memory((5 if bench.quick else 10) * GIB)
    rows, ios, memories, figures = [], [], [], []
    for network, ranks in list(TRIED)[: 1 if bench.quick else None]:
        say(f"{network} with {ranks} processes")
        for all_of, one in zip((rows, ios, memories, figures), measure(bench, binary, network, ranks)):
            all_of.append(one)
    found = [worst("torch_step_vs_ddp_2", rows[:1], 1.25), ios[0], memories[0]]
    found += [worst("torch_step_vs_ddp_others", rows[1:], 1.0)] if rows[1:] else []
    return [*found, *rows, *sum(figures, [])]
