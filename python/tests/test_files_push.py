from __future__ import annotations

import errno
import pickle
import threading

import numpy
import pytest
from conftest import HANGS

import gradfs

ONES = numpy.ones((2, 3), "f4")


@pytest.fixture
def model(start):
    tensors = {"w": numpy.zeros((2, 3), "f4"), "b": numpy.zeros(4, "f4"), "h": numpy.zeros(2, "f2")}
    return gradfs.open(start(tensors, "--reducer", "sum"))


@pytest.fixture
def learner(model):
    with model.join() as learner:
        yield learner


def weights_of(learner):
    with learner.pull() as weights:
        return {name: view.numpy().tolist() for name, view in weights.items()}


def test_push_is_one_contribution(model, learner):
    learner.push({"h": numpy.ones(2, "f4"), "w": ONES})
    assert weights_of(learner) == {"w": [[1] * 3] * 2, "b": [0] * 4, "h": [1, 1]}
    assert model.version == learner.version == 1


@pytest.mark.mounted
def test_model_push_is_of_the_mounts_own_learner(model):
    model.push({"w": ONES})
    assert weights_of(model)["w"] == [[1] * 3] * 2
    assert [learner["id"] for learner in model.status["learners"]] == ["mount"]


def test_a_step_commits_at_the_end_of_its_block(model, learner):
    with learner.step() as step:
        step["w"] = ONES
        step["b"] = numpy.ones(4, "f4")
        assert model.version == 0
    assert step.committed
    assert weights_of(learner) == {"w": [[1] * 3] * 2, "b": [1] * 4, "h": [0, 0]}


def test_parts_of_a_tensor_are_written_from_an_element_on(learner):
    with learner.step() as step:
        step.write("w", numpy.array([5, 6], "f4"), start=2)
        step.write("w", numpy.array([[7]], "f2"), start=5)
    assert weights_of(learner)["w"] == [[0, 0, 5], [6, 0, 7]]


def test_an_exception_aborts_the_step(model, learner):
    with pytest.raises(ZeroDivisionError), learner.step() as step:
        step["w"] = ONES
        1 / 0  # noqa: B018
    assert not step.committed
    learner.push({"b": numpy.ones(4, "f4")})
    assert weights_of(learner) == {"w": [[0] * 3] * 2, "b": [1] * 4, "h": [0, 0]}
    assert model.version == 1


def test_abort_takes_back_what_was_written(model, learner):
    with learner.step() as step:
        step["w"] = ONES
        step.abort()
    assert not step.committed and model.version == 0
    learner.push({"b": numpy.ones(4, "f4")})
    assert weights_of(learner)["w"] == [[0] * 3] * 2


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("w", ONES.astype("f8"), "w: the type is F64, and F32"),
        ("w", ONES.T, r"w: the shape is \[3, 2\], and \[2, 3\]"),
        ("x", ONES, "x: the model has no such tensor"),
    ],
    ids=["dtype", "shape", "name"],
)
def test_wrong_content_is_refused_before_anything_is_written(model, learner, name, value, reason):
    values = {"b": numpy.ones(4, "f4"), name: value}
    for give in learner.push, model.push:
        with pytest.raises(gradfs.Refused, match=reason) as error:
            give(values)
        assert isinstance(error.value, ValueError)
    with learner.step() as step:
        with pytest.raises(gradfs.Refused, match=reason):
            step.update(values)
        step["h"] = numpy.ones(2, "f2")
    assert weights_of(learner) == {"w": [[0] * 3] * 2, "b": [0] * 4, "h": [1, 1]}


def test_an_element_is_written_once(learner):
    with learner.step() as step:
        step["w"] = ONES
        for again in lambda: step.update({"w": ONES}), lambda: step.write("w", ONES[0], start=3):
            with pytest.raises(gradfs.Refused, match="w: an element is written once in a step"):
                again()
        step.write("b", ONES[0], 0)
        with pytest.raises(gradfs.Refused, match="b: elements 3 to 6 are not within the tensor's 4"):
            step.write("b", ONES[0], 3)
    assert weights_of(learner)["b"] == [1, 1, 1, 0]


