"""Runs the jobs of fio-jobs/ and reads what they measured."""

import json
import os
import signal
import subprocess
from contextlib import suppress

from machine import GIB, ROOT, Failed

DEADLINE = 300.0
JOBS = ROOT / "fio-jobs"


def run(job, directory, block_size, expected_bytes):
    """Runs one job in `directory`; gives GiB/s. The whole file must have gone through."""
    command = ["fio", "--output-format=json"]
    if job.startswith("weights-read"):
        command.append("--readonly")
    command.append(str(JOBS / f"{job}.fio"))
    environment = dict(os.environ, GRADFS=str(directory), BS=block_size)
    # fio changes into no directory but drops state files where it runs.
    process = subprocess.Popen(
        command,
        cwd="/tmp",
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=DEADLINE)
    except BaseException as error:
        # It leads its own process group, which holds the jobs it forked.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if isinstance(error, subprocess.TimeoutExpired):
            raise Failed(f"{job} in {directory} takes longer than {DEADLINE:.0f} s") from error
        raise
    start = output.find("{")
    report = json.loads(output[start:]) if start >= 0 else {"jobs": []}
    failed = [entry["error"] for entry in report["jobs"] if entry["error"]]
    if process.returncode or failed or not report["jobs"]:
        raise Failed(f"{job} with BS={block_size} in {directory} failed: {errors.strip() or output.strip()}")
    side = report["jobs"][0]["read" if job.startswith("weights-read") else "write"]
    if side["io_bytes"] != expected_bytes:
        raise Failed(f"{job} in {directory} moved {side['io_bytes']} of {expected_bytes} bytes")
    return side["io_bytes"] / GIB / (side["runtime"] / 1000)
