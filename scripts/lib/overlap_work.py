"""What runs on the hosts of scripts/bench-stall for synchronous jobs: a learner that computes (it sleeps), contributes and
opens the new weights.

It prints one line of JSON: the seconds of each step, of which so many were spent computing, in write(2), in fsync or
close, and in open.
"""

import json
import os
import sys
import time

# The first steps fill buffers and are not measured.
WARM = 2


def step(learner, data, chunks, compute):
    """One step in equal chunks, each after its share of `compute`: the seconds of each of its parts."""
    began = time.monotonic()
    file = os.open(f"{learner}/gradients", os.O_WRONLY)
    size, computed, written = len(data) // chunks, 0.0, 0.0
    for chunk in range(chunks):
        begin = time.monotonic()
        time.sleep(compute / chunks)
        slept = time.monotonic()
        os.pwrite(file, data[chunk * size : (chunk + 1) * size], chunk * size)
        computed, written = computed + slept - begin, written + time.monotonic() - slept
    begin = time.monotonic()
    os.fsync(file)
    os.close(file)
    ended = time.monotonic()
    os.close(os.open(f"{learner}/weights", os.O_RDONLY))
    over = time.monotonic()
    return {"step": over - began, "compute": computed, "write": written, "end": ended - begin, "open": over - ended}


def learn(learner, size, chunks, compute, steps):
    """Some steps, after a few that are not measured."""
    data, found = memoryview(b"\0" * size), []
    print("ready", flush=True)
    for number in range(WARM + steps):
        parts = step(learner, data, chunks, compute)
        if number >= WARM:
            found.append(parts)
    print(json.dumps(found))


if __name__ == "__main__":
    path, *words = sys.argv[1:]
    learn(path, int(words[0]), int(words[1]), float(words[2]), int(words[3]))
