#!/usr/bin/env python3
"""Data-parallel training that outlives a shard: the job goes on from its newest snapshot, and each loop goes back there.

    make_digits_model.py digits.safetensors
    export GRADFS_REGISTRY=node1                     # several shards, and a store that all of them see
    gradfs create digits --model digits.safetensors --snapshot-to /shared/digits --snapshot-every 10s
    gradfs mount /mnt/job &
    train_restored.py /mnt/job/digits

It is train_digits.py with the Python package. A batch is a function of the number of its step, so the loader goes to any
step. The weights at the end are those of a training in which no shard has died. If everything has died, `gradfs create
digits --from /shared/digits` makes the job anew, and the same command goes on with it.
"""

from digits import Layout, arguments, check, configure, epoch_batches, load_data, parse, run_learners, share
from train_digits import accuracy_of, backpropagate, train_alone

import gradfs
import numpy as np


class Batches:
    """What a learner takes of each batch, by the number of the step."""

    def __init__(self, job, rank):
        self.job, self.rank = job, rank
        self.data = load_data()[:2]
        self.in_epoch = len(self.data[0]) // job.batch
        self.epoch, self.batches = None, []

    def __len__(self):
        return self.job.epochs * self.in_epoch

    def __getitem__(self, step):
        epoch, at = divmod(step, self.in_epoch)
        if epoch != self.epoch:
            self.epoch, self.batches = epoch, list(epoch_batches(*self.data, self.job, epoch))
        return [share(part, self.rank, self.job.learners) for part in self.batches[at]]


def steps_of(model, version):
    """The steps that a version has. A restored job has higher numbers, and this setting has moved with them."""
    return version - int(model.control["schedule_start"])


def learner(job, rank):
    """One learner process, from joining to leaving; returns how often it went back."""
    model, batches, times = gradfs.open(job.model), Batches(job, rank), 0
    gradient = {name: np.empty(tensor.shape, np.float32) for name, tensor in model.layout.items()}
    with model.join(f"learner{rank}") as me:
        step = steps_of(model, model.version)
        print(f"learner {rank}: begins at step {step}", flush=True)
        while step < len(batches):
            try:
                with me.pull() as weights:
                    backpropagate(weights.numpy(), *batches[step], gradient)
                me.push(gradient)
                step += 1
            except gradfs.RolledBack as back:
                # What was pushed since the snapshot is undone, so it is done again.
                before, step = step, steps_of(model, back.to_version)
                times += 1
                print(f"learner {rank}: from step {before} back to {step}", flush=True)
    return times


def main():
    job = parse(arguments("Trains a digit classifier with the Python package, and goes back when the job is restored."))
    layout, model = Layout(job.model), gradfs.open(job.model)
    first = steps_of(model, configure(job))
    initial = np.fromfile(job.model / "weights", np.float32)
    times = run_learners(learner, job)
    trained = np.fromfile(job.model / "weights", np.float32)
    last = steps_of(model, model.version)
    accuracy = accuracy_of(layout.views(trained), *load_data()[2:])
    print(f"{last - first} steps, test accuracy {accuracy:.4f}; restored {times[0]} times", flush=True)
    if job.check:
        check(job, layout, trained, train_alone(job, layout, initial, first), accuracy, last)


if __name__ == "__main__":
    main()
