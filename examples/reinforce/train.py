#!/usr/bin/env python3
"""Reinforcement learning with one trainer and samplers that follow it by a path, on a CPU, in less than a minute.

    train.py                   # starts a shard, mounts, and two samplers, trains, and ends all of it
    train.py --samplers 3 --steps 400

A policy, a small transformer, is given a digit and is to count on from it: after 7 come 8, 9, 0, 1. A digit that is right
earns 1. The trainer publishes its weights after each step of REINFORCE, in bf16. Samplers are processes of their own. They
sample with the newest version, and say with which one. Each has a mount of its own, as on a host of its own: a version
travels over TCP, by what has changed in it. Nothing but that and a queue for samples joins them.
"""

import argparse
import json
import multiprocessing
import os
import queue
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import gradfs
import torch
from gradfs.job import binary
from torch import nn
from torch.distributions import Categorical

DIGITS, ANSWER, WIDTH = 10, 4, 32
# What --check asks for: the mean reward at the end, how much more that is than at first, and the versions of a sampler.
LEAST_REWARD, LEAST_GAIN, LEAST_VERSIONS = 0.8, 0.5, 10
# Samples of older versions are dropped. Ratios of the new and the old policy are cut off here.
OLDEST, LARGEST_RATIO = 4, 2.0
# Seconds after which something hangs.
HANGS = 120.0


class Policy(nn.Module):
    """A transformer that gives the logits of each next digit."""

    def __init__(self):
        super().__init__()
        self.digit = nn.Embedding(DIGITS, WIDTH)
        self.place = nn.Parameter(torch.randn(ANSWER, WIDTH) * 0.1)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, DIGITS)

    def forward(self, digits):
        length = digits.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.out(self.layer(self.digit(digits) + self.place[:length], src_mask=mask, is_causal=True))

    @torch.no_grad()
    def sample(self, first, generator):
        """Answers to first digits, and the logarithms of their probabilities."""
        digits = first[:, None]
        for _ in range(ANSWER):
            odds = torch.softmax(self(digits)[:, -1], 1)
            digits = torch.cat([digits, torch.multinomial(odds, 1, generator=generator)], 1)
        return digits, self.log_prob(digits)

    def log_prob(self, digits):
        return Categorical(logits=self(digits[:, :-1])).log_prob(digits[:, 1:])


def narrow(policy):
    """The weights that samplers get. A small step leaves many of them as they are."""
    return {name: tensor.detach().bfloat16() for name, tensor in policy.state_dict().items()}


def rewards(digits):
    """1 for each digit of an answer that is right, else 0."""
    return (digits[:, 1:] == (digits[:, :1] + torch.arange(1, ANSWER + 1)) % DIGITS).float()


def sampler(rank, path, batch, seed, samples, stop):
    """Samples a batch with each newest version, until it is stopped."""
    torch.set_num_threads(1)
    policy, generator = Policy(), torch.Generator().manual_seed(seed * 1000 + rank)
    parameters = dict(policy.named_parameters())

    def apply(version, weights):
        weights.copy_to(parameters)
        digits, log_prob = policy.sample(torch.randint(DIGITS, (batch,), generator=generator), generator)
        samples.put((rank, version, digits.numpy(), log_prob.numpy()))

    # What the trainer does not take need not be waited for.
    samples.cancel_join_thread()
    gradfs.follow(path, apply, stop=stop, timeout=HANGS, changes=True)
    # The queue's thread may be sending still, and torch aborts if it is there while the interpreter ends.
    os._exit(0)


def taken(samples, processes):
    """All batches that are there, and at least one."""
    try:
        batches = [samples.get(timeout=HANGS)]
    except queue.Empty:
        ended = [process.exitcode for process in processes]
        raise SystemExit(f"no sample within {HANGS} s; the samplers' exit codes are {ended}") from None
    while True:
        try:
            batches.append(samples.get_nowait())
        except queue.Empty:
            return batches


