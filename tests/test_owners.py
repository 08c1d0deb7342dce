"""Whose the files are: a daemon of root's that serves other users' jobs."""

import errno
import os
import subprocess
import sys

import pytest
from daemons import place_for_all  # noqa: F401
from filetools import eventually, f32, raises

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
        assert (path.stat().st_uid, path.stat().st_gid) == (NOBODY, NOBODY), path
    assert (mount.model.stat().st_uid, mount.model.stat().st_gid) == (0, OTHER)
    write = "os.open(path + '/learners/one/gradients', os.O_WRONLY)"
    assert as_user(write, mount.model, user=OTHER, group=OTHER) == errno.EACCES
    assert as_user("os.rmdir(path + '/learners/one')", mount.model, user=OTHER, group=OTHER) == errno.EPERM
    assert as_user("os.rmdir(path + '/learners/one')", mount.model, groups=[OTHER]) == 0
    assert not place.exists()
    with raises(errno.EPERM):
        os.chown(mount.model / "weights", NOBODY, NOBODY)


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
