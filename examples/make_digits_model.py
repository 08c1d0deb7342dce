#!/usr/bin/env python3
"""Writes the untrained model of the digit examples as a safetensors file; needs nothing but NumPy.

    make_digits_model.py digits.safetensors

A perceptron with two hidden layers, 549,130 float32 parameters: 64 pixels -> 704 -> 704 -> 10 digits.
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


def write_safetensors(path, tensors):
    """The format: length of the header in 8 bytes (little-endian), the header as JSON, the data."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [end, end + tensor.nbytes]}
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
    options = parser.parse_args()
    tensors = initial_weights(options.seed, options.hidden)
    write_safetensors(options.file, tensors)
    print(f"{options.file}: {sum(tensor.size for tensor in tensors.values()):,} parameters")


if __name__ == "__main__":
    main()
