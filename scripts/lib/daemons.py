"""Starts and stops the filesystems under test. Each unmounts however the run ends."""

import ctypes
import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from machine import Failed

MOUNT_DEADLINE = 60.0
STOP_DEADLINE = 20.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent():
    """Runs in the child: a run that is killed outright takes its daemons along, and they unmount."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _mounted(path):
    with open("/proc/self/mounts") as lines:
        return any(line.split(" ")[1] == str(path) for line in lines)


def _answers(path):
    """Whether `path` exists, asked by another process: a daemon that hangs must not hang the run."""
    try:
        return subprocess.run(["test", "-e", path], timeout=5).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _tail(log):
    return log.read_text(errors="replace").strip()[-2000:] or "it said nothing"


def _stop(process, mountpoint):
    """Ends the daemon, kindly first, and leaves nothing mounted."""
    process.terminate()
    try:
        process.wait(STOP_DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_DEADLINE)
    if _mounted(mountpoint):
        subprocess.run(["umount", "-l", mountpoint], timeout=STOP_DEADLINE, check=False)


@contextmanager
def _daemon(command, mountpoint, answers):
    """Runs `command` for as long as the block lasts; enters it once `answers` exists below its mount."""
    mountpoint.mkdir(parents=True)
    log = mountpoint.with_suffix(".log")
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    try:
        give_up = time.monotonic() + MOUNT_DEADLINE
        while not (_mounted(mountpoint) and _answers(mountpoint / answers)):
            if process.poll() is not None:
                raise Failed(f"{' '.join(map(str, command))}\nended with {process.returncode}: {_tail(log)}")
            if time.monotonic() > give_up:
                raise Failed(f"{' '.join(map(str, command))}\nhas not mounted: {_tail(log)}")
            time.sleep(0.02)
        yield process
        if process.poll() is not None:
            raise Failed(f"{' '.join(map(str, command))}\ndied meanwhile ({process.returncode}): {_tail(log)}")
    finally:
        _stop(process, mountpoint)


@contextmanager
def gradfs(binary, mountpoint, source, *options):
    """A blank fp32 model of so many bytes, or one from a file; gives its directory below the mount."""
    model = [source] if isinstance(source, Path) else ["--size", str(source), "--dtype", "f32"]
    command = [binary, "up", "--name", "model", "--threads", "2", *options, *model, mountpoint]
    # The settings of whoever runs this are not what is measured.
    with _environment_without("GRADFS_"), _daemon(command, mountpoint, "model/weights"):
        yield mountpoint / "model"


@contextmanager
def network_mount(binary, mountpoint, registry, model, *options):
    """A mount of a model whose shards are on a network; gives its process."""
    command = [binary, "mount", mountpoint, model, "--registry", registry, "--threads", "2", *options]
    with _environment_without("GRADFS_"), _daemon(command, mountpoint, f"{model}/weights") as process:
        yield process


@contextmanager
def sink(binary, mountpoint, size, mode):
    """The filesystem to beat, with one file `gradients`; gives the directory it is in."""
    command = [binary, "--size", str(size), "--mode", mode, "--threads", "2", mountpoint]
    with _daemon(command, mountpoint, "gradients"):
        yield mountpoint


@contextmanager
def _environment_without(prefix):
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(prefix)}
    try:
        yield
    finally:
        os.environ.update(hidden)


def learners(model, count):
    """Joins `count` learners; gives their directories."""
    directories = [Path(model) / "learners" / f"bench{rank}" for rank in range(count)]
    for directory in directories:
        directory.mkdir()
    return directories
