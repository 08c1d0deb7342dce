"""Which close ends what, and what must not count: what docs/use/contributions.md promises of it."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import ran, write_all
from filetools import BLOCK, SIZE, array, eventually, f32, fails, filled, mounts, raises, shell, write_safetensors
from patience import HANGS

mounted = mounts()
COUNT = SIZE // 4


@pytest.fixture
def tensors(start_mount, tmp_path):
    """Starts a mount of two f32 tensors of a block each."""
    whole = np.ones(BLOCK // 4, "<f4").tobytes()
    path = write_safetensors(tmp_path / "two.safetensors", {name: ("F32", (BLOCK // 4,), whole) for name in ("t0", "t1")})
    return lambda **options: start_mount(model=path, name="model", block_size=BLOCK, **{"reducer": "sgd", "learning_rate": 1, **options})


# Settings


def test_a_setting_is_applied_once_at_its_close(mounted):
    mount = mounted(verbose=True, learning_rate=0.75)
    rate = mount.model / "control/learning_rate"
    fd = os.open(rate, os.O_WRONLY | os.O_TRUNC)
    for piece in (b"0", b".2", b"5\n"):
        os.write(fd, piece)
    assert mount.control("learning_rate") == "0.75", "not before the close"
    os.close(os.dup(fd))
    assert mount.control("learning_rate") == "0.75", "nor at that of a duplicate"
    os.close(fd)
    assert mount.control("learning_rate") == "0.25"
    shell('echo 0.5 > "$1"; echo 0.125 1<> "$1"; printf 0.0625 | dd bs=1 of="$1" status=none', rate)
    log = [line for line in mount.stderr().splitlines() if "setting=" in line]
    assert [line.split("value=")[1].split()[0].strip('"') for line in log] == ["0.25", "0.5", "0.125", "0.0625"], log
    assert not any("WARN" in line for line in log)


def test_a_setting_is_applied_once_at_its_close__and_is_never_empty_before(mounted):
    mount = mounted(frozen="*")
    seen, stop = set(), threading.Event()

    def read():
        while not stop.is_set():
            seen.add(mount.control("frozen"))

    reader = threading.Thread(target=read)
    reader.start()
    shell('for i in $(seq 200); do echo "*" > "$1"; done', mount.model / "control/frozen")
    stop.set()
    reader.join()
    assert seen == {"*"}


def test_a_setting_is_applied_once_at_its_close__also_one_that_is_read_and_written(mounted):
    mount = mounted(frozen="*")
    frozen = mount.model / "control/frozen"
    with open(frozen) as reads, open(frozen, "w") as writes:
        writes.write(reads.read())
        writes.close()
        assert mount.control("frozen") == "*"
    assert mount.control("frozen") == "*", "closing the reader changes nothing"
    with open(frozen, "r+") as file:
        text = file.read()
        file.seek(0)
        file.truncate()
        file.write(text)
    assert mount.control("frozen") == "*"
    shell(': > "$1"', frozen)
    assert mount.control("frozen") == ""


def test_a_wrong_setting_is_refused_at_its_newline(tensors):
    mount = tensors()
    mount.join("a")
    control = mount.model / "control"
    for path, text in (
        (control / "reducer", "nonsense"), (control / "learning_rate", "fast"), (control / "frozen", "nothing*"),
        (control / "tensors", "t0 colour=red"), (control / "min_learners", "7"), (mount.place("a") / "weight", "many"),
    ):
        before = path.read_text()
        for redirection in (">", "1<>"):
            shell(f'echo "$2" {redirection} "$1"', path, text, status=1)
            assert path.read_text() == before
    # The next value is taken, and what was refused spoils the rest of its file.
    shell('echo adam > "$1"', control / "reducer")
    with raises(errno.EINVAL), open(control / "reducer", "wb", buffering=0) as file:
        fails(errno.EINVAL, file.write, b"nonsense\n")
        file.write(b"sgd\n")
    assert mount.control("reducer") == "adam"


def test_rules_are_appended(tensors):
    mount = tensors(tensors="t0 weight_decay=0.5")
    shell('echo "t1 weight_decay=0.25" >> "$1"', mount.model / "control/tensors")
    assert mount.control("tensors") == "t0 weight_decay=0.5\nt1 weight_decay=0.25"


def test_a_rule_for_one_tensor_keeps_the_state_of_others(tensors):
    """Two jobs with the same steps; in one of them rules are written between them."""
    ends = []
    for writes in (False, True):
        mount = tensors(reducer="adam", learning_rate=0.01, tensors="t1 weight_decay=0.5")
        rules = mount.model / "control/tensors"
        for step in range(1, 7):
            mount.contribute(np.full(BLOCK // 2, step, "<f4"))
            if writes and step in (2, 4):
                shell('printf "%s\\n" "t0 learning_rate_scale=2" "t1 weight_decay=0.5" > "$1"', rules)
                shell('echo "t1 weight_decay=0.5" > "$1"', rules)
        ends.append(mount.weights())
    assert ends[0] == ends[1]


# Closes


def test_a_close_before_any_write_ends_nothing(mounted):
    mount = mounted(reducer="assign")
    half = filled(mount, 7)[: COUNT // 2]
    for name in ("weights", "publish"):
        os.close(os.open(mount.model / name, os.O_WRONLY | os.O_TRUNC))
        shell('true > "$1"; : > "$1"', mount.model / name)
        # "Was truncated" outlives the closes of a shell and of dd.
        for script in ('head -c 1000 /dev/zero > "$1"', 'dd if=/dev/zero of="$1" bs=500 count=2 status=none'):
            subprocess.run(["bash", "-c", script, "bash", mount.model / name], check=False, capture_output=True)
            assert "was truncated" in (mount.model / "error").read_text()
        fd = os.open(mount.model / name, os.O_WRONLY | os.O_TRUNC)
        os.close(os.dup(fd))
        os.write(fd, half)
        fails(errno.EINVAL, os.close, fd)
    assert mount.version() == 0


@pytest.mark.parametrize("name", ["weights", "publish"])
def test_weights_publish_atomically__and_never_what_sigterm_interrupts(mounted, name):
    """Neither a part nor all bytes, with O_TRUNC or without: such a close is not the program's own."""
    mount = mounted(reducer="assign")
    old, new = filled(mount, 5), filled(mount, 7).tobytes()
    mount.contribute(old)
    assert mount.version() == 1
    truncates, keeps = 'exec cat > "$1"', 'exec dd of="$1" bs=1000 conv=notrunc status=none'
    for number, (script, count) in enumerate([(truncates, 1000), (truncates, SIZE - 4), (truncates, SIZE), (keeps, 1000)], 1):
        writer = subprocess.Popen(["bash", "-c", script, "bash", mount.model / name], stdin=subprocess.PIPE)
        writer.stdin.write(new[:count])
        writer.stdin.flush()
        # It has written this, and waits for more.
        eventually(lambda: f"pos:\t{count}\n" in Path(f"/proc/{writer.pid}/fdinfo/1").read_text())
        writer.send_signal(signal.SIGTERM)
        assert writer.wait(HANGS) == -signal.SIGTERM
        writer.stdin.close()
        eventually(lambda: mount.stderr().count("killed by SIGTERM while it wrote weights") == number)
        assert mount.version() == 1 and (array(mount.model / "weights") == 5).all(), (script, count)
    write_all(mount.model / name, new)
    assert mount.version() == 2 and mount.weights() == new


