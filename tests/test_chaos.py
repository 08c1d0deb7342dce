"""Random harm to a cluster that trains (scripts/chaos): a minute of it, and whether the checker finds what is wrong."""

import errno
import itertools
import json

import pytest
from buckets import needed
from chaos.checker import RESERVED, Checker, TooFew, Wrong
from chaos.run import Options, chaos
from conftest import REPOSITORY, ran

SEED, MINUTES = 1, 1


def test_a_job_lives_through_a_minute_of_random_harm(tmp_path):
    said, figures = [], tmp_path / "figures.json"
    assert chaos(Options(MINUTES, SEED, json=figures), said.append) == 0, "\n".join(said)
    print("\n".join(said))
    recovery, harms = json.loads(figures.read_text())
    assert recovery["name"] == "recovery_seconds" and (recovery["target"], recovery["op"]) == (10, "<=")
    assert harms["value"] >= 1 and f"--seed {SEED}" in said[0]


def test_a_job_lives_through_harm_to_its_bucket():
    needed()
    said = []
    assert chaos(Options(0.2, SEED, store="s3", only=("bucket",)), said.append) == 0, "\n".join(said)


def test_a_kind_of_harm_that_is_none_is_refused():
    done = ran([REPOSITORY / "scripts/chaos", "--only", "thunder"])
    assert done.returncode == 2 and "thunder" in done.stderr


class Story:
    """What happens to a checker, one thing after the other."""

    def __init__(self):
        self.checker, self._clock = Checker(), itertools.count(1)

    def tell(self, do, who="a", mount="one", **more):
        at = next(self._clock)
        self.checker.take({"do": do, "who": who, "mount": mount, "t0": at, "t1": at + 0.5, **more})

    def sees(self, version, low, high=None, **of):
        self.tell("see", version=version, low=low, high=low if high is None else high, **of)

    def step(self, version=None, number=None, trouble=0, **of):
        self.tell("try", **of)
        self.tell("give", errno=trouble, **of)
        if version is not None:
            self.sees(version, number, **of)

    def durable(self, version, **of):
        self.tell("number", what="durable_version", value=version, **of)


@pytest.fixture
def story():
    """A learner has made one step."""
    story = Story()
    story.sees(0, 0)
    story.step(1, 1)
    return story


def test_the_checker_takes_what_is_right(story):
    story.step(3, 2, who="b", mount="two")
    story.step(trouble=errno.ETIMEDOUT, who="c")
    assert story.checker.settle(3) == (2, 1)
    story.step(4, 3)
    assert story.checker.settle(4) == (3, 0)


def test_the_checker_finds_what_counts_twice(story):
    story.step(2, 3)
    with pytest.raises(Wrong, match="counts twice"):
        story.checker.settle(2)


def test_the_checker_finds_what_is_counted_twice_after_it_settled(story):
    story.step(trouble=errno.ETIMEDOUT)
    story.sees(1, 1)
    assert story.checker.settle(1) == (1, 1)
    story.step(2, 3)
    with pytest.raises(Wrong, match="counts twice"):
        story.checker.check()


def test_the_checker_finds_what_was_acknowledged_and_is_missing(story):
    story.step(2, 1)
    with pytest.raises(TooFew):
        story.checker.check()


def test_the_checker_finds_what_is_missing_in_the_end(story):
    story.step(who="b")
    with pytest.raises(TooFew):
        story.checker.settle(1)


def test_the_checker_finds_a_torn_read(story):
    with pytest.raises(Wrong, match="torn"):
        story.sees(2, 1, 2)


def test_the_checker_finds_a_number_with_two_contents(story):
    with pytest.raises(Wrong, match="two contents"):
        story.sees(1, 2, mount="two")


def test_the_checker_finds_a_version_that_goes_back(story):
    story.sees(0, 0, mount="two")
    with pytest.raises(Wrong, match="went back from 1 to 0"):
        story.sees(0, 0)


def test_the_checker_finds_a_durable_version_that_goes_back(story):
    story.durable(1)
    with pytest.raises(Wrong, match="durable_version on one went back"):
        story.durable(-1)


def test_the_checker_finds_an_errno_that_none_expects(story):
    with pytest.raises(Wrong, match="EIO"):
        story.step(trouble=errno.EIO)


def restored(story, snapshot):
    """Another life, from a snapshot, and a step there."""
    story.checker.restored(2 * RESERVED, snapshot)
    story.step(trouble=errno.ENOTCONN)
    story.sees(2 * RESERVED, snapshot)
    story.step(2 * RESERVED + 1, snapshot + 1)


def test_the_checker_takes_a_restoration_that_undoes_what_was_not_durable(story):
    story.durable(1)
    story.step(2, 2)
    restored(story, 1)
    assert story.checker.settle(2 * RESERVED + 1) == (2, 1)


def test_the_checker_finds_a_restoration_that_undoes_what_was_durable(story):
    story.step(2, 2)
    story.durable(2)
    restored(story, 1)
    with pytest.raises(Wrong, match="version 2 was durable"):
        story.checker.check()


def test_the_checker_takes_an_older_snapshot_where_the_newest_is_damaged(story):
    story.step(2, 2)
    story.durable(2)
    story.checker.damaged(1)
    restored(story, 1)
    assert story.checker.settle(2 * RESERVED + 1) == (2, 1)


def test_the_checker_finds_another_content_than_that_of_the_snapshot(story):
    story.step(2, 2)
    story.durable(2)
    story.checker.restored(2 * RESERVED, 2)
    story.step(trouble=errno.ENOTCONN)
    story.sees(2 * RESERVED, 1)
    with pytest.raises(TooFew):
        story.checker.check()
