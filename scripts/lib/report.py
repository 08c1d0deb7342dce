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


def ratio(name, value, target, ours, other, op=">="):
    """A figure that should be large, or small where `op` says so."""
    return Figure(name, value, "ratio", target, None if target is None else op, ours, other)


def gib_s(value):
    """As text."""
    return f"{value:.2f} GiB/s"


def milliseconds(seconds):
    """As text."""
    return f"{seconds * 1000:.1f} ms"


def microseconds(value):
    """As text."""
    return f"{value:.1f} us"


def table(header, rows):
    """Text in columns, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(header, rows):
    """The same for documents."""
    lines = [f"| {' | '.join(row)} |" for row in [header, *rows]]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def print_ratios(figures):
    """The table of `scripts/bench`."""
    rows = []
    for figure in figures:
        target = "" if figure.target is None else f"{figure.op} {figure.target:g}"
        value = f"{figure.value:.2f}" if figure.unit == "ratio" else ""
        rows.append([figure.name, figure.ours, figure.other, value, target, figure.verdict()])
    print(table(["figure", "gradfs", "baseline", "ratio", "target", ""], rows))


def write_json(path, figures):
    """The figures as a list of objects, for other programs."""
    fields = ("name", "value", "unit", "target", "op")
    entries = [{field: getattr(figure, field) for field in fields} for figure in figures]
    for entry, figure in zip(entries, figures):
        entry["value"] = round(entry["value"], 4)
        if figure.low is not None:
            entry["low"], entry["high"] = round(figure.low, 4), round(figure.high, 4)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        json.dump(entries, file, indent=2)
        file.write("\n")
