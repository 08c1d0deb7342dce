"""Rules for single tensors, as docs/use/tensors.md promises them. torch's parameter groups are the reference."""

import errno
import math

import numpy as np
import pytest
from filetools import BLOCK, eventually, fails, read_safetensors, write_safetensors

torch = pytest.importorskip("torch")

# Several within a block, and one that ends in the middle of another.
SHAPES = {
    "embedding": (5 * BLOCK // 4 + 700,), "body.weight": (60, 100), "body.bias": (100,), "norm.weight": (64,),
    "head.weight": (33, 100), "head.bias": (33,),
}  # fmt: skip
RATE, DECAY = 0.003, 0.05
ADAMW = {"lr": RATE, "weight_decay": DECAY}
STILL = ["*.bias weight_decay=0", "norm.* weight_decay=0"]
SETTINGS = {"block_size": BLOCK, "reducer": "adamw", "learning_rate": RATE, "weight_decay": DECAY}


def initial():
    generator = np.random.RandomState(5)
    return {name: generator.standard_normal(shape).astype("<f4") for name, shape in SHAPES.items()}


def gradient(step):
    """All tensors, one behind the other, each with elements of another size."""
    generator = np.random.RandomState(100 + step)
    parts = [generator.standard_normal(math.prod(shape)) / (i + 1) for i, shape in enumerate(SHAPES.values())]
    return np.concatenate(parts).astype("<f4")


def tensors_of(flat):
    at, tensors = 0, {}
    for name, shape in SHAPES.items():
        tensors[name] = flat[at : at + math.prod(shape)].reshape(shape)
        at += math.prod(shape)
    return tensors


class Torch:
    """Parameters in double precision, and optimizers over groups of them."""

    def __init__(self, weights=None):
        tensor = lambda value: torch.tensor(value, dtype=torch.float64, requires_grad=True)  # noqa: E731
        self.params = {name: tensor(value) for name, value in (weights or initial()).items()}
        self.optimizers = []

    def add(self, kind, *groups):
        """Groups: names of tensors, some with a `*` at the end, and their options."""
        params = []
        for patterns, options in groups:
            names = [name for name in self.params if any(self.matches(pattern, name) for pattern in patterns)]
            params.append({"params": [self.params[name] for name in names], **options})
        self.optimizers.append(getattr(torch.optim, kind)(params, lr=1))
        return self

    @staticmethod
    def matches(pattern, name):
        return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern

    def step(self, number, clip_norm=None, frozen=()):
        for name, value in tensors_of(gradient(number)).items():
            self.params[name].grad = torch.tensor(value, dtype=torch.float64)
        if clip_norm:
            counts = [param for name, param in self.params.items() if name not in frozen]
            torch.nn.utils.clip_grad_norm_(counts, clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    return write_safetensors(path, {name: ("F32", value.shape, value.tobytes()) for name, value in initial().items()})


def check(mount, reference, what=""):
    mount.catch_up()
    for name, param in reference.params.items():
        got = np.load(mount.model / "tensors" / f"{name}.npy")
        np.testing.assert_allclose(got, param.detach().numpy(), rtol=3e-5, atol=3e-6, err_msg=f"{name} {what}")


def train(mount, reference, steps, **options):
    for number in steps:
        mount.contribute(gradient(number))
        reference.step(number, **options)
    check(mount, reference, f"after {steps}")


@pytest.mark.also_on_network
def test_a_rule_counts_for_its_tensors(start_mount, model):
    """No decay of biases and norms, another rate of the head, plain SGD of the embedding: 100 steps."""
    rules = ["embedding learning_rate_scale=2 reducer=sgd", *STILL, "head.weight learning_rate_scale=0.1"]
    mount = start_mount(model=model, tensors=rules, **SETTINGS)
    assert mount.control("tensors") == "\n".join(rules)
    reference = Torch().add(
        "AdamW",
        (["body.weight"], ADAMW), (["body.bias", "head.bias", "norm.*"], {**ADAMW, "weight_decay": 0}),
        (["head.weight"], {**ADAMW, "lr": RATE * 0.1}),
    ).add("SGD", (["embedding"], {**ADAMW, "lr": RATE * 2}))  # fmt: skip
    train(mount, reference, range(100))


def test_a_rule_counts_for_its_tensors__with_a_schedule(start_mount, model):
    mount = start_mount(model=model, tensors=["head.* learning_rate_scale=0.1"], warmup=4, **SETTINGS)
    reference = Torch().add("AdamW", (["embedding", "body.*", "norm.*"], ADAMW), (["head.*"], {**ADAMW, "lr": RATE * 0.1}))
    rates = [group["lr"] for group in reference.optimizers[0].param_groups]
    for number in range(8):
        for group, rate in zip(reference.optimizers[0].param_groups, rates):
            group["lr"] = rate * min(number / 4, 1)
        train(mount, reference, [number])


@pytest.mark.also_on_network
def test_the_first_rule_that_matches_counts(start_mount, model):
    """A line that names nothing exempts its tensors from later ones."""
    mount = start_mount(model=model, **SETTINGS)
    mount.control("tensors", "head.bias\n*.bias frozen reducer=sgd\n\n  bo?y*   Weight_Decay=0.50\n* FROZEN\n")
    plain = "head.bias\n*.bias frozen reducer=sgd\nbo?y* weight_decay=0.5\n* frozen"
    eventually(lambda: mount.control("tensors") == plain)
    reference = Torch().add("AdamW", (["head.bias"], ADAMW), (["body.weight"], {**ADAMW, "weight_decay": 0.5}))
    train(mount, reference, range(4))
    frozen = set(SHAPES) - {"head.bias", "body.weight"}
    for name in frozen:
        assert np.load(mount.model / "tensors" / f"{name}.npy").tobytes() == initial()[name].tobytes(), name
    # Frozen by either setting; and without rules only by `frozen`.
    mount.control("frozen", "head.*")
    mount.control("tensors", "body.bias frozen")
    reference = Torch({name: np.load(mount.model / "tensors" / f"{name}.npy") for name in SHAPES})
    mount.control("reducer", "sgd")
    reference.add("SGD", (["embedding", "body.weight", "norm.*"], ADAMW))
    train(mount, reference, range(4, 6))
    (mount.model / "control" / "tensors").write_text("")
    eventually(lambda: mount.control("tensors") == "")
    reference.optimizers.clear()
    reference.add("SGD", (["embedding", "body.*", "norm.*"], ADAMW))
    train(mount, reference, range(6, 8))


WRONG = [
    ("head.* frosen", "line 1: \"frosen\" is not frozen, weight_decay=NUMBER, learning_rate_scale=NUMBER or"),
    ("embedding frozen\nhead.* weight_decay=-1", "line 2: \"weight_decay=-1\": \"-1\" is not a finite number >= 0"),
    ("head.* learning_rate_scale=inf", "\"inf\" is not a finite number >= 0"),
    ("head.* reducer=assign", "reducer assign is for whole models: use one of sum, sgd,"),
    ("head.* reducer=larc", "unknown reducer \"larc\": use one of sum, sgd,"),
    ("a name frozen", "? stands for a space"),
    ("head.* weight_decay=0\ntail.*", "no tensor has a name that matches the pattern \"tail.*\""),
    ("head.*\n*.bias frozen\nhead.bias frozen", "the rule for \"head.bias\" never counts"),
    ("head.* frozen\n" * 5000, "70000 bytes of rules in tensors, the limit is 65536"),
]  # fmt: skip


@pytest.mark.also_on_network
def test_wrong_rules_change_nothing(start_mount, model):
    mount = start_mount(model=model, tensors=STILL, **SETTINGS)
    for rules, why in WRONG:
        fails(errno.EINVAL, mount.control, "tensors", rules)
        assert len(rules) > 65536 or why in mount.stderr()
        assert mount.control("tensors") == "\n".join(STILL)


def test_wrong_rules_change_nothing__on_the_command_line(gradfs, model, mnt):
    for rules, why in WRONG[-4:-1]:
        done = gradfs("up", model, mnt, *(f"--tensors={rule}" for rule in rules.split("\n")))
        assert done.returncode == 2 and why in done.stderr, done.stderr


def test_wrong_rules_change_nothing__beside_other_settings(start_mount, model):
    """Reducers that do not go together, whichever comes last."""
    mount = start_mount(model=model, tensors=["head.* reducer=sum"], **SETTINGS)
    for name, value, why in [
        ("reducer", "assign", "a rule in tensors has reducer=sum: take that out first"),
        ("clip_norm", "1", "only one of reducers adamw and sum takes the mean"),
    ]:
        fails(errno.EINVAL, mount.control, name, value)
        assert why in mount.stderr()
    mount.control("aggregation", "sum")
    mount.control("clip_norm", "1")


@pytest.mark.also_on_network
def test_a_mark_of_a_sparse_table_means_nothing_yet(start_mount, tmp_path):
    values, mark = np.arange(3 * BLOCK // 4, dtype="<f4"), {"gradfs.sparse": "table"}
    path = write_safetensors(tmp_path / "m.safetensors", {"table": ("F32", values.shape, values.tobytes())}, mark)
    mount = start_mount(model=path, block_size=BLOCK)
    fails(errno.EINVAL, mount.control, "tensors", "table sparse")
    assert 'line 1: "sparse" is not frozen' in mount.stderr()
    tensors, metadata = read_safetensors((mount.model / "weights.safetensors").read_bytes())
    assert metadata["gradfs.sparse"] == "table" and tensors["table"][2] == values.tobytes()


# A rule for each tensor, of which the last one freezes its tensor: almost 64 KiB.
MANY = [f"layer{number:03}.{'w' * 66}" for number in range(640)]
MANY_RULES = "\n".join([*(f"{name} learning_rate_scale=2" for name in MANY[:-1]), f"{MANY[-1]} frozen"])


def test_a_rule_counts_for_its_tensors__among_many_over_tcp(cluster, tmp_path):
    """Another mount, and one that begins later, show all of them."""
    one, path = cluster(1), tmp_path / "many.safetensors"
    write_safetensors(path, {name: ("F32", (BLOCK // 256,), bytes(BLOCK // 64)) for name in MANY})
    one.create("m", model=path, block_size=BLOCK, reducer="sgd", learning_rate=1)
    mount, other = one.mount(transport="tcp"), one.mount(transport="tcp")
    assert 60_000 < len(MANY_RULES) < 65_536
    assert mount.control("tensors", MANY_RULES) == MANY_RULES
    mount.contribute(np.ones(len(MANY) * BLOCK // 256, "<f4"))
    values = np.frombuffer(mount.weights(), "<f4").reshape(len(MANY), -1)
    assert (values[:-1] == -2).all() and not values[-1].any()
    eventually(lambda: other.control("tensors") == MANY_RULES)
    assert one.mount(transport="tcp").control("tensors") == MANY_RULES


@pytest.mark.also_on_network
def test_a_norm_is_over_all_tensors_whatever_their_rules(start_mount, model):
    """But for those that a rule freezes."""
    rules = ["embedding frozen", "head.* reducer=sgd", *STILL]
    mount = start_mount(model=model, tensors=rules, clip_norm=3, **SETTINGS)
    reference = Torch().add(
        "AdamW", (["body.weight"], ADAMW), (["body.bias", "norm.*"], {**ADAMW, "weight_decay": 0})
    ).add("SGD", (["head.*"], ADAMW))
    train(mount, reference, range(5), clip_norm=3, frozen=["embedding"])
    parts = [value for name, value in tensors_of(gradient(4)).items() if name != "embedding"]
    norm = math.sqrt(sum(float((value.astype("f8") ** 2).sum()) for value in parts))
    assert norm > 3
    eventually(lambda: mount.status()["gradient_norm"] == pytest.approx(norm, rel=1e-6))


@pytest.mark.also_on_network
def test_a_tensor_whose_reducer_changes_begins_anew(start_mount, model):
    """By a rule or by the model's reducer; the others go on with their state and their steps."""
    mount = start_mount(model=model, **SETTINGS)
    reference = Torch().add("AdamW", ([*SHAPES], ADAMW))
    train(mount, reference, range(3))
    mount.control("tensors", "head.* reducer=momentum\nbody.* reducer=adamw")
    rest = [name for name in SHAPES if not name.startswith("head.")]
    reference.optimizers[0].param_groups[0]["params"] = [reference.params[name] for name in rest]
    reference.add("SGD", (["head.*"], {**ADAMW, "momentum": 0.9}))
    train(mount, reference, range(3, 6))
    # Now the body alone goes on with AdamW, and the rest with Adam; then the head is of the model's reducer.
    mount.control("reducer", "adam")
    body = [reference.params[name] for name in ("body.weight", "body.bias")]
    reference.optimizers[0].param_groups[0]["params"] = body
    reference.add("Adam", (["embedding", "norm.*"], ADAMW))
    train(mount, reference, range(6, 9))
    mount.control("tensors", "body.* reducer=adamw")
    del reference.optimizers[1]
    reference.add("Adam", (["head.*"], ADAMW))
    train(mount, reference, range(9, 12))


def test_rules_go_on_after_a_snapshot_and_a_move(start_mount, gradfs, cluster, model, tmp_path):
    rules = ["embedding reducer=lion", "head.* reducer=momentum", "norm.* reducer=sgd", *STILL[:1]]
    first = start_mount(model=model, tensors=rules, **SETTINGS)
    for number in range(3):
        first.contribute(gradient(number))
    done = gradfs("save", first.model, tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    for number in range(3, 6):
        first.contribute(gradient(number))
    first.catch_up()
    expected = (first.model / "weights").read_bytes()
    second = start_mount("--from", tmp_path / "saved", name="m")
    assert second.control("tensors") == "\n".join(rules)
    for number in range(3, 6):
        second.contribute(gradient(number))
    second.catch_up()
    assert (second.model / "weights").read_bytes() == expected
    # Another rule for some: those begin anew.
    other = start_mount("--from", tmp_path / "saved", "--tensors", rules[0], name="m")
    assert other.control("tensors") == rules[0]
    reference = Torch({name: np.load(other.model / "tensors" / f"{name}.npy") for name in SHAPES})
    reference.add("AdamW", (["head.*", "norm.*"], ADAMW))
    other.contribute(gradient(3))
    reference.step(3)
    other.catch_up()
    for name in ["head.weight", "head.bias", "norm.weight"]:
        got = np.load(other.model / "tensors" / f"{name}.npy")
        np.testing.assert_allclose(got, reference.params[name].detach().numpy(), rtol=3e-5, atol=3e-6, err_msg=name)
    # On shards, whose coordinator changes.
    one = cluster(2)
    one.create("m", "--from", tmp_path / "saved")
    mount = one.mount()
    mount.contribute(gradient(3))
    done = one.run("drain", one.coordinator_shard("m").address)
    assert done.returncode == 0, done.stderr
    for number in range(4, 6):
        mount.contribute(gradient(number))
    mount.catch_up()
    assert mount.control("tensors") == "\n".join(rules)
    assert (mount.model / "weights").read_bytes() == expected
