"""The daemon without root: mounted by fusermount3, read through the daemon, with the same semantics."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from conftest import gradfs_binary
from daemons import in_namespace, place_for_all
from patience import HANGS

NOBODY = 65534
ONE = struct.pack("<f", 1.0)
BLOCK = 64 << 10

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


def as_nobody(code, *args, cwd="/", timeout=HANGS):
    """Runs Python code as the daemon's own user; returns what it printed, as JSON."""
    prelude = "import errno, json, mmap, os, struct, sys, time\nONE = struct.pack('<f', 1.0)\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + code, *map(str, args)],
        user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True, timeout=timeout, cwd=cwd, check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else None


class Unprivileged:
    """`gradfs up` as nobody."""

    def __init__(self, place, *options, size=4 * BLOCK):
        self.place, self.root = place, place / "mnt"
        self.root.mkdir(exist_ok=True)
        os.chown(self.root, NOBODY, NOBODY)
        self.model = self.root / "model"
        binary = place / "gradfs"
        if not binary.exists():
            shutil.copy(gradfs_binary(), binary)
            binary.chmod(0o755)
        self.out, self.err = place / "out", place / "err"
        command = [binary, "up", "--size", str(size), "--block-size", "64KiB", "--reducer", "sum", *options, self.root]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env={"PATH": os.environ["PATH"]},
            )
        deadline = time.monotonic() + HANGS
        while "ready" not in self.out.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                pytest.fail(f"gradfs did not mount as nobody: {self.out.read_text()}{self.err.read_text()}", pytrace=False)
            time.sleep(0.01)

    def mounted(self):
        table = Path("/proc/self/mountinfo").read_text().splitlines()
        return [line for line in table if line.split()[4] == str(self.root)]

    def end(self):
        self.process.kill()
        self.process.wait()
        while self.mounted():
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


def test_no_line_where_it_is_meant(nobodys):
    mount = nobodys("--no-passthrough")
    assert mount.err.read_text() == ""


def test_reading_and_writing(nobodys):
    mount = nobodys()
    got = as_nobody(
        """
m = sys.argv[1]
old = os.open(m + '/weights', os.O_RDONLY)
before = os.pread(old, 4, 0)
memory = mmap.mmap(old, 0, prot=mmap.PROT_READ)
with open(m + '/gradients', 'wb') as f: f.write(ONE * 65536)
new = open(m + '/weights', 'rb').read()
f = os.open(m + '/weights', os.O_RDONLY)
fresh = mmap.mmap(f, 0, prot=mmap.PROT_READ)
print(json.dumps([before.hex(), new == ONE * 65536, os.pread(old, 4, 0).hex(), memory[:4].hex(), fresh[:] == new,
    open(m + '/version').read(), os.stat(m + '/weights').st_uid, open(m + '/weights.safetensors', 'rb').read()[-262144:] == new]))
""",
        mount.model,
    )
    assert got == ["00000000", True, "00000000", "00000000", True, "1\n", NOBODY, True]


def test_mapped_gradients(nobodys):
    mount = nobodys()
    got = as_nobody(
        """
m = sys.argv[1]
g = os.open(m + '/gradients', os.O_RDWR | os.O_DIRECT)
memory = mmap.mmap(g, 0)
seen = []
for step in range(1, 4):
    memory[:4] = struct.pack('<f', step)
    memory[70000:70004] = ONE
    memory[-4:] = ONE
    os.fsync(g)
    w = open(m + '/weights', 'rb').read()
    seen.append([open(m + '/version').read(), struct.unpack('<f', w[:4])[0], struct.unpack('<f', w[70000:70004])[0], struct.unpack('<f', w[-4:])[0]])
print(json.dumps(seen))
""",
        mount.model,
    )
    assert got == [["1\n", 1, 1, 1], ["2\n", 3, 2, 2], ["3\n", 6, 3, 3]]


def test_mapped_gradients_of_an_odd_size(nobodys):
    mount = nobodys(size=BLOCK + 4100)
    got = as_nobody(
        """
m = sys.argv[1]
g = os.open(m + '/gradients', os.O_RDWR | os.O_DIRECT)
memory = mmap.mmap(g, 0)
memory[:] = ONE * (len(memory) // 4)
os.fsync(g)
w = open(m + '/weights', 'rb').read()
print(json.dumps([len(memory), w == ONE * (len(memory) // 4)]))
""",
        mount.model,
    )
    assert got == [BLOCK + 4100, True]


def test_versions_under_readers(nobodys):
    """A reader is never torn, and what is cached of one version is never shown as another."""
    mount = nobodys()
    torn = as_nobody(
        """
m = sys.argv[1]
pid = os.fork()
if pid == 0:
    for i in range(200):
        with open(m + '/gradients', 'wb') as f: f.write(ONE * 65536)
    os._exit(0)
torn, last, seen = [], 0, set()
while os.waitpid(pid, os.WNOHANG)[0] == 0:
    for mapped in (False, True):
        fd = os.open(m + '/weights', os.O_RDONLY)
        w = mmap.mmap(fd, 0, prot=mmap.PROT_READ)[:] if mapped else os.read(fd, 1 << 20)
        os.close(fd)
        values = set(struct.unpack('<65536f', w))
        if len(values) != 1 or max(values) < last: torn.append([sorted(values)[:3], last])
        last = max(values); seen.add(last)
print(json.dumps([torn[:3], len(seen) > 3]))
""",
        mount.model,
    )
    assert torn == [[], True]