def train(policy, path, job, samples, processes):
    """REINFORCE, and a version for each step. Returns the mean reward of each step, and each sampler's versions."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=job.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, job.steps)
    means, versions, newest = [], defaultdict(set), 0
    for step in range(1, job.steps + 1):
        batches = taken(samples, processes)
        for rank, version, *_ in batches:
            versions[rank].add(version)
        fresh = [batch for batch in batches if batch[1] >= newest - OLDEST] or batches[-1:]
        digits, old = (torch.cat([torch.from_numpy(batch[place]) for batch in fresh]) for place in (2, 3))
        reward = rewards(digits)
        # Each place of an answer has a baseline of its own.
        advantage = reward - reward.mean(0)
        now = Categorical(logits=policy(digits[:, :-1]))
        new = now.log_prob(digits[:, 1:])
        # The samplers may be some versions behind.
        ratio = (new.detach() - old).exp().clamp(max=LARGEST_RATIO)
        loss = -(ratio * advantage * new).mean() - job.entropy * now.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        means.append(reward.mean().item())
        newest = gradfs.publish(path, narrow(policy), meta={"step": str(step), "reward": f"{means[-1]:.3f}"})
        if step % 20 == 0 or step == 1:
            used = ", ".join(f"sampler {rank} used version {version}" for rank, version, *_ in batches)
            print(f"step {step:4}: reward {means[-1]:.3f}, version {newest}; {used}", flush=True)
    return means, versions


@contextmanager
def hosts(policy, names):
    """The model in a shard, and the paths of it in a mount for each name. Each is a process, and reaches the shard by TCP."""
    with tempfile.TemporaryDirectory(prefix="reinforce-") as place:
        first = gradfs.create_from(narrow(policy), Path(place) / "model.safetensors")
        mounts = [Path(place) / name for name in names]

        def command(*words):
            command = [binary(), "--log-file", f"{place}/log", *map(str, words)]
            subprocess.run(command, check=True, timeout=HANGS, stdout=subprocess.DEVNULL)

        words = [binary(), "--log-file", f"{place}/log", "shard", "--listen", "127.0.0.1:0"]
        shard = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            # It says where it listens, and then that it is ready. It is the registry, too.
            registry = ["--registry", re.search(r"listens on (\S+),", shard.stdout.readline())[1]]
            shard.stdout.readline()
            command("create", "policy", "--model", first, "--reducer", "assign", *registry)
            for mount in mounts:
                mount.mkdir()
                command("mount", "--background", "--transport", "tcp", *registry, mount)
            yield [mount / "policy" for mount in mounts]
        finally:
            for mount in mounts:
                subprocess.run([binary(), "unmount", "--lazy", mount], check=False, timeout=HANGS, stderr=subprocess.DEVNULL)
            shard.terminate()
            shard.communicate(timeout=HANGS)


def check(means, versions, payloads):
    """Exits non-zero when something is missed."""
    window = max(1, len(means) // 20)
    first, last = (sum(part) / window for part in (means[:window], means[-window:]))
    print(f"mean reward {first:.3f} at first, {last:.3f} at the end")
    failures = []
    if last < LEAST_REWARD or last - first < LEAST_GAIN:
        failures.append(f"the reward is {last:.3f} after {first:.3f}")
    for rank, payload in enumerate(payloads):
        print(f"sampler {rank} used {len(versions[rank])} versions, the last one {max(versions[rank], default=None)}")
        pulled, patched = payload["pulled_bytes"], payload["pull_patched_bytes"]
        print(f"sampler {rank}'s mount pulled {pulled} bytes; {patched} bytes of versions came by what had changed")
        if not patched:
            failures.append(f"sampler {rank}'s mount pulled whole versions alone")
        if len(versions[rank]) < LEAST_VERSIONS:
            failures.append(f"sampler {rank} used {len(versions[rank])} versions")
    if failures:
        sys.exit("check FAILED: " + "; ".join(failures))
    print("check passed")


def main():
    parser = argparse.ArgumentParser(description="Trains a policy by REINFORCE, with samplers that follow it.")
    parser.add_argument("--samplers", type=int, default=2, metavar="N", help="processes that sample (2)")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps of the trainer (200)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="answers that a sampler makes at a time (64)")
    parser.add_argument("--lr", type=float, default=0.003, metavar="X", help="learning rate of Adam (0.003)")
    parser.add_argument("--entropy", type=float, default=0.005, metavar="X", help="weight of the entropy (0.005)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first weights and of all samples (0)")
    parser.add_argument("--check", action="store_true", help="fail unless the policy learns, and samplers follow it")
    job = parser.parse_args()
    if min(job.samplers, job.steps, job.batch) < 1:
        parser.error("--samplers, --steps and --batch must be positive")
    torch.manual_seed(job.seed)
    torch.set_num_threads(1)
    policy = Policy()
    context = multiprocessing.get_context("spawn")
    names = ["trainer", *(f"sampler{rank}" for rank in range(job.samplers))]
    with hosts(policy, names) as (path, *theirs):
        samples, stop = context.Queue(), context.Event()
        arguments = (job.batch, job.seed, samples, stop)
        processes = [context.Process(target=sampler, args=(rank, str(of), *arguments)) for rank, of in enumerate(theirs)]
        try:
            for process in processes:
                process.start()
            means, versions = train(policy, path, job, samples, processes)
            payloads = [json.loads((of / "status.json").read_text())["payload"] for of in theirs]
        finally:
            stop.set()
            for process in processes:
                process.join(HANGS)
                if process.is_alive():
                    process.kill()
    if job.check:
        check(means, versions, payloads)


if __name__ == "__main__":
    main()
