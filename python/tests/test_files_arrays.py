"""What arrays become what tensors. No mount is needed."""

from __future__ import annotations

import array
import sys
import types

import numpy
import pytest

import gradfs
from gradfs import arrays
from gradfs.layout import BITS, Layout, Tensor, elements

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")
F32 = Tensor("w", "F32", (2, 3), 0, 24)
VALUES = numpy.arange(6, dtype="f4").reshape(2, 3)


def layout_of(dtype, shape=(2, 3)):
    return Layout([Tensor("w", dtype, shape, 0, elements(shape) * BITS[dtype] // 8)])


def bytes_of(value, dtype="F32"):
    ((tensor, described),) = arrays.checked(layout_of(dtype), {"w": value}, "test")
    return bytes(arrays.piece(described, tensor.dtype))


def refused(value, dtype="F32"):
    with pytest.raises(gradfs.Refused) as refusal:
        bytes_of(value, dtype)
    return str(refusal.value)


class OnlyDlpack:
    def __init__(self, inner, device=1):
        self.inner, self.device = inner, device

    def __dlpack__(self, **options):
        return self.inner.__dlpack__()

    def __dlpack_device__(self):
        return self.device, 0


def nested():
    flat = memoryview(VALUES.tobytes())
    return flat.cast("f", (2, 3))


@pytest.mark.parametrize(
    "value",
    [
        VALUES,
        numpy.asfortranarray(VALUES),
        VALUES.astype(">f4"),
        torch.from_numpy(VALUES),
        torch.from_numpy(VALUES.T.copy()).T,
        torch.from_numpy(VALUES.copy()).requires_grad_(),
        nested(),
        OnlyDlpack(VALUES),
    ],
    ids=["numpy", "fortran", "big-endian", "torch", "transposed", "requires_grad", "buffer", "dlpack"],
)
def test_arrays_of_any_library_and_order_have_their_bytes(value):
    assert bytes_of(value) == VALUES.tobytes()


def test_contiguous_arrays_are_not_copied():
    for value, address in [(VALUES, VALUES.ctypes.data), (held := torch.ones(2, 3), held.data_ptr())]:
        memory = arrays.piece(arrays.describe("w", value), "F32")
        assert numpy.frombuffer(memory, "u1").ctypes.data == address


def test_jax_arrays_have_their_bytes():
    jnp = pytest.importorskip("jax.numpy")
    assert bytes_of(jnp.asarray(VALUES)) == VALUES.tobytes()
    assert bytes_of(jnp.asarray(VALUES, "bfloat16"), "BF16") == VALUES.astype(ml_dtypes.bfloat16).tobytes()


def test_python_arrays_have_their_bytes():
    values = array.array("d", [1, 2])
    assert bytes(arrays.piece(arrays.describe("w", values), "F64")) == values.tobytes()


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "uint16"])
def test_a_wider_model_takes_narrower_types_without_loss(source):
    wanted = VALUES.tobytes()
    narrow = ml_dtypes.finfo(source).dtype if "float" in source else numpy.dtype(source)
    assert bytes_of(VALUES.astype(narrow)) == wanted
    assert bytes_of(torch.from_numpy(VALUES).to(getattr(torch, source))) == wanted


SPECIAL = numpy.array(
    [[0.1, -1.00390625, 3.3895e38], [numpy.inf, -numpy.inf, 1e-40], [1.0117188, 65520, numpy.nan]], "f4"
)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_narrower_model_rounds_fp32_to_nearest_even(dtype):
    name = arrays.NAMES[dtype]
    with numpy.errstate(over="ignore"):
        wanted = SPECIAL.astype(ml_dtypes.bfloat16 if dtype == "BF16" else "f2").astype("f4")
    for value in SPECIAL, torch.from_numpy(SPECIAL):
        memory = arrays.piece(arrays.describe("w", value), dtype)
        got = torch.frombuffer(bytearray(memory), dtype=getattr(torch, name)).float().numpy().reshape(3, 3)
        numpy.testing.assert_array_equal(got, wanted)


def test_numbers_beyond_e4m3_become_its_largest():
    values = numpy.array([1e6, -1e6, 0.5], "f4")
    for value in values, torch.from_numpy(values):
        memory = arrays.piece(arrays.describe("w", value), "F8_E4M3")
        assert numpy.frombuffer(memory, ml_dtypes.float8_e4m3fn).astype("f4").tolist() == [448, -448, 0.5]


@pytest.mark.parametrize(
    "source, dtype", [("f8", "F32"), ("i4", "F32"), ("i8", "F64"), ("f2", "BF16"), ("f4", "I32"), ("i8", "I32")]
)
def test_a_type_that_would_lose_values_is_refused_by_name(source, dtype):
    assert "w: the type is" in refused(VALUES.astype(source), dtype)
    assert "w: the type is" in refused(torch.from_numpy(VALUES.astype(source)), dtype)


def test_another_shape_is_refused_with_both_shapes():
    assert "w: the shape is [3, 2], and [2, 3] in the model" in refused(VALUES.T)


def test_an_unknown_name_is_refused():
    with pytest.raises(gradfs.Refused, match="v: the model has no such tensor"):
        arrays.checked(layout_of("F32"), {"v": VALUES}, "test")


def test_one_exception_lists_all_that_is_wrong():
    with pytest.raises(gradfs.Refused) as refusal:
        arrays.checked(layout_of("F32"), {"v": VALUES, "w": VALUES.astype("f8")}, "test")
    assert "v: " in str(refusal.value) and "w: " in str(refusal.value)


def test_arrays_of_another_device_are_refused():
    assert "is on meta" in refused(torch.empty(2, 3, device="meta"))
    assert "is on torch.sparse_coo" in refused(torch.ones(2, 3).to_sparse())
    assert "not in the host's memory" in refused(OnlyDlpack(VALUES, device=2))


def test_what_is_no_array_is_a_type_error():
    for value in [1.0, 2.0], 3.0, None, types.SimpleNamespace():
        with pytest.raises(TypeError, match="w: .* is no array"):
            bytes_of(value)


def test_arrays_of_no_tensors_type_are_refused():
    assert "type object" in refused(numpy.array([[None] * 3] * 2))
    assert "masked" in refused(numpy.ma.masked_array(VALUES, VALUES > 2))
    assert "type complex128" in refused(VALUES.astype("c16"))
    assert "buffer format" in refused(memoryview(b"abc").cast("c"))


def test_bf16_without_ml_dtypes_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    view = gradfs.View(Tensor("w", "BF16", (3,), 0, 6), memoryview(bytearray(6)))
    with pytest.raises(TypeError, match="install ml_dtypes, or use torch"):
        view.numpy()
    assert view.torch().dtype == torch.bfloat16
