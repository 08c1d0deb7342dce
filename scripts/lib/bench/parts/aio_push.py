"""What `push` and `pull` of bench/parts/aio.c do, in Python: seconds for each line of stdin."""

import sys
import time

import numpy

import gradfs

model = gradfs.open(sys.argv[1])
with model.join() as learner:
    (name,) = model.layout
    memory = numpy.full(model.layout[name].shape, 2**-7, "f4")
    for line in sys.stdin:
        begun = time.perf_counter()
        if line == "push\n":
            learner.push({name: memory})
        else:
            learner.pull(out={name: memory})
        print(time.perf_counter() - begun, flush=True)
