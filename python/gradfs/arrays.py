"""The bytes of arrays of any library, and what may become of their types.

No library is imported that the program has not imported, but for NumPy where elements are converted.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import Refused
from .layout import BITS, Layout, Tensor

# The names of types in NumPy, torch, JAX and ml_dtypes.
NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F64": "float64", "F32": "float32", "F16": "float16", "C64": "complex64",
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
# Types that NumPy has only with ml_dtypes.
BEYOND_NUMPY = {"BF16", "F8_E4M3", "F8_E5M2"}
# Conversions that lose nothing, and those of fp32 that the model makes itself when it shows its masters.
_CONVERSIONS = {
    "F32": {"F64", "F16", "BF16", "F8_E4M3", "F8_E5M2"},
    "F16": {"F32", "F64"},
    "BF16": {"F32", "F64"},
    "F8_E4M3": {"F32", "F64"},
    "F8_E5M2": {"F32", "F64"},
    "U8": {"I16", "U16", "I32", "U32", "I64", "U64", "F16", "BF16", "F32", "F64"},
    "I8": {"I16", "I32", "I64", "F16", "BF16", "F32", "F64"},
    "U16": {"I32", "U32", "I64", "U64", "F32", "F64"},
    "I16": {"I32", "I64", "F32", "F64"},
    "U32": {"I64", "U64", "F64"},
    "I32": {"I64", "F64"},
}
# The largest number of F8_E4M3. Larger ones become it, as in the model.
E4M3_LIMIT = 448.0
# The memory that other processors read and write, but that is the host's: kDLCPU and kDLCUDAHost of DLPack.
_HOST_DEVICES = {1, 3}


class Described(NamedTuple):
    """An array as it is given, with its type and shape."""

    value: Any
    dtype: str
    shape: tuple[int, ...]


def describe(name: str, value: Any) -> Described:
    """The type and shape of an array.

    Raises TypeError for what is no array, and Refused for one that is not in the host's memory.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device.type != "cpu":
            where = value.device if value.layout == torch.strided else value.layout
            raise Refused(f"{name}: the tensor is on {where}; move it to the CPU first, as a dense tensor")
        return Described(value, _named(name, str(value.dtype)[6:]), tuple(value.shape))
    if isinstance(value, View):
        return Described(value, value.dtype, value.shape)
    numpy = sys.modules.get("numpy")
    if numpy is not None and not isinstance(value, (numpy.ndarray, numpy.generic)) and hasattr(value, "__array__"):
        _check_host(name, value)
        value = numpy.asarray(value)
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if isinstance(value, numpy.ma.MaskedArray):
            raise Refused(f"{name}: a masked array has no bytes for what is masked; fill it first")
        return Described(value, _named(name, value.dtype.name), tuple(value.shape))
    try:
        buffer = memoryview(value)
    except TypeError:
        if not hasattr(value, "__dlpack__"):
            raise TypeError(f"{name}: {type(value).__name__} is no array: neither buffer protocol nor DLPack") from None
        _check_host(name, value)
        return describe(name, _numpy(name).from_dlpack(value))
    return Described(buffer, _of_format(name, buffer), tuple(buffer.shape or ()))


def checked(layout: Layout, values: Mapping[str, Any], doing: str) -> list[tuple[Tensor, Described]]:
    """The tensors that `values` are for, in the model's order, once all names, types and shapes are right.

    Raises one Refused that lists all that is wrong.
    """
    found: list[tuple[Tensor, Described]] = []
    wrong: list[str] = []
    for name, value in values.items():
        tensor = layout.get(name)
        if tensor is None:
            wrong.append(f"{name}: the model has no such tensor")
            continue
        try:
            described = describe(name, value)
            fits(tensor, described.dtype, described.shape)
            found.append((tensor, described))
        except Refused as error:
            wrong.append(str(error))
    if wrong:
        raise Refused(f"{doing}: {'; '.join(wrong)}")
    found.sort(key=lambda pair: pair[0].offset)
    return found


def fits(tensor: Tensor, dtype: str, shape: tuple[int, ...] | None) -> None:
    """Refuses a shape that is not the tensor's, and a type that cannot become the tensor's."""
    if shape is not None and shape != tensor.shape:
        raise Refused(f"{tensor.name}: the shape is {list(shape)}, and {list(tensor.shape)} in the model")
    if not converts(dtype, tensor.dtype):
        raise Refused(f"{tensor.name}: the type is {dtype}, and {tensor.dtype} in the model: convert it first")


def converts(dtype: str, to: str) -> bool:
    """Whether elements may become those of another type."""
    return dtype == to or to in _CONVERSIONS.get(dtype, ())


