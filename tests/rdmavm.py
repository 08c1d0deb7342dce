"""For tests that need RDMA: scripts run in virtual machines that have it in software (scripts/rdma-vm).

    from rdmavm import vm  # noqa: F401

    pytestmark = pytest.mark.rdma_vm

    def test_something(vm):
        done = vm.run("ibv_devices", provider="siw")
        assert done.code == 0 and "siw0" in done.out, done

        done = vm.run('''
            case $HOST_NAME in
            a) rping -s -a a -C 1 & listening; meet rping; wait $! ;;
            b) meet rping; rping -c -a a -C 1 ;;
            esac
        ''', two=True)
        assert done.code == 0 and done.of["b"].err == "", done

A script is bash, runs as root in the folder and with the environment of the tests, and may run a second time if its
machine has crashed; what is kept is said by the last try. `scripts/rdma-vm --help` tells what it finds there. What was
built on this machine runs in the guest: `{gradfs_binary()}` is its path there, too. Machines stay up for the next script of
their kind, which finds no trace of the one before.

Setting up takes a minute and downloads, once. Where that cannot be had, these tests are skipped with the reason.
"""

import contextlib
import io
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPOSITORY

# Behind the tests' own modules, some of which have the same names.
sys.path += [str(REPOSITORY / "scripts/lib/rdma-vm"), str(REPOSITORY / "scripts/lib")]

import image  # noqa: E402
import runner  # noqa: E402
from guest import Settings  # noqa: E402

SCRIPT = REPOSITORY / "scripts/rdma-vm"
CANNOT_BE_HAD = 77
OUT_OF_TIME = 124
CRASHED = 125

SETUP_DEADLINE = 1800
# A script that is not over by then hangs, however busy the machine is.
HANGS = 1800


@dataclass(frozen=True)
class Said:
    """What a host has said on its standard output and error."""

    out: str
    err: str


@dataclass(frozen=True)
class Outcome:
    """How it went.

    code    exit status; of two hosts that of the first one that failed
    of      what each host has said, by its name
    notes   what was said of the machines themselves
    """

    code: int
    of: dict
    notes: str

    @property
    def out(self):
        """The standard output of host a, which may be the only one."""
        return self.of["a"].out

    @property
    def err(self):
        return self.of["a"].err

    def __str__(self):
        parts = [f"exit status {self.code}", self.notes]
        for name, said in self.of.items():
            parts += [f"-- {name}, output", said.out, f"-- {name}, errors", said.err]
        return "\n".join(part for part in parts if part)


both_providers = pytest.mark.parametrize("provider", ["rxe", "siw"])
# What scripts/test runs without --all-rdma-vm.
few = pytest.mark.rdma_vm_few
both_but_few_by_rxe = pytest.mark.parametrize("provider", [pytest.param("rxe", marks=few), "siw"])


def lasts(seconds):
    """Marks a test that takes long, so that it begins early and several workers end at the same time (conftest.py)."""
    return pytest.mark.rdma_vm(seconds=seconds)


class Machines:
    """Virtual machines, as many as one asks for and one after the other."""

    def __init__(self, pool):
        self._pool = pool

    def run(self, script, two=False, provider="rxe", time_limit=HANGS, share=None):
        """Runs `script` in a machine, or in two at the same time; gives the Outcome.

        provider    rxe, siw, or none
        time_limit  seconds from when all are up; exceeded is status 124
        share       folder whose content is in /share in all machines, and which has what is there in the end
        """
        # An emulated CPU waits for the other one at each change of a page table: one does the same in 40% less time.
        settings = Settings(provider, cpus=1)
        with tempfile.TemporaryDirectory(prefix="gradfs-test-vm-") as scratch, io.StringIO() as notes:
            wish = runner.Wish(["bash", "-c", script], two, time_limit, Path(scratch), settings=settings)
            with contextlib.redirect_stderr(notes):
                code = self._pool.run(wish, share)
            of = {}
            for name in ("a", "b") if two else ("a",):
                files = [Path(scratch) / f"{name}.{stream}" for stream in ("out", "err")]
                of[name] = Said(*(file.read_text(errors="replace") for file in files))
            outcome = Outcome(code, of, notes.getvalue())
        if code == CRASHED:
            pytest.fail(f"no virtual machine, which tells nothing of what was tested:\n{outcome.notes}", pytrace=False)
        return outcome


@pytest.fixture(scope="session")
def vm():
    """Virtual machines; sets them up where they are not yet."""
    done = subprocess.run(
        [SCRIPT, "setup"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SETUP_DEADLINE, check=False
    )
    if done.returncode == CANNOT_BE_HAD:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    with runner.Pool(image.current()) as pool:
        yield Machines(pool)
