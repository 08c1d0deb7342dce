from __future__ import annotations

import errno
import threading

import numpy
import pytest

import gradfs

W = numpy.arange(6, dtype="f4").reshape(2, 3)


@pytest.fixture
def model(start):
    tensors = {"w": W, "b": numpy.ones(4, "f2"), "n": numpy.array(7), "empty": numpy.zeros((0, 2), "f4")}
    with gradfs.open(start(tensors, "--reducer", "sgd", "--lr", 1)) as model:
        yield model


def test_weights_map_names_to_views_of_one_version(model):
    with model.pull() as weights:
        assert weights.version == model.version == 0
        assert set(weights) == {"w", "b", "n", "empty"}
        view = weights["w"]
        assert (view.name, view.dtype, view.shape) == ("w", "F32", (2, 3))
        assert view.tobytes() == W.tobytes()
        assert weights["n"].numpy() == 7
        assert weights["empty"].numpy().shape == (0, 2)
        model.push({"w": W})
        assert (view.numpy() == W).all()
    with model.pull() as weights:
        assert weights.version == 1
        assert not weights["w"].numpy().any()


def test_views_are_not_copied(model):
    torch = pytest.importorskip("torch")
    weights = model.pull()
    view = weights["w"]
    address = view.numpy().ctypes.data
    assert weights["w"].numpy().ctypes.data == address
    assert numpy.asarray(view).ctypes.data == address
    assert numpy.from_dlpack(view).ctypes.data == address
    assert view.torch().data_ptr() == address
    assert torch.from_dlpack(view).data_ptr() == address
    assert weights.torch()["w"].data_ptr() == weights.numpy()["w"].ctypes.data == address


def test_jax_takes_views(model):
    jax = pytest.importorskip("jax")
    view = model.pull()["w"]
    assert (numpy.asarray(jax.numpy.asarray(view)) == W).all()
    assert (numpy.asarray(jax.dlpack.from_dlpack(view)) == W).all()


def test_bf16_views_go_to_torch_and_jax_and_to_numpy_with_ml_dtypes(start):
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    pytest.importorskip("ml_dtypes")
    values = torch.tensor([1.0, -2.5, 3.0])
    view = gradfs.open(start({"w": values.bfloat16()})).pull()["w"]
    assert view.dtype == "BF16"
    assert torch.equal(view.torch(), values.bfloat16())
    assert torch.equal(torch.from_dlpack(view), values.bfloat16())
    assert view.numpy().astype("f4").tolist() == values.tolist()
    array = jax.dlpack.from_dlpack(view)
    assert array.dtype == jax.numpy.bfloat16 and array.astype("float32").tolist() == values.tolist()
    assert jax.numpy.asarray(view).astype("float32").tolist() == values.tolist()


def test_changes_in_place_are_the_readers_own(model):
    with model.pull() as mine:
        mine["w"].numpy()[:] = 5
        assert (mine["w"].numpy() == 5).all()
        with model.pull() as others:
            assert (others["w"].numpy() == W).all()


def test_views_outlive_their_weights(model):
    with model.pull() as weights:
        array = weights["w"].numpy()
    for _ in range(3):
        model.push({"w": W})
    del weights
    assert (array == W).all()


def test_closed_weights_give_no_views(model):
    weights = model.pull()
    weights.close()
    with pytest.raises(gradfs.Closed, match="version 0"):
        weights["w"]


def test_pull_copies_into_arrays_of_the_program(model):
    torch = pytest.importorskip("torch")
    numpys = {"w": numpy.zeros((3, 2), "f4").T, "b": numpy.zeros(4, "f4")}
    assert model.pull(out=numpys) == 0
    assert (numpys["w"] == W).all() and (numpys["b"] == 1).all()
    torches = {"w": torch.zeros(2, 3, requires_grad=True), "b": torch.zeros(4, dtype=torch.float16)}
    version = torches["w"]._version
    assert model.pull(out=torches) == 0
    assert (torches["w"].detach().numpy() == W).all() and (torches["b"] == 1).all()
    assert torches["w"]._version > version
    buffer = bytearray(24)
    model.pull(out={"w": memoryview(buffer).cast("f", (2, 3))})
    assert buffer == W.tobytes()