def test_a_duplicates_close_ends_nothing(mounted):
    mount = mounted()
    values = np.arange(COUNT, dtype="<f4")
    with open(mount.model / "gradients", "wb") as file:
        for part in np.array_split(values, 5):
            part.tofile(file)  # Through a duplicate, which it closes.
    assert mount.version() == 1 and mount.weights() == values.tobytes()
    shell('exec 3> "$1"; for i in 1 2 3; do head -c 1000 "$2" >&3; done; tail -c +3001 "$2" >&3; exec 3>&-',
          mount.model / "gradients", mount.model / "weights")
    assert mount.version() == 2
    fd = os.open(mount.model / "gradients", os.O_WRONLY)
    other = os.open(mount.model / "gradients", os.O_WRONLY)
    os.pwrite(fd, f32(1), 0)
    os.close(fd)
    assert mount.version() == 3, "another open file is no duplicate"
    os.close(other)
    twice = [os.open(mount.model / "gradients", os.O_WRONLY)]
    twice.append(os.dup(twice[0]))
    os.pwrite(twice[0], f32(1), 0)
    os.close(twice[0])
    assert mount.version() == 3
    os.fsync(twice[1])
    assert mount.version() == 4, "fsync ends it, duplicates or not"
    os.close(twice[1])
    assert mount.version() == 4


