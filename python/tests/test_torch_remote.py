"""A remote optimizer in one process: each step is that of torch's optimizer, and wrong use is said."""

from __future__ import annotations

import copy
import gc
import math
import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch_support import alone, mounts, needs_a_mount, torch

import gradfs
from gradfs import convert, first_file
from gradfs.errors import Closed, GradfsError, Refused

pytestmark = needs_a_mount()

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.01),
}
STAGINGS = ["copied", "mapped"]


def _net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def _data(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def _backward(module: Any, step: int, scale: float = 1.0) -> Any:
    x, y = _data(step)
    loss = torch.nn.functional.mse_loss(module(x), y)
    (loss * scale).backward()
    return loss


def _close(one: Any, other: Any, **limits: float) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters()):
        assert torch.allclose(p, q, **(limits or {"rtol": 1e-5, "atol": 1e-6})), f"{name}: {(p - q).abs().max()}"


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(name: str, staging: str) -> None:
    module = _net()
    reference = copy.deepcopy(module)
    torchs = OPTIMIZERS[name](reference.parameters())
    with alone() as dist:
        optimizer = dist.remote(OPTIMIZERS[name](module.parameters()), module, staging=staging)
        assert optimizer.staging == staging
        for step in range(12):
            for each, network in ((optimizer, module), (torchs, reference)):
                each.zero_grad()
                _backward(network, step)
                each.step()
            _close(module, reference)
        assert optimizer.version == 12


@pytest.mark.parametrize("staging", STAGINGS)
def test_the_rate_of_a_scheduler_counts_for_its_very_step(staging: str) -> None:
    module = _net()
    reference = copy.deepcopy(module)
    rates = [0.0, 0.1, 0.5, 0.01, 0.2, 0.0, 0.3, 0.001, 0.1, 0.1]
    torchs = torch.optim.SGD(reference.parameters(), lr=1.0)
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=1.0), module, staging=staging)
        schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: rates[i % 10]) for o in (optimizer, torchs)]
        for step in range(10):
            for each, network in ((optimizer, module), (torchs, reference)):
                each.zero_grad()
                _backward(network, step)
                each.step()
            _close(module, reference)
            for schedule in schedules:
                schedule.step()


def test_a_scheduler_made_on_the_inner_optimizer_works_without_a_warning() -> None:
    module = _net()
    with alone() as dist, warnings.catch_warnings():
        warnings.simplefilter("error")
        inner = torch.optim.SGD(module.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.1)
        optimizer = dist.remote(inner, module)
        for step in range(3):
            optimizer.zero_grad()
            _backward(module, step)
            optimizer.step()
            schedule.step()
        assert math.isclose(optimizer.status()["learning_rate"], 0.01, rel_tol=1e-6)


def test_groups_whose_rates_change_apart_are_those_of_torch() -> None:
    module = _net()
    reference = copy.deepcopy(module)

    def made(network: Any) -> Any:
        groups = [
            {"params": network[0].parameters()},
            {"params": network[2].parameters(), "lr": 0.3, "weight_decay": 0.1},
        ]
        return torch.optim.SGD(groups, lr=0.1)

    torchs = made(reference)
    with alone() as dist:
        optimizer = dist.remote(made(module), module)
        for step in range(8):
            for each, network in ((optimizer, module), (torchs, reference)):
                each.param_groups[0]["lr"] = 0.1 / (step + 1)
                each.param_groups[1]["lr"] = 0.05 * step
                each.zero_grad()
                _backward(network, step)
                each.step()
            _close(module, reference)


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("keep", [True, False])
def test_no_sync_accumulates(staging: str, keep: bool) -> None:
    module = _net()
    reference = copy.deepcopy(module)
    torchs = torch.optim.Adam(reference.parameters(), lr=0.01)
    with alone() as dist:
        wrapped = dist.DistributedDataParallel(module)
        optimizer = dist.remote(torch.optim.Adam(wrapped.parameters(), lr=0.01), wrapped, staging=staging)
        for step in range(8):
            optimizer.zero_grad(set_to_none=not keep)
            torchs.zero_grad()
            with wrapped.no_sync():
                _backward(wrapped, 2 * step, 0.5)
            _backward(wrapped, 2 * step + 1, 0.5)
            for i in range(2):
                _backward(reference, 2 * step + i, 0.5)
            optimizer.step()
            torchs.step()
            _close(module, reference)


