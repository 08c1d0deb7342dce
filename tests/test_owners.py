"""Whose the files are: a daemon of root's that serves other users' jobs."""

import errno
import os
import subprocess
import sys

import pytest
from daemons import place_for_all  # noqa: F401
from filetools import Threads, array, eventually, f32, fails

NOBODY, OTHER = 65534, 65533

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root serves the jobs of other users")


def as_user(code, *args, user=NOBODY, group=NOBODY, groups=()):
    """Runs Python code as somebody else. Its exit status is 0, an errno, or minus the signal that killed it."""
    body = "".join(f"    {line}\n" for line in code.splitlines())
    program = f"import os, signal, sys\npath = sys.argv[1]\ntry:\n{body}except OSError as error:\n    sys.exit(error.errno)\n"
    command = [sys.executable, "-c", program, *map(str, args)]
    return subprocess.run(
        command, user=user, group=group, extra_groups=list(groups), cwd="/", timeout=300, check=False
    ).returncode


@pytest.fixture
def mounted(place_for_all, start_mount):  # noqa: F811
    def start(**options):
        root = place_for_all / "mnt"
        root.mkdir()
        return start_mount(root=root, **{"size": 8192, "reducer": "sum", "allow_other": True, "timeout": 20, **options})

    return start


TRAIN = """\
os.mkdir(path + "/learners/" + sys.argv[2])
place = path + "/learners/" + sys.argv[2]
with os.fdopen(os.open(place + "/gradients", os.O_WRONLY), "wb", buffering=0) as file:
    file.write(bytes.fromhex("0000803f"))
assert open(place + "/weights", "rb").read(4) == bytes.fromhex("0000803f")
assert open(place + "/error").read() == ""
"""


def test_users_train_through_the_daemon_of_root(mounted):
    mount = mounted(umask="022")
    assert as_user(TRAIN, mount.model, "x") == errno.EACCES, "a mask that lets only the owner make learners"
    assert as_user("os.open(path + '/gradients', os.O_WRONLY)", mount.model) == errno.EACCES
    assert as_user("os.open(path + '/weights', os.O_RDONLY)", mount.model) == 0


def test_learners_belong_to_whoever_made_them(mounted):
    mount = mounted(umask="0002", gid=OTHER)
    # Of the group that may make learners.
    assert as_user(TRAIN, mount.model, "one", groups=[OTHER]) == 0
    place = mount.place("one")
    for path in (place, *place.iterdir()):
        assert (path.lstat().st_uid, path.lstat().st_gid) == (NOBODY, NOBODY), path
    assert (mount.model.stat().st_uid, mount.model.stat().st_gid) == (0, OTHER)
    write = "os.open(path + '/learners/one/gradients', os.O_WRONLY)"
    assert as_user(write, mount.model, user=OTHER, group=OTHER) == errno.EACCES
    assert as_user("os.rmdir(path + '/learners/one')", mount.model, user=OTHER, group=OTHER) == errno.EPERM
    assert as_user("os.rmdir(path + '/learners/one')", mount.model, groups=[OTHER]) == 0
    assert not place.exists()
    fails(errno.EPERM, os.chown, mount.model / "weights", NOBODY, NOBODY)


