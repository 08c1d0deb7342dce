"""gradfs and its learners in namespaces of their own, as containers have them."""

import errno
import json
import mmap
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import ran

from daemons import BLOCK, LETS_GO, ONE, child
from filetools import fails

# The mount is seen only in there, so what looks at it runs there too.
PROLOGUE = f"""
import json, struct
sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import Mount
ONE = struct.pack('<f', 1.0)
mount = Mount(size={4 * BLOCK}, block_size={BLOCK}, reducer=sys.argv[1])
print(mount.model)
"""


@pytest.fixture
def in_namespaces(child):
    """Starts Python code with `mount` in new namespaces; returns it and the model's path in there.

    Skips with the reason where they are not permitted.
    """

    def start(code, reducer, *flags):
        under = ["unshare", *flags, "--fork", "--kill-child", "sh", "-c", f'{LETS_GO}; exec "$@"', "sh"]
        try:
            tried = ran([*under, "true"])
        except FileNotFoundError:
            pytest.skip("unshare is not installed")
        if tried.returncode != 0:
            pytest.skip(f"not permitted here: {tried.stderr.strip()}")
        body = "\n    ".join(code.strip().splitlines())
        code = f"{PROLOGUE}try:\n    {body}\nfinally:\n    mount.clean_up()"
        inside = child(code, reducer, under=under, ready=False)
        return inside, inside.line()

    return start


@pytest.fixture
def outside(in_namespaces):
    """A mount in a PID namespace, seen from outside: its process, and its model."""

    def start(reducer="sum"):
        code = "sys.stdin.readline(); print(json.dumps(mount.stderr()))"
        inside, path = in_namespaces(code, reducer, "--pid", "--mount", "--mount-proc")
        # unshare itself is in the mount namespace, but not in the PID namespace.
        return inside, Path(f"/proc/{inside.pid}/root{path}")

    return start


def end(process):
    """Its output to the end, as JSON."""
    process.process.stdin.write("\n")
    out, err = process.end(timeout=300)
    assert process.process.returncode == 0, out + err
    return json.loads(out)


def test_without_passthrough_the_same__in_a_user_namespace(in_namespaces):
    """CAP_SYS_ADMIN of a user namespace is not the one that passthrough takes."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse is not for this user")
    inside, _ = in_namespaces(
        """
before = os.open(mount.model / 'weights', os.O_RDONLY)
mount.control('learning_rate', 0.5)
mount.contribute(ONE * 65536)
weights = mount.weights()
step = weights == struct.pack('<f', -0.5) * 65536
fd = os.open(mount.model / 'weights', os.O_RDONLY)
read_mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)[:] == weights
g = os.open(mount.model / 'gradients', os.O_RDWR | os.O_DIRECT)
memory = mmap.mmap(g, 0)
memory[:] = struct.pack('<f', -3.0) * 65536
os.fsync(g)
mapped_step = mount.weights() == ONE * 65536
print(json.dumps({
    'stderr': mount.stderr(), 'stdout': mount.stdout(), 'passthrough': mount.status()['passthrough'],
    'right': [step, read_mapped, mapped_step, os.pread(before, 4, 0) == bytes(4)],
}))
memory.close(); os.close(g); os.close(fd); os.close(before)
""",
        "sgd", "--map-root-user", "--mount",
    )
    said = end(inside)
    lines = said["stderr"].splitlines()
    assert len(lines) == 1 and "user namespace" in lines[0] and "through the daemon" in lines[0], lines
    assert "reads go through the daemon" in said["stdout"] and said["passthrough"] is False
    assert said["right"] == [True] * 4, said


def test_learners_that_the_daemon_cannot_see(outside):
    """gradfs is in a PID namespace, and its learners are outside. They count, and one line says what gradfs cannot see."""
    inside, model = outside()
    (model / "control/learners").write_text("2")
    for name in "ab":
        (model / "learners" / name).mkdir()
    mapped = os.open(model / "learners/b/gradients", os.O_RDWR | os.O_DIRECT)
    with mmap.mmap(mapped, 4 * BLOCK) as memory:
        memory[:] = ONE * BLOCK
        for step in range(1, 4):
            (model / "learners/a/gradients").write_bytes(ONE * BLOCK)
            os.fsync(mapped)
            for name in "ab":
                weights = memoryview((model / "learners" / name / "weights").read_bytes()).cast("f")
                assert set(weights) == {2.0 * step}, f"step {step} as learner {name} sees it"
    os.close(mapped)
    assert (model / "version").read_text() == "3\n"
    warnings = [line for line in end(inside).splitlines() if "PID namespace" in line]
    assert len(warnings) == 1 and "WARN" in warnings[0] and "what it has written" in warnings[0], warnings


def test_a_program_that_starts_others_is_one_contribution_across_pid_namespaces(outside):
    """gradfs is in a PID namespace, and its learners are outside: children close what they have inherited, and it ends nothing."""
    inside, model = outside()
    (model / "learners/a").mkdir()
    gradients, whole = model / "learners/a/gradients", ONE * BLOCK
    for step in range(1, 4):
        with open(gradients, "wb", buffering=0) as file:
            for part in range(4):
                file.write(whole[part * BLOCK : (part + 1) * BLOCK])
                pid = os.fork()
                if pid == 0:
                    os._exit(0)
                os.waitpid(pid, 0)
        assert (model / "version").read_text() == f"{step}\n"
    # A redirection: its programs write, and the shell closes.
    script = '{ head -c "$2" "$1/weights"; tail -c "+$(($2 + 1))" "$1/weights"; } > "$3"'
    subprocess.run(["bash", "-c", script, "bash", model, str(BLOCK), gradients], check=True, timeout=300)
    weights = memoryview((model / "learners/a/weights").read_bytes()).cast("f")
    assert (model / "version").read_text() == "4\n" and set(weights) == {6.0}
    end(inside)


@pytest.mark.parametrize("name", ["weights", "publish"])
def test_a_refused_file_is_refused_at_its_last_close__across_pid_namespaces(outside, name):
    """NumPy closes a duplicate at each tofile(), which ends what is written, and does not look at the outcome."""
    inside, model = outside("assign")
    values = np.ones(BLOCK, "<f4")
    file = open(model / name, "wb")  # noqa: SIM115
    for part in np.split(values, 4):
        part.tofile(file)
    fails(errno.EINVAL, file.close)
    assert (model / "version").read_text() == "0\n"
    with open(model / name, "wb") as file:
        values.tofile(file)
    assert (model / "version").read_text() == "1\n" and (np.fromfile(model / "weights", "<f4") == 1).all()
    end(inside)


def test_a_redirection_into_a_setting_is_one_value__across_pid_namespaces(outside):
    """A shell truncates, closes and then writes. The setting is never empty in between, which would be no value."""
    inside, model = outside()
    for value in ("0.5", "0.25"):
        subprocess.run(["sh", "-c", 'echo "$1" > "$2"', "sh", value, model / "control/learning_rate"], check=True, timeout=300)
        assert (model / "control/learning_rate").read_text() == f"{value}\n"
    assert not [line for line in end(inside).splitlines() if "learning_rate" in line]
