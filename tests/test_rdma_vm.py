"""The virtual machines that RDMA is tested in (scripts/rdma-vm): both providers, one machine and two, and how they end.

Skipped with the reason where they cannot be had.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from rdmavm import CANNOT_BE_HAD, CRASHED, OUT_OF_TIME, SCRIPT, both_providers, vm  # noqa: F401

pytestmark = pytest.mark.rdma_vm


def call(*words, timeout=600, **environment):
    """Runs scripts/rdma-vm for what ends without a machine."""
    return subprocess.run(
        [SCRIPT, *words], env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=timeout, check=False,
    )


def machines_of(pid):
    """Process IDs of the qemus that `pid` has started."""
    found = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(pid)], capture_output=True, text=True, timeout=10)
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "qemu" in line]


@both_providers
def test_a_machine_has_rdma_fuse_and_this_root(vm, provider):  # noqa: F811
    """A device whose port is active, a connection by rdma_cm with itself, and programs that were built here."""
    done = vm.run(
        f"""
        [ -c /dev/fuse ] && [ -x {SCRIPT} ] && [ "$PWD" = {Path.cwd()} ] || exit 3
        ibv_devinfo -d $RDMA_DEVICE
        rping -s -a $HOST_ADDRESS -C 5 -v &
        listening && rping -c -a $HOST_ADDRESS -C 5 && wait $! || exit 4
        echo "to stderr" >/dev/stderr
        (sleep 100; echo "too late") &
        exit 7
        """,
        provider=provider,
    )
    assert done.code == 7, done
    assert re.search(rf"hca_id:\s+{provider}0\n", done.out) and "PORT_ACTIVE" in done.out, done
    if provider == "rxe":
        assert re.search(r"active_mtu:\s+4096", done.out), done
    assert len(re.findall(r"^server ping data: rdma-ping-\d: ", done.out, re.MULTILINE)) == 5, done
    assert "to stderr\n" in done.err and "too late" not in done.out, done


def test_two_machines_reach_each_other_by_rdma_cm(vm):  # noqa: F811
    """What one sends is what the other gets: rping compares, a hundred times. With rxe; with siw it hangs now and then."""
    done = vm.run(
        """
        case $HOST_NAME in
        a) rping -s -a a -C 100 -S 4096 -V & listening; meet rping; wait $! ;;
        b) meet rping; rping -c -a a -C 100 -S 4096 -V && echo "$HOST_ADDRESS done" ;;
        esac
        """,
        two=True,
    )
    assert done.code == 0 and done.of["b"].out == "10.0.0.2 done\n", done


def test_a_machine_that_crashes_is_tried_once_more(vm, tmp_path):  # noqa: F811
    script = "[ -e /share/tried ] || { touch /share/tried; echo c >/proc/sysrq-trigger; }; exit 5"
    done = vm.run(script, provider="none", share=tmp_path)
    assert done.code == 5 and (tmp_path / "tried").exists(), done
    assert re.search(r"crashed after .*Kernel panic.*trying once more", done.notes), done


def test_a_command_that_takes_too_long_is_ended(vm):  # noqa: F811
    done = vm.run("echo begun; sleep 100", provider="none", time_limit=6)
    assert (done.code, done.out) == (OUT_OF_TIME, "begun\n"), done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_machine_is_left_behind(vm, number):  # noqa: F811
    process = subprocess.Popen([SCRIPT, "run", "--two", "--", "sleep", "100"], stderr=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 600
        while len(pids := machines_of(process.pid)) < 2:
            assert process.poll() is None and time.monotonic() < give_up
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(600) == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    finally:
        process.kill()
        process.wait()
    give_up = time.monotonic() + 600
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < give_up, left
        time.sleep(0.05)


def test_a_setup_that_is_interrupted_leaves_nothing_half(tmp_path):
    process = subprocess.Popen(
        [SCRIPT, "setup"], env={**os.environ, "GRADFS_RDMA_VM": str(tmp_path)}, stderr=subprocess.DEVNULL
    )
    try:
        give_up = time.monotonic() + 600
        while not list(tmp_path.glob("partial.*/*")):
            if process.poll() == CANNOT_BE_HAD:
                pytest.skip("this machine cannot have virtual machines")
            assert process.poll() is None and time.monotonic() < give_up
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 130
    finally:
        process.kill()
        process.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    done = call("run", "--", "true", GRADFS_RDMA_VM=str(tmp_path))
    assert done.returncode == CRASHED and "not set up yet: scripts/rdma-vm setup" in done.stderr, done


def test_where_it_cannot_be_had_one_line_says_why(tmp_path):
    (tmp_path / "python3").symlink_to("/usr/bin/python3")
    done = call("setup", GRADFS_RDMA_VM=str(tmp_path / "cache"), PATH=str(tmp_path))
    assert done.returncode == CANNOT_BE_HAD and len(done.stderr.splitlines()) == 1, done
    assert "apt-get is missing" in done.stderr, done


def test_a_wish_that_makes_no_sense_is_refused():
    for words in (["run"], ["run", "--provider", "mlx5", "--", "true"], ["run", "--time-limit", "0", "--", "true"]):
        done = call(*words)
        assert done.returncode == 2 and "usage:" in done.stderr, done
