"""Reducers that take models in place of gradients, as docs/use/reducers.md promises it under "Models and replicas".

The references follow the papers: Crossbow's Algorithm 2 (Koliousis et al.), equations 3 and 4 of elastic averaging SGD
(Zhang, Choromanska, LeCun), and DiLoCo's Algorithm 1 (Douillard et al.).
"""

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from filetools import BLOCK, array, fails, part_of, raises, write_safetensors

SIZE = 2 * BLOCK + 1236
COUNT = SIZE // 4
FINE = 2e-6


def numbers(seed):
    return np.random.default_rng(seed).uniform(-1, 1, COUNT)


def gradient(weights, who, step):
    """Of a loss whose minimum is elsewhere for each learner."""
    return 0.5 * (weights - numbers(100 + who)) + 0.1 * numbers(1000 * step + who)


class Learners:
    """Learners of one mount that take their steps together."""

    def __init__(self, mount, count, first=0):
        self.dtype = "<f8" if (mount.model / "weights").stat().st_size == 8 * COUNT else "<f4"
        self.places = [mount.join(f"l{i}") for i in range(first, first + count)]
        self.threads = ThreadPoolExecutor(count)

    def read(self):
        """What each learner reads of its weights."""
        return list(self.threads.map(lambda place: array(place / "weights", self.dtype).copy(), self.places))

    def write(self, models):
        write = lambda place, model: (place / "gradients").write_bytes(model.astype(self.dtype).tobytes())  # noqa: E731
        list(self.threads.map(write, self.places, models))


def model(start_mount, count, reducer, dtype="<f4", **settings):
    """A mount with a model that is not zero, and what it is."""
    settings |= {"size": COUNT * np.dtype(dtype).itemsize, "dtype": {"<f4": "f32", "<f8": "f64"}[dtype]}
    mount = start_mount(block_size=BLOCK, learners=count, reducer=reducer, **settings)
    first = numbers(0).astype(dtype)
    (mount.model / "weights").write_bytes(first.tobytes())
    mount.wait_for_version(1)
    return mount, first.astype("f8")


@pytest.mark.also_on_network
def test_average_goes_to_the_mean_of_the_models(start_mount):
    mount, central = model(start_mount, 3, "average")
    learners = Learners(mount, 3)
    for step in range(4):
        read = learners.read()
        np.testing.assert_allclose(read, [central] * 3, rtol=0, atol=FINE)
        models = [weights - 0.1 * gradient(weights, who, step) for who, weights in enumerate(read)]
        learners.write(models)
        central = np.mean([model.astype("<f4").astype("f8") for model in models], axis=0)
    np.testing.assert_allclose(learners.read()[0], central, rtol=0, atol=FINE)


@pytest.mark.also_on_network
@pytest.mark.parametrize("elasticity, dtype, fine", [(0, "<f4", FINE), (0.2, "<f8", 1e-13)])
def test_easgd_is_elastic_averaging(start_mount, elasticity, dtype, fine):
    """Each learner reads a replica of its own; `weights` of the model is the central one."""
    mount, central = model(start_mount, 3, "easgd", dtype, elasticity=elasticity)
    learners, alpha = Learners(mount, 3), elasticity or 1 / 3
    replicas = [central] * 3
    for step in range(5):
        read = learners.read()
        np.testing.assert_allclose(read, replicas, rtol=0, atol=4 * fine)
        written = [weights - 0.1 * gradient(weights, who, step) for who, weights in enumerate(read)]
        learners.write(written)
        corrections = [alpha * (replica - central) for replica in replicas]
        replicas = [model - correction for model, correction in zip(written, corrections, strict=True)]
        central = central + sum(corrections)
    learners.read()
    np.testing.assert_allclose(array(mount.model / "weights", dtype), central, rtol=0, atol=5 * fine)


def test_easgd_is_elastic_averaging__of_all_mounts_learners(cluster):
    """The default elasticity is one by the number of learners in the job, wherever they are."""
    one = cluster(1, size=4 * COUNT, block_size=BLOCK, reducer="easgd", learners=2, timeout=200)
    mounts = [one.mount(), one.mount()]
    places = [mount.join(f"l{i}") for i, mount in enumerate(mounts)]
    for replica in (0, 1, 1.5):
        read = [array(place / "weights") for place in places]
        assert all((weights == replica).all() for weights in read), [weights[0] for weights in read]
        with ThreadPoolExecutor(2) as threads:
            written = [(replica + 1 + np.zeros(COUNT, "<f4")).tobytes() for _ in places]
            list(threads.map(lambda of: (of[0] / "gradients").write_bytes(of[1]), zip(places, written, strict=True)))
    [array(place / "weights") for place in places]
    assert (array(mounts[0].model / "weights") == 1.5).all()


