"""What the scripts need of the machine: packages, built binaries, memory, and idle CPUs."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIB, MIB = 1 << 30, 1 << 20
# Ctrl-C, a request, and a terminal that goes away.
ENDINGS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

# What is imported, run or included, and the Debian package that has it.
MODULES = {name: f"python3-{name}" for name in ("numpy", "sklearn", "torch", "matplotlib")} | {"nbd": "python3-libnbd"}
PROGRAMS = {name: name for name in ("fio", "nbdkit", "redis-server", "g++", "pkg-config")} | {"nbdcopy": "libnbd-bin"}
HEADERS = {"grpcpp/grpcpp.h": "libgrpc++-dev", "hiredis/hiredis.h": "libhiredis-dev"}

# What cargo builds for benchmarks: the package, the kind of target, and the features besides.
TARGETS = {
    "gradfs": ("fs-daemon", "--bin", ()),
    "bench_sink": ("fs-daemon", "--example", ()),
    "bench_learner": ("fs-daemon", "--example", ()),
    "bench_reduce": ("ps-backend", "--example", ("cuda",)),
    "goodput": ("ps-backend", "--example", ()),
}


class Failed(Exception):
    """Something that ends the run, in words for the one who started it."""

    status = 1


class CannotBeHad(Failed):
    """The same, where this machine lacks or does not permit what the run takes."""

    status = 77

    def __str__(self):
        return f"cannot be had here: {super().__str__()}"


_started = time.monotonic()


def say(text):
    """A line of progress."""
    print(f"{time.monotonic() - _started:5.0f} s  {text}", file=sys.stderr, flush=True)


def _interrupted(*_):
    # Once is enough: cleaning up has deadlines, and is not to be cut short.
    for how in ENDINGS:
        signal.signal(how, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(script, run):
    """Calls `run`, whose every cleanup happens however it ends; gives the exit status."""
    for how in ENDINGS:
        signal.signal(how, _interrupted)
    try:
        return run() or 0
    except Failed as error:
        print(f"{script}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print(f"{script}: interrupted", file=sys.stderr)
        return 130


def number(least, most, kind=int):
    """Parses such a number, for argparse."""

    def parse(text):
        if not least <= kind(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: from {least} to {most}")
        return kind(text)

    parse.__name__ = "number"
    return parse


def finished(*command, cwd=ROOT, timeout=3600, said="", output=None):
    """Runs a command that tells its own progress; Failed says `said`, or that it failed."""
    command = list(map(str, command))
    try:
        done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output or sys.stderr, timeout=timeout)
    except FileNotFoundError as error:
        raise Failed(f"{command[0]} is not on the PATH: run scripts/setup build") from error
    if done.returncode:
        raise Failed(said or f"{' '.join(command)} failed")


def present(name):
    """Whether a module, a program or a header is installed, without the cost of importing it."""
    if name in PROGRAMS:
        return shutil.which(name) is not None
    return Path("/usr/include", name).exists() if name in HEADERS else find_spec(name) is not None


def require(*names):
    """Installs what is missing of `names`, or ends the run with the line to type."""
    packages = MODULES | PROGRAMS | HEADERS
    if missing := [packages[name] for name in names if not present(name)]:
        say(f"installing {', '.join(missing)}")
        why = f"needs {', '.join(missing)}: apt-get install {' '.join(missing)}"
        finished("scripts/setup", *(f"package:{name}" for name in missing), timeout=1800, said=why)


def require_fuse():
    """Ends the run where nothing can be mounted."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Failed("/dev/fuse is missing or not permitted: load the fuse module (modprobe fuse), or run as root")


def own_python():
    """The interpreter that has the packages of `scripts/setup`, or else the one that runs this."""
    own = ROOT / ".venv" / "bin" / "python"
    return str(own if own.is_file() else sys.executable)


def dist_directory():
    """Where cargo puts binaries as packages have them."""
    return ROOT / (os.environ.get("CARGO_TARGET_DIR") or "target") / "dist"


def existing(paths):
    """The paths, all of which must be there."""
    if missing := [str(path) for path in paths if not path.exists()]:
        raise Failed(f"not built: {', '.join(missing)}")
    return paths


def build(*targets, only_look=False, features=()):
    """Builds some of TARGETS, of one package, as for packages, or takes those there are. Gives their paths."""
    paths = [dist_directory() / ("examples" if TARGETS[name][1] == "--example" else "") / name for name in targets]
    if only_look:
        return existing(paths)
    say(f"building {' and '.join(targets)}")
    command = ["cargo", "build", "--profile=dist", "-p", TARGETS[targets[0]][0]]
    for name in targets:
        _, kind, needed = TARGETS[name]
        command += [kind, name, *(f"--features={feature}" for feature in (*needed, *features))]
    finished(*command)
    return paths


def available_memory():
    """Bytes that programs could have."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def require_memory(needed, advice="stop something, or use --quick"):
    """Ends the run where `needed` bytes of memory are not free; half of the machine's is what tmpfs gives."""
    if (free := available_memory()) < needed:
        raise Failed(f"needs {needed / GIB:.1f} GiB of free memory and has {free / GIB:.1f}: {advice}")
    if not os.path.isdir("/dev/shm"):
        raise Failed("/dev/shm is missing: mount -t tmpfs tmpfs /dev/shm")


def _busy():
    with open("/proc/stat") as lines:
        fields = [int(field) for field in next(lines).split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def warn_if_busy():
    """Says so where other programs will spoil the figures."""
    before = _busy()
    time.sleep(0.5)
    after = _busy()
    share = (after[0] - before[0]) / max(1, after[1] - before[1])
    if share > 0.08:
        say(f"warning: other programs use {share:.0%} of the CPUs; figures and ratios will be off")
