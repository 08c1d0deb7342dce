"""Publications over a slow link, for scripts/bench-stall: the time until another host has the new weights.

Three hosts of network namespaces have links of 400 Mbit/s. One has the shard. A program on the second one writes 16 MiB
to `publish` in pieces of 256 KiB, and a program on the third one waits for the version and reads all of it. The time
from the first write until it is read is compared with the time that the bytes take on one link, by its rate.

  at once  the pieces are written one right after the other
  in step  each piece is written 5 ms after the one before, as a program does that computes them
"""

import statistics
import sys

from machine import say
from report import milliseconds, ratio

MIB = 1 << 20
SIZE = 16 * MIB
PIECE = 256 << 10
RATE = 400e6
PAUSES = {"at_once": 0.0, "in_step": 0.005}
TURNS = 7
DEADLINE = 60.0

WRITER = """
import os, sys, time
path, size, piece, pause, value = sys.argv[1], *map(float, sys.argv[2:])
data = bytes([int(value)]) * int(piece)
begin = time.time()
fd = os.open(path + "/publish", os.O_WRONLY)
for _ in range(int(size) // int(piece)):
    time.sleep(pause)
    assert os.write(fd, data) == len(data)
os.close(fd)
print(begin)
"""

READER = """
import sys, time
from pathlib import Path
path, version = Path(sys.argv[1]), int(sys.argv[2])
print("waits", flush=True)
while int((path / "version").read_text()) < version:
    time.sleep(0.002)
weights = (path / "weights").read_bytes()
end = time.time()
assert set(weights) == {version}, "these are other weights"
print(end)
"""


def measure(binary, quiet, quick):
    """{pace: seconds from the first write until the other host has the weights, for each turn}."""
    from netns import Cluster, Hosts, Link

    found = {pace: [] for pace in PAUSES}
    with Hosts(["shard", "from", "to"], Link(rate=RATE)) as hosts:
        cluster = Cluster(hosts, binary)
        cluster.shard("shard")
        cluster.create("model", "--size", str(SIZE), "--reducer", "assign")
        sends, reads = (cluster.mount(host, "--transport", "tcp") / "model" for host in ("from", "to"))
        say(f"publications over links of {hosts.way}")
        version = 0
        for _ in range(3 if quick else TURNS):
            for pace, pause in PAUSES.items():
                quiet.wait()
                version += 1
                reader = hosts.start("to", [sys.executable, "-c", READER, reads, str(version)])
                reader.wait_for("waits")
                words = [sends, SIZE, PIECE, pause, version]
                writer = hosts.start("from", [sys.executable, "-c", WRITER, *map(str, words)])
                begin = float(writer.finish(DEADLINE))
                found[pace].append(float(reader.finish(DEADLINE).splitlines()[-1]) - begin)
        hosts.check()
    return found


def figures(found):
    """The ratios to the bytes' time on one link."""
    wire = SIZE * 8 / RATE
    rows = {pace: statistics.median(seconds) for pace, seconds in found.items()}
    return [
        ratio(f"publish_over_link_{pace}_vs_wire", seconds / wire, None, milliseconds(seconds), milliseconds(wire), op="<=")
        for pace, seconds in rows.items()
    ]
