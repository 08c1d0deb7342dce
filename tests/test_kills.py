"""Random kills of whoever moves versions: what is shown is whole, and the publisher's. `GRADFS_KILLS` says how many kills,
`GRADFS_KILLS_SEED` which:

    GRADFS_KILLS=500 python -m pytest -s test_kills.py
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time

import numpy as np
from filetools import BLOCK, eventually
from safetensors.numpy import save_file

KILLS = int(os.environ.get("GRADFS_KILLS", "14"))
SEED = int(os.environ.get("GRADFS_KILLS_SEED", "1"))
ROWS, COLUMNS = 48, BLOCK // 4
PLAN = {"tensors": [{"from": "a", "slice": {"1": [3, COLUMNS // 2]}}]}
# A content is the first one with three hundredths changed, two of them as in the one before. It follows from its number
# alone. The publisher says the hashes of the model and of the view.
CONTENTS = f"""
import hashlib, os, sys, time
import numpy as np

def content(number):
    bits = np.random.default_rng(0).integers(0, 1 << 15, ({ROWS}, {COLUMNS}), dtype="<u2")
    for seed in range(number - 2, number + 1):
        if seed > 0:
            bits.ravel()[np.random.default_rng(seed).integers(bits.size, size=bits.size // 100)] ^= 1
    return bits

def hashes(bits):
    part = np.ascontiguousarray(bits[:, 3 : {COLUMNS // 2}])
    return [hashlib.sha256(of).hexdigest() for of in (bits, part)]
"""
PUBLISHER = f"""{CONTENTS}
model, number = sys.argv[1], int(sys.argv[2])
while True:
    bits = content(number)
    file = os.open(model + "/publish", os.O_WRONLY)
    try:
        for name, text in zip(("content", "whole", "part"), (str(number), *hashes(bits))):
            os.setxattr(file, "user." + name, text.encode())
        data = memoryview(bits).cast("B")
        for at in range(0, len(data), 1 << 16):
            os.write(file, data[at : at + (1 << 16)])
        os.fsync(file)
    except BlockingIOError:
        pass
    except OSError as error:
        # One that was killed may be about to end.
        if error.errno != 16:
            raise
        time.sleep(0.01)
        continue
    finally:
        os.close(file)
    print(number, flush=True)
    number += 1
"""
# Reads version after version. They go up, and so do their contents.
READER = f"""{CONTENTS}
directory, which = sys.argv[1:]
last = (0, 0)
first = np.random.default_rng(0).integers(0, 1 << 15, ({ROWS}, {COLUMNS}), dtype="<u2")
while True:
    file = os.open(directory + "/weights", os.O_RDONLY)
    data = bytearray(os.fstat(file).st_size)
    assert os.preadv(file, [data], 0) == len(data)
    version = int(os.getxattr(file, "user.gradfs.version"))
    if version == 0:
        number, said = 0, hashes(first)[which == "part"]
    else:
        number, said = int(os.getxattr(file, "user.content")), os.getxattr(file, "user." + which).decode()
    assert hashlib.sha256(data).hexdigest() == said, f"WRONG BYTES of version {{version}}, content {{number}}"
    assert version >= last[0] and number >= last[1], f"WENT BACK from {{last}} to {{(version, number)}}"
    os.close(file)
    if version > last[0] or not version:
        print(number, flush=True)
    last = (version, number)
    time.sleep(0.002)
"""


def said(output):
    """What was written to a file so far. The writer shares its position."""
    return os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0).decode()


class Program:
    """A Python program whose last line is a number."""

    def __init__(self, text, *words):
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        command = [sys.executable, "-c", text, *map(str, words)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.err)

    def last(self):
        """The last number that it has said, or -1."""
        lines = said(self.out).split("\n")[:-1]
        return int(lines[-1]) if lines else -1

    def complaint(self):
        return said(self.err)

    def end(self):
        """Kills it. It must have been content."""
        self.process.kill()
        self.process.wait()
        complaint = self.complaint()
        assert "WRONG BYTES" not in complaint and "WENT BACK" not in complaint, complaint
        for file in (self.out, self.err):
            file.close()


class Job:
    """A publisher on a mount, mounts that pull from each other, and one of a view alone, each with a reader."""

    def __init__(self, cluster, file, transport):
        self.cluster, self.acknowledged, self.transport = cluster(2), 0, transport
        self.cluster.create("m", model=file, block_size=BLOCK, reducer="assign", pull="eager", timeout=60, lease=4)
        self.mounts, self.readers = {}, {}
        for name in ("publisher", "relay", "follower", "view"):
            self.mount(name)
        self.publish()

    def mount(self, name):
        options = {"relay": {"via": "auto"}, "follower": {"via": "auto"}, "view": {"views_only": True}}.get(name, {})
        mount = self.cluster.mount(models=["m"], transport=self.transport, insecure=name in ("relay", "follower"), **options)
        self.mounts[name] = mount
        if name == "view":
            (mount.model / "views/part").mkdir()
            (mount.model / "views/part/plan").write_text(json.dumps(PLAN))
        if name != "publisher":
            self.read(name)

    def read(self, name):
        model = self.mounts[name].model
        words = [model / "views/part", "part"] if name == "view" else [model, "whole"]
        self.readers[name] = Program(READER, *words)

    def publish(self):
        self.publisher = Program(PUBLISHER, self.mounts["publisher"].model, self.acknowledged + 1)

    def unpublish(self):
        self.acknowledged = max(self.acknowledged, self.publisher.last())
        self.publisher.end()

    def kill(self, victim):
        """Kills one, and puts another one in its place."""
        what, _, name = victim.partition(" ")
        if what == "publisher":
            self.unpublish()
            self.publish()
        elif what == "reader":
            self.readers[name].end()
            self.read(name)
        else:
            mount = self.mounts[name]
            mount.kill()
            if name == "publisher":
                self.unpublish()
            else:
                self.readers[name].end()
            self.cluster.mounts.remove(mount)
            mount.clean_up()
            self.mount(name)
            if name == "publisher":
                self.publish()

    def go_on(self):
        """All readers come to see what is acknowledged later than now."""
        wanted = max(self.acknowledged, self.publisher.last()) + 2

        def are_there():
            for one in (self.publisher, *self.readers.values()):
                assert one.process.poll() is None, one.complaint()
            return all(reader.last() >= wanted for reader in self.readers.values())

        eventually(are_there)

    def lose_a_shard(self, dice):
        """The job is lost with it. Until the end, readers see whole versions alone."""
        dice.choice(self.cluster.shards).kill()
        time.sleep(dice.random() / 5)
        self.end()

    def end(self):
        for program in (self.publisher, *self.readers.values()):
            program.end()
        for mount in self.cluster.mounts:
            mount.kill()
        self.cluster.mounts.clear()
        for shard in self.cluster.shards:
            shard.kill()
        self.cluster.shards.clear()


VICTIMS = ["publisher", "reader relay", "reader follower", "reader view"]
VICTIMS += ["mount publisher", "mount relay", "mount follower", "mount view"] * 2 + ["shard"]


def test_no_partial_or_wrong_byte_is_shown_whoever_is_killed(cluster, tmp_path):
    dice, file, killed = random.Random(SEED), tmp_path / "m.safetensors", {}
    values = np.random.default_rng(0).integers(0, 1 << 15, (ROWS, COLUMNS), dtype="<u2")
    save_file({"a": values}, file)
    job = Job(cluster, file, "tcp")
    for kill in range(KILLS):
        job.go_on()
        time.sleep(dice.random() / 20)
        victim = dice.choice(VICTIMS)
        killed[victim] = killed.get(victim, 0) + 1
        if KILLS > 100 and kill % 20 == 0:
            print(f"{kill} of {KILLS} kills: {killed}", flush=True)
        if victim == "shard":
            job.lose_a_shard(dice)
            job = Job(cluster, file, dice.choice(["tcp", "shm"]))
        else:
            job.kill(victim)
    job.go_on()
    job.end()
