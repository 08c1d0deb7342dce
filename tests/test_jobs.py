"""Jobs: consistency, learners, leases, settings and reducers, as docs/use/semantics.md promises them."""

import errno
import json
import os
import time

import numpy as np
import pytest
from filetools import (
    BLOCK, Threads, array, eventually, f32, fails, filled, finish, give, go, hear, killed, mounts, program, raises,
    said, takes
)

SIZE = 2 * BLOCK + 1236

pytestmark = pytest.mark.also_on_network


mounted = mounts(both=False, size=SIZE)


def only(mount, learner=None):
    mount.catch_up()
    values = array(mount.place(learner) / "weights")
    assert (values == values[0]).all()
    return values[0]


def test_learners_join_with_mkdir(mounted):
    mount = mounted(learners=2)
    place = mount.join("a")
    assert sorted(os.listdir(place)) == [
        "all_reduce", "error", "gradients", "gradients.safetensors", "publish.safetensors", "status", "tensors", "version", "weight",
        "weights", "weights.safetensors",
    ]  # fmt: skip
    assert (place / "version").read_text() == "0\n"
    assert "id: a\nincarnation: 1\n" in (place / "status").read_text()
    fails(errno.EEXIST, mount.join, "a")
    learners = os.fsencode(mount.model / "learners") + b"/"
    for name in (b"a/b", b".hidden", b"white space", "\u00e9".encode(), b"a\nb", b"\xff\xfe", b"a:b", b"*"):
        with raises(errno.EINVAL, errno.EPERM):
            os.mkdir(learners + name)
    for length in (65, 255, 256, 1024):
        fails(errno.ENAMETOOLONG, os.mkdir, learners + b"x" * length)
    for words in [("learner name", "letters, digits"), ("xxx", "65 bytes", "64 is the most")]:
        said(mount, *words)
    for parent in (mount.root, mount.model, mount.model / "control"):
        for length, code in [(255, errno.ENOENT), (256, errno.ENAMETOOLONG)]:
            fails(code, os.stat, parent / ("x" * length))
    os.mkdir(learners + b"x" * 64)
    os.rmdir(learners + b"x" * 64)
    mount.leave("a")
    assert os.listdir(mount.model / "learners") == [] and not place.exists()
    fails(errno.ENOENT, mount.leave, "a")
    mount.join("a")
    assert "incarnation: 2\n" in (place / "status").read_text()


def test_the_job_waits_for_its_learners(mounted):
    mount = mounted(learners=2, timeout=1)
    mount.join("a")
    assert mount.status()["state"] == "forming"
    give(mount, 1, "a")
    fails(errno.ETIMEDOUT, array, mount.place("a") / "weights")
    assert mount.version() == 0
    mount.join("b")
    give(mount, 10, "b")
    assert mount.version() == 1 and only(mount) == 11 and mount.status()["state"] == "running"


def test_raising_learners_stops_nobody(mounted):
    mount = mounted(learners=1)
    mount.join("a")
    give(mount, 1, "a")
    mount.control("learners", 2)
    give(mount, 1, "a")
    assert mount.version() == 2 and mount.status()["state"] == "running"
    mount.leave("a")
    mount.join("b")
    assert mount.status()["state"] == "forming"


def test_sync_waits_for_all(mounted):
    mount = mounted(learners=3)
    mount.join(*"abc")
    for step in range(1, 4):
        for i, name in enumerate("cab"):
            assert mount.version() == step - 1 and only(mount) == 111 * (step - 1)
            give(mount, 10**i, name)
        assert mount.version() == step and only(mount) == 111 * step


def test_async_makes_a_version_a_contribution(mounted):
    mount = mounted(consistency="async", learners=3)
    places = [mount.join(name) for name in "abc"]
    give(mount, 1, "a")
    give(mount, 1, "a")
    assert mount.version() == 2 and only(mount, "a") == 2

    def learn(place):
        for _ in range(30):
            with open(place / "gradients", "wb") as file:
                file.write(filled(mount, 1).tobytes())
            only(mount)

    threads = Threads()
    threads.run(*(lambda place=place: learn(place) for place in places))
    assert mount.version() == 92 and only(mount) == 92


