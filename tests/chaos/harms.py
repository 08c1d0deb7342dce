"""The kinds of harm. Each does it, and says whom it has killed and how it ends."""

import contextlib
import functools
import json
import time
from dataclasses import dataclass, field

import buckets
from patience import Limit

from chaos.world import DISK, HUNG, LEASE

# The lease of shards: one that is silent for so long is not listed any more.
LISTED = 10
# Then the job goes on within so many seconds.
SOON = 10


def nothing():
    """There is nothing to be healed."""


def at_once():
    """What was done needs no sign that it had an effect."""
    return True


@dataclass
class Harm:
    """What was done. It lasts for `seconds` and until it was `felt`, and then `heals` ends it. The `victims` are started again
    later, or `first`: the job cannot go on before."""

    words: str
    victims: list = field(default_factory=list)
    seconds: float = 0.0
    heals: callable = nothing
    first: bool = False
    felt: callable = at_once

    @property
    def bound(self):
        """The job goes on so many seconds after the kill, or the start of all that it needs. What lasts adds its time, but a
        shard no more than its lease: then others take its place. Nobody takes that of a store."""
        lasts = min(self.seconds, LISTED) if self.felt is at_once else self.seconds
        return lasts + SOON


def kill(*victims, **options):
    """These die at once."""
    for victim in victims:
        victim.kill()
    return Harm("kill -9 of " + ", ".join(victim.name for victim in victims), list(victims), **options)


def holders(world):
    """The shards that have blocks; the others are no loss."""
    return world.holders() or world.shards


def kill_shard(world, dice):
    return kill(dice.choice(holders(world)))


def kill_coordinator(world, dice):
    return kill(world.coordinator())


def kill_two_shards(world, dice):
    one = dice.choice(holders(world))
    return kill(one, dice.choice([shard for shard in world.shards if shard is not one]))


def kill_registry(world, dice):
    return kill(dice.choice(world.registry))


def kill_member(world, dice):
    """The job must be restored by those that are left of both."""
    return kill(dice.choice(world.registry), world.coordinator())


def kill_mount(world, dice):
    return kill(dice.choice(world.mounts))


def kill_learner(world, dice):
    return kill(dice.choice([client for client in world.clients if client.kind == "learner"]))


def kill_all(world, dice):
    return kill(*world.processes(), first=True)


def stop_shard(world, dice):
    shard, seconds = dice.choice(holders(world)), dice.choice([dice.uniform(1, LEASE), dice.uniform(LISTED, LISTED + 3)])
    shard.stop()
    return Harm(f"SIGSTOP of {shard.name} for {seconds:.1f} s", seconds=seconds, heals=shard.go_on)


def cut(world, dice):
    """Nothing gets to a host or comes from it."""
    hosts = [*holders(world), world.mounts[0], *world.registry]
    host, seconds = dice.choice(hosts).host, dice.choice([dice.uniform(1, LEASE), dice.uniform(LISTED, LISTED + 3)])
    world.place.set_port(host, "down")
    return Harm(f"{host} is cut off for {seconds:.1f} s", seconds=seconds, heals=lambda: world.place.set_port(host, "up"))


def delay(world, dice):
    """What a host sends takes a third of a second and more."""
    host, seconds = dice.choice([*holders(world), world.mounts[0]]).host, dice.uniform(2, 4)
    world.place.slow(host, True)
    return Harm(f"{host} is slow for {seconds:.1f} s", seconds=seconds, heals=lambda: world.place.slow(host, False))


def with_a_kill(world, dice, words, always=False, **options):
    """Harm to the store, and perhaps the loss of blocks besides."""
    if not always and not dice.randrange(3):
        return Harm(words, **options)
    harm = kill(dice.choice(holders(world)), **options)
    harm.words = f"{words}, {harm.words}"
    return harm


def full(world, dice):
    """The store's disk is full, and a snapshot fails."""
    filler, seconds, felt = world.disk / "filler", dice.uniform(1, 4), world.hears("No space left")
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        for _ in range(DISK >> 16):
            file.write(bytes(1 << 16))
    with contextlib.suppress(OSError), open(filler, "ab", buffering=0) as file:
        while file.write(b"x"):
            pass
    return with_a_kill(world, dice, f"the disk is full for {seconds:.1f} s", seconds=seconds, heals=filler.unlink, felt=felt)