def piece(described: Described, to: str) -> memoryview:
    """The elements of an array as contiguous bytes of type `to`: its own memory where that can be."""
    value, dtype, _ = described
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach()
        if dtype != to:
            if to == "F8_E4M3":
                value = value.clamp(-E4M3_LIMIT, E4M3_LIMIT)
            value = value.to(getattr(torch, NAMES[to]))
        value = value.resolve_conj().resolve_neg().contiguous()
        size = value.numel() * value.element_size()
        return _memory_at(value.data_ptr(), size, value)
    if isinstance(value, View):
        memory = value.memory
    elif isinstance(value, memoryview):
        memory = value.cast("B") if value.c_contiguous and 0 not in (value.shape or ()) else memoryview(value.tobytes())
    else:
        numpy = sys.modules["numpy"]
        if not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
        memory = memoryview(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8))
    return memory if dtype == to else converted(memory, dtype, to)


def converted(memory: memoryview, dtype: str, to: str) -> memoryview:
    """The elements in `memory` as those of another type, in new memory."""
    numpy = _numpy(f"{dtype} as {to}")
    values = numpy.frombuffer(memory, numpy_type(dtype))
    if to == "F8_E4M3":
        values = numpy.clip(values, -E4M3_LIMIT, E4M3_LIMIT)
    with numpy.errstate(over="ignore"):
        return memoryview(values.astype(numpy_type(to)).view(numpy.uint8))


def writable(name: str, target: Any) -> Described:
    """An array that weights can be copied into, or an exception."""
    described = describe(name, target)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target, torch.Tensor):
        return described
    if described.value is not target and not isinstance(described.value, memoryview):
        raise Refused(f"{name}: {type(target).__name__} cannot be written; give NumPy arrays or torch tensors")
    is_buffer = isinstance(described.value, memoryview)
    if is_buffer and not described.value.c_contiguous:
        raise Refused(f"{name}: the buffer is not contiguous")
    if described.value.readonly if is_buffer else not described.value.flags.writeable:
        raise Refused(f"{name}: the array is read-only")
    return described


def targets(layout: Layout, out: Mapping[str, Any]) -> list[tuple[str, Described]]:
    """Arrays that tensors of these names can be copied into. Raises one Refused that lists all that cannot."""
    found = []
    wrong = []
    for name, target in out.items():
        tensor = layout.get(name)
        if tensor is None:
            wrong.append(f"{name}: the model has no such tensor")
            continue
        try:
            described = writable(name, target)
            if described.shape != tensor.shape:
                raise Refused(f"{name}: the shape is {list(described.shape)}, and {list(tensor.shape)} in the model")
            if not converts(tensor.dtype, described.dtype):
                raise Refused(f"{name}: the type is {described.dtype}, and {tensor.dtype} in the model")
        except Refused as error:
            wrong.append(str(error))
        else:
            found.append((name, described))
    if wrong:
        raise Refused(f"pull: {'; '.join(wrong)}")
    return found


def copy(view: View, target: Described) -> None:
    """Copies a tensor of a version into an array that `writable` has described, without the GIL where that counts."""
    value = target.value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.detach().copy_(view.torch())
        return
    memory = view.memory if view.dtype == target.dtype else converted(view.memory, view.dtype, target.dtype)
    if isinstance(value, memoryview):
        if memory.nbytes:
            value.cast("B")[:] = memory
        return
    numpy = sys.modules["numpy"]
    numpy.copyto(value, numpy.frombuffer(memory, value.dtype.newbyteorder("=")).reshape(view.shape))


def put(indices: View, values: View, target: Described) -> None:
    """Copies elements to places in a flat array that `writable` has described."""
    value = target.value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        put_torch(indices, values, value)
        return
    numpy = sys.modules["numpy"]
    # Elements are moved as they are, so that NumPy need not know their type.
    raw = f"u{BITS[target.dtype] // 8}"
    memory = values.memory if values.dtype == target.dtype else converted(values.memory, values.dtype, target.dtype)
    if isinstance(value, memoryview):
        value = numpy.frombuffer(value.cast("B") if value.nbytes else b"", raw)
    elif not value.dtype.isnative:
        raise Refused(f"{indices.name}: the array has the bytes of its elements in another order")
    else:
        value = value.view(raw)
    numpy.put(value, indices.numpy(), numpy.frombuffer(memory, raw))


def put_torch(indices: View, values: View, target: Any) -> None:
    """The same for a tensor of torch, on any device."""
    import torch

    with torch.no_grad():
        places = indices.torch().to(target.device, torch.int64)
        new = values.torch().to(target.device, target.dtype)
        # torch cannot put all types, but all widths.
        raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(target.element_size())
        whole, new = (target.detach(), new) if raw is None else (target.detach().view(raw), new.view(raw))
        whole.put_(places, new)


