"""The picture of the suite stall: what a learner and its mount do in a few steps, one panel for each policy of pulling.

It is drawn from what `gradfs trace` records, as Figure 3 of Ren et al., "Efficient Use of RDMA in Distributed Deep Learning
Systems", has it. The job is asynchronous: on the shard's host, a trainer makes a version every 40 ms. The learner opens
weights, computes (it sleeps, for 250 ms), writes its gradients in eight chunks meanwhile, and commits. A pull of the whole
model takes about 90 ms on its link.
"""

import json
import time

from machine import MIB, Failed, say
from netns import Cluster, Hosts, Link

SIZE, BLOCK, RATE = 2 * MIB, 64 << 10, 200e6
CHUNKS, COMPUTE = 8, 0.25
# So that the adaptive policy knows the learner, in seconds; what is traced, and what of that is drawn.
BEFORE, TRACED, DRAWN = 3.0, 2.0, 1.3
DEADLINE = 60.0
# Pauses in a lane that are too short to be seen, in seconds.
MERGED = 0.003
SHOWN = ("compute", "push", "pull", "bubble", "stall")
# The lane of an event, by its thread and its kind.
LANES = {("learner", kind): kind for kind in ("compute", "stall", "commit")}
LANES |= {("versions", kind): kind for kind in ("pull", "bubble")} | {("plans", kind): "push" for kind in ("blocks", "conclude")}
NOTE = (
    f"From gradfs trace, of a mount with an asynchronous learner that computes for {COMPUTE * 1e3:.0f} ms a step on a link "
    f"of {RATE / 1e6:.0f} Mbit/s; a trainer makes a version every 40 ms.\nPush: from the first block until the shard has "
    "answered. Bubble: from when a version is here until it is opened. Stall: the program waits, in fsync or open."
)


def _traces(binary):
    """{policy: the document that `gradfs trace` writes}, of mounts on one link."""
    found = {}
    with Hosts(["shard", "learner"], Link(rate=RATE)) as hosts:
        words = f"--size {SIZE} --block-size {BLOCK} --reducer sum --consistency async".split()
        cluster = Cluster.of(hosts, binary, *words, mounts=hosts.names)
        model, output, steps = cluster.model("learner"), hosts.scratch / "trace.json", int((BEFORE + TRACED) / COMPUTE)
        hosts.work("shard", "hosts.py", "train", cluster.model("shard"), hosts.scratch / "times").wait_for("trains")
        for policy in ("on-demand", "eager", "adaptive"):
            hosts.path("learner", model / "control" / "pull").write_text(policy)
            learner = hosts.work("learner", "hosts.py", "overlap", model, "written", SIZE, CHUNKS, COMPUTE, steps)
            learner.wait_for("ready")
            time.sleep(BEFORE)
            hosts.start("learner", [binary, "trace", model.parent, "--seconds", TRACED, "-o", output]).finish(DEADLINE)
            found[policy] = json.loads(output.read_text())
            learner.finish(DEADLINE)
            hosts.check()
            say(f"traced {policy}")
    return found


def _merged(intervals):
    """What overlaps or nearly touches is one."""
    found = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + MERGED:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def _lanes(document):
    """{lane: [(begin, end)]} in milliseconds from the end of the first step that the trace has all of."""
    events, of = document["traceEvents"], {lane: [] for lane in (*SHOWN, "commit")}
    named = (event for event in events if event["ph"] == "M" and event["name"] == "thread_name")
    threads = {(event["pid"], event["tid"]): event["args"]["name"].split()[0].rstrip("-0123456789") for event in named}
    for event in events:
        if event["ph"] == "X" and (lane := LANES.get((threads[event["pid"], event["tid"]], event["name"].split()[0]))):
            of[lane].append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    # The trace may have begun amid a commit.
    start = min((end for begin, end in of["commit"] if begin > 0), default=None)
    if start is None:
        raise Failed("the trace has no step")
    shown = {}
    for lane in SHOWN:
        # A pull that begins when another ends is one of its own.
        intervals = _merged(of[lane]) if lane in ("compute", "push", "stall") else sorted(of[lane])
        cut = [(max(begin, start), min(end, start + DRAWN)) for begin, end in intervals]
        shown[lane] = [((begin - start) * 1e3, (end - start) * 1e3) for begin, end in cut if begin < end]
    return shown


def draw(binary, path):
    """Draws `path`.svg and .png."""
    from bench import chart

    panels = {policy: _lanes(document) for policy, document in _traces(binary).items()}
    for drawn in chart.draw_timelines(panels, path, DRAWN * 1e3, NOTE):
        say(f"drew {drawn}")
