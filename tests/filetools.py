"""What the tests of the mount's promises share: model files, errnos, and programs that run beside them."""

import contextlib
import errno
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from patience import HANGS, Limit

# A program started by a test is killed after this many seconds.
PROGRAM_DEADLINE = HANGS

BLOCK = 64 << 10
# Not a multiple of the block or of a page; six blocks and a bit.
SIZE = 6 * BLOCK + 1236


def mounts(both=True, **defaults):
    """A fixture that starts mounts of SIZE bytes, with passthrough and, if `both`, without; options of a test go before
    these."""

    @pytest.fixture(params=["passthrough", "through the daemon"] if both else ["passthrough"])
    def mounted(start_mount, request):
        def start(**options):
            mode = {"no_passthrough": request.param != "passthrough"}
            return start_mount(**{"size": SIZE, "block_size": BLOCK, "reducer": "sum", "timeout": 20, **mode, **defaults, **options})

        return start

    return mounted


def ship_mapped(place, data, declares=False):
    """A contribution by a mapping of all that there is; with `declares`, its bytes are said to be final first."""
    fd = os.open(place / "gradients", os.O_RDWR | os.O_DIRECT)
    try:
        with mmap.mmap(fd, 0) as mapping:
            mapping[:] = memoryview(data).cast("B")
            if declares:
                os.posix_fallocate(fd, 0, len(mapping))
            os.fsync(fd)
            assert mapping[:] == memoryview(data).cast("B"), "the memory keeps what was stored"
    finally:
        os.close(fd)


def close(*fds):
    for fd in fds:
        os.close(fd)


def killed(child, with_signal=signal.SIGKILL):
    """Ends a program by a signal."""
    child.send_signal(with_signal)
    child.communicate(timeout=PROGRAM_DEADLINE)
    assert child.returncode == -with_signal


def f32(*values):
    return np.array(values, "<f4")


def filled(mount, value):
    """A contribution to all of a float32 model, with one value everywhere."""
    return np.full(os.stat(mount.model / "weights").st_size // 4, value, "<f4")


def array(path, dtype="<f4"):
    """A whole file of values, by one open."""
    with open(path, "rb", buffering=0) as file:
        return np.frombuffer(file.readall(), dtype)


def bf16(values):
    """Bits of values that bfloat16 can hold exactly."""
    return (np.asarray(values, "<f4").view("<u4") >> 16).astype("<u2")


def from_bf16(bits):
    return (bits.astype("<u4") << 16).view("<f4")


def write_safetensors(path, tensors, metadata=None):
    """`tensors`: name -> (dtype as safetensors names it, shape, bytes). Returns the path."""
    header, at = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return path


def read_safetensors(data):
    """Name -> (dtype, shape, bytes), and the metadata, of a file's bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    body = data[8 + length :]
    parts = {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }
    assert sum(len(part) for _, _, part in parts.values()) == len(body)
    return parts, metadata


@contextlib.contextmanager
def raises(*numbers):
    """The block fails with one of these errnos."""
    with pytest.raises(OSError) as caught:
        yield
    names = {errno.errorcode[number] for number in numbers}
    assert errno.errorcode.get(caught.value.errno) in names, caught.value


def fails(number, call, *arguments, **options):
    """The call fails with this errno."""
    with raises(number):
        call(*arguments, **options)


@contextlib.contextmanager
def opened(path, flags):
    """A descriptor; an error of close counts, unless the body has failed already."""
    fd = os.open(path, flags)
    try:
        yield fd
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)


def said(mount, *words):
    """Waits until a line of the daemon's log holds all `words`."""
    eventually(lambda: any(all(word in line for word in words) for line in mount.stderr().splitlines()))


def shows(model, value):
    """Whether a model's directory is there, and its weights begin with `value`."""
    try:
        return array(model / "weights")[0] == value
    except OSError:
        return False


def only(mount, learner=None):
    """The one value that all weights have, as a learner's next open shows them."""
    values = array(mount.place(learner) / "weights")
    assert (values == values[0]).all(), f"a mix: {sorted(set(values.tolist()))}"
    return values[0]


def give(mount, value, learner=None):
    """A contribution of one value everywhere."""
    mount.contribute(filled(mount, value), learner=learner)


def part_of(path):
    """Opens a file to write a part of it: it is not truncated, so it need not be written as a whole."""
    return os.fdopen(os.open(path, os.O_WRONLY), "wb", buffering=0)


def outcome(call, *arguments):
    """How a call ends: "done", or the name of its errno."""
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"


@contextlib.contextmanager
def takes(at_least, at_most):
    """The block takes between so many seconds; the most are of a machine that is not busy."""
    limit = Limit(at_most)
    yield
    took = limit.taken()
    assert took >= at_least and not limit.over(), f"took {took:.3f} s"


def eventually(condition, deadline=HANGS):
    """Waits until `condition()` holds; returns what it says. A condition that takes long to ask is asked less often."""
    limit = Limit(deadline)
    while True:
        begun = time.monotonic()
        if result := condition():
            return result
        assert not limit.over(), f"did not come true within {limit.taken():.0f} s"
        time.sleep(max(0.005, 3 * (time.monotonic() - begun)))


@contextlib.contextmanager
def impatient(mount, seconds=0.4):
    """Calls that wait fail after so many seconds; before and afterwards they have what a busy machine needs."""
    mount.control("timeout", seconds)
    try:
        yield
    finally:
        mount.control("timeout", HANGS)


def program(code, *arguments, **options):
    """Starts a Python program; it prints a line to say how far it is, and reads one to go on."""
    prologue = (
        "import mmap, os, signal, sys, threading, time\n"
        f"signal.alarm({PROGRAM_DEADLINE})\n"
        "def say(*words): print(*words, flush=True)\n"
        "def wait(): sys.stdin.readline()\n"
        "argv = sys.argv[1:]\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prologue + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def hear(process):
    """The next line that a program says."""
    line = process.stdout.readline()
    assert line, f"the program ended with {process.wait(PROGRAM_DEADLINE)}"
    return line.strip()


def go(process):
    process.stdin.write("\n")
    process.stdin.flush()


def finish(process, status=0):
    """Waits for a program's end; returns the rest of what it said."""
    process.stdin.close()
    rest = process.stdout.read()
    assert process.wait(PROGRAM_DEADLINE) == status
    process.stdout.close()
    return rest.split("\n")


def shell(script, *arguments, status=0):
    """Runs a bash script to its end."""
    command = ["bash", "-c", script, "bash", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_DEADLINE, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


class Threads:
    """Runs functions in threads; an exception in one of them fails the test.

    Deadlines are the daemon's: whatever waits there is answered after control/timeout.
    """

    def __init__(self):
        from concurrent.futures import ThreadPoolExecutor

        self.pool = ThreadPoolExecutor(32)

    def start(self, function, *arguments):
        return self.pool.submit(function, *arguments)

    def run(self, *functions, deadline=PROGRAM_DEADLINE):
        return [future.result(deadline) for future in [self.start(function) for function in functions]]


def flip(place):
    """One bit in the middle of a file is another one."""
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 1
    place.write_bytes(bytes(data))
