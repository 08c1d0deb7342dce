"""`--background`: the command returns when the daemon answers. Also the place of its log, and panics."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import gradfs_binary, ran, write_all
from daemons import LETS_GO, ONE, as_root, in_namespace, is_mounted, place_for_all
from filetools import write_safetensors
from patience import HANGS

# What the command says of the process that goes on.
GOES_ON = re.compile(r"ready in the background as process (\d+), log (\S+) \((.*) ends it\)")


def wait_until(what, deadline=HANGS):
    end = time.monotonic() + deadline
    while not (found := what()):
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.01)
    return found


def is_gone(pid):
    """Whether the process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def start(gradfs, tmp_path):
    """Runs a command with --background; returns its process ID, what it printed, and its log."""
    started = []

    def start(*args, root=None, log=None):
        log = log or tmp_path / f"{args[0]}-{len(started)}.log"
        done = gradfs(*args, "--background", "--log-file", log, timeout=300)
        assert done.returncode == 0, done
        found = GOES_ON.search(done.stdout)
        assert found and found[2] == str(log), done
        started.append((int(found[1]), root))
        return int(found[1]), done.stdout, Path(log)

    yield start
    for pid, root in reversed(started):
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: is_gone(pid))
        if root and is_mounted(root):
            subprocess.run(["umount", "-l", root], check=False)


def test_background_returns_when_the_mount_answers(start, gradfs, mnt):
    """At once: files are there when the command has returned."""
    pid, out, log = start("up", "--size", "64KiB", "--reducer", "sum", "-v", mnt, root=mnt)
    write_all(mnt / "model/gradients", ONE)
    assert (mnt / "model/version").read_text() == "1\n"
    assert f"{mnt}/model: 65536 bytes" in out
    done = gradfs("unmount", mnt)
    assert done.returncode == 0 and not is_mounted(mnt), done
    wait_until(lambda: is_gone(pid))
    text = log.read_text()
    assert "learner=\"mount\"" in text and "stopping: " in text and "\x1b" not in text, text


def test_a_daemon_holds_nothing_of_its_starter(start, mnt):
    """Not its terminal, its pipes, its session or its directory: subprocess.run has returned, so pipes are closed."""
    pid, _, log = start("up", "--size", "64KiB", mnt, root=mnt)
    place = Path(f"/proc/{pid}")
    assert [os.readlink(place / f"fd/{fd}") for fd in range(3)] == ["/dev/null", str(log), str(log)]
    assert os.readlink(place / "cwd") == "/"
    assert os.getsid(pid) == pid and os.getsid(pid) != os.getsid(0)
    assert int((place / "stat").read_text().rsplit(")", 1)[1].split()[1]) != os.getpid()


def test_background_returns_when_the_mount_answers__and_so_for_registries_and_shards(start, gradfs, mnt):
    _, out, _ = start("registry", "--listen", "127.0.0.1:0")
    registry = re.search(r"listens on ([\d.:]+)", out)[1]
    pid, out, _ = start("shard", "--listen", "127.0.0.1:0", "--registry", registry, "--rdma", "off")
    assert f"kill {pid} ends it" in out
    assert gradfs("create", "model", "--size", "64KiB", "--reducer", "sum", "--registry", registry).returncode == 0
    start("mount", mnt, "--registry", registry, root=mnt)
    write_all(mnt / "model/gradients", ONE)
    assert (mnt / "model/weights").read_bytes()[:4] == ONE
    assert gradfs("unmount", mnt).returncode == 0
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: is_gone(pid))


def test_failures_are_those_of_the_foreground(gradfs, tmp_path, mnt):
    """Message, exit code, and no process that goes on."""
    log = ["--log-file", tmp_path / "log"]
    for args, code, words in [
        (["up", "--size", "64KiB", tmp_path / "none"], 1, ["does not exist"]),
        (["up", "--size", "8TiB", mnt], 1, ["not enough memory"]),
        (["up", "--size", "64KiB", "--reducer", "magic", mnt], 2, ["magic"]),
        (["shard", "--listen", "192.0.2.1:7070", "--insecure"], 1, ["192.0.2.1"]),
        (["up", "--size", "64KiB", mnt, "--log-file", tmp_path / "none/log"], 1, ["cannot open the log"]),
    ]:
        done = gradfs(*args, "--background", *([] if "--log-file" in args else log), timeout=300)
        assert done.returncode == code and done.stdout == "", done
        assert done.stderr.count("gradfs: error: ") == 1 and all(word in done.stderr for word in words), done
    assert not is_mounted(mnt)


