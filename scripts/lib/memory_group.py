"""Memory that the kernel accounts to some processes: anonymous memory, and shared memory (memfds, tmpfs).

A control group is the exact account: the kernel charges a page to the group of the process that touches it first, and once
however many processes map it. It may be of either version of the interface. Where none can be made, the same is
read process by process from smaps_rollup, in which a page that several processes map is divided between them. Memory that
nobody has mapped is missing there.
"""

import os
import time
from contextlib import contextmanager
from pathlib import Path

from machine import Failed

_REMOVING = 10.0


def _memory_controllers():
    """Directories below which a group may be made, with what memory.stat calls the two kinds of memory."""
    with open("/proc/self/mounts") as lines:
        for line in lines:
            _, place, kind, options, *_ = line.split(" ")
            if kind == "cgroup" and "memory" in options.split(","):
                yield Path(place), ("total_rss", "total_shmem")
            elif kind == "cgroup2" and "memory" in (Path(place) / "cgroup.controllers").read_text().split():
                yield Path(place), ("anon", "shmem")


def _starts(script, program, where):
    """Writes a program that is `program`, and first tells its number."""
    script.write_text(f'#!/bin/sh\necho $$ {where} && exec {program} "$@"\n')
    script.chmod(0o755)
    return script


class Group:
    """A control group."""

    def __init__(self, place, names):
        self._place, self._names = place, names

    def add(self, pid):
        """Puts a process into the group. Memory that it has already counts where it was."""
        (self._place / "cgroup.procs").write_text(str(pid))

    def starts(self, script, program):
        """Writes a program that is `program` in this group; gives its path."""
        return _starts(script, program, f"> {self._place}/cgroup.procs")

    def _file(self, *names):
        # Of either version of the interface.
        return next(file for name in names if (file := self._place / name).exists())

    def used(self):
        """What the limit is held against: files that were read count, too."""
        return int(self._file("memory.current", "memory.usage_in_bytes").read_text())

    def limit(self, most):
        """The group may have so many bytes."""
        self._file("memory.max", "memory.limit_in_bytes").write_text(str(most))

    def bytes(self):
        """Anonymous and shared memory of the group."""
        stat = dict(line.split() for line in (self._place / "memory.stat").read_text().splitlines())
        return sum(int(stat[name]) for name in self._names)


class Processes:
    """What stands in for a group where none can be made."""

    def __init__(self):
        self._pids, self._scripts = [], []

    def add(self, pid):
        """Notes a process."""
        self._pids.append(pid)

    def starts(self, script, program):
        """Writes a program that is `program`, and is noted; gives its path."""
        self._scripts.append(script.with_suffix(".pids"))
        return _starts(script, program, f">> {self._scripts[-1]}")

    def bytes(self):
        """Of the processes that still run, by smaps_rollup."""
        started = [int(pid) for noted in self._scripts if noted.exists() for pid in noted.read_text().split()]
        rollups = [_rollup(pid) for pid in [*self._pids, *started] if os.path.exists(f"/proc/{pid}")]
        return sum(rollup["Anonymous"] + rollup["Pss_Shmem"] for rollup in rollups)


def _rollup(pid):
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        next(lines)
        return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}


def anonymous_bytes(pid):
    """Memory that a process shares with nobody: arrays, heap and stacks."""
    return _rollup(pid)["Anonymous"]


def _is_mine(place):
    """Whether a group can be made here, and processes moved into it."""
    try:
        place.mkdir()
    except OSError:
        return False
    if os.access(place / "memory.stat", os.R_OK) and os.access(place / "cgroup.procs", os.W_OK):
        return True
    place.rmdir()
    return False


@contextmanager
def group(name):
    """A Group, or Processes where the machine gives none."""
    name = f"gradfs-{name}-{os.getpid()}"
    for place, names in _memory_controllers():
        if _is_mine(place / name):
            try:
                yield Group(place / name, names)
            finally:
                _remove(place / name)
            return
    yield Processes()


def _remove(place):
    """Its processes have ended, or end within moments."""
    give_up = time.monotonic() + _REMOVING
    while True:
        try:
            return place.rmdir()
        except OSError as error:
            if time.monotonic() > give_up:
                raise Failed(f"{place} cannot be removed: {error.strerror}") from error
            time.sleep(0.05)