@pytest.mark.also_on_network
def test_sma_is_algorithm_2_of_crossbow(start_mount):
    mount, central = model(start_mount, 2, "sma", momentum=0.75, learning_rate=0.1)
    learners, before = Learners(mount, 2), central
    replicas = [central] * 2
    for step in range(12):
        rate = 0.1 if step < 6 else 0.05
        if step == 6:
            mount.control("learning_rate", 0.05)
        read = learners.read()
        np.testing.assert_allclose(read, replicas, rtol=0, atol=8 * FINE)
        written = [weights - rate * gradient(weights, who, step) for who, weights in enumerate(read)]
        learners.write(written)
        corrections = [(replica - central) / 2 for replica in replicas]
        replicas = [model - correction for model, correction in zip(written, corrections, strict=True)]
        central, before = central + sum(corrections) + 0.75 * (central - before), central
        if step == 6:
            # Another learning rate: the algorithm begins anew from the next central model.
            replicas, before = [central] * 2, central
    learners.read()
    np.testing.assert_allclose(array(mount.model / "weights"), central, rtol=0, atol=2e-5)


def test_sma_has_two_levels(cluster):
    """Two hosts of two learners each are Algorithm 2 with four learners, and one sum of each host goes to the shards."""
    one = cluster(2)
    size = 4 * COUNT
    one.create("m", size=size, block_size=BLOCK, reducer="sma", learners=4, momentum=0.75, timeout=200)
    mounts = [one.mount(), one.mount()]
    hosts = [Learners(mount, 2, first=2 * host) for host, mount in enumerate(mounts)]
    central = before = np.zeros(COUNT)
    replicas, steps = [central] * 4, 5
    for step in range(steps):
        with ThreadPoolExecutor(2) as threads:
            read = [weights for host in threads.map(Learners.read, hosts) for weights in host]
            np.testing.assert_allclose(read, replicas, rtol=0, atol=2e-5)
            written = [weights - 0.1 * gradient(weights, who, step) for who, weights in enumerate(read)]
            list(threads.map(Learners.write, hosts, (written[:2], written[2:])))
        corrections = [(replica - central) / 4 for replica in replicas]
        replicas = [model - correction for model, correction in zip(written, corrections, strict=True)]
        central, before = central + sum(corrections) + 0.75 * (central - before), central
    for host, mount in zip(hosts, mounts, strict=True):
        host.read()
        # The reference model of each host is the central one.
        np.testing.assert_allclose(array(mount.model / "weights"), central, rtol=0, atol=2e-5)
        assert mount.status()["payload"]["pushed_bytes"] == steps * size


@pytest.mark.also_on_network
@pytest.mark.parametrize("dtype, fine", [("<f4", FINE), ("<f8", 1e-13)])
def test_diloco_steps_along_the_mean_change(start_mount, dtype, fine):
    """Nesterov momentum as torch has it, with the mean of what learners began from, less what they came to, as gradient."""
    mount, central = model(start_mount, 2, "diloco", dtype, momentum=0.9, learning_rate=0.7)
    learners, momentum = Learners(mount, 2), None
    for outer in range(5):
        models = []
        for who, weights in enumerate(learners.read()):
            for inner in range(3):
                weights = weights - 0.1 * gradient(weights, who, 10 * outer + inner)
            models.append(weights.astype(dtype).astype("f8"))
        learners.write(models)
        pseudo = np.mean([central - model for model in models], axis=0)
        momentum = pseudo if momentum is None else 0.9 * momentum + pseudo
        central = central - 0.7 * (pseudo + 0.9 * momentum)
    np.testing.assert_allclose(learners.read()[0], central, rtol=0, atol=20 * fine)


@pytest.mark.also_on_network
def test_an_open_replica_stays_as_it_is(start_mount):
    """Also when it is mapped, and when many steps follow."""
    mount, _ = model(start_mount, 1, "easgd", elasticity=0.5)
    learners = Learners(mount, 1)
    held = []
    for step in range(6):
        fd = os.open(learners.places[0] / "weights", os.O_RDONLY)
        mapped = mmap.mmap(fd, 4 * COUNT, prot=mmap.PROT_READ)
        weights = np.frombuffer(mapped, "<f4")
        held.append((fd, mapped, weights.copy()))
        learners.write([weights - 0.1 * gradient(weights, 0, step)])
        del weights
    for fd, mapped, weights in held:
        assert os.pread(fd, 4 * COUNT, 0) == weights.tobytes() == mapped[:]
        os.close(fd)
        mapped.close()


