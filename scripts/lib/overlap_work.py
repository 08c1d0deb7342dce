"""What runs on the hosts of scripts/bench-stall for synchronous jobs: a learner that computes (it sleeps), contributes and
opens the new weights.

It prints one line of JSON: the seconds of each step, of which so many were spent in fsync or close and so many in open.
"""

import json
import os
import sys
import time

# The first steps fill buffers and are not measured.
WARM = 2


def step(learner, data, chunks, compute):
    """One step in equal chunks, each after its share of `compute`: seconds in the end of the contribution and in open."""
    file = os.open(f"{learner}/gradients", os.O_WRONLY)
    size = len(data) // chunks
    for chunk in range(chunks):
        time.sleep(compute / chunks)
        os.pwrite(file, data[chunk * size : (chunk + 1) * size], chunk * size)
    begin = time.monotonic()
    os.fsync(file)
    os.close(file)
    ended = time.monotonic()
    os.close(os.open(f"{learner}/weights", os.O_RDONLY))
    return ended - begin, time.monotonic() - ended


def learn(learner, size, chunks, compute, steps):
    """Some steps, after a few that are not measured."""
    data, found = memoryview(b"\0" * size), []
    print("ready", flush=True)
    for number in range(WARM + steps):
        begin = time.monotonic()
        ends, opens = step(learner, data, chunks, compute)
        if number >= WARM:
            found.append({"step": time.monotonic() - begin, "end": ends, "open": opens})
    print(json.dumps(found))


if __name__ == "__main__":
    path, *words = sys.argv[1:]
    learn(path, int(words[0]), int(words[1]), float(words[2]), int(words[3]))
