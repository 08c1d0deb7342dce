"""Measures how long new weights take from a trainer's host to a reader's, over a link of 1 Gbit/s.

  delta    by what has changed (control/delta = auto) and whole (off), of weights of bf16; and the same by hand
  fanout   whole weights of 128 MiB on eight hosts whose mounts pull from each other (--via auto), and on one host
  views    one of eight ranks' shares of a model with the shapes of Llama, on a mount that holds nothing else
  pause    the longest that a reader on another host waits for a read of 4 KiB, or for an open of a new version, while
           versions come by what has changed. What it waits for a CPU does not count
  record   publishing, and steps of Adam with masters, with records of what has changed (control/changes = 16) and without
           (0), on one host

delta: two hosts are network namespaces, whose sending the kernel limits. The first has the shard and the trainer's mount,
the second the reader's. The weights are those of a packaged model, tiled. Before each turn, a hundredth of the elements
changes at random, or so many as an AdamW step changes at a learning rate of 3e-6. The time is from the trainer's close
until the reader has mapped all bytes; against scripts, from the trainer's first write. delta_sync_copied is of a reader
that copies them to memory of its own. delta_sync_held is with a reader that has mapped the version before, so that the next
one goes into a third buffer, against those without.

views: between the same hosts. Bytes are those that the mount has pulled for each version of a rank's view, in sizes of the
model. Memory is what the mount's process takes with the view and without. The view's file is read in turn with as much of
the trainer's weights, which lie on the whole. Then eighths of all matrices are pulled into new views, in turn by rows and
by columns, which lie scattered over all blocks.

By hand, as scripts do it that share a directory: the trainer compares with a copy, and writes indices and values of each
tensor, or all weights, as safetensors, and then a marker. An HTTP server on its host has the directory. The reader polls
for the marker, fetches the file, and brings its own copy up to date. The time is from the beginning of the comparison.
"""

import json
import mmap
import os
import shutil
import statistics
import time

from bench import jobs
from machine import GIB, MIB, own_python, say
from netns import Cluster, Hosts
from report import Figure, milliseconds, ratio, times, worst

PARTS = ("delta", "views", "fanout", "pause", "record")
QUICK = "some MiB in place of 1 GiB, and fewer turns: below 45 s once it is built"
RATE = 1e9
DEADLINE = 300.0
PORT = 8077
KINDS = {"random": ("--share", 0.01), "adam": ("--rate", 3e-6)}


class Weights:
    """Files of the trainer's: its weights, and how they were a turn ago."""

    def __init__(self, hosts, size):
        self.hosts, self.path, self.before = hosts, hosts.scratch / "weights", hosts.scratch / "before"
        hosts.work("from", "sync.py", "weights", self.path, size).found(DEADLINE)
        self.turns = 0

    def step(self, kind):
        """Changes them; the share of the elements that are others now."""
        shutil.copyfile(self.path, self.before)
        self.turns += 1
        words = [self.path, *KINDS[kind], "--seed", self.turns]
        return self.hosts.work("from", "sync.py", "step", *words).found(DEADLINE)["changed"]


def two_hosts(hosts, gradfs, size, *options):
    """The trainer's weights, and the mounts of a model of their size, whose shard is on the trainer's host."""
    hosts.limit(RATE)
    weights = Weights(hosts, size)
    cluster = Cluster(hosts, gradfs)
    cluster.shard("from")
    cluster.create("model", "--size", size, "--dtype", "bf16", "--reducer", "assign", *options)
    return weights, {host: cluster.mount(host) / "model" for host in ("from", "to")}


def by_gradfs(hosts, mounts, weights, version, copies):
    words = [mounts["to"], version, weights.path, *(["--copies"] if copies else [])]
    reader = hosts.work("to", "sync.py", "read", *words)
    reader.wait_for("waits")
    before = hosts.sent("from")
    wrote = hosts.work("from", "sync.py", "publish", mounts["from"], weights.path).found(DEADLINE)
    at = reader.found(DEADLINE)["at"]
    return at - wrote["closes"], hosts.sent("from") - before, at - wrote["began"]