@pytest.mark.parametrize("staging", STAGINGS)
def test_accumulation_without_no_sync_is_the_same(staging: str) -> None:
    module = _net()
    reference = copy.deepcopy(module)
    torchs = torch.optim.SGD(reference.parameters(), lr=0.1)
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module, staging=staging)
        for step in range(6):
            for each, network in ((optimizer, module), (torchs, reference)):
                each.zero_grad()
                for i in range(3):
                    _backward(network, 3 * step + i)
                each.step()
            _close(module, reference)


@pytest.mark.parametrize("staging", STAGINGS)
def test_frozen_parameters_stay(staging: str) -> None:
    module = _net()
    module[0].weight.requires_grad_(False)
    reference = copy.deepcopy(module)
    torchs = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.5)
    with alone() as dist:
        optimizer = dist.remote(
            torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.5), module, staging=staging
        )
        for step in range(5):
            for each, network in ((optimizer, module), (torchs, reference)):
                each.zero_grad()
                _backward(network, step)
                each.step()
        _close(module, reference)
        assert torch.equal(module[0].weight, reference[0].weight)


def test_parameters_of_no_group_stay() -> None:
    module = _net()
    before = module[0].weight.clone()
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module[2].parameters(), lr=0.1), module)
        _backward(module, 0)
        optimizer.step()
        assert torch.equal(module[0].weight, before)


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = torch.nn.Linear(8, 8, bias=False)
        self.out = torch.nn.Linear(8, 4)
        self.again = torch.nn.Linear(8, 8, bias=False)
        self.again.weight = self.into.weight

    def forward(self, x: Any) -> Any:
        return self.out(self.again(torch.tanh(self.into(x))))


@pytest.mark.parametrize("staging", STAGINGS)
def test_tied_parameters_count_once(staging: str) -> None:
    torch.manual_seed(0)
    module = _Tied()
    reference = copy.deepcopy(module)
    torchs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), module, staging=staging)
        assert (
            list(optimizer.files.layout) == ["into.weight", "out.weight", "out.bias"]
            or len(optimizer.files.layout) == 3
        )
        for step in range(5):
            for each, network in ((optimizer, module), (torchs, reference)):
                each.zero_grad()
                _backward(network, step)
                each.step()
        assert module.again.weight is module.into.weight
        _close(module, reference)


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_parameter_without_a_gradient_stays_as_with_torch(staging: str) -> None:
    module = _net()
    reference = copy.deepcopy(module)
    torchs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    with alone() as dist:
        inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        optimizer = dist.remote(inner, module, staging=staging)
        for step in range(8):
            for each, network in ((optimizer, module), (torchs, reference)):
                each.zero_grad()
                _backward(network, step)
                if step % 2:
                    network[0].weight.grad = network[2].bias.grad = None
                each.step()
            _close(module, reference)


@pytest.mark.parametrize("staging", STAGINGS)
def test_clip_norm_clips_as_torch_does(staging: str) -> None:
    module = _net()
    reference = copy.deepcopy(module)
    torchs = torch.optim.SGD(reference.parameters(), lr=0.1)
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module, clip_norm=0.3, staging=staging)
        for step in range(5):
            optimizer.zero_grad()
            torchs.zero_grad()
            _backward(module, step)
            _backward(reference, step)
            norm = optimizer.clip_grad_norm_(0.3)
            expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
            optimizer.step()
            torchs.step()
            assert torch.allclose(norm, expected, rtol=1e-5)
            assert math.isclose(optimizer.grad_norm, float(expected), rel_tol=1e-5)
            _close(module, reference)


def test_a_step_without_gradients_is_none() -> None:
    module = _net()
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
        optimizer.step()
        assert optimizer.version == 0
        _backward(module, 0)
        optimizer.step()
        assert optimizer.version == 1


def test_the_loss_of_a_closure_is_returned() -> None:
    module = _net()
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)

        def closure() -> Any:
            optimizer.zero_grad()
            return _backward(module, 3)

        with torch.no_grad():
            assert optimizer.step(closure).item() > 0
        assert optimizer.version == 1


