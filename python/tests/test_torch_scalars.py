"""Numbers that learners share, and shares of the data."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from torch_support import alone, launch, needs_a_mount, succeeded, torch, written

from gradfs import job
from gradfs.errors import GradfsError, Timeout
from gradfs.torch import process, scalars
from gradfs.torch.sharing import Share, share


class _Files:
    """Files that answer as ``all_reduce`` does, for the learners of this process."""

    def __init__(self, directory: Path, answers: list[Any]) -> None:
        self.learner = directory / "model" / "learners" / "rank0"
        self.learner.mkdir(parents=True)
        control = directory / "model" / "control"
        control.mkdir()
        (control / "patience").write_text("600\n")
        self.job([])
        self.answers, self.lines = answers, list[str]()
        self._threads: list[threading.Thread] = []

    def job(self, late: list[Any]) -> None:
        status = {"version": 7, "waits_for_learners": late, "waits_for_more_learners": 0}
        (self.learner.parent.parent / "status.json").write_text(json.dumps(status))

    def open(self, path: Path) -> int:
        assert path == self.learner / "all_reduce"
        return os.open(self.learner, os.O_RDONLY)

    def write(self, file: int, line: bytes) -> int:
        self.lines.append(line.decode())
        if isinstance(self.answers[0], OSError):
            raise self.answers.pop(0)
        return len(line)

    def pread(self, file: int, count: int, offset: int) -> bytes:
        assert offset == 0
        answer: str = self.answers.pop(0)
        return answer.encode()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(*answers: Any) -> _Files:
        fake = _Files(tmp_path, list(answers))
        attached = job.Attached(job.World(0, 2, 0, 2), tmp_path / "model", fake.learner)
        monkeypatch.setattr(process._process, "attached", attached)
        monkeypatch.setattr(process._process, "world", attached.world)
        monkeypatch.setattr(scalars.os, "write", fake.write)
        monkeypatch.setattr(scalars.os, "pread", fake.pread)
        plain = scalars.reduce
        monkeypatch.setattr(scalars, "reduce", lambda op, numbers: plain(op, numbers, fake.open))
        return fake

    return made


def test_mean_any_and_barrier_write_one_line_each(files: Any) -> None:
    fake = files("0.75\n", "1.0\n", "0.0\n", "0.0\n")
    assert scalars.mean(0.5) == 0.75
    assert scalars.any(False) is True
    assert scalars.any(False) is False
    scalars.barrier()
    assert fake.lines == ["mean 0.5\n", "max 0.0\n", "max 0.0\n", "sum 0.0\n"]


def test_all_reduce_replaces_the_elements(files: Any) -> None:
    fake = files("1.5 3\n", "7 9 11 13\n", "2\n", "4\n")
    tensor = torch.tensor([0.5, 1.0])
    scalars.all_reduce(tensor)
    assert tensor.tolist() == [1.5, 3.0]
    whole = torch.tensor([[1, 2], [3, 4]])
    scalars.all_reduce(whole, scalars.ReduceOp.AVG)
    assert whole.tolist() == [[7, 9], [11, 13]]
    one = torch.tensor(0.1)
    scalars.all_reduce(one, op=torch.distributed.ReduceOp.MAX)
    assert one.item() == 2
    scalars.broadcast(one, src=1)
    assert one.item() == 4
    assert fake.lines == [
        "sum 0.5 1.0\n",
        "mean 1.0 2.0 3.0 4.0\n",
        f"max {torch.tensor(0.1).double().item()!r}\n",
        "sum 0.0\n",
    ]


def test_what_all_reduce_does_not_do_is_refused_before_anything_is_written(files: Any) -> None:
    fake = files()
    with pytest.raises(ValueError, match="64 real numbers, and not 65"):
        scalars.all_reduce(torch.zeros(65))
    with pytest.raises(ValueError, match="product"):
        scalars.all_reduce(torch.zeros(1), op="product")
    with pytest.raises(ValueError, match="async_op"):
        scalars.all_reduce(torch.zeros(1), async_op=True)
    assert fake.lines == []


def test_a_wait_for_one_that_evaluates_is_repeated(files: Any) -> None:
    fake = files(OSError(errno.ETIMEDOUT, "no"), OSError(errno.ETIMEDOUT, "no"), "1\n")
    assert scalars.mean(1) == 1
    assert fake.lines == ["mean 1.0\n"] * 3


def test_a_wait_ends_after_the_patience(files: Any) -> None:
    fake = files(OSError(errno.ETIMEDOUT, "no"), OSError(errno.ETIMEDOUT, "no"))
    (fake.learner.parent.parent / "control" / "patience").write_text("1e-9\n")
    with pytest.raises(Timeout, match="the same call"):
        scalars.mean(1)


def test_without_patience_a_wait_goes_on_for_ever(files: Any) -> None:
    fake = files(*[OSError(errno.ETIMEDOUT, "no")] * 3, "1\n")
    (fake.learner.parent.parent / "control" / "patience").write_text("0\n")
    assert scalars.mean(1) == 1 and not fake.answers


def test_a_wait_goes_on_while_the_job_waits_for_a_learner(files: Any) -> None:
    fake = files(*[OSError(errno.ETIMEDOUT, "no")] * 3, "1\n")
    fake.job([{"id": "rank1"}])
    (fake.learner.parent.parent / "control" / "patience").write_text("0.001\n")
    assert scalars.mean(1) == 1 and not fake.answers


@needs_a_mount()
def test_others_wait_beyond_the_patience_for_a_rank_that_says_that_it_is_busy(tmp_path: Path) -> None:
    program = written(
        tmp_path / "program.py",
        """
    import gradfs
    patience = 6
    dist.init_process_group()
    rank = dist.get_rank()
    module = torch.nn.Linear(1, 1)
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    opt = dist.remote(opt, module, settings={"timeout": 1, "patience": patience})
    dist.barrier()
    if rank == 0:
        with dist.busy():
            time.sleep(1.5 * patience)
    module(torch.ones(1, 1)).sum().backward()
    opt.step()
    assert dist.mean(rank) == 0.5
    # The others go on without a rank that does not say so.
    if rank == 0:
        time.sleep(1.5 * patience)
    try:
        print(rank, dist.mean(rank))
    except gradfs.Left as error:
        print(rank, error)
        try:
            with dist.busy():
                raise AssertionError("it has left")
        except gradfs.Left:
            pass
    """,
    )
    said = succeeded(launch(2, program))
    assert "1 1.0" in said and "no longer in the job" in said


def test_another_call_of_others_is_said_in_their_words(files: Any) -> None:
    fake = files(OSError(errno.EINVAL, "no"))
    (fake.learner / "error").write_text("rank1 has called sum of 2 numbers\n")
    with pytest.raises(GradfsError, match="rank1 has called sum of 2 numbers"):
        scalars.mean(1)


def test_one_process_waits_for_nobody() -> None:
    module = torch.nn.Linear(1, 1)
    with alone() as dist:
        dist.barrier()
        with pytest.raises(GradfsError, match="remote"):
            dist.mean(1)
        dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
        assert dist.mean(2) == 2 and dist.any(True)
        dist.barrier()


test_one_process_waits_for_nobody = needs_a_mount()(test_one_process_waits_for_nobody)


@needs_a_mount()
def test_learners_share_numbers(tmp_path: Path) -> None:
    program = written(
        tmp_path / "program.py",
        """
    dist.init_process_group()
    rank = dist.get_rank()
    module = torch.nn.Linear(1, 1)
    opt = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
    dist.barrier()
    t = torch.tensor([rank, 2.0])
    dist.all_reduce(t)
    b = torch.tensor(float(rank + 5))
    dist.broadcast(b, 1)
    print(dist.mean(rank), dist.any(rank == 1), dist.any(False), t.tolist(), b.item())
    """,
    )
    expected = "0.5 True False [1.0, 4.0] 6.0"
    assert sorted(succeeded(launch(2, program)).splitlines()) == [f"[0] {expected}", f"[1] {expected}"]


@needs_a_mount()
def test_all_ranks_skip_a_step_in_which_one_has_found_inf(tmp_path: Path) -> None:
    program = written(
        tmp_path / "program.py",
        """
    dist.init_process_group()
    rank = dist.get_rank()
    module = torch.nn.Linear(1, 1)
    opt = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(4):
        opt.zero_grad()
        scaler.scale(module(torch.ones(1, 1)).sum() * (float("inf") if step == rank else 1)).backward()
        scaler.step(opt)
        scaler.update()
    print(opt.version)
    """,
    )
    assert sorted(succeeded(launch(2, program)).splitlines()) == ["[0] 2", "[1] 2"]


def _shares(members: list[list[str]], data: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[int]]:
    taken = []
    for name in members[-1]:
        monkeypatch.setattr("gradfs.torch.sharing._name", lambda name=name: name)
        looks = iter([*members, *[members[-1]] * len(data)])
        taken.append([i for i in Share(data, members=lambda looks=looks: next(looks), **options)])
    return taken


@pytest.mark.parametrize("length", [12, 13, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_are_those_of_a_distributed_sampler(length: int, shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"rank{i}" for i in range(4)]
    expected = [
        list(torch.utils.data.DistributedSampler(range(length), 4, i, shuffle=shuffle, seed=3)) for i in range(4)
    ]
    assert _shares([names], range(length), monkeypatch, shuffle=shuffle, seed=3) == expected


def test_what_is_left_is_shared_anew_when_a_learner_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    three, two = ["a", "b", "c"], ["a", "b"]
    # Each learner looks once at the beginning, and then before each sample.
    taken = _shares([three, three, three, two], range(12), monkeypatch, shuffle=False)
    assert taken == [[0, 3, 6, 8, 10], [1, 4, 7, 9, 11]]


def test_a_loader_is_shared_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradfs.torch.sharing._learners", lambda: ["rank0", "rank1"])
    monkeypatch.setattr("gradfs.torch.sharing._name", lambda: "rank1")
    loader = share(torch.utils.data.DataLoader(range(10), batch_size=2))
    assert [batch.tolist() for batch in loader] == [[1, 3], [5, 7], [9]]
    with pytest.raises(TypeError, match="map-style"):
        share(torch.utils.data.DataLoader(range(3), batch_size=None))
    generator = torch.Generator()
    options = {"num_workers": 1, "prefetch_factor": 8, "multiprocessing_context": "spawn", "generator": generator}
    shared = share(torch.utils.data.DataLoader(range(10), shuffle=True, **options))
    assert shared.prefetch_factor == 8 and shared.generator is generator and shared.sampler.shuffle
    assert shared.multiprocessing_context.get_start_method() == "spawn"


def test_a_loader_that_chooses_its_samples_is_not_shared() -> None:
    data = torch.utils.data
    for sampler in (
        data.SubsetRandomSampler([0, 1]),
        data.WeightedRandomSampler([1.0, 0.0], 4),
        data.RandomSampler(range(10), replacement=True),
        data.RandomSampler(range(10), num_samples=3),
    ):
        with pytest.raises(TypeError, match=f"{type(sampler).__name__} chooses others"):
            share(data.DataLoader(range(10), sampler=sampler))