def damage(world, dice, words, name_of, change):
    """Kills the coordinator, which makes snapshots, and changes an object of the newest one, which is passed over then. Two
    newer ones than before the last damage must be there first."""
    limit = Limit(HUNG)
    while True:
        good = [(name, version) for name, version in world.snapshots() if version > world.settled]
        with contextlib.suppress(FileNotFoundError):
            if len(good) >= 2:
                break
        assert not limit.over(), f"no two snapshots within {limit.taken():.0f} s"
        time.sleep(0.05)
    harm = kill(world.coordinator())
    (_, before), (newest, _) = world.snapshots()[-2:]
    world.checker.damaged(before)
    name = name_of(newest)
    world.write(name, change(world.read(name)))
    harm.words, harm.felt = f"{words} {name}, {harm.words}", world.hears("passed over", name)
    return harm


def flip(world, dice):
    """One bit of the newest pack is another one."""

    def flipped(data):
        data = bytearray(data)
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        return bytes(data)

    def pack(description):
        text = world.read(description).decode()
        return json.loads(text)["places"]["packs"][-1]["name"]

    return damage(world, dice, "a flipped bit in", pack, flipped)


def truncate(world, dice):
    """The newest description ends in its middle."""
    return damage(world, dice, "half is there of", lambda description: description, lambda data: data[: len(data) // 2])


# What is wrong with a bucket -> the fault, of which requests, and of how many. What is wrong with data is felt by whoever reads.
FAULTS = {
    "errs": (buckets.refuses(500, "InternalError"), {}),
    "throttles": (buckets.refuses(503, "SlowDown"), {"times": 2, "each": True}),
    "says too much": (buckets.promises(7), {"method": "GET", "times": 3}),
    "says too little": (buckets.promises(-7), {"method": "GET", "times": 3}),
    "cuts": (buckets.cuts, {"method": "GET", "times": 3}),
    "loses": (buckets.loses, {"times": 3}),
    "flips": (buckets.flips, {"method": "GET", "name": "packs/", "times": 2}),
    "hangs up": (buckets.drops, {}),
}


def bucket(how, world, dice):
    """The bucket fails, all requests or some."""
    (fault, of), seconds = FAULTS[how], dice.uniform(1, 4)
    if how == "flips":
        # What is read wrong is passed over.
        good = [version for _, version in world.snapshots() if version > world.settled]
        world.checker.damaged(min(good, default=world.settled))
    harm = world.bucket.way.harm(fault, **of)
    options = {"seconds": seconds, "heals": world.bucket.way.heal, "felt": lambda: harm.hit}
    return with_a_kill(world, dice, f"the bucket {how} for {seconds:.1f} s", "method" in of, **options)


# Name -> what does it, how often it is chosen, and what it takes.
KINDS = {
    "shard": (kill_shard, 4, None),
    "coordinator": (kill_coordinator, 3, None),
    "two shards": (kill_two_shards, 2, None),
    "registry": (kill_registry, 2, None),
    "member and coordinator": (kill_member, 2, "members"),
    "mount": (kill_mount, 2, None),
    "learner": (kill_learner, 2, None),
    "everything": (kill_all, 1, None),
    "stop": (stop_shard, 2, None),
    "cut": (cut, 2, "links"),
    "delay": (delay, 1, "links"),
    "full": (full, 2, "small disk"),
    "flip": (flip, 2, None),
    "half": (truncate, 2, None),
    **{f"bucket {how}": (functools.partial(bucket, how), 1, "bucket") for how in FAULTS},
}
# What is done besides: the dead come back before anybody has missed them.
QUICK = "quick restart"
# And a mount must start while the job is restored.
START = "mount start"
# Kills of one process, after which the job goes on by itself.
SINGLE = ("shard", "coordinator", "registry", "mount", "learner")


def kinds(world, skipped, only):
    """Those that can be done in this world."""
    there = {None, "links" * world.place.has_links, "bucket" * bool(world.bucket)}
    there |= {"members" * (len(world.registry) > 1)}
    there |= {"small disk" * (world.is_small and not world.bucket)}
    chosen = {name: kind for name, kind in KINDS.items() if name not in skipped and (not only or name in only)}
    return {name: (does, weight) for name, (does, weight, takes) in chosen.items() if takes in there}