def held(hosts, mounts, publish):
    """A version that comes while a reader has mapped the one before the shown one."""
    ends = hosts.scratch / "ends"
    holder = hosts.work("to", "sync.py", "hold", mounts["to"], ends)
    holder.wait_for("holds")
    publish("between")
    publish("held")
    ends.touch()
    holder.found(DEADLINE)
    ends.unlink()


def by_hand(hosts, weights, served, whole):
    for path in served.iterdir():
        path.unlink()
    url = f"http://{hosts.address('from')}:{PORT}"
    # Both import torch meanwhile.
    reader = hosts.work("to", "sync.py", "fetch", url, weights.before, weights.path)
    words = [weights.path, weights.before, served, *(["--whole"] if whole else [])]
    writer = hosts.work("from", "sync.py", "send", *words)
    reader.wait_for("waits")
    writer.wait_for("waits")
    (served / "go").touch()
    wrote = writer.found(DEADLINE)
    return reader.found(DEADLINE)["at"] - wrote["began"], wrote["bytes"]


def delta(bench, gradfs):
    size, turns = (32 * MIB, 1) if bench.quick else (GIB, 5)
    with Hosts(["from", "to"]) as hosts:
        weights, mounts = two_hosts(hosts, gradfs, size)
        served = hosts.scratch / "served"
        served.mkdir()
        serve = [own_python(), "-m", "http.server", PORT, "--directory", served]
        hosts.start("from", serve, name="the HTTP server")
        say(f"{size / MIB:.0f} MiB over a link of {RATE / 1e9:g} Gbit/s")
        found, version = {}, 0

        def publish(name, delta, copies=False):
            nonlocal version
            control = mounts["from"] / "control/delta"
            hosts.start("from", ["sh", "-c", f"echo {delta} > {control}"]).finish(10)
            version += 1
            found.setdefault(name, []).append(by_gradfs(hosts, mounts, weights, version, copies))

        def changed(name):
            weights.step("random")
            publish(name, "auto")

        weights.step("random")
        publish("first", "off")
        for turn in range(turns):
            for kind in KINDS:
                share = weights.step(kind)
                publish(kind, "auto")
                if kind == "random":
                    found.setdefault("by hand", []).append(by_hand(hosts, weights, served, False))
                found.setdefault(f"{kind} changed", []).append((share, 0))
                if kind == "random":
                    weights.step(kind)
                    publish("copied", "auto", copies=True)
                    held(hosts, mounts, changed)
                if turn < 3 and (kind == "random" or not bench.quick):
                    weights.step(kind)
                    publish("whole", "off")
            if turn < 3:
                found.setdefault("whole by hand", []).append(by_hand(hosts, weights, served, True))
            say(f"turn {turn + 1} of {turns}")

    def median(name, what=0):
        return statistics.median(turn[what] for turn in found[name])

    whole, random, adam = median("whole"), median("random"), median("adam")
    changed = median("adam changed")
    bytes_of = [median("random", 1), median("by hand", 1)]
    excess = adam / whole - 3 * changed
    return [
        times("delta_sync_ratio", random, whole, 0.06, "<="),
        Figure("delta_sync_excess_adam", excess, "ratio", 0.03, "<=", f"{adam / whole:.3f}", f"{changed:.2%} changed"),
        Figure("delta_adam_changed", changed, "share"),
        Figure(
            "delta_bytes_vs_sparse_safetensors", bytes_of[0] / bytes_of[1], "ratio", 0.6, "<=",
            *(f"{count / MIB:.1f} MiB" for count in bytes_of),
        ),
        Figure("delta_sync_copied", median("copied") / whole, "ratio"),
        times("delta_sync_held", median("held"), random, None, "<="),
        times("sync_vs_sparse_files", median("random", 2), median("by hand"), 2),
        times("sync_vs_shared_dir", median("random", 2), median("whole by hand"), 8),
    ]  # fmt: skip


