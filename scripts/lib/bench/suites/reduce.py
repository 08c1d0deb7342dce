"""Measures how fast a shard computes versions, in parts of what the memory allows.

Each figure is a ratio of two measurements of one run, larger is better.

  cpu_sgd_vs_stream, cpu_momentum_vs_stream, cpu_adam_vs_stream
                       bytes that the kernels of the CPU read and write in a second, on all threads, beside those of a copy
                       past the caches on as many threads (the "copy" of STREAM)
  cpu_bf16_accumulate_vs_stream
                       the same of adding bf16 contributions to fp32 sums, beside the faster one of that copy and a loop that
                       updates in place: it reads and writes the same bytes, and adds
  cpu_adam_vs_torch_fused, cpu_adam_vs_torch_foreach
                       the time of torch's Adam on the CPU with fused=True or foreach=True, in the fastest of several sizes of
                       tensors, by that of the kernel: as many elements, as many threads, by turns
  gpu_sgd_vs_copy, gpu_momentum_vs_copy, gpu_adam_vs_copy
                       the same of a GPU's kernels, beside a copy within its memory
  gpu_adam_vs_torch    the time of torch's fused Adam for as many elements, by that of the kernel
  gpu_end_to_end_vs_copies
                       the slower of two copies, of sums to the GPU and of weights from it, by the time in which a version is
                       made: copied there, computed by Adam, and copied back

The CPU's figures are medians of the ratios of each round. Where there is no GPU, or no torch, the reason is printed, and the
figures are left out. torch is that of .venv, or else of the interpreter that runs this.
"""

import json
import statistics
import sys
from contextlib import ExitStack

from machine import GIB, ROOT, Failed, own_python, require_memory, say
from programs import Peer, output_of
from report import milliseconds, ratio, times

from bench import jobs

PARTS = ("cpu", "gpu")
TORCH_ADAM = jobs.WORK / "torch_adam.py"
# The memory of what torch computes with is kept, and in huge pages, as that of the kernels is.
WARM = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Rounds in turn with torch.
ROUNDS = 7
REDUCERS = ("sgd", "momentum", "adam")
LONGEST = 600


def measured(*command):
    """What a program prints as JSON, or why it has nothing to print."""
    try:
        return json.loads(output_of(*command, timeout=LONGEST)), None
    except Failed as error:
        return None, str(error).splitlines()[-1]


def speed(figure):
    """Bytes in a second."""
    return figure["bytes"] / figure["seconds"]


def gb_s(bytes_a_second):
    return f"{bytes_a_second / 1e9:.1f} GB/s"


def of_rounds(name, target, ours, other, shown=gb_s):
    """The median of the ratios of each round; both are lists, larger is better."""
    medians = [shown(statistics.median(values)) for values in (ours, other)]
    return ratio(name, statistics.median(a / b for a, b in zip(ours, other)), target, *medians)


def of_torch(binary, python, kind, elements, threads, target):
    """Adam beside torch's, if there is one."""
    with ExitStack() as stack:
        peers = Peer([binary, "--adam", elements]), Peer([python, TORCH_ADAM, kind, elements, threads], WARM)
        for peer in peers:
            stack.callback(peer.end)
        about = peers[1].line("torch", LONGEST)
        if why := about.get("why"):
            print(f"without cpu_adam_vs_torch_{kind}: {why}")
            return []
        say(f"torch {about['version']}, {kind}, tensors of {about['elements_of_a_tensor']} elements")
        rounds = []
        for _ in range(ROUNDS):
            rounds.append([])
            for peer in peers:
                peer.tell("")
                rounds[-1].append(peer.line("a step"))
    ours, other = ([1 / seconds for seconds in each] for each in zip(*rounds))
    return [of_rounds(f"cpu_adam_vs_torch_{kind}", target, ours, other, lambda rate: milliseconds(1 / rate))]


def of_cpu(binary, quick, own_python()):
    """The figures of the CPU."""
    require_memory((2 if quick else 4) * GIB)
    found, why = measured(binary, *quick, "--cpu")
    if found is None:
        raise Failed(f"the CPU cannot be measured: {why}")
    say(f"{found['device']}, {found['elements']} elements")
    speeds = {
        name: [figure["bytes"] / seconds for seconds in figure["seconds"]] for name, figure in found["figures"].items()
    }  # fmt: skip
    faster = [max(both) for both in zip(speeds["copy"], speeds["update"])]
    figures = [of_rounds(f"cpu_{name}_vs_stream", 0.9, speeds[name], speeds["copy"]) for name in REDUCERS]
    figures.append(of_rounds("cpu_bf16_accumulate_vs_stream", 0.8, speeds["bf16_accumulate"], faster))
    for kind, target in (("fused", 1.0), ("foreach", 2.0)):
        # As many as no cache holds: torch is slow.
        figures += of_torch(binary, python, kind, (8 if quick else 32) << 20, found["threads"], target)
    return figures


def of_gpu(binary, quick, number, python):
    """The figures of a GPU, as far as there is one."""
    found, why = measured(binary, *quick, "--gpu", number)
    if found is None:
        print(f"without figures of a GPU: {why}")
        return []
    elements, figures = found["elements"], found["figures"]
    print(f"{found['device']}, {elements} elements")
    speeds, shown = {name: speed(figures[name]) for name in (*REDUCERS, "copy", "upload", "download", "both_ways")}, []
    for name in REDUCERS:
        words = gb_s(speeds[name]), gb_s(speeds["copy"])
        shown.append(ratio(f"gpu_{name}_vs_copy", speeds[name] / speeds["copy"], 0.9, *words))
    torch, why = measured(python, TORCH_ADAM, "gpu", number, elements)
    if why := why or torch.get("why"):
        print(f"without torch: {why}")
    else:
        print(f"torch {torch['version']}")
        shown.append(times("gpu_adam_vs_torch", figures["adam"]["seconds"], torch["seconds"], 1.0))
    slower = max(figures["upload"]["seconds"], figures["download"]["seconds"])
    shown.append(times("gpu_end_to_end_vs_copies", figures["end_to_end"]["seconds"], slower, 0.9))
    ways = {"to the GPU": "upload", "from it": "download", "both ways at once": "both_ways"}
    print(", ".join(f"{words} {gb_s(speeds[name])}" for words, name in ways.items()))
    return shown


def options(parser):
    parser.add_argument("--gpu", metavar="NUMBER", type=int, default=0, help="of the GPU [default: 0]")


def run(bench):
    (binary,) = bench.binaries("bench_reduce")
    quick = ["--quick"] if bench.quick else []
    figures = of_cpu(binary, quick, own_python()) if "cpu" in bench.only else []
    return figures + (of_gpu(binary, quick, bench.options.gpu, python) if "gpu" in bench.only else [])
