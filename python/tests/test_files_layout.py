from __future__ import annotations

import numpy
import pytest

import gradfs
from gradfs.layout import Layout, Tensor


def test_layout_maps_names_to_tensors_in_the_order_of_weights():
    layout = Layout.parse("b\tF32\t[4]\t0\nw.x\tBF16\t[2,3]\t16\nn\tI64\t[]\t32\n")
    assert list(layout) == ["b", "w.x", "n"]
    assert layout["w.x"] == Tensor("w.x", "BF16", (2, 3), 16, 12)
    assert (layout["n"].shape, layout["n"].size, layout["n"].nbytes) == ((), 1, 8)
    assert layout.nbytes == 40


def test_escaped_names_read_back():
    (name,) = Layout.parse(r"a\tb\\c\nd'é\u{7f}\u{1}" + "\tF32\t[0]\t0\n")
    assert name == "a\tb\\c\nd'é\x7f\x01"


def test_a_layout_of_another_release_is_refused():
    with pytest.raises(gradfs.Refused, match="no tensor that this release knows"):
        Layout.parse("b\tF128\t[4]\t0\n")


def test_names_of_a_mount_are_those_of_the_file(start):
    names = ["layer.0/weight", "a\tb\\c\n", "é"]
    model = gradfs.open(start({name: numpy.ones(3, "f4") for name in names}))
    assert sorted(model.layout) == sorted(names)
    with model.pull() as weights:
        assert all((weights[name].numpy() == 1).all() for name in names)
