"""Jobs of several processes: buffers, ranks that come and go, launchers."""

from __future__ import annotations

import json
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
    torch,
    torchrun,
    written,
)

pytestmark = needs_a_mount()

_NET = """
    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))

    def data(step, rank):
        g = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(6, 8, generator=g), torch.randn(6, 4, generator=g)
"""
_SGD = "lr=0.01, momentum=0.9, weight_decay=0.01"
_ONE_NUMBER = """
    dist.init_process_group()
    rank = dist.get_rank()
    module = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(1))})
    opt = dist.remote(torch.optim.SGD(module.parameters(), lr=1.0), module, staging=os.environ.get("STAGING", "auto"))
    def step(gradient):
        module["w"].grad = torch.full((1,), float(gradient))
        opt.step()
        return module["w"].item()
"""


class _Ranks:
    """Ranks that a test starts itself, so that it can kill and restart them."""

    def __init__(self, n: int, program: Path) -> None:
        self.n, self.program = n, program
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = str(probe.getsockname()[1])
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, **more: str) -> subprocess.Popen[bytes]:
        environ = environment(
            RANK=str(rank), WORLD_SIZE=str(self.n), LOCAL_WORLD_SIZE=str(self.n), MASTER_PORT=self.port, **more
        )
        process = subprocess.Popen([sys.executable, str(self.program)], cwd=self.program.parent, env=environ)
        self.started.append(process)
        return process

    def __enter__(self) -> _Ranks:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        from gradfs import job

        for process in self.started:
            process.kill()
            process.wait()
        parent = Path(f"/tmp/gradfs-{os.getuid()}")
        for directory in parent.glob(f"*-{self.port}"):
            job.unmount(directory / "mount")


def _until(condition: Any) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _lines(path: Path) -> list[float]:
    return [float(line) for line in path.read_text().split()] if path.exists() else []


@pytest.mark.slow
def test_float_buffers_are_averaged(tmp_path: Path) -> None:
    program = written(
        tmp_path / "program.py",
        _NET
        + """
    dist.init_process_group()
    rank = dist.get_rank()
    model = net()
    opt = dist.remote(torch.optim.SGD(model.parameters(), lr=0.1), model, staging=os.environ["STAGING"])
    for step in range(3):
        opt.zero_grad()
        x, y = data(step, rank)
        torch.nn.functional.mse_loss(model(x), y).backward()
        mine = model[1].running_mean.clone(), model[1].running_var.clone()
        opt.step()
    torch.save((mine, model.state_dict()), f"{rank}.pt")
    """,
    )
    for staging in ("copied", "mapped"):
        succeeded(launch(2, program, STAGING=staging))
        (mine, state), (others, other_state) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
        assert not torch.equal(mine[0], others[0])
        for key in state:
            assert torch.equal(state[key], other_state[key]), key
        assert torch.allclose(state["1.running_mean"], (mine[0] + others[0]) / 2, atol=1e-7)
        assert torch.allclose(state["1.running_var"], (mine[1] + others[1]) / 2, atol=1e-7)
        assert state["1.num_batches_tracked"] == 3


def test_ranks_begin_with_the_weights_of_rank_0(tmp_path: Path) -> None:
    program = written(
        tmp_path / "program.py",
        """
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(3, 3)
    first = model.weight.detach().clone()
    opt = dist.remote(torch.optim.SGD(model.parameters(), lr=0.1), model)
    torch.save((first, model.weight.detach().clone()), f"{dist.get_rank()}.pt")
    """,
    )
    succeeded(launch(2, program))
    (first, weight), (other_first, other_weight) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert not torch.equal(first, other_first)
    assert torch.equal(weight, first) and torch.equal(other_weight, first)


