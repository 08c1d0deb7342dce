"""What the benchmarks need of the machine: packages, built binaries, memory, and quiet."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

GIB = 1 << 30
MIB = 1 << 20

# What is imported or run, and the Debian package that has it.
PACKAGES = {
    "fio": "fio",
    "numpy": "python3-numpy",
    "sklearn": "python3-sklearn",
    "torch": "python3-torch",
    "matplotlib": "python3-matplotlib",
    "nbdkit": "nbdkit",
    "nbdcopy": "libnbd-bin",
    "nbd": "python3-libnbd",
    "redis-server": "redis-server",
}
# Those of them that are run.
PROGRAMS = ("fio", "nbdkit", "nbdcopy", "redis-server")

# What fs-daemon has for benchmarks besides its binary.
EXAMPLES = ("bench_sink", "bench_learner")


class Failed(Exception):
    """Something that ends the run, in words for the one who started it."""


_started = time.monotonic()


def say(text):
    """A line of progress."""
    print(f"{time.monotonic() - _started:5.0f} s  {text}", file=sys.stderr, flush=True)


def _interrupted(*_):
    # Once is enough: cleaning up has deadlines, and is not to be cut short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(script, run):
    """Calls `run`, whose every cleanup happens however it ends; gives the exit status."""
    signal.signal(signal.SIGINT, _interrupted)
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        run()
    except Failed as error:
        print(f"{script}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{script}: interrupted", file=sys.stderr)
        return 130
    return 0


def present(name):
    """Whether a program or a Python module is installed, without the cost of importing it."""
    if name in PROGRAMS:
        return shutil.which(name) is not None
    from importlib.util import find_spec

    return find_spec(name) is not None


def require(names):
    """Installs what is missing of `names`, or ends the run with the line to type."""
    missing = [PACKAGES[name] for name in names if not present(name)]
    if not missing:
        return
    say(f"installing {', '.join(missing)}")
    command = [ROOT / "scripts" / "setup", *(f"package:{name}" for name in missing)]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=1800).returncode:
        raise Failed(f"needs {', '.join(missing)}: apt-get install {' '.join(missing)}")


def require_fuse():
    """Ends the run where nothing can be mounted."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Failed("/dev/fuse is missing or not permitted: load the fuse module (modprobe fuse), or run as root")


def dist_directory():
    """Where cargo puts binaries as packages have them."""
    return ROOT / (os.environ.get("CARGO_TARGET_DIR") or "target") / "dist"


def build(*targets, only_look=False, features=()):
    """Builds fs-daemon's `gradfs` and examples as for packages, or takes those there are. Gives their paths."""
    flags = {"gradfs": ["--bin", "gradfs"], **{name: ["--example", name] for name in EXAMPLES}}
    where = {"gradfs": "gradfs", **{name: f"examples/{name}" for name in EXAMPLES}}
    dist = dist_directory()
    paths = [dist / where[target] for target in targets]
    if only_look:
        if missing := [str(path) for path in paths if not path.exists()]:
            raise Failed(f"not built: {', '.join(missing)}")
        return paths
    command = ["cargo", "build", "--profile=dist", "-p", "fs-daemon", *(f"--features={name}" for name in features)]
    for target in targets:
        command += flags[target]
    say(f"building {' and '.join(targets)}")
    try:
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=3600)
    except FileNotFoundError as error:
        raise Failed("cargo is not on the PATH: install Rust from https://rustup.rs") from error
    if done.returncode:
        raise Failed(f"{' '.join(command)} failed")
    return paths


def require_memory(needed, where="/dev/shm"):
    """Ends the run where `needed` bytes of memory are not free; half of the machine's is what tmpfs gives."""
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    if free < needed:
        raise Failed(
            f"needs {needed / GIB:.1f} GiB of free memory and has {free / GIB:.1f}: stop something, or use --quick"
        )
    if not os.path.isdir(where):
        raise Failed(f"{where} is missing: mount -t tmpfs tmpfs {where}")


def _busy():
    with open("/proc/stat") as lines:
        fields = [int(field) for field in next(lines).split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def busy_share(seconds):
    """The share of all CPUs' time that is spent on anything, over the next `seconds`."""
    before = _busy()
    time.sleep(seconds)
    after = _busy()
    return (after[0] - before[0]) / max(1, after[1] - before[1])


class Quiet:
    """Waits for other programs to leave the CPUs alone before each measurement."""

    LIMIT = 0.08

    def __init__(self, patience):
        self.patience = patience
        self.warned = False
        if patience == 0 and (share := busy_share(0.5)) > self.LIMIT:
            self.warn(share)

    def warn(self, share):
        """Says once that the figures will suffer."""
        if not self.warned:
            say(f"warning: other programs use {share:.0%} of the CPUs; figures and ratios will be off")
        self.warned = True

    def wait(self):
        """Returns when the machine is quiet, or patience is at its end."""
        if self.patience == 0:
            return
        give_up = time.monotonic() + self.patience
        while (share := busy_share(0.2)) > self.LIMIT:
            if time.monotonic() > give_up:
                self.warn(share)
                return
