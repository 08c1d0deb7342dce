#!/usr/bin/env python3
"""Writes the untrained model of the digit examples as a safetensors file; needs nothing but NumPy.

    make_digits_model.py digits.safetensors
    make_digits_model.py digits.safetensors --convolutional

A perceptron with two hidden layers, 549,130 float32 parameters: 64 pixels -> 704 -> 704 -> 10 digits. Or, for PyTorch, a
small convolutional network with BatchNorm, which has buffers beside its parameters.
"""

import argparse
import json

import numpy as np

PIXELS, HIDDEN, DIGITS = 64, 704, 10


def initial_weights(seed=0, hidden=HIDDEN):
    """name -> array. Weights are [outputs, inputs], as PyTorch has them; biases are zero."""
    random = np.random.default_rng(seed)
    widths = [PIXELS, hidden, hidden, DIGITS]
    tensors = {}
    for i, (inputs, outputs) in enumerate(zip(widths, widths[1:]), start=1):
        scale = 1 / np.sqrt(inputs)
        tensors[f"layer{i}.weight"] = (random.standard_normal((outputs, inputs)) * scale).astype("<f4")
        tensors[f"layer{i}.bias"] = np.zeros(outputs, "<f4")
    return tensors


def initial_convolutions(seed=0):
    """name -> array: two convolutions of 3x3, each with BatchNorm, and a linear layer."""
    random = np.random.default_rng(seed)
    tensors = {}
    for i, (inputs, outputs) in enumerate([(1, 16), (16, 32)], start=1):
        scale = np.sqrt(2 / (9 * inputs))
        tensors[f"convolution{i}.weight"] = (random.standard_normal((outputs, inputs, 3, 3)) * scale).astype("<f4")
        for name, value in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            tensors[f"norm{i}.{name}"] = np.full(outputs, value, "<f4")
        tensors[f"norm{i}.num_batches_tracked"] = np.zeros((), "<i8")
    inputs = 32 * PIXELS // 4
    tensors["output.weight"] = (random.standard_normal((DIGITS, inputs)) / np.sqrt(inputs)).astype("<f4")
    tensors["output.bias"] = np.zeros(DIGITS, "<f4")
    # The widest elements first, so that all are aligned.
    return dict(sorted(tensors.items(), key=lambda named: -named[1].itemsize))


def write_safetensors(path, tensors):
    """The format: length of the header in 8 bytes (little-endian), the header as JSON, the data."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        dtype = {"<f4": "F32", "<i8": "I64"}[tensor.dtype.str]
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # The data begins at a multiple of 64 bytes.
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def main():
    parser = argparse.ArgumentParser(description="Writes the untrained model of the digit examples.")
    parser.add_argument("file", metavar="FILE.safetensors")
    parser.add_argument("--hidden", type=int, default=HIDDEN, metavar="N",
                        help=f"width of the hidden layers ({HIDDEN})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="other weights for another number (0)")
    parser.add_argument("--convolutional", action="store_true", help="a network with BatchNorm (train_torch.py)")
    options = parser.parse_args()
    if options.convolutional:
        tensors = initial_convolutions(options.seed)
    else:
        tensors = initial_weights(options.seed, options.hidden)
    write_safetensors(options.file, tensors)
    print(f"{options.file}: {sum(tensor.size for tensor in tensors.values()):,} parameters")


if __name__ == "__main__":
    main()