def test_a_killed_rank_does_not_hold_up_the_others_and_comes_back(tmp_path: Path) -> None:
    # Rank r contributes r + 1, so the difference of two versions tells who took part: -1, -2, or the mean.
    program = written(
        tmp_path / "program.py",
        _ONE_NUMBER
        + """
    log = open(f"rank{rank}.log", "a")
    before = module["w"].item()
    while not os.path.exists("enough"):
        now = step(rank + 1)
        print(now - before, file=log, flush=True)
        before = now
    print(opt.version, module["w"].item(), sep="\\n", file=open(f"end{rank}", "w"))
    """,
    )
    with _Ranks(2, program) as ranks:
        first, second = ranks.start(0), ranks.start(1)
        log = tmp_path / "rank0.log"
        _until(lambda: _lines(log).count(-1.5) >= 5)
        second.send_signal(signal.SIGKILL)
        second.wait()
        _until(lambda: _lines(log).count(-1.0) >= 5)
        count = len(_lines(tmp_path / "rank1.log"))
        again = ranks.start(1)
        _until(lambda: len(_lines(tmp_path / "rank1.log")) >= count + 5)
        (tmp_path / "enough").touch()
        assert first.wait(HANGS) == again.wait(HANGS) == 0
        steps = _lines(log)
        # A rank that ends a moment before the other leaves that one alone for its last steps.
        assert set(steps) == {-1.5, -1.0}
        version, weight = _lines(tmp_path / "end0")
        assert version >= len(steps) and weight <= sum(steps)


@pytest.mark.slow
def test_rank_0_that_is_restarted_finds_the_job_and_changes_no_setting(tmp_path: Path) -> None:
    program = written(
        tmp_path / "program.py",
        """
    dist.init_process_group()
    rank = dist.get_rank()
    module = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(1))})
    opt = dist.remote(torch.optim.SGD(module.parameters(), lr=1.0), module)
    log = open(f"rank{rank}.log", "a")
    for i in range(10**9):
        if os.path.exists("enough"):
            break
        opt.param_groups[0]["lr"] = 1.0 if i < 3 else 0.5
        module["w"].grad = torch.ones(1)
        opt.step()
        print(opt.status()["control"]["learning_rate"], file=log, flush=True)
    """,
    )
    with _Ranks(2, program) as ranks:
        first, second = ranks.start(0), ranks.start(1)
        log = tmp_path / "rank1.log"
        _until(lambda: _lines(log).count(0.5) >= 3)
        first.kill()
        first.wait()
        count = len(_lines(tmp_path / "rank0.log"))
        again = ranks.start(0)
        _until(lambda: len(_lines(tmp_path / "rank0.log")) >= count + 10)
        (tmp_path / "enough").touch()
        assert again.wait(HANGS) == second.wait(HANGS) == 0
        assert set(_lines(tmp_path / "rank0.log")[count:]) == {0.5}


