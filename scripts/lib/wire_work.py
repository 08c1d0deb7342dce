"""The learner of scripts/bench-wire: steps in each form by turns, and how long each part of them takes."""

import json
import os
import statistics
import sys
import time


def step(model, data):
    """Seconds of a push and of a pull, each of the whole model."""
    begin = time.monotonic()
    file = os.open(f"{model}/gradients", os.O_WRONLY)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view):]
        os.fsync(file)
    finally:
        os.close(file)
    pushed = time.monotonic()
    with open(f"{model}/weights", "rb", buffering=0) as file:
        assert len(file.read()) == len(data)
    return pushed - begin, time.monotonic() - pushed


def run(model, rounds, forms):
    """{form: medians}."""
    import numpy

    size = os.path.getsize(f"{model}/weights")
    data = numpy.random.default_rng(1).standard_normal(size // 4, numpy.float32).tobytes()
    found = {form: [] for form in forms}
    for _ in range(rounds):
        for form in forms:
            with open(f"{model}/control/wire", "w") as file:
                file.write(form)
            # The first step takes memory.
            step(model, data)
            found[form].append(step(model, data))
            with open(f"{model}/status.json") as file:
                used = json.load(file)["shards"][0]["wire"]
            assert used == form, f"{used} in place of {form}"
    names = "push", "pull"
    medians = {form: dict(zip(names, map(statistics.median, zip(*steps)))) for form, steps in found.items()}
    for form, steps in found.items():
        medians[form]["step"] = statistics.median(sum(parts) for parts in steps)
    print(json.dumps(medians))


if __name__ == "__main__":
    path, turns, *all_forms = sys.argv[1:]
    run(path, int(turns), all_forms)
