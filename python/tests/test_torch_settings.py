"""What gradfs.torch reads from optimizers and modules."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gradfs.torch import settings

_W = torch.nn.Parameter(torch.zeros(2))


def _all(optimizer: Any) -> dict[str, Any]:
    reducer = settings.reducer_of(optimizer)
    return {"reducer": reducer, **settings.numbers_of(optimizer, reducer)}


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (torch.optim.SGD([_W], lr=0.1), {"reducer": "sgd", "learning_rate": 0.1, "weight_decay": 0}),
        (
            torch.optim.SGD([_W], lr=0.1, momentum=0.8, dampening=0.1, weight_decay=1e-4),
            {"reducer": "momentum", "learning_rate": 0.1, "momentum": 0.8, "dampening": 0.1, "weight_decay": 1e-4},
        ),
        (
            torch.optim.SGD([_W], lr=0.1, momentum=0.9, nesterov=True),
            {"reducer": "nesterov", "learning_rate": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0},
        ),
        (
            torch.optim.Adam([_W]),
            {
                "reducer": "adam",
                "learning_rate": 1e-3,
                "beta1": 0.9,
                "beta2": 0.999,
                "epsilon": 1e-8,
                "weight_decay": 0,
            },
        ),
        (
            torch.optim.AdamW([_W], betas=(0.8, 0.9), eps=1e-6),
            {
                "reducer": "adamw",
                "learning_rate": 1e-3,
                "beta1": 0.8,
                "beta2": 0.9,
                "epsilon": 1e-6,
                "weight_decay": 0.01,
            },
        ),
        (
            torch.optim.RMSprop([_W]),
            {"reducer": "rmsprop", "learning_rate": 0.01, "alpha": 0.99, "epsilon": 1e-8, "weight_decay": 0},
        ),
        (
            torch.optim.Adagrad([_W]),
            {"reducer": "adagrad", "learning_rate": 0.01, "epsilon": 1e-10, "weight_decay": 0},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_torch_optimizer_gives_its_settings(optimizer: Any, expected: dict[str, Any]) -> None:
    assert _all(optimizer) == expected


@pytest.mark.parametrize(
    ("optimizer", "word"),
    [
        (torch.optim.Adam([_W], amsgrad=True), "amsgrad"),
        (torch.optim.SGD([_W], lr=0.1, maximize=True), "maximize"),
        (torch.optim.RMSprop([_W], centered=True), "centered"),
        (torch.optim.RMSprop([_W], momentum=0.5), "momentum"),
        (torch.optim.Adagrad([_W], lr_decay=0.1), "lr_decay"),
        (torch.optim.Adagrad([_W], initial_accumulator_value=1.0), "initial_accumulator_value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_without_a_setting_is_refused_by_name(optimizer: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        settings.reducer_of(optimizer)


def test_an_unknown_optimizer_is_refused_with_those_that_there_are() -> None:
    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(TypeError, match="Mine.*SGD, Adam"):
        settings.reducer_of(Mine([_W], lr=0.1))


def test_groups_that_differ_in_more_than_rate_and_decay_are_refused_by_name() -> None:
    v = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([{"params": [_W]}, {"params": [v], "betas": (0.5, 0.9)}])
    with pytest.raises(ValueError, match="betas"):
        settings.reducer_of(optimizer)


def test_options_that_choose_how_torch_computes_are_taken() -> None:
    assert settings.reducer_of(torch.optim.Adam([_W], foreach=False)) == "adam"
    assert settings.reducer_of(torch.optim.SGD([_W], lr=0.1, fused=True)) == "sgd"


def _rules(module: Any, groups: list[dict[str, Any]], averaged: Any = (), frozen: Any = (), **more: Any) -> list[str]:
    optimizer = torch.optim.AdamW(groups, lr=0.1, **more)
    names = {p: n for n, p in module.named_parameters()}
    names.update({b: n for n, b in module.named_buffers()})
    return settings.rules_of(optimizer, names, averaged, frozen, settings.scales_of(optimizer))


def _matches(rules: list[str], name: str) -> str:
    from fnmatch import fnmatchcase

    return next((rule.partition(" ")[2] for rule in rules if fnmatchcase(name, rule.split()[0])), "")


def test_groups_become_rules_of_few_patterns() -> None:
    module = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(30)])
    decay = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() == 1]
    rules = _rules(module, [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}])
    assert rules == ["*.bias weight_decay=0.0 learning_rate_scale=0.19999999999999998"]


def test_a_pattern_matches_no_tensor_of_another_group() -> None:
    module = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(12)])
    some = [p for n, p in module.named_parameters() if n in ("1.weight", "11.weight", "3.bias")]
    others = [p for p in module.parameters() if all(p is not q for q in some)]
    rules = _rules(module, [{"params": others}, {"params": some, "weight_decay": 0.5}])
    for name, parameter in module.named_parameters():
        expected = "weight_decay=0.5" if any(parameter is q for q in some) else ""
        assert _matches(rules, name) == expected, name


def test_frozen_and_averaged_tensors_have_rules() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    rules = _rules(module, [{"params": module.parameters()}], ["1.running_mean", "1.running_var"], ["0.weight"])
    assert _matches(rules, "0.weight") == "frozen"
    assert _matches(rules, "1.running_mean") == _matches(rules, "1.running_var") == "reducer=average"
    assert _matches(rules, "1.weight") == _matches(rules, "1.num_batches_tracked") == ""


def test_a_rate_of_zero_keeps_the_scales() -> None:
    v = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [_W], "lr": 0.1}, {"params": [v], "lr": 0.05}], lr=0.1)
    before = settings.scales_of(optimizer)
    assert before == [1.0, 0.5]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    assert settings.scales_of(optimizer, before) == before
    assert settings.reference_rate(optimizer) == 0


def test_the_rounding_of_a_schedule_does_not_change_the_rules() -> None:
    v = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [_W], "lr": 0.3}, {"params": [v], "lr": 0.1}], lr=0.1)
    scales = settings.scales_of(optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for _ in range(49):
        optimizer.step()
        schedule.step()
        assert settings.scales_of(optimizer, scales) == scales


def test_settings_are_compared_as_the_job_keeps_them() -> None:
    assert settings.same("learning_rate", "0.3\n", "0.30000000000000004")
    assert not settings.same("learning_rate", "0.3", "0.31")
    assert settings.same(
        "tensors",
        "a weight_decay=0.1 learning_rate_scale=0.33333334\n",
        "a learning_rate_scale=0.3333333333333333 weight_decay=0.1",
    )
    assert not settings.same("tensors", "a frozen", "b frozen")
    assert settings.same("reducer", "adamw\n", "AdamW")


def test_rules_that_are_too_long_are_refused() -> None:
    module = torch.nn.ParameterDict({"x" * 200 + str(i): torch.nn.Parameter(torch.zeros(1)) for i in range(400)})
    groups = [{"params": [p], "weight_decay": 0.001 * i} for i, p in enumerate(module.values())]
    with pytest.raises(ValueError, match="65536"):
        _rules(module, groups)
