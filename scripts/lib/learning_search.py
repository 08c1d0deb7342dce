"""What scripts/bench-learning --search shows: which batch and learning rate suit a way of learning together best.

It does the arithmetic of the learners and the reducer in one process, without files: `sync` is SGD with the mean of all
gradients, and `sma` is Algorithm 2 of Crossbow.
"""

import itertools
import statistics
import sys

sys.dont_write_bytecode = True

from learning import ACCURACY, epochs_to  # noqa: E402

# Of all learners together.
TOTALS = (16, 32, 64, 128, 256)
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


def rows(name, method, learners, epochs, seeds, **sma):
    """Yields (batch, rate, median epochs, all epochs)."""
    # It also makes `digits` importable.
    from learning_work import NETWORKS, digits

    network, data = NETWORKS[name](), digits.load_data()
    # Training changes the network's own parameters.
    first = network.initial().copy()
    for batch, rate in itertools.product((total // learners for total in TOTALS), RATES):
        found = [
            epochs_to(curve(network, first, data, method, learners, batch, rate, epochs, seed, **sma))
            for seed in range(seeds)
        ]
        yield batch, rate, statistics.median(found), found
