"""A run of random harm: what is done when, what must be true then, and the report."""

import errno
import random
import re
import shlex
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from patience import Limit

from chaos.checker import Checker, TooFew, Wrong
from chaos.harms import QUICK, SINGLE, SOON, START, kinds
from chaos.world import HUNG, Failed, World, events
from report import Figure, write_json

# The job goes on by then after the worst of it, on a machine that is not busy.
GOES_ON = 40
# What takes the place of one that was killed may find it still ending: a learner, or those of a mount until their lease ends.
ENDING = 60
# So often a mount is started again that has met the job when it was being restored, where it is not to succeed at once.
STARTS = 20
_RESTORED = re.compile(r"restored from version (\d+) in [0-9.]+ s: it goes on as version (\d+)")
_LOOKS = 0.05


@dataclass
class Options:
    minutes: float = 1.0
    seed: int = 1
    store: str = "file"
    registry: str = "embedded"
    here: bool = False
    skip: tuple = ()
    only: tuple = ()
    json: Path = None

    def words(self):
        """The command that does the same."""
        words = ["scripts/chaos", "--minutes", f"{self.minutes:g}", "--seed", str(self.seed), "--store", self.store]
        words += ["--registry", self.registry, *(["--here"] if self.here else [])]
        words += [word for kind in self.skip for word in ("--skip", kind)]
        return shlex.join([*words, *(word for kind in self.only for word in ("--only", kind))])


def judge(harm, took, limit):
    """Whether the job went on within the documented bound. Seconds in which the machine held somebody up do not count, so that
    a loaded one passes; the figures have all seconds."""
    if took > harm.bound and limit.over():
        raise Wrong(f"{took:.1f} s to the next step, and {harm.bound:.1f} s are the most, after {harm.words}")