@pytest.mark.also_on_network
@pytest.mark.parametrize("consistency", ["async", "ssp(1)"])
def test_a_learner_reads_its_replica_with_its_last_contribution(start_mount, consistency):
    """Also where opens do not wait for other weights. What the replica loses, the model gets."""
    mount, central = model(start_mount, 1, "easgd", consistency=consistency, elasticity=0.25)
    place = mount.join("l")
    for _ in range(20):
        mount.contribute(array(place / "weights") + 1, learner="l")
    replica, central_now = array(place / "weights"), array(mount.model / "weights")
    np.testing.assert_allclose(replica + central_now, 2 * central + 20, atol=1e-4)


@pytest.mark.also_on_network
def test_replicas_begin_anew_under_another_reducer(start_mount):
    mount, _ = model(start_mount, 1, "easgd", elasticity=0.25)
    place = mount.join("l")
    for _ in range(3):
        mount.contribute(array(place / "weights") + 1, learner="l")
    array(place / "weights")
    mount.control("reducer", "assign")
    mount.contribute(np.full(COUNT, 100, "<f4"), learner="l")
    array(place / "weights")
    mount.control("reducer", "easgd")
    assert (array(place / "weights") == 100).all()
    mount.contribute(array(place / "weights") + 1, learner="l")
    assert (array(place / "weights") == 101).all()


@pytest.mark.also_on_network
@pytest.mark.parametrize("reducer", ["average", "easgd"])
def test_mapped_models_are_models(start_mount, reducer):
    """The mapping keeps its contents, and is shipped as what it differs from what its learner began from."""
    mount, central = model(start_mount, 1, reducer, elasticity=0.25)
    place, replica = mount.join("l"), central
    fd = os.open(place / "gradients", os.O_RDWR | os.O_DIRECT)
    mapped = mmap.mmap(fd, 4 * COUNT)
    for step in range(3):
        weights = array(place / "weights").astype("f8")
        np.testing.assert_allclose(weights, replica, atol=1e-5)
        stored = (weights - 0.1 * gradient(weights, 0, step)).astype("<f4")
        mapped[:] = stored.tobytes()
        os.posix_fallocate(fd, 0, BLOCK)
        os.fsync(fd)
        assert mapped[:] == stored.tobytes()
        correction = 0.25 * (replica - central)
        central, replica = (central + correction, stored - correction) if reducer == "easgd" else (stored, stored)
    array(place / "weights")
    np.testing.assert_allclose(array(mount.model / "weights"), central, atol=1e-5)
    mapped.close()
    os.close(fd)


