"""Writes ps-backend/tests/golden/torch.json and torch_groups.json, for ps-backend/tests/golden.rs: where torch's optimizers,
and its parameter groups, lead in 100 steps.

Weights and gradients have few bits, so that all types hold them as they are. The test makes the same numbers; of groups they
are cut into tensors. torch has no Lion: it is written here over tensors as lion-pytorch 0.2 has it. Nor has it LARS and
LAMB: they are written here after their papers' algorithms.

    .venv/bin/python scripts/lib/torch_golden.py
"""

import json
from pathlib import Path

import torch

OUT = Path(__file__).resolve().parents[2] / "ps-backend/tests/golden"
ELEMENTS, STEPS = 24, 100

RATE = {"learning_rate": "0.01"}
DECAY = {**RATE, "weight_decay": "0.02"}
WD = {"lr": 0.01, "weight_decay": 0.02}

# The reducer and its settings. In the second half is also what is done to gradients before: torch's limits of the norm and of
# values. Contributions are multiplied by the loss scale, and torch has the plain ones.
CASES = [
    ("sgd", DECAY),
    ("momentum", {**DECAY, "momentum": "0.8", "dampening": "0.3"}),
    ("nesterov", {**DECAY, "momentum": "0.8"}),
    ("adam", DECAY),
    ("adamw", {**DECAY, "beta1": "0.8", "beta2": "0.99"}),
    ("rmsprop", DECAY),
    ("adagrad", {**RATE, "epsilon": "1e-8"}),
    ("adagrad", DECAY),
    ("lion", RATE),
    ("lion", {**DECAY, "beta1": "0.95", "beta2": "0.98"}),
    ("lars", {**RATE, "trust_coefficient": "0.05"}),
    ("lars", {**DECAY, "momentum": "0.8", "trust_coefficient": "0.1"}),
    ("lamb", RATE),
    ("lamb", {**DECAY, "beta1": "0.8", "beta2": "0.99", "epsilon": "1e-6"}),
    ("sgd", {**DECAY, "clip_value": "0.3"}),
    ("adam", {**RATE, "clip_value": "0.3"}),
    ("sgd", {**RATE, "clip_norm": "2", "clip_value": "0.3"}),
    ("momentum", {**RATE, "loss_scale": "8"}),
    ("adamw", {**RATE, "weight_decay": "0", "clip_norm": "1.5", "loss_scale": "16"}),
    ("lars", {**DECAY, "clip_norm": "2", "clip_value": "0.3", "trust_coefficient": "0.1"}),
    ("lamb", {**DECAY, "clip_norm": "1.5", "loss_scale": "16"}),
]
# What torch calls them; it has other defaults for momentum.
OPTIMIZERS = {"sgd": ("SGD", {}), "momentum": ("SGD", {"momentum": 0.9})}
OPTIMIZERS |= {"nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}), "adamw": ("AdamW", {}), "rmsprop": ("RMSprop", {})}
NAMES = {"learning_rate": "lr", "epsilon": "eps", "trust_coefficient": "trust"}
NAMES |= {name: name for name in ("weight_decay", "momentum", "dampening")}

# The tensors of groups, and how many elements each has; the reducer, its settings, and torch's optimizers: each with its
# groups, which are some tensors and their options.
TENSORS = {"body.weight": 10, "body.bias": 4, "norm.weight": 4, "head.weight": 6}
BODY, BIAS, NORM, HEAD = TENSORS
ADAMW = {"lr": 0.003, "weight_decay": 0.02}
ADAMW_SETTINGS = {"learning_rate": "0.003", "weight_decay": "0.02"}
STILL = "*.bias weight_decay=0\nnorm.* weight_decay=0\nhead.* learning_rate_scale=0.1"
OTHERS = "body.bias frozen\nnorm.* reducer=sgd\nhead.* reducer=momentum learning_rate_scale=3 weight_decay=0.1"
GROUPS = [
    (
        "adamw", {**ADAMW_SETTINGS, "tensors": STILL},
        [("AdamW", [([BODY], ADAMW), ([BIAS, NORM], {**ADAMW, "weight_decay": 0}), ([HEAD], {**ADAMW, "lr": 0.003 * 0.1})])],
    ),
    (
        "adamw", {**ADAMW_SETTINGS, "tensors": OTHERS},
        [
            ("AdamW", [([BODY], ADAMW)]),
            ("SGD", [([NORM], ADAMW), ([HEAD], {"lr": 0.003 * 3, "weight_decay": 0.1, "momentum": 0.9})]),
        ],
    ),
    (
        "sgd", {**DECAY, "tensors": "*.bias reducer=adam\nnorm.* learning_rate_scale=0"},
        [("SGD", [([BODY, HEAD], WD), ([NORM], {**WD, "lr": 0.0})]), ("Adam", [([BIAS], WD)])],
    ),
]  # fmt: skip


class Own(torch.optim.Optimizer):
    """What torch does not have: `update(weights, gradient, state, options)` makes a step of a tensor."""

    def __init__(self, params, lr, weight_decay=0.0, **options):
        super().__init__(params, {"lr": lr, "decay": weight_decay, **self.USUAL, **options})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, p.grad, self.state[p], group)


