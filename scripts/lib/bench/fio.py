"""Runs the jobs of fio-jobs/ and reads what they measured."""

import json
import tempfile
from pathlib import Path

from machine import GIB, ROOT, Failed
from programs import Program

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
    with tempfile.TemporaryDirectory(prefix="gradfs-fio-") as scratch:
        result = Path(scratch, "json")
        command = ["env", f"--chdir={cwd}", "fio", "--output-format=json", f"--output={result}", *options]
        command += [*(["--readonly"] if reads else []), f"{ROOT}/fio-jobs/{job}.fio"]
        words = " ".join([job, "with", *(f"{name}={value}" for name, value in parameters.items())])
        program = Program(command, Path(scratch, "log"), words, parameters)
        try:
            said = program.finish(DEADLINE)
        finally:
            program.stop()
        output = result.read_text()
    found = json.loads(output[output.find("{") :])["jobs"] if "{" in output else []
    if not found or any(entry["error"] for entry in found):
        raise Failed(f"{words} failed: {said.strip() or output.strip()}")
    side = found[0]["read" if reads else "write"]
    if expected_bytes not in (None, side["io_bytes"]):
        raise Failed(f"{words} moved {side['io_bytes']} of {expected_bytes} bytes")
    return side["io_bytes"] / GIB / (side["runtime"] / 1000)
