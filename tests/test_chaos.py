"""Random harm to a cluster that trains (scripts/chaos): a minute of it, and whether the checker finds what is wrong."""

import errno
import itertools
import json
import os

import buckets
import etcd
import pytest
from chaos.checker import RESERVED, Checker, TooFew, Wrong
from chaos.harms import KINDS, LISTED, SOON, Harm
from chaos.run import Options, chaos, judge
from conftest import REPOSITORY, ran
from filetools import eventually
from patience import HANGS, Limit

SEED, MINUTES = 15, 1


def lives_through(tmp_path, kinds, minutes=0, **options):
    """A run of harm, of which each of these kinds must be a part. The run itself checks what holds, and the bounds of time."""
    said, file = [], tmp_path / "figures.json"
    assert chaos(Options(minutes, SEED, json=file, **options), said.append) == 0, "\n".join(said)
    print("\n".join(said))
    figures = {figure["name"]: figure for figure in json.loads(file.read_text())}
    assert f"--seed {SEED}" in said[0] and (figures["recovery_seconds"]["target"], SOON) == (10, 10)
    missing = [kind for kind in kinds if f"harms {kind}" not in figures or f"seconds {kind}" not in figures]
    assert not missing, said
    assert figures["harms"]["value"] == sum(figures[f"harms {kind}"]["value"] for kind in kinds)


def test_a_job_lives_through_a_minute_of_random_harm(tmp_path):
    """Harm to links and a small disk take root."""
    there = {None, *(() if os.geteuid() else ("links", "small disk"))}
    lives_through(tmp_path, [kind for kind, (_, _, takes) in KINDS.items() if takes in there], MINUTES)


def test_a_job_lives_through_harm_to_its_bucket(tmp_path):
    buckets.needed()
    only = tuple(f"bucket {how}" for how in ("errs", "throttles", "says too little"))
    lives_through(tmp_path, only, store="s3", only=only)


def test_a_job_lives_through_the_death_of_members_of_its_etcd(tmp_path):
    etcd.needed()
    only = ("registry", "member and coordinator")
    lives_through(tmp_path, only, registry="etcd", only=only)


@pytest.mark.parametrize("seconds, bound", [(0, SOON), (3, 3 + SOON), (15, LISTED + SOON)])
def test_a_run_ends_where_a_job_goes_on_later_than_its_bound(seconds, bound):
    """What is killed, silent for less than its lease, and silent for longer."""
    harm, over = Harm("harm", seconds=seconds), Limit(0)
    judge(harm, bound, over)
    judge(harm, bound + 1, Limit(HANGS))
    eventually(over.over)
    with pytest.raises(Wrong, match=f"{bound:.1f} s are the most"):
        judge(harm, bound + 1, over)


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