def test_a_duplicates_close_ends_nothing__of_a_publication(mounted):
    mount = mounted(reducer="assign")
    values = np.arange(COUNT, dtype="<f4")
    with open(mount.model / "publish", "wb") as file:
        for part in np.array_split(values, 5):
            part.tofile(file)
    assert mount.version() == 1 and mount.weights() == values.tobytes()


OUTLIVES = """
import os, sys, time
fd, parent = os.open(sys.argv[1], os.O_WRONLY), os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
for part in range(4):
    duplicate = os.dup(fd)
    os.pwrite(duplicate, b"\\0\\0\\x80\\x3f", 4 * part)
    os.close(duplicate)
os.close(fd)
print("closed")
"""


def test_who_outlives_the_opener_owns_its_file(mounted):
    mount = mounted()
    # The output ends with the child's.
    done = ran([sys.executable, "-c", OUTLIVES, mount.model / "gradients"])
    assert done.stdout == "closed\n", done.stderr
    assert mount.version() == 1, "one contribution"
    assert array(mount.model / "weights")[:5].tolist() == [1, 1, 1, 1, 0]


# The opener exits with two files that it has not written to. Its child writes a part of an element through one of them.
HEIR = """
import errno, os, sys, time
one, other = (os.open(sys.argv[1], os.O_WRONLY) for _ in range(2))
opener = os.getpid()
if os.fork():
    sys.exit()
while os.getppid() == opener:
    time.sleep(0.01)
os.pwrite(one, bytes(6), 0)
try:
    os.close(one)
    print("closed")
except OSError as error:
    print(errno.errorcode[error.errno])
"""


def test_who_outlives_the_opener_owns_its_file__and_hears_of_refusals(mounted):
    mount = mounted()
    done = ran([sys.executable, "-c", HEIR, mount.model / "gradients"])
    assert done.stdout == "EINVAL\n", done.stderr
    assert mount.version() == 0


# What must not count


def test_a_refused_write_fails_the_close(mounted):
    mount = mounted()
    for end in (os.fsync, os.close):
        fd = os.open(mount.model / "gradients", os.O_WRONLY)
        fails(errno.EFBIG, os.pwrite, fd, f32(1), SIZE)
        os.pwrite(fd, f32(1), 0)
        fails(errno.EFBIG, end, fd)
        if end is os.fsync:
            os.pwrite(fd, f32(0), 0)
            os.close(fd)
    assert mount.version() == 1 and not any(mount.weights()), "the next one starts clean"
    fd = os.open(mount.model / "gradients", os.O_WRONLY)
    fails(errno.EFBIG, os.pwrite, fd, f32(1), SIZE)
    fails(errno.EFBIG, os.close, fd)