class Lion(Own):
    USUAL = {"betas": (0.9, 0.99)}

    def update(self, p, gradient, state, of):
        beta1, beta2 = of["betas"]
        mean = state.setdefault("mean", torch.zeros_like(p))
        p.mul_(1.0 - of["lr"] * of["decay"])
        p.add_(mean.clone().mul_(beta1).add(gradient, alpha=1.0 - beta1).sign_(), alpha=-of["lr"])
        mean.mul_(beta2).add_(gradient, alpha=1.0 - beta2)


class Lars(Own):
    """You, Gitman, Ginsburg, Algorithm 1, with the learning rate where torch's SGD has it."""

    USUAL = {"momentum": 0.9}

    def update(self, p, gradient, state, of):
        ratio = of["trust"] * p.norm() / (gradient.norm() + of["decay"] * p.norm())
        update = (gradient + of["decay"] * p) * ratio
        state["v"] = state["v"] * of["momentum"] + update if "v" in state else update
        p.sub_(of["lr"] * state["v"])


class Lamb(Own):
    """You et al., Algorithm 2, with the identity as phi."""

    USUAL = {"betas": (0.9, 0.999), "eps": 1e-8}

    def update(self, p, gradient, state, of):
        beta1, beta2 = of["betas"]
        state["t"] = t = state.get("t", 0) + 1
        state["m"] = m = beta1 * state.get("m", 0) + (1 - beta1) * gradient
        state["v"] = v = beta2 * state.get("v", 0) + (1 - beta2) * gradient**2
        ratio = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + of["eps"])
        update = ratio + of["decay"] * p
        p.sub_(of["lr"] * p.norm() / update.norm() * update)


OWN = {"Lion": Lion, "Lars": Lars, "Lamb": Lamb}


def noise(seed, i):
    """As in golden.rs: a multiple of 1/16 from -2 to below 2."""
    mixed = ((i * 2_654_435_761) ^ (seed * 40_503)) & 0xFFFFFFFF
    return ((mixed >> 5) % 64) / 16 - 2


def gradient(t, i):
    """Elements differ in size, every fifth is zero in every other step, and the first always."""
    return 0.0 if i == 0 or (i % 5 == 0 and t % 2 == 0) else noise(100 + t, i) * 2.0 ** (i % 7 - 4)


def run(dtype, tensors, optimizers, clip=(None, None)):
    """{tensor: weights} in the end, of {tensor: elements}."""
    places, weights, at = {}, {}, 0
    for name, count in tensors.items():
        places[name] = range(at, at + count)
        weights[name] = torch.tensor([3 + noise(1, i) / 2 for i in places[name]], dtype=dtype, requires_grad=True)
        at += count
    made = []
    for kind, groups in optimizers:
        params = [{"params": [weights[name] for name in names], **options} for names, options in groups]
        made.append((OWN.get(kind) or getattr(torch.optim, kind))(params, **groups[0][1]))
    for t in range(1, STEPS + 1):
        for name, place in places.items():
            weights[name].grad = torch.tensor([gradient(t, i) for i in place], dtype=dtype)
        if clip[0]:
            torch.nn.utils.clip_grad_norm_(weights.values(), clip[0])
        if clip[1]:
            torch.nn.utils.clip_grad_value_(weights.values(), clip[1])
        for optimizer in made:
            optimizer.step()
    return {name: value.detach().tolist() for name, value in weights.items()}


def write(name, head, cases):
    lines = ",\n".join(json.dumps(case) for case in cases)
    (OUT / name).write_text(f'{{"torch": "{torch.__version__}", {head}"steps": {STEPS}, "cases": [\n{lines}\n]}}\n')


def main():
    dtypes, plain, groups = {"f64": torch.float64, "f32": torch.float32}, [], []
    for reducer, settings in CASES:
        kind, options = OPTIMIZERS.get(reducer, (reducer.capitalize(), {}))
        options = options | {NAMES[name]: float(value) for name, value in settings.items() if name in NAMES}
        if "beta1" in settings:
            options["betas"] = float(settings["beta1"]), float(settings["beta2"])
        clip = [float(settings.get(name, 0)) for name in ("clip_norm", "clip_value")]
        task = {"all": ELEMENTS}, [(kind, [(["all"], options)])], clip
        ends = {name: run(dtype, *task)["all"] for name, dtype in dtypes.items()}
        plain.append({"reducer": reducer, "settings": settings, **ends})
    for reducer, settings, optimizers in GROUPS:
        ends = {name: run(dtype, TENSORS, optimizers) for name, dtype in dtypes.items()}
        groups.append({"reducer": reducer, "settings": settings, **ends})
    write("torch.json", f'"elements": {ELEMENTS}, ', plain)
    write("torch_groups.json", "", groups)


if __name__ == "__main__":
    main()
