"""New weights in parts, from many ranks: what docs/use/files/parts.md promises."""

import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from filetools import BLOCK, eventually, fails, raises
from patience import HANGS, Limit
from safetensors.numpy import save_file
from test_views import llama, number, view
from test_views import publish as publish_whole

# One rank: it waits for a line with a name of a set, and publishes what its file has as its part of that.
RANK = """
import os, sys
place, data = sys.argv[1], open(sys.argv[2], "rb").read()
for line in sys.stdin:
    with open(f"{place}/set", "w") as file:
        file.write(line)
    fd = os.open(f"{place}/publish", os.O_WRONLY)
    assert os.write(fd, data) == len(data)
    try:
        os.close(fd)
        print("ok", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROWS = ("o_proj", "down_proj")


def share(name, values, rank, of):
    """A rank's part of a tensor, cut by NumPy."""
    module = name.split(".")[-2]
    if module in COLUMNS:
        return np.split(values, of)[rank]
    return np.split(values, of, axis=1)[rank] if module in ROWS else values


def packed(place, parts):
    """These tensors, as the view's file has them."""
    data = bytearray((place / "weights").stat().st_size)
    for line in (place / "layout").read_text().splitlines():
        name, _, _, offset = line.split("\t")
        raw = np.ascontiguousarray(parts[name]).tobytes()
        data[int(offset) : int(offset) + len(raw)] = raw
    return bytes(data)


def tensors_of(mount):
    data, has = mount.weights(), {}
    for line in (mount.model / "layout").read_text().splitlines():
        name, _, _, offset = line.split("\t")
        has[name] = data[int(offset) :]
    return has


def holds(mount, tensors):
    """The whole model has just these tensors."""
    has = tensors_of(mount)
    assert has.keys() == tensors.keys()
    for name, values in tensors.items():
        assert has[name][: values.nbytes] == values.tobytes(), name


def new(seed):
    # Other values than those of the model.
    rng = np.random.default_rng(100 + seed)
    return {name: rng.standard_normal(of.shape).astype(of.dtype) for name, of in llama().items()}


@pytest.fixture
def job(cluster, tmp_path):
    """A model on two shards, a mount that holds it and one of views alone."""
    save_file(llama(), tmp_path / "m.safetensors")
    one = cluster(2)
    one.create("m", model=tmp_path / "m.safetensors", block_size=BLOCK, reducer="assign", timeout=30)
    return one, one.mount(), one.mount(models=["m"], views_only=True)


def ranks_of(mounts, of, **plan):
    """A view for each of these ranks, on the mounts by turns."""
    plans = [{"style": "hf-llama", "tp": of, "rank": rank, **plan} for rank in range(of)]
    return [view(mounts[rank % len(mounts)], f"r{rank}", plans[rank]) for rank in range(of)]


def publish(place, tag, data):
    (place / "set").write_text(tag)
    fd = os.open(place / "publish", os.O_WRONLY)
    assert os.write(fd, data) == len(data)
    os.close(fd)


def publish_when_free(place, tag, data):
    limit = Limit(HANGS)
    while not limit.over():
        try:
            return publish(place, tag, data)
        except OSError as error:
            assert error.errno == errno.EBUSY
    raise AssertionError("another set never ended")


def publish_mapped(place, tag, data):
    (place / "set").write_text(tag)
    fd = os.open(place / "publish", os.O_RDWR)
    with mmap.mmap(fd, len(data)) as memory:
        memory[:] = data
        os.fsync(fd)
    os.close(fd)


class Part(threading.Thread):
    """A part that is published meanwhile."""

    def __init__(self, place, tag, data, way=publish):
        super().__init__(daemon=True)
        self.way, self.arguments, self.error = way, (place, tag, data), None
        self.start()

    def run(self):
        try:
            self.way(*self.arguments)
        except OSError as error:
            self.error = error

    def outcome(self):
        self.join(HANGS)
        assert not self.is_alive()
        return self.error and self.error.errno


def parts(views, tensors):
    of = len(views)
    cut = [{name: share(name, values, rank, of) for name, values in tensors.items()} for rank in range(of)]
    return [packed(place, mine) for place, mine in zip(views, cut)]


def why(mount):
    return (mount.model / "error").read_text()


