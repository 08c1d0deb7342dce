"""What scripts/bench says with --against: ratios, intervals and the mean (scripts/lib/bench/against.py)."""

import sys

import pytest
from conftest import REPOSITORY, ran

# At the end: what the tests call by the same name is theirs.
sys.path.append(str(REPOSITORY / "scripts/lib"))

from bench.against import COMMIT_TARGET, PASSES, TARGET, Comparison, joined, middle, report  # noqa: E402
from machine import Failed  # noqa: E402
from report import Figure  # noqa: E402

SLOW = [2.0, 2.2, 1.8, 2.0, 2.1, 1.9, 2.0]
FAST = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0]


def compared(names, new, old, **options):
    """Of passes with one number each."""
    return Comparison(names, [[value] for value in new], [[value] for value in old], str, **options)


def figure(new, old, **options):
    return compared(["a"], new, old, **options).figures()[0]


def test_a_figure_is_the_ratio_in_favour_of_the_new_binary_with_its_interval():
    assert figure(FAST, SLOW, less=True).value == pytest.approx(2) and figure(FAST, SLOW, less=False).value == pytest.approx(0.5)
    clear, noisy, same = figure(FAST, SLOW), figure(FAST, [0.5, 2, 1, 3, 0.6, 1, 0.7]), figure(FAST, list(FAST))
    assert 1.5 < clear.low <= clear.value <= clear.high < 2.5 and noisy.low < 1 < noisy.high
    assert same.value == same.low == same.high == 1
    drift = [1, 2, 4, 8, 16, 32, 64]
    assert figure([2 * value for value in drift], drift).high == pytest.approx(0.5), "what hits both is left out"


def test_a_difference_is_new_minus_old_of_all_numbers_of_the_passes():
    passes = [[5.0, 100.0, 6.0]] * 7, [[1.0, 2.0, 3.0]] * 7
    (found,) = Comparison(["a"], *passes, str, difference=True, unit="us").figures()
    assert (found.ours, found.other) == ("6.0", "2.0")
    assert (found.value, found.unit, found.target, found.op) == (4, "us", COMMIT_TARGET, "<=")


def test_the_mean_counts_what_was_measured_once_and_no_difference(capsys):
    comparisons = [compared(["a", "b"], FAST, SLOW), compared(["c"], SLOW, FAST), compared(["d"], FAST, FAST)]
    comparisons.append(compared(["e"], SLOW, FAST, difference=True, unit="us"))
    found = {figure.name: figure for figure in report("all_vs_old", comparisons)}
    assert list(found) == ["a_vs_old", "b_vs_old", "c_vs_old", "d_vs_old", "e_vs_old", "all_vs_old"]
    mean = found["all_vs_old"]
    assert mean.value == pytest.approx(1) and mean.low <= 1 <= mean.high
    assert (mean.target, mean.op) == (TARGET, ">=")
    assert "all_vs_old" in capsys.readouterr().out
    assert report("all_vs_old", [compared(["a"], SLOW, FAST)])[1].verdict() == "MISS"


@pytest.mark.parametrize("sides", [(FAST[1:], SLOW[1:]), (FAST, SLOW * 2)])
def test_too_few_passes_are_refused(sides):
    with pytest.raises(Failed, match=f"not {PASSES}"):
        compared(["a"], *sides)


def test_passes_are_joined_by_figure():
    rates = (["c"], {"new": [2], "old": [1]}, str, {"less": False})
    passes = [[(["a", "b"], {"new": [n, n], "old": [2 * n, 2 * n]}, str, {}), rates] for n in range(1, 8)]
    first, second = joined(passes)
    assert first.names == ["a", "b"] and first.value == 2 and first.new[2] == [3, 3]
    assert second.value == 2


def test_the_figures_of_passes_are_those_of_the_median():
    passes = [[Figure("a", value, "ratio", ours=str(value)), Figure("b", -value, "ratio")] for value in (3, 1, 2)]
    assert [(found.name, found.value, found.ours) for found in middle(passes)] == [("a", 2, "2"), ("b", -2, "")]


@pytest.mark.parametrize("script, binary, why", [("bench", "/gone", "No such file"), ("bench-net", "/bin/false", "does not tell its version")])
def test_a_binary_that_is_none_ends_the_run(script, binary, why, tmp_path):
    # Nothing is built for it, and nothing is measured.
    for name in ("dist/gradfs", "dist/examples/bench_sink", "dist/examples/bench_learner"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    only = "list" if script == "bench" else "gradfs"
    command = [REPOSITORY / "scripts" / script, "--no-build", "--only", only, "--against", binary]
    done = ran(command, env={"CARGO_TARGET_DIR": str(tmp_path)})
    assert done.returncode == 1 and f"--against {binary}" in done.stderr and why in done.stderr, done.stderr
