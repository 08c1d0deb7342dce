"""The example of reinforcement learning: the reward rises, and samplers follow the trainer."""

from __future__ import annotations

import re
import sys

from torch_support import EXAMPLES, needs_a_mount, run, succeeded

pytestmark = needs_a_mount()

PROGRAM = EXAMPLES.parent / "reinforce" / "train.py"


def test_a_policy_learns_from_samplers_that_follow_it() -> None:
    done = succeeded(run([sys.executable, str(PROGRAM), "--seed", "1", "--check"], PROGRAM.parent))
    first, last = map(float, re.search(r"mean reward ([0-9.]+) at first, ([0-9.]+) at the end", done).groups())
    assert first < 0.3 and last > 0.8
    used = [int(number) for number in re.findall(r"sampler \d used (\d+) versions", done)]
    assert len(used) == 2 and min(used) >= 10
    said = {int(number) for number in re.findall(r"used version (\d+)", done)}
    assert 0 in said and max(said) > 150 and len(said) > 5
    # Versions of 9322 elements of bf16 come over TCP, ten of them at least by what has changed.
    came = [int(number) for number in re.findall(r"; (\d+) bytes of versions came by what had changed", done)]
    assert len(came) == 2 and min(came) >= 10 * 18644
    assert "check passed" in done


def test_a_policy_that_does_not_learn_fails_the_check() -> None:
    failed = run([sys.executable, str(PROGRAM), "--steps", "15", "--lr", "0", "--check"], PROGRAM.parent)
    assert failed.returncode == 1 and "check FAILED: the reward is" in failed.stderr