def numpy_type(dtype: str) -> Any:
    """NumPy's type of this name. Raises TypeError where NumPy has none."""
    numpy = _numpy(dtype)
    if dtype not in NAMES:
        raise TypeError(f"no array library has the type {dtype}: use tobytes()")
    if dtype not in BEYOND_NUMPY:
        return numpy.dtype(NAMES[dtype])
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(f"NumPy has no {NAMES[dtype]}: install ml_dtypes, or use torch()") from None
    return numpy.dtype(getattr(ml_dtypes, NAMES[dtype]))


class View:
    """A tensor of one version, as memory of this process. Changes in place are this process's own.

    It keeps its version in memory, also after its `Weights` were closed. `dtype` is as in `layout`: `F32`, `BF16` and so
    on.
    """

    def __init__(self, tensor: Tensor, memory: memoryview) -> None:
        self.name, self.dtype, self.shape, *_ = tensor
        self.memory = memory
        """The bytes."""

    def numpy(self) -> Any:
        """The tensor as a NumPy array over the same memory."""
        return _numpy(self.name).frombuffer(self.memory, numpy_type(self.dtype)).reshape(self.shape)

    def torch(self) -> Any:
        """The tensor as a torch tensor over the same memory."""
        import torch

        dtype = getattr(torch, NAMES.get(self.dtype, ""), None)
        if dtype is None:
            raise TypeError(f"{self.name}: this torch has no type for {self.dtype}: use tobytes()")
        if not self.memory.nbytes:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype).reshape(self.shape)

    def tobytes(self) -> bytes:
        """A copy of the bytes."""
        return self.memory.tobytes()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"{self.name}: another type takes a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        """A DLPack capsule over the same memory, also of bf16. It takes NumPy."""
        del stream
        numpy = _numpy(self.name)
        if options.get("dl_device") not in (None, (1, 0)):
            raise BufferError(f"{self.name}: the memory is the host's")
        is_copy = options.get("copy")
        if self.dtype not in BEYOND_NUMPY:
            array = self.numpy()
            return (array.copy() if is_copy else array).__dlpack__()
        raw = numpy.frombuffer(self.memory, f"u{BITS[self.dtype] // 8}").reshape(self.shape)
        return _retyped((raw.copy() if is_copy else raw).__dlpack__(), self.dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __repr__(self) -> str:
        return f"<View of {self.name}: {self.dtype} {list(self.shape)}>"


# The codes of DLPack's types that NumPy does not export.
_DLPACK_CODES = {"BF16": 4, "F8_E4M3": 10, "F8_E5M2": 12}
# Where the code of the type lies in a DLManagedTensor: behind the pointer, the device and the number of dimensions.
_DLPACK_CODE_AT = 20


def _retyped(capsule: Any, dtype: str) -> Any:
    """A capsule of NumPy's with another type of as many bits. NumPy still frees it."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer_of(capsule, b"dltensor")
    ctypes.c_uint8.from_address(address + _DLPACK_CODE_AT).value = _DLPACK_CODES[dtype]
    return capsule


def _memory_at(address: int, size: int, owner: Any) -> memoryview:
    """The bytes at an address, which keep their owner alive."""
    if not size:
        return memoryview(b"")
    array = (ctypes.c_char * size).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _check_host(name: str, value: Any) -> None:
    """Refuses an array whose memory is a device's, before a library copies it here in silence."""
    if hasattr(value, "__dlpack_device__") and int(value.__dlpack_device__()[0]) not in _HOST_DEVICES:
        raise Refused(f"{name}: the array is not in the host's memory; copy it to the CPU first")


def _named(name: str, dtype: str) -> str:
    if dtype not in _DTYPES:
        raise Refused(f"{name}: models have no tensors of type {dtype}")
    return _DTYPES[dtype]


def _of_format(name: str, buffer: memoryview) -> str:
    """The type of a buffer's elements."""
    order, code = buffer.format[:-1], buffer.format[-1:]
    kind = "BOOL" if code == "?" else {"e": "F", "f": "F", "d": "F"}.get(code)
    if kind is None and code:
        kind = "I" if code in "bhilqn" else "U" if code in "BHILQN" else None
    if kind is None or order not in ("", "@", "=", "<"):
        raise Refused(f"{name}: models have no tensors of the buffer format {buffer.format!r}")
    return kind if kind == "BOOL" else f"{kind}{buffer.itemsize * 8}"


def _numpy(what: str) -> Any:
    try:
        import numpy
    except ImportError:
        raise TypeError(f"{what}: this takes NumPy, which is not installed") from None
    return numpy
