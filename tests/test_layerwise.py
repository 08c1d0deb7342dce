"""`lars` and `lamb`, whose steps depend on the norms of each tensor, as docs/use/reducers.md promises it."""

import errno
import time
from functools import partial

import numpy as np
import pytest
from filetools import BLOCK, Threads, array, fails, write_safetensors

# Two large tensors in several blocks, which end in the middle of one, and small ones in the block of others.
TENSORS = {"a.weight": 3 * BLOCK // 4 + 1001, "a.bias": 77, "b.weight": 5 * BLOCK // 8 + 3, "b.bias": 5}
RATE, DECAY, TRUST, MU, EPSILON = 0.25, 0.0625, 0.125, 0.5, 1e-3
SETTINGS = {
    "block_size": BLOCK, "learning_rate": RATE, "weight_decay": DECAY, "trust_coefficient": TRUST, "momentum": MU,
    "epsilon": EPSILON, "learners": 2, "timeout": 20,
}  # fmt: skip

pytestmark = pytest.mark.also_on_network


def split(values):
    ends = np.cumsum(list(TENSORS.values()))
    return dict(zip(TENSORS, np.split(values, ends[:-1])))


class Reference:
    """The papers' formulas, in double precision."""

    def __init__(self, weights, reducer_of):
        self.weights = {name: part.astype("f8") for name, part in split(weights).items()}
        self.reducers = {name: reducer_of(name) for name in TENSORS}
        self.state = {name: [np.zeros(part.size), np.zeros(part.size)] for name, part in self.weights.items()}
        self.t = 0

    def step(self, gradient):
        self.t += 1
        norm = np.linalg.norm
        for name, g in split(gradient).items():
            w, (m, v) = self.weights[name], self.state[name]
            if self.reducers[name] == "lamb":
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                r = m / (1 - 0.9**self.t) / (np.sqrt(v / (1 - 0.999**self.t)) + EPSILON) + DECAY * w
                change = RATE * norm(w) / norm(r) * r
            else:
                ratio = TRUST * norm(w) / (norm(g) + DECAY * norm(w)) if self.reducers[name] == "lars" else 1
                m = MU * m + ratio * (g + DECAY * w)
                change = RATE * m
            self.weights[name], self.state[name] = w - change, [m, v]

    def all(self):
        return np.concatenate(list(self.weights.values()))


def model(tmp_path):
    count = sum(TENSORS.values())
    weights = 1 + np.random.RandomState(3).standard_normal(count).astype("<f4")
    parts = {name: ("F32", part.shape, part.tobytes()) for name, part in split(weights).items()}
    return write_safetensors(tmp_path / "m.safetensors", parts), weights


def gradients(steps):
    generator = np.random.RandomState(8)
    for _ in range(steps):
        scales = np.concatenate([np.full(count, 10.0 ** generator.randint(-4, 4)) for count in TENSORS.values()])
        yield (scales * generator.standard_normal((2, scales.size))).astype("<f4")


def contribute(mount, pair):
    Threads().run(*(partial(mount.contribute, part, learner=name) for name, part in zip("ab", pair)))
    mount.catch_up()


@pytest.mark.parametrize(
    "reducer, rules",
    [("lars", ["*.bias reducer=momentum"]), ("lamb", []), ("lamb", ["*.bias reducer=lars"])],
    ids=["lars", "lamb", "both"],
)
def test_lars_and_lamb_scale_the_step_of_each_tensor(start_mount, tmp_path, reducer, rules):
    """Two learners, against NumPy. Gradients of different tensors differ by orders of magnitude, and the steps do not."""
    path, weights = model(tmp_path)
    mount = start_mount(model=path, reducer=reducer, tensors=rules, **SETTINGS)
    mount.join(*"ab")
    other = rules[0].rpartition("=")[2] if rules else reducer
    reference = Reference(weights, lambda name: other if name.endswith("bias") else reducer)
    for pair in gradients(4):
        contribute(mount, pair)
        reference.step(pair.astype("f8").mean(axis=0))
        np.testing.assert_allclose(array(mount.model / "weights"), reference.all(), rtol=2e-5, atol=2e-5)


def test_a_layerwise_step_is_clipped_before_it_is_measured(start_mount, tmp_path):
    path, weights = model(tmp_path)
    mount = start_mount(model=path, reducer="lamb", clip_norm=1, **{**SETTINGS, "learners": 1})
    mount.join("a")
    reference = Reference(weights, lambda name: "lamb")
    for first, _ in gradients(3):
        mount.contribute(first, learner="a")
        mount.catch_up()
        norm = np.linalg.norm(first.astype("f8"))
        reference.step(first.astype("f8") * min(1.0, 1 / (norm + 1e-6)))
        assert mount.status()["gradient_norm"] == pytest.approx(norm, rel=1e-6)
        np.testing.assert_allclose(array(mount.model / "weights"), reference.all(), rtol=2e-5, atol=2e-5)


@pytest.mark.one_process
@pytest.mark.parametrize("reducer", ["lars", "lamb"])
def test_a_layerwise_run_is_the_same_on_any_shards(start_mount, cluster, tmp_path, reducer):
    """Bit by bit, with `deterministic`."""
    path, _ = model(tmp_path)
    settings = {**SETTINGS, "model": path, "reducer": reducer, "deterministic": True}

    def run(mount):
        mount.join(*"ab")
        for pair in gradients(3):
            contribute(mount, pair)
        return mount.weights("a")

    alone = run(start_mount(**settings))
    for shards in (1, 2, 3):
        one = cluster(shards, **settings)
        assert run(one.mount()) == alone, f"{shards} shards"


@pytest.mark.one_process
def test_a_layerwise_job_goes_on_after_a_snapshot(start_mount, tmp_path, gradfs):
    path, _ = model(tmp_path)
    pairs = list(gradients(4))

    def run(mount, part):
        mount.join(*"ab")
        for pair in part:
            contribute(mount, pair)
        return mount

    settings = {**SETTINGS, "deterministic": True}
    whole = run(start_mount(model=path, reducer="lamb", **settings), pairs).weights("a")
    first = run(start_mount(model=path, reducer="lamb", **settings), pairs[:2])
    said = gradfs("save", first.model, tmp_path / "saved")
    assert said.returncode == 0, said.stderr
    first.kill()
    second = start_mount("--from", tmp_path / "saved", name="m")
    assert run(second, pairs[2:]).weights("a") == whole


@pytest.mark.parametrize("reducer", ["lars", "lamb"])
def test_a_nan_makes_its_tensor_nan(start_mount, tmp_path, reducer):
    path, _ = model(tmp_path)
    mount = start_mount(model=path, reducer=reducer, nonfinite="accept", **{**SETTINGS, "learners": 1})
    gradient = next(iter(gradients(1)))[0]
    gradient[TENSORS["a.weight"] // 2] = float("nan")
    mount.contribute(gradient)
    mount.catch_up()
    for name, part in split(array(mount.model / "weights")).items():
        assert np.isnan(part).all() if name == "a.weight" else np.isfinite(part).all(), name


def test_new_weights_are_measured_anew(start_mount):
    """A blank model has its weights published while the step that they are for is measured, or before or after that."""
    count = 1 << 20
    for wait in (0, 0.01, 0.02, 0.05, 0.2):
        mount = start_mount(size=4 * count, block_size=BLOCK, reducer="lars", learning_rate=1, trust_coefficient=0.01)
        published = []

        def publish():
            time.sleep(wait)
            try:
                (mount.model / "publish").write_bytes(np.full(count, 3, "<f4").tobytes())
                published.append(True)
            except PermissionError:
                pass  # The first step was faster.

        Threads().run(lambda: mount.contribute(np.full(count, 2, "<f4")), publish)
        mount.catch_up()
        # The gradient is as large as the weights times 0.01, or as it is where the weights are zero.
        want = 3 - 0.03 if published else -2
        np.testing.assert_allclose(array(mount.model / "weights"), want, rtol=1e-5)


def test_a_layerwise_reducer_of_too_many_tensors_is_refused(start_mount, tmp_path):
    tensors = {f"t{i}": ("F32", (1,), bytes(4)) for i in range(1401)}
    path = write_safetensors(tmp_path / "many.safetensors", tensors)
    mount = start_mount(model=path, reducer="sgd", block_size=BLOCK)
    control = mount.model / "control"
    fails(errno.EINVAL, (control / "reducer").write_text, "lars")
    fails(errno.EINVAL, (control / "tensors").write_text, "t1 reducer=lamb")
    assert (control / "reducer").read_text().strip() == "sgd"
    assert (control / "tensors").read_text().strip() == ""
