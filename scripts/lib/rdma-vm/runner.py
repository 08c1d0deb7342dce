"""Runs commands in one machine or in two that are joined by a link, and a command once more if a machine crashes."""

import shutil
import socket
import sys
import tempfile
import termios
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from guest import TROUBLE, Guest, Settings
from machine import Failed, say

# As timeout(1) and container runtimes have them.
OUT_OF_TIME = 124
NO_STATUS = 125
# A boot takes 4 to 15 s, on a busy host minutes.
BOOT_DEADLINE = 600.0
# When a host of two has failed, the other one may notice.
GRACE = 30.0
TRIES = 2
# How often it is looked what the guests have written.
PAUSE = 0.05
# Where bin/meet keeps who has come.
MEETINGS = ".meet"
# Lines of a console after trouble.
SHOWN = 25

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2"}


class Crashed(Exception):
    """A machine gave no exit status."""


class OutOfTime(Exception):
    """The command took too long."""


@dataclass(frozen=True)
class Wish:
    """What is to be run, and how."""

    command: list
    two: bool = False
    time_limit: float = 600.0
    # Where the hosts' output goes instead of ours: a.out, a.err, and so on; of the last try.
    output: Path = None
    settings: Settings = Settings()


class Sink:
    """Takes what the hosts say. Of two, lines get the host's name in front."""

    def __init__(self, wish, names):
        self._prefix = len(names) > 1 and not wish.output
        self._rests = {}
        self._files = {}
        for name in names:
            for stream, fd in (("out", 1), ("err", 2)):
                to = wish.output / f"{name}.{stream}" if wish.output else fd
                # Nothing is kept back, so that what comes from several hosts and from here stays in order.
                self._files[name, stream] = open(to, "wb", buffering=0, closefd=bool(wish.output))

    def close(self):
        for file in self._files.values():
            file.close()

    def take(self, name, stream, data):
        if self._prefix:
            *lines, rest = (self._rests.pop((name, stream), b"") + data).split(b"\n")
            if rest:
                self._rests[name, stream] = rest
            data = b"".join(b"%s| %s\n" % (name.encode(), line) for line in lines)
        try:
            while data:
                data = data[self._files[name, stream].write(data) :]
        except BrokenPipeError as error:
            raise Failed("nobody reads the output any more") from error

    def end(self):
        """The last lines, if they did not end."""
        for name, stream in list(self._rests):
            self.take(name, stream, b"\n")


