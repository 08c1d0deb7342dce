"""The digits part of the suite stall: how soon a classifier is trained over slow links, by policy of pulling.

Three hosts of network namespaces have links of 200 Mbit/s: one has the shard, the others have a mount and a learner each.
The learners train the digit classifier of examples/ (2.2 MB of weights, batches of 64) until its accuracy on held-out
digits is 0.95. The example's network is computed in milliseconds, so a learner sleeps in addition,
for 0.2 s a step, and contributes the chunks of its gradients meanwhile. A push takes half of that.

With `sync` a version has both learners' halves of a batch, and the learning rate is 0.1. With `async` each half makes a
version of its own, and the learning rate is 0.05. Runs take turns, and a figure is the median of three. The seconds count
from the first open of weights to the one that shows the accuracy, by the first learner; if none does, all of the run
counts. The stall share is the mounts' own account, of both learners and the whole run.
"""

import statistics
import sys

import numpy
from machine import ROOT, say
from netns import Cluster, Hosts, Link
from programs import output_of
from report import Figure

RATE, BLOCK = 200e6, 64 << 10
COMPUTE, STEPS = 0.2, 100
ACCURACY = 0.95
# With their learning rates.
CONSISTENCIES = {"sync": "0.1", "async": "0.05"}
POLICIES = ("eager", "adaptive", "on-demand")
ROUNDS = 3
# Much longer than a run takes.
DEADLINE = 300.0
NOTE = (
    f"Two learners on two hosts, links of {RATE / 1e6:.0f} Mbit/s; each computes for {COMPUTE:g} s a step. Of "
    f"{ROUNDS} runs, the one that reached {ACCURACY:g} in the median time."
)


def data_file(directory):
    """The digits as a file, so that learners need not load scikit-learn."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    numpy.savez(directory / "digits.npz", images=images, labels=labels)
    return directory / "digits.npz"


def _run(hosts, mounts, data, name):
    """One training: what the first learner has found, with both learners' stall share."""
    running = []
    for rank, (host, path) in enumerate(mounts):
        words = ["--rank", rank, "--learners", len(mounts)]
        words += ["--steps", STEPS, "--compute", COMPUTE]
        running.append(hosts.work(host, "classifiers.py", "slow", path / name, *words, env={"DIGITS_NPZ": str(data)}))
    found = [learner.found(DEADLINE) for learner in running]
    hosts.check()
    curve = found[0]["curve"]
    reached = next((step for step, (_, accuracy) in enumerate(curve) if accuracy >= ACCURACY), len(curve) - 1)
    stall = statistics.mean(one["stall"] for one in found)
    return {"seconds": curve[reached][0], "steps": reached, "stall": stall, "curve": curve}


def measure(binary, rounds=ROUNDS):
    """{(consistency, policy): [runs]}."""
    cases = [(consistency, policy) for consistency in CONSISTENCIES for policy in POLICIES]
    found = {case: [] for case in cases}
    with Hosts(["shard", "host1", "host2"], Link(rate=RATE)) as hosts:
        cluster, places = Cluster.of(hosts, binary), hosts.names[1:]
        model, data = hosts.scratch / "digits.safetensors", data_file(hosts.scratch)
        output_of(sys.executable, ROOT / "examples" / "make_digits_model.py", model)
        # A model for each run, as mounts show those that are there when they start.
        turns = [(turn, case, f"digits-{turn}-{at}") for turn in range(rounds) for at, case in enumerate(cases)]
        for _, (consistency, policy), name in turns:
            words = ["--model", model, "--block-size", BLOCK, "--reducer", "sgd", "--aggregation", "mean"]
            words += ["--learning-rate", CONSISTENCIES[consistency], "--learners", len(places)]
            cluster.create(name, *words, "--consistency", consistency, "--pull", policy)
        mounts = [(host, cluster.mount(host)) for host in places]
        say(f"links of {hosts.link}")
        for turn, case, name in turns:
            run = _run(hosts, mounts, data, name)
            found[case].append(run)
            say(f"turn {turn + 1} of {rounds}, {', '.join(case)}: {run['seconds']:.1f} s, {run['steps']} steps")
    return found


def figures(found):
    rows = []
    for (consistency, policy), runs in found.items():
        name = ("" if consistency == "sync" else "async_") + policy.replace("-", "_")
        seconds, steps, stall = (statistics.median(run[what] for run in runs) for what in ("seconds", "steps", "stall"))
        low, high = (f(run["seconds"] for run in runs) for f in (min, max))
        words = f"{seconds:.1f} s", f"{low:.1f} to {high:.1f} s, {steps:.0f} steps"
        rows.append(Figure(f"digits_seconds_{name}", seconds, "s", None, None, *words, low, high))
        rows.append(Figure(f"digits_stall_share_{name}", stall, "share", ours=f"{stall:.1%}"))
    return rows


def draw(found, path):
    """Draws accuracy against time, of the run of the median time."""
    from bench import chart

    panels = {}
    for (consistency, policy), runs in found.items():
        middle = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]
        panels.setdefault(consistency, {})[policy] = middle["curve"]
    for drawn in chart.draw_accuracy(panels, path, ACCURACY, NOTE):
        say(f"drew {drawn}")
