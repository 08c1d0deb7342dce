"""Writes ps-backend/tests/golden/torch.json: where torch's optimizers lead in 100 steps, for ps-backend/tests/golden.rs.

Weights and gradients have few bits, so that all types hold them as they are. The test makes the same numbers. torch has
no Lion: it is written here over tensors as lion-pytorch 0.2 has it. Nor has it LARS and LAMB: they are written here after
their papers' algorithms.

    .venv/bin/python scripts/lib/torch_golden.py
"""

import json
from pathlib import Path

import torch

OUT = Path(__file__).resolve().parents[2] / "ps-backend/tests/golden/torch.json"
ELEMENTS, STEPS = 24, 100

RATE = {"learning_rate": "0.01"}
DECAY = {**RATE, "weight_decay": "0.02"}

# The reducer, its settings, and the optimizer with what torch calls them.
CASES = [
    ("sgd", DECAY, "SGD", {"lr": 0.01, "weight_decay": 0.02}),
    (
        "momentum",
        {**DECAY, "momentum": "0.8", "dampening": "0.3"},
        "SGD",
        {"lr": 0.01, "weight_decay": 0.02, "momentum": 0.8, "dampening": 0.3},
    ),
    (
        "nesterov",
        {**DECAY, "momentum": "0.8"},
        "SGD",
        {"lr": 0.01, "weight_decay": 0.02, "momentum": 0.8, "nesterov": True},
    ),
    ("adam", DECAY, "Adam", {"lr": 0.01, "weight_decay": 0.02}),
    (
        "adamw",
        {**DECAY, "beta1": "0.8", "beta2": "0.99"},
        "AdamW",
        {"lr": 0.01, "weight_decay": 0.02, "betas": (0.8, 0.99)},
    ),
    ("rmsprop", DECAY, "RMSprop", {"lr": 0.01, "weight_decay": 0.02}),
    ("adagrad", {**RATE, "epsilon": "1e-8"}, "Adagrad", {"lr": 0.01, "eps": 1e-8}),
    ("adagrad", DECAY, "Adagrad", {"lr": 0.01, "weight_decay": 0.02}),
    ("lion", RATE, "Lion", {"lr": 0.01}),
    (
        "lion",
        {**DECAY, "beta1": "0.95", "beta2": "0.98"},
        "Lion",
        {"lr": 0.01, "weight_decay": 0.02, "betas": (0.95, 0.98)},
    ),
    ("lars", {**RATE, "trust_coefficient": "0.05"}, "Lars", {"lr": 0.01, "trust": 0.05}),
    (
        "lars",
        {**DECAY, "momentum": "0.8", "trust_coefficient": "0.1"},
        "Lars",
        {"lr": 0.01, "weight_decay": 0.02, "momentum": 0.8, "trust": 0.1},
    ),
    ("lamb", RATE, "Lamb", {"lr": 0.01}),
    (
        "lamb",
        {**DECAY, "beta1": "0.8", "beta2": "0.99", "epsilon": "1e-6"},
        "Lamb",
        {"lr": 0.01, "weight_decay": 0.02, "betas": (0.8, 0.99), "eps": 1e-6},
    ),
]

