"""Runs a command in one machine or in two that are joined by a link, and once more if a machine crashes."""

import os
import selectors
import shutil
import socket
import sys
import tempfile
import termios
import time
from dataclasses import dataclass, replace
from pathlib import Path

from guest import TROUBLE, Guest, Settings
from machine import Failed, say

# As timeout(1) and container runtimes have them.
OUT_OF_TIME = 124
NO_STATUS = 125
# A boot takes 4 to 15 s; a machine that is busy otherwise takes longer.
BOOT_DEADLINE = 120.0
# When a host of two has failed, the other one may notice.
GRACE = 30.0
TRIES = 2
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
    # Where the hosts' output goes instead of ours.
    output: Path = None
    dmesg: bool = False
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

    def close(self):
        for file in self._files.values():
            file.close()


class Attempt:
    """One try: the machines, from boot to end."""

    def __init__(self, image, wish):
        self.wish = wish
        names = ["a", "b"] if wish.two else ["a"]
        hosts = {name: ADDRESSES[name] for name in names}
        self.links = socket.socketpair() if wish.two else (None,)
        self.scratch = None
        settings = wish.settings
        if settings.share is None:
            self.scratch = Path(tempfile.mkdtemp(prefix="gradfs-rdma-vm-share."))
            settings = replace(settings, share=self.scratch)
        self.share = settings.share
        shutil.rmtree(self.share / MEETINGS, ignore_errors=True)
        self.guests = [
            Guest(image, name, hosts[name], hosts, wish.command, settings, link)
            for name, link in zip(names, self.links, strict=True)
        ]
        self.sink = Sink(wish, names)
        self.selector = selectors.DefaultSelector()

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        for guest in self.guests:
            guest.close()
        self.selector.close()
        self.sink.close()
        for link in self.links:
            if link:
                link.close()
        shutil.rmtree(self.share / MEETINGS, ignore_errors=True)
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def run(self):
        """Exit statuses of the hosts; None for one that was ended because the other had failed."""
        for guest in self.guests:
            guest.start()
            for stream, fd in guest.pipes.items():
                os.set_blocking(fd, False)
                self.selector.register(fd, selectors.EVENT_READ, (guest, stream))
        give_up = time.monotonic() + BOOT_DEADLINE
        while not all(guest.ready() for guest in self.guests):
            self._step()
            if time.monotonic() > give_up:
                slow = ", ".join(guest.name for guest in self.guests if not guest.ready())
                raise Crashed(f"host {slow} was not up within {BOOT_DEADLINE:.0f} s")
        for guest in self.guests:
            guest.go()
        give_up = time.monotonic() + self.wish.time_limit
        failed_at = None
        while None in (statuses := [guest.status() for guest in self.guests]):
            self._step()
            now = time.monotonic()
            if any(statuses):
                failed_at = failed_at or now
                if now > min(give_up, failed_at + GRACE):
                    say(f"{self._running()} was ended {now - failed_at:.0f} s after the other host had failed")
                    break
            elif now > give_up:
                raise OutOfTime(f"{self._running()} took longer than {self.wish.time_limit:g} s")
        return statuses

    def _running(self):
        return " and ".join(f"host {guest.name}" for guest in self.guests if guest.status() is None)

    def _step(self):
        """Passes on what the hosts say, for a moment; fails when one can give no status any more."""
        self._pass_on(0.05)
        for guest in self.guests:
            if why := guest.trouble():
                raise Crashed(f"host {guest.name}: {why}")

    def _pass_on(self, patience):
        if not self.selector.get_map():
            time.sleep(patience)
            return False
        events = self.selector.select(patience)
        for key, _ in events:
            guest, stream = key.data
            data = os.read(key.fd, 1 << 16)
            if data:
                self.sink.take(guest.name, stream, data)
            else:
                self.selector.unregister(key.fd)
        return bool(events)

    def finish(self):
        """Ends the machines, and passes on what they have said until then."""
        for guest in self.guests:
            guest.stop()
        while self.selector.get_map() and self._pass_on(0):
            pass
        self.sink.end()

    def tell(self, failed):
        """What the kernels have said: when the attempt failed, and with --dmesg."""
        for guest in self.guests:
            console = guest.console()
            if self.wish.output:
                (self.wish.output / f"{guest.name}.console").write_text(console)
                (self.wish.output / f"{guest.name}.dmesg").write_text(guest.dmesg())
            lines = console.splitlines()
            if failed and lines:
                first = next((number for number, line in enumerate(lines) if TROUBLE.search(line)), len(lines))
                first = max(0, min(first - 1, len(lines) - SHOWN))
                print(f"console of host {guest.name}:", *lines[first : first + SHOWN], sep="\n  ", file=sys.stderr)
            elif self.wish.dmesg:
                print(f"dmesg of host {guest.name}:", guest.dmesg() or console, sep="\n", file=sys.stderr)

    def kernel_trouble(self):
        """A line that tells of a kernel that has gone wrong, or None."""
        return next((line for guest in self.guests if (line := guest.kernel_trouble())), None)


def run(image, wish):
    """The exit status: the command's, that of the first host that failed, or one of ours."""
    for number in range(1, TRIES + 1):
        begun = time.monotonic()
        with Attempt(image, wish) as attempt:
            why = None
            try:
                statuses = attempt.run()
            except (Crashed, OutOfTime) as error:
                why = error
            attempt.finish()
            attempt.tell(why is not None)
            # A kernel that got stuck is no slow command.
            if isinstance(why, OutOfTime) and (line := attempt.kernel_trouble()):
                why = Crashed(line)
        if why is None:
            return next((status for status in statuses if status), 0)
        if isinstance(why, OutOfTime):
            say(f"out of time: {why}")
            return OUT_OF_TIME
        last = number == TRIES
        say(f"crashed after {time.monotonic() - begun:.0f} s: {why}{'' if last else '; trying once more'}")
    say(f"no exit status came back, {TRIES} times; this tells nothing of the command")
    return NO_STATUS


def interact(guest):
    """A machine at the terminal until its shell ends, or the machine."""
    saved = termios.tcgetattr(sys.stdin)
    try:
        guest.start()
        while guest.status() is None and not guest.trouble():
            time.sleep(0.1)
        guest.stop()
        if guest.status() is None:
            say(f"no exit status came back: {guest.trouble()}")
        return NO_STATUS if guest.status() is None else guest.status()
    finally:
        guest.close()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)
