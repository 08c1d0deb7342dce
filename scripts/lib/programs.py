"""Programs that run beside this one: how they start, say that they are ready, answer, and end with this one."""

import ctypes
import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress

from machine import Failed

START_DEADLINE, ROUND_DEADLINE, STOP_DEADLINE = 60.0, 120.0, 20.0
_PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(how=signal.SIGTERM):
    """Runs in the child: a run that is killed outright takes its programs along, and daemons unmount."""
    libc.prctl(_PR_SET_PDEATHSIG, how)


def environment(more=None):
    """Without the settings of whoever runs this: they are not what is measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GRADFS_")} | (more or {})


def stop(process, patience=STOP_DEADLINE):
    """Ends a process, kindly first."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(patience)


def output_of(*command, timeout=START_DEADLINE, **options):
    """What a short command says; Failed has what it complains of. `options` are those of subprocess."""
    command = list(map(str, command))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout, **options
        )  # fmt: skip
    except FileNotFoundError as error:
        raise Failed(f"{error.filename} is not there") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(command)}: no end after {timeout:.0f} s") from error
    if done.returncode:
        raise Failed(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class Program:
    """A program whose output goes to the file `output`. As a context it must not end before the block does."""

    def __init__(self, command, output, name=None, env=None, prepare=end_with_parent):
        command = list(map(str, command))
        self.name, self.output = name or " ".join(command), output
        with open(output, "wb") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=prepare, env=environment(env),
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        died = self.process.poll() is not None
        self.stop()
        if died and failure is None:
            raise Failed(f"{self.name}: died meanwhile ({self.process.returncode}): {self._tail()}")

    @property
    def pid(self):
        return self.process.pid

    def said(self):
        """What it has said until now."""
        return self.output.read_text(errors="replace")

    def _tail(self):
        return self.said().strip()[-2000:] or "it said nothing"

    def wait_until(self, ready, deadline=START_DEADLINE):
        """Returns when `ready()`; ends the program otherwise."""
        give_up = time.monotonic() + deadline
        while not ready():
            if self.process.poll() is not None:
                raise Failed(f"{self.name} ended with {self.process.returncode}: {self._tail()}")
            if time.monotonic() > give_up:
                self.stop()
                raise Failed(f"{self.name} is not ready after {deadline:.0f} s: {self._tail()}")
            time.sleep(0.01)

    def wait_for(self, line, deadline=START_DEADLINE):
        """Returns when a line that begins with `line` was said."""
        self.wait_until(lambda: any(said.startswith(line) for said in self.said().splitlines()), deadline)

    def finish(self, deadline, check=True):
        """Its output, once it has ended; Failed if that is not in time, or (with `check`) not with 0."""
        try:
            self.process.wait(deadline)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{self.name}: no end after {deadline:.0f} s: {self._tail()}") from error
        if check and self.process.returncode:
            raise Failed(f"{self.name} ended with {self.process.returncode}: {self._tail()}")
        return self.said()

    def found(self, deadline):
        """What its last line says, as JSON."""
        return json.loads(self.finish(deadline).splitlines()[-1])

    def stop(self):
        stop(self.process)


class Peer:
    """A program that is told lines and answers each with a line of JSON, which says what it is about."""

    def __init__(self, command, env=None):
        command = list(map(str, command))
        self.name, self._unread = " ".join(command), b""
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(env), start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGKILL),
        )  # fmt: skip

    def tell(self, line):
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise Failed(f"{self.name}: has ended") from error

    def line(self, what, deadline=ROUND_DEADLINE):
        """Its next line."""
        give_up, output = time.monotonic() + deadline, self.process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([output], [], [], max(0.0, give_up - time.monotonic()))[0]:
                raise Failed(f"{self.name}: no answer about {what} in time")
            more = os.read(output, 65536)
            if not more:
                raise Failed(f"{self.name}: ended with {self.process.wait(STOP_DEADLINE)} when asked about {what}")
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def answer(self, what, deadline=ROUND_DEADLINE):
        """The same, which must be about `what`."""
        found = self.line(what, deadline)
        if found["what"] != what:
            raise Failed(f"{self.name}: answered {found} when asked about {what}")
        return found

    def close(self):
        """The end of its input is its end."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self):
        """Sees to it that it is gone."""
        self.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_DEADLINE)
        stop(self.process)
        self.process.stdout.close()
