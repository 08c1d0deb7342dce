"""What runs on the hosts of the digits part of scripts/bench-stall: a learner of examples/, on a slow link.

It prints one line of JSON: the seconds of each open of weights with the accuracy of what it showed, and its stall share.
"""

import json
import os
import sys
import time
from itertools import chain, count, islice
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.dont_write_bytecode = True

import digits  # noqa: E402  Before NumPy, whose threads it limits.
import numpy  # noqa: E402
import train_digits  # noqa: E402

CHUNK, BATCH = 64 << 10, 64


def contribute(path, gradient, compute):
    """Computes (it sleeps) and writes, a chunk after each share of `compute`."""
    data = memoryview(gradient).cast("B")
    begin = time.monotonic()
    file = os.open(path, os.O_WRONLY)
    try:
        for at in range(0, len(data), CHUNK):
            end = min(at + CHUNK, len(data))
            time.sleep(max(0.0, begin + compute * end / len(data) - time.monotonic()))
            os.pwrite(file, data[at:end], at)
        os.fsync(file)
    finally:
        os.close(file)


def stall_share(model, learner):
    """What the mount says of it."""
    with open(model / "status.json") as file:
        return next(one for one in json.load(file)["learners"] if one["id"] == learner)["stall_share_since_join"]


def learn(model, rank, learners, steps, compute):
    """All steps."""
    images, labels, test_images, test_labels = digits.load_data()
    layout = digits.Layout(model)
    job = SimpleNamespace(batch=BATCH, seed=0)
    epochs = (digits.epoch_batches(images, labels, job, epoch) for epoch in count())
    directory = model / "learners" / f"learner{rank}"
    gradient = numpy.empty(layout.elements, numpy.float32)
    opened = []
    directory.mkdir()
    begin = time.monotonic()
    for batch in islice(chain.from_iterable(epochs), steps):
        weights = numpy.fromfile(directory / "weights", numpy.float32)
        opened.append((time.monotonic() - begin, weights))
        mine = (digits.share(part, rank, learners) for part in batch)
        train_digits.backpropagate(layout.views(weights), *mine, layout.views(gradient))
        contribute(directory / "gradients", gradient, compute)
    share = stall_share(model, directory.name)
    directory.rmdir()
    # Afterwards: it takes as long as a step.
    of = train_digits.accuracy_of
    curve = [(seconds, of(layout.views(weights), test_images, test_labels)) for seconds, weights in opened]
    print(json.dumps({"curve": curve if rank == 0 else [], "stall": share}))


if __name__ == "__main__":
    path, *words = sys.argv[1:]
    learn(Path(path), *map(int, words[:3]), float(words[3]))
