"""Draws throughput against block size, and accuracy against time and more."""

import matplotlib

matplotlib.use("Agg")
# Text as text: the SVG stays small and can be searched.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gradfs", "font.size": 10})

from matplotlib import pyplot  # noqa: E402
from report import size_words  # noqa: E402

# Colours that stay apart for colour-blind readers and in print; the face of a job has the line, the
# engine the marker.
COLOURS = {"weights-read": "#0072b2", "gradients-write": "#d55e00"}
ENGINES = {"psync": ("o", "-"), "libaio": ("s", "--"), "io_uring": ("^", ":")}
# Over a network: the transport has the colour, the way the line.
TRANSPORTS = {
    "tcp": ("#0072b2", "TCP"),
    "shm": ("#d55e00", "shm"),
    "rdma": ("#d55e00", "RDMA"),
    "dynamic": ("#d55e00", "RDMA, fetched"),
    "static": ("#009e73", "RDMA, placed"),
}
WAYS = {"pipelined": ("o", "-"), "sync": ("s", "--")}
PANELS = {
    "push": ("Push: gradients to the shard", "block size of the model"),
    "pull": ("Pull: weights from the shard", "block size of the model"),
    "write": ("write(2) of gradients to a mount, and fsync", "size of a write"),
}
NOTE = (
    "One learner and one shard on one host; shm: shared memory. Push and pull: pipelined, 64 MiB with as many "
    "blocks on their way as fit; sync, a model of one block,\nso that each waits for the one before, and which stays in "
    "the CPU's cache. write(2): all 256 MiB until fsync says that they count;\npipelined, 16 "
    "writes in flight (libaio); sync, one (psync); the model's blocks are 256 KiB."
)
POLICIES = {"on-demand": ("#d55e00", ":"), "eager": ("#0072b2", "--"), "adaptive": ("#009e73", "-")}
LANES = {"compute": "#999999", "push": "#d55e00", "pull": "#0072b2", "bubble": "#a6d8f5", "stall": "#cc3377"}
METHODS = {"sync": "#0072b2", "sma": "#d55e00"}
# Colours of many lines, which stay apart for colour-blind readers.
LINES = ("#000000", "#999999", "#e69f00", "#f0e442", "#56b4e9", "#0072b2", "#003f63", "#d55e00", "#009e73", "#cc79a7")


def draw_sizes(panels, path, unit, note=""):
    """Writes `path`.svg and .png for {title: (what has the sizes, {name: (style, {size in bytes: rate})})}; gives the paths."""
    width = 4 + 5 * len(panels)
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(width, 5), layout="constrained", squeeze=False)
    for axes, (title, (of, lines)) in zip(all_axes[0], panels.items()):
        for name, (style, values) in lines.items():
            axes.plot(*zip(*sorted(values.items())), label=name, markersize=6, **style)
        sizes = sorted(set().union(*(values for _, values in lines.values())))
        axes.set_xscale("log", base=2)
        # Without the unit they fit.
        axes.set_xticks(sizes, [size_words(size).replace(" ", "").removesuffix("iB") for size in sizes])
        axes.minorticks_off()
        axes.set(xlabel=of, ylabel=f"throughput ({unit})")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
        _plain(axes, title)
    return _save(figure, path, note)


def draw_jobs(points, model, path):
    """The same for {(job of fio-jobs/, size): GiB/s}."""
    lines = {}
    for (job, size), rate in points.items():
        face, engine = job.rsplit("-", 1)
        marker, line = ENGINES[engine]
        style = {"color": COLOURS[face], "marker": marker, "linestyle": line}
        lines.setdefault(f"{face}, {engine}", (style, {}))[1][int(size[:-1]) << {"k": 10, "m": 20}[size[-1]]] = rate
    return draw_sizes({f"gradfs: throughput against block size, {model}": ("block size", lines)}, path, "GiB/s")


