"""One training step in Python, with nothing but its standard file calls.

    step.py MODEL WAY

Reads w (float32) from MODEL/weights and contributes 2 w + 1 to MODEL/gradients, so that with the reducer `sum`
the next version is 3 w + 1. WAY: open, os, pathlib, mmap, numpy; sendfile, copyfile and copy_file_range
contribute w as it is.
"""

import array
import mmap
import os
import pathlib
import shutil
import sys


def gradient_of(data):
    weights = array.array("f")
    weights.frombytes(data)
    return array.array("f", [2 * w + 1 for w in weights])


def with_open(weights, gradients):
    with open(weights, "rb") as file:
        data = file.read()
    with open(gradients, "wb") as file:
        file.write(gradient_of(data))


def with_os(weights, gradients):
    size = os.stat(weights).st_size
    fd = os.open(weights, os.O_RDONLY)
    data = b"".join(iter(lambda: os.read(fd, 100_000), b""))
    os.close(fd)
    assert len(data) == size
    gradient = memoryview(gradient_of(data)).cast("B")
    fd = os.open(gradients, os.O_WRONLY)
    half = size // 8 * 4
    assert os.pwritev(fd, [gradient[half : half + 4], gradient[half + 4 :]], half) == size - half
    assert os.pwrite(fd, gradient[:half], 0) == half
    os.fsync(fd)
    os.close(fd)


def with_pathlib(weights, gradients):
    pathlib.Path(gradients).write_bytes(gradient_of(pathlib.Path(weights).read_bytes()).tobytes())


def with_mmap(weights, gradients):
    with open(weights, "rb") as file:
        mapped_weights = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with open(gradients, "r+b", buffering=0) as file:
        mapped_gradient = mmap.mmap(file.fileno(), len(mapped_weights))
        mapped_gradient[:] = gradient_of(mapped_weights).tobytes()
        os.fsync(file.fileno())
        mapped_gradient.close()


def with_numpy(weights, gradients):
    import numpy

    (2 * numpy.fromfile(weights, numpy.float32) + 1).tofile(gradients)


def with_sendfile(weights, gradients):
    source, target = os.open(weights, os.O_RDONLY), os.open(gradients, os.O_WRONLY)
    while os.sendfile(target, source, None, 300_000):
        pass
    os.close(target)


def with_copyfile(weights, gradients):
    shutil.copyfile(weights, gradients)


def with_copy_file_range(weights, gradients):
    source, target = os.open(weights, os.O_RDONLY), os.open(gradients, os.O_WRONLY)
    while os.copy_file_range(source, target, 300_000):
        pass
    os.close(target)


if __name__ == "__main__":
    globals()["with_" + sys.argv[2]](sys.argv[1] + "/weights", sys.argv[1] + "/gradients")
