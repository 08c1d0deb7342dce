"""The daemon without root: mounted by fusermount3, read through the daemon, with the same semantics."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from conftest import gradfs_binary, ran
from daemons import NOBODY, ONE, in_namespace, is_mounted, place_for_all
from filetools import eventually
from patience import HANGS


if os.geteuid() != 0:
    pytest.skip("only root can start the daemon as somebody else", allow_module_level=True)
if not shutil.which("fusermount3"):
    pytest.skip("fusermount3 is not installed (Debian: apt-get install fuse3)", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def device_for_all():
    """/dev/fuse as most systems have it, until the last worker is done with these tests."""
    device = Path("/dev/fuse")
    if not device.exists():
        pytest.skip("there is no /dev/fuse")
    # Workers share the lock while they need the device. The first one notes its mode, and the last one restores that.
    with open(Path(tempfile.gettempdir()) / "gradfs-test-fuse-mode", "a+") as note:

        def noted():
            note.seek(0)
            return note.read()

        fcntl.flock(note, fcntl.LOCK_SH)
        while not (noted() and mode_of(device) == 0o666):
            fcntl.flock(note, fcntl.LOCK_EX)
            if not noted():
                note.write(str(mode_of(device)))
                note.flush()
            device.chmod(0o666)
            fcntl.flock(note, fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(note, fcntl.LOCK_UN)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if mode := noted():
                    device.chmod(int(mode))
                    note.truncate(0)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def as_nobody(code, *args, timeout=HANGS):
    """Runs Python code as the daemon's own user; returns what it printed, as JSON."""
    prelude = "import errno, json, mmap, os, struct, sys, time\nONE = struct.pack('<f', 1.0)\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + code, *map(str, args)],
        capture_output=True, text=True, timeout=timeout, check=False, **NOBODYS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else None


NOBODYS = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}


class Unprivileged:
    """`gradfs up` as nobody."""

    def __init__(self, place, *options, name="mnt"):
        self.place, self.root = place, place / name
        if not is_mounted(self.root):
            self.root.mkdir(exist_ok=True)
            os.chown(self.root, NOBODY, NOBODY)
        self.model, binary = self.root / "model", place / "gradfs"
        if not binary.exists():
            shutil.copy(gradfs_binary(), binary)
            binary.chmod(0o755)
        self.out, self.err = (Path(tempfile.mkstemp(dir=place)[1]) for _ in range(2))
        command = [binary, "up", "--size", "256KiB", "--block-size", "64KiB", "--reducer", "sum", *options, self.root]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            environment = {"PATH": os.environ["PATH"]}
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, **NOBODYS)
        eventually(lambda: "ready" in self.out.read_text() or self.process.poll() is not None)
        if self.process.poll() is not None:
            self.end()
            pytest.fail(f"gradfs did not mount as nobody: {self.out.read_text()}{self.err.read_text()}", pytrace=False)

    def end(self):
        self.process.kill()
        self.process.wait()
        while is_mounted(self.root):
            subprocess.run(["umount", "-l", self.root], check=True)


@pytest.fixture
def nobodys():
    place = Path(tempfile.mkdtemp(prefix="gradfs-test-"))
    place.chmod(0o755)
    mounts = []

    def start(*options, **more):
        mounts.append(Unprivileged(place, *options, **more))
        return mounts[-1]

    yield start
    for mount in mounts:
        mount.end()
    shutil.rmtree(place)


def test_one_clear_line_says_that_reads_go_through_the_daemon(nobodys):
    mount = nobodys()
    lines = mount.err.read_text().splitlines()
    assert len(lines) == 1, lines
    assert "CAP_SYS_ADMIN" in lines[0] and "through the daemon" in lines[0] and "root" in lines[0], lines[0]
    assert "reads go through the daemon" in mount.out.read_text()
    assert as_nobody("print(json.dumps(json.load(open(sys.argv[1]))['passthrough']))", mount.model / "status.json") is False


def test_reading_and_writing(nobodys):
    mount = nobodys("--no-passthrough")
    assert mount.err.read_text() == "", "no line where it is meant"
    got = as_nobody(
        """
m = sys.argv[1]
old = os.open(m + '/weights', os.O_RDONLY)
memory = mmap.mmap(old, 0, prot=mmap.PROT_READ)
with open(m + '/gradients', 'wb') as f: f.write(ONE * 65536)
new = open(m + '/weights', 'rb').read()
fresh = mmap.mmap(os.open(m + '/weights', os.O_RDONLY), 0, prot=mmap.PROT_READ)
g = os.open(m + '/gradients', os.O_RDWR | os.O_DIRECT)
gradients = mmap.mmap(g, 0)
gradients[:] = ONE * 65536
os.fsync(g)
print(json.dumps([new == ONE * 65536, os.pread(old, 4, 0).hex(), memory[:4].hex(), fresh[:] == new, os.stat(m + '/weights').st_uid,
    open(m + '/weights', 'rb').read() == struct.pack('<f', 2) * 65536, open(m + '/version').read()]))
""",
        mount.model,
    )
    assert got == [True, "00000000", "00000000", True, NOBODY, True, "2\n"]


