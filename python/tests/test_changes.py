"""Changes between versions, in files that this test writes by hand."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy
import pytest

import gradfs
from gradfs import arrays, changes, first_file
from gradfs.layout import Layout, Tensor
from gradfs.places import Files, Version

LAYOUT = Layout.parse("w\tF32\t[2,3]\t0\nb\tBF16\t[4]\t24\nn\tI64\t[]\t32\n")
ABOUT = Version(7, 1, {"step": "7"})


def of_file(path, tensors):
    first_file.write(path, tensors, {"base": "4"})
    return gradfs.Changes(LAYOUT, ABOUT, 4, memoryview(bytearray(path.read_bytes())))


def w_changes(indices, values=(1.0, 2.0), of="w"):
    return {f"{of}.indices": numpy.array(indices, "i4"), f"{of}.values": numpy.array(values, "f4")}


def test_changes_are_indices_and_values_by_name(tmp_path):
    torch = pytest.importorskip("torch")
    bf16 = torch.tensor([3.0], dtype=torch.bfloat16)
    both = {**w_changes([5, 0]), "b.indices": torch.tensor([2]), "b.values": bf16}
    found = of_file(tmp_path / "c.safetensors", both)
    assert (found.version, found.base, found.epoch, found.meta, found.is_whole) == (7, 4, 1, {"step": "7"}, False)
    assert set(found) == {"w", "b"} and len(found) == 2
    assert found["w"].indices.numpy().tolist() == [5, 0] and found["w"].values.numpy().tolist() == [1, 2]
    assert found["b"].indices.dtype == "I64" and found["b"].values.torch().tolist() == [3]


def test_changes_are_copied_into_arrays_that_have_the_base(tmp_path):
    torch = pytest.importorskip("torch")
    both = {**w_changes([5, 0]), "b.indices": torch.tensor([2]), "b.values": torch.tensor([3.0]).bfloat16()}
    found = of_file(tmp_path / "c.safetensors", both)
    expected = [[2, 9, 9], [9, 9, 1]]
    turned, buffer = numpy.full((3, 2), 9, "f4").T, memoryview(bytearray(numpy.full(6, 9, "f4").tobytes()))
    for target in (numpy.full((2, 3), 9, "f4"), turned, numpy.full((2, 3), 9, "f8"), buffer.cast("f", (2, 3))):
        found.copy_to({"w": target})
        assert numpy.asarray(target).tolist() == expected
    for target in (
        torch.full((2, 3), 9.0, requires_grad=True),
        torch.full((3, 2), 9.0).T,
        torch.full((2, 3), 9).half(),
    ):
        b = torch.zeros(4, dtype=torch.bfloat16)
        found.copy_to({"w": target, "b": b})
        assert target.tolist() == expected and b.tolist() == [0, 0, 3, 0]
    raw = numpy.zeros((2, 3), "f4")
    with pytest.raises(gradfs.Refused, match=r"b: the shape is \[3\], and \[4\] in the model"):
        found.copy_to({"w": raw, "b": torch.zeros(3)})
    assert not raw.any()


def test_changes_of_all_types_are_put_by_torch():
    torch = pytest.importorskip("torch")
    types = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BF16": torch.bfloat16, "U8": torch.uint8}
    types |= {"BOOL": torch.bool, "F64": torch.float64, "I32": torch.int32}
    for name, dtype in types.items():
        here, values = torch.zeros(6).to(dtype), torch.ones(2).to(dtype)
        raw = memoryview(values.view(torch.uint8).numpy())
        indices = arrays.View(Tensor("w.indices", "I32", (2,), 0, 8), memoryview(numpy.array([4, 1], "i4")).cast("B"))
        new = arrays.View(Tensor("w.values", name, (2,), 0, len(raw)), raw)
        arrays.put(indices, new, arrays.writable("w", here))
        assert here.float().tolist() == [0, 1, 0, 0, 1, 0], name


def test_changes_that_do_not_fit_the_model_are_refused(tmp_path):
    for wrong, reason in [
        (w_changes([0, 1], of="x"), "version 7 since 4: x: the model has no such tensor"),
        (w_changes([0, 6]), "w: an index is not within the tensor's 6 elements"),
        (w_changes([-1, 0]), "w: an index is not within"),
        (w_changes([0]), r"w: indices are \[1\], and values \[2\]"),
        ({"w.indices": numpy.array([0], "i4")}, "w: there are no values for it"),
        ({"w.values": numpy.array([0], "f4")}, "w.values: there are no indices for it"),
        ({"w": numpy.array([0], "f4")}, "w: there are no indices for it"),
        ({**w_changes([0, 1]), "w.values": numpy.zeros(2, "f2")}, "w: I32 for F16, where the model has F32"),
        ({**w_changes([0, 1]), "w.indices": numpy.zeros(2, "f4")}, "w: F32 for F32"),
    ]:
        with pytest.raises(gradfs.Refused, match=reason):
            of_file(tmp_path / "c.safetensors", wrong)


def test_changes_of_a_file_that_is_not_whole_are_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    of_file(path, w_changes([0, 1]))
    whole = path.read_bytes()
    for wrong in (b"", whole[:5], whole[:20], whole[:-1], whole.replace(b"F32", b"F99"), b"\xff" * 64):
        with pytest.raises(gradfs.Refused, match="no whole safetensors file"):
            gradfs.Changes(LAYOUT, ABOUT, 4, memoryview(wrong))


def test_changes_are_those_of_a_version_and_a_base(tmp_path):
    version = tmp_path / "versions" / "7"
    version.mkdir(parents=True)
    (version / "weights").write_bytes(b"")
    (tmp_path / "version").write_text("7\n")
    try:
        os.setxattr(version / "weights", "user.gradfs.about", b'{"version": 7, "epoch": 1, "meta": {"step": "7"}}')
    except OSError as error:
        pytest.skip(f"no attributes here: {error}")
    first_file.write(Path(version / "changes-since-4.safetensors"), w_changes([5, 0]), {})
    found = changes.since(Files(), str(tmp_path), LAYOUT, 7, 4)
    assert found is not None and (found.version, found.base, found.meta) == (7, 4, {"step": "7"})
    assert changes.since(Files(), str(tmp_path), LAYOUT, 7, 3) is None
    assert changes.since(Files(), str(tmp_path), LAYOUT, 8, 7) is None
    with pytest.raises(gradfs.NotMounted):
        changes.since(Files(), str(tmp_path / "gone"), LAYOUT, 7, 4)


def test_changes_that_the_mount_does_not_tell_are_none(tmp_path):
    class Mount(Files):
        def changes(self, model, version, base):
            raise OSError(errno.EFBIG, "so much has changed")

    (tmp_path / "version").write_text("7\n")
    assert changes.since(Mount(), str(tmp_path), LAYOUT, 7, 4) is None
    (tmp_path / "version").unlink()
    with pytest.raises(gradfs.NotMounted):
        changes.since(Mount(), str(tmp_path), LAYOUT, 7, 4)
