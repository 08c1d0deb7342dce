"""What must hold of a sum of ones to which harm is done. Pure: events go in, and what is wrong comes out.

A model's weights are one number everywhere: how many contributions are part of them. A life of the job ends when blocks are
lost, and the next one begins with the content of a snapshot, under the next reserved number.

Events are dictionaries with `who` has seen them, on which `mount`, and when a call began and ended (`t0`, `t1`):

    try     a contribution begins
    again   a part of it has failed, and is tried again
    give    it has ended: with `errno` 0 it was acknowledged. A `see` of its learner comes before it, and after it one of
            the version that it is part of
    see     weights of a `version`, with the `low`est and the `high`est number in them
    number  `what` (durable_version) had this `value`; -1 if it is empty
    fail    any other call has failed
    left    a learner is out of the job
    killed  a learner; what it was about counts once or not at all
"""

import bisect
import errno
import itertools
from collections import defaultdict

# The numbers of versions are reserved in steps of so many, and a life begins with such a step.
RESERVED = 1 << 19
# So many versions stay known.
KEPT = 20_000
# What a call may fail with, whatever is done to the job: it may be tried again.
EXPECTED = {errno.ENOTCONN, errno.ECONNABORTED, errno.ETIMEDOUT}


def life_of(version):
    return version // RESERVED


class Wrong(AssertionError):
    """A promise that does not hold."""


class TooFew(Wrong):
    """Contributions are missing. They may still come, while versions are made."""


class Step:
    """A contribution: the lives that it may be part of, and the first version that was said to have it, if one was."""

    def __init__(self, began, lives, version=None, is_sure=False):
        self.began, self.lives, self.version, self.is_sure = began, lives, version, is_sure

    def may_be_of(self, life):
        first, last = self.lives
        return first <= life and (last is None or life <= last)