def test_a_killed_program_of_another_user_leaves_no_half_step(mounted):
    mount = mounted(umask="0")
    dies = TRAIN + """\
fd = os.open(place + "/gradients", os.O_WRONLY)
os.pwrite(fd, bytes.fromhex("0000803f") * 2048, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert as_user(dies, mount.model, "dies") == -9
    eventually(lambda: not mount.place("dies").exists())
    mount.contribute(f32(1))
    assert mount.version() == 2
    assert mount.weights()[:8] == f32(2, 0).tobytes()


def test_files_belong_to_the_user_that_the_mount_names(mounted):
    mount = mounted(uid="nobody", gid=OTHER)
    stat = (mount.model / "gradients").stat()
    assert (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777) == (NOBODY, OTHER, 0o600)
    assert (mount.model / "learners").stat().st_mode & 0o7777 == 0o755
    assert as_user(TRAIN, mount.model, "x") == 0
    assert as_user(TRAIN, mount.model, "y", user=OTHER, group=OTHER) == errno.EACCES


HOLD = """\
import os, sys
path, held = sys.argv[1], {}
while True:
    try:
        fd = os.open(path.format(version=open(sys.argv[2]).read().strip()), os.O_RDONLY)
    except FileNotFoundError:
        continue  # That version has gone since.
    except OSError as error:
        print(error.errno, len(held), flush=True)
        break
    version = os.getxattr(fd, "user.gradfs.version")
    if version in held:
        os.close(fd)
    else:
        held[version] = fd
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["weights", "weights.safetensors", "tensors/weights.npy", "versions/{version}/weights", "learners/a/weights"])
def test_whoever_only_reads_stops_no_training(mounted, name):
    """A user who may only read keeps each version open, until no more are allowed."""
    mount = mounted(max_versions=4, timeout=20)
    mount.join("a")
    path, number = mount.model / name, mount.model / "version"
    command = [sys.executable, "-c", HOLD, path, number]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", text=True, **pipes) as reader:
        try:
            told, steps = Threads().start(reader.stdout.readline), 0
            while not told.done() or steps < 40:
                steps += 1
                mount.contribute(f32(1), learner="a")
                assert array(mount.place("a") / "weights")[0] == steps
            assert told.result().split() == [str(errno.ENOMEM), "4"]
            for step in range(steps, steps + 40):
                mount.contribute(f32(1), learner="a")
                assert array(mount.place("a") / "weights")[0] == step + 1
        finally:
            reader.kill()
    assert as_user("os.open(path, os.O_RDONLY)", mount.model / "weights") == 0, "they are closed"


LOOK = """\
import ctypes, os, sys
path, flags, held = sys.argv[1], int(sys.argv[2]), []
libc = ctypes.CDLL(None)
watches = libc.inotify_init()
for version in sys.stdin:
    name = path.format(version=version.strip())
    held.append(os.open(name, flags) if flags >= 0 else libc.inotify_add_watch(watches, name.encode(), 2))
    print(held[-1] >= 0, flush=True)
try:
    if flags >= 0:
        os.open("weights.npy" if "tensors" in path else f"/proc/self/fd/{held[0]}", os.O_RDONLY, dir_fd=held[0])
except OSError as error:
    print(error.errno)
"""


@pytest.mark.parametrize(
    "name, flags",
    [("tensors", os.O_RDONLY), ("tensors", os.O_PATH), ("versions/{version}", os.O_RDONLY), ("weights", os.O_PATH), ("weights", -1)],
    ids=["directory", "directory-path", "directory-of-a-version", "path", "watch"],
)
def test_whoever_only_reads_stops_no_training__by_names_and_directories(mounted, name, flags):
    """A user who may only read keeps what is no open file of each version. With flags of -1 that is a watch."""
    mount = mounted(max_versions=3, timeout=20)
    mount.join("a")
    command = [sys.executable, "-c", LOOK, mount.model / name, str(flags)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", text=True, **pipes) as reader:
        for step in range(1, 20):
            mount.contribute(f32(1), learner="a")
            assert array(mount.place("a") / "weights")[0] == step
            print(mount.version(), file=reader.stdin, flush=True)
            assert reader.stdout.readline() == "True\n"
        rest = reader.communicate(timeout=60)[0].split()
    # A directory of a version can be opened for as long as the kernel knows it: it holds no bytes.
    assert rest == ([str(errno.ESTALE)] if name != "versions/{version}" and flags >= 0 else [])


def test_a_user_has_half_of_the_learners(mounted):
    """Users who are not the owner leave places to others, unless the job waits for more learners of theirs."""
    mount = mounted(umask="000", max_learners=6)
    makes = "for one in range(int(sys.argv[2])): os.mkdir(path + '/learners/' + sys.argv[3] + str(one))"
    assert as_user(makes, mount.model, 3, "a") == 0
    assert as_user(makes, mount.model, 1, "b") == errno.EDQUOT
    assert as_user(makes, mount.model, 2, "c", user=OTHER) == 0
    mount.control("learners", 4)
    assert as_user(makes, mount.model, 1, "d") == 0
    fails(errno.EDQUOT, mount.join, "of-the-owner-and-one-too-many")
    assert os.stat(mount.place("a0")).st_uid == NOBODY
