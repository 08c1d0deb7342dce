from __future__ import annotations

import errno
import threading

import numpy
import pytest
from conftest import HANGS

import gradfs

VALUES = {"w": numpy.arange(24, dtype="f4").reshape(4, 6), "norm": numpy.ones(3, "f4")}


def plan(part):
    split = {"from": "w", "split": {"dim": 0, "of": 2, "part": part}}
    return {"tensors": [split, {"from": "norm"}], "publish": {"part": part, "of": 2, "all": True}}


def test_a_view_is_a_model(start):
    model = gradfs.open(start(VALUES, "--reducer", "assign"))
    view = model.view("turned", {"tensors": [{"from": "w", "transpose": True}]})
    assert view.name == "turned" and list(view.layout) == ["w"]
    assert numpy.array_equal(view.pull()["w"].numpy(), VALUES["w"].T)
    model.publish({name: values + 1 for name, values in VALUES.items()})
    assert view.wait(newer_than=0, timeout=HANGS) == 1
    assert numpy.array_equal(model.view("turned").pull()["w"].numpy(), VALUES["w"].T + 1)
    with pytest.raises(gradfs.Busy):
        model.view("turned", {"tensors": [{"from": "w"}]})


def test_a_wrong_plan_leaves_no_view(start):
    model = gradfs.open(start(VALUES, "--reducer", "assign"))
    with pytest.raises(gradfs.Refused, match="none") as error:
        model.view("wrong", {"tensors": [{"from": "none"}]})
    assert error.value.errno == errno.EINVAL
    with pytest.raises(gradfs.NotMounted):
        model.view("wrong")
    model.view("wrong", {"tensors": [{"from": "w"}]})


def test_parts_are_published_as_one_version(mounted):
    model = gradfs.open(mounted(VALUES, "--reducer", "assign"))
    views = [model.view(f"part{part}", plan(part)) for part in range(2)]
    made: list[int] = []

    def publish(part):
        shares = {"w": VALUES["w"][2 * part : 2 * part + 2] * 3, "norm": VALUES["norm"] * (2 + part)}
        made.append(views[part].publish(shares, meta={"step": str(part)}, part_of="step-1"))

    threads = [threading.Thread(target=publish, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    assert made == [1, 1] and model.wait(newer_than=0, timeout=HANGS) == 1
    with model.pull() as weights:
        assert numpy.array_equal(weights["w"].numpy(), VALUES["w"] * 3) and weights.meta == {"step": "0"}
        # Of what both have, the lowest part counts.
        assert numpy.array_equal(weights["norm"].numpy(), VALUES["norm"] * 2)
    with pytest.raises(gradfs.Refused, match="letters"):
        views[0].publish({}, part_of="no/name")


def test_parts_take_shards(start):
    view = gradfs.open(start(VALUES, "--reducer", "assign")).view("part0", plan(0))
    with pytest.raises(gradfs.Refused, match="shards") as error:
        view.publish({"w": VALUES["w"][:2], "norm": VALUES["norm"]}, part_of="step-1")
    assert error.value.errno == errno.EACCES


def test_views_take_a_mount(start_without_mount):
    model = gradfs.open(start_without_mount(VALUES, "--reducer", "assign"))
    with pytest.raises(gradfs.Refused, match="without one"):
        model.view("part", {"tensors": [{"from": "w"}]})