def test_a_contribution_can_be_taken_back(mounted):
    mount = mounted()
    path = mount.model / "gradients"
    with pytest.raises(ZeroDivisionError), open(path, "wb") as file:
        try:
            file.write(filled(mount, 1)[: COUNT // 3])
            raise ZeroDivisionError
        except BaseException:
            file.truncate(0)
            raise
    assert mount.version() == 0 and mount.status()["learners"][0]["phase"] != "writing"
    fd = os.open(path, os.O_WRONLY)
    os.ftruncate(fd, 0)
    fails(errno.EFBIG, os.pwrite, fd, f32(1), SIZE)
    os.pwrite(fd, f32(1), 0)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f32(2), 4)
    # By path, and with O_TRUNC, nothing is taken back.
    os.truncate(path, 0)
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
    os.close(fd)
    assert mount.version() == 1 and array(mount.model / "weights")[:2].tolist() == [0, 2]


def test_a_truncated_file_that_ends_inside_a_tensor_is_refused(tensors):
    mount = tensors(reducer="sum")
    path = mount.model / "gradients"
    one = np.ones(BLOCK // 4, "<f4")
    for count in (1, BLOCK // 4 - 1, BLOCK // 4 + 1):
        with raises(errno.EINVAL), open(path, "wb", buffering=0) as file:
            file.write(np.ones(count, "<f4"))
        assert "the file was truncated" in (mount.model / "error").read_text()
    with pytest.raises(OSError), open(path, "wb") as file:
        file.write(one[:100])
        raise ZeroDivisionError("an exception in mid-write counts no half step")
    assert mount.version() == 0
    with open(path, "wb", buffering=0) as file:
        file.write(one)
    assert mount.version() == 1, "it ends with a tensor"
    with open(path, "wb", buffering=0) as file:
        os.pwrite(file.fileno(), one[:100], 400)
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, one[:100])
    os.close(fd)
    assert mount.version() == 3, "parts, and files that were not truncated"


@pytest.mark.parametrize("name", ["gradients", "publish"])
def test_the_rest_of_a_refused_file_never_counts(start_mount, name):
    mount = start_mount(size=4 * BLOCK, reducer="assign")
    ones = np.ones(BLOCK, "<f4")
    (mount.model / "publish").write_bytes(ones)
    fd = os.open(mount.model / name, os.O_WRONLY | os.O_TRUNC)
    for count, offset in ((BLOCK // 3, 0), (BLOCK - BLOCK // 3, BLOCK // 3 * 4)):
        os.pwrite(fd, 2 * ones[:count], offset)
        fails(errno.EINVAL, os.fsync, fd)
    assert mount.version() == 1 and (array(mount.model / "weights") == 1).all()
    os.pwrite(fd, 3 * ones, 0)
    os.close(fd)
    assert mount.version() == 2 and (array(mount.model / "weights") == 3).all()


def test_an_array_of_a_narrower_type_is_refused_by_name(tensors):
    mount = tensors(reducer="sum")
    path = mount.model / "gradients"
    for flags in (os.O_WRONLY, os.O_WRONLY | os.O_TRUNC):
        fd = os.open(path, flags)
        os.write(fd, np.ones(BLOCK // 4, "<f2"))
        fails(errno.EINVAL, os.close, fd)
        assert "8-bit floats" in (mount.model / "error").read_text(), "a quarter of the model"
    assert mount.version() == 0
    for _ in range(2):
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, np.ones(BLOCK // 2, "<f2"))
        os.close(fd)
    assert mount.version() == 2, "half of the model is the first tensor"
    assert mount.stderr().count("Is it an array of float16 or bfloat16?") == 1


@pytest.mark.parametrize("where", ["behind", "all"])
def test_holes_are_zeros_that_were_written(tensors, tmp_path, where):
    mount = tensors(weight_decay=0.5)
    with open(tmp_path / "sparse", "wb") as file:
        if where == "behind":
            file.write(np.full(BLOCK // 4, 0.25, "<f4"))
        file.truncate(2 * BLOCK)
    shell('cp "$1" "$2"', tmp_path / "sparse", mount.model / "gradients")
    weights = array(mount.model / "weights")
    assert mount.version() == 1 and (weights[0], weights[-1]) == (0.25 if where == "behind" else 0.5, 0.5)
    # A program that only says how large the file is writes nothing.
    fd = os.open(mount.model / "gradients", os.O_WRONLY)
    os.ftruncate(fd, 2 * BLOCK)
    os.close(fd)
    assert mount.version() == 1
    mount.control("reducer", "assign")
    shell('cp "$1" "$2"', tmp_path / "sparse", mount.model / "publish")
    weights = array(mount.model / "weights")
    assert mount.version() == 2 and (weights[0], weights[-1]) == (0.25 if where == "behind" else 0, 0)
