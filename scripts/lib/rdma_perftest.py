"""perftest's ib_write_bw and ib_read_bw as contenders of scripts/bench-rdma: a server and a client for each round."""

import os
import subprocess
import time
from pathlib import Path

import daemons
from machine import Failed

DEADLINE = 60.0
PORT = 18515
MIB = 1 << 20
# Two ways to be told of what is done, each of them the faster one at times: seldom, and each time.
WAYS = {"seldom": (), "each": ("-Q", "1")}


def _listens():
    wanted = f":{PORT:04X}"
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if local.endswith(wanted) and state == "0A":
                return True
    return False


def _listens_by_rdma():
    done = subprocess.run(["rdma", "resource", "show", "cm_id"], capture_output=True, text=True, timeout=DEADLINE)
    return f":{PORT} " in done.stdout and "LISTEN" in done.stdout


def rate(program, way, block, depth, blocks):
    """MB/s of so many blocks, as the program says it."""
    command = [program, "-s", block, "-t", depth, "-n", max(blocks, depth, 5), "-F", *WAYS[way]]
    by_cm = os.environ["RDMA_PROVIDER"] == "siw"
    command += ["-R"] if by_cm else ["-d", os.environ["RDMA_DEVICE"], "-x", os.environ["RDMA_GID_INDEX"]]
    command = list(map(str, command))
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, preexec_fn=daemons.end_with_parent, **quiet)
    try:
        give_up = time.monotonic() + DEADLINE
        while not (_listens_by_rdma() if by_cm else _listens()):
            if server.poll() is not None or time.monotonic() > give_up:
                raise Failed(f"{' '.join(command)} does not listen")
            time.sleep(0.05)
        done = subprocess.run(
            [*command, os.environ["HOST_ADDRESS"]], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=DEADLINE,
        )
        server.wait(DEADLINE)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(command)} takes longer than {DEADLINE:.0f} s") from error
    finally:
        if server.poll() is None:
            server.kill()
            server.wait(DEADLINE)
    # Size, blocks, the most and the average MiB/s.
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) >= 4 and words[0] == str(block):
            return float(words[3]) * MIB / 1e6
    raise Failed(f"{' '.join(command)} says nothing of its rate:\n{done.stdout}{done.stderr}")
