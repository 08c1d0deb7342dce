"""cargo's tests of RDMA with a device under them, in virtual machines (scripts/rdma-vm): the transport by itself, shards
and clients over it, and the suite that all channels pass. On hosts without a device cargo passes them over.

Skipped with the reason where such machines cannot be had, or RDMA's libraries.
"""

import json
import os
import re
import shutil
import subprocess

import pytest
from conftest import REPOSITORY
from rdmavm import both_providers, few, lasts, vm  # noqa: F401

pytestmark = pytest.mark.rdma_vm

# Connections that come and go.
TIMES = int(os.environ.get("GRADFS_RDMA_TIMES", 300))
ON_RXE = "rdma:: liars:: payload:: pinned:: strangers:: unchanged::"
CONFORM = "rdma::flags placed::steps placed::rounds"
AHEAD = "ahead::blocks ahead::dropped ahead::the_others ahead::new"
TARGETS = ["conformance", "network", "rdma"]
BUILD_DEADLINE = 1800


@pytest.fixture(scope="module")
def programs():
    """The test programs, by name, as `scripts/test` builds them."""
    cargo = shutil.which("cargo") or os.path.expanduser("~/.cargo/bin/cargo")
    # The same features as there: with fewer, everything would be built again.
    words = [cargo, "test", "--workspace", "--locked", "--features", "fs-daemon/rdma,fs-daemon/cuda", "--no-run"]
    words += ["--message-format", "json"]
    done = subprocess.run(
        words, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_DEADLINE, check=False
    )
    if done.returncode and "libibverbs" in done.stderr and "pkg-config" in done.stderr:
        pytest.skip("RDMA's libraries are missing: scripts/setup rdma")
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {one["target"]["name"]: one["executable"] for one in told if one.get("executable")}
    assert set(TARGETS) <= set(found), found
    return found


def passed(vm, provider, script):  # noqa: F811
    """How many tests went well; all of them must."""
    done = vm.run("export GRADFS_RDMA_ADDRESS=$HOST_ADDRESS\n" + script, provider=provider)
    assert done.code == 0, str(done)
    assert "skipped:" not in done.err, str(done)
    summaries = re.findall(r"^test result: ok\. (\d+) passed; 0 failed", done.out, re.MULTILINE)
    return [int(count) for count in summaries], done


@pytest.mark.parametrize(
    ("provider", "some", "least"),
    [
        pytest.param("rxe", f"--test-threads 2 {ON_RXE} {AHEAD}", 38, marks=lasts(160)),
        # What takes longest here and differs least from what runs without a device.
        ("rxe", "--test-threads 2 lent::mapped ahead::a_slow", 3),
        # siw now and then refuses queue pairs for seconds (EINVAL) when two of its users in one process begin at once.
        pytest.param("siw", "--test-threads 1 sums blocks_are granted_slots fetches_blocks payload::by", 6, marks=lasts(20)),
        (
            "siw",
            "--test-threads 1 flags hostile ends_silently arena_is_full fixed_order payload::the pinned:: strangers::"
            " unchanged::",
            14,
        ),
    ],
    ids=["rxe", "rxe-rest", "siw", "siw-rest"],
)
def test_the_transport_over_a_device(vm, programs, provider, some, least):  # noqa: F811
    """Lines and their settings, and shards and clients that use them in every way."""
    script = f"""
        {programs["rdma"]} --test-threads 1 || exit 3
        {programs["network"]} {some} --skip come_and_go || exit 4
    """
    [transport, network], _ = passed(vm, provider, script)
    assert transport >= 8 and network >= least


@both_providers
@lasts(seconds=30)
def test_many_connections_come_and_go_and_leave_nothing(vm, programs, provider):  # noqa: F811
    """No queue pair, registration, completion queue, protection domain, shared receive queue or identifier of rdma_cm, no
    page that is pinned, no descriptor: the program looks before and after (`clients_that_come_and_go_leave_nothing`)."""
    script = f"GRADFS_RDMA_TIMES={TIMES} {programs['network']} --exact --nocapture rdma::clients_that_come_and_go_leave_nothing"
    [count], done = passed(vm, provider, script)
    assert count == 1 and f"{TIMES} connections in " in done.err, str(done)


@pytest.mark.parametrize(
    ("provider", "some", "least"),
    [
        pytest.param("rxe", f"--test-threads 2 {CONFORM}", 23, marks=few),
        ("rxe", "--test-threads 2 rdma::placed rdma::fetched", 62),
        ("siw", "--test-threads 1 rdma", 71),
    ],
    ids=["rxe", "rxe-rest", "siw"],
)
@lasts(seconds=100)
def test_channels_by_rdma_conform(vm, programs, provider, some, least):  # noqa: F811
    """The suite that runs unchanged over channels in process, through shared memory and by TCP."""
    [count], _ = passed(vm, provider, f"{programs['conformance']} {some}")
    assert count >= least