def test_autocast_works() -> None:
    module = _net()
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(_backward(module, 0).item())
            optimizer.step()
        assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("staging", STAGINGS)
def test_a_grad_scaler_scales_and_skips(staging: str, unscale: bool) -> None:
    module = _net()
    reference = copy.deepcopy(module)
    torchs = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler, theirs = (torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in range(2))
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module, staging=staging)
        for step in range(8):
            for each, network, scale in ((optimizer, module, scaler), (torchs, reference, theirs)):
                each.zero_grad()
                x, y = _data(step)
                loss = torch.nn.functional.mse_loss(network(x), y)
                scale.scale(loss * (math.inf if step == 4 else 1)).backward()
                if unscale:
                    scale.unscale_(each)
                scale.step(each)
                scale.update()
            _close(module, reference)
            assert scaler.get_scale() == theirs.get_scale()
        assert optimizer.version == 7


def test_narrow_parameters_train() -> None:
    module = _net().to(torch.bfloat16)
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module, staging="mapped")
        before = torch.nn.functional.mse_loss(module(_data(0)[0].bfloat16()), _data(0)[1].bfloat16())
        for _ in range(10):
            optimizer.zero_grad()
            x, y = _data(0)
            loss = torch.nn.functional.mse_loss(module(x.bfloat16()), y.bfloat16())
            loss.backward()
            optimizer.step()
        assert loss < before


def test_parameters_in_another_memory_format_train() -> None:
    torch.manual_seed(0)
    module = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    reference = copy.deepcopy(module)
    torchs = torch.optim.SGD(reference.parameters(), lr=0.1)
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
        for _ in range(3):
            for each, network in ((optimizer, module), (torchs, reference)):
                each.zero_grad()
                network(torch.ones(2, 3, 5, 5).to(memory_format=torch.channels_last)).square().mean().backward()
                each.step()
        assert module.weight.is_contiguous(memory_format=torch.channels_last)
        _close(module, reference)


def test_auto_staging_tries_both_and_keeps_one() -> None:
    module = _net()
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
        if not optimizer.status()["passthrough"]:
            pytest.skip("reads go through the daemon here: mapping is not tried")
        seen = []
        for step in range(16):
            optimizer.zero_grad()
            _backward(module, step)
            optimizer.step()
            seen.append(optimizer.staging)
        assert "copied" in seen and "mapped" in seen
        assert len(set(seen[12:])) == 1


def test_mapped_gradients_lie_in_the_jobs_memory_and_travel_before_the_step() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)])
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module, staging="mapped")
        if not optimizer.status()["passthrough"]:
            pytest.skip("reads go through the daemon here: mapped bytes wait for the step")
        for _ in range(4):
            optimizer.zero_grad()
            module(torch.ones(1, 512)).square().mean().backward()
            sent = optimizer._sent
            optimizer.step()
        assert sent
        view = optimizer._staging._views[optimizer._trained[0]]
        assert optimizer._trained[0].tensor.grad.data_ptr() == view.data_ptr()


def test_a_gradient_that_changes_on_its_way_is_an_error_that_says_what_to_do() -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(1024, 1024)
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module, staging="mapped")
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(1, 1024)).square().mean().backward()
            optimizer.step()
        before = optimizer.version
        optimizer.zero_grad()
        module(torch.ones(1, 1024)).square().mean().backward()
        module.weight.grad.mul_(2)
        with pytest.raises(GradfsError, match="clip_norm"):
            optimizer.step()
        assert optimizer.version == before


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_backward_that_is_given_up_counts_nowhere(staging: str) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    reference = copy.deepcopy(module)
    torchs = torch.optim.SGD(reference.parameters(), lr=0.1)
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module, staging=staging)
        for step in range(6):
            optimizer.zero_grad()
            module(torch.full((1, 512), 9.0)).square().mean().backward()
            for each, network in ((optimizer, module), (torchs, reference)):
                each.zero_grad()
                network(torch.full((1, 512), 1.0 + step)).square().mean().backward()
                each.step()
            _close(module, reference)
        assert optimizer.version == 6


