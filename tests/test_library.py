"""Programs that link the library: its examples take part in a model without a mount."""

import re
import subprocess

import numpy as np
from conftest import gradfs_binary
from filetools import BLOCK, array
from patience import HANGS

EXAMPLES = gradfs_binary().parent / "examples"


def start(name, *args):
    program = EXAMPLES / name
    assert program.exists(), f"{program} is missing: cargo build -p libmodelio --examples"
    return subprocess.Popen([program, *map(str, args)], stdout=subprocess.PIPE, text=True)


def end(program):
    said, _ = program.communicate(timeout=HANGS)
    assert program.returncode == 0, said
    return said


def test_programs_train_follow_and_publish_by_the_library(cluster):
    one = cluster(2)
    size = 3 * BLOCK
    one.create("m", size=size, block_size=BLOCK, reducer="sgd", learning_rate=0.5)
    mount, steps = one.mount(), 8
    follower = start("follow_versions", one.registry, "m", 1)
    assert follower.stdout.readline().startswith("version 0: ")
    trained = end(start("join_and_train", one.registry, "m", "worker-0", steps))
    # It may see the last one alone.
    assert re.findall(r"^version [1-9]\d*: ", end(follower), re.M)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)$", trained, re.M)]
    # Each step halves the error.
    np.testing.assert_allclose(losses, [0.25**step for step in range(steps)], atol=1e-6)
    mount.catch_up()
    np.testing.assert_allclose(array(mount.model / "weights"), 1 - 0.5**steps, rtol=1e-6)

    one.create("pushed", size=size, block_size=BLOCK, reducer="assign")
    readers = one.mount(models=("pushed",))
    assert "7.5 everywhere" in end(start("publish", one.registry, "pushed", 7.5))
    readers.catch_up()
    assert (array(readers.model / "weights") == 7.5).all()
