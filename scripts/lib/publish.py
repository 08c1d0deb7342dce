"""Publications of whole new weights against Redis: parts of scripts/bench and scripts/bench-net.

On one host, `publish` of `gradfs up` (reducer `assign`) against SET: all bytes of a model, from a buffer of the program's
own, until they are a version, or the key's value. There are three ways to publish, and the fastest counts:

  written  open, write(2) and close
  synced   write(2) and fsync of a file that stays open
  stored   memcpy into the mapped file, and fsync

Over TCP, one mount publishes, and another process on another mount waits for the version and reads all of it; that is
against SET and then GET by one client, who waits for nobody. Only files that stay open are tried there.
"""

import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import daemons
import net_baselines
import net_gradfs
import redis_rival
from machine import MIB, say
from report import ratio

WORK = Path(__file__).resolve().parent / "publish_work.py"
WAYS = ("written", "synced", "stored")
FETCH_WAYS = WAYS[1:]
# Sizes in MiB, and how often each is published in a turn.
GRID = {1: 16, 4: 8, 64: 1}
WARM_UP = 2
TARGET, FETCH_TARGET = 2.0, 1.5


def _race(contenders, quiet, turns, count):
    """Has each of {name: (a call that gives seconds, who is checked)} take turns; gives medians."""
    found = {}
    for turn in range(WARM_UP + turns):
        for name, (act, _) in contenders.items():
            quiet.wait()
            seconds = [act() for _ in range(count)]
            if turn >= WARM_UP:
                found.setdefault(name, []).extend(seconds)
    for _, rival in contenders.values():
        rival.check()
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def milliseconds(seconds):
    """As text; some are short."""
    return f"{seconds * 1e3:.3g} ms"


def _asks(rival, what):
    return lambda: rival.round(what).seconds


def publisher(stack, model, way):
    """A process that publishes, of `model` below a mount."""
    command = [sys.executable, WORK, "--model", model, "--way", way]
    return stack.enter_context(net_baselines.Rival([], lambda *_: command, 1))


def on_one_host(binary, client, work, quiet, turns):
    """{MiB: medians by contender}."""
    found = {}
    for size, count in GRID.items():
        say(f"publications of {size} MiB")
        with ExitStack() as stack:
            contenders = {}
            for way in WAYS:
                mount = daemons.gradfs(binary, work / f"publish-{size}-{way}", size * MIB, "--reducer", "assign")
                rival = publisher(stack, stack.enter_context(mount), way)
                contenders[way] = _asks(rival, "publish"), rival
            redis = stack.enter_context(redis_rival.server(client, work / f"redis-{size}"))
            for over, way in (("unix", "direct"), ("tcp", "direct"), ("unix", "plain")):
                rival = redis.client(stack, over, size * MIB, way)
                contenders[over, way] = _asks(rival, "set"), rival
            found[size] = _race(contenders, quiet, turns, count)
    return found


class Pair:
    """A program that publishes by one mount over TCP, and one that reads by another; as a Rival of net_baselines is."""

    def __init__(self, stack, binary, size, way):
        cluster = stack.enter_context(net_gradfs.Cluster(binary, size, 1, reducer="assign"))
        models = []
        for name in ("from", "to"):
            path = cluster.directory / name
            options = "--transport", "tcp"
            stack.enter_context(daemons.network_mount(binary, path, cluster.registry, net_gradfs.MODEL, *options))
            models.append(path / net_gradfs.MODEL)
        self.writer, self.reader = publisher(stack, models[0], way), publisher(stack, models[1], "written")

    def seconds(self):
        """From the publication's begin until the other program has the weights."""
        give_up = time.monotonic() + net_baselines.ROUND_DEADLINE
        (reader,) = self.reader.learners
        reader.tell("round fetch")
        reader.answer("waits", give_up)
        (writer,) = self.writer.learners
        writer.tell("round publish")
        end = reader.answer("fetch", give_up)["end"]
        self.reader.pushes += 1
        return end - writer.answer("publish", give_up)["start"]

    def check(self):
        """Ends the run unless the reader has what was published last."""
        self.reader.check()


def over_tcp(binary, client, work, quiet, turns):
    """{MiB: medians by contender}."""
    found = {}
    for size, count in GRID.items():
        say(f"publications of {size} MiB over TCP")
        with ExitStack() as stack:
            contenders = {}
            for way in FETCH_WAYS:
                pair = Pair(stack, binary, size * MIB, way)
                contenders[way] = pair.seconds, pair
            redis = stack.enter_context(redis_rival.server(client, work / f"redis-{size}"))
            rival = redis.client(stack, "tcp", size * MIB)
            contenders["redis"] = _asks(rival, "setget"), rival
            found[size] = _race(contenders, quiet, turns, count)
    return found


def fetch_figures(found):
    """The ratios, and the smallest of them."""
    rows = []
    for size, medians in found.items():
        way = min(FETCH_WAYS, key=medians.get)
        ours, other = medians[way], medians["redis"]
        words = f"{milliseconds(ours)} ({way})", milliseconds(other)
        rows.append(ratio(f"publish_fetch_net_{size}mib_vs_redis", other / ours, None, *words))
    worst = min(rows, key=lambda row: row.value)
    return [ratio("publish_fetch_net_vs_redis", worst.value, FETCH_TARGET, worst.ours, worst.other), *rows]


def figures(found):
    """The ratios, and the smallest of them against the fastest client of Redis."""
    rows, extra = [], []
    for size, medians in found.items():
        way = min(WAYS, key=medians.get)
        ours, other = medians[way], min(medians["unix", "direct"], medians["tcp", "direct"])
        words = f"{milliseconds(ours)} ({way})"
        rows.append(ratio(f"publish_{size}mib_vs_redis_set", other / ours, None, words, milliseconds(other)))
        written = min(medians["written"], medians["synced"])
        row = f"publish_written_{size}mib_vs_redis_set", other / written, None
        extra.append(ratio(*row, milliseconds(written), milliseconds(other)))
        for name, key in (("tcp", ("tcp", "direct")), ("plain", ("unix", "plain"))):
            row = f"publish_{size}mib_vs_redis_{name}_set", medians[key] / ours, None
            extra.append(ratio(*row, words, milliseconds(medians[key])))
    worst = min(rows, key=lambda row: row.value)
    return [ratio("publish_vs_redis_set", worst.value, TARGET, worst.ours, worst.other), *rows, *extra]
