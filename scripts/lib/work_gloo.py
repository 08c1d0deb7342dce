"""Learners that use torch.distributed with gloo instead, made as fast as it can be on one machine.

The workers move to a network namespace of their own with Reno where they may (own_network.py). There, one or two
interfaces and tensors in one or several pieces are tried, and the fastest way is the one that counts.
"""

import os
from datetime import timedelta

import numpy

import own_network
from work_race import race
from work_step import gradients, mounts, total

DEADLINE = timedelta(seconds=120)
# Interfaces that gloo spreads its connections over, and pieces that a tensor is reduced in at a time.
INTERFACES = ("lo", "lo,lo")
PIECES = (1, 2)


def set_up(member, directory, counts):
    """Connects the members, once. `directory` is for the meeting; `counts` are the sizes of the groups."""
    import torch
    from torch import distributed

    def groups(name, interfaces):
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces
        for count in counts:
            member.kept[count, name] = distributed.new_group(list(range(count)), timeout=DEADLINE)

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=member.rank,
        world_size=member.count,
        timeout=DEADLINE,
    )
    groups("plain", "lo")
    # Connections and gloo's threads stay in the namespace they were made in, later ones follow us.
    moved = _move(member, os.path.join(directory, "network"))
    for interfaces in INTERFACES:
        groups(interfaces, interfaces)
    return moved


def _move(member, meeting):
    """Takes all members to one namespace of their own, by the file `meeting`, if that is permitted."""
    if member.rank == 0:
        own = own_network.move()
        with open(meeting, "w") as file:
            file.write(str(os.getpid()) if own else "")
    member.meet()
    with open(meeting) as file:
        pid = file.read()
    if pid and member.rank:
        own_network.join(pid)
    member.meet()
    return bool(pid)


class Gloo:
    """all_reduce of this member's gradients in `pieces` at a time over `interfaces`."""

    def __init__(self, member, size, interfaces, pieces):
        import torch

        self.group = member.kept[member.count, interfaces]
        self.gradients = torch.from_numpy(gradients(member.rank, size))
        self.tensor = torch.zeros_like(self.gradients)
        self.pieces = self.tensor.chunk(pieces)
        self.total = total(member.count, size)

    def prepare(self):
        """Puts the gradients where the sum will be: gloo reduces in place."""
        self.tensor.copy_(self.gradients)

    def step(self):
        """Everybody gets the sum."""
        from torch import distributed

        if len(self.pieces) == 1:
            distributed.all_reduce(self.tensor, group=self.group)
            return
        for work in [distributed.all_reduce(piece, group=self.group, async_op=True) for piece in self.pieces]:
            work.wait()

    def check(self, _):
        """The sum is right."""
        if not numpy.array_equal(self.tensor.numpy(), self.total):
            raise AssertionError("gloo: wrong sum")


# Every way that is tried, and what a program gets that asks for nothing.
WAYS = [(interfaces, pieces) for interfaces in INTERFACES for pieces in PIECES]
PLAIN = ("plain", 1)


def mount_and_gloo(member, directories, size, ways, **arguments):
    """Races the mounts and gloo in the named `ways`: those of `mounts`, and WAYS or PLAIN."""
    through_mount = mounts(member, directories, size)
    contenders = {way: through_mount.get(way) or Gloo(member, size, *way) for way in ways}
    return race(member, contenders, **arguments)
