"""Runs the jobs of fio-jobs/ and reads what they measured."""

import json
import os
import signal
import subprocess
from contextlib import suppress

from machine import GIB, ROOT, Failed

DEADLINE = 300.0


def run(job, directory, block_size, expected_bytes):
    """Runs one job in `directory`; gives GiB/s. The whole file must have gone through."""
    return rate(job, {"GRADFS": str(directory), "BS": block_size}, expected_bytes)


def rate(job, parameters, expected_bytes=None, options=(), cwd="/tmp"):
    """Runs one job with `parameters` in its environment; gives GiB/s of its reads or writes.

    `expected_bytes` must have gone through, if they are given. fio changes into no directory but drops files where it
    runs, so that is `cwd`.
    """
    reads = "-read" in job
    command = ["fio", "--output-format=json", *options, *(["--readonly"] if reads else []), f"{ROOT}/fio-jobs/{job}.fio"]
    process = subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **parameters}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    words = " ".join([job, "with", *(f"{name}={value}" for name, value in parameters.items())])
    try:
        output, errors = process.communicate(timeout=DEADLINE)
    except BaseException as error:
        # It leads its own process group, which holds the jobs it forked.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if isinstance(error, subprocess.TimeoutExpired):
            raise Failed(f"{words} takes longer than {DEADLINE:.0f} s") from error
        raise
    start = output.find("{")
    jobs = json.loads(output[start:])["jobs"] if start >= 0 else []
    if process.returncode or not jobs or any(entry["error"] for entry in jobs):
        raise Failed(f"{words} failed: {errors.strip() or output.strip()}")
    side = jobs[0]["read" if reads else "write"]
    if expected_bytes not in (None, side["io_bytes"]):
        raise Failed(f"{words} moved {side['io_bytes']} of {expected_bytes} bytes")
    return side["io_bytes"] / GIB / (side["runtime"] / 1000)