def test_a_joiner_takes_part_from_the_next_step(mounted):
    mount = mounted(learners=2)
    mount.join(*"ab")
    give(mount, 1, "a")
    mount.join("c")  # In the middle of the step: it is not waited for.
    give(mount, 10, "b")
    assert mount.version() == 1 and only(mount) == 11
    give(mount, 1, "a")
    give(mount, 10, "b")
    assert mount.version() == 1, "now it is"
    give(mount, 100, "c")
    assert mount.version() == 2 and only(mount) == 122
    mount.join("d")  # Between two steps: it takes part at once.
    for name in "abc":
        give(mount, 1, name)
    assert mount.version() == 2
    give(mount, 1, "d")
    assert mount.version() == 3 and only(mount) == 126


def test_a_leaver_does_not_hold_the_job_up(mounted):
    mount = mounted(learners=3)
    mount.join(*"abc")
    give(mount, 1, "a")
    give(mount, 10, "b")
    fd = os.open(mount.place("c") / "gradients", os.O_WRONLY)
    os.pwrite(fd, filled(mount, 100)[: BLOCK // 4], 0)
    mount.leave("c")
    eventually(lambda: mount.version() == 1)
    assert only(mount) == 11, "what it was writing is dropped"
    fails(errno.ENOTCONN, os.pwrite, fd, filled(mount, 100)[BLOCK // 4 :], BLOCK)
    fails(errno.ENOTCONN, os.close, fd)
    give(mount, 1, "a")
    mount.leave("a")
    give(mount, 10, "b")
    assert mount.version() == 2 and only(mount) == 22, "what it had committed stays"


def test_leases_expire(mounted):
    mount = mounted(learners=2, lease=1, patience=1)
    # Nobody's process uses `a`; somebody has `b`'s gradients open, and nobody waits for it.
    b = mount.join("b")
    fd = os.open(b / "gradients", os.O_WRONLY)
    with takes(0.9, 5):
        a = mount.join("a")
        eventually(lambda: not a.exists())
    time.sleep(1.3)
    assert b.exists()
    assert [learner["id"] for learner in mount.status()["learners"]] == ["b"]
    # Now somebody waits for it.
    mount.join("c")
    with takes(0.9, 5):
        give(mount, 1, "c")
        assert only(mount, "c") == 1
    eventually(lambda: os.listdir(mount.model / "learners") == ["c"])
    fails(errno.ENOTCONN, os.pwrite, fd, f32(1), 0)
    fails(errno.ENOTCONN, os.close, fd)


def test_below_min_learners_the_job_stops(mounted):
    mount = mounted(learners=3, min_learners=2)
    mount.join(*"abc")
    mount.leave("c")
    give(mount, 1, "a")
    waiting = Threads().start(array, mount.place("a") / "weights")
    time.sleep(0.1)
    mount.leave("b")
    fails(errno.ECANCELED, waiting.result, 300)
    assert mount.status()["state"] == "stopped" and mount.version() == 0
    fails(errno.ECANCELED, give, mount, 1, "a")
    assert not only(mount), "weights can still be read"
    mount.join("d")  # In the middle of the step that has what was taken before.
    eventually(lambda: mount.version() == 1)
    assert only(mount) == 1 and mount.status()["state"] == "running"
    for name in "ad":
        give(mount, 10, name)
    assert mount.version() == 2 and only(mount) == 21


def test_settings_count_from_the_next_version(mounted):
    mount = mounted(reducer="sgd", learning_rate=1)
    give(mount, -1)
    assert only(mount) == 1
    mount.control("learning_rate", 0.5)
    give(mount, -1)
    assert only(mount) == 1.5
    # The blocks of a lone learner are reduced as they come, and the version that has begun keeps its settings.
    fd = os.open(mount.model / "gradients", os.O_WRONLY)
    values = filled(mount, -1)
    os.pwrite(fd, values[: BLOCK // 4], 0)
    mount.control("learning_rate", 100)
    os.pwrite(fd, values[BLOCK // 4 :], BLOCK)
    os.close(fd)
    assert only(mount) == 2
    mount.control("reducer", "sum")
    give(mount, 3)
    assert only(mount) == 5


def test_words_are_taken_in_any_case(mounted):
    mount = mounted()
    for name, value in {"reducer": "AdamW", "consistency": "Quorum(1)", "nonfinite": "Accept", "aggregation": "SUM"}.items():
        assert mount.control(name, value) == value.lower()


def test_settings_in_one_object_are_one_change(mounted):
    mount = mounted(learners=2, reducer="sgd", learning_rate=1, aggregation="sum")
    mount.join("x", "y")
    file = mount.model / "settings.json"
    shown = json.loads(file.read_text())
    assert shown == json.loads((mount.model / "status.json").read_text())["control"]
    assert shown == {name: mount.control(name) for name in os.listdir(mount.model / "control")}
    file.write_text('{"learning_rate": 0.25, "min_learners": 2, "reducer": "nesterov", "momentum": 0.5, "tensors": ["* weight_decay=0"]}\n')
    for learner in ("x", "y"):
        give(mount, 1, learner)
    assert only(mount, "x") == -2 * 0.25 * 1.5, "all of it counts for the next version"
    before = file.read_text()
    wrong = {
        '{"learning_rate": 7, "momentum": 2}': 'momentum: "2" is not a number from 0 to 1',
        '{"learning_rate": 7, "min_learners": 3}': "min_learners",
        '{"learning_rate": 7, "learning_rat": 7}': "learning_rat",
        '{"learning_rate": null}': "settings.json: learning_rate has to be a text, a number",
        '["learning_rate"]': 'settings.json: "[\\"learning_rate\\"]" is not a JSON object like',
        '{"learning_rate": 7': "EOF",
        "": "EOF",
    }
    for ending in ("\n", ""):
        for text, why in wrong.items():
            with raises(errno.EINVAL), open(file, "w") as it:
                it.write(text + ending)
            assert why in (mount.model / "error").read_text(), text
            said(mount, why)
    assert file.read_text() == before
    with open(file, "w") as it:
        for piece in ("{\n", '"learning_rate": 2,\n', '"carry": "0.5"\n', "}\n"):
            it.write(piece)
            it.flush()
    assert (mount.control("learning_rate"), mount.control("carry")) == ("2", "0.5")
    file.write_text(before)
    assert json.loads(file.read_text()) == json.loads(before), "what it shows can be written"
    with open(file, "w") as it:
        it.write(json.dumps({"tensors": ["* weight_decay=0.5"]}, indent=6000))
    assert mount.control("tensors") == "* weight_decay=0.5", "of several pages"
    long = "\n".join(["*"] * 32_000)
    mount.control("frozen", long)
    file.write_text(file.read_text())
    assert mount.control("frozen") == long, "it takes what it shows"
    fails(errno.EINVAL, file.write_text, " " * (256 << 10) + "{}")


def test_bad_settings_change_nothing(mounted):
    mount = mounted()
    before = {name: mount.control(name) for name in os.listdir(mount.model / "control")}
    for name, value in {"reducer": "SGD2", "consistency": "quorum(2", "learning_rate": "fast", "min_learners": 9, "carry": "nan"}.items():
        fails(errno.EINVAL, mount.control, name, value)
    for name in before:
        for data in (b"\xff\xfe\n", b"9" * 70_000):
            fd = os.open(mount.model / "control" / name, os.O_WRONLY)
            fails(errno.EINVAL, os.write, fd, data)
            fails(errno.EINVAL, os.close, fd)
    assert {name: mount.control(name) for name in before} == before
    for name, value in before.items():
        assert mount.control(name, f"  {value} ") == value, "each reads back what can be written"


def reference(reducer, steps, weights, learning_rate=0.1, weight_decay=0.01):
    """The optimizers in double precision."""
    m = v = None
    weights = weights.astype("f8")
    for t, gradient in enumerate(steps, 1):
        g = gradient.astype("f8") + (0 if reducer in ("adamw", "lion") else weight_decay * weights)
        if reducer == "sgd":
            weights = weights - learning_rate * g
        elif reducer in ("momentum", "nesterov"):
            m = g if m is None else 0.9 * m + g
            weights = weights - learning_rate * (g + 0.9 * m if reducer == "nesterov" else m)
        elif reducer == "rmsprop":
            v = (0 if v is None else 0.99 * v) + 0.01 * g * g
            weights = weights - learning_rate * g / (np.sqrt(v) + 1e-8)
        elif reducer == "adagrad":
            v = (0 if v is None else v) + g * g
            weights = weights - learning_rate * g / (np.sqrt(v) + 1e-8)
        elif reducer == "lion":
            m = np.zeros_like(g) if m is None else m
            weights = weights * (1 - learning_rate * weight_decay) - learning_rate * np.sign(0.9 * m + 0.1 * g)
            m = 0.999 * m + 0.001 * g
        else:
            m = (0 if m is None else 0.9 * m) + 0.1 * g
            v = (0 if v is None else 0.999 * v) + 0.001 * g * g
            if reducer == "adamw":
                weights = weights * (1 - learning_rate * weight_decay)
            change = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            weights = weights - learning_rate * change
    return weights


# Over a network ps-backend/tests/conformance has it.
@pytest.mark.one_process
@pytest.mark.parametrize("reducer", ["sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad", "lion"])
def test_reducers(mounted, reducer):
    """Two learners' contributions against a reference in double precision, first their mean, and then their sum."""
    settings = {"learning_rate": 0.1, "weight_decay": 0.01, "beta2": 0.999, "epsilon": 1e-8}
    mount = mounted(learners=2, reducer=reducer, **settings)
    generator = np.random.RandomState(7)
    start = generator.standard_normal(SIZE // 4).astype("<f4")
    with open(mount.model / "weights", "wb") as file:
        file.write(start.tobytes())
    mount.join(*"ab")
    steps = []
    for step in range(4):
        mount.control("aggregation", "mean" if step < 2 else "sum")
        pair = generator.standard_normal((2, SIZE // 4)).astype("<f4")
        for name, gradient in zip("ab", pair):
            mount.contribute(gradient, learner=name)
        steps.append(pair.astype("f8").sum(axis=0) / (2 if step < 2 else 1))
    expected = reference(reducer, steps, start)
    mount.catch_up()
    np.testing.assert_allclose(array(mount.model / "weights"), expected, rtol=2e-5, atol=2e-6)


def test_reducers__sum(mounted):
    mount = mounted(learners=2, carry=0.5)
    mount.join(*"ab")
    expected = 0
    for step in range(4):
        give(mount, step, "a")
        give(mount, 8, "b")
        expected = 0.5 * expected + step + 8
        assert only(mount) == expected
    mount.control("carry", 0)
    give(mount, 2, "a")
    give(mount, 3, "b")
    assert only(mount) == 5, "an all-reduce"


# Over a network a contribution is added when it comes, unless `deterministic` is set.
@pytest.mark.one_process
def test_the_order_of_learners_decides_the_sum(mounted):
    """Not the order in which they come: a synchronous job gives the same bits again."""
    ends = set()
    generator = np.random.RandomState(3)
    parts = [(generator.standard_normal(SIZE // 4) * 10.0**i).astype("<f4") for i in (0, 5, -4)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        mount = mounted(learners=3)
        mount.join(*"abc")
        for i in order:
            mount.contribute(parts[i], learner="abc"[i])
        ends.add(mount.weights())
    assert len(ends) == 1


def test_a_learner_is_one_contribution_at_a_time(mounted):
    """Two programs that write as one learner fill one contribution; the first close ends it."""
    mount = mounted()
    first, second = (os.open(mount.model / "gradients", os.O_WRONLY) for _ in range(2))
    os.pwrite(first, f32(1), 0)
    os.pwrite(second, f32(2), 400)
    os.close(first)
    assert mount.version() == 1
    values = array(mount.model / "weights")
    assert (values[0], values[100]) == (1, 2)
    os.close(second)
    assert mount.version() == 1


def test_killed_learner_leaves_the_job(mounted):
    mount = mounted(learners=2, lease=0)
    code = "fd = os.open(argv[0], os.O_WRONLY)\nsay('open')\nwait()"
    for violent in (True, False):
        place = mount.join("a")
        child = program(code, place / "gradients")
        hear(child)
        if violent:
            killed(child)
            eventually(lambda: not place.exists())
        else:
            go(child)
            finish(child)
            time.sleep(0.2)
            assert place.exists(), "a process that exits may have been one of many"