class Checker:
    def __init__(self, expected=EXPECTED):
        self._expected = expected
        # Version -> its number, and when it was first seen whole.
        self.contents, self._first = {0: 0}, {0: float("-inf")}
        # Mount and what it shows -> when calls ended, and what they had shown; both go up.
        self._shown = defaultdict(list)
        # Life -> the version up to which all is known, and the bounds of its number.
        self._anchors = {0: (0, 0, 0)}
        # Where lives began: the first version -> the snapshot's version.
        self.origins = {}
        # Life -> its newest durable version, and mount -> the same; the newest that can be read, if that is another one.
        self._durable, self.durable, self._floor = {}, {}, None
        # Who -> the contribution that has begun, the life that was last seen, the step that no look has followed yet.
        self._open, self._before, self._waiting, self._steps = {}, {}, {}, []

    # What happens.

    def take(self, event):
        """Notes an event. Events of one program come in their order, others in any."""
        getattr(self, "_" + event["do"])(event)

    def damaged(self, floor):
        """From now on, snapshots above this version may be unreadable."""
        self._floor = floor if self._floor is None else min(floor, self._floor)

    def restored(self, begins, snapshot):
        """A life begins with this version, which is that of a snapshot."""
        self.origins[begins] = snapshot

    def _see(self, event):
        who, mount, version = event["who"], event["mount"], event["version"]
        if event["low"] != event["high"]:
            raise Wrong(f"torn: version {version} on {mount} has numbers from {event['low']} to {event['high']}")
        known = self.contents.setdefault(version, event["low"])
        if known != event["low"]:
            raise Wrong(f"version {version} has two contents: {known}, and {event['low']} on {mount}")
        self._first[version] = min(event["t1"], self._first.get(version, event["t1"]))
        self._goes_on(mount, "weights", event, version)
        step, self._before[who] = self._waiting.pop(who, None), life_of(version)
        if step:
            step.lives = step.lives[0], max(step.lives[0], life_of(version))
            if step.lives[0] == step.lives[1]:
                step.version = version
            else:
                step.is_sure = False

    def _number(self, event):
        self._goes_on(event["mount"], event["what"], event, event["value"])
        if event["what"] == "durable_version":
            self.durable[event["mount"]] = event["value"]
            life = life_of(max(0, event["value"]))
            self._durable[life] = max(self._durable.get(life, 0), event["value"])

    def _goes_on(self, mount, what, event, shown):
        """Of two calls one after the other, the second shows nothing older."""
        calls = self._shown[mount, what]
        at = bisect.bisect_left(calls, (event["t0"],))
        if at and calls[at - 1][1] > shown:
            raise Wrong(f"{what} on {mount} went back from {calls[at - 1][1]} to {shown}")
        at = bisect.bisect_left(calls, (event["t1"],))
        if not at or calls[at - 1][1] < shown:
            while at < len(calls) and calls[at][1] <= shown:
                del calls[at]
            calls.insert(at, (event["t1"], shown))

    def _try(self, event):
        self._open[event["who"]] = event

    def _give(self, event):
        who, began = event["who"], self._open.pop(event["who"])["t0"]
        before = self._before.get(who, 0)
        # Until a look says in which life it has ended, it may be any later one.
        step = Step(began, (before, None), is_sure=not event["errno"])
        self._steps.append(step)
        self.trouble(event)
        self._unsure(who)
        self._waiting[who] = step

    def trouble(self, event):
        """A call has failed: with an errno that programs expect?"""
        if event["errno"] and event["errno"] not in self._expected and not event.get("excused"):
            name = errno.errorcode.get(event["errno"], event["errno"])
            raise Wrong(f"{event['who']} on {event['mount']}: {name} of {event.get('call', 'a call')}: {event.get('why')}")

    def _fail(self, event):
        """Any other call: where it was a look, nobody knows what it would have shown."""
        self.trouble(event)
        self._unsure(event["who"])

    def _again(self, event):
        """A part of a contribution has failed, and is tried again."""
        self.trouble(event)

    def _left(self, event):
        self._unsure(event["who"])

    def _unsure(self, who):
        """No look says which version has this learner's last step."""
        self._waiting.pop(who, None)

    def _killed(self, event):
        if tried := self._open.pop(event["who"], None):
            self._steps.append(Step(tried["t0"], (self._before.get(event["who"], 0), None)))
        self._unsure(event["who"])

    # What must be true of it.

    def bounds(self, version):
        """The least and the most that the number of a version can be."""
        if version in self.contents:
            return self.contents[version], self.contents[version]
        life = life_of(version)
        below = [of for v, of in self.contents.items() if life_of(v) == life and v < version]
        above = [of for v, of in self.contents.items() if life_of(v) == life and v > version]
        if life < min(self._anchors):
            return max(below, default=0), min(above, default=float("inf"))
        anchor, low, high = self._anchor(life)
        if version == anchor:
            return low, high
        if version > anchor:
            below += [low]
            above += [high + sum(step.may_be_of(life) for step in self._steps)]
        return max(below, default=0), min(above, default=high)

    def _anchor(self, life):
        if life not in self._anchors:
            begins = life * RESERVED
            if begins in self.origins:
                low, high = self.bounds(self.origins[begins])
            else:
                # Nobody has said from which snapshot: from one that is durable, of any life before.
                lives = [of for of in self._anchors if of < life]
                low = self.bounds(self._must_stay(begins))[0]
                high = max(self.bounds((of + 1) * RESERVED - 1)[1] for of in lives)
            self._anchors[life] = begins, low, high
        return self._anchors[life]

    def _must_stay(self, begins):
        """What no restoration may undo that begins a life with this version."""
        durable = max((of for life, of in self._durable.items() if life < life_of(begins)), default=0)
        return durable if self._floor is None else min(durable, self._floor)

    def check(self):
        """Compares all versions that were seen with the contributions."""
        for begins, snapshot in self.origins.items():
            durable = self._must_stay(begins)
            # Nothing was written since an earlier restoration: its snapshot has the content of the first version.
            while durable in self.origins and snapshot < durable:
                durable = self.origins[durable]
            if snapshot < durable and life_of(begins) > max(self._anchors, default=0):
                raise Wrong(f"version {begins} goes on from version {snapshot}, but version {durable} was durable")
        for life, versions in itertools.groupby(sorted(self.contents), life_of):
            if life >= min(self._anchors):
                self._check_life(life, list(versions))

    def _check_life(self, life, versions):
        anchor, before, high = self._anchor(life)
        low, steps = before, [step for step in self._steps if step.may_be_of(life)]
        for version in versions:
            if version >= anchor:
                number, first = self.contents[version], self._first[version]
                sure = sum(step.is_sure and step.version is not None and step.version <= version for step in steps)
                most = high + sum(step.began < first for step in steps)
                self._within(version, number, max(before, low + sure), most)
                before = number

    def settle(self, version):
        """All learners have left, and all mounts show this version: it has all that was acknowledged, and nothing twice.
        Gives its number, and how many contributions were not known to be part of it."""
        for who in list(self._open):
            self._killed({"who": who})
        self.check()
        life, number = life_of(version), self.contents[version]
        _, low, high = self._anchor(life)
        steps = [step for step in self._steps if step.may_be_of(life)]
        # A contribution that began in this life and was acknowledged is part of it.
        sure = sum(step.is_sure and step.lives[0] == life for step in steps)
        self._within(version, number, low + sure, high + len(steps))
        self._anchors = {life: (version, number, number)}
        self._steps, self._waiting, self._floor = [], {}, None
        # Later lives may begin with any of the last snapshots.
        lately = sorted(self.contents)[-KEPT:]
        self.contents = {of: self.contents[of] for of in lately}
        self._first = {of: self._first[of] for of in lately}
        return number, len(steps) - sure

    def _within(self, version, number, least, most):
        if number < least:
            raise TooFew(f"version {version} has {number} contributions, and {least} were acknowledged for it")
        if number > most:
            raise Wrong(f"version {version} has {number} contributions, and {most} can be part of it: one counts twice")
