"""A storm of calls."""

import contextlib
import os
import threading
import time

import numpy as np
import pytest

from daemons import BLOCK, ONE, child, small


def test_a_bystander_that_is_killed_takes_nobody_else_along(start_mount, child):
    """Two processes write as the mount's own learner; one of them, which wrote nothing, is killed."""
    mount = small(start_mount)
    bystander = child("g = os.open(sys.argv[1], os.O_WRONLY); print('ready'); time.sleep(60)", mount.model / "gradients")
    fd = os.open(mount.model / "gradients", os.O_WRONLY)
    os.pwrite(fd, ONE, 0)
    bystander.kill()
    time.sleep(0.3)
    os.pwrite(fd, ONE, 4)
    os.close(fd)
    assert mount.wait_for_version(1) == 1
    assert (mount.weights()[:8] == ONE * 2) is True


# A storm


STORM = r"""
import faulthandler, random

faulthandler.enable()
root, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
dice = random.Random(seed)
model = root + '/model'
SIZE = 4 * 65536
end = time.monotonic() + seconds
fds, maps = [], []
names = ['weights', 'weights.safetensors', 'gradients', 'publish', 'device', 'version', 'status.json', 'tensors/weights.npy',
         'control/learning_rate', 'control/retain', 'control/momentum', 'versions', 'tensors', 'control', 'nothing',
         'learners', '../README', 'versions/0/weights', 'tensors/none.npy']
flags = [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_DIRECT,
         os.O_RDONLY | os.O_NONBLOCK, os.O_WRONLY | os.O_CREAT, os.O_RDONLY | os.O_DIRECTORY, os.O_WRONLY | os.O_SYNC]

def path():
    if dice.random() < 0.3:
        return f'{model}/learners/l{dice.randrange(6)}/' + dice.choice(['weights', 'gradients', 'version', 'status'])
    if dice.random() < 0.1:
        return f'{model}/versions/{dice.randrange(2000)}/' + dice.choice(['weights', 'version', 'tensors/weights.npy'])
    return f'{model}/' + dice.choice(names)

def offset():
    return dice.choice([0, 4, 1, 65536, 65532, SIZE - 4, SIZE, SIZE + 4, 1 << 40, dice.randrange(SIZE)])

def data():
    length = dice.choice([0, 1, 3, 4, 4096, 65536, 65540, SIZE, SIZE + 4, dice.randrange(1, 200000)])
    return dice.choice([b'\0', b'\xff', b'\0\0\x80\x3f', b'1e-3\n']) * (length // dice.choice([1, 4]) + 1)

def fd():
    return dice.choice(fds)

def listdir(): os.listdir(dice.choice([root, model, model + '/control', model + '/learners', model + '/versions', model + '/tensors']))
# A page of a learner's file whose learner has left cannot be read: SIGBUS. Only what stays is mapped.
lasting = set()
def open_():
    name = path(); fds.append(os.open(name, dice.choice(flags), 0o644)); lasting.discard(fds[-1])
    if 'learners' not in name and name.endswith(('weights', 'gradients', '.safetensors', '.npy')): lasting.add(fds[-1])
def close():
    if len(fds) > 4: os.close(fds.pop(dice.randrange(len(fds))))
def map_():
    if len(maps) > 8: maps.pop(dice.randrange(len(maps))).close()
    maps.append(mmap.mmap(dice.choice([f for f in fds if f in lasting]), dice.choice([4096, 65536, SIZE]), access=dice.choice([mmap.ACCESS_READ, mmap.ACCESS_WRITE, mmap.ACCESS_COPY])))
def touch():
    m = dice.choice(maps); i = dice.randrange(len(m) - 4); m[i]
    try: m[i:i + 4] = dice.choice([b'\0\0\0\0', b'\0\0\x80\x3f', b'\xff\xff\xff\xff'])
    except TypeError: pass
def flush(): dice.choice(maps).flush()
def poll():
    import select
    p = select.poll(); p.register(fd(), select.POLLIN | select.POLLOUT); p.poll(dice.choice([0, 1, 5]))

calls = [listdir, open_, open_, open_, open_, close, close, map_, touch, touch, touch, flush, poll,
    lambda: os.pread(fd(), dice.choice([1, 4096, SIZE * 2]), offset()), lambda: os.pread(fd(), 100, offset()),
    lambda: os.pwrite(fd(), data(), offset()), lambda: os.pwrite(fd(), data(), offset()), lambda: os.pwrite(fd(), data(), 0),
    lambda: os.write(fd(), data()), lambda: os.writev(fd(), [data(), data()]), lambda: os.fsync(fd()), lambda: os.fdatasync(fd()),
    lambda: os.fstat(fd()), lambda: os.lseek(fd(), offset(), dice.choice([0, 1, 2, 3, 4])), lambda: os.ftruncate(fd(), offset()),
    lambda: os.truncate(path(), offset()), lambda: os.stat(path()), lambda: os.statvfs(path()),
    lambda: os.mkdir(f'{model}/learners/l{dice.randrange(6)}'), lambda: os.mkdir(f'{model}/learners/l{dice.randrange(6)}'),
    lambda: os.rmdir(f'{model}/learners/l{dice.randrange(6)}'), lambda: os.mkdir(f'{model}/x'), lambda: os.unlink(path()),
    lambda: os.rename(path(), path()), lambda: os.link(path(), path()), lambda: os.symlink('x', path() + 'x'),
    lambda: os.chmod(path(), dice.randrange(0o1000)), lambda: os.setxattr(path(), 'user.x', b'1'), lambda: os.listxattr(path()),
    lambda: os.getxattr(path(), 'user.gradfs.version'), lambda: os.utime(path()), lambda: os.posix_fadvise(fd(), 0, 0, 4),
    lambda: os.sendfile(fd(), fd(), 0, dice.choice([4, 70000])), lambda: os.copy_file_range(fd(), fd(), 70000, 0, 0),
    lambda: os.close(os.dup(fd())), lambda: os.sync() if dice.random() < 0.01 else None,
]
count = done = 0
print('ready')
while time.monotonic() < end:
    count += 1
    try:
        dice.choice(calls)(); done += 1
    except (OSError, ValueError, IndexError, BufferError):
        pass
    if len(fds) > 40:
        try: os.close(fds.pop(0))
        except OSError: pass
print(count, done)
if seed % 3 == 0:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("way", ["passthrough", "no_passthrough"])
def test_storm(start_mount, child, way):
    seed = int(os.environ.get("GRADFS_TEST_SEED", 0))
    print(f"GRADFS_TEST_SEED={seed}")
    mount = small(start_mount, no_passthrough=way == "no_passthrough", timeout=0.2, lease=1, retain=2)
    stop = threading.Event()

    def pull():
        """Learners come and go, so that a step is not stuck for long."""
        while not stop.wait(0.05):
            with contextlib.suppress(OSError):
                mount.contribute(ONE)

    helper = threading.Thread(target=pull)
    helper.start()
    try:
        storms = [child(STORM, mount.root, seed + i, 4) for i in range(5)]
        for i, one in enumerate(storms):
            out, err = one.end(timeout=300)
            assert len(out.split()) == 2, f"the storm ended with {one.process.returncode}: {out}{err}"
            count, done = map(int, out.split())
            print(f"seed {seed + i}: {done} of {count} calls succeeded")
            assert done > 100, out + err
    finally:
        stop.set()
        helper.join(300)
    assert mount.running(), mount.stderr()[-3000:]
    assert "panicked" not in mount.stderr(), mount.stderr()[-3000:]
    for name in os.listdir(mount.model / "learners"):
        mount.leave(name)
    for name, value in [("timeout", 10), ("reducer", "sum"), ("carry", 1)]:
        mount.control(name, value)

    def contribute(data, offset=0):
        try:
            mount.contribute(data, offset)
        except OSError as error:
            pytest.fail(f"{error}\n{mount.stderr()[-1000:]}\n{mount.status()}")

    # Taken contributions of learners that have left make a version of their own as soon as there is a learner again.
    # After this one no such version is to come: the open of weights waits for its step.
    contribute(ONE)
    before, version = np.frombuffer(mount.weights(), "<f4").copy(), mount.version()
    assert len(before) == BLOCK and mount.status()["committed_for_next_version"] == 0
    contribute(np.full(BLOCK // 4, 0.5, "<f4"), offset=2 * BLOCK)
    assert mount.wait_for_version(version + 1) == version + 1
    before[BLOCK // 2 : 3 * BLOCK // 4] += np.float32(0.5)
    assert mount.weights() == before.tobytes()
    assert mount.status()["state"] == "running"

STEP = """
import time
g = os.open(sys.argv[1], os.O_WRONLY)
print('ready', flush=True)
end = time.monotonic() + 4
while time.monotonic() < end:
    os.pwrite(g, b'\\0\\0\\x80\\x3f', 0)
    os.fsync(g)
"""
CALL = """
import time
print('ready', flush=True)
end = time.monotonic() + 4
while time.monotonic() < end:
    try:
        getattr(os, sys.argv[2])(sys.argv[1])
    except OSError:
        pass
"""


def test_tensors_lead_to_the_version_that_was_told__removing_a_file_beside_its_fsync(start_mount, child):
    """fsync holds the file's lock and waits for a name to be dropped; unlink holds the directory's and waits for it."""
    mount = small(start_mount)
    model = mount.model
    calls = [("gradients", "unlink"), ("tensors/weights.npy", "stat"), ("tensors", "stat")]
    children = [child(STEP, model / "gradients"), *(child(CALL, model / name, call) for name, call in calls)]
    for one in children:
        assert one.process.wait(300) == 0
    version = mount.version()
    mount.contribute(ONE)
    assert mount.wait_for_version(version + 1) == version + 1
