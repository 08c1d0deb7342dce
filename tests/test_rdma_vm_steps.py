"""Steps of a job by RDMA between two hosts, in virtual machines (scripts/rdma-vm): every contribution counts once, also
when the link is down for a while in the middle, or a mount is killed in the middle of a push.

Skipped with the reason where such machines cannot be had, or the build is one without RDMA.
"""

import subprocess
import sys

import numpy as np
import pytest
from cluster import run
from conftest import REPOSITORY, gradfs_binary
from rdmavm import vm  # noqa: F401

pytestmark = pytest.mark.rdma_vm

both_providers = pytest.mark.parametrize("provider", ["rxe", "siw"])

# A learner with the standard library alone: contributes ones, and says what the weights are afterwards.
LEARNER = r"""
import array, os, sys
place, steps = sys.argv[1], int(sys.argv[2])
size = os.stat(place + "/weights").st_size
ones = array.array("f", [1.0]) * (size // 4)
for step in range(steps):
    with open(place + "/gradients", "wb", buffering=0) as file:
        view = memoryview(ones).cast("B")
        while view:
            view = view[file.write(view):]
    with open(place + "/weights", "rb") as file:
        weights = array.array("f", file.read())
    assert set(weights) == {weights[0]}, "torn"
    print(weights[0], flush=True)
"""

BEGIN = """
set -u
gradfs=%s
python=/usr/bin/python3
export GRADFS_REGISTRY=a
waits() { for _ in $(seq 200); do "$@" && return; sleep 0.2; done; echo "waited in vain: $*" >&2; exit 99; }
shard() { # SIZE, and words of create
    env -u GRADFS_REGISTRY $gradfs shard --listen $HOST_ADDRESS --advertise a --rdma on --rdma-port 7171 >/tmp/shard.out 2>/tmp/shard.err &
    shard=$!
    (waits grep -q 'gradfs: ready' /tmp/shard.out) || { cat /tmp/shard.err >&2; exit 99; }
    $gradfs create m --block-size 64KiB "$@" >&2 || exit 3
}
mounted() { # a folder, and --transport
    mkdir -p $1
    $gradfs mount $1 --transport ${2:-rdma} >/tmp/mount.out 2>/tmp/mount.err &
    mount=$!
    waits grep -q 'gradfs: ready' /tmp/mount.out
}
cat >/tmp/learner.py <<'END'
%s
END
"""


@pytest.fixture(scope="module", autouse=True)
def with_rdma():
    if "built without RDMA" in run("rdma", "devices").stderr:
        pytest.skip("this gradfs was built without RDMA")


def begin():
    return BEGIN % (gradfs_binary(), LEARNER)


@both_providers
def test_steps_between_two_hosts_count_once(vm, provider):  # noqa: F811
    done = vm.run(
        begin()
        + """
        case $HOST_NAME in
        a) shard --size 1000004 --reducer sum; meet shard; meet over; kill $shard; wait $shard || exit 4 ;;
        b)
            meet shard; mounted /tmp/mnt
            $python /tmp/learner.py /tmp/mnt/m 4 || exit 5
            $gradfs unmount /tmp/mnt || exit 6
            meet over ;;
        esac
        """,
        two=True,
        provider=provider,
        time_limit=240,
    )
    assert done.code == 0, done
    assert [float(line) for line in done.of["b"].out.split()] == [1, 2, 3, 4], done


def test_a_link_that_is_down_for_a_while_costs_no_step(vm):  # noqa: F811
    """Five seconds in the middle of a step: longer than packets are sent again, so that the queue pairs break."""
    done = vm.run(
        begin()
        + """
        case $HOST_NAME in
        a) shard --size 1000004 --reducer sum --timeout 60; meet shard; meet over; kill $shard; wait $shard || exit 4 ;;
        b)
            meet shard; mounted /tmp/mnt
            $python /tmp/learner.py /tmp/mnt/m 8 >/tmp/steps 2>/tmp/steps.err &
            learner=$!
            waits test -s /tmp/steps
            ip link set eth0 down; sleep 5; ip link set eth0 up
            wait $learner || { cat /tmp/steps.err >&2; exit 5; }
            cat /tmp/steps
            cat /tmp/mount.err >&2
            $gradfs unmount /tmp/mnt || exit 6
            meet over ;;
        esac
        """,
        two=True,
        provider="rxe",
        time_limit=300,
    )
    assert done.code == 0, done
    assert [float(line) for line in done.of["b"].out.split()] == [1, 2, 3, 4, 5, 6, 7, 8], done


def test_a_mount_that_is_killed_in_a_push_leaves_no_part_of_it(vm):  # noqa: F811
    done = vm.run(
        begin()
        + """
        case $HOST_NAME in
        a)
            shard --size 4MiB --reducer sum --lease 1 --timeout 60; meet shard; meet killed; meet over
            rdma resource show qp | grep -c 'pid .*gradfs\\|comm gradfs' >&2
            kill $shard; wait $shard || exit 4 ;;
        b)
            meet shard; mounted /tmp/mnt
            $python /tmp/learner.py /tmp/mnt/m 1 || exit 5
            $python /tmp/learner.py /tmp/mnt/m 100 >/tmp/steps 2>/dev/null &
            waits test -s /tmp/steps
            kill -9 $mount; meet killed
            umount -l /tmp/mnt
            mounted /tmp/again
            $python /tmp/learner.py /tmp/again/m 2 || exit 7
            echo "$(wc -l </tmp/steps)"
            $gradfs unmount /tmp/again || exit 6
            meet over ;;
        esac
        """,
        two=True,
        provider="rxe",
        time_limit=300,
    )
    assert done.code == 0, done
    first, *after, told = [float(line) for line in done.of["b"].out.split()]
    # What was taken before the mount died counts, whether it was told or not; the rest does not, nor any half of it.
    assert first == 1 and after[1] == after[0] + 1 and told + 2 <= after[0] <= told + 3, done


def test_digits_are_learned_on_two_hosts(vm, tmp_path):  # noqa: F811
    """A learner on each host, one beside the shard and one that has it by RDMA: what is learned is what one process
    learns alone, within rounding."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    np.savez(tmp_path / "digits.npz", images=images, labels=labels)
    model = tmp_path / "m.safetensors"
    make = [sys.executable, REPOSITORY / "examples/make_digits_model.py", model, "--hidden", "256"]
    subprocess.run(make, check=True, capture_output=True, timeout=60)
    job = "--learners 2 --epochs 5 --lr 0.3"
    done = vm.run(
        begin()
        + f"""
        export DIGITS_NPZ=/share/digits.npz
        work() {{ {sys.executable} {REPOSITORY}/scripts/lib/netns_work.py "$@"; }}
        case $HOST_NAME in
        a)
            shard --model /share/m.safetensors --reducer sgd --learning-rate 0.3 --learners 2 --timeout 60
            meet shard; mounted /tmp/mnt auto
            work /tmp/mnt/m digits --rank 0 {job} || exit 5
            meet learned; meet over
            $gradfs unmount /tmp/mnt || exit 6
            kill $shard; wait $shard || exit 4 ;;
        b)
            meet shard; mounted /tmp/mnt rdma
            work /tmp/mnt/m digits --rank 1 {job} || exit 5
            meet learned
            work /tmp/mnt/m digits-check --initial /share/m.safetensors {job} || exit 7
            $gradfs unmount /tmp/mnt || exit 6
            meet over ;;
        esac
        """,
        two=True,
        provider="rxe",
        time_limit=300,
        share=tmp_path,
    )
    assert done.code == 0, done
    assert "check passed" in done.of["b"].out, done
