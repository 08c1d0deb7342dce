"""Where a training process finds its job: rank, model and learner, from what its launcher has put into the environment.

Three cases, in this order:

1. ``GRADFS_LEARNER`` is set (`gradfs run`): the learner is there, and its model beside it.
2. ``RANK`` and ``WORLD_SIZE`` (torchrun, `gradfs.launch`, Ray), or ``SLURM_PROCID`` and ``SLURM_NTASKS`` (srun): rank 0
   starts the job in a directory that all ranks of a host find, and each rank joins as ``rank<n>``.
3. Otherwise the process is rank 0 of 1, with a job of its own.

In the cases 2 and 3 the directory is ``GRADFS_JOB_DIR``. Whoever sets that unmounts the job, too. Without it the
directory is a temporary one, and the last rank that leaves unmounts and removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradfs.errors import GradfsError, Timeout

#: The model's directory in a job's mount.
MODEL = "model"
#: What rank 0 leaves of its process in the job's directory when it ends, as `RemoteOptimizer.save` has it.
EXTRA = "extra.pt"
#: The directory of what belongs to a checkpoint besides weights.
FILES = "files"
#: Seconds that a rank waits for the job to be started, where ``GRADFS_START_TIMEOUT`` says nothing else.
START_TIMEOUT = 600.0
#: Seconds between two looks at a file that cannot be polled.
LOOK = 0.02


@dataclass(frozen=True)
class World:
    """A process's place among those that train together."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def on_one_host(self) -> bool:
        return self.local_size == self.size


def world(environ: Mapping[str, str] = os.environ) -> World:
    """The place that a launcher has given this process. GradfsError if it is none."""
    launchers = [
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ]
    used = next((names for names in launchers if names[0] in environ and names[1] in environ), None)
    if used is None:
        return World(0, 1, 0, 1)
    rank, size, local_rank, local_size = used
    try:
        n, of = int(environ[rank]), int(environ[size])
        here = _tasks_here(environ, of) if rank == "SLURM_PROCID" else int(environ.get(local_size, of))
        place = World(n, of, int(environ.get(local_rank, n)), here)
    except (ValueError, IndexError) as error:
        raise GradfsError(f"{rank}, {size}, {local_rank} or {local_size} is no number: {error}") from None
    if not 0 <= place.rank < place.size:
        raise GradfsError(f"{rank}={n} is no rank of {size}={of}")
    if rank == "RANK" and of > 1 and local_size not in environ and not _is_here(environ.get("MASTER_ADDR", "")):
        raise GradfsError(
            f"MASTER_ADDR={environ['MASTER_ADDR']} is another host, so {size}={of} does not say how many ranks are on this "
            f"one: set {local_size} and {local_rank}"
        )
    return place


def _tasks_here(environ: Mapping[str, str], size: int) -> int:
    """The tasks of a step of Slurm on this node."""
    if int(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1"))) == 1:
        return size
    # As `4(x2),3`: of the first two nodes, and of the third.
    counts: list[int] = []
    for run in environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "")).split(","):
        count, _, times = run.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[int(environ["SLURM_NODEID"]) if "SLURM_NODEID" in environ else 0]


