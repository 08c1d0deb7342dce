"""Times torch's Adam on the CPU by turns: `torch_adam_cpu.py fused|foreach ELEMENTS THREADS`. For scripts/bench-reduce.

The first line of output is a JSON object: torch's version and the setting. Then each line of input is answered with the
seconds of a step. The elements are one tensor, or many: the way that is fastest at first is measured. Nothing but the step is
timed: the gradients are there, and the memory of optimizer and temporaries has been used before.
"""

import json
import sys
import time

# Elements of a tensor, besides all.
SIZES = (1 << 20, 1 << 17)
# Steps of one sample, as many as the kernels' passes.
REPEATED = 8


def optimizer_of(torch, kind, elements, size):
    """Adam over tensors of so many elements."""
    tensors = []
    for start in range(0, elements, size):
        tensor = torch.full((min(size, elements - start),), 0.5, requires_grad=True)
        tensor.grad = torch.full_like(tensor, 0.25)
        tensors.append(tensor)
    flags = {"fused": True} if kind == "fused" else {"foreach": True}
    return torch.optim.Adam(tensors, lr=0.01, **flags)


def seconds(optimizer):
    """The time of a step."""
    start = time.perf_counter()
    for _ in range(REPEATED):
        optimizer.step()
    return (time.perf_counter() - start) / REPEATED


def run(kind, elements, threads):
    """Finds the fastest way, and measures it for as long as lines come."""
    try:
        import torch
    except ImportError as error:
        sys.exit(str(error))
    torch.set_num_threads(threads)
    best = None
    for size in (elements, *(size for size in SIZES if size < elements)):
        optimizer = None
        try:
            optimizer = optimizer_of(torch, kind, elements, size)
            optimizer.step()
        except (RuntimeError, TypeError) as error:
            sys.exit(f"torch {torch.__version__} has no Adam with {kind}=True on a CPU: {error}")
        taken = seconds(optimizer)
        if best is None or taken < best[0]:
            best = taken, size
    optimizer = optimizer_of(torch, kind, elements, best[1])
    optimizer.step()
    print(json.dumps({"version": torch.__version__, "elements_of_a_tensor": best[1]}), flush=True)
    for _ in sys.stdin:
        print(seconds(optimizer), flush=True)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