class Machines:
    """One machine or two, which run one command after the other. Each finds them as if they had just been booted."""

    def __init__(self, image, two, settings):
        """Boots them. Without `settings.share`, each command has a /share of its own."""
        self.scratch = Path(tempfile.mkdtemp(prefix="gradfs-rdma-vm-share.")) if settings.share is None else None
        self._share = settings.share or self.scratch
        self._runs, self._jobs = 0, []
        names = ["a", "b"] if two else ["a"]
        hosts = {name: ADDRESSES[name] for name in names}
        self._links = socket.socketpair() if two else (None,)
        settings = replace(settings, share=self._share)
        self.guests = [Guest(image, name, hosts, settings, link) for name, link in zip(names, self._links)]
        try:
            for guest in self.guests:
                guest.start()
        except BaseException:
            self.close()
            raise

    def close(self):
        """Ends them; nothing of them is left."""
        for guest in self.guests:
            guest.close()
        for link in self._links:
            if link:
                link.close()
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def run(self, wish, sink, files=None):
        """Exit statuses of the hosts; None for one that was ended because the other had failed: these machines can run
        nothing more then, nor after `Crashed` and `OutOfTime`.

        `files` is a folder: its content is in the command's /share, and has what is there in the end.
        """
        self._runs += 1
        where = str(self._runs) if self.scratch else "."
        share = self._share / where
        share.mkdir(exist_ok=True)
        if files:
            shutil.copytree(files, share, dirs_exist_ok=True)
        shutil.rmtree(share / MEETINGS, ignore_errors=True)
        self._jobs = [guest.job(wish.command, where) for guest in self.guests]
        try:
            return self._run(wish, sink)
        finally:
            self._pass_on(sink)
            sink.end()
            shutil.rmtree(share / MEETINGS, ignore_errors=True)
            if files:
                shutil.copytree(share, files, dirs_exist_ok=True)
            if self.scratch:
                shutil.rmtree(share, ignore_errors=True)

    def _run(self, wish, sink):
        give_up = time.monotonic() + BOOT_DEADLINE
        while not all(job.ready() for job in self._jobs):
            self._step(sink)
            if time.monotonic() > give_up:
                slow = ", ".join(guest.name for guest, job in zip(self.guests, self._jobs) if not job.ready())
                raise Crashed(f"host {slow} was not up within {BOOT_DEADLINE:.0f} s")
        for job in self._jobs:
            job.go()
        give_up = time.monotonic() + wish.time_limit
        failed_at = None
        while None in (statuses := [job.status() for job in self._jobs]):
            self._step(sink)
            now = time.monotonic()
            if any(statuses):
                failed_at = failed_at or now
                if now > min(give_up, failed_at + GRACE):
                    say(f"{self._running()} was ended {now - failed_at:.0f} s after the other host had failed")
                    break
            elif now > give_up:
                raise OutOfTime(f"{self._running()} took longer than {wish.time_limit:g} s")
        return statuses

    def _running(self):
        left = [guest.name for guest, job in zip(self.guests, self._jobs) if job.status() is None]
        return " and ".join(f"host {name}" for name in left)

    def _step(self, sink):
        """Passes on what the hosts say, after a moment; fails when one can give no status any more."""
        time.sleep(PAUSE)
        self._pass_on(sink)
        for guest, job in zip(self.guests, self._jobs):
            if (why := guest.trouble()) and job.status() is None:
                raise Crashed(f"host {guest.name}: {why}")

    def _pass_on(self, sink):
        for guest, job in zip(self.guests, self._jobs):
            for stream, data in job.output():
                sink.take(guest.name, stream, data)

    def tell(self):
        """What the kernels have said around the first trouble, or last."""
        for guest in self.guests:
            if lines := guest.console().splitlines():
                first = next((number for number, line in enumerate(lines) if TROUBLE.search(line)), len(lines))
                first = max(0, min(first - 1, len(lines) - SHOWN))
                print(f"console of host {guest.name}:", *lines[first : first + SHOWN], sep="\n  ", file=sys.stderr)

    def kernel_trouble(self):
        """A line that tells of a kernel that has gone wrong, or None."""
        return next((line for guest in self.guests if (line := guest.kernel_trouble())), None)


class Pool:
    """Machines that stay up for the next command of their kind; as a context, ends them."""

    def __init__(self, image):
        self._image = image
        self._up = {}

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        for machines in self._up.values():
            machines.close()
        self._up = {}

    def run(self, wish, files=None):
        """The exit status: the command's, that of the first host that failed, or one of ours."""
        kind = wish.two, wish.settings
        for number in range(1, TRIES + 1):
            begun = time.monotonic()
            # They are in the pool only while nothing is wrong with them.
            machines = self._up.pop(kind, None) or Machines(self._image, wish.two, wish.settings)
            why, statuses = None, [None]
            try:
                with closing(Sink(wish, [guest.name for guest in machines.guests])) as sink:
                    try:
                        statuses = machines.run(wish, sink, files)
                    except (Crashed, OutOfTime) as error:
                        why = error
                if why:
                    machines.tell()
                # A kernel that got stuck is no slow command.
                if isinstance(why, OutOfTime) and (line := machines.kernel_trouble()):
                    why = Crashed(line)
            except BaseException:
                machines.close()
                raise
            if None in statuses:
                machines.close()
            else:
                self._up[kind] = machines
            if why is None:
                return next((status for status in statuses if status), 0)
            if isinstance(why, OutOfTime):
                say(f"out of time: {why}")
                return OUT_OF_TIME
            last = number == TRIES
            say(f"crashed after {time.monotonic() - begun:.0f} s: {why}{'' if last else '; trying once more'}")
        say(f"no exit status came back, {TRIES} times; this tells nothing of the command")
        return NO_STATUS


def interact(image, settings, command):
    """A machine at the terminal until its shell ends, or the machine."""
    saved = termios.tcgetattr(sys.stdin)
    try:
        with closing(Machines(image, False, replace(settings, interactive=True))) as machines:
            [guest] = machines.guests
            job = guest.job(command)
            job.go()
            while job.status() is None and not guest.trouble():
                time.sleep(0.1)
            if job.status() is None:
                say(f"no exit status came back: {guest.trouble()}")
            return NO_STATUS if job.status() is None else job.status()
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)
