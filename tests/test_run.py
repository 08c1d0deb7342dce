"""`gradfs run`: processes of learners, their directories, signals, failures, and how many there are."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import gradfs_binary
from filetools import BLOCK, eventually

SIZE = 4 * BLOCK

# What most learners do: a few steps in Python, from the environment alone.
STEPS = """
import os, sys, time
me = os.environ["GRADFS_LEARNER"]
for step in range(int(sys.argv[1])):
    open(f"{me}/weights", "rb").close()
    with open(f"{me}/gradients", "wb") as file:
        file.write(bytes(SIZE))
""".replace("SIZE", str(SIZE))


@pytest.fixture
def mount(start_mount):
    return start_mount("--no-passthrough", size=SIZE, block_size="64KiB", reducer="sum")


@pytest.fixture
def begin():
    """Starts `gradfs run`, and ends what is left of it."""
    running = []

    def start(*words, **options):
        command = [gradfs_binary(), "run", *map(str, words)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(300)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(300)
        process.stdout.close()
        process.stderr.close()


def finish(process, status=0, timeout=300):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == status, (process.returncode, out, err)
    return out, err


def learners(mount):
    return sorted(os.listdir(mount.model / "learners"))


def shell(script):
    return ["--", "sh", "-c", script]


def python(code, *words):
    return ["--", sys.executable, "-c", code, *map(str, words)]


def ready(process, count):
    """The lines of `count` processes that say that they are ready."""
    return sorted(process.stdout.readline() for _ in range(count))


# A process that ends by nothing but SIGKILL.
STUBBORN = "trap '' TERM INT; echo ready; while :; do sleep 0.05; done"
# A process that says by which signal it is asked, and ends well.
POLITE = (
    "for s in USR1 USR2 HUP; do trap \"echo $s\" $s; done; trap 'echo INT; exit 0' INT; trap 'echo TERM; exit 0' TERM;"
    " echo ready; while :; do sleep 0.05; done"
)


@pytest.mark.also_on_network
def test_run_starts_a_process_for_each_learner(mount, begin):
    mount.control("learners", 3)
    show = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GRADFS_LEARNER; cat"
    script = f'{show}; test -d "$GRADFS_LEARNER" || exit 9; exec "{sys.executable}" -c "$0" 4'
    out, err = finish(begin("-n", 3, mount.model, *shell(script), STEPS))
    expected = [f"[{rank}] {rank} {rank} 3 3 {mount.model}/learners/run-{rank}" for rank in range(3)]
    assert sorted(out.splitlines()) == expected
    assert err == ""
    assert mount.version() >= 4 and mount.status()["contributions"] == 12
    assert learners(mount) == [], "they leave"


def test_run_starts_a_process_for_each_learner__and_says_where_they_meet(mount, begin, monkeypatch):
    show = shell("echo $MASTER_ADDR $MASTER_PORT")
    both = finish(begin("-n", 2, "--no-prefix", mount.model, *show))[0].splitlines()
    assert len(set(both)) == 1
    address, port = both[0].split()
    with socket.create_server((address, int(port))):
        assert address == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert finish(begin("-n", 1, mount.model, *show))[0] == "node1 29500\n"


def test_run_starts_a_process_for_each_learner__whose_first_step_takes_longer_than_the_lease(start_mount, begin):
    mount = start_mount(size=SIZE, block_size="64KiB", reducer="sum", learners=2, lease=1, patience=600)
    script = f'test $RANK = 0 || sleep 4; exec "{sys.executable}" -c "$0" 2'
    finish(begin("-n", 2, mount.model, *shell(script), STEPS))
    assert mount.status()["contributions"] == 4 and "lease" not in mount.stderr()


def test_run_starts_a_process_for_each_learner__from_within(mount, begin):
    """A path that is relative or a link leads to the model, too; other names, no `--`, one process without a prefix."""
    out, _ = finish(begin("-n", 1, "--name", "mine", ".", "sh", "-c", "echo $GRADFS_LEARNER", cwd=mount.model))
    assert out == f"{mount.model}/learners/mine-0\n"
    out, _ = finish(begin("-n", 1, "model", "--no-prefix", "echo", "-v", "--", "--help", cwd=mount.root))
    assert out == "-v -- --help\n", "options behind the command are its own"
    out, _ = finish(begin("-n", 1, "model", "--", "pwd", cwd=mount.root))
    assert out == f"{mount.root}\n"


def test_run_puts_the_rank_before_each_line(mount, begin):
    script = "echo out; echo err >&2; printf 'no end'"
    out, err = finish(begin("-n", 2, mount.model, *shell(script)))
    assert sorted(out.splitlines()) == ["[0] no end", "[0] out", "[1] no end", "[1] out"]
    assert sorted(line for line in err.splitlines() if "warning" not in line) == ["[0] err", "[1] err"]
    out, err = finish(begin("-n", 2, "--no-prefix", mount.model, *shell("echo out; echo err >&2")))
    assert (out, err) == ("out\n" * 2, "err\n" * 2)


def test_run_starts_a_process_for_each_learner__where_ends_are_ignored(mount, begin):
    ignores = lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # noqa: E731
    finish(begin("-n", 2, mount.model, *shell("sleep 0.1"), preexec_fn=ignores))
    finish(begin("-n", 2, mount.model, *shell("exit 3"), preexec_fn=ignores), status=3)


def test_run_forwards_signals(mount, begin):
    process = begin("-n", 2, mount.model, *shell(POLITE))
    assert ready(process, 2) == ["[0] ready\n", "[1] ready\n"]
    for name in ("USR1", "USR2", "HUP", "TERM"):
        process.send_signal(getattr(signal, f"SIG{name}"))
        assert ready(process, 2) == [f"[0] {name}\n", f"[1] {name}\n"]
    finish(process)
    assert learners(mount) == []


def test_run_kills_after_the_grace_or_a_second_interrupt(mount, begin):
    process = begin("-n", 2, "--grace", 0.3, mount.model, *shell(STUBBORN))
    ready(process, 2)
    process.terminate()
    _, err = finish(process, 128 + signal.SIGKILL)
    assert err.count("has not ended within 0.3 s: it is killed") == 2
    process = begin("-n", 2, mount.model, *shell(STUBBORN))
    ready(process, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    finish(process, 128 + signal.SIGKILL, timeout=300)
    assert learners(mount) == []


def test_run_ends_all_when_one_fails(mount, begin):
    """The status is the first failing one's."""
    process = begin("-n", 2, mount.model, *shell(f'[ $RANK = 1 ] && {{ sleep 0.2; exit 7; }}; {POLITE}'))
    out, err = finish(process, 7)
    assert out == "[0] ready\n[0] TERM\n"
    assert "rank 1 has ended with status 7; the others are ended" in err
    _, err = finish(begin("-n", 1, mount.model, *shell("kill -9 $$")), 128 + signal.SIGKILL)
    assert "rank 0 was killed by SIGKILL" in err
    assert learners(mount) == []


