"""Fixtures for all tests that need a mount: they start the built gradfs and clean up after it.

    def test_something(start_mount):
        mount = start_mount("--block-size", "64KiB", size="1MiB", reducer="sum")
        mount.contribute(b"\\0\\0\\x80\\x3f")
        assert mount.weights()[:4] == b"\\0\\0\\x80\\x3f"

With --network N, start_mount starts N shards on this host, makes the models there, and mounts those: what mounts
promise, they promise over a network, too. GRADFS_TESTS_TRANSPORT=tcp keeps them off shared memory. Tests that are
marked `also_on_network` run both ways anyway.

The binary is $GRADFS_BIN, or target/release/gradfs, or target/debug/gradfs. Only the standard library and
pytest are used here.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pytest
from patience import HANGS, Limit
from ports import free_address

REPOSITORY = Path(__file__).resolve().parent.parent

# A daemon that outlives this is killed, so that a test that waits for it fails instead of hanging.
LIFETIME = 2 * HANGS
# To load a model and mount, and to unmount.
START_DEADLINE = STOP_DEADLINE = HANGS

# What follows ends when this process does. A function before exec would do the same, and have Python fork: that takes
# several times as long.
ENDS_WITH_US = ["setpriv", "--pdeathsig", "TERM", "--"]


def begin(command, **options):
    """Starts a daemon that ends with us, and after LIFETIME at the latest."""
    process = subprocess.Popen([*ENDS_WITH_US, *command], stdin=subprocess.DEVNULL, **options)
    alive = weakref.ref(process)
    timer = threading.Timer(LIFETIME, lambda: (it := alive()) and it.kill())
    timer.daemon = True
    timer.start()
    weakref.finalize(process, timer.cancel)
    return process


# A signal that is ignored stays so in every program that the tests start, and gradfs honours it (nohup ignores
# SIGHUP, a shell's & SIGINT). A handler is not inherited: with one that does nothing, the tests ignore the signal
# as they were told, and what they start gets it.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


def gradfs_binary():
    """The built binary; fails the test with what to do where there is none."""
    named = os.environ.get("GRADFS_BIN")
    candidates = [Path(named)] if named else [REPOSITORY / f"target/{p}/gradfs" for p in ("release", "debug")]
    for path in candidates:
        if os.access(path, os.X_OK):
            return path.resolve()
    pytest.fail(f"{candidates[0]} is not there: build it with `cargo build --release`", pytrace=False)


def ran(command, **options):
    """A command that was run to its end: a subprocess.CompletedProcess with texts."""
    options = {"stdin": None if "input" in options else subprocess.DEVNULL, "capture_output": True, "text": True, **options}
    return subprocess.run([*map(str, command)], **{"timeout": HANGS, "check": False, **options})


def all_of(ends):
    """Calls all of these, and raises what the first of those that fail has raised."""
    troubles = []
    for end in ends:
        try:
            end()
        except BaseException as trouble:  # Also pytest.fail; the others must end all the same.
            troubles.append(trouble)
    if troubles:
        raise troubles[0]


def flags(options):
    """name=["a", "b"] is --name a --name b, allow_other=True is --allow-other."""
    words = []
    for option, value in options.items():
        flag = "--" + option.replace("_", "-")
        for one in value if isinstance(value, (list, tuple)) else [value]:
            words += [flag] if one is True else [] if one is False or one is None else [flag, str(one)]
    return words


def write_all(path, data, offset=0, flags=os.O_WRONLY):
    """One open, all of `data` written at `offset`, one close; errors of each come as OSError."""
    fd = os.open(path, flags)
    try:
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(fd)


def pause(pid, deadline=HANGS):
    """SIGSTOP, and waits until every thread of the process has stopped: the signal alone takes its time, in which
    threads may come and go."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + deadline

    def runs(task):
        try:
            return "\nState:\tT" not in (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True  # It has ended since: whether another one has begun is to be looked at again.

    while any([runs(task) for task in Path(f"/proc/{pid}/task").iterdir()]):
        assert time.monotonic() < end, "the process did not stop"
        time.sleep(0.002)


class MountFailed(Exception):
    """gradfs did not mount; the message holds what it said."""


class Daemon:
    """A process of gradfs with its outputs in files; `process` is a subprocess.Popen, and pid its process id."""

    def _begin(self, command, **options):
        with open(self._scratch / "stdout", "wb") as out, open(self._scratch / "stderr", "wb") as err:
            self.process = begin(command, stdout=out, stderr=err, **options)

    @property
    def pid(self):
        return self.process.pid

    def stdout(self):
        """What the daemon has written to its standard output so far."""
        return (self._scratch / "stdout").read_text(errors="replace")

    def stderr(self):
        """What the daemon has written to its standard error so far."""
        return (self._scratch / "stderr").read_text(errors="replace")

    def running(self):
        return self.process.poll() is None


class Mount(Daemon):
    """A running `gradfs up`, mounted on a directory of its own.

    root     the mountpoint
    model    directory of the (first) model
    models   directories of all models
    """

    def __init__(self, *args, size=None, model=None, root=None, env=None, **options):
        """Starts `gradfs up ARGS --OPTION VALUE... MODEL... ROOT` and waits until it is mounted.

        size     makes a blank model: "1MiB"
        model    path of a safetensors file, or a list of them
        options  become flags: learning_rate=0.1 is --learning-rate 0.1, allow_other=True is --allow-other,
                 name=["a", "b"] is --name a --name b
        """
        self._scratch = Path(tempfile.mkdtemp(prefix="gradfs-test-"))
        self.root = Path(root) if root else self._scratch / "mnt"
        if root is None:
            self.root.mkdir()
        self.command, names = self._command(args, size=size, model=model, **options)
        self.models = [self.root / name for name in names]
        self.model = self.models[0]

        self._begin(self.command, env={**os.environ, **{name: str(value) for name, value in (env or {}).items()}})
        try:
            self._wait_until_mounted()
        except BaseException:
            self.kill()
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise

    def _command(self, args, size, model, **options):
        """What to start, and the names of the models that it shows."""
        files = [Path(path) for path in (model if isinstance(model, (list, tuple)) else [model] if model else [])]
        words = [str(gradfs_binary()), "up", *map(str, args)]
        if size is not None:
            words += ["--size", str(size)]
        words += flags(options)
        given = [words[i + 1] for i, word in enumerate(words) if word == "--name"]
        given += [word.split("=", 1)[1] for word in words if word.startswith("--name=")]
        names = given or [path.stem for path in files] or ["model"]
        return [*words, *map(str, files), str(self.root)], names

    def _wait_until_mounted(self):
        deadline = time.monotonic() + START_DEADLINE
        # It says that it is ready last of all, so whatever else it has to say is there then.
        while not (": ready" in self.stdout() and os.path.ismount(self.root) and all(path.is_dir() for path in self.models)):
            if self.process.poll() is not None:
                raise MountFailed(self._story(f"gradfs ended with {self.process.returncode}"))
            if time.monotonic() > deadline:
                raise MountFailed(self._story(f"gradfs did not mount within {START_DEADLINE} s"))
            time.sleep(0.01)

    def _story(self, headline):
        return f"{headline}\n$ {' '.join(self.command)}\n{self.stdout()}{self.stderr()}"

    def stop(self, with_signal=signal.SIGINT):
        """Asks the daemon to end; returns its exit status. Fails if it does not end, or stays mounted."""
        if self.running():
            self.process.send_signal(with_signal)
            try:
                self.process.wait(STOP_DEADLINE)
            except subprocess.TimeoutExpired:
                self.kill()
                pytest.fail(self._story(f"gradfs did not end within {STOP_DEADLINE} s"), pytrace=False)
        if os.path.ismount(self.root):
            self._detach()
            pytest.fail(self._story("gradfs ended, but its mount is still there"), pytrace=False)
        return self.process.returncode

    def kill(self):
        """SIGKILL: the daemon gets no chance to unmount. Detaches the dead mount."""
        if self.running():
            self.process.kill()
        self.process.wait()
        self._detach()

    def _detach(self):
        for command in (["fusermount3", "-uz"], ["umount", "-l"]):
            if shutil.which(command[0]):
                done = subprocess.run([*command, str(self.root)], stderr=subprocess.DEVNULL, check=False)
                if done.returncode == 0:
                    return

    def clean_up(self):
        """The end of a test: an orderly stop if it still runs, and nothing left behind."""
        try:
            if self.running():
                status = self.stop()
                assert status == 0, self._story(f"gradfs ended with {status}")
        finally:
            if self.running():
                self.kill()
            else:
                self._detach()
            shutil.rmtree(self._scratch, ignore_errors=True)

    # What tests do with a model. `learner` is the id of a learner that has joined; None is the mount's own.

    def place(self, learner=None):
        """The directory that holds `weights` and `gradients`."""
        return self.model if learner is None else self.model / "learners" / str(learner)

    def join(self, *learners):
        """Learners join; returns the directory of the one, or those of all."""
        places = [self.place(learner) for learner in learners]
        for place in places:
            place.mkdir()
        return places[0] if len(places) == 1 else places

    def leave(self, learner):
        self.place(learner).rmdir()

    def weights(self, learner=None):
        """All bytes of the newest version."""
        return (self.place(learner) / "weights").read_bytes()

    def contribute(self, data, offset=0, learner=None):
        """One contribution with `data` at `offset`, ended by close; errors come as OSError."""
        write_all(self.place(learner) / "gradients", data, offset)

    def own(self):
        """The name of the mount's own learner."""
        return "mount"

    def catch_up(self):
        """Waits until the mount shows the newest version. In one process it always does; over a network it shows what
        others have published when it has pulled it, and its own learners' when they open `weights`."""

    def version(self):
        return int((self.model / "version").read_text())

    def wait_for_version(self, version, deadline=HANGS):
        """Waits until `version` or a later one is there; returns it."""
        limit = Limit(deadline)
        while (now := self.version()) < version:
            if limit.over():
                pytest.fail(f"version {version} did not come within {deadline} s; it is {now}\n{self.stderr()}")
            time.sleep(0.002)
        return now

    def control(self, setting, value=None):
        """Reads a setting, or writes it first."""
        path = self.model / "control" / setting
        if value is not None:
            fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
            try:
                os.write(fd, f"{value}\n".encode())
            finally:
                os.close(fd)
        return path.read_text().strip()

    def status(self):
        return json.loads((self.model / "status.json").read_text())


# Shards of the mounts in tests that are marked `also_on_network`, where --network does not say.
SHARDS = 2


def pytest_addoption(parser):
    parser.addoption(
        "--network", type=int, metavar="N", default=os.environ.get("GRADFS_TESTS_NETWORK"),
        help="mounts that tests start have their models on N shards on a network (or GRADFS_TESTS_NETWORK)",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "also_on_network: runs a second time with its models on shards on a network")
    config.addinivalue_line("markers", "one_process: of `gradfs up` alone; left out with --network")
    config.addinivalue_line("markers", "rdma_vm: in virtual machines that have RDMA (rdmavm.py), slow")
    config.addinivalue_line("markers", "rdma_vm_few: of those, what scripts/test runs without --all-rdma-vm")


def marked(item, name):
    return item.get_closest_marker(name) is not None


def repeats(item):
    """Whether it reads through the daemon over a network: tests do so without the one or the other."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return given.get("shards") and {"no_passthrough", "through the daemon"} & {str(value) for value in given.values()}


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--network"):
        items[:] = [item for item in items if not repeats(item)]
    if config.getoption("--network"):
        left_out = [item for item in items if marked(item, "one_process")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    # Those in virtual machines have their time together; the longest first, so that workers end at once.
    items.sort(key=lambda item: -max((mark.kwargs.get("seconds", 1) for mark in item.iter_markers("rdma_vm")), default=0))


def pytest_generate_tests(metafunc):
    if "shards" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--network")
        if asked:
            metafunc.parametrize("shards", [asked], indirect=True, ids=["network"])
        elif marked(metafunc.definition, "also_on_network") and not marked(metafunc.definition, "one_process"):
            metafunc.parametrize("shards", [0, SHARDS], indirect=True, ids=["here", "network"])


@pytest.fixture
def shards(request):
    """How many shards on a network hold the models of mounts; 0: the mount's own process."""
    return getattr(request, "param", 0)


@pytest.fixture
def start_mount(shards):
    """Call it as Mount(...); all mounts end with the test."""
    mounts = []

    def start(*args, **options):
        if shards:
            from cluster import mounted_over_network

            mount = mounted_over_network(shards, *args, **options)
            # Ended last of all.
            mounts.insert(0, mount.cluster)
        else:
            mount = Mount(*args, **options)
            mounts.append(mount)
        return mount

    yield start
    all_of(mount.clean_up for mount in reversed(mounts))


@pytest.fixture
def cluster():
    """Call it with a number of shards, and with the settings of a model `m`, if there is to be one; all that is started there
    ends with the test."""
    from cluster import Cluster

    clusters = []

    def start(shards=1, /, **settings):
        clusters.append(Cluster(shards))
        if settings:
            clusters[-1].create(**settings)
        return clusters[-1]

    yield start
    all_of(one.clean_up for one in clusters)


@pytest.fixture
def gradfs():
    """Runs the binary with arguments to its end; returns a subprocess.CompletedProcess with texts."""

    return lambda *args, env=None, **options: ran([gradfs_binary(), *args], env={**os.environ, **(env or {})}, **options)


@pytest.fixture
def address():
    """One that is free on this host."""
    return free_address()


@pytest.fixture
def mnt(tmp_path):
    """An empty directory, to mount on."""
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"


@pytest.fixture(params=["passthrough", "no_passthrough"])
def way(request):
    """Whether mappings and reads bypass the daemon."""
    return {"no_passthrough": request.param == "no_passthrough"}