def pause(bench, gradfs):
    size, versions = (32 * MIB, 3) if bench.quick else (GIB, 20)
    with Hosts(["from", "to"]) as hosts:
        weights, mounts = two_hosts(hosts, gradfs, size, "--pull", "eager")
        # The first version comes whole, and is not measured.
        closed, reader = [], None
        for version in range(1, versions + 2):
            weights.step("random")
            wrote = hosts.work("from", "sync.py", "publish", mounts["from"], weights.path).found(DEADLINE)
            closed.append(wrote["closes"])
            if version == 1:
                words = [mounts["to"], 1, weights.path, hosts.scratch]
                hosts.work("to", "sync.py", "shown", *words).found(DEADLINE)
                reader = hosts.work("to", "sync.py", "pauses", mounts["to"], versions + 1)
                reader.wait_for("waits")
        found = reader.found(DEADLINE)
    longest = []
    for version, closes in enumerate(closed[1:], 2):
        end = found["flips"][str(version)] + 0.1
        longest.append(max((took for at, took in found["long"] if closes < at + took and at < end), default=0))
    say(f"longest of each version, in ms: {', '.join(f'{1000 * took:.1f}' for took in longest)}")
    p99 = statistics.quantiles(longest, n=100, method="inclusive")[-1]
    return [Figure("reader_pause_ms", 1000 * p99, "ms", 5, "<=", f"{1000 * p99:.1f} ms")]


def fanned_out(bench, gradfs, readers):
    """How long the readers' mounts took to show each version, and the most that any host has sent of it, by its size."""
    size, turns = (8 * MIB, 1) if bench.quick else (128 * MIB, 5)
    names = [f"to{number}" for number in range(readers)]
    with Hosts(["from", *names]) as hosts:
        hosts.limit(RATE)
        weights = Weights(hosts, size)
        cluster = Cluster(hosts, gradfs)
        cluster.shard("from")
        cluster.create("model", "--size", size, "--dtype", "bf16", "--reducer", "assign", "--pull", "eager", "--delta", "off")
        source = cluster.mount("from") / "model"
        via = ["--via", "auto", "--insecure"] if readers > 1 else []
        mounts = {name: cluster.mount(name, *via) / "model" for name in names}
        taken, bytes_of = [], []
        # The first version takes pages, and finds the mounts in their order.
        for version in range(1, turns + 2):
            weights.step("random")
            checks = hosts.scratch / f"checks{version}"
            words = [version, weights.path, checks]
            started = [hosts.work(name, "sync.py", "shown", mounts[name], *words) for name in names]
            for reader in started:
                reader.wait_for("waits")
            before = {host: hosts.sent(host) for host in hosts.names}
            wrote = hosts.work("from", "sync.py", "publish", source, weights.path).found(DEADLINE)
            for reader in started:
                reader.wait_for("shown", DEADLINE)
            most = max(hosts.sent(host) - before[host] for host in hosts.names)
            checks.touch()
            shown = [reader.found(DEADLINE)["at"] - wrote["closes"] for reader in started]
            taken.append(max(shown))
            bytes_of.append(most / size)
    say(f"{readers} readers: {', '.join(f'{seconds:.2f} s' for seconds in taken[1:])}, {max(bytes_of[1:]):.2f} times its bytes")
    return statistics.median(taken[1:]), statistics.median(bytes_of[1:])


def fanout(bench, gradfs):
    one, _ = fanned_out(bench, gradfs, 1)
    eight, most = fanned_out(bench, gradfs, 8)
    return [
        times("fanout_8_vs_1", eight, one, 1.4, "<="),
        Figure("fanout_link_bytes", most, "ratio", 1.1, "<="),
    ]


