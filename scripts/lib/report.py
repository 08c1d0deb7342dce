"""Figures, their targets, and how both are shown."""

import json
from dataclasses import dataclass
from typing import Optional


@dataclass
class Figure:
    """One measured value; `ours` and `other` are what a ratio was made of, in words, `low` and `high` its interval."""

    name: str
    value: float
    unit: str
    target: Optional[float] = None
    op: Optional[str] = None
    ours: str = ""
    other: str = ""
    low: Optional[float] = None
    high: Optional[float] = None

    def verdict(self):
        """`pass`, `miss`, or nothing where there is no target."""
        if self.target is None:
            return ""
        met = self.value >= self.target if self.op == ">=" else self.value <= self.target
        return "pass" if met else "MISS"

    def aim(self):
        """The target in words."""
        return "" if self.target is None else f"{self.op} {self.target:g}"


def ratio(name, value, target, ours="", other="", op=">=", unit="ratio"):
    """A figure that should be large, or small where `op` says so."""
    return Figure(name, value, unit, target, None if target is None else op, ours, other)


def times(name, ours, other, target=None, op=">=", words=None):
    """The ratio of two times in seconds: how much faster ours is or, where it should be small, how much longer it takes."""
    words = words or milliseconds
    return ratio(name, other / ours if op == ">=" else ours / other, target, words(ours), words(other), op)


def worst(name, rows, target, op=">="):
    """The worst of several ratios."""
    row = (min if op == ">=" else max)(rows, key=lambda row: row.value)
    return ratio(name, row.value, target, row.ours, row.other, op)


def gib_s(value):
    return f"{value:.2f} GiB/s"


def milliseconds(seconds):
    return f"{seconds * 1000:.1f} ms"


def microseconds(value):
    return f"{value:.1f} us"


def size_words(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def table(header, rows):
    """Text in columns, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for first, *others in [header, ["-" * width for width in widths], *rows]:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def print_figures(figures):
    """The table of all that has words or a target, or is a ratio."""
    rows = []
    for figure in figures:
        value = f"{figure.value:.2f}" if figure.unit in ("ratio", "models") else ""
        rows.append([figure.name, figure.ours, figure.other, value, figure.aim(), figure.verdict()])
    print(table(["figure", "gradfs", "baseline", "value", "target", ""], rows))


def write_json(path, figures):
    """The figures as a list of objects, for other programs."""
    entries = []
    for figure in figures:
        entry = {"name": figure.name, "value": round(figure.value, 4), "unit": figure.unit}
        entry |= {"target": figure.target, "op": figure.op}
        if figure.low is not None:
            entry |= {"low": round(figure.low, 4), "high": round(figure.high, 4)}
        entries.append(entry)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=2) + "\n")
