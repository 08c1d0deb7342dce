"""Publications of whole new weights against Redis: parts of scripts/bench and scripts/bench-net.

On one host, `publish` of `gradfs up` (reducer `assign`) against SET: all bytes of a model, from a buffer of the program's
own, until they are a version, or the key's value. There are three ways to publish, and the fastest counts:

  written  open, write(2) and close
  synced   write(2) and fsync of a file that stays open
  stored   memcpy into the mapped file, and fsync

Over TCP, one mount publishes, and another process on another mount waits for the version and reads all of it; that is
against SET and then GET by one client, who waits for nobody.
"""

import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

import daemons
import net_baselines
import redis_rival
from machine import MIB, say
from report import ratio

WORK = Path(__file__).resolve().parent / "publish_work.py"
WAYS = ("written", "synced", "stored")
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
