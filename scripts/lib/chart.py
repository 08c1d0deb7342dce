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
WHATS = {"push": "#d55e00", "pull": "#0072b2"}
WAYS = {"pipelined": ("o", "-"), "synchronous": ("s", "--")}
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
    _finish(axes, x, "throughput (GiB/s)", f"gradfs: throughput against block size, {model}")
    return _save(figure, out / "fio")


def draw_network(series, sizes, path):
    """Writes `path`.svg and .png for {(what, way): [GB/s at each of `sizes`, in bytes]}; gives the paths."""
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for (what, way), values in series.items():
        marker, line = WAYS[way]
        style = {"color": WHATS[what], "marker": marker, "linestyle": line, "markersize": 6}
        axes.plot(sizes, values, label=f"{what}, {way}", **style)
    _finish(axes, sizes, "throughput (GB/s)", "gradfs over TCP on loopback, 1 learner, 1 shard")
    return _save(figure, path)


def _finish(axes, sizes, unit, title):
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_words(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("block size")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(unit)
    axes.set_title(title, loc="left")
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _words(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _save(figure, path):
    paths = [path.with_suffix(".svg"), path.with_suffix(".png")]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=150)
    pyplot.close(figure)
    return paths
