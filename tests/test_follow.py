"""`gradfs follow`: commands and requests for each new version, as docs/use/files.md promises."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import gradfs_binary, pause, ran
from filetools import BLOCK, HANGS, array, eventually, filled

#: Every value of a version is its number.
VALUE = "od -A n -t f4 -N 4 {} | tr -d ' '"
#: The numbers of poll and ppoll, on x86-64 and ARM.
POLL = ("7", "271", "73")


@pytest.fixture
def model(start_mount):
    """A mount whose model takes whole new weights."""
    return start_mount(size=2 * BLOCK, block_size=BLOCK, reducer="assign")


def publish(mount, versions=1):
    """New weights, all of whose values are the version's number. Returns the newest version."""
    for _ in range(versions):
        version = mount.version() + 1
        (mount.model / "publish").write_bytes(filled(mount, version).tobytes())
    return mount.wait_for_version(version)


@pytest.fixture
def follow():
    """Begins `gradfs follow`. What still runs at the end is ended, with its command."""
    running = []

    def begin(*arguments, reads=True, **options):
        command = [gradfs_binary(), "follow", *map(str, arguments)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )
        running.append(process)
        if reads:
            eventually(lambda: waits(process))
        return process

    yield begin
    for process in running:
        process.terminate()
        process.communicate(timeout=HANGS)


def waits(process):
    """Whether it has opened the file `version` and has read it: it is in poll(2) then. Or it has ended."""
    try:
        files = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")]
        call = Path(f"/proc/{process.pid}/syscall").read_text().split()[0]
    except (FileNotFoundError, IndexError):
        files, call = [], ""
    return process.poll() is not None or any(file.endswith("/version") for file in files) and call in POLL


def ended(process, status=0):
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == status, (out, err)
    return out, err


def lines(path):
    return path.read_text().split() if path.exists() else []


def threads(process):
    try:
        return os.listdir(f"/proc/{process.pid}/task")
    except FileNotFoundError:
        return []