def _is_here(address: str) -> bool:
    """Whether an address is one of this host. So is none."""
    if address in ("", "localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    for one in found:
        # Only an address of this host can be bound to.
        with socket.socket(socket.AF_INET6 if ":" in str(one) else socket.AF_INET) as tried:
            try:
                tried.bind((str(one), 0))
                return True
            except OSError:
                pass
    return False


def barrier(number: int, environ: Mapping[str, str] = os.environ) -> None:
    """Waits until all ranks of this host have come to their barrier of this number, before the job begins.

    GradfsError if ranks are on other hosts, and Timeout after ``GRADFS_START_TIMEOUT`` seconds (600).
    """
    place = world(environ)
    if place.size == 1:
        return
    if not place.on_one_host:
        raise GradfsError("before gradfs.torch.remote, a barrier is of the ranks of one host: call remote first")
    directory, _ = _directory(place, environ)
    # Ranks that are started again come to other barriers.
    start = f"{os.getppid()}-{_began(os.getppid())}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    here = directory / f"barrier-{start}-{number}"
    here.mkdir(exist_ok=True)
    (here / str(place.rank)).touch()
    deadline = _deadline(environ)
    while len(list(here.iterdir())) < place.size:
        if time.monotonic() > deadline:
            missing = sorted(set(range(place.size)) - {int(of.name) for of in here.iterdir()})
            raise Timeout(f"ranks {', '.join(map(str, missing))} have not come to a barrier")
        time.sleep(LOOK)


def binary(environ: Mapping[str, str] = os.environ) -> str:
    """The program `gradfs`: ``GRADFS_BIN``, or that beside Python, or that on PATH. GradfsError if there is none."""
    beside = Path(sys.executable).with_name("gradfs")
    found = environ.get("GRADFS_BIN") or (str(beside) if os.access(beside, os.X_OK) else shutil.which("gradfs"))
    if not found:
        raise GradfsError(f"there is no program gradfs beside {sys.executable} or on PATH: set GRADFS_BIN to its path")
    return found


def command(*arguments: str) -> str:
    """What ``gradfs ARGUMENTS`` prints. GradfsError has what it said if it fails."""
    done = subprocess.run([binary(), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise GradfsError(f"gradfs {arguments[0]} failed: {said}")
    return done.stdout


def keep_extra(file: Path, snapshot: Path) -> None:
    """Moves the file to the snapshot, as the one of its version. One that is there stays."""
    kept = extra_of(snapshot)
    if not kept.exists():
        shutil.move(file, kept)
    for other in snapshot.glob("extra-*.pt"):
        if other != kept:
            other.unlink(missing_ok=True)


def extra_of(snapshot: Path) -> Path:
    """Where a snapshot has what a job does not know: `RemoteOptimizer.save` writes it."""
    version = int(json.loads((snapshot / "manifest.json").read_text())["version"])
    return snapshot / f"extra-{version}.pt"


@dataclass
class Attached:
    """A process's way into its job. `learner` is None until the process has joined. `gradfs run` joins for it."""

    world: World
    model: Path
    learner: Path | None
    #: The directory of the job, of which this process may be the last. None if somebody else looks after the mount.
    directory: Path | None = None
    #: The snapshot that the job went on from, if this process has said so.
    resumed: str | None = None
    _left: bool = field(default=False, repr=False)

    @property
    def name(self) -> str:
        """What the learner is called."""
        return self.learner.name if self.learner else f"rank{self.world.rank}"

    def leave(self) -> None:
        """Ends the job on this host if this process is its last. To be called when the learner has left."""
        if self._left or self.directory is None:
            return
        self._left = True
        with contextlib.suppress(FileNotFoundError), _locked(self.directory):
            gone = self.directory / "left"
            gone.mkdir(exist_ok=True)
            (gone / str(self.world.rank)).touch()
            everybody = len(list(gone.iterdir())) >= self.world.local_size
            if everybody or (_learners(self.model) == [] and _version(self.model) > 0):
                unmount(self.model.parent)
                shutil.rmtree(self.directory, ignore_errors=True)


def attach(
    first_file: Callable[[Path], object] | None,
    settings: Mapping[str, str],
    resume: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Attached:
    """Finds the job of this process, or starts it.

    `first_file` writes the first safetensors file to a path. It is called by rank 0 alone, and not with `resume`, the
    directory of a snapshot. `settings` become options of `gradfs up`, except that a resumed job has the snapshot's.
    Timeout if nobody has started the job within ``GRADFS_START_TIMEOUT`` seconds (600).
    """
    place = world(environ)
    if "GRADFS_LEARNER" in environ:
        learner = Path(environ["GRADFS_LEARNER"])
        if resume:
            raise GradfsError("the job runs already: give the snapshot to `gradfs up --from`")
        return Attached(place, learner.parent.parent, learner)
    registry = environ.get("GRADFS_REGISTRY")
    if not place.on_one_host and not registry:
        raise GradfsError(
            f"{place.local_size} of {place.size} processes are on this host: set GRADFS_REGISTRY to the registry of "
            "shards that all hosts reach (gradfs shard starts one)"
        )
    directory, key = _directory(place, environ)
    mount = directory / "mount"
    attached = Attached(place, mount / MODEL, None, None if "GRADFS_JOB_DIR" in environ else directory, resume)
    if registry and not place.on_one_host:
        attached.model = mount / key
        if place.rank == 0:
            _start(directory, attached.model, first_file, settings, resume, place, key)
        if place.local_rank == 0:
            _mount(mount, key, environ)
    elif place.rank == 0:
        _start(directory, attached.model, first_file, settings, resume, place, None)
    _wait(attached, environ)
    return attached


def unmount(mount: Path) -> None:
    """Ends the daemon of a mount. A mount that is gone is no error."""
    if os.path.ismount(mount) or _is_dead(mount):
        command("unmount", str(mount))


def clear(directory: Path) -> None:
    """Unmounts what a run that was killed has left in a job's directory. GradfsError if its job goes on."""
    mount = directory / "mount"
    if _runs(mount / MODEL) and not _is_stale(directory, mount / MODEL):
        raise GradfsError(f"a job runs in {directory}: take another directory")
    unmount(mount)
    (directory / EXTRA).unlink(missing_ok=True)


def _directory(place: World, environ: Mapping[str, str]) -> tuple[Path, str]:
    """The job's directory on this host, and a name for the job on all hosts."""
    if "SLURM_JOB_ID" in environ and "RANK" not in environ:
        key = f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_STEP_ID', '0')}"
    elif "MASTER_PORT" in environ:
        address = environ.get("MASTER_ADDR", "127.0.0.1").replace(":", "-").replace("/", "-")
        key = f"{address}-{environ['MASTER_PORT']}"
    elif place.size == 1:
        key = f"{socket.gethostname()}-{os.getpid()}"
    elif "GRADFS_JOB_DIR" in environ:
        key = Path(environ["GRADFS_JOB_DIR"]).name
    else:
        raise GradfsError("ranks cannot find each other: set MASTER_PORT, or GRADFS_JOB_DIR to a directory")
    if "GRADFS_JOB_DIR" in environ:
        directory = Path(environ["GRADFS_JOB_DIR"])
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory, key
    parent = Path(tempfile.gettempdir()) / f"gradfs-{os.getuid()}"
    for path in (parent, parent / key):
        path.mkdir(mode=0o700, exist_ok=True)
        seen = path.lstat()
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
            raise GradfsError(f"{path} is not a directory of this user alone")
    return parent / key, key


def _start(
    directory: Path,
    model: Path,
    first_file: Callable[[Path], object] | None,
    settings: Mapping[str, str],
    resume: str | None,
    place: World,
    shared: str | None,
) -> None:
    """Starts the job unless it runs. `shared` is its name on shards, and None for a job in one process."""
    with _locked(directory):
        if _runs(model) and not _is_stale(directory, model):
            return
        unmount(model.parent)
        for old in ("left", FILES):
            shutil.rmtree(directory / old, ignore_errors=True)
        model.parent.mkdir(exist_ok=True)
        file = directory / f"{MODEL}.safetensors"
        if not resume:
            if first_file is None:
                raise GradfsError(f"no job runs in {directory}")
            first_file(file)
        options = (
            []
            if resume
            else [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if name != "tensors"]
        )
        options += [f"--learners={place.size}"]
        if not resume:
            options += [f"--tensors={rule}" for rule in settings.get("tensors", "").splitlines()]
        starter = {"process": os.getppid(), "began": _began(os.getppid())}
        (directory / "starter.json").write_text(json.dumps(starter))
        source = ["--from", resume] if resume else []
        if shared:
            command("create", shared, *source, *([] if resume else ["--model", str(file)]), *options)
        else:
            names = [] if resume else [str(file)]
            named = ["--name", MODEL]
            log = ["--background", "--log-file", str(directory / "gradfs.log")]
            command("up", *log, *_with_files(directory), *source, *options, *named, *names, str(model.parent))


def _with_files(directory: Path) -> list[str]:
    files = directory / FILES
    return ["--with-files", str(files)] if files.is_dir() else []


def _mount(mount: Path, name: str, environ: Mapping[str, str]) -> None:
    """Mounts a model of the registry, once rank 0 has created it."""
    deadline = _deadline(environ)
    mount.mkdir(exist_ok=True)
    if _runs(mount / name):
        return
    while True:
        try:
            command("mount", "--background", *_with_files(mount.parent), str(mount), name)
            return
        except GradfsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(10 * LOOK)


def _wait(attached: Attached, environ: Mapping[str, str]) -> None:
    deadline = _deadline(environ)
    directory = attached.model.parent.parent
    while not _runs(attached.model) or (attached.directory is not None and _is_stale(directory, attached.model)):
        if time.monotonic() > deadline:
            raise Timeout(f"rank 0 has started no job in {directory}: see what it printed, and {directory}/gradfs.log")
        time.sleep(LOOK)


def _deadline(environ: Mapping[str, str]) -> float:
    return time.monotonic() + float(environ.get("GRADFS_START_TIMEOUT", START_TIMEOUT))


def _runs(model: Path) -> bool:
    try:
        return (model / "version").is_file()
    except OSError:
        return False


def _is_dead(mount: Path) -> bool:
    try:
        mount.lstat()
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


def _is_stale(directory: Path, model: Path) -> bool:
    """Whether the job belongs to a run that has ended: its starter is gone, and so are all of its learners."""
    try:
        starter = json.loads((directory / "starter.json").read_text())
    except (OSError, ValueError):
        return False
    return _began(starter["process"]) != starter["began"] and not _learners(model)


def _began(process: int) -> str | None:
    """The start of a process, in clock ticks since boot. None if there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _learners(model: Path) -> list[str]:
    try:
        return sorted(os.listdir(model / "learners"))
    except OSError:
        return []


def _version(model: Path) -> int:
    try:
        return int((model / "version").read_text())
    except (OSError, ValueError):
        return 0


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """The lock of a job's directory: one rank at a time starts or ends the job."""
    with open(directory / "lock", "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
