"""Which batch and learning rate suit a way of scripts/bench-learning best: the same arithmetic in one process, without files.

`sync` of n learners is SGD on batches n times as long. `sma` is Algorithm 2 of Crossbow, with all replicas here. It shows
choices; bench-learning itself measures with the real thing.
"""

import itertools
import statistics
import sys

sys.dont_write_bytecode = True

from learning import ACCURACY, epochs_to  # noqa: E402

BATCHES = (8, 16, 32, 64)
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)


def curve(network, first, data, method, learners, batch, rate, epochs, seed, momentum=0.9, elasticity=0.0):
    """[(epoch, 0, 0, accuracy)] of one training, which ends when the accuracy is there."""
    from learning_work import shares

    images, labels, test_images, test_labels = data
    model = first.copy()
    replicas, before = [model.copy() for _ in range(learners)], model.copy()
    share = elasticity or 1 / learners
    found = []
    for epoch in range(epochs):
        cases = [{"seed": seed, "batch": batch, "learners": learners, "rank": rank} for rank in range(learners)]
        for batches in zip(*(shares(images, labels, case, epoch) for case in cases)):
            if method == "sync":
                model -= rate * sum(network.gradient(model, *each) for each in batches) / learners
                continue
            corrections = [share * (replica - model) for replica in replicas]
            for replica, correction, each in zip(replicas, corrections, batches):
                replica -= rate * network.gradient(replica, *each) + correction
            model, before = model + sum(corrections) + momentum * (model - before), model
        found.append((epoch + 1, 0, 0, network.accuracy(model, test_images, test_labels)))
        if found[-1][3] >= ACCURACY:
            break
    return found


def search(name, method, learners, epochs, seeds):
    """Yields (batch, rate, median epochs, all epochs)."""
    import digits
    from learning_work import NETWORKS

    network, data = NETWORKS[name](), digits.load_data()
    # Training changes the network's own parameters.
    first = network.initial().copy()
    for batch, rate in itertools.product(BATCHES, RATES):
        found = [
            epochs_to(curve(network, first, data, method, learners, batch, rate, epochs, seed)) for seed in range(seeds)
        ]
        yield batch, rate, statistics.median(found), found
