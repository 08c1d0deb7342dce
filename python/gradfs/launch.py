"""``python -m gradfs.launch -n 8 train.py``: starts the ranks of a job on this host, and looks after them.

It sets what torchrun sets, and GRADFS_JOB_DIR, the directory where rank 0 starts the job. Signals go on to all ranks.
The first rank that fails ends the others, and its status is that of the launcher. Whatever happens, the job is
unmounted at the end. Where RANK and WORLD_SIZE are set already, as by srun or torchrun, it becomes the program.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from gradfs import job
from gradfs.errors import GradfsError

#: Seconds that a rank has to end by itself after SIGTERM, unless --grace says otherwise.
GRACE = 30.0
#: Seconds between two looks at the ranks.
LOOK = 0.05
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher, and returns its exit status."""
    options = _parser().parse_args(arguments)
    program = [sys.executable, options.script, *options.arguments]
    if job.world().size > 1 or "RANK" in os.environ:
        os.execv(sys.executable, program)
    if options.n < 1:
        raise SystemExit("gradfs.launch: -n takes a number from 1 on")
    with _directory(options.job_dir) as directory:
        try:
            job.clear(directory)
        except GradfsError as error:
            raise SystemExit(f"gradfs.launch: {error}") from None
        try:
            return _Ranks(program, options.n, directory, options.grace, not options.no_prefix).run(options.save)
        finally:
            job.unmount(directory / "mount")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m gradfs.launch", description="Starts the ranks of a job on this host.")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="ranks to start [default: 1]")
    parser.add_argument("--save", metavar="DIR", help="save a snapshot of the job here when all ranks have ended")
    parser.add_argument(
        "--job-dir", metavar="DIR", help="the job's files, mount and log [default: a temporary directory]"
    )
    parser.add_argument(
        "--grace", type=float, default=GRACE, metavar="SECONDS", help="time to end by itself [default: 30]"
    )
    parser.add_argument("--no-prefix", action="store_true", help="print lines without the rank in front")
    parser.add_argument("script", help="the Python program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


class _Ranks:
    """The processes of a job."""

    def __init__(self, program: list[str], n: int, directory: Path, grace: float, prefix: bool) -> None:
        self.program, self.n, self.directory, self.grace, self.prefix = program, n, directory, grace, prefix and n > 1
        self.processes: list[subprocess.Popen[bytes]] = []
        self.readers: list[threading.Thread] = []
        self.asked: int | None = None
        self.kill_at: float | None = None

    def run(self, save: str | None) -> int:
        # A signal that is ignored from the start, as by nohup, is ignored by all.
        heard = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._pass_on) for number in heard}
        try:
            port = os.environ.get("MASTER_PORT") or str(_free_port())
            for rank in range(self.n):
                self.processes.append(self._start(rank, port))
            status = self._wait()
            if status == 0 and save is not None:
                status = self._save(save)
            return status
        finally:
            for process in self.processes:
                _signal(process, signal.SIGKILL)
                process.wait()
            for reader in self.readers:
                reader.join()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, rank: int, port: str) -> subprocess.Popen[bytes]:
        environ = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.n),
            "LOCAL_WORLD_SIZE": str(self.n),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "MASTER_PORT": port,
            "GRADFS_JOB_DIR": str(self.directory),
        }
        pipe = subprocess.PIPE if self.prefix else None
        process = subprocess.Popen(
            self.program, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        )
        for source, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                reader = threading.Thread(target=_copy, args=(f"[{rank}] ".encode(), source, to.buffer), daemon=True)
                reader.start()
                self.readers.append(reader)
        return process

    def _wait(self) -> int:
        """Waits for all ranks. Returns 0, or the status of the first that failed: 128 and the number of a signal."""
        status = 0
        running = list(self.processes)
        while running:
            for process in list(running):
                code = process.poll()
                if code is None:
                    continue
                running.remove(process)
                if code and not status:
                    status = code if code > 0 else 128 - code
                    if self.asked is None:
                        said = f"signal {-code}" if code < 0 else f"status {code}"
                        print(f"gradfs.launch: rank {self.processes.index(process)} ended by {said}", file=sys.stderr)
                    self._end(signal.SIGTERM)
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                for process in running:
                    _signal(process, signal.SIGKILL)
            time.sleep(LOOK)
        return status or (128 + self.asked if self.asked else 0)

    def _end(self, number: int) -> None:
        if self.kill_at is None:
            self.kill_at = time.monotonic() + self.grace
            for process in self.processes:
                _signal(process, number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            if self.kill_at is not None and number == signal.SIGINT:
                self.kill_at = 0
            self.asked = number
            self._end(number)
        else:
            for process in self.processes:
                _signal(process, number)

    def _save(self, to: str) -> int:
        try:
            job.command("save", str(self.directory / "mount" / job.MODEL), to, "--replace")
            if (self.directory / job.EXTRA).exists():
                job.keep_extra(self.directory / job.EXTRA, Path(to))
        except (GradfsError, OSError) as error:
            print(f"gradfs.launch: {error}", file=sys.stderr)
            return 1
        return 0


@contextlib.contextmanager
def _directory(given: str | None) -> Iterator[Path]:
    """The job's directory. A temporary one is removed at the end."""
    directory = Path(given) if given else Path(tempfile.mkdtemp(prefix="gradfs-"))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        yield directory.resolve()
    finally:
        if not given and not os.path.ismount(directory / "mount"):
            shutil.rmtree(directory, ignore_errors=True)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to the group of a rank: also to what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _copy(prefix: bytes, source: IO[bytes], to: IO[bytes]) -> None:
    for line in source:
        with contextlib.suppress(OSError, ValueError):
            to.write(prefix + line)
            to.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
