"""How one gradfs compares with an older one: `--against` of scripts/bench and scripts/bench-net.

Everything is done in several passes, each with processes and memory of its own: where a process gets its memory, and
how its threads come to lie, makes more of a difference than there is between rounds. Within a pass both binaries take
turns, round by round, and who comes first changes from round to round. The ratio of a figure is that of the medians of
all rounds, oriented so that more than 1 is in favour of the new binary. Its interval is a bootstrap of the passes: a pass
is drawn with what both had in it, so that drift of the machine, which hits both, is left out.
"""

import random
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from machine import Failed, say
from report import Figure, table

NEW, OLD = "new", "old"
# Of every figure; each has at least one round.
PASSES = 7
# Of the geometric mean, and microseconds that a small commit may take longer.
TARGET, COMMIT_TARGET = 0.98, 10.0

_RESAMPLES = 2000
_COVERAGE = 0.95


def sides(new, old):
    """{side: binary}, both of them or only the new one; ends the run where the old one does not start."""
    if old is None:
        return {NEW: new}
    try:
        done = subprocess.run([old, "--version"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise Failed(f"--against {old}: {error.strerror}") from error
    if done.returncode:
        raise Failed(f"--against {old}: {done.stderr.strip() or 'it does not tell its version'}")
    say(f"against {old}, {done.stdout.strip()}")
    return {NEW: new, OLD: old.resolve()}


def named(name, side):
    """How a race calls a contender that there is of both sides."""
    return name if side == NEW else f"{name}, {side}"


def _bounds(values):
    values = sorted(values)
    cut = int(len(values) * (1 - _COVERAGE) / 2)
    return values[cut], values[-1 - cut]


@dataclass
class Comparison:
    """A figure of both sides: the numbers that each pass found.

    `less` says that less is better, and `difference` that the figure is new minus old, of `unit`. All figures that are
    made of the same measurements are named. `words` shows a number."""

    names: list
    new: list
    old: list
    words: Callable
    less: bool = True
    difference: bool = False
    unit: str = "ratio"

    def __post_init__(self):
        if not len(self.new) == len(self.old) >= PASSES:
            counts = f"{len(self.new)} passes of one and {len(self.old)} of the other"
            raise Failed(f"{self.names[0]}: {counts}, not {PASSES}")

    def _value(self, passes):
        new, old = (_median([side[index] for index in passes]) for side in (self.new, self.old))
        if self.difference:
            return new - old
        return old / new if self.less else new / old

    @property
    def value(self):
        """As it was found."""
        return self._value(range(len(self.new)))

    @cached_property
    def resampled(self):
        """As it would have been with other passes: the same ones in every run."""
        draw = random.Random(self.names[0]).choices
        passes = range(len(self.new))
        return [self._value(draw(passes, k=len(passes))) for _ in range(_RESAMPLES)]

    def figures(self):
        """For reports, one for each name."""
        low, high = _bounds(self.resampled)
        target, op = (COMMIT_TARGET, "<=") if self.difference else (None, None)
        rest = self.value, self.unit, target, op, *(self.words(_median(side)) for side in (self.new, self.old)), low, high
        return [Figure(f"{name}_vs_old", *rest) for name in self.names]


def _median(passes):
    return statistics.median(value for one in passes for value in one)


def joined(passes):
    """The Comparisons of passes that each found the same figures: lists of (names, {side: numbers}, words, options)."""
    for of_figure in zip(*passes, strict=True):
        names, _, words, options = of_figure[0]
        new, old = ([numbers[side] for _, numbers, _, _ in of_figure] for side in (NEW, OLD))
        yield Comparison(names, new, old, words, **options)


def middle(passes):
    """Of the Figures that each pass found, in the same order, those of the median value."""
    return [sorted(found, key=lambda figure: figure.value)[len(found) // 2] for found in zip(*passes, strict=True)]


def _mean(name, comparisons):
    """The geometric mean of all ratios."""
    mean = statistics.geometric_mean
    ratios = [one for one in comparisons if not one.difference]
    low, high = _bounds([mean(values) for values in zip(*(one.resampled for one in ratios))])
    words = f"of {len(ratios)} ratios", ""
    return Figure(name, mean([one.value for one in ratios]), "ratio", TARGET, ">=", *words, low, high)


def report(name, comparisons):
    """Prints all comparisons and, called `name`, their mean; gives the figures."""
    found = [one.figures() for one in comparisons]
    shown = [figures[0] for figures in found]
    if any(not one.difference for one in comparisons):
        found.append([_mean(name, comparisons)])
        shown += found[-1]
    rows = []
    for figure in shown:
        digits = 1 if figure.unit == "us" else 3
        value, low, high = (f"{number:.{digits}f}" for number in (figure.value, figure.low, figure.high))
        value += "" if figure.unit == "ratio" else f" {figure.unit}"
        rows.append([figure.name, figure.ours, figure.other, value, f"{low} to {high}", figure.aim(), figure.verdict()])
    print(table(["against the old binary", "new", "old", "new/old", "95% interval", "target", ""], rows), flush=True)
    return [figure for figures in found for figure in figures]
