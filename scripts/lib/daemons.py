"""Starts and stops the filesystems and servers under test. Each ends, and unmounts, however the run ends."""

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


def _stop(process):
    """Ends the daemon, kindly first."""
    process.terminate()
    try:
        process.wait(STOP_DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_DEADLINE)


@contextmanager
def _process(command, log, is_ready, environment=None, prepare=end_with_parent):
    """Runs `command` for as long as the block lasts; enters it once `is_ready()`. `prepare` runs in the child before it."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=prepare,
            env=environment,
        )
    try:
        give_up = time.monotonic() + MOUNT_DEADLINE
        while not is_ready():
            if process.poll() is not None:
                raise Failed(f"{' '.join(map(str, command))}\nended with {process.returncode}: {_tail(log)}")
            if time.monotonic() > give_up:
                raise Failed(f"{' '.join(map(str, command))}\nis not ready: {_tail(log)}")
            time.sleep(0.02)
        yield process
        if process.poll() is not None:
            raise Failed(f"{' '.join(map(str, command))}\ndied meanwhile ({process.returncode}): {_tail(log)}")
    finally:
        _stop(process)


@contextmanager
def _daemon(command, mountpoint, answers):
    """Runs `command` for as long as the block lasts; enters it once `answers` exists below its mount."""
    mountpoint.mkdir(parents=True)

    def is_ready():
        return _mounted(mountpoint) and _answers(mountpoint / answers)

    try:
        with _process(command, mountpoint.with_suffix(".log"), is_ready) as process:
            yield process
    finally:
        if _mounted(mountpoint):
            subprocess.run(["umount", "-l", mountpoint], timeout=STOP_DEADLINE, check=False)


@contextmanager
def gradfs(binary, mountpoint, source, *options, dtype="f32"):
    """A blank model of so many bytes, or one from a file; gives its directory below the mount."""
    model = [source] if isinstance(source, Path) else ["--size", str(source), "--dtype", dtype]
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
def nbdkit(directory, size, allocator, threads):
    """A RAM disk of nbdkit; gives its URI. `directory` is new, and only for this one."""
    directory.mkdir(parents=True)
    socket, ready = directory / "socket", directory / "pid"
    command = ["nbdkit", "--foreground", "--unix", socket, "--pidfile", ready, "--threads", str(threads)]
    command += ["memory", str(size), f"allocator={allocator}"]
    with _process(command, directory / "log", ready.exists):
        yield f"nbd+unix:///?socket={socket}"


@contextmanager
def redis(directory, port, move):
    """A Redis server that keeps nothing on disk; gives its process and the path of its Unix socket.

    It begins with `move()`. The allocator keeps memory that was freed, on huge pages: values of 64 MiB are set three times
    as fast with that.
    """
    directory.mkdir(parents=True)
    path = directory / "socket"
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", path, "--dir", directory]
    command += ["--save", "", "--appendonly", "no", "--disable-thp", "no"]
    keep = "dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always,metadata_thp:auto"

    def prepare():
        end_with_parent()
        move()

    with _process(command, directory / "log", path.exists, {**os.environ, "MALLOC_CONF": keep}, prepare) as process:
        yield process, path


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