def test_arrays_that_cannot_hold_the_weights_are_refused_and_stay(model):
    jnp = pytest.importorskip("jax.numpy")
    fits = numpy.zeros((2, 3), "f4")
    readonly = numpy.zeros(4, "f2")
    readonly.flags.writeable = False
    for name, target, reason in [
        ("b", numpy.zeros(5, "f2"), r"b: the shape is \[5\], and \[4\]"),
        ("b", numpy.zeros(4, "i4"), "b: the type is I32, and F16"),
        ("b", readonly, "b: the array is read-only"),
        ("b", b"12345678", "b: "),
        ("b", jnp.zeros(4, "float16"), "b: .* cannot be written"),
        ("c", fits, "c: the model has no such tensor"),
    ]:
        with pytest.raises(gradfs.Refused, match=reason):
            model.pull(out={"w": fits, name: target})
    assert not fits.any()


def test_wait_returns_the_newer_version(model):
    assert model.wait(newer_than=-1) == 0
    waiter = threading.Timer(0.1, lambda: model.push({"w": W}))
    waiter.start()
    assert model.wait(newer_than=0, timeout=60) == 1
    waiter.join()


def test_wait_ends_at_its_timeout(model):
    with pytest.raises(gradfs.Timeout, match="newer than 0 within 0.05 s") as error:
        model.wait(timeout=0.05)
    assert isinstance(error.value, TimeoutError) and isinstance(error.value, gradfs.GradfsError)


@pytest.mark.mounted
def test_open_takes_a_mount_with_one_model_and_refuses_what_is_none(model, tmp_path):
    mount = str(tmp_path / "mount0")
    assert gradfs.open(mount).path == model.path
    with pytest.raises(gradfs.NotMounted, match="no model of a mount"):
        gradfs.open(tmp_path)
    with pytest.raises(gradfs.NotMounted, match="no model answers"):
        gradfs.open(tmp_path / "nothing")


@pytest.mark.mounted
def test_a_mount_of_several_models_asks_for_a_name(start, tmp_path):
    first = gradfs.create_from({"w": W}, tmp_path / "first.safetensors")
    second = gradfs.create_from({"w": W}, tmp_path / "second.safetensors")
    mount = start(second, "--name", "other", first).rsplit("/", 1)[0]
    with pytest.raises(gradfs.NotMounted, match="has the models model, other: name one"):
        gradfs.open(mount)


def test_a_closed_model_takes_no_call(model):
    model.close()
    for call in (
        model.pull,
        model.step,
        model.wait,
        model.join,
        lambda: model.push({"w": W}),
        lambda: model.publish({"w": W}),
        lambda: model.version,
        lambda: model.status,
        lambda: model.control,
    ):
        with pytest.raises(gradfs.Closed):
            call()


def test_status_is_what_status_json_has(model):
    assert model.status["model"] == "model" and model.status["control"]["reducer"] == "sgd"


@pytest.mark.mounted
def test_without_passthrough_weights_are_the_same(start):
    model = gradfs.open(start({"w": W}, "--no-passthrough", "--reducer", "sum"))
    model.push({"w": W})
    out = {"w": numpy.zeros_like(W)}
    with model.pull() as weights:
        weights["w"].numpy()[0] = 7
        assert model.pull(out=out) == weights.version == 1
    assert (out["w"] == 2 * W).all()


def test_held_versions_beyond_the_limit_are_an_error_with_words(start):
    model = gradfs.open(start({"w": W}, "--max-versions", "3", "--reducer", "assign"))
    held = []
    with pytest.raises(gradfs.GradfsError, match="max_versions") as error:
        for value in range(40):
            held.append(model.pull()["w"].numpy())
            model.publish({"w": numpy.full_like(W, value)})
    assert error.value.errno == errno.ENOMEM
    held.clear()
    assert model.pull().version == model.version