def test_other_users_are_kept_out(nobodys):
    """Root included: that is what FUSE does without --allow-other."""
    mount = nobodys()
    for act in (lambda: os.listdir(mount.root), lambda: (mount.model / "weights").read_bytes()):
        with pytest.raises(PermissionError) as caught:
            act()
        assert caught.value.errno == errno.EACCES
    done = ran(["cat", mount.model / "version"], user=1, group=1, extra_groups=[])
    assert done.returncode != 0 and "Permission denied" in done.stderr


def test_ends_cleanly(nobodys):
    for number in (signal.SIGINT, signal.SIGTERM):
        mount = nobodys()
        as_nobody("open(sys.argv[1] + '/gradients', 'wb').write(ONE * 65536)", mount.model)
        mount.process.send_signal(number)
        assert mount.process.wait(300) == 0, mount.err.read_text()
        assert not is_mounted(mount.root)


def test_a_dead_mount_is_taken_over(nobodys):
    first = nobodys()
    first.process.kill()
    first.process.wait()
    assert is_mounted(first.root)
    second = nobodys()
    as_nobody("open(sys.argv[1] + '/gradients', 'wb').write(ONE * 65536)", second.model)
    assert as_nobody("print(open(sys.argv[1] + '/version').read())", second.model) == 1
    assert len(is_mounted(second.root)) == 1


def test_unmount_by_its_user(nobodys):
    mount = nobodys()
    command = [mount.place / "gradfs", "unmount", mount.root]
    done = ran(command, **NOBODYS)
    assert done.returncode == 0, done
    assert mount.process.wait(300) == 0 and not is_mounted(mount.root)


def test_kill_of_a_learner_in_mid_write(nobodys):
    mount = nobodys()
    as_nobody(
        """
pid = os.fork()
if pid == 0:
    os.write(os.open(sys.argv[1] + '/gradients', os.O_WRONLY), ONE * 20000)
    os.kill(os.getpid(), 9)
os.waitpid(pid, 0)
""",
        mount.model,
    )
    got = as_nobody("m = sys.argv[1]\nopen(m + '/gradients', 'r+b').write(ONE)\nw = open(m + '/weights', 'rb').read()\n"
                    "print(json.dumps([open(m + '/version').read(), w[:4].hex(), any(w[4:])]))", mount.model)  # fmt: skip
    assert got == ["1\n", ONE.hex(), False]


def test_a_device_for_root_alone_is_told(place_for_all):
    setup = 'mount -t tmpfs none "$2" && mknod -m 600 "$2/fuse" c 10 229 && mount --bind "$2/fuse" /dev/fuse'
    done = in_namespace(place_for_all, setup, '$up "$1"')
    assert done.returncode == 1, done
    assert "gradfs: error: cannot mount: user 65534 may not open /dev/fuse (mode 0600, owner 0, group 0)" in done.stderr, done
    assert "chmod 0666 /dev/fuse" in done.stderr, done


FUSE_CONF = 'mount -t tmpfs none "$2" && echo "{line}" > "$2/conf" && chmod 644 "$2/conf" && mount --bind "$2/conf" /etc/fuse.conf'
has_fuse_conf = pytest.mark.skipif(not Path("/etc/fuse.conf").exists(), reason="there is no /etc/fuse.conf to put another over")


@has_fuse_conf
def test_allow_other_that_is_not_permitted_is_told(place_for_all):
    done = in_namespace(place_for_all, FUSE_CONF.format(line="#user_allow_other"), '$up --allow-other "$1"')
    assert done.returncode == 1, done
    assert "--allow-other: /etc/fuse.conf does not permit it to users" in done.stderr, done
    assert "add a line with user_allow_other to /etc/fuse.conf" in done.stderr, done


@has_fuse_conf
def test_allow_other_that_is_permitted_works(place_for_all):
    script = '$up --allow-other --background --log-file /dev/null "$1" && cat "$1/model/version" && "$0" unmount "$1"'
    done = in_namespace(place_for_all, FUSE_CONF.format(line="user_allow_other"), script)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "0", done