def test_clipping_on_one_of_several_learners_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfs import job

    module = _net()
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module, staging="copied")
        alone_there = optimizer.attached.world
        optimizer.attached.world = job.World(0, 2, 0, 2)
        _backward(module, 0)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        with pytest.raises(GradfsError, match=r"clip_norm=.*allow_changed_gradients"):
            optimizer.step()
        assert optimizer.version == 0
        # Who is alone ends the job.
        optimizer.attached.world = alone_there


def test_all_that_does_not_fit_is_said_at_once(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        "0.weight": torch.zeros(16, 9),
        "0.bias": torch.zeros(16, dtype=torch.float16),
        "2.weight": torch.zeros(4, 16),
        "other": torch.zeros(3),
    }
    model = start(tensors)
    os.mkdir(f"{model}/learners/me")
    monkeypatch.setenv("GRADFS_LEARNER", f"{model}/learners/me")
    module = _net()
    with alone() as dist, pytest.raises(Refused) as refused:
        dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
    said = str(refused.value)
    assert "0.weight is float32 [16, 8], and in the job float32 [16, 9]" in said
    assert "0.bias is float32 [16], and in the job float16 [16]" in said
    assert "2.bias is not in the job" in said
    assert "other is in the job, and not in the module" in said


def test_a_mount_of_somebody_else_gets_the_settings(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _net()
    model = start({name: torch.ones_like(p) for name, p in module.named_parameters()}, "--reducer", "sgd")
    os.mkdir(f"{model}/learners/me")
    monkeypatch.setenv("GRADFS_LEARNER", f"{model}/learners/me")
    with alone() as dist:
        optimizer = dist.remote(torch.optim.AdamW(module.parameters(), lr=0.02, betas=(0.8, 0.9)), module)
        control = optimizer.status()["control"]
        told = {name: control[name] for name in ("reducer", "learning_rate", "beta1", "beta2", "weight_decay")}
        assert told == {
            "reducer": "adamw",
            "learning_rate": "0.02",
            "beta1": "0.8",
            "beta2": "0.9",
            "weight_decay": "0.01",
        }
        assert (module[0].weight == 1).all()
    assert "me" in os.listdir(f"{model}/learners")


def test_a_process_that_comes_to_a_running_job_leaves_its_settings(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _net()
    model = start({name: p.detach() for name, p in module.named_parameters()}, "--reducer", "sgd", "--lr", "0.1")
    os.mkdir(f"{model}/learners/me")
    monkeypatch.setenv("GRADFS_LEARNER", f"{model}/learners/me")
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
        _backward(module, 0)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.05
        _backward(module, 1)
        optimizer.step()
    with alone() as dist:
        with pytest.warns(RuntimeWarning, match="learning_rate at '0.05' and not '0.1'"):
            optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
        optimizer.param_groups[0]["lr"] = 0.2
        _backward(module, 2)
        with pytest.warns(RuntimeWarning, match="the rates of this process do not count"):
            optimizer.step()
        assert optimizer.status()["control"]["learning_rate"] == "0.05"
        optimizer.apply_settings()
        assert optimizer.status()["control"]["learning_rate"] == "0.2"
    with alone() as dist, pytest.raises(GradfsError, match="the job's optimizer is sgd, and this one is adam"):
        dist.remote(torch.optim.Adam(module.parameters()), module)


def test_a_rate_that_somebody_has_written_is_said_before_it_is_replaced() -> None:
    module = _net()
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
        _backward(module, 0)
        optimizer.step()
        (optimizer.files.model / "control" / "learning_rate").write_text("0.7\n")
        optimizer.param_groups[0]["lr"] = 0.05
        _backward(module, 1)
        with pytest.warns(RuntimeWarning, match="'0.7'"):
            optimizer.step()
        assert optimizer.status()["control"]["learning_rate"] == "0.05"


def test_a_saved_job_goes_on_with_its_extra(tmp_path: Any) -> None:
    def parts() -> Any:
        module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
        inner = torch.optim.AdamW(module.parameters(), lr=0.1)
        return module, inner

    def steps(module: Any, optimizer: Any, schedule: Any, begin: int, end: int) -> None:
        for step in range(begin, end):
            optimizer.zero_grad()
            _backward(module, step)
            optimizer.step()
            schedule.step()

    torch.manual_seed(0)
    module, inner = parts()
    first = copy.deepcopy(module.state_dict())
    with alone() as dist:
        optimizer = dist.remote(inner, module)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        steps(module, optimizer, schedule, 0, 5)
        optimizer.save(tmp_path / "save", extra={"schedule": schedule.state_dict(), "step": 5})
        steps(module, optimizer, schedule, 5, 9)
    other, inner = parts()
    with alone() as dist, warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = dist.remote(inner, other, resume=tmp_path / "save")
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        extra = optimizer.load_extra()
        assert extra["step"] == 5
        assert other[1].num_batches_tracked == 5
        schedule.load_state_dict(extra["schedule"])
        steps(other, optimizer, schedule, extra["step"], 9)
        assert optimizer.version == 9
    for key, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key
        assert value.dtype.is_floating_point is False or not torch.equal(value, first[key])


def test_a_checkpoint_with_batch_norm_becomes_a_job_and_a_checkpoint_again(tmp_path: Any) -> None:
    """Running means are averaged in the job, and counters are kept: the training is the one without a job."""

    def parts() -> Any:
        torch.manual_seed(0)
        # A bias before BatchNorm has no gradient but roundings.
        first = torch.nn.Linear(8, 16, bias=False)
        module = torch.nn.Sequential(first, torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
        return module, torch.optim.Adam(module.parameters(), lr=0.1)

    def trained(module: Any, inner: Any, begin: int, end: int) -> None:
        for step in range(begin, end):
            inner.zero_grad()
            _backward(module, step)
            inner.step()

    def same(one: Any, other: Any) -> None:
        assert set(one) == set(other)
        for key, value in one.items():
            torch.testing.assert_close(value, other[key], rtol=1e-4, atol=1e-6)

    module, inner = parts()
    trained(module, inner, 0, 3)
    old = tmp_path / "old.pt"
    torch.save({"model": module.state_dict(), "optimizer": inner.state_dict()}, old)
    convert.convert(old, tmp_path / "snapshot", "adam")
    other, other_inner = parts()
    with alone() as dist:
        optimizer = dist.remote(other_inner, other, resume=tmp_path / "snapshot")
        assert other[1].num_batches_tracked == 3
        trained(other, optimizer, 3, 6)
        optimizer.save(tmp_path / "again")
    trained(module, inner, 3, 6)
    same(other.state_dict(), module.state_dict())
    convert.convert(tmp_path / "again", tmp_path / "new.pt", like=old)
    new = torch.load(tmp_path / "new.pt", weights_only=True)
    assert new["model"]["1.num_batches_tracked"] == 6
    third, third_inner = parts()
    third.load_state_dict(new["model"])
    third_inner.load_state_dict(new["optimizer"])
    for one, with_inner in ((module, inner), (third, third_inner)):
        trained(one, with_inner, 6, 8)
    same(third.state_dict(), module.state_dict())


def test_a_save_replaces_the_one_before(tmp_path: Any) -> None:
    module = _net()
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
        for step in range(2):
            _backward(module, step)
            optimizer.step()
            optimizer.save(tmp_path / "save", extra={"step": step})
        assert optimizer.load_extra(tmp_path / "save") == {"step": 1}
        assert len(list((tmp_path / "save").glob("extra-*"))) == 1
        with pytest.raises(Refused, match="no snapshot"):
            optimizer.load_extra(tmp_path)


def test_state_of_a_torch_optimizer_is_not_lost_in_silence() -> None:
    module = _net()
    inner = torch.optim.Adam(module.parameters())
    _backward(module, 0)
    inner.step()
    with alone() as dist, pytest.raises(Refused, match="resume"):
        dist.remote(inner, module)


def test_a_step_that_fails_in_the_middle_counts_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfs.torch import staging

    module = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600))
    reference = copy.deepcopy(module)
    torchs = torch.optim.SGD(reference.parameters(), lr=0.1)
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module, staging="copied")
        module(torch.ones(1, 600)).square().mean().backward()
        with monkeypatch.context() as broken:

            def interrupted(self: Any, file: int) -> None:
                raise KeyboardInterrupt

            broken.setattr(staging.Files, "sync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        assert optimizer.version == 0
        optimizer.zero_grad()
        for each, network in ((optimizer, module), (torchs, reference)):
            network(torch.full((1, 600), 0.5)).square().mean().backward()
            each.step()
        assert optimizer.version == 1
        _close(module, reference)


def _in_child(optimizer: Any, module: Any, queue: Any) -> None:
    try:
        _backward(module, 0)
        optimizer.step()
    except Closed as error:
        queue.put(type(error).__name__)
    else:
        queue.put("it took a step")


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_forked_child_takes_no_step_and_leaves_nothing(staging: str) -> None:
    module = _net()
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module, staging=staging)
        _backward(module, 0)
        optimizer.step()
        optimizer.zero_grad()
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_in_child, args=(optimizer, module, queue))
        child.start()
        assert queue.get() == Closed.__name__
        child.join()
        assert optimizer.version == 1
        _backward(module, 1)
        optimizer.step()
        assert optimizer.version == 2


