"""A rank of the suite torch: `torch_step.py SOCKET KIND NETWORK SIZE`, for KIND ddp or gradfs. SIZE is the words of a
rank's text, or the number of its images.

It obeys lines from the socket and answers each with a line of JSON: `step N` trains so many steps and gives the seconds of
each and of opt.step() therein, `local N` gives those of forward and backward without communication and optimizer, and
`check` gives the loss of a batch that is the same everywhere.
"""

import importlib
import json
import socket
import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu

# Of the transformer: words, whose table is its last layer, too; width, heads, layers, most words of a text. Then of the
# ResNet.
WORDS, WIDTH, HEADS, LAYERS, LENGTH = 15360, 512, 8, 8, 512
CHANNELS, CLASSES = (64, 128, 256, 512), 10
RATE, BATCHES = 1e-4, 4


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, x):
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.layers(self.words(x) + self.places.weight[:length], mask, is_causal=True)
        return (x @ self.words.weight.T).flatten(0, 1)

    @staticmethod
    def data(words, random):
        return [torch.randint(WORDS, shape, generator=random) for shape in ((1, words), (words,))]


def convolution(before, after, size=3):
    """Half as wide and high where there are more channels after it."""
    stride = 1 if before in (3, after) else 2
    return nn.Sequential(nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after))


class Block(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.inner = nn.Sequential(convolution(before, after), nn.ReLU(), convolution(after, after))
        self.around = nn.Identity() if before == after else convolution(before, after, 1)

    def forward(self, x):
        return relu(self.inner(x) + self.around(x))


class ResNet(nn.Sequential):
    """ResNet-18 for images of 32 by 32."""

    def __init__(self):
        pairs = zip((CHANNELS[0], *CHANNELS), CHANNELS)
        blocks = [block for before, after in pairs for block in (Block(before, after), Block(after, after))]
        last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS[-1], CLASSES)
        super().__init__(convolution(3, CHANNELS[0]), nn.ReLU(), *blocks, *last)

    @staticmethod
    def data(count, random):
        return torch.randn(count, 3, 32, 32, generator=random), torch.randint(CLASSES, (count,), generator=random)


class Rank:
    """A network in training."""

    def __init__(self, kind, network, size):
        torch.manual_seed(0)
        self.network, self.done = network(), 0
        self.opt = torch.optim.AdamW(self.network.parameters(), lr=RATE, fused=True)
        self.job = importlib.import_module("torch.distributed" if kind == "ddp" else "gradfs.torch")
        self.job.init_process_group("gloo")
        if kind == "ddp":
            self.module = nn.parallel.DistributedDataParallel(self.network, gradient_as_bucket_view=True)
        else:
            self.module = self.job.DistributedDataParallel(self.network)
            self.opt = self.job.remote(self.opt, self.module)
        seeds = [0, *(BATCHES * self.job.get_rank() + n for n in range(1, BATCHES + 1))]
        self.shared, *self.batches = (network.data(size, torch.Generator().manual_seed(seed)) for seed in seeds)

    def step(self):
        self.done += 1
        x, y = self.batches[self.done % BATCHES]
        began = time.perf_counter()
        self.opt.zero_grad()
        cross_entropy(self.module(x), y).backward()
        computed = time.perf_counter()
        self.opt.step()
        return time.perf_counter() - began, time.perf_counter() - computed

    def local(self):
        began, (x, y) = time.perf_counter(), self.batches[0]
        self.opt.zero_grad()
        with self.module.no_sync():
            cross_entropy(self.network(x), y).backward()
        return time.perf_counter() - began, 0

    @torch.no_grad()
    def check(self):
        return cross_entropy(self.network(self.shared[0]), self.shared[1]).item(), getattr(self.opt, "staging", "")


def main(path, kind, network, size):
    torch.set_num_threads(1)
    rank = Rank(kind, {"transformer": Transformer, "resnet": ResNet}[network], int(size))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    with connection, connection.makefile("rw") as lines:
        print(sum(p.numel() for p in rank.network.parameters()), file=lines, flush=True)
        for line in lines:
            what, count = line.split()
            print(json.dumps([getattr(rank, what)() for _ in range(int(count))]), file=lines, flush=True)
    rank.job.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