@pytest.fixture
def starting(tmp_path):
    """A shard that is never ready, for its registry says nothing: the command and the daemon-to-be."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [gradfs_binary(), "shard", "--listen", "127.0.0.1:0", "--rdma", "off", "--background"]
        registry = f"127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [*command, "--registry", registry, "--log-file", tmp_path / "log"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            yield process, wait_until(lambda: children(process.pid))[0]
        finally:
            process.kill()
            process.communicate()


def test_ctrl_c_before_it_is_ready_ends_the_daemon_too(starting):
    process, daemon = starting
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == -signal.SIGINT
    wait_until(lambda: is_gone(daemon))


def test_failures_are_those_of_the_foreground__a_daemon_that_is_killed(starting):
    process, daemon = starting
    os.kill(daemon, signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "SIGKILL has ended the daemon before it was ready" in err, err


@as_root
def test_the_log_is_lines_of_text_or_json__in_the_background(mnt):
    """And holds what the daemon says once it is ready."""
    script = """
        $LETS_GO && mount -t tmpfs none /var/log && "$0" up --background --size 64KiB "$1" || exit 1
        echo fast | tee "$1/model/control/learning_rate" 2>/dev/null && exit 1
        "$0" unmount "$1" && cat /var/log/gradfs/*.log && ls /var/log/gradfs
    """
    done = ran(["unshare", "-m", "sh", "-c", script.replace("$LETS_GO", LETS_GO), gradfs_binary(), mnt])
    assert done.returncode == 0, done
    *_, name = done.stdout.splitlines()
    assert name == "up" + str(mnt).replace("/", "-")[:61] + ".log", done
    assert "control/learning_rate" in done.stdout and '"fast"' in done.stdout, done


# The form of the log


def test_the_log_is_lines_of_text_or_json(start_mount, tmp_path):
    log = tmp_path / "log.json"
    mount = start_mount("-v", "--log-format", "json", "--log-file", log, size="64KiB", reducer="sum")
    mount.join("a")
    with pytest.raises(OSError):
        mount.control("learning_rate", "fast")
    assert mount.stop() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all({"timestamp", "level", "message"} <= line.keys() for line in lines), lines
    assert {"level": "INFO", "learner": "a", "message": "joined", "model": "model"}.items() <= lines[0].items(), lines
    assert any(line["level"] == "WARN" and line["call"] == "write" for line in lines), lines
    assert mount.stderr() == ""


def test_a_refusal_in_the_log_names_model_learner_and_process(start_mount, tmp_path):
    log = tmp_path / "log.json"
    mount = start_mount("--log-format", "json", "--log-file", log, size="64KiB", name="policy", reducer="sum")
    learner = mount.join("a")
    with pytest.raises(OSError):
        mount.control("learning_rate", "fast")
    with pytest.raises(OSError):
        write_all(learner / "gradients", b"abc")
    with pytest.raises(OSError):
        mount.join(".x")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all((line["model"], line["pid"]) == ("policy", os.getpid()) for line in lines), lines
    assert {line["call"]: line.get("learner") for line in lines} == {"write": None, "close": "a", "mkdir": None}, lines


def test_a_refusal_in_the_log_names_model_learner_and_process__as_do_other_warnings(start_mount, tmp_path):
    """A program is killed while it writes a setting; half of the bytes end with a tensor."""
    log = tmp_path / "log.json"
    source = write_safetensors(tmp_path / "policy.safetensors", {name: ("F32", (16,), bytes(64)) for name in "ab"})
    mount = start_mount("--log-format", "json", "--log-file", log, model=source, reducer="sum")
    write_all(mount.join("a") / "gradients", bytes(64))
    writes = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY), b'0.5'); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", writes, mount.model / "control/learning_rate"])
    for words, learner in [("while it wrote", None), ("ends with a tensor", "a")]:
        said = lambda: [line for line in map(json.loads, log.read_text().splitlines()) if words in line["message"]]  # noqa: B023, E731
        line = wait_until(said)[0]
        assert (line["model"], line.get("learner")) == ("policy", learner), line


def test_the_log_is_lines_of_text_or_json__the_last_error(gradfs, tmp_path):
    done = gradfs("up", "--size", "64KiB", tmp_path / "none", env={"GRADFS_LOG_FORMAT": "json"})
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1, done
    said = json.loads(line)
    assert said["level"] == "ERROR" and "does not exist" in said["message"] and "mkdir -p" in said["hint"], said
    done = gradfs("up", "--size", "64KiB", tmp_path / "none", "--log-file", tmp_path / "log")
    assert done.stderr.startswith("gradfs: error: the mountpoint") and "does not exist" in (tmp_path / "log").read_text(), done


@as_root
@pytest.mark.skipif(not shutil.which("fusermount3"), reason="fusermount3 is not installed (Debian: apt-get install fuse3)")
def test_a_panic_ends_the_process(place_for_all):
    """The library that mounts for users panics on this variable."""
    setup = 'ulimit -c 0 && mount -t tmpfs none "$2" && mknod -m 666 "$2/fuse" c 10 229 && mount --bind "$2/fuse" /dev/fuse'
    done = in_namespace(place_for_all, setup, "FUSERMOUNT_PATH=$(printf '\\377') $up \"$1\"")
    assert done.returncode in (-signal.SIGABRT, 128 + signal.SIGABRT), done
    assert "panicked: FUSERMOUNT_PATH is not UTF-8" in done.stderr and "the process ends here" in done.stderr, done
    assert 'thread="main"' in done.stderr and "fuse_pure.rs:" in done.stderr, done