def test_ranks_publish_their_parts_as_one_version(job, tmp_path):
    _, whole, apart = job
    views = ranks_of([whole, apart], 4)
    tensors, ranks = new(5), []
    for rank, (place, data) in enumerate(zip(views, parts(views, tensors))):
        (tmp_path / f"{rank}").write_bytes(data)
        words = [sys.executable, "-c", RANK, place, tmp_path / f"{rank}"]
        ranks.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        before = whole.weights()
        for rank in ranks[:3]:
            rank.stdin.write("step-1\n")
            rank.stdin.flush()
        time.sleep(0.3)
        assert whole.version() == 0 and whole.weights() == before, "nothing is shown before all parts are there"
        ranks[3].stdin.write("step-1\n")
        ranks[3].stdin.flush()
        assert [rank.stdout.readline() for rank in ranks] == ["ok\n"] * 4
        assert whole.coordinator_version() == 1, "closes return with the version"
        holds(whole, tensors)
        for place in views:
            eventually(lambda place=place: number(place) == 1)
        for place, data in zip(views, parts(views, tensors)):
            assert (place / "weights").read_bytes() == data
        assert [(place / "set").read_text() for place in views] == [""] * 4, "a name is used up"
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_what_no_part_has_stays_as_it_is(job):
    _, whole, apart = job
    plans = [
        {"tensors": [{"from": "lm_head.weight", "split": {"dim": 1, "of": 2, "part": part}}], "publish": {"part": part, "of": 2}}
        for part in range(2)
    ]
    views = [view(mount, "mine", plan) for mount, plan in zip((whole, apart), plans)]
    values = new(7)["lm_head.weight"]
    data = [np.ascontiguousarray(half).tobytes() for half in np.split(values, 2, axis=1)]
    other = Part(views[0], "a", data[0])
    publish(views[1], "a", data[1])
    assert other.outcome() is None
    holds(whole, {**llama(), "lm_head.weight": values})


def test_of_what_several_parts_have_the_lowest_counts(job):
    _, whole, apart = job
    views = ranks_of([whole, apart], 2)
    tensors = new(3)
    cut = parts(views, tensors)
    norm = "model.layers.0.input_layernorm.weight"
    other = {**tensors, norm: np.zeros_like(tensors[norm])}
    late = Part(views[1], "a", parts(views, other)[1])
    publish(views[0], "a", cut[0])
    assert late.outcome() is None
    holds(whole, tensors)


def known(mount, timeout):
    """The mount has heard of the setting."""
    eventually(lambda: float((mount.model / "control/timeout").read_text()) == timeout)


def test_a_missing_part_is_named_and_nothing_is_shown(job):
    _, whole, apart = job
    views = ranks_of([whole, apart], 4)
    cut = parts(views, new(1))
    whole.control("timeout", 1)
    known(apart, 1)
    some = [Part(views[rank], "step-1", cut[rank]) for rank in (0, 3)]
    assert [part.outcome() for part in some] == [110, 110]
    assert 'set "step-1" lacks parts 1, 2 of 4' in why(whole) and "lacks parts 1, 2 of 4" in why(apart)
    assert whole.version() == 0
    whole.control("timeout", 30)
    known(apart, 30)
    # The same set may be tried again, by all.
    again = [Part(views[rank], "step-1", cut[rank]) for rank in range(4)]
    assert [part.outcome() for part in again] == [None] * 4
    holds(whole, new(1))


def test_a_set_can_have_a_deadline_of_its_own(job):
    _, whole, apart = job
    views = ranks_of([whole, apart], 2)
    cut = parts(views, new(1))
    for wrong in ("step-1 never", "step-1 0", "step-1 1 2", "step/1 1"):
        with raises(22):
            (views[0] / "set").write_text(wrong)
        assert "set" in why(whole)
    with raises(110):
        publish(views[0], "step-1 0.5", cut[0])
    assert 'set "step-1" lacks part 1 of 2' in why(whole)
    assert (views[0] / "set").read_text() == "step-1 0.5\n"
    # Which seconds a rank gives does not make it another set.
    first = Part(views[0], f"step-1 {HANGS}", cut[0])
    publish(views[1], "step-1", cut[1])
    assert first.outcome() is None
    holds(whole, new(1))


def test_of_two_sets_at_once_one_is_refused(job):
    _, whole, apart = job
    views = ranks_of([whole, apart], 2)
    cut = parts(views, new(1))
    both = [Part(views[rank], f"step-{rank}", cut[rank]) for rank in range(2)]
    eventually(lambda: not all(part.is_alive() for part in both))
    lost = 0 if not both[0].is_alive() else 1
    won = 1 - lost
    assert both[lost].outcome() == 16 and both[won].is_alive()
    told = why((whole, apart)[lost])
    assert f'another set is being published: set "step-{won}" lacks part {lost} of 2' in told, told
    assert whole.version() == 0
    # The same part cannot come twice either.
    twin = view(apart, "twin", {"style": "hf-llama", "tp": 2, "rank": won})
    with raises(16):
        publish(twin, f"step-{won}", cut[won])
    assert f"part {won} of set" in why(apart) and "has come already" in why(apart)
    publish(views[lost], f"step-{won}", cut[lost])
    assert both[won].outcome() is None
    holds(whole, new(1))