# The same, with what is done to gradients before: torch's limits of the norm and of values. Contributions are multiplied
# by the loss scale, and torch has the plain ones.
CASES += [
    ("sgd", {**DECAY, "clip_value": "0.3"}, "SGD", {"lr": 0.01, "weight_decay": 0.02, "clip": (None, 0.3)}),
    ("adam", {**RATE, "clip_value": "0.3"}, "Adam", {"lr": 0.01, "clip": (None, 0.3)}),
    ("sgd", {**RATE, "clip_norm": "2", "clip_value": "0.3"}, "SGD", {"lr": 0.01, "clip": (2, 0.3)}),
    ("momentum", {**RATE, "loss_scale": "8"}, "SGD", {"lr": 0.01, "momentum": 0.9}),
    (
        "adamw",
        {**RATE, "weight_decay": "0", "clip_norm": "1.5", "loss_scale": "16"},
        "AdamW",
        {"lr": 0.01, "weight_decay": 0, "clip": (1.5, None)},
    ),
    (
        "lars",
        {**DECAY, "clip_norm": "2", "clip_value": "0.3", "trust_coefficient": "0.1"},
        "Lars",
        {"lr": 0.01, "weight_decay": 0.02, "trust": 0.1, "clip": (2, 0.3)},
    ),
    (
        "lamb",
        {**DECAY, "clip_norm": "1.5", "loss_scale": "16"},
        "Lamb",
        {"lr": 0.01, "weight_decay": 0.02, "clip": (1.5, None)},
    ),
]


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1.0 - lr * decay)
                update = mean.clone().mul_(beta1).add(p.grad, alpha=1.0 - beta1).sign_()
                p.add_(update, alpha=-lr)
                mean.mul_(beta2).add_(p.grad, alpha=1.0 - beta2)


class Lars(torch.optim.Optimizer):
    """You, Gitman, Ginsburg, Algorithm 1, with the learning rate where torch's SGD has it."""

    def __init__(self, params, lr, trust, momentum=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "trust": trust, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                decay = group["weight_decay"]
                ratio = group["trust"] * p.norm() / (p.grad.norm() + decay * p.norm())
                update = (p.grad + decay * p) * ratio
                state = self.state[p]
                state["v"] = state["v"] * group["momentum"] + update if "v" in state else update
                p.sub_(group["lr"] * state["v"])


class Lamb(torch.optim.Optimizer):
    """You et al., Algorithm 2, with the identity as phi."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for p in group["params"]:
                state = self.state[p]
                state["t"] = t = state.get("t", 0) + 1
                state["m"] = m = beta1 * state.get("m", 0) + (1 - beta1) * p.grad
                state["v"] = v = beta2 * state.get("v", 0) + (1 - beta2) * p.grad**2
                ratio = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
                update = ratio + group["weight_decay"] * p
                p.sub_(group["lr"] * p.norm() / update.norm() * update)


OWN = {"Lion": Lion, "Lars": Lars, "Lamb": Lamb}


def noise(seed, i):
    """As in golden.rs: a multiple of 1/16 from -2 to below 2."""
    mixed = ((i * 2_654_435_761) ^ (seed * 40_503)) & 0xFFFFFFFF
    return ((mixed >> 5) % 64) / 16 - 2


def weight(i):
    return 3 + noise(1, i) / 2


def gradient(t, i):
    """Elements differ in size, every fifth is zero in every other step, and the first always."""
    if i == 0 or (i % 5 == 0 and t % 2 == 0):
        return 0.0
    return noise(100 + t, i) * 2.0 ** (i % 7 - 4)


def run(dtype, name, options):
    norm, value = options.get("clip", (None, None))
    options = {key: option for key, option in options.items() if key != "clip"}
    weights = torch.tensor([weight(i) for i in range(ELEMENTS)], dtype=dtype, requires_grad=True)
    optimizer = (OWN.get(name) or getattr(torch.optim, name))([weights], **options)
    for t in range(1, STEPS + 1):
        weights.grad = torch.tensor([gradient(t, i) for i in range(ELEMENTS)], dtype=dtype)
        if norm:
            torch.nn.utils.clip_grad_norm_([weights], norm)
        if value:
            torch.nn.utils.clip_grad_value_([weights], value)
        optimizer.step()
    return weights.detach().tolist()


def main():
    cases = []
    for reducer, settings, name, options in CASES:
        ends = {kind: run(dtype, name, options) for kind, dtype in [("f64", torch.float64), ("f32", torch.float32)]}
        cases.append({"reducer": reducer, "settings": settings, **ends})
    OUT.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(case) for case in cases)
    head = f'"torch": "{torch.__version__}", "elements": {ELEMENTS}, "steps": {STEPS}'
    OUT.write_text(f'{{{head}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
