"""`python -m gradfs.launch`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch_support import (
    HANGS,
    environment,
    launch,
    mounts,
    needs_a_mount,
    run,
    succeeded,
    written,
)

from gradfs import convert, job
from gradfs.errors import GradfsError

pytestmark = needs_a_mount()


def _plain(to: Path, code: str) -> Path:
    to.write_text("import os, signal, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n" + code)
    return to


def _until(condition: Any) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_ranks_have_the_environment_of_torchrun(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    program = _plain(
        tmp_path / "p.py", f"print(*[os.environ[n] for n in {names}], sys.argv[1:])\nint(os.environ['MASTER_PORT'])"
    )
    out = succeeded(launch(2, program, "--x", "1"))
    assert sorted(out.splitlines()) == ["[0] 0 0 2 2 127.0.0.1 ['--x', '1']", "[1] 1 1 2 2 127.0.0.1 ['--x', '1']"]


@pytest.mark.slow
def test_lines_have_the_rank_in_front_unless_told_otherwise(tmp_path: Path) -> None:
    program = _plain(tmp_path / "p.py", "sys.stdout.write('out\\n'); sys.stderr.write('err\\n')")
    done = launch(2, program)
    assert sorted(done.stdout.splitlines()) == ["[0] out", "[1] out"]
    assert sorted(done.stderr.splitlines()) == ["[0] err", "[1] err"]
    assert launch(2, program, options=("--no-prefix",)).stdout == "out\nout\n"
    assert launch(1, program).stdout == "out\n"


def test_the_first_failure_ends_the_others_with_its_status(tmp_path: Path) -> None:
    program = _plain(
        tmp_path / "p.py",
        "if rank == 1:\n    while not os.path.exists('waits'):\n        time.sleep(0.01)\n    sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (Path('ended').touch(), sys.exit(0)))\n"
        "Path('waits').touch()\ntime.sleep(1000)\n",
    )
    done = launch(2, program)
    assert done.returncode == 7
    assert "rank 1 ended by status 7" in done.stderr
    assert (tmp_path / "ended").exists()


@pytest.mark.slow
def test_whoever_does_not_end_within_the_grace_is_killed(tmp_path: Path) -> None:
    program = _plain(
        tmp_path / "p.py",
        "if rank == 1:\n    while not os.path.exists('waits'):\n        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nPath('waits').touch()\ntime.sleep(1000)\n",
    )
    done = launch(2, program, options=("--grace", "0.2"))
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 ended by signal 9" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_go_on_to_all_ranks(number: int, tmp_path: Path) -> None:
    program = _plain(
        tmp_path / "p.py",
        f"signal.signal({int(number)}, lambda *_: (Path(f'got{{rank}}').touch(), sys.exit(0)))\n"
        f"Path(f'waits{{rank}}').touch()\ntime.sleep(1000)\n",
    )
    launcher = subprocess.Popen(
        [sys.executable, "-m", "gradfs.launch", "-n", "2", str(program)], cwd=tmp_path, env=environment()
    )
    _until(lambda: all((tmp_path / f"waits{rank}").exists() for rank in range(2)))
    launcher.send_signal(number)
    assert launcher.wait(HANGS) == (128 + number if number == signal.SIGTERM else 0)
    assert all((tmp_path / f"got{rank}").exists() for rank in range(2))


def test_a_signal_that_is_ignored_from_the_start_ends_nobody(tmp_path: Path) -> None:
    program = _plain(
        tmp_path / "p.py", "Path(f'waits{rank}').touch()\nwhile not Path('go').exists():\n    time.sleep(0.02)\n"
    )
    launcher = subprocess.Popen(
        ["nohup", sys.executable, "-m", "gradfs.launch", "-n", "2", str(program)], cwd=tmp_path, env=environment()
    )
    _until(lambda: all((tmp_path / f"waits{rank}").exists() for rank in range(2)))
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert launcher.poll() is None
    (tmp_path / "go").touch()
    assert launcher.wait(HANGS) == 0


def test_ranks_meet_at_a_barrier_before_the_job_begins(tmp_path: Path) -> None:
    program = _plain(
        tmp_path / "p.py",
        """
