"""What runs on the hosts of scripts/netns-cluster, as programs: learners, and who looks at the outcome.

Each says what it found as JSON in its last line.
"""

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# As the examples have it, before NumPy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(EXAMPLES))
sys.dont_write_bytecode = True


def say(**found):
    """The last line."""
    print(json.dumps(found), flush=True)


# The digits of examples/, one learner a program.


def digits(options):
    """One learner of the training."""
    import train_digits

    clock = train_digits.learner(options, options.rank)
    say(steps=clock.steps, seconds=sum(clock.seconds.values()), laps=clock.seconds)


def digits_check(options):
    """Holds what was trained against the same training in this process, as train_digits.py --check does."""
    import digits as shared
    import numpy
    import train_digits

    layout = shared.Layout(options.model)
    with open(options.initial, "rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        initial = numpy.fromfile(file, numpy.float32)
    trained = numpy.fromfile(options.model / "weights", numpy.float32)
    version = int((options.model / "version").read_text())
    accuracy = train_digits.accuracy_of(layout.views(trained), *shared.load_data()[2:])
    print(f"version {version}, test accuracy {accuracy:.4f}")
    reference = train_digits.train_alone(options, layout, initial)
    # Ends this program with what was missed.
    shared.check(options, layout, trained, reference, accuracy, version)
    say(accuracy=accuracy, version=version)


# Steps of whole numbers: what they add up to is known to the last bit.


def parts(rank, step, count):
    """What learner `rank` contributes in its step: a number each, exact in whatever order they are added."""
    import numpy

    return ((numpy.arange(count) % 97 + 1) * (rank + 1) + step % 7).astype(numpy.float32)


def steps(options):
    """A learner that takes steps and says of each how long it took.

    It goes on until --steps, or until a call fails: then it says which, and how many steps were taken by then.
    """
    import numpy

    directory = options.model / "learners" / f"learner{options.rank}"
    size = (options.model / "weights").stat().st_size
    weights = numpy.empty(size // 4, numpy.float32)
    directory.mkdir()
    taken, took, failed = 0, [], None
    print("joined", flush=True)
    try:
        for step in range(options.steps):
            gradient = parts(options.rank, step, size // 4)
            begun = time.monotonic()
            file = os.open(directory / "gradients", os.O_WRONLY)
            try:
                os.write(file, gradient)
                # Which says whether they were taken; closing says it once more.
                os.fsync(file)
                taken += 1
            finally:
                os.close(file)
            with open(directory / "weights", "rb", buffering=0) as file:
                file.readinto(weights)
            took.append(time.monotonic() - begun)
            print(f"step {taken}", flush=True)
            time.sleep(options.pause)
    except OSError as error:
        failed = error.strerror
    if not options.stay and failed is None:
        directory.rmdir()
    say(taken=taken, seconds=took, failed=failed)


def total(options):
    """Whether the weights hold each of the given numbers of steps once: --taken has one for each learner."""
    import numpy

    weights = numpy.fromfile(options.model / "weights", numpy.float32)
    expected = numpy.zeros_like(weights)
    for rank, taken in enumerate(options.taken):
        for step in range(taken):
            expected += parts(rank, step, len(weights))
    version = int((options.model / "version").read_text())
    wrong = int((weights != expected).sum())
    say(wrong=wrong, version=version, largest=float(numpy.abs(weights - expected).max()))


# One TCP stream: what the network gives at best.

STREAM_PORT, STREAM_SECONDS = 7069, 2.0


def listen(_):
    """Takes what one connection sends; counts from when it is at speed."""
    with socket.create_server(("0.0.0.0", STREAM_PORT)) as server:
        server.settimeout(30)
        print("listening", flush=True)
        connection, _ = server.accept()
    connection.settimeout(30)
    buffer = bytearray(1 << 20)
    begun, counted = time.monotonic(), 0
    while got := connection.recv_into(buffer):
        if time.monotonic() - begun < STREAM_SECONDS / 4:
            start = time.monotonic()
        else:
            counted += got
            end = time.monotonic()
    say(bytes_a_second=counted / (end - start))


def send(options):
    """Sends for a while."""
    with socket.create_connection((options.address, STREAM_PORT), 30) as connection:
        end = time.monotonic() + STREAM_SECONDS
        while time.monotonic() < end:
            connection.sendall(bytes(1 << 20))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="directory of the model in the mount")
    tasks = parser.add_subparsers(required=True)
    for name, task in {"digits": digits, "digits-check": digits_check}.items():
        one = tasks.add_parser(name)
        one.set_defaults(task=task, seed=0)
        one.add_argument("--batch", type=int, default=64)
        one.add_argument("--lr", type=float, default=0.1)
        one.add_argument("--learners", type=int, default=2)
        one.add_argument("--epochs", type=int, default=25)
        one.add_argument("--mmap", action="store_true")
        one.add_argument("--rank", type=int, default=0)
        one.add_argument("--initial", type=Path)
    one = tasks.add_parser("steps")
    one.set_defaults(task=steps)
    one.add_argument("--rank", type=int, required=True)
    one.add_argument("--steps", type=int, required=True)
    one.add_argument("--pause", type=float, default=0.0, help="seconds between them")
    one.add_argument("--stay", action="store_true", help="do not leave the job at the end")
    one = tasks.add_parser("total")
    one.set_defaults(task=total)
    one.add_argument("--taken", type=int, nargs="+")
    tasks.add_parser("listen").set_defaults(task=listen)
    one = tasks.add_parser("send")
    one.set_defaults(task=send)
    one.add_argument("address")
    options = parser.parse_args()
    options.task(options)


if __name__ == "__main__":
    main()