def there(pid):
    """Whether a process runs, and is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_follow_runs_a_command_for_each_new_version(model, follow, tmp_path):
    publish(model)
    say = f'echo "$GRADFS_VERSION $GRADFS_MODEL $GRADFS_VERSION_PATH $(cat $GRADFS_VERSION_PATH/version)" >> {tmp_path}/said'
    follow(model.root, "--exec", say)
    for version in (2, 3):
        publish(model)
        eventually(lambda: len(lines(tmp_path / "said")) == 4 * (version - 1))
    expected = [[str(n), str(model.model), f"{model.model}/versions/{n}", str(n)] for n in (2, 3)]
    assert lines(tmp_path / "said") == sum(expected, [])


def test_follow_begins_where_it_is_told(model, follow):
    publish(model, 3)
    assert ended(follow(model.model, "--now", "--once", reads=False))[0] == "3\n"
    assert ended(follow(model.model, "--from", 1, "--once", reads=False))[0] == "3\n"
    for given in (False, True):
        later = follow(model.model, "--once", *(["--from", model.version()] if given else []))
        assert later.poll() is None
        publish(model)
        assert ended(later)[0] == f"{model.version()}\n"


def test_a_model_that_was_made_anew_is_followed_from_its_first_version(cluster, follow):
    one = cluster(1)
    one.create("m", size=2 * BLOCK, block_size=BLOCK, reducer="assign")
    mount = one.mount()
    publish(mount, 3)
    eventually(lambda: mount.seen() == 3)
    follower = follow(mount.model, "--now")
    assert follower.stdout.readline() == "3\n"
    assert one.run("delete", "m").returncode == 0
    eventually(lambda: not mount.model.exists())
    # It looks every two seconds, and sees that the model is missing.
    time.sleep(3)
    one.create("m", size=2 * BLOCK, block_size=BLOCK, reducer="assign")
    eventually(lambda: mount.model.exists() and mount.seen() == 0)
    assert follower.stdout.readline() == "0\n"
    publish(mount)
    assert follower.stdout.readline() == "1\n"
    assert one.run("delete", "m").returncode == 0
    assert follower.wait(HANGS) == 1


@pytest.mark.also_on_network
def test_follow_holds_the_version_while_the_command_runs(model, follow, tmp_path):
    """Also where nothing is retained, in all forms."""
    os.mkfifo(tmp_path / "go")
    shows = f"$({VALUE.format('$GRADFS_HELD_PATH/weights')}) $(cat $GRADFS_HELD_PATH/version)"
    size = "$(stat -L -c %s $GRADFS_HELD_PATH/hf/model.safetensors)"
    command = f'echo begun > {tmp_path}/begun; read go < {tmp_path}/go; echo "$GRADFS_VERSION {shows} {size}" > {tmp_path}/said'
    one = follow(model.model, "--once", "--exec", command)
    publish(model)
    eventually(lambda: lines(tmp_path / "begun"))
    publish(model, 20)
    assert not (model.model / "versions" / "1").exists()
    (tmp_path / "go").write_text("\n")
    ended(one)
    size = (model.model / "weights.safetensors").stat().st_size
    version, value, number, held = lines(tmp_path / "said")
    assert (version, value, number) == ("1", "1", "1") and abs(int(held) - size) < 64


def test_follow_skips_versions_that_come_and_go_meanwhile(model, follow, tmp_path):
    os.mkfifo(tmp_path / "go")
    follow(model.model, "--exec", f"echo $GRADFS_VERSION >> {tmp_path}/said; read go < {tmp_path}/go")
    publish(model)
    eventually(lambda: lines(tmp_path / "said") == ["1"])
    publish(model, 5)
    (tmp_path / "go").write_text("\n")
    eventually(lambda: lines(tmp_path / "said") == ["1", "6"])


def test_follow_ends_with_a_failure_that_names_the_version(model, follow):
    one = follow(model.model, "--exec", "exit 7")
    publish(model)
    _, err = ended(one, 1)
    assert err == f"gradfs: error: version 1 of {model.model}: the command has ended with status 7\n"


def test_follow_repeats_what_failed_if_it_is_told_to(model, follow, tmp_path):
    one = follow(model.model, "--once", "--retries", 1, "--exec", f"mkdir {tmp_path}/first && exit 3; echo $GRADFS_VERSION")
    publish(model)
    out, err = ended(one)
    assert out == "1\n" and "retry 1 of 1 in 1 s" in err and "status 3" in err


def test_follow_ends_a_command_that_takes_too_long_with_all_its_processes(model, follow, tmp_path):
    command = f"trap '' TERM; sleep 1000 & echo $! > {tmp_path}/pid; wait; wait"
    quick = f"echo $$ > {tmp_path}/pid; exec sleep 1000"
    for one in (quick, command):
        process = follow(model.model, "--timeout", "0.5", "--exec", one)
        publish(model)
        _, err = ended(process, 1)
        assert "the command took more than 0.5 s" in err and f"version {model.version()} of" in err
        (pid,) = lines(tmp_path / "pid")
        eventually(lambda: not there(pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_follow_ends_its_command_at_a_signal(model, follow, tmp_path, number):
    waiting = follow(model.model)
    waiting.send_signal(number)
    ended(waiting, 128 + number)
    command = f"trap 'echo asked > {tmp_path}/asked; exit 0' {int(number)}; sleep 1000 & echo $! > {tmp_path}/pid; wait"
    process = follow(model.model, "--exec", command)
    publish(model)
    eventually(lambda: lines(tmp_path / "pid"))
    process.send_signal(number)
    assert ended(process, 128 + number) == ("", "")
    assert lines(tmp_path / "asked") == ["asked"]
    eventually(lambda: not there(lines(tmp_path / "pid")[0]))


class Server(ThreadingHTTPServer):
    """It answers with these statuses, and keeps what it was sent."""

    def __init__(self, *statuses):
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses, self.got, self.go_on = list(statuses), [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/reload"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        value = float(array(Path(body["held"]) / "weights")[0])
        self.server.got.append((self.path, self.headers["content-type"], body, value))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 0:
            self.server.go_on.wait(HANGS)
        self.send_response(status or 200)
        if status == 302:
            self.send_header("Location", self.server.url)
        self.end_headers()
        self.wfile.write(b"no memory\nfor it" if status == 500 else b"")

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    servers = []

    def start(*statuses):
        servers.append(Server(*statuses))
        return servers[-1]

    yield start
    for one in servers:
        one.go_on.set()
        one.shutdown()
        one.server_close()


def test_follow_tells_a_server_of_each_new_version(model, follow, server):
    to = server()
    follow(model.model, "--post", to.url)
    for count in (1, 2):
        fd = os.open(model.model / "publish", os.O_WRONLY)
        os.write(fd, filled(model, count).tobytes())
        os.setxattr(fd, "user.step", str(count).encode())
        os.close(fd)
        eventually(lambda: len(to.got) == count)
    for version, (path, kind, body, value) in enumerate(to.got, 1):
        assert (path, kind, value) == ("/reload", "application/json", version)
        held = body.pop("held")
        assert re.fullmatch(r"/proc/\d+/fd/\d+", held)
        path, says = f"{model.model}/versions/{version}", {"step": str(version)}
        assert body == {"model": str(model.model), "version": version, "path": path, "meta": says}


def test_follow_says_why_a_server_has_refused(model, follow, server):
    failures = [(500, "500 Internal Server Error: no memory"), (302, "302 Found"), (0, "timeout")]
    for status, words in failures:
        process = follow(model.model, "--timeout", "1", "--post", server(status).url)
        publish(model)
        _, err = ended(process, 1)
        assert f"version {model.version()} of {model.model}: POST http://127.0.0.1" in err and words in err
    to = server(503)
    process = follow(model.model, "--once", "--retries", 1, "--post", to.url)
    publish(model)
    assert "503" in ended(process)[1] and len(to.got) == 2


def test_follow_ends_while_a_server_hangs(model, follow, server):
    to = server(0)
    process = follow(model.model, "--post", to.url)
    publish(model)
    eventually(lambda: to.got)
    process.send_signal(signal.SIGTERM)
    ended(process, 128 + signal.SIGTERM)


def test_follow_ends_while_the_mount_hangs(model, follow):
    process = follow(model.model)
    pause(model.pid)
    try:
        # It looks every two seconds whether the mount is there, and now gets no answer.
        time.sleep(2.5)
        assert sum(map(there, threads(process))) > 2
        process.send_signal(signal.SIGTERM)
        # Its last thread closes its files, for which the kernel waits for the mount.
        eventually(lambda: sum(map(there, threads(process))) <= 1)
    finally:
        os.kill(model.pid, signal.SIGCONT)
    ended(process, 128 + signal.SIGTERM)


@pytest.mark.parametrize("end", ["killed", "stopped", "detached"])
def test_follow_fails_when_the_mount_has_gone(start_mount, follow, gradfs, end):
    mount = start_mount(size=BLOCK, block_size=BLOCK, reducer="assign")
    process = follow(mount.model)
    if end == "killed":
        mount.kill()
    elif end == "stopped":
        mount.stop()
    else:
        assert gradfs("unmount", "--lazy", mount.root).returncode == 0
    _, err = ended(process, 1)
    assert f"{mount.model} cannot be followed" in err and "gradfs: hint: " in err


def test_follow_refuses_what_it_cannot_do(start_mount, gradfs, tmp_path):
    mount = start_mount(size=BLOCK, block_size=BLOCK, name="one")
    mount.join("a")
    for path in (tmp_path, mount.model / "learners" / "a", mount.root / "none"):
        done = gradfs("follow", path)
        assert done.returncode in (1, 2) and str(path) in done.stderr, done.stderr
    for words, said in [
        (("--post", "https://a/b"), "use --exec 'curl"),
        (("--post", "a/b"), "http://"),
        (("--post", "http://a", "--exec", "b"), "cannot be used with"),
        (("--now", "--from", "1"), "cannot be used with"),
        (("--timeout", "0"), "above 0"),
    ]:
        done = gradfs("follow", mount.model, *words)
        assert done.returncode == 2 and said in done.stderr, done.stderr


def test_follow_of_a_mount_with_several_models_takes_a_name(start_mount, gradfs, tmp_path):
    from filetools import write_safetensors

    files = [write_safetensors(tmp_path / f"{name}.safetensors", {"w": ("F32", [1], b"\0" * 4)}) for name in "ab"]
    mount = start_mount(model=files)
    done = gradfs("follow", mount.root, "--now", "--once")
    assert done.returncode == 2 and "name one" in done.stderr
    assert ran([gradfs_binary(), "follow", mount.models[1], "--now", "--once"]).stdout == "0\n"