class Run:
    def __init__(self, world, dice, options, tell):
        self.world, self.dice, self.options, self.tell = world, dice, options, tell
        self.checker = world.checker = Checker()
        self.begun, self.seconds = time.monotonic(), defaultdict(list)
        # Who -> when its last step began, and that of them which was acknowledged; when it has left, and how long it may be
        # silent yet; when it has seen which version.
        self.began, self.steps, self.left, self.silence, self.sights = {}, {}, {}, {}, {}
        # When the harm was done, and when the first step was acknowledged that began later.
        self.since, self.first = float("inf"), None
        self.why, self.number = "", 0

    def look(self):
        """Takes in what has happened meanwhile."""
        for client in self.world.clients:
            if not (heard := events(client)):
                limit = self.silence.setdefault(client.name, Limit(HUNG))
                if limit.over() and not client.was_away(time.monotonic(), time.monotonic()) and client.name not in self.left:
                    raise Wrong(f"{client.name} hangs: one call has taken more than {limit.taken():.0f} s")
                continue
            self.silence[client.name] = Limit(HUNG)
            for event in heard:
                self.hear(client, event)
        for shard in self.world.shards:
            for line in shard.lines():
                self.world.heard.append(line)
                if found := _RESTORED.search(line):
                    self.checker.restored(int(found[2]), int(found[1]))
                if "panicked" in line:
                    raise Wrong(f"{shard.name}: {line}")

    def hear(self, client, event):
        if event.get("errno"):
            mount = next(mount for mount in self.world.mounts if mount.name == event["mount"])
            ends = event["errno"] in (errno.EBUSY, errno.EEXIST)
            for one in (client, mount):
                event["excused"] |= one.was_away(event["t0"] - ENDING * ends, event["t1"])
        if event["do"] == "left":
            self.left[client.name] = event["t1"]
        elif event["do"] != "fail":
            self.left.pop(client.name, None)
        if event["do"] == "give" and not event["errno"]:
            self.steps[client.name] = self.began[client.name]
            if self.began[client.name] > self.since and self.first is None:
                self.first = event["t1"]
        if event["do"] == "try":
            self.began[client.name] = event["t0"]
        if event["do"] == "see":
            self.sights[client.name] = event["t0"], event["version"]
        self.checker.take(event)

    def until(self, condition, what, seconds=GOES_ON):
        """Looks on until something is true."""
        limit = Limit(seconds)
        while True:
            self.look()
            if found := condition():
                return found
            if limit.over():
                raise Wrong(f"not within {limit.taken():.0f} s: {what()}")
            time.sleep(_LOOKS)

    def pass_on(self, seconds):
        """Looks on for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()
            time.sleep(_LOOKS)

    def harm(self, name, does):
        """Does one harm, and sees the job go on as if nothing had been."""
        self.pass_on(self.dice.uniform(0.3, 1.5))
        harm = does(self.world, self.dice)
        at, limit = time.monotonic(), Limit(harm.bound)
        self.since, self.first = at, None
        self.bury(harm.victims)
        is_quick = not self.dice.randrange(3)
        comes_first = harm.first or is_quick and QUICK not in self.options.skip
        later = self.dice.uniform(0, 1.5)
        if comes_first:
            self.pass_on(later)
            self.revive(harm.victims)
        if harm.first:
            at, limit = max(victim.started for victim in harm.victims), Limit(harm.bound)
        self.pass_on(harm.seconds - (time.monotonic() - at))
        self.until(harm.felt, lambda: f"anybody has felt that {harm.words}")
        # It has lasted until somebody felt it.
        harm.seconds = max(harm.seconds, time.monotonic() - at)
        limit.seconds = max(limit.seconds, harm.bound)
        harm.heals()
        self.until(lambda: self.first, lambda: f"a step that is acknowledged after {harm.words}")
        # The job may go on before the last of all processes is there.
        took = max(self.first - at, 0.0)
        self.seconds[name].append(took)
        self.tell(f"{time.monotonic() - self.begun:6.1f} s  {took:6.2f} s to the next step  {name}: {harm.words}")
        judge(harm, took, limit)
        if not comes_first:
            self.pass_on(later)
            self.revive(harm.victims)
        self.settle(harm.words)

    def bury(self, victims):
        """What the dead have said last."""
        for victim in victims:
            if victim in self.world.clients:
                for event in events(victim):
                    self.hear(victim, event)
                self.checker.take({"do": "killed", "who": victim.name})
            elif victim in self.world.shards:
                self.look()

    def revive(self, victims):
        """Starts them again, each when those that it needs are there."""
        for group in (self.world.registry, self.world.shards, self.world.mounts, self.world.clients):
            again = [victim for victim in victims if victim in group]
            for victim in again:
                victim.start()
            for victim in again:
                self.wait(victim)
                self.silence.pop(victim.name, None)

    def wait(self, victim):
        """Until it is ready."""
        for start in range(STARTS):
            try:
                return victim.wait()
            except Failed as why:
                if START not in self.options.skip or victim.kind != "mount" or start + 1 == STARTS:
                    raise Wrong(str(why)) from why
            self.pass_on(0.5)
            victim.start()

    def settle(self, words):
        """All learners take steps again; then they leave, and all that was acknowledged is there, once, and durable."""
        learners, now = [client for client in self.world.clients if client.kind == "learner"], time.monotonic()

        def late():
            return [one.name for one in learners if self.steps.get(one.name, 0) < now]

        def staying():
            return [one.name for one in learners if one.name not in self.left]

        self.until(lambda: not late(), lambda: f"steps of {', '.join(late())} after {words}", 2 * GOES_ON)
        self.world.flag.touch()
        try:
            self.until(lambda: not staying(), lambda: f"{', '.join(staying())} leave the job after {words}")
            self.until(lambda: self.is_settled(max(self.left.values())), lambda: f"{self.why} after {words}")
        finally:
            self.world.flag.unlink(missing_ok=True)
        self.since = float("inf")

    def is_settled(self, left):
        """Whether both mounts show one version, which is durable and has all contributions."""
        seen = [self.sights.get(f"{mount.name}-watcher", (0, 0)) for mount in self.world.mounts]
        self.why = f"all mounts show one version: {seen}"
        if any(at <= left for at, _ in seen) or len({version for _, version in seen}) > 1:
            return False
        version = seen[0][1]
        try:
            self.checker.check()
            self.why = f"version {version} is durable: {self.checker.durable}"
            if any(self.checker.durable.get(mount.name, -1) < version for mount in self.world.mounts):
                return False
            self.number, _ = self.checker.settle(version)
        except TooFew as why:
            self.why = str(why)
            return False
        self.world.settled = version
        return True

    def go(self):
        there = kinds(self.world, self.options.skip, self.options.only)
        if not there:
            raise Wrong("there is no harm that can be done here")
        self.settle("the start")
        until = self.begun + 60 * self.options.minutes
        for number, name in enumerate(self.deck(there)):
            if number >= len(there) and time.monotonic() > until:
                break
            self.harm(name, there[name][0])

    def deck(self, there):
        """Each kind once, and then each as often as its weight says, again and again."""
        cards = list(there)
        while True:
            self.dice.shuffle(cards)
            yield from cards
            cards = [name for name, (_, weight) in there.items() for _ in range(weight)]

    def report(self):
        """What it took, by kind."""
        self.tell(f"\n{'kind':12} {'count':>5} {'median s':>9} {'worst s':>9}")
        for name, took in sorted(self.seconds.items()):
            self.tell(f"{name:12} {len(took):5} {statistics.median(took):9.2f} {max(took):9.2f}")
        single = [seconds for name in SINGLE for seconds in self.seconds.get(name, [])]
        if self.options.json:
            figures = [Figure("recovery_seconds", max(single, default=0.0), "s", SOON, "<=")]
            figures += [Figure("harms", sum(map(len, self.seconds.values())), "")]
            for name, took in self.seconds.items():
                figures += [Figure(f"harms {name}", len(took), ""), Figure(f"seconds {name}", max(took), "s")]
            write_json(self.options.json, figures)


def chaos(options, tell=lambda line: print(line, flush=True)):
    """Does it; 0, or 1 if something was wrong."""
    dice = random.Random(options.seed)
    tell(f"seed {options.seed}: {options.words()}")
    with World(options, dice) as world:
        tell(f"{len(world.shards)} shards, {', '.join(f'{name} {value}' for name, value in world.job.items())}")
        run = Run(world, dice, options, tell)
        try:
            run.go()
        except (Exception, KeyboardInterrupt) as wrong:
            tell("\n".join(world.tails()))
            tell(f"WRONG: {type(wrong).__name__}: {wrong}\nseed {options.seed}; once more: {options.words()}")
            if not isinstance(wrong, AssertionError):
                raise
            return 1
        finally:
            run.report()
        tell(f"{run.number} contributions, and all versions are right")
        return 0