def checkpoint(path, hidden, layers, vocabulary):
    """A safetensors file of bf16 with the shapes of Llama; the size of its weights."""
    import numpy

    rows, kv, shapes = hidden * 11 // 4, hidden // 4, {"model.embed_tokens.weight": (vocabulary, hidden)}
    matrices = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    matrices |= {"self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (rows, hidden), "mlp.up_proj": (rows, hidden)}
    matrices |= {"mlp.down_proj": (hidden, rows), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    header, size = {}, 0
    for name, shape in shapes.items():
        end = size + 2 * int(numpy.prod(shape))
        header[name], size = {"dtype": "BF16", "shape": shape, "data_offsets": [size, end]}, end
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        numpy.random.default_rng(1).integers(0x3800, 0x3F00, size // 2, dtype="<u2").tofile(file)
    return size


def taken(pid):
    """Bytes of memory of a process, without files."""
    with open(f"/proc/{pid}/status") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def read_through(path, size):
    """How long it takes to read so many bytes, MiB by MiB, sixteen times."""
    piece, file = memoryview(bytearray(MIB)), os.open(path, os.O_RDONLY)
    begin = time.monotonic()
    for at in [*range(0, size, MIB)] * 16:
        os.preadv(file, [piece[: size - at]], at)
    end = time.monotonic()
    os.close(file)
    return end - begin


def views(bench, gradfs):
    shapes, turns = ((1024, 2, 8192), 3) if bench.quick else ((2048, 8, 32000), 7)
    with Hosts(["from", "to"]) as hosts:
        hosts.limit(RATE)
        file, weights = hosts.scratch / "llama.safetensors", hosts.scratch / "weights"
        size = checkpoint(file, *shapes)
        with open(file, "rb") as whole, open(weights, "wb") as data:
            whole.seek(-size, os.SEEK_END)
            shutil.copyfileobj(whole, data)
        cluster = Cluster(hosts, gradfs)
        cluster.shard("from")
        cluster.create("model", "--model", file, "--reducer", "assign")
        trainer = cluster.mount("from") / "model"
        contiguous = hosts.path("from", trainer) / "weights"
        model = hosts.path("to", cluster.mount("to", "--views-only")) / "model"
        pid = cluster.mounts["to"][1].process.pid
        say(f"an eighth of {size / MIB:.0f} MiB over a link of {RATE / 1e9:g} Gbit/s")

        def view(name, plan):
            (model / "views" / name).mkdir()
            begin = time.monotonic()
            (model / "views" / name / "plan").write_text(json.dumps(plan))
            return time.monotonic() - begin

        def pulled():
            return json.loads((model / "status.json").read_text())["payload"]["pulled_bytes"]

        before, at = taken(pid), pulled()
        view("rank", {"style": "hf-llama", "tp": 8, "rank": 3})
        bytes_of, memory = [pulled() - at], []
        for version in range(1, turns + 1):
            at = pulled()
            hosts.work("from", "sync.py", "publish", trainer, weights).found(DEADLINE)
            while int((model / "views/rank/version").read_text()) < version:
                time.sleep(0.01)
            bytes_of.append(pulled() - at)
            memory.append(taken(pid) - before)
        reads = {model / "views/rank/weights": [], contiguous: []}
        part = (model / "views/rank/weights").stat().st_size
        for turn in range(2 * turns):
            for path in reads if turn % 2 else reversed(reads):
                reads[path].append(read_through(path, part))
        viewed, whole = map(statistics.median, reads.values())
        (model / "views/rank").rmdir()
        found = [[], []]
        for turn in range(turns):
            for dim in (0, 1) if turn % 2 else (1, 0):
                part = {"from": "*_proj.weight", "split": {"dim": dim, "of": 8, "part": turn % 8}}
                found[dim].append(view("part", {"tensors": [part]}))
                (model / "views/part").rmdir()
            say(f"turn {turn + 1} of {turns}")
    rows, columns = map(statistics.median, found)
    return [
        Figure("view_bytes_ratio", max(bytes_of) / size, "ratio", 0.13, "<="),
        Figure("view_memory_ratio", statistics.median(memory) / size, "ratio", 0.28, "<="),
        times("view_read_vs_contiguous", viewed, whole, 0.9),
        times("view_columns_vs_rows", columns, rows, 0.9),
    ]


def written(path, data):
    file, begin = os.open(path, os.O_WRONLY), time.monotonic()
    for at in range(0, len(data), MIB):
        os.write(file, data[at : at + MIB])
    os.close(file)
    return begin


def stored(path, data):
    file = os.open(path, os.O_RDWR)
    with mmap.mmap(file, len(data)) as mapping:
        begin = time.monotonic()
        mapping[:] = data
        os.fsync(file)
    os.close(file)
    return begin


def recorded(model, name, turns, way, file, contents):
    """What records cost, until the version shows that a content makes, in turn the one and the other."""
    found = {16: [], 0: []}
    for turn in range(turns + 1):
        for changes in found if turn % 2 else reversed(found):
            (model / "control/changes").write_text(str(changes))
            number = int((model / "version").read_text()) + 1
            begin = way(model / file, contents[number % 2])
            while int((model / "version").read_text()) < number:
                time.sleep(0.0002)
            found[changes].append(time.monotonic() - begin)
    # The first turn takes pages. The two of a turn are compared: the machine is slower for a while, at times.
    ours, without = (of[1:] for of in found.values())
    value = statistics.median(with_them / none for with_them, none in zip(ours, without))
    return ratio(name, value, None, *(milliseconds(statistics.median(of)) for of in (ours, without)), "<=")


def record(bench, gradfs):
    """Of a mount that has its shard in it: nobody pulls."""
    import numpy

    size, turns = (32 * MIB, 5) if bench.quick else (GIB, 7)
    figures, random, ways = [], numpy.random.default_rng(1), {"write": written, "map": stored}
    with jobs.up(gradfs, bench.work / "mnt", size, "--reducer", "assign", dtype="bf16") as model:
        say(f"publishing {size / MIB:.0f} MiB with records of what has changed, and without")
        bits = random.integers(0x3800, 0x3F00, size // 2, dtype="<u2")
        for share in (0, 0.01, 1):
            other = bits.copy()
            at = random.integers(len(bits), size=round(share * len(bits))) if share < 1 else slice(None)
            other[at] ^= 1
            versions = [memoryview(of.tobytes()) for of in (bits, other)]
            for name, way in ways.items():
                figures.append(recorded(model, f"record_{name}_{round(share * 100)}", turns, way, "publish", versions))
    size = min(size // 2, 256 * MIB)
    options = ["--reducer", "adam", "--learning-rate", "3e-6"]
    with jobs.up(gradfs, bench.work / "adam", size, *options, dtype="bf16") as model:
        say(f"steps of Adam on {size / MIB:.0f} MiB of bf16 with masters")
        # A few hundredths of weights of this scale change in a step.
        written(model / "weights", memoryview(random.integers(0x3C00, 0x3D80, size // 2, dtype="<u2").tobytes()))
        signs = random.integers(2, size=size // 2, dtype="<u2") << 15
        gradients = memoryview((random.integers(0x3800, 0x3F00, size // 2, dtype="<u2") | signs).tobytes())
        for name, way in ways.items():
            figures.append(recorded(model, f"record_adam_{name}", turns - 2, way, "gradients", [gradients] * 2))
    return [worst("change_record_cost", figures, 1.15, "<="), *figures]


def run(bench):
    gradfs, figures = bench.gradfs(), []
    if "record" in bench.only:
        figures += record(bench, gradfs)
    if "fanout" in bench.only:
        figures += fanout(bench, gradfs)
    if "pause" in bench.only:
        figures += pause(bench, gradfs)
    if "delta" in bench.only:
        figures += delta(bench, gradfs)
    if "views" in bench.only:
        figures += views(bench, gradfs)
    return figures