def test_run_goes_on_without_those_that_it_may_drop(mount, begin):
    mount.control("learners", 2)
    script = f'[ $RANK = 1 ] && exit 7; exec "{sys.executable}" -c "$0" 5'
    _, err = finish(begin("-n", 2, "--on-failure", "drop", mount.model, *shell(script), STEPS))
    assert "rank 1 has ended with status 7; the others go on" in err
    finish(begin("-n", 2, "--on-failure", "drop", mount.model, *shell("exit 3")), 3)
    assert learners(mount) == []


@pytest.mark.also_on_network
def test_run_starts_a_failed_process_again(mount, begin, tmp_path):
    """With the same rank and directory, as another life of its learner; and no more often than it may."""
    script = f'grep incarnation $GRADFS_LEARNER/status >> {tmp_path}/$RANK; [ $(wc -l < {tmp_path}/$RANK) = 3 ] || kill -9 $$'
    script += f'; exec "{sys.executable}" -c "$0" 2'
    _, err = finish(begin("-n", 2, "--on-failure", "restart", mount.model, *shell(script), STEPS))
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == "incarnation: 1\nincarnation: 2\nincarnation: 3\n"
        assert f"rank {rank} was killed by SIGKILL; it is started again (2 of 3)" in err
    options = ("--on-failure", "restart", "--restarts", 2)
    _, err = finish(begin("-n", 1, *options, mount.model, *shell("exit 5")), 5)
    assert err.count("it is started again") == 2
    assert learners(mount) == []


def test_run_leaves_nothing_of_a_failed_process(mount, begin, tmp_path):
    """What it has left in its group goes, and so does its learner. What a process leaves that ends well stays."""
    for end, stays in [("kill -9 $$", False), ("exit 1", False), ("exit 0", True)]:
        there = tmp_path / end
        script = f"(sleep 0.4; echo > '{there}') > /dev/null 2>&1 & {end}"
        begun = begin("-n", 2, mount.model, *shell(script))
        begun.communicate(timeout=300)
        assert learners(mount) == []
        time.sleep(0.7)
        assert there.exists() == stays, end