import gradfs.torch as dist
dist.init_process_group()
if rank == 0:
    time.sleep(0.5)
    Path('data').touch()
dist.barrier()
assert Path('data').exists()
dist.barrier()
""",
    )
    succeeded(launch(2, program))


_TRAINS = """
    model = torch.nn.Linear(2, 2)
    opt = dist.remote(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
        opt.zero_grad()
    print(opt.files.model.parent)
    torch.save(model.state_dict(), f"{dist.get_rank()}.pt")
"""


def test_the_job_is_saved_at_the_end_and_unmounted(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from torch_support import torch

    model = "torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))"
    code = _TRAINS.replace("torch.nn.Linear(2, 2)", model).replace("torch.ones(1, 2)", "torch.eye(2)")
    out = succeeded(launch(2, written(tmp_path / "p.py", code), options=("--save", "snapshot")))
    saved = load_file(tmp_path / "snapshot" / "model.safetensors")
    # The checkpoint that is made of it has counters, too.
    assert convert.main([str(tmp_path / "snapshot"), str(tmp_path / "back.pt")]) == 0
    converted = torch.load(tmp_path / "back.pt")["model"]
    for key, value in torch.load(tmp_path / "0.pt").items():
        assert torch.equal(converted[key], value), key
        assert torch.equal(saved[key], value) or key == "0.num_batches_tracked"
    assert converted["0.num_batches_tracked"] == 3
    assert out.split()[1] not in mounts() and not Path(out.split()[1]).parent.exists()


@pytest.mark.slow
def test_the_job_is_unmounted_when_a_rank_fails(tmp_path: Path) -> None:
    program = written(tmp_path / "p.py", _TRAINS + "\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    done = launch(2, program, TMPDIR=str(tmp_path))
    assert done.returncode == 128 + signal.SIGKILL
    assert not [mount for mount in mounts() if mount.startswith(str(tmp_path))]


@pytest.mark.slow
def test_a_job_directory_that_is_given_stays(tmp_path: Path) -> None:
    program = written(tmp_path / "p.py", _TRAINS)
    out = succeeded(launch(2, program, options=("--job-dir", str(tmp_path / "job"))))
    assert str(tmp_path / "job" / "mount") in out
    assert (tmp_path / "job" / "gradfs.log").exists() and (tmp_path / "job" / "model.safetensors").exists()
    assert str(tmp_path / "job" / "mount") not in mounts()
    succeeded(launch(2, program, options=("--job-dir", str(tmp_path / "job"))))


@pytest.mark.slow
def test_a_job_that_goes_on_in_the_directory_is_left_alone(tmp_path: Path) -> None:
    waits = _TRAINS + "\n    open(f'waits{dist.get_rank()}', 'w').close()\n    time.sleep(1000)\n"
    program, options = written(tmp_path / "p.py", waits), ["--job-dir", str(tmp_path / "job")]
    command = [sys.executable, "-m", "gradfs.launch", "-n", "2", *options, str(program)]
    launcher = subprocess.Popen(command, cwd=tmp_path, env=environment())
    try:
        _until(lambda: all((tmp_path / f"waits{rank}").exists() for rank in range(2)))
        done = launch(2, program, options=tuple(options))
        assert done.returncode == 1 and "a job runs in" in done.stderr
    finally:
        launcher.terminate()
        launcher.wait(HANGS)
    assert str(tmp_path / "job" / "mount") not in mounts()


@pytest.mark.slow
def test_what_a_killed_launcher_has_left_makes_way(tmp_path: Path) -> None:
    code = _TRAINS + "\n    if os.path.exists('again'):\n        sys.exit()\n"
    code += "    open('waits', 'w').close()\n    time.sleep(1000)\n"
    program, options = written(tmp_path / "p.py", code), ("--job-dir", str(tmp_path / "job"))
    command = [sys.executable, "-m", "gradfs.launch", "-n", "1", *options, str(program)]
    launcher = subprocess.Popen(command, cwd=tmp_path, env=environment())
    try:
        _until(lambda: (tmp_path / "waits").exists())
    finally:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        for process in (launcher.pid, *map(int, children)):
            os.kill(process, signal.SIGKILL)
        launcher.wait()
    assert str(tmp_path / "job" / "mount") in mounts()
    (tmp_path / "again").touch()
    succeeded(launch(1, program, options=options))
    assert str(tmp_path / "job" / "mount") not in mounts()


def test_a_rank_of_another_launcher_becomes_the_program(tmp_path: Path) -> None:
    program = _plain(
        tmp_path / "p.py", "print(rank, os.environ['WORLD_SIZE'], os.getpid() == int(os.environ['STARTED']))"
    )
    code = "import os, sys; os.environ['STARTED'] = str(os.getpid()); "
    code += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", code, "-m", "gradfs.launch", "-n", "8", str(program)]
    assert succeeded(run(command, tmp_path, RANK="3", WORLD_SIZE="5")) == "3 5 True\n"


def test_ranks_and_hosts_are_read_from_each_launcher() -> None:
    assert job.world({}) == job.World(0, 1, 0, 1)
    assert job.world({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == job.World(
        3, 4, 1, 2
    )
    slurm = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "2",
    }
    slurm = {**slurm, "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1"}
    assert job.world(slurm) == job.World(3, 4, 1, 2)
    # Without --ntasks-per-node, and with nodes that have not the same.
    del slurm["SLURM_NTASKS_PER_NODE"]
    assert job.world(slurm) == job.World(3, 4, 1, 2)
    for node, here in enumerate([2, 2, 1]):
        slurm.update(SLURM_STEP_TASKS_PER_NODE="2(x2),1", SLURM_NODEID=str(node))
        assert job.world({**slurm, "SLURM_NTASKS": "5", "SLURM_NNODES": "3"}).local_size == here
    assert job.world({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}) == job.World(1, 2, 1, 2)
    with pytest.raises(GradfsError, match="WORLD_SIZE=2"):
        job.world({"RANK": "2", "WORLD_SIZE": "2"})
    # Nobody says how many ranks are on this host.
    ranks = {"RANK": "1", "WORLD_SIZE": "2"}
    for here in ("localhost", "127.0.0.1", socket.gethostname()):
        assert job.world({**ranks, "MASTER_ADDR": here}) == job.World(1, 2, 1, 2)
    with pytest.raises(GradfsError, match="set LOCAL_WORLD_SIZE and LOCAL_RANK"):
        job.world({**ranks, "MASTER_ADDR": "192.0.2.1"})
    assert not job.world({**ranks, "MASTER_ADDR": "192.0.2.1", "LOCAL_WORLD_SIZE": "1"}).on_one_host
    with pytest.raises(GradfsError, match="no number"):
        job.world({"RANK": "first", "WORLD_SIZE": "2"})


def test_the_program_is_found_or_the_error_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.binary({"GRADFS_BIN": "/x/gradfs"}) == "/x/gradfs"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(GradfsError, match="GRADFS_BIN"):
        job.binary({})


def test_a_failing_start_says_what_gradfs_said(tmp_path: Path) -> None:
    program = written(tmp_path / "p.py", _TRAINS)
    done = launch(1, program, GRADFS_BIN="/bin/false")
    assert done.returncode != 0 and "gradfs up failed" in done.stderr
    assert "no-such-option" in launch(
        1, written(tmp_path / "q.py", _TRAINS.replace("model)", "model, settings={'no_such_option': 1})"))
    ).stderr.replace("_", "-")