@pytest.mark.also_on_network
@pytest.mark.parametrize("reducer", ["sma", "diloco"])
def test_parts_that_are_not_written_of_a_model_do_not_move_it(start_mount, reducer):
    mount, central = model(start_mount, 1, reducer, learning_rate=1, momentum=0, elasticity=0.5)
    place = mount.join("l")
    for value in (2.0, 3.0):
        before = array(place / "weights").copy()
        with open(place / "gradients", "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), np.full(1000, value, "<f4"), BLOCK - 2000)
        after = array(place / "weights")
        assert (after[: (BLOCK - 2000) // 4] == before[: (BLOCK - 2000) // 4]).all()
        assert (after[(BLOCK + 2000) // 4 :] == before[(BLOCK + 2000) // 4 :]).all()
    part = array(place / "weights")[(BLOCK - 2000) // 4 : (BLOCK + 2000) // 4]
    # A replica is what was written, less its correction: half of its way from the model, which did not move before.
    began = central[(BLOCK - 2000) // 4 : (BLOCK + 2000) // 4]
    np.testing.assert_allclose(part, 3 if reducer in ("average", "diloco") else 3 - (2 - began) / 2, rtol=1e-5)


@pytest.mark.also_on_network
@pytest.mark.parametrize("reducer", ["average", "diloco"])
def test_a_model_is_sent_as_what_its_learner_has_changed(start_mount, reducer):
    """So a late learner takes back nothing of what others have done meanwhile."""
    mount, central = model(start_mount, 1, reducer, consistency="async", learning_rate=1, momentum=0)
    first, second = mount.join("a", "b")
    began = array(second / "weights").copy()
    for _ in range(3):
        weights = array(first / "weights").copy()
        mount.contribute(weights + 1, learner="a")
        mount.wait_for_version(mount.version())
    mount.wait_for_version(4)
    mount.contribute(began - 0.5, learner="b")
    mount.wait_for_version(5)
    np.testing.assert_allclose(array(mount.model / "weights"), central + 2.5, atol=1e-5)
    # Who does not read has begun from the newest version.
    mount.contribute(central.astype("<f4"), learner="b")
    mount.wait_for_version(6)
    np.testing.assert_allclose(array(mount.model / "weights"), central, atol=1e-5)


@pytest.mark.also_on_network
def test_a_reducer_takes_no_contribution_that_was_begun_for_another(start_mount):
    mount, central = model(start_mount, 2, "average")
    first, second = mount.join("a", "b")
    [array(place / "weights") for place in (first, second)]
    mount.contribute(np.full(COUNT, 3, "<f4"), learner="a")
    for reducer in ("sgd", "sma", "assign"):
        fails(errno.EINVAL, mount.control, "reducer", reducer)
    assert "has contributions of models" in mount.stderr()
    mount.contribute(np.full(COUNT, 1, "<f4"), learner="b")
    mount.wait_for_version(2)
    # One that is still written is refused at its end, and dropped.
    with part_of(first / "gradients") as file:
        file.write(np.full(COUNT // 8, 9, "<f4"))
        mount.control("reducer", "sum")
        with raises(errno.EACCES):
            os.fsync(file.fileno())
    assert "the reducer is sum now: write it again" in (first / "error").read_text()
    [mount.contribute(np.full(COUNT, value, "<f4"), learner=name) for name, value in [("a", 1), ("b", 2)]]
    mount.wait_for_version(3)
    np.testing.assert_allclose(array(mount.model / "weights"), 2 + 3, atol=1e-5)


@pytest.mark.also_on_network
def test_fragments_of_a_model_have_steps_of_their_own(start_mount, tmp_path):
    """Two tensors take turns; each has the outer momentum of its own versions."""
    first = {name: numbers(seed)[:5000].astype("<f4") for seed, name in enumerate("ab")}
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {name: ("F32", [5000], values.tobytes()) for name, values in first.items()})
    settings = {"reducer": "diloco", "learning_rate": 0.7, "momentum": 0.9}
    mount = start_mount(model=str(path), block_size=BLOCK, **settings)
    place, central, momentum = mount.join("l"), first, dict.fromkeys("ab")
    for step in range(6):
        name, at = ("a", 0) if step % 2 == 0 else ("b", 5000)
        weights = array(place / "weights")[at : at + 5000]
        np.testing.assert_allclose(weights, central[name], atol=1e-5)
        model = weights - np.float32(0.1) * (step + 1)
        mount.contribute(model, offset=4 * at, learner="l")
        pseudo = central[name] - model
        momentum[name] = pseudo if momentum[name] is None else 0.9 * momentum[name] + pseudo
        central = {**central, name: central[name] - 0.7 * (pseudo + 0.9 * momentum[name])}
    np.testing.assert_allclose(array(place / "weights"), np.concatenate([*central.values()]), atol=1e-5)


@pytest.mark.also_on_network
@pytest.mark.parametrize("reducer", ["average", "sma"])
def test_a_model_with_nan_is_refused(start_mount, reducer):
    mount, central = model(start_mount, 1, reducer)
    place = mount.join("l")
    for at in (5, COUNT - 1):
        weights = array(place / "weights").copy()
        weights[at] = np.nan
        fails(errno.EINVAL, mount.contribute, weights, learner="l")
        fails(errno.EINVAL, mount.contribute, weights[at - 3 : at + 1], offset=4 * (at - 3), learner="l")
    mount.contribute(central.astype("<f4"), learner="l")
    np.testing.assert_allclose(array(place / "weights"), central, atol=1e-6)


@pytest.mark.also_on_network
def test_replicas_are_for_learners_with_weights_of_their_own(start_mount):
    mount, central = model(start_mount, 1, "sma")
    with raises(errno.EACCES):
        mount.contribute(central.astype("<f4"))
    assert "mkdir learners/NAME" in (mount.model / "error").read_text()


def test_bad_settings_of_averaging_are_refused(start_mount):
    mount, _ = model(start_mount, 1, "average")
    with raises(errno.EINVAL):
        mount.control("learners", 14)
        mount.control("consistency", "async")
    assert "max_versions (16) must be at least learners + 3 (17)" in mount.stderr()
    for name, value in [("elasticity", -0.1), ("elasticity", 1.5), ("elasticity", "nan"), ("clip_norm", 1), ("loss_scale", 8)]:
        fails(errno.EINVAL, mount.control, name, value)
    assert "clip_norm (1) is for gradients, and reducer average" in mount.stderr()
