"""Times torch's Adam by turns, for the suite reduce: `torch_adam.py gpu NUMBER ELEMENTS`, or on the CPU
`torch_adam.py fused|foreach ELEMENTS THREADS`.

The first line of output is a JSON object: torch's version, on a GPU with the seconds of a step. On the CPU each line of input
is then answered with the seconds of a step. There the elements are one tensor, or many: the way that is fastest at first is
measured. Nothing but the step is timed: the gradients are there, and the memory of optimizer and temporaries has been used
before.
"""

import json
import statistics
import sys
import time

# On a GPU: samples, and steps of one. On the CPU: elements of a tensor, besides all, and steps of a sample, as many as the
# kernels' passes.
SAMPLES, GPU_REPEATED = 7, 10
SIZES, CPU_REPEATED = (1 << 20, 1 << 17), 8


def optimizer_of(torch, kind, elements, size, device="cpu"):
    """Adam over tensors of so many elements."""
    tensors = []
    for start in range(0, elements, size):
        tensor = torch.full((min(size, elements - start),), 0.5, device=device, requires_grad=True)
        tensor.grad = torch.full_like(tensor, 0.25)
        tensors.append(tensor)
    return torch.optim.Adam(tensors, lr=0.01, **{kind: True})


def seconds(optimizer, repeated, wait=lambda: None):
    """The time of a step."""
    wait()
    start = time.perf_counter()
    for _ in range(repeated):
        optimizer.step()
    wait()
    return (time.perf_counter() - start) / repeated


def end(why):
    """Instead of the first line."""
    print(json.dumps({"why": why}))
    sys.exit()


def on_gpu(torch, number, elements):
    if not torch.cuda.is_available():
        end("torch has no GPU")
    device = torch.device("cuda", number)
    optimizer = optimizer_of(torch, "fused", elements, elements, device)
    samples = [seconds(optimizer, GPU_REPEATED, lambda: torch.cuda.synchronize(device)) for _ in range(SAMPLES + 1)]
    # The first is not counted.
    print(json.dumps({"version": torch.__version__, "seconds": statistics.median(samples[1:])}))


def on_cpu(torch, kind, elements, threads):
    torch.set_num_threads(threads)
    best = None
    for size in (elements, *(size for size in SIZES if size < elements)):
        try:
            optimizer = optimizer_of(torch, kind, elements, size)
            optimizer.step()
        except (RuntimeError, TypeError) as error:
            end(f"torch {torch.__version__} has no Adam with {kind}=True on a CPU: {error}")
        best = min(best or (1e9, 0), (seconds(optimizer, CPU_REPEATED), size))
        del optimizer
    optimizer = optimizer_of(torch, kind, elements, best[1])
    optimizer.step()
    print(json.dumps({"version": torch.__version__, "elements_of_a_tensor": best[1]}), flush=True)
    for _ in sys.stdin:
        print(seconds(optimizer, CPU_REPEATED), flush=True)


if __name__ == "__main__":
    try:
        import torch as of_torch
    except ImportError as missing:
        end(str(missing))
    what, first, second = sys.argv[1], *map(int, sys.argv[2:])
    on_gpu(of_torch, first, second) if what == "gpu" else on_cpu(of_torch, what, first, second)
