"""Publications of whole new weights against Redis: parts of the suites mount and net.

On one host, `publish` of `gradfs up` (reducer `assign`) against SET: all bytes of a model, from a buffer of the program's
own, until they are a version, or the key's value. There are three ways to publish, and the fastest counts:

  written  open, write(2) and close
  synced   write(2) and fsync of a file that stays open
  stored   memcpy into the mapped file, and fsync

Over TCP, one mount publishes, and another process on another mount waits for the version and reads all of it; that is
against SET and then GET by one client, who waits for nobody. Only files that stay open are tried there.
"""

import sys
from contextlib import ExitStack

from machine import MIB, say
from report import ratio, worst

from bench import baselines, jobs

WAYS = ("written", "synced", "stored")
FETCH_WAYS = WAYS[1:]
# Sizes in MiB, and how often each is published in a turn.
GRID = {1: 16, 4: 8, 64: 1}
WARM_UP = 2
TARGET, FETCH_TARGET = 2.0, 1.5


def _words(seconds):
    # Some are short.
    return f"{seconds * 1e3:.3g} ms"


def _publisher(stack, model, way="written"):
    return jobs.Rival(stack, [[sys.executable, jobs.LEARNER, model, "--publish", "--way", way]])


class _Pair:
    """A program that publishes by one mount over TCP, and one that reads by another."""

    def __init__(self, stack, cluster, way):
        models = [cluster.mount(stack, "--transport", "tcp", name=name)[0] for name in ("from", "to")]
        self.writer, self.reader = _publisher(stack, models[0], way), _publisher(stack, models[1])

    def seconds(self):
        """From the publication's begin until the other program has the weights."""
        (reader,), (writer,) = self.reader.peers, self.writer.peers
        reader.tell("round fetch")
        reader.answer("waits")
        writer.tell("round publish")
        end = reader.answer("fetch")["end"]
        self.reader.pushes += 1
        return end - writer.answer("publish")["start"]


def _race(bench, contenders, count):
    """Has each of {name: (a call that gives seconds, who is checked)} take turns; gives medians."""
    acts = {name: lambda act=act: [act() for _ in range(count)] for name, (act, _) in contenders.items()}
    rivals = [rival for _, rival in contenders.values()]
    return jobs.medians(jobs.turns(acts, 5 if bench.quick else 15, WARM_UP, rivals=rivals))


def _asked(rival, what):
    return lambda: rival.round(what).seconds, rival


def on_one_host(bench, gradfs, binaries):
    """The ratios, and the smallest of them against the fastest client of Redis."""
    rows, extra = [], []
    for size, count in GRID.items():
        say(f"publications of {size} MiB")
        with ExitStack() as stack:
            contenders = {}
            for way in WAYS:
                mount = jobs.up(gradfs, bench.work / f"publish-{size}-{way}", size * MIB, "--reducer", "assign")
                contenders[way] = _asked(_publisher(stack, stack.enter_context(mount), way), "publish")
            redis = baselines.Redis(stack, binaries, bench.work / f"redis-{size}")
            for over, way in (("unix", "direct"), ("tcp", "direct"), ("unix", "plain")):
                contenders[over, way] = _asked(redis.client(stack, over, size * MIB, way), "set")
            medians = _race(bench, contenders, count)
        way = min(WAYS, key=medians.get)
        ours, other = medians[way], min(medians["unix", "direct"], medians["tcp", "direct"])
        words = f"{_words(ours)} ({way})"
        rows.append(ratio(f"publish_{size}mib_vs_redis_set", other / ours, None, words, _words(other)))
        written = min(medians["written"], medians["synced"])
        name = f"publish_written_{size}mib_vs_redis_set"
        extra.append(ratio(name, other / written, None, _words(written), _words(other)))
        for name, key in (("tcp", ("tcp", "direct")), ("plain", ("unix", "plain"))):
            name = f"publish_{size}mib_vs_redis_{name}_set"
            extra.append(ratio(name, medians[key] / ours, None, words, _words(medians[key])))
    return [worst("publish_vs_redis_set", rows, TARGET), *rows, *extra]


def over_tcp(bench, gradfs, binaries):
    """The ratios, and the smallest of them."""
    rows = []
    for size, count in GRID.items():
        say(f"publications of {size} MiB over TCP")
        with ExitStack() as stack:
            contenders = {}
            for way in FETCH_WAYS:
                place = bench.work / f"fetch-{size}-{way}"
                pair = _Pair(stack, jobs.Cluster(stack, gradfs, place, size * MIB, reducer="assign"), way)
                contenders[way] = pair.seconds, pair.reader
            redis = baselines.Redis(stack, binaries, bench.work / f"fetch-redis-{size}")
            contenders["redis"] = _asked(redis.client(stack, "tcp", size * MIB), "setget")
            medians = _race(bench, contenders, count)
        way = min(FETCH_WAYS, key=medians.get)
        ours, other = medians[way], medians["redis"]
        words = f"{_words(ours)} ({way})", _words(other)
        rows.append(ratio(f"publish_fetch_net_{size}mib_vs_redis", other / ours, None, *words))
    return [worst("publish_fetch_net_vs_redis", rows, FETCH_TARGET), *rows]