def test_refusals_are_the_same(nobodys):
    mount = nobodys("--learners", "1")
    got = as_nobody(
        """
m = sys.argv[1]
def err(f):
    try: f(); return 0
    except OSError as e: return errno.errorcode[e.errno]
g = os.open(m + '/gradients', os.O_WRONLY)
def nan():
    f = os.open(m + '/gradients', os.O_WRONLY)
    os.write(f, struct.pack('<f', float('nan')))
    os.close(f)
print(json.dumps([
    err(lambda: os.pwrite(g, ONE, 262144)), err(lambda: os.open(m + '/gradients', os.O_RDONLY)),
    err(lambda: os.open(m + '/version', os.O_WRONLY)), err(lambda: os.mkdir(m + '/x')), err(lambda: os.unlink(m + '/weights')),
    err(lambda: os.open(m + '/new', os.O_CREAT | os.O_WRONLY)), err(lambda: os.chmod(m + '/weights', 0o777)), err(nan),
    err(lambda: os.mkdir(m + '/learners/a')), err(lambda: os.mkdir(m + '/learners/a')), err(lambda: os.rmdir(m + '/learners/a')),
    open(m + '/version').read()]))
""",
        mount.model,
    )
    assert got == ["EFBIG", "EACCES", "EACCES", "EPERM", "EPERM", "EPERM", "EPERM", "EINVAL", 0, "EEXIST", 0, "0\n"]


def test_other_users_are_kept_out(nobodys):
    """Root included: that is what FUSE does without --allow-other."""
    mount = nobodys()
    for act in (lambda: os.listdir(mount.root), lambda: (mount.model / "weights").read_bytes()):
        with pytest.raises(PermissionError) as caught:
            act()
        assert caught.value.errno == errno.EACCES
    done = subprocess.run(["cat", mount.model / "version"], user=1, group=1, extra_groups=[], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0 and "Permission denied" in done.stderr


def test_allow_other_without_permission_says_what_to_do(nobodys):
    """Where /etc/fuse.conf does not permit it, it fails with a reason; where it does, it works."""
    allowed = any(line.strip() == "user_allow_other" for line in Path("/etc/fuse.conf").read_text().splitlines()) if Path("/etc/fuse.conf").exists() else False
    if allowed:
        mount = nobodys("--allow-other")
        assert (mount.model / "version").read_text() == "0\n"
        return
    with pytest.raises(pytest.fail.Exception) as caught:
        nobodys("--allow-other")
    said = str(caught.value)
    assert "gradfs: error: " in said and "user_allow_other" in said and "/etc/fuse.conf" in said, said


def test_ends_cleanly(nobodys):
    for number in (signal.SIGINT, signal.SIGTERM):
        mount = nobodys()
        as_nobody("open(sys.argv[1] + '/gradients', 'wb').write(ONE * 65536)", mount.model)
        mount.process.send_signal(number)
        assert mount.process.wait(300) == 0, mount.err.read_text()
        assert not mount.mounted()


def test_a_dead_mount_is_taken_over(nobodys):
    first = nobodys()
    first.process.kill()
    first.process.wait()
    assert first.mounted()
    second = Unprivileged.__new__(Unprivileged)
    second.place, second.root, second.model = first.place, first.root, first.model
    second.out, second.err = first.place / "out2", first.place / "err2"
    with second.out.open("wb") as out, second.err.open("wb") as err:
        second.process = subprocess.Popen(
            [first.place / "gradfs", "up", "--size", "64KiB", "--reducer", "sum", first.root],
            user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={"PATH": os.environ["PATH"]},
        )
    try:
        deadline = time.monotonic() + HANGS
        while "ready" not in second.out.read_text():
            assert second.process.poll() is None and time.monotonic() < deadline, second.err.read_text()
            time.sleep(0.01)
        as_nobody("open(sys.argv[1] + '/gradients', 'wb').write(ONE * 16384)", second.model)
        assert as_nobody("print(open(sys.argv[1] + '/version').read())", second.model) == 1
        assert len(second.mounted()) == 1
    finally:
        second.end()


def test_unmount_by_its_user(nobodys):
    mount = nobodys()
    done = subprocess.run(
        [mount.place / "gradfs", "unmount", mount.root], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
        capture_output=True, text=True, timeout=300, check=False,
    )
    assert done.returncode == 0, done
    assert mount.process.wait(300) == 0 and not mount.mounted()


def test_kill_of_a_learner_in_mid_write(nobodys):
    mount = nobodys()
    victim = subprocess.Popen(
        [sys.executable, "-u", "-c", "import os,sys,time\ng = os.open(sys.argv[1], os.O_WRONLY); os.write(g, b'\\0\\0\\x80\\x3f' * 20000); print('ready'); time.sleep(60)", mount.model / "gradients"],
        user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", stdout=subprocess.PIPE,
    )
    assert victim.stdout.readline() == b"ready\n"
    victim.kill()
    victim.wait()
    victim.stdout.close()
    time.sleep(1)
    got = as_nobody(
        "m = sys.argv[1]\nv = open(m + '/version').read(); g = os.open(m + '/gradients', os.O_WRONLY); os.write(g, ONE); os.close(g); w = open(m + '/weights', 'rb').read()\nprint(json.dumps([v, w[:4].hex(), any(w[4:])]))",
        mount.model,
    )
    assert got == ["0\n", ONE.hex(), False]


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