@pytest.mark.parametrize("staging", STAGINGS)
def test_the_module_keeps_its_weights_when_the_job_has_ended(staging: str) -> None:
    module = _net()
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module, staging=staging)
        _backward(module, 0)
        optimizer.step()
        mount = str(optimizer.files.model.parent)
        assert mount in mounts()
        kept = [p.detach().clone() for p in module.parameters()]
    assert mount not in mounts()
    gc.collect()
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), kept))
    module.zero_grad()
    _backward(module, 1)
    with pytest.raises(Closed):
        optimizer.step()


def test_a_wrapped_module_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import gradfs.torch as dist

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    wrapped = dist.DistributedDataParallel(_net())
    with torch.no_grad():
        wrapped(_data(0)[0])
    with pytest.raises(GradfsError, match="remote"):
        wrapped(_data(0)[0])


class _Config:
    """What modules of transformers have."""

    def save_pretrained(self, to: Path) -> None:
        to.mkdir()
        (to / "config.json").write_text('{"model_type": "tiny"}')


def test_hf_has_the_configuration_of_the_module() -> None:
    module = _net()
    module.config = _Config()
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
        assert sorted(os.listdir(optimizer.files.model / "hf")) == ["config.json", "model.safetensors"]


def test_wrappers_inside_of_others_train() -> None:
    inner = _net()
    with alone() as dist:
        outer = torch.nn.Sequential(dist.DistributedDataParallel(inner))
        optimizer = dist.remote(torch.optim.SGD(outer.parameters(), lr=0.1), outer)
        _backward(outer, 0)
        optimizer.step()
        optimizer.close()
        compiled = torch.compile(dist.DistributedDataParallel(inner), backend="eager")
        optimizer = dist.remote(torch.optim.SGD(compiled.parameters(), lr=0.1), compiled)
        assert optimizer.module is inner
        _backward(compiled, 0)
        optimizer.step()