def sent(mount, bytes):
    """The mount has sent a part, and said so a moment later."""
    eventually(lambda: json.loads((mount.model / "status.json").read_text())["payload"]["pushed_bytes"] >= bytes)
    time.sleep(0.5)


def test_the_part_of_a_rank_that_dies_is_missed(job, tmp_path):
    _, whole, apart = job
    views = ranks_of([whole, apart], 2)
    cut = parts(views, new(1))
    (tmp_path / "0").write_bytes(cut[0])
    words = [sys.executable, "-c", RANK, views[0], tmp_path / "0"]
    rank = subprocess.Popen(words, stdin=subprocess.PIPE, text=True)
    rank.stdin.write("step-1\n")
    rank.stdin.flush()
    sent(whole, len(cut[0]))
    rank.send_signal(signal.SIGKILL)
    rank.wait(HANGS)
    # The part is taken back a moment later.
    time.sleep(2)
    other = Part(views[1], "step-1", cut[1])
    sent(apart, len(cut[1]))
    assert other.is_alive() and whole.version() == 0
    publish(views[0], "step-1", cut[0])
    assert other.outcome() is None
    holds(whole, new(1))


@pytest.mark.parametrize("delay", [0, 0.003, 0.01, 0.03])
def test_a_rank_that_dies_while_it_sends_does_not_keep_its_place(job, tmp_path, delay):
    _, whole, apart = job
    whole.control("timeout", 10 * HANGS)
    views = ranks_of([whole, apart], 2)
    cut = parts(views, new(1))
    (tmp_path / "0").write_bytes(parts(views, new(3))[0])
    words = [sys.executable, "-c", RANK, views[0], tmp_path / "0"]
    rank = subprocess.Popen(words, stdin=subprocess.PIPE, text=True)
    rank.stdin.write("step-1\n")
    rank.stdin.flush()
    eventually(lambda: (views[0] / "set").read_text() == "step-1\n")
    time.sleep(delay)
    rank.send_signal(signal.SIGKILL)
    rank.wait(HANGS)

    # The dead part keeps other sets away until it is taken back.
    other = Part(views[1], "step-2", cut[1], publish_when_free)
    publish_when_free(views[0], "step-2", cut[0])
    assert other.outcome() is None
    holds(whole, new(1))


def test_a_part_is_published_from_a_mapping(job):
    _, whole, apart = job
    views = ranks_of([whole, apart], 2)
    for seed in (1, 2):
        cut = parts(views, new(seed))
        other = Part(views[1], f"step-{seed}", cut[1], publish_mapped)
        publish_mapped(views[0], f"step-{seed}", cut[0])
        assert other.outcome() is None
        holds(whole, new(seed))


def test_the_part_of_a_mount_that_dies_is_gone(job):
    _, whole, apart = job
    views = ranks_of([whole, apart], 2)
    cut = parts(views, new(1))
    Part(views[1], "step-1", cut[1])
    sent(apart, len(cut[1]))
    apart.kill()
    with raises(5):
        publish(views[0], "step-1", cut[0])
    assert "part 1 is not on its shards any more" in why(whole)
    assert whole.version() == 0


def test_a_hole_is_refused_where_all_is_demanded(job):
    _, whole, apart = job
    rest = {"tensors": [{"from": "model.*"}], "publish": {"part": 0, "of": 2, "all": True}}
    half = {
        "tensors": [{"from": "lm_head.weight", "slice": {"0": [0, 300]}}],
        "publish": {"part": 1, "of": 2, "all": True},
    }
    views = [view(whole, "rest", rest), view(apart, "half", half)]
    tensors = new(2)
    data = [packed(views[0], tensors), tensors["lm_head.weight"][:300].tobytes()]
    other = Part(views[0], "a", data[0])
    with raises(22):
        publish(views[1], "a", data[1])
    assert other.outcome() == 22
    assert "no part of the set has byte" in why(whole) and 'tensor "lm_head.weight"' in why(whole)
    assert whole.version() == 0
    half["tensors"][0]["slice"]["0"][1] = 520
    views[1] = view(apart, "half", half)
    other = Part(views[0], "a", data[0])
    publish(views[1], "a", tensors["lm_head.weight"].tobytes())
    assert other.outcome() is None
    holds(whole, tensors)


