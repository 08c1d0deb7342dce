"""Writes ps-backend/tests/golden/torch_groups.json: where torch's parameter groups lead in 100 steps.

It is for ps-backend/tests/golden.rs. Weights and gradients are those of torch_golden.py, cut into tensors.

    .venv/bin/python scripts/lib/torch_groups_golden.py
"""

import json

import torch
from torch_golden import ELEMENTS, OUT, STEPS, gradient, weight

# The tensors, and how many elements each has.
TENSORS = {"body.weight": 10, "body.bias": 4, "norm.weight": 4, "head.weight": 6}

STILL = "*.bias weight_decay=0\nnorm.* weight_decay=0"
ADAMW = {"lr": 0.003, "weight_decay": 0.02}

# The reducer, its settings, and torch's optimizers: each with its groups, which are some tensors and their options.
CASES = [
    (
        "adamw",
        {"learning_rate": "0.003", "weight_decay": "0.02", "tensors": f"{STILL}\nhead.* learning_rate_scale=0.1"},
        [
            (
                "AdamW",
                [
                    (["body.weight"], ADAMW),
                    (["body.bias", "norm.weight"], {**ADAMW, "weight_decay": 0}),
                    (["head.weight"], {**ADAMW, "lr": 0.003 * 0.1}),
                ],
            )
        ],
    ),
    (
        "adamw",
        {
            "learning_rate": "0.003",
            "weight_decay": "0.02",
            "tensors": "body.bias frozen\nnorm.* reducer=sgd\n"
            "head.* reducer=momentum learning_rate_scale=3 weight_decay=0.1",
        },
        [
            ("AdamW", [(["body.weight"], ADAMW)]),
            (
                "SGD",
                [
                    (["norm.weight"], ADAMW),
                    (["head.weight"], {"lr": 0.003 * 3, "weight_decay": 0.1, "momentum": 0.9}),
                ],
            ),
        ],
    ),
    (
        "sgd",
        {
            "learning_rate": "0.01",
            "weight_decay": "0.02",
            "tensors": "*.bias reducer=adam\nnorm.* learning_rate_scale=0",
        },
        [
            (
                "SGD",
                [
                    (["body.weight", "head.weight"], {"lr": 0.01, "weight_decay": 0.02}),
                    (["norm.weight"], {"lr": 0.0, "weight_decay": 0.02}),
                ],
            ),
            ("Adam", [(["body.bias"], {"lr": 0.01, "weight_decay": 0.02})]),
        ],
    ),
]


def run(dtype, optimizers):
    at, places = 0, {}
    for name, count in TENSORS.items():
        places[name] = range(at, at + count)
        at += count
    assert at == ELEMENTS
    weights = {}
    for name, place in places.items():
        weights[name] = torch.tensor([weight(i) for i in place], dtype=dtype, requires_grad=True)
    made = []
    for kind, groups in optimizers:
        params = [{"params": [weights[name] for name in names], **options} for names, options in groups]
        made.append(getattr(torch.optim, kind)(params, lr=1))
    for t in range(1, STEPS + 1):
        for name, place in places.items():
            weights[name].grad = torch.tensor([gradient(t, i) for i in place], dtype=dtype)
        for optimizer in made:
            optimizer.step()
    return {name: value.detach().tolist() for name, value in weights.items()}


def main():
    cases = []
    for reducer, settings, optimizers in CASES:
        ends = {kind: run(dtype, optimizers) for kind, dtype in [("f64", torch.float64), ("f32", torch.float32)]}
        cases.append({"reducer": reducer, "settings": settings, **ends})
    lines = ",\n".join(json.dumps(case) for case in cases)
    head = f'"torch": "{torch.__version__}", "steps": {STEPS}'
    OUT.with_name("torch_groups.json").write_text(f'{{{head}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