def test_a_step_that_wrote_nothing_is_refused(model, learner):
    with pytest.raises(gradfs.Refused, match="has written nothing"):
        learner.push({})
    learner.push({"w": ONES})
    assert weights_of(learner)["w"] == [[1] * 3] * 2
    assert model.version == 1


def test_an_ended_step_takes_no_call(learner):
    with learner.step() as step:
        step["w"] = ONES
    for call in step.commit, lambda: step.update({"b": ONES}), lambda: step.write("b", ONES):
        with pytest.raises(gradfs.Closed, match="has ended"):
            call()
    step.abort()
    assert step.committed


def test_refusals_carry_the_words_of_error(learner):
    with pytest.raises(gradfs.Refused, match="holds NaN or Inf") as error:
        learner.push({"w": ONES * numpy.nan})
    assert error.value.errno == errno.EINVAL
    assert learner.error in str(error.value)
    learner.push({"w": ONES})
    assert learner.error == ""
    again = pickle.loads(pickle.dumps(error.value))
    assert (type(again), str(again), again.errno) == (gradfs.Refused, str(error.value), errno.EINVAL)


def test_two_threads_have_one_step_of_a_learner_at_a_time(learner):
    results = []

    def other():
        try:
            learner.step()
        except gradfs.Busy as error:
            results.append(error.errno)

    with learner.step() as step:
        step["w"] = ONES
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert results == [errno.EBUSY]
    learner.push({"w": ONES})
    assert weights_of(learner)["w"] == [[2] * 3] * 2


