"""What `push` and `pull` of bench/parts/aio.c do, in Python: seconds for each line of stdin."""

import mmap
import sys
import time

import numpy

import gradfs

model = gradfs.open(sys.argv[1])
with model.join() as learner:
    (name,) = model.layout
    # It begins with a page, as that of bench/parts/aio.c does. NumPy's own begins 16 bytes behind one.
    tensor = model.layout[name]
    room = numpy.empty(tensor.nbytes + mmap.PAGESIZE, "u1")
    start = -room.ctypes.data % mmap.PAGESIZE
    memory = room[start : start + tensor.nbytes].view("f4").reshape(tensor.shape)
    memory[...] = 2**-7
    for line in sys.stdin:
        begun = time.perf_counter()
        if line == "push\n":
            learner.push({name: memory})
        else:
            learner.pull(out={name: memory})
        print(time.perf_counter() - begun, flush=True)
