"""Times torch's fused Adam on a GPU: `torch_adam.py NUMBER ELEMENTS` prints a JSON object. For scripts/bench-reduce."""

import json
import statistics
import sys
import time

SAMPLES, REPEATED = 7, 10


def run(number, elements):
    """The median time of a step."""
    try:
        import torch
    except ImportError as error:
        sys.exit(str(error))
    if not torch.cuda.is_available():
        sys.exit("torch has no GPU")
    device = torch.device("cuda", number)
    weights = torch.full((elements,), 0.5, device=device, requires_grad=True)
    weights.grad = torch.full((elements,), 0.25, device=device)
    optimizer = torch.optim.Adam([weights], lr=0.01, fused=True)
    samples = []
    # The first is not counted.
    for _ in range(SAMPLES + 1):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(REPEATED):
            optimizer.step()
        torch.cuda.synchronize(device)
        samples.append((time.perf_counter() - start) / REPEATED)
    print(json.dumps({"version": torch.__version__, "seconds": statistics.median(samples[1:])}))


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
