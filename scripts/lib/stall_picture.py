"""The picture of scripts/bench-stall: what a learner and its mount do in a few steps, one panel for each policy of pulling.

It is drawn from what `gradfs trace` records, as Figure 3 of Ren et al., "Efficient Use of RDMA in Distributed Deep Learning
Systems", has it. The job is asynchronous: on the shard's host, a trainer makes a version every 40 ms. The learner opens
weights, computes (it sleeps, for 250 ms), writes its gradients in eight chunks meanwhile, and commits. A pull of the whole
model takes about 90 ms on its link.
"""

import json
import sys
import time
from pathlib import Path

from machine import Failed, say

LIB = Path(__file__).resolve().parent
MIB = 1 << 20
SIZE, BLOCK, RATE = 2 * MIB, 64 << 10, 200e6
CHUNKS, COMPUTE = 8, 0.25
POLICIES = ("on-demand", "eager", "adaptive")
# So that the adaptive policy knows the learner, in seconds; what is traced, and what of that is drawn.
BEFORE, TRACED, DRAWN = 3.0, 2.0, 1.3
DEADLINE = 60.0
# Pauses in a lane that are too short to be seen, in seconds.
MERGED = 0.003


def _traces(binary):
    """{policy: the document that `gradfs trace` writes}, of mounts on one link."""
    from netns import Cluster, Hosts, Link

    found = {}
    with Hosts(["shard", "learner"], Link(rate=RATE)) as hosts:
        cluster = Cluster(hosts, binary)
        cluster.shard("shard")
        options = ["--size", str(SIZE), "--block-size", str(BLOCK), "--reducer", "sum", "--consistency", "async"]
        cluster.create("model", *options)
        models = {host: cluster.mount(host) / "model" for host in hosts.names}
        model, output = models["learner"], hosts.scratch / "trace.json"
        train = [sys.executable, LIB / "stall_work.py", "train", models["shard"], hosts.scratch / "times"]
        hosts.start("shard", train).wait_for("trains")
        steps = int((BEFORE + TRACED) / COMPUTE)
        for policy in POLICIES:
            (hosts.root("learner") / str(model / "control" / "pull").lstrip("/")).write_text(policy)
            words = [model, "written", SIZE, CHUNKS, COMPUTE, steps]
            learner = hosts.start("learner", [sys.executable, LIB / "overlap_work.py", *words])
            learner.wait_for("ready")
            time.sleep(BEFORE)
            command = [binary, "trace", model.parent, "--seconds", TRACED, "-o", output]
            hosts.start("learner", command).finish(DEADLINE)
            found[policy] = json.loads(output.read_text())
            learner.finish(DEADLINE)
            hosts.check()
            say(f"traced {policy}")
    return found


def _slices(document):
    """[(thread, name, begin, end)] in seconds."""
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    return [
        (threads[event["pid"], event["tid"]], event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in document["traceEvents"]
        if event["ph"] == "X"
    ]


def _merged(intervals):
    """What overlaps or nearly touches is one."""
    found = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + MERGED:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def lanes(document):
    """{lane: [(begin, end)]} in milliseconds from the end of the first step that the trace has all of."""
    of = {"compute": [], "push": [], "pull": [], "bubble": [], "stall": []}
    commits = []
    for thread, name, begin, end in _slices(document):
        kind = name.split()[0]
        if thread.startswith("learner ") and kind in ("compute", "stall"):
            of[kind].append((begin, end))
        elif thread.startswith("learner ") and kind == "commit":
            commits.append((begin, end))
        elif thread.startswith("plans") and kind in ("blocks", "conclude"):
            of["push"].append((begin, end))
        elif thread.startswith("versions") and kind in ("pull", "bubble"):
            of[kind].append((begin, end))
    # The trace may have begun amid a commit.
    whole = sorted(end for begin, end in commits if begin > 0)
    if not whole:
        raise Failed("the trace has no step")
    start = whole[0]
    shown = {}
    for lane, intervals in of.items():
        # A pull that begins when another ends is one of its own.
        intervals = _merged(intervals) if lane in ("compute", "push", "stall") else sorted(intervals)
        cut = [(max(begin, start), min(end, start + DRAWN)) for begin, end in intervals]
        shown[lane] = [((begin - start) * 1e3, (end - start) * 1e3) for begin, end in cut if begin < end]
    return shown


def draw(binary, directory):
    """Draws stall.svg and stall.png in `directory`."""
    import chart

    panels = {policy: lanes(document) for policy, document in _traces(binary).items()}
    directory.mkdir(parents=True, exist_ok=True)
    note = (
        f"From gradfs trace, of a mount with an asynchronous learner that computes for {COMPUTE * 1e3:.0f} ms a step on a link "
        f"of {RATE / 1e6:.0f} Mbit/s; a trainer makes a version every 40 ms.\nPush: from the first block until the shard has "
        "answered. Bubble: from when a version is here until it is opened. Stall: the program waits, in fsync or open."
    )
    for path in chart.draw_timelines(panels, directory / "stall", DRAWN * 1e3, note):
        say(f"drew {path}")