def draw_network(series, path, note=NOTE, unit="GB/s"):
    """The same for {(what, transport, way): {size in bytes: rate}}."""
    panels = {}
    for (what, transport, way), values in series.items():
        (title, of), (colour, name), (marker, line) = PANELS[what], TRANSPORTS[transport], WAYS[way]
        style = {"color": colour, "marker": marker, "linestyle": line}
        panels.setdefault(title, (of, {}))[1][f"{name}, {way}"] = style, values
    return draw_sizes(panels, path, unit, note)


def draw_timelines(panels, path, length, note):
    """Writes `path`.svg and .png for {title: {lane: [(begin, end)]}}, in ms up to `length`; gives the paths."""
    figure, all_axes = pyplot.subplots(len(panels), 1, figsize=(11, 2.1 * len(panels)), layout="constrained", sharex=True)
    for axes, (title, lanes) in zip(all_axes, panels.items()):
        for row, (lane, colour) in enumerate(LANES.items()):
            bars = [(begin, end - begin) for begin, end in lanes[lane]]
            # Edges tell bars that touch.
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.6)
        stalled = sum(end - begin for begin, end in lanes["stall"]) / length
        axes.set_yticks(range(len(LANES)), list(LANES))
        axes.set(ylim=(len(LANES) - 0.5, -0.5), xlim=(0, length))
        _plain(axes, f"{title}: the learner waits for {stalled:.0%} of the time")
    all_axes[-1].set_xlabel("time (ms)")
    return _save(figure, path, note)


def draw_accuracy(panels, path, reached, note):
    """Writes `path`.svg and .png for {title: {policy of pulling: [(seconds, accuracy)]}}."""
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(11, 3.8), layout="constrained", sharey=True)
    for axes, (title, curves) in zip(all_axes, panels.items()):
        for policy, curve in curves.items():
            colour, line = POLICIES[policy]
            axes.plot(*zip(*curve), color=colour, linestyle=line, label=policy)
        axes.axhline(reached, color="#444444", linewidth=0.8)
        axes.set_xlabel("time (s)")
        axes.set_xlim(left=0)
        _plain(axes, title)
    all_axes[0].set_ylabel("accuracy")
    all_axes[-1].legend(frameon=False, loc="lower right")
    return _save(figure, path, note)


def draw_learning(found, numbers, path, reached):
    """Writes `path`.svg and .png for {network: (by_learners, curves)}; gives the paths.

    `by_learners` is {method: [(epochs, seconds) to the accuracy `reached`]}, for each of the `numbers` of learners, and
    `curves` is {way: [(epoch, bytes, seconds, accuracy)]}.
    """
    figure, rows = pyplot.subplots(len(found), 3, figsize=(12, 3.8 * len(found)), layout="constrained", squeeze=False)
    for (epochs, seconds, accuracy), (network, (by_learners, curves)) in zip(rows, found.items()):
        for axes, what, column in ((epochs, "epochs", 0), (seconds, "seconds", 1)):
            for method, values in by_learners.items():
                style = {"color": METHODS[method.split("_")[0]], "linestyle": "--" if method.endswith("_best") else "-"}
                axes.plot(numbers, [value[column] for value in values], marker="o", label=method, **style)
            axes.set(xlabel="learners", xticks=numbers)
            axes.set_ylim(bottom=0)
            _plain(axes, f"{network}: {what} to {reached:.0%}")
        epochs.legend(frameon=False, fontsize=8)
        for number, (way, curve) in enumerate(curves.items()):
            points = [(point[1] / 1e6, point[3]) for point in curve]
            line = "-:"[way.endswith("_int8")]
            accuracy.plot(*zip(*points), color=LINES[number % len(LINES)], linestyle=line, label=way)
        accuracy.axhline(reached, color="#444444", linewidth=0.8)
        accuracy.set(xlabel="sent (MB)", xscale="log", ylim=(0.7, 1))
        accuracy.legend(frameon=False, loc="lower right", fontsize=8)
        _plain(accuracy, "accuracy, 2 learners")
    return _save(figure, path)


def _plain(axes, title):
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure, path, note=""):
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=9, color="#444444")
    paths = [path.with_suffix(".svg"), path.with_suffix(".png")]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=150)
    pyplot.close(figure)
    return paths