def test_threads_may_write_one_step_together(learner):
    with learner.step() as step:
        threads = [threading.Thread(target=step.write, args=("w", ONES[0, :1], at)) for at in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert weights_of(learner)["w"] == [[1] * 3] * 2


def test_a_step_that_nobody_ends_is_taken_back(model, learner):
    step = learner.step()
    step["w"] = ONES
    del step
    learner.push({"b": numpy.ones(4, "f4")})
    assert weights_of(learner) == {"w": [[0] * 3] * 2, "b": [1] * 4, "h": [0, 0]}
    assert model.version == 1


def test_a_wait_that_is_too_long_is_a_timeout_and_can_be_repeated(model):
    model.control["learners"] = 2
    with model.join() as one, model.join() as other:
        model.control["timeout"] = 0.2
        one.push({"w": ONES})
        with pytest.raises(gradfs.Timeout) as error:
            one.pull()
        assert error.value.errno == errno.ETIMEDOUT
        # Elsewhere it may not be known yet whose contribution lacks.
        assert other.name in str(error.value) or "other learners" in str(error.value)
        # A step ahead waits for the one before, and is taken back.
        with pytest.raises(gradfs.Timeout):
            one.push({"b": numpy.ones(4, "f4")})
        other.push({"w": ONES})
        assert weights_of(one) == {"w": [[2] * 3] * 2, "b": [0] * 4, "h": [0, 0]}


def test_a_stopped_job_says_so(model):
    model.control.update(learners=2, min_learners=2)
    with model.join() as one:
        with model.join() as other:
            one.push({"w": ONES})
            other.push({"w": ONES})
        with pytest.raises(gradfs.Stopped, match="min_learners"):
            one.push({"w": ONES})


def test_many_tensors_in_any_order_go_to_their_places(start):
    values = {f"t{n}": numpy.full(n % 7, n, "f4") for n in range(3000)}
    model = gradfs.open(start({name: numpy.zeros_like(value) for name, value in values.items()}, "--reducer", "sum"))
    with model.join() as learner:
        learner.push(dict(reversed(values.items())))
        with learner.pull() as weights:
            assert all((weights[name].numpy() == value).all() for name, value in values.items())


def test_large_tensors_arrive_whole(start):
    value = numpy.arange(5 << 20, dtype="f4")
    model = gradfs.open(start({"a": numpy.zeros(3, "f4"), "w": numpy.zeros_like(value)}, "--reducer", "sum"))
    with model.join() as learner:
        learner.push({"w": value})
        out = {"w": numpy.empty_like(value)}
        assert learner.pull(out=out) == 1
    assert (out["w"] == value).all()


def test_publish_makes_new_weights(start):
    model = gradfs.open(start({"w": numpy.zeros(3, "f4"), "b": numpy.zeros(2, "f4")}, "--reducer", "assign"))
    assert model.publish({"w": numpy.ones(3, "f4"), "b": numpy.ones(2, "f2")}) == 1
    assert gradfs.publish(model.path, {"w": numpy.ones(3, "f4"), "b": numpy.full(2, 2, "f4")}) == 2
    assert weights_of(model) == {"w": [1] * 3, "b": [2, 2]}


def test_publish_takes_all_tensors_or_nothing(start):
    model = gradfs.open(start({"w": numpy.zeros(3, "f4"), "b": numpy.zeros(2, "f4")}, "--reducer", "assign"))
    with pytest.raises(gradfs.Refused, match="missing: b"):
        model.publish({"w": numpy.ones(3, "f4")})
    with pytest.raises(gradfs.Refused, match="NaN"):
        model.publish({"w": numpy.ones(3, "f4"), "b": numpy.full(2, numpy.nan, "f4")})
    assert model.version == 0 and weights_of(model) == {"w": [0] * 3, "b": [0, 0]}


def test_publish_says_why_weights_are_read_only(model, learner):
    learner.push({"w": ONES})
    values = {"w": ONES, "b": numpy.ones(4, "f4"), "h": numpy.ones(2, "f2")}
    with pytest.raises(gradfs.Refused, match="read-only at version 1 with reducer sum") as error:
        model.publish(values)
    assert error.value.errno == errno.EACCES


def test_publish_says_something_of_the_version(start):
    model = gradfs.open(start({"w": numpy.zeros(3, "f4")}, "--reducer", "assign"))
    with model.pull() as before:
        assert before.meta == {}
        assert model.publish({"w": numpy.ones(3, "f4")}, meta={"step": "1", "hash": "ä"}) == 1
        assert gradfs.publish(model.path, {"w": numpy.full(3, 2, "f4")}) == 2
        # Without a mount, that was another client: this one may hear of the version a little later.
        assert model.wait(newer_than=1, timeout=HANGS) == 2
        assert before.meta == {} and model.pull().meta == {}, "it belongs to one version"
    model.publish({"w": numpy.ones(3, "f4")}, meta={"step": "3"})
    versions = gradfs.follow(model.path)
    weights = next(versions)
    assert weights.epoch == model.pull().epoch > 0
    assert (weights.version, weights.meta) == (3, {"step": "3"})
    model.publish({"w": numpy.ones(3, "f4")})
    assert next(versions).meta == {} and weights.meta == {"step": "3"}


@pytest.mark.parametrize(
    ("meta", "words"),
    [({"step": 1}, "'step' is none"), ({"gradfs.x": "1"}, "no name"), ({"long": "x" * 4096}, "4100 bytes"), ({"z": "\0"}, "zero"), ({"n" * 251: "1"}, "no name"),
     ({"long": "x" * 70_000}, "70004 bytes"), ({"u": "\udc80"}, "no UTF-8"), ({"": "1"}, "no name")],
)
def test_publish_refuses_metadata_that_cannot_be_kept(start, meta, words):
    model = gradfs.open(start({"w": numpy.zeros(3, "f4")}, "--reducer", "assign"))
    with pytest.raises(gradfs.Refused, match=words):
        model.publish({"w": numpy.ones(3, "f4")}, meta=meta)
    assert model.version == 0
