"""What all suites of scripts/bench share: the command line, binaries, a place to work, and the report.

A suite is a module with `run(bench)`, which gives its figures. It may have PARTS (for --only), CHART (help of --chart),
AGAINST (the name of the mean against an older binary), `options(parser)`, and `check(parser, options)`.
"""

import argparse
import os
import platform
import tempfile
from contextlib import ExitStack
from pathlib import Path

from machine import GIB, build, existing, main, require_fuse, say, warn_if_busy
from report import print_figures, write_json

from bench.against import PASSES, Comparison, report

QUICK = "less of everything: below 45 s once it is built"


class Bench:
    """A run of a suite: what was asked for, and what it starts. All of it ends with `stack`."""

    def __init__(self, stack, options):
        self.stack, self.options = stack, options
        self.quick, self.only = options.quick, getattr(options, "only", None)
        self.chart = getattr(options, "chart", None)
        self.against = getattr(options, "against", None)
        self.passes = PASSES if self.against else 1
        self.comparisons, self.only_look = [], options.no_build
        # A directory that goes away in the end.
        made = tempfile.TemporaryDirectory(prefix="gradfs-bench-", ignore_cleanup_errors=True)
        self.work = Path(stack.enter_context(made))

    def binaries(self, *names):
        """Paths of what machine.build knows; of --binary, and what lies beside it."""
        if not self.options.binary:
            return build(*names, only_look=self.only_look)
        of = self.options.binary.resolve()
        return existing([of if name == "gradfs" else of.parent / "examples" / name for name in names])

    def gradfs(self, *examples):
        """The same for what is mounted."""
        require_fuse()
        found = self.binaries("gradfs", *examples)
        return found if examples else found[0]

    def compare(self, names, new, old, words, **options):
        """Notes what the passes of both sides found, as Comparison has it."""
        self.comparisons.append(Comparison(names, new, old, words, **options))

    def chart_path(self, name):
        """Where a chart goes, without its end."""
        self.chart.mkdir(parents=True, exist_ok=True)
        return self.chart / name


def machine_words():
    """What the figures are of."""
    with open("/proc/cpuinfo") as lines:
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return f"{model}, {os.cpu_count()} CPUs, {memory:.0f} GiB, Linux {platform.release()}"


def arguments(name, suite, words):
    """The command line."""
    parser = argparse.ArgumentParser(
        f"scripts/bench {name}", description=suite.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip

    def path(option, metavar, help):
        parser.add_argument(option, metavar=metavar, type=Path, help=help)

    parser.add_argument("--quick", action="store_true", help=getattr(suite, "QUICK", QUICK))
    path("--json", "FILE", "write the figures there as well")
    parts = getattr(suite, "PARTS", None)
    if parts:
        parser.add_argument("--only", metavar="PARTS", help=f"some of: {','.join(parts)}")
    if hasattr(suite, "AGAINST"):
        path("--against", "BINARY", "an older gradfs, measured in turn with this one")
    if hasattr(suite, "CHART"):
        path("--chart", "DIR", suite.CHART)
    path("--binary", "FILE", "this gradfs, and examples/ beside it; gradfs is not built")
    parser.add_argument("--no-build", action="store_true", help="use the binaries that are there")
    if hasattr(suite, "options"):
        suite.options(parser)
    options = parser.parse_args(words)
    if parts:
        usual = getattr(suite, "USUAL", {}).get(options.quick, parts)
        options.chosen = bool(options.only)
        options.only = set(options.only.split(",") if options.only else usual)
        if unknown := options.only - set(parts):
            parser.error(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    if options.binary and not options.binary.is_file():
        parser.error(f"--binary {options.binary}: no such file")
    if hasattr(suite, "check"):
        suite.check(parser, options)
    return options


def start(name, suite, words):
    """Runs a suite; the exit status."""
    options = arguments(name, suite, words)

    def run():
        say(machine_words())
        warn_if_busy()
        with ExitStack() as stack:
            bench = Bench(stack, options)
            figures = suite.run(bench)
        if shown := [figure for figure in figures if figure.ours or figure.target or figure.unit in ("ratio", "models")]:
            print()
            print_figures(shown)
        if bench.comparisons:
            print()
            figures += report(suite.AGAINST, bench.comparisons)
        if options.json:
            write_json(options.json, figures)

    return main(f"scripts/bench {name}", run)