def test_wrong_parts_are_refused_where_they_are_written(job):
    _, whole, _ = job
    place = ranks_of([whole], 2)[0]
    data = parts([place, place], new(1))[0]
    fd = os.open(place / "publish", os.O_WRONLY)
    os.write(fd, data)
    with raises(22):
        os.close(fd)
    assert "the part has no set" in why(whole)
    (place / "set").write_text("a")
    fd = os.open(place / "publish", os.O_WRONLY)
    os.write(fd, data[:-2])
    with raises(22):
        os.close(fd)
    assert "a part is written whole" in why(whole)
    fd = os.open(place / "publish", os.O_WRONLY)
    with raises(27):
        os.write(fd, data + b"\0\0")
    with raises(27):
        os.close(fd)
    with raises(22):
        (place / "set").write_text("a/b")
    name = "lm_head.weight"
    for entry, words in [
        ({"from": name, "cast": "f32"}, "is cast"),
        ({"from": name, "transpose": True}, "is transposed"),
        ({"name": "x", "concat": [{"from": name}, {"from": name}]}, "twice"),
    ]:
        with raises(22):
            view(whole, "wrong", {"tensors": [entry], "publish": {"part": 0, "of": 2}})
        assert words in why(whole), why(whole)
    for entry in ({"part": 2, "of": 2}, {"part": 0}, {"all": True}):
        with raises(22):
            view(whole, "wrong", {"tensors": [{"from": name}], "publish": entry})
        assert "publish: " in why(whole)
    # A plan that says nothing of publishing is only read.
    other = view(whole, "read", {"tensors": [{"from": name}]})
    assert not (other / "publish").exists() and not (other / "set").exists()
    assert whole.version() == 0


def test_a_model_of_one_process_takes_no_parts(start_mount, tmp_path):
    save_file(llama(), tmp_path / "m.safetensors")
    mount = start_mount(model=tmp_path / "m.safetensors", block_size=BLOCK, reducer="assign")
    place = view(mount, "r", {"style": "hf-llama", "tp": 2, "rank": 0})
    with raises(13):
        os.close(os.open(place / "publish", os.O_WRONLY))
    assert "has no shards to bring parts to" in why(mount)


def test_what_the_lowest_part_says_is_said_of_the_version(job):
    _, whole, apart = job
    views = ranks_of([whole, apart], 2)
    cut = parts(views, new(1))
    (views[0] / "set").write_text("step-9")
    fd = os.open(views[0] / "publish", os.O_WRONLY)
    os.write(fd, cut[0])
    os.setxattr(fd, "user.step", b"9")
    other = Part(views[1], "step-9", cut[1])
    os.close(fd)
    assert other.outcome() is None
    assert whole.version() == 1
    assert json.loads((whole.model / "versions/1/meta.json").read_text()) == {"step": "9"}


def test_a_part_waits_longer_than_a_connection_may_be_silent(job):
    _, whole, apart = job
    views = ranks_of([whole, apart], 2)
    cut = parts(views, new(1))
    first = Part(views[1], "step-1", cut[1])
    # Shards end connections over which nothing comes for 10 s.
    time.sleep(12)
    publish(views[0], "step-1", cut[0])
    assert first.outcome() is None
    holds(whole, new(1))


def test_of_a_set_and_other_weights_at_once_the_first_to_end_is_published(job):
    _, whole, apart = job
    views = ranks_of([whole, apart], 2)
    first, second = new(11), new(12)
    data = parts(views, first)
    # Weights that are being written when a set comes about.
    fd = os.open(whole.model / "publish", os.O_WRONLY)
    os.write(fd, whole.weights())
    others = [Part(place, "step-1", mine) for place, mine in zip(views, data)]
    assert [part.outcome() for part in others] == [None, None]
    fails(errno.EBUSY, os.close, fd)
    client = str(apart.status()["client"]) if "another mount" in why(whole) else str(whole.status()["client"])
    assert f"client {client} in its status.json" in why(whole)
    holds(whole, first)
    # A set of which a part has come when other weights are published.
    waits = waiting_part(views[0], "step-2", data[0], views[1])
    publish_whole(whole, second)
    last = Part(views[1], "step-2", data[1])
    assert [part.outcome() for part in (waits, last)] == [errno.EBUSY, errno.EBUSY]
    assert f"client {whole.status()['client']} in its status.json" in why(apart)
    holds(whole, second)
    again = [Part(place, "step-2", mine) for place, mine in zip(views, data)]
    assert [part.outcome() for part in again] == [None, None]
    holds(whole, first)


def waiting_part(place, tag, data, other):
    """A part that has come: one of another set is refused."""
    while True:
        part = Part(place, tag, data)
        probe = Part(other, "another 1", (other / "weights").read_bytes()).outcome()
        if probe == errno.EBUSY:
            return part
        # The other one was first, and has nobody to wait for.
        assert (probe, part.outcome()) == (errno.ETIMEDOUT, errno.EBUSY)
