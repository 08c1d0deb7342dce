"""What runs on the hosts of scripts/bench-stall, as programs: the trainer, and the learner that is measured.

The first weight counts the trainer's contributions, so it tells a version's age: line *n* of a file has the time of the
*n*-th one. All hosts are of one machine, and have one clock.
"""

import json
import math
import os
import random
import sys
import threading
import time

# Numbers that a contribution has, unless it has the whole model; all but the trainer's first are zero.
FEW = 1024
INTERVAL = 0.04
SHORTEST, LONGEST, JITTER = 0.4, 0.8, 0.2


def contribute(path, data):
    """One step."""
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, data)
        os.fsync(file)
    finally:
        os.close(file)


def train(model, times):
    """Makes versions, until it is ended."""
    import numpy

    data = numpy.zeros(FEW, numpy.float32)
    data[0] = 1
    with open(times, "w", buffering=1) as file:
        print("trains", flush=True)
        while True:
            begin = time.monotonic()
            contribute(f"{model}/gradients", data.tobytes())
            print(time.monotonic(), file=file)
            time.sleep(max(0.0, begin + INTERVAL - time.monotonic()))


class Newest:
    """Weights that a thread opens at once, for the next step."""

    def __init__(self, model):
        self.model = model
        self.begin()

    def begin(self):
        """Opens them in a thread."""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        self.number, _ = opened(self.model)

    def take(self):
        """What the thread has opened."""
        self._thread.join()
        return self.number


def opened(model):
    """How many contributions of the trainer are in the newest version, and when it was open. All of it is read."""
    import numpy

    with open(f"{model}/weights", "rb", buffering=0) as file:
        have = time.monotonic()
        return int(numpy.fromfile(file, numpy.float32)[0]), have


def pulls(model):
    """How many versions the mount has pulled."""
    with open(f"{model}/status.json") as file:
        return json.load(file)["pull"]["pulls"]


def learn(model, times, policy, steps, first, whole):
    """A turn of some steps, of a `whole` in which compute times drift once to the longest and back."""
    import numpy

    pull = {"after-push": "on-demand", "whole": "adaptive"}.get(policy, policy)
    with open(f"{model}/control/pull", "w") as file:
        file.write(pull)
    numbers = os.path.getsize(f"{model}/weights") // 4 if policy == "whole" else FEW
    data, rng = numpy.zeros(numbers, numpy.float32).tobytes(), random.Random(first)
    newest = Newest(model) if policy == "after-push" else None
    opens, stalled, begin, before = [], 0.0, None, 0
    # The first step follows another policy.
    for step in range(-1, steps):
        if step == 0:
            begin, stalled, before = time.monotonic(), 0.0, pulls(model)
        asked = time.monotonic()
        if newest:
            # Pulled while the last step was computed; the next one is pulled while this one is.
            number, have = newest.take(), time.monotonic()
            newest.begin()
        else:
            number, have = opened(model)
        drift = 0.5 - 0.5 * math.cos(math.tau * (first + step) / whole)
        compute = (SHORTEST + (LONGEST - SHORTEST) * drift) * rng.uniform(1 - JITTER, 1 + JITTER)
        time.sleep(compute)
        computed = time.monotonic()
        contribute(f"{model}/gradients", data)
        # Reading what is open, and waking up late beside other programs, are no waits for the network.
        stalled += have - asked + time.monotonic() - computed
        if step >= 0:
            opens.append((have, number))
    took, pulled = time.monotonic() - begin, pulls(model) - before
    if newest:
        newest.take()
    with open(times) as file:
        made = [float(line) for line in file]
    ages = [have - made[number - 1] for have, number in opens]
    print(json.dumps({"age": sum(ages) / steps, "stall": stalled / took, "pulls": pulled / steps}))


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "train":
        train(*words)
    else:
        learn(*words[:3], *map(int, words[3:]))
