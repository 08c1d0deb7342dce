"""Listings: `ls -l` of a directory, as a program of its own."""

import os
import subprocess

from machine import Failed
from work_race import race


class Listing:
    """One `ls -l`, by the path of the directory, as in a shell."""

    def __init__(self, path, count):
        self.path = path
        self.count = count
        self.shown = b""

    def prepare(self):
        """Nothing to do."""

    def step(self):
        """Lists it."""
        self.shown = subprocess.run(["ls", "-l", self.path], stdout=subprocess.PIPE, timeout=120, check=True).stdout

    def check(self, _):
        """All names are there."""
        if (lines := self.shown.count(b"\n")) != self.count + 1:
            raise AssertionError(f"{self.path}: ls -l has {lines} lines, not {self.count + 1}")


class FreshListing(Listing):
    """The same of a version that the kernel knows nothing of."""

    def __init__(self, model, count):
        super().__init__(str(model / "tensors"), count)
        self.model = model

    def prepare(self):
        """Makes a new version."""
        before = os.stat(self.path).st_ino
        with open(self.model / "gradients", "wb", buffering=0) as file:
            file.write(bytes(4))
        if os.stat(self.path).st_ino == before:
            raise Failed("a contribution has made no version")


def listing(member, models, copy, tensors, **arguments):
    """Races the `tensors/` of so many of {name: model}, each time of a new version, against the directory `copy`."""
    fresh = {name: FreshListing(model, tensors) for name, model in models.items()}
    return race(member, {**fresh, "tmpfs": Listing(copy, tensors)}, **arguments)
