from __future__ import annotations

import errno

import numpy
import pytest

import gradfs


@pytest.fixture
def control(start):
    return gradfs.open(start({"w": numpy.zeros(3, "f4"), "b": numpy.zeros(2, "f4")}, "--reducer", "sgd")).control


def test_settings_read_as_text_and_are_written_as_the_files_want_them(control):
    control["learning_rate"] = 1e-8
    assert float(control["learning_rate"]) == 1e-8
    control["learning_rate"] = numpy.float32(0.5)
    assert control["learning_rate"] == "0.5"
    control["deterministic"] = True
    assert control["deterministic"] == "true"
    control["consistency"] = "sync"
    control["learners"] = 3
    assert control["learners"] == "3"
    control["tensors"] = ["w weight_decay=0", "b frozen"]
    assert control["tensors"] == "w weight_decay=0\nb frozen"
    control["tensors"] = []
    control["frozen"] = ""
    assert control["tensors"] == control["frozen"] == ""


def test_control_is_a_mapping_of_the_files(control):
    assert len(control) == len(list(control)) > 30
    assert "reducer" in control and "nothing" not in control
    assert control.get("nothing") is None
    assert dict(control)["reducer"] == "sgd"


def test_a_wrong_value_is_refused_with_words_and_changes_nothing(control):
    for value in "abc", -1, float("nan"), "":
        with pytest.raises(gradfs.Refused, match="control/learning_rate = .*is not a finite number >= 0") as error:
            control["learning_rate"] = value
        assert error.value.errno == errno.EINVAL
    assert control["learning_rate"] == "0.001"


def test_an_unknown_setting_is_a_key_error_with_the_nearest_name(control):
    for use in (
        lambda: control["learning_rat"],
        lambda: control.update(learning_rat=1),
        lambda: control.__setitem__("learning_rat", 1),
    ):
        with pytest.raises(KeyError, match="did you mean 'learning_rate'"):
            use()
    with pytest.raises(KeyError, match="there is no setting '../version'"):
        control["../version"] = 1


def test_a_setting_cannot_be_deleted(control):
    for delete in lambda: control.pop("reducer"), control.clear:
        with pytest.raises(TypeError, match="cannot be deleted"):
            delete()


def test_update_takes_settings_that_depend_on_each_other_in_any_order(control):
    control.update({"min_learners": 3, "learners": 4, "staleness_aware": True, "consistency": "async"})
    assert (control["min_learners"], control["staleness_aware"]) == ("3", "true")


def test_update_takes_what_each_setting_takes(control):
    lines = ["b*"] * 20_000
    control.update(frozen=lines)
    assert control["frozen"].splitlines() == lines
    with pytest.raises(gradfs.Refused) as error:
        control.update(frozen=lines, learning_rate="x" * 5000)
    assert len(str(error.value)) < 1000


def test_update_sets_what_is_given_and_not_the_reducers_defaults(control):
    control.update(weight_decay=0, reducer="adamw", epsilon=1e-8)
    assert (control["reducer"], control["weight_decay"]) == ("adamw", "0")
    control.update(reducer="sgd")
    control.update(reducer="adamw")
    assert control["weight_decay"] == "0.01"


def test_a_refused_update_names_the_setting_and_changes_nothing(control):
    before = dict(control)
    with pytest.raises(gradfs.Refused, match="momentum.*0 to 1") as error:
        control.update(learning_rate=0.5, reducer="momentum", learners=2, momentum=2)
    assert error.value.errno == errno.EINVAL
    with pytest.raises(gradfs.Refused, match="min_learners"):
        control.update(learning_rate=0.5, min_learners=9)
    assert dict(control) == before


def test_settings_of_a_dead_mount_are_not_mounted(control, tmp_path):
    gone = gradfs.model.Control(gradfs.places.Files(), str(tmp_path / "nothing"))
    with pytest.raises(gradfs.NotMounted):
        list(gone)
