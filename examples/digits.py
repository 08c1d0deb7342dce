"""What the digit examples share: the data, the batches, where the tensors lie, learner processes, the check.

Nothing in here touches gradients or weights through the mount: that is in train_digits.py (NumPy) and
train_torch.py (PyTorch), where it can be read.
"""

import os

# One core a learner; before NumPy loads its BLAS, which reads it once.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import argparse
import json
import math
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

# A file with arrays `images` and `labels`, in the place of scikit-learn, whose import takes long on a slow machine.
DATA = os.environ.get("DIGITS_NPZ")
HELD_OUT = 0.25
# What --check asks for.
LEAST_ACCURACY = 0.96
MOST_DIFFERENCE = 1e-5
# How much further apart two runs may come by rounding than two others do.
TIMES_ROUNDING = 10


def arguments(description):
    """The command line, the same for all trainers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory of the model in the mount")
    parser.add_argument("--learners", type=int, default=2, metavar="N", help="processes that train (2)")
    parser.add_argument("--epochs", type=int, default=25, metavar="N", help="times through the data (25)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="images a step, all learners (64)")
    parser.add_argument("--lr", type=float, default=0.1, metavar="X", help="learning rate (0.1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="order of the images (0)")
    parser.add_argument("--check", action="store_true",
                        help="train again in one process without the mount; fail unless the weights agree "
                             f"to {MOST_DIFFERENCE}, or to what rounding alone makes, and the accuracy is {LEAST_ACCURACY}")
    return parser


def parse(parser):
    """Parses the command line, with the mistakes that can be seen early."""
    job = parser.parse_args()
    if not (job.model / "control").is_dir():
        parser.error(f"{job.model} is not a model in a gradfs mount: start `gradfs up FILE.safetensors MOUNT`")
    if job.learners < 1 or job.epochs < 1 or job.batch < 1 or job.batch % job.learners:
        parser.error("--batch must be a multiple of --learners, and all of them positive")
    return job


def load_data():
    """Handwritten digits, 8x8, from -1 to 1: training images and labels, test images and labels."""
    if DATA:
        with np.load(DATA) as file:
            images, labels = file["images"], file["labels"]
    else:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = np.split(order, [int(len(order) * HELD_OUT)])
    return images[train], labels[train], images[test], labels[test]


def epoch_batches(images, labels, job, epoch):
    """The global batches of one epoch, in an order that depends on seed and epoch only."""
    order = np.random.default_rng([job.seed, epoch]).permutation(len(images))
    for start in range(0, len(order) - job.batch + 1, job.batch):
        batch = order[start : start + job.batch]
        yield images[batch], labels[batch]


def share(batch, rank, learners):
    """What one learner takes of a global batch."""
    size = len(batch) // learners
    return batch[rank * size : (rank + 1) * size]


class Layout:
    """Where each float32 tensor lies in the flat bytes of `weights` and `gradients`; counters are left out."""

    def __init__(self, model):
        # The order is that of `layout`, which may be another one than the model's file has.
        self.tensors = {}
        for line in (model / "layout").read_text().splitlines():
            name, dtype, shape, offset = line.split("\t")
            assert dtype in ("F32", "I64"), "this example is for float32 models"
            if dtype == "F32":
                self.tensors[name] = int(offset), json.loads(shape)
        self.bytes = (model / "weights").stat().st_size
        self.elements = self.bytes // 4

    def views(self, flat):
        """name -> array; all of them are views of the array `flat`."""
        views = {}
        for name, (offset, shape) in self.tensors.items():
            views[name] = flat[offset // 4 : offset // 4 + math.prod(shape)].reshape(shape)
        return views


class Clock:
    """Seconds by what they went into, and bytes through the mount."""

    def __init__(self):
        self.seconds = {}
        self.bytes = 0
        self.steps = 0
        self.last = time.perf_counter()

    def lap(self, activity):
        now = time.perf_counter()
        self.seconds[activity] = self.seconds.get(activity, 0.0) + now - self.last
        self.last = now


def configure(job):
    """Sets up the job through its control files; returns the version training starts from."""
    settings = {"reducer": "sgd", "aggregation": "mean", "weight_decay": 0, "consistency": "sync",
                "learners": job.learners, "learning_rate": job.lr}
    for name, value in settings.items():
        with open(job.model / "control" / name, "w") as file:
            file.write(f"{value}\n")
    return int((job.model / "version").read_text())


def run_learners(learner, job):
    """Runs learner(job, rank) in a process for each rank; returns what they return."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(job.learners, mp_context=context) as pool:
        return list(pool.map(learner, [job] * job.learners, range(job.learners)))


def report(clocks, accuracy, version):
    """What the training cost, and what it brought."""
    steps = clocks[0].steps
    wall = max(sum(clock.seconds.values()) for clock in clocks)
    moved = sum(clock.bytes for clock in clocks)
    print(f"{steps} steps of {len(clocks)} learner(s) in {wall:.1f} s: {steps / wall:.1f} steps/s, "
          f"{moved / 1e9:.2f} GB through the mount, {moved / wall / 1e9:.2f} GB/s overall")
    copying = sum(clock.seconds.get(name, 0) for clock in clocks for name in ("read", "write"))
    if copying:
        print(f"{moved / copying / 1e9:.2f} GB/s a learner while in read and write")
    laps = {name: 1e3 * sum(clock.seconds[name] for clock in clocks) / len(clocks) / steps
            for name in clocks[0].seconds}
    print("milliseconds a step: " + ", ".join(f"{name} {laps[name]:.2f}" for name in laps))
    print(f"version {version}, test accuracy {accuracy:.4f}", flush=True)


def difference_of(layout, ours, theirs):
    """The largest difference of a weight, measured by the tensor's largest, and the tensor's name."""
    worst, where = 0.0, "any tensor"
    ours, theirs = layout.views(ours), layout.views(theirs)
    for name in ours:
        largest = float(np.abs(theirs[name]).max()) or 1.0
        difference = float(np.abs(ours[name] - theirs[name]).max()) / largest
        if not difference <= worst:  # Also when it is NaN.
            worst, where = difference, name
    return worst, where


def check(job, layout, trained, reference, accuracy, versions, reordered=None):
    """Holds the trained weights against those of one process; exits non-zero when something is missed. Weights that one
    process has with its sums in another order say how much rounding alone makes of such a training."""
    worst, where = difference_of(layout, trained, reference)
    most = MOST_DIFFERENCE
    if reordered is not None:
        most = max(most, TIMES_ROUNDING * difference_of(layout, reordered, reference)[0])
    steps = job.epochs * sum(1 for _ in epoch_batches(*load_data()[:2], job, 0))
    print(f"against one process: largest difference {worst:.1e} of the tensor's largest weight, in {where} "
          f"(at most {most:.0e})")
    failures = []
    if not worst <= most:
        failures.append(f"the weights differ by {worst:.1e}")
    if not accuracy >= LEAST_ACCURACY:
        failures.append(f"the accuracy is {accuracy:.4f}, below {LEAST_ACCURACY}")
    if versions != steps:
        failures.append(f"{steps} steps made {versions} versions")
    if failures:
        sys.exit("check FAILED: " + "; ".join(failures))
    print("check passed", flush=True)
