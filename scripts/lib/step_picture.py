"""Draws docs/figures/step.svg of step.csv: how long a synchronous step takes through a mount, and with gloo."""

import csv
import io
from xml.sax.saxutils import escape

WIDTH, LABELS, BAR, GAP, TOP = 860, 300, 18, 8, 62
COLOURS = {"gradfs": "#0072b2", "gloo": "#8c8c8c"}
TITLE = "A synchronous step of 64 MiB, in milliseconds: shorter is better"
NOTE = "scripts/bench, medians, two cores of an AMD EPYC (Zen 4), all learners on one machine. gloo is torch.distributed's."


def draw(text):
    """The picture of a table as text."""
    head, *rows = csv.reader(io.StringIO(text))
    groups = [name.split("_")[0] + " learners" for name in head[1:]]
    longest = max(float(value) for row in rows for value in row[1:])
    scale = (WIDTH - LABELS - 60) / longest
    parts, y = [], TOP
    for number, group in enumerate(groups, 1):
        parts.append(f'<text x="{LABELS}" y="{y}" font-weight="bold">{escape(group)}</text>')
        y += GAP
        for way, *values in rows:
            value = float(values[number - 1])
            colour, length, base = COLOURS[way.split(",")[0]], value * scale, y + BAR - 5
            parts += [
                f'<text x="{LABELS - 8}" y="{base}" text-anchor="end">{escape(way)}</text>',
                f'<rect x="{LABELS}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>',
                f'<text x="{LABELS + length + 6:.1f}" y="{base}">{escape(values[number - 1])}</text>',
            ]
            y += BAR + GAP
        y += 24
    height = y + 4
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#222222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="20" y="30" font-size="17" font-weight="bold">{escape(TITLE)}</text>',
        *parts,
        f'<text x="20" y="{height - 12}" font-size="12" fill="#555555">{escape(NOTE)}</text>',
        "</svg>",
        "",
    ])
