from __future__ import annotations

import threading

import numpy
import pytest

import gradfs


@pytest.fixture
def model(start):
    return gradfs.open(start({"w": numpy.zeros(3, "f4")}, "--reducer", "assign"))


def test_follow_yields_each_newer_version(model):
    seen = []
    for weights in gradfs.follow(model.path, timeout=60):
        seen.append((weights.version, weights["w"].numpy()[0].item()))
        if len(seen) == 4:
            break
        model.publish({"w": numpy.full(3, len(seen), "f4")})
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_follow_skips_versions_that_came_meanwhile_and_pins_the_one_it_shows(model):
    seen = []
    for weights in gradfs.follow(model.path, newer_than=-1, timeout=60):
        for _ in range(3 if not seen else 0):
            model.publish({"w": numpy.ones(3, "f4")})
        seen.append((weights.version, weights["w"].numpy()[0].item()))
        if len(seen) == 2:
            break
    # Without a mount, `follow` has a connection of its own, which may hear of the last one later.
    first, (version, value) = seen
    assert first == (0, 0) and value == 1 and (version == 3 or "://" in model.path)


def test_follow_waits_for_what_is_newer(model):
    timer = threading.Timer(0.1, lambda: model.publish({"w": numpy.ones(3, "f4")}))
    timer.start()
    assert next(gradfs.follow(model.path, newer_than=0, timeout=60)).version == 1
    timer.join()


def test_follow_ends_at_its_timeout(model):
    with pytest.raises(gradfs.Timeout):
        next(gradfs.follow(model.path, newer_than=0, timeout=0.05))
