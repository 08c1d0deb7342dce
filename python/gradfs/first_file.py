"""The first file of a model: safetensors, which `gradfs up` and `gradfs create` load."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from . import arrays
from .arrays import View
from .errors import Refused
from .layout import BITS, Tensor, elements

_FILE = "model.safetensors"
# Any of these makes a directory a checkpoint that `gradfs up` loads.
_CHECKPOINTS = (_FILE, "model.safetensors.index.json")
# What belongs to a checkpoint besides its weights.
_COMPANIONS = (
    "config.json", "generation_config.json", "adapter_config.json", "preprocessor_config.json",
    "processor_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "*.tiktoken", "spiece.model", "sentencepiece*",
)  # fmt: skip
# Headers end where elements of any type are aligned.
_ALIGNMENT = 8
# The suffixes of files that others than gradfs have to convert first.
_PICKLES = {".pt", ".pth", ".bin", ".ckpt"}


def create_from(source: Any, to: str | os.PathLike[str], files_from: str | os.PathLike[str] | None = None) -> Path:
    """Writes the first file of a model, and returns its path.

    `source` is a torch module, or a mapping of names to arrays. Of a module, the file has the parameters under the
    names of `named_parameters()`, tied ones once, and the persistent buffers. `to` is the file, or a directory that
    gets `model.safetensors`. The file is there when it is whole. With `files_from`, the config and the tokenizer of
    that directory are copied beside it.

    If `source` is the path of a safetensors file, or of a Hugging Face checkpoint, that path is returned, and nothing
    is written.
    """
    if isinstance(source, (str, os.PathLike)):
        return _existing(Path(source))
    target = Path(to)
    if target.is_dir() or not target.suffix:
        target = target / _FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = dict(unique(source)) if isinstance(source, Mapping) else dict(_of_module(source))
    if not tensors:
        raise Refused(f"{type(source).__name__} has no tensors")
    write(target, tensors, {"format": "pt"})
    if files_from is not None:
        for pattern in _COMPANIONS:
            for file in Path(files_from).glob(pattern):
                if file.is_file() and file.resolve().parent != target.resolve().parent:
                    shutil.copyfile(file, target.parent / file.name)
    return target


def write(target: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file under a name of its own, and renames it when it is whole and on the disk."""
    described = [(name, arrays.describe(name, value)) for name, value in tensors.items()]
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    # Wide elements first, so that all are aligned.
    described.sort(key=lambda pair: -BITS[pair[1].dtype])
    for name, array in described:
        end = at + elements(array.shape) * BITS[array.dtype] // 8
        header[name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(target) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in described:
            file.write(arrays.piece(array, array.dtype))


def views(file: memoryview) -> dict[str, View]:
    """The tensors of a safetensors file by name, over its bytes. Raises Refused for what is no such file."""
    begin = 8 + int.from_bytes(file[:8], "little")
    found = {}
    try:
        header: dict[str, Any] = json.loads(bytes(file[8:begin]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
            data = file[begin + start : begin + end]
            if not 0 <= start <= end or data.nbytes * 8 != elements(shape) * BITS[entry["dtype"]]:
                raise ValueError(f"{name} has other bytes than its shape")
            found[name] = View(Tensor(name, entry["dtype"], shape, start, data.nbytes), data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"this is no whole safetensors file: {error}") from error
    return found


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `target` at the end of the block, and vanishes with an exception."""
    number, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            os.fchmod(number, 0o666 & ~_umask())
            os.fsync(number)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    """The umask, which the kernel tells without setting it."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o022)


def _existing(source: Path) -> Path:
    if source.is_dir() and any((source / name).exists() for name in _CHECKPOINTS):
        return source
    if source.is_file() and source.name.endswith((".safetensors", ".safetensors.index.json")):
        return source
    hint = ": convert it first (python -m gradfs.convert)" if source.suffix in _PICKLES else ""
    raise Refused(f"{source} is no safetensors file, and no directory of a Hugging Face checkpoint{hint}")


def _of_module(module: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(module, "named_parameters"):
        raise TypeError(f"{type(module).__name__} is no torch module, and no mapping of names to arrays")
    kept = module.state_dict(keep_vars=True)
    persistent = [(name, buffer) for name, buffer in module.named_buffers() if kept.get(name) is buffer]
    for name, tensor in (*module.named_parameters(), *persistent):
        # What a device has is copied. A tensor without values is refused later.
        is_here = tensor.device.type in ("cpu", "meta")
        yield name, tensor if is_here else tensor.detach().cpu()


def unique(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors, but each that lies in the same memory under several names once, under the first."""
    seen: set[Any] = set()
    for name, value in tensors.items():
        if hasattr(value, "data_ptr") and hasattr(value, "stride") and value.numel():
            key = value.data_ptr(), tuple(value.shape), tuple(value.stride()), str(value.dtype)
            if key in seen:
                continue
            seen.add(key)
        yield name, value