@pytest.mark.parametrize(
    "ends, staging",
    [
        ("killed", "mapped"),
        pytest.param("raises", "mapped", marks=pytest.mark.slow),
        pytest.param("killed", "copied", marks=pytest.mark.slow),
        pytest.param("raises", "copied", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_in_the_middle_of_backward_leaves_no_half_step_and_comes_back(
    ends: str, staging: str, tmp_path: Path
) -> None:
    """The weights are those of a reference that applies the same contributions."""
    program = written(
        tmp_path / "program.py",
        f"""
    dist.init_process_group()
    rank = dist.get_rank()
    model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(320, 320), torch.nn.Tanh())])
    sgd = torch.optim.SGD(model.parameters(), {_SGD})
    first = [p.detach().clone() for p in model.parameters()]
    opt = dist.remote(sgd, model, staging=os.environ["STAGING"])
    torch.save(first, "first.pt")
    def ends(_):
        if os.environ["ENDS"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("in the middle of backward")
    for step in range(10**9):
        if os.path.exists("enough"):
            break
        if rank == 1 and step == 5 and "ENDS" in os.environ:
            model[0].weight.register_post_accumulate_grad_hook(ends)
        opt.zero_grad()
        x = torch.randn(4, 320, generator=torch.Generator().manual_seed(2 * opt.version + rank))
        (model(x) - 1).square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        opt.step()
        torch.save((gradients, [p.detach().clone() for p in model.parameters()]), "new")
        os.rename("new", f"{{rank}}-{{opt.version}}.pt")
    """.replace('"new"', 'f"new{rank}"'),
    )

    def steps(rank: int) -> set[int]:
        return {int(file.stem.partition("-")[2]) for file in tmp_path.glob(f"{rank}-*.pt")}

    with _Ranks(2, program) as ranks:
        first, second = ranks.start(0, STAGING=staging), ranks.start(1, STAGING=staging, ENDS=ends)
        assert second.wait(HANGS) == (-signal.SIGKILL if ends == "killed" else 1)
        _until(lambda: len(steps(0) - steps(1)) >= 3)
        again = ranks.start(1, STAGING=staging)
        _until(lambda: len(steps(1)) >= 8)
        (tmp_path / "enough").touch()
        assert first.wait(HANGS) == again.wait(HANGS) == 0
    assert len(steps(1) & set(range(6))) == 5, "its steps before that count"
    assert steps(0) == set(range(1, len(steps(0)) + 1)), "the other one takes part in every version"
    reference = [torch.nn.Parameter(p) for p in torch.load(tmp_path / "first.pt")]
    sgd = torch.optim.SGD(reference, **eval(f"dict({_SGD})"))
    largest = 0.0
    for version in sorted(steps(0)):
        logged = [torch.load(tmp_path / f"{rank}-{version}.pt") for rank in range(2) if version in steps(rank)]
        for p, *gradients in zip(reference, *[gradients for gradients, _ in logged]):
            p.grad = sum(gradients) / len(gradients)
        sgd.step()
        numbers = [n for p in reference for n in (p, p.grad, sgd.state[p]["momentum_buffer"])]
        largest = max([largest, *[float(n.detach().abs().max()) for n in numbers]])
        for p, *seen in zip(reference, *[weights for _, weights in logged]):
            # A step rounds fewer than 16 times.
            assert all((p - q).abs().max() <= 16 * version * 2.0**-24 * largest for q in seen), version


@pytest.mark.slow
def test_a_slow_evaluation_of_one_rank_ends_nobody(tmp_path: Path) -> None:
    program = written(
        tmp_path / "program.py",
        _ONE_NUMBER
        + """
    if rank == 0:
        (opt.files.model / "control" / "timeout").write_text("0.3\\n")
    for i in range(4):
        if i == 2 and rank == 0:
            time.sleep(1.5)
        step(1)
    print(opt.version)
    """,
    )
    for staging in ("copied", "mapped"):
        out = succeeded(launch(2, program, STAGING=staging))
        assert "[0] 4" in out and "[1] 4" in out


@pytest.mark.slow
def test_torchrun_starts_a_job_and_leaves_nothing(tmp_path: Path) -> None:
    program = written(
        tmp_path / "program.py",
        _ONE_NUMBER + "\n    sys.stdout.write(f'{rank} {opt.files.model.parent} {step(2 * rank)}\\n')\n",
    )
    out = succeeded(torchrun(2, program)).split()
    assert out.count("-1.0") == 2
    mount = next(word for word in out if word.startswith("/"))
    assert mount not in mounts() and not Path(mount).exists()


@pytest.mark.slow
def test_srun_starts_a_job(tmp_path: Path) -> None:
    program = written(tmp_path / "program.py", _ONE_NUMBER + "\n    sys.stdout.write(f'{rank} {step(2 * rank)}\\n')\n")
    code = f"""
import os, subprocess, sys
names = {{"SLURM_NTASKS": "2", "SLURM_JOB_ID": "test-{os.getpid()}", "SLURM_NNODES": "1"}}
places = [{{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}} for i in range(2)]
command = [sys.executable, {str(program)!r}]
ranks = [subprocess.Popen(command, env={{**os.environ, **names, **place}}) for place in places]
sys.exit(max(rank.wait() for rank in ranks))
"""
    out = succeeded(run([sys.executable, "-c", code], tmp_path))
    assert sorted(out.splitlines()) == ["0 -1.0", "1 -1.0"]


@pytest.mark.slow
def test_ray_starts_a_job(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch", reason="ray[train] is not installed")
    program = written(
        tmp_path / "program.py",
        """
    def loop(config):
        dist.init_process_group()
        rank = dist.get_rank()
        module = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(1))})
        opt = dist.remote(torch.optim.SGD(module.parameters(), lr=1.0), module)
        module["w"].grad = torch.full((1,), 2.0 * rank)
        opt.step()
        with open(f"{config['out']}/{rank}", "w") as out:
            print(module["w"].item(), file=out)
        dist.destroy_process_group()

    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer
    workers = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    TorchTrainer(loop, train_loop_config={"out": os.getcwd()}, scaling_config=workers).fit()
    """,
    )
    succeeded(run([sys.executable, str(program)], tmp_path, RAY_USAGE_STATS_ENABLED="0"))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["-1.0\n", "-1.0\n"]


@pytest.mark.slow
def test_gradfs_run_gives_the_learners(tmp_path: Path, start: Any) -> None:
    from gradfs import job

    model = start({"w": torch.zeros(1)}, "--learners", "2")
    program = written(
        tmp_path / "program.py",
        _ONE_NUMBER + "\n    sys.stdout.write(f'{rank} {opt.files.learner.name} {step(2 * rank)}\\n')\n",
    )
    out = succeeded(run([job.binary(), "run", "-n", "2", str(model), "--", sys.executable, str(program)], tmp_path))
    assert sorted(out.splitlines()) == ["[0] 0 run-0 -1.0", "[1] 1 run-1 -1.0"]
    assert json.loads((Path(model) / "status.json").read_text())["control"]["learning_rate"] == "1"


def test_processes_on_several_hosts_need_a_registry(tmp_path: Path) -> None:
    program = written(tmp_path / "program.py", _ONE_NUMBER)
    environ = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    done = run([sys.executable, str(program)], tmp_path, **environ)
    assert done.returncode == 1
    assert "2 of 4 processes are on this host: set GRADFS_REGISTRY" in done.stderr


@pytest.mark.slow
def test_processes_on_several_hosts_train_over_shards(tmp_path: Path) -> None:
    from gradfs import job

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    shard = subprocess.Popen([job.binary(), "shard", "--listen", address], env=environment(GRADFS_REGISTRY=address))
    try:
        program = written(
            tmp_path / "program.py",
            _ONE_NUMBER
            + """
    sys.stdout.write(f'{rank} {step(2 * rank)} {step(2 * rank)}\\n')
    seen = []
    for sample in dist.share(range(60), shuffle=False):
        seen.append(sample)
        step(0)
        if rank == 1 and len(seen) == 4:
            break
        time.sleep(0.1)
    print(seen, file=open(f"seen{rank}", "w"))
    """,
        )
        code = f"""
import os, subprocess, sys
names = {{"GRADFS_REGISTRY": {address!r}, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}}
places = [{{"MASTER_PORT": "7", "RANK": str(i), "TMPDIR": f"{tmp_path}/host{{i}}"}} for i in range(2)]
command = [sys.executable, {str(program)!r}]
ranks = [subprocess.Popen(command, env={{**os.environ, **names, **place}}) for place in places]
sys.exit(max(rank.wait() for rank in ranks))
"""
        for i in range(2):
            (tmp_path / f"host{i}").mkdir()
        out = succeeded(run([sys.executable, "-c", code], tmp_path))
        assert sorted(out.splitlines()) == ["0 -1.0 -2.0", "1 -1.0 -2.0"]
        first, second = (json.loads((tmp_path / f"seen{rank}").read_text()) for rank in range(2))
        assert second == [1, 3, 5, 7], "it leaves"
        alone = first.index(next(sample for sample in first if sample % 2))
        assert first[:alone] == [*range(0, 2 * alone, 2)], "they share the samples"
        assert first[alone:] == [*range(first[alone], 60)], "what is left is of the one that is left"
        assert not [mount for mount in mounts() if mount.startswith(str(tmp_path))]
    finally:
        shard.terminate()
        shard.wait()


def test_a_job_that_nobody_starts_is_a_timeout_that_says_where(tmp_path: Path) -> None:
    program = written(tmp_path / "program.py", _ONE_NUMBER)
    environ = {"RANK": "1", "WORLD_SIZE": "2", "GRADFS_JOB_DIR": str(tmp_path / "job"), "GRADFS_START_TIMEOUT": "0.2"}
    done = run([sys.executable, str(program)], tmp_path, **environ)
    assert done.returncode == 1
    assert f"rank 0 has started no job in {tmp_path / 'job'}" in done.stderr


@pytest.mark.slow
def test_dataloader_workers_and_interrupts_leave_nothing(tmp_path: Path) -> None:
    program = written(
        tmp_path / "program.py",
        _ONE_NUMBER
        + """
    from torch.utils.data import DataLoader
    for i, batch in enumerate(DataLoader(range(10**6), batch_size=2, num_workers=2)):
        step(1)
        if i == 5:
            open(f"runs{rank}", "w").close()
    """,
    )
    command = [sys.executable, "-m", "gradfs.launch", "-n", "2", str(program)]
    environ = environment(TMPDIR=str(tmp_path))
    launcher = subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE)
    _until(lambda: (tmp_path / "runs0").exists() and (tmp_path / "runs1").exists())
    mine = [mount for mount in mounts() if mount.startswith(str(tmp_path))]
    assert len(mine) == 1
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=HANGS)
    assert launcher.returncode == 128 + signal.SIGINT or launcher.returncode == 1, said
    assert b"KeyboardInterrupt" in said
    assert mine[0] not in mounts()