def test_a_process_trains_one_module_at_a_time() -> None:
    with alone() as dist:
        first, second = _net(), _net()
        optimizer = dist.remote(torch.optim.SGD(first.parameters(), lr=0.1), first)
        with pytest.raises(GradfsError, match="one module and one optimizer a process"):
            dist.remote(torch.optim.SGD(second.parameters(), lr=0.1), second)
        _backward(first, 0)
        optimizer.step()


class _Elsewhere(torch.Tensor):
    """Says that it is on a device, where its values cannot be had from."""

    @property
    def device(self) -> Any:
        return torch.device("cuda:0")

    def cpu(self) -> Any:
        return self.as_subclass(torch.Tensor)


def test_the_first_file_is_made_of_a_module_on_a_device(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("there", torch.arange(3.0).as_subclass(_Elsewhere))
    file = gradfs.create_from(module, tmp_path / "m.safetensors")
    found = first_file.views(memoryview(bytearray(file.read_bytes())))
    assert found["there"].torch().tolist() == [0, 1, 2] and set(found) == {"weight", "bias", "there"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_parameters_on_a_gpu_train() -> None:
    module = _net().cuda()
    reference = copy.deepcopy(module)
    torchs = torch.optim.SGD(reference.parameters(), lr=0.1)
    with alone() as dist:
        optimizer = dist.remote(torch.optim.SGD(module.parameters(), lr=0.1), module)
        for _ in range(3):
            for each, network in ((optimizer, module), (torchs, reference)):
                each.zero_grad()
                network(torch.ones(2, 8, device="cuda")).square().mean().backward()
                each.step()
        _close(module, reference)
