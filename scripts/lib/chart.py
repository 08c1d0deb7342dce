"""Draws throughput against block size."""

import matplotlib

matplotlib.use("Agg")
# Text as text: the SVG stays small and can be searched.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gradfs", "font.size": 10})

from matplotlib import pyplot  # noqa: E402

UNITS = {"k": 1 << 10, "m": 1 << 20}
# Colours that stay apart for colour-blind readers and in print; the face of a job has the line, the
# engine the marker.
COLOURS = {"weights-read": "#0072b2", "gradients-write": "#d55e00"}
ENGINES = {"psync": ("o", "-"), "libaio": ("s", "--"), "io_uring": ("^", ":")}


def _bytes(text):
    return int(text[:-1]) * UNITS[text[-1]]


def draw(series, sizes, model, out):
    """Writes fio.svg and fio.png for {job: [GiB/s at each of `sizes`]} below `out`; gives the paths."""
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    x = [_bytes(size) for size in sizes]
    for job, values in series.items():
        face, engine = job.rsplit("-", 1)
        marker, line = ENGINES[engine]
        style = {"color": COLOURS[face], "marker": marker, "linestyle": line, "markersize": 6}
        axes.plot(x, values, label=f"{face}, {engine}", **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{size[:-1]} {size[-1].upper()}iB" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("block size")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("throughput (GiB/s)")
    axes.set_title(f"gradfs: throughput against block size, {model}", loc="left")
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    paths = [out / "fio.svg", out / "fio.png"]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=150)
    pyplot.close(figure)
    return paths
