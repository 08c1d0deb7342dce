"""Models of 8-bit floats: contributions and weights of one byte an element, and fp32 behind them."""

import os
from errno import EINVAL

import numpy as np
import pytest

from filetools import fails, read_safetensors, write_safetensors

pytestmark = pytest.mark.also_on_network

TYPES = ["f8_e4m3", "f8_e5m2"]
ELEMENTS = 150_001


def numbers(dtype):
    """The number behind each of the 256 codes, by the definition of the type."""
    mantissa, bias = (3, 7) if dtype == "f8_e4m3" else (2, 15)
    codes = np.arange(128)
    exponent, fraction = codes >> mantissa, (codes % (1 << mantissa)) / (1 << mantissa)
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if dtype == "f8_e4m3":
        values[0x7F] = np.nan
    else:
        values[0x7C:] = [np.inf, np.nan, np.nan, np.nan]
    return np.concatenate([values, -values])


def decode(dtype, codes):
    return numbers(dtype)[np.frombuffer(codes, "u1")]


def encode(dtype, values):
    """The nearest codes; of two, the even one."""
    finite = numbers(dtype)[:0x7F if dtype == "f8_e4m3" else 0x7C]
    values = np.asarray(values, "f8")
    apart = np.abs(np.abs(values)[:, None] - finite[None, :])
    best = apart.min(1, keepdims=True)
    codes = np.arange(len(finite))
    even = np.where(apart == best, codes + 1000 * (codes % 2), 10_000).argmin(1)
    return (even | (np.signbit(values) * 0x80)).astype("u1").tobytes()


def few(count):
    """Numbers that both types have."""
    return np.array([0, 1, -0.5, 3, 0.0625, -14, 0.75, 28])[np.arange(count) % 8]


@pytest.mark.parametrize("dtype", TYPES)
def test_eight_bits_accumulate_in_fp32(start_mount, dtype):
    """Additions too small for the weights' own type add up."""
    mount = start_mount(size=4096, dtype=dtype, reducer="sum")
    small = 2.0**-7
    mount.contribute(encode(dtype, np.ones(4096)))
    for _ in range(31):
        mount.contribute(encode(dtype, np.full(4096, small)))
    # 1 + 31/128 is nearest to 1.25.
    assert (decode(dtype, mount.weights()) == 1.25).all()


@pytest.mark.parametrize("dtype, limit, shown", [("f8_e4m3", 448, 448), ("f8_e5m2", 57_344, np.inf)])
def test_what_is_too_large_for_eight_bits_is_shown_at_the_limit(start_mount, dtype, limit, shown):
    mount = start_mount(size=4096, dtype=dtype, reducer="sum")
    largest = encode(dtype, np.repeat([limit, -limit], 2048))
    for _ in range(2):
        mount.contribute(largest)
    assert (decode(dtype, mount.weights()) == np.repeat([shown, -shown], 2048)).all()
    # The master is twice as large, and comes back.
    mount.contribute(encode(dtype, np.repeat([-limit, limit], 2048)))
    assert mount.weights() == largest
    code = {"f8_e4m3": b"\x7f", "f8_e5m2": b"\x7c"}[dtype]
    fails(EINVAL, mount.contribute, code)
    assert mount.weights() == largest


def test_a_model_of_eight_bits_trains_and_goes_on_from_a_snapshot(start_mount, gradfs, tmp_path):
    """It lies beside other types, in a file, in a snapshot, and in a mount that goes on from it."""
    start = few(ELEMENTS)
    model = write_safetensors(
        tmp_path / "model.safetensors",
        {
            "w": ("F32", (1000,), np.ones(1000, "<f4").tobytes()),
            "a": ("F8_E4M3", (ELEMENTS,), encode("f8_e4m3", start)),
            "b": ("F8_E5M2", (ELEMENTS,), encode("f8_e5m2", start)),
        },
    )

    def contribution(value):
        ones = np.full(ELEMENTS, value)
        return np.full(1000, value, "<f4").tobytes() + encode("f8_e4m3", ones) + encode("f8_e5m2", ones)

    def expected(moved):
        """The weights, whose masters have moved so far."""
        return (np.full(1000, 1 + moved, "<f4").tobytes()
                + encode("f8_e4m3", start + moved) + encode("f8_e5m2", start + moved))

    mount = start_mount(model=model, reducer="sgd", learning_rate=0.0625)
    assert mount.weights() == expected(0)
    assert os.getxattr(mount.model / "tensors/a.npy", "user.gradfs.dtype") == b"F8_E4M3"
    for step in range(1, 4):
        mount.contribute(contribution(-1.0))
        assert mount.weights() == expected(step / 16)
    saved = tmp_path / "saved"
    assert gradfs("save", mount.model, saved).returncode == 0
    tensors = read_safetensors((saved / "model.safetensors").read_bytes())[0]
    assert tensors["a"][0] == "F8_E4M3" and tensors["b"][2] == expected(3 / 16)[-ELEMENTS:]
    masters = read_safetensors((saved / "optimizer.safetensors").read_bytes())[0]["master.a"]
    assert masters[0] == "F32" and (np.frombuffer(masters[2], "<f4") == start + 3 / 16).all()
    again = start_mount("--from", saved)
    assert again.weights() == expected(3 / 16)
    again.contribute(contribution(-1.0))
    assert again.weights() == expected(4 / 16)