PRINTER = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    with open(os.environ["GRADFS_LEARNER"] + "/gradients", "wb") as file:
        file.write(bytes(SIZE))
    # One write(2) each, so that lines of two processes do not mix.
    os.write(1, b"step\\n")
    os.write(2, b"error\\n")
""".replace("SIZE", str(SIZE))


@pytest.mark.parametrize("options", [[], ["--no-prefix"]])
def test_processes_outlive_run_that_is_killed(mount, begin, tmp_path, options):
    """They print and contribute, and nothing of theirs is left when they have ended."""
    process = begin("-n", 2, *options, mount.model, "--", sys.executable, "-c", PRINTER, tmp_path / "over")
    mount.wait_for_version(3)
    process.kill()
    process.wait(300)
    mount.wait_for_version(mount.version() + 20)
    assert len(learners(mount)) == 2
    (tmp_path / "over").touch()
    # Both streams end: nobody holds them any more.
    out, err = process.communicate(timeout=300)
    prefixes = [""] if options else ["[0] ", "[1] "]
    assert {line for line in out.splitlines()} == {f"{prefix}step" for prefix in prefixes}
    assert {line for line in err.splitlines() if "warning" not in line} == {f"{prefix}error" for prefix in prefixes}


def test_run_prints_a_line_of_progress_each_second(mount, begin):
    code = STEPS.replace("for step", "end = time.time() + 2.3\nfor step")
    code = code.replace("    open(", "    time.time() < end or sys.exit()\n    open(", 1)
    _, err = finish(begin("-n", 1, "--progress", mount.model, *python(code, 10**9)))
    lines = [line for line in err.splitlines() if line.startswith("gradfs: run: version ")]
    assert len(lines) >= 2, err
    assert "versions/s, stall " in lines[-1] and ", 1 learner" in lines[-1]


def test_run_says_what_is_wrong(mount, begin, tmp_path):
    """And nobody has joined then."""
    for words, status, said in [
        (["-n", 1, tmp_path, "true"], 2, "is not the directory of a model in a mount"),
        (["-n", 1, mount.root, "true"], 2, f"is a mount; its models are {mount.model}"),
        (["-n", 1, mount.root / "other", "true"], 2, f"is a mount; its models are {mount.model}"),
        (["-n", 0, mount.model, "true"], 2, "a number from 1 to 4096 is needed, or auto"),
        (["-n", 4097, mount.model, "true"], 2, "a number from 1 to 4096 is needed, or auto"),
        (["-n", 2, "--max", 4, mount.model, "true"], 2, "--max is for -n auto"),
        (["-n", 2, mount.model, "no-such-command"], 127, "there is no command no-such-command"),
        (["-n", 2, mount.model, tmp_path], 126, "cannot be started"),
        (["-n", 2, "--name", "a/b", mount.model, "true"], 1, "cannot join with mkdir"),
    ]:
        _, err = finish(begin(*words), status)
        assert said in err and "panicked" not in err, err
        assert learners(mount) == []
    mount.join("run-1")
    _, err = finish(begin("-n", 2, mount.model, "true"), 1)
    assert "a learner of the name run-1 is in the job already" in err and "--name" in err
    assert learners(mount) == ["run-1"], "the others have left again"
    mount.leave("run-1")


def test_run_warns_if_the_job_waits_for_more_learners(mount, begin):
    mount.control("learners", 3)
    _, err = finish(begin("-n", 2, mount.model, "true"))
    assert "warning: the job waits for 3 learners before its next version, and with 2 more it has 2" in err
    assert "control/learners" in err


# Contributions without end: each takes so long, and a third learner makes all of them slow.
PACED = STEPS.replace(
    "    open(",
    "    n = len(os.listdir(os.path.dirname(me)))\n    time.sleep(0.4 * max(1, n - 1) ** 2)\n    open(", 1
)


def test_run_looks_for_the_number_of_learners(start_mount, begin):
    """A second learner doubles the contributions a second, and a third one makes them fewer."""
    mount = start_mount("--no-passthrough", size=SIZE, block_size="64KiB", reducer="sum", consistency="async")
    process = begin("-n", "auto", "--max", 4, "--window", 4, "--gain", 20, mount.model, *python(PACED, 10**9))
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "stays" in line or "are the most" in line:
            break
    assert "contributions/s with 3: it stays at 2" in seen[-1], seen
    eventually(lambda: learners(mount) == ["run-0", "run-1"])
    process.terminate()
    finish(process, 128 + signal.SIGTERM)
    assert learners(mount) == []
