"""Steps of a job by RDMA between two hosts, in virtual machines (scripts/rdma-vm): every contribution counts once, also
when the link is down for a while in the middle, or a mount is killed in the middle of a push.

Skipped with the reason where such machines cannot be had, or the build is one without RDMA.
"""

import subprocess
import sys
from collections import Counter

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
        weights = file.read()
    assert weights == weights[:4] * (size // 4), "torn"
    print(array.array("f", weights[:4])[0], flush=True)
"""

BEGIN = """
set -u
gradfs=%s
python=/usr/bin/python3
export GRADFS_REGISTRY=a
waits() {
    for _ in $(seq 200); do "$@" && return; sleep 0.2; done
    echo "waited in vain: $*" >&2; cat /tmp/*.err >&2; exit 99
}
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


# With rxe all packets are lost instead: the GSI queue pair of Linux 6.12's breaks for good when it is to send on a link
# that is down, and then no program on that host gets a connection (docs/rdma-vm.md).
DOWN = {
    "rxe": ("tc qdisc add dev eth0 root netem loss 100%", "tc qdisc del dev eth0 root"),
    "siw": ("ip link set eth0 down", "ip link set eth0 up"),
}


@both_providers
def test_a_link_that_is_down_for_a_while_costs_no_step(vm, provider):  # noqa: F811
    """Five seconds in the middle of a step; the queue pairs of soft-RoCE break by that."""
    down, up = DOWN[provider]
    done = vm.run(
        begin()
        + f"""
        case $HOST_NAME in
        a) shard --size 1000004 --reducer sum --timeout 60; meet shard; meet over; kill $shard; wait $shard || exit 4 ;;
        b)
            meet shard; mounted /tmp/mnt
            $python /tmp/learner.py /tmp/mnt/m 8 >/tmp/steps 2>/tmp/steps.err &
            learner=$!
            waits test -s /tmp/steps
            {down}; sleep 5; {up}
            wait $learner || {{ cat /tmp/steps.err /tmp/mount.err >&2; exit 5; }}
            cat /tmp/steps
            cat /tmp/mount.err >&2
            $gradfs unmount /tmp/mnt || exit 6
            meet over ;;
        esac
        """,
        two=True,
        provider=provider,
        time_limit=240,
    )
    assert done.code == 0, done
    assert [float(line) for line in done.of["b"].out.split()] == [1, 2, 3, 4, 5, 6, 7, 8], done
    if provider == "rxe":
        assert "connection lost: RDMA: " in done.of["b"].err, done


# Kills a mount when it has sent between an eighth and a half of a push of 4 MiB; says how much.
KILL = """
import json, os, sys, time
mount, status, size, until = int(sys.argv[1]), sys.argv[2], 4 << 20, time.monotonic() + 60
while time.monotonic() < until:
    with open(status) as file:
        sent = json.load(file)["payload"]["pushed_bytes"] % size
    if size // 8 <= sent <= size // 2:
        os.kill(mount, 9)
        print(sent)
        sys.exit()
    time.sleep(0.01)
sys.exit("no push was seen under way")
"""


def test_a_mount_that_is_killed_in_a_push_leaves_no_part_of_it(vm):  # noqa: F811
    """Neither of its contribution nor of its connections, be blocks written to the shard or fetched by it."""
    done = vm.run(
        begin()
        + f"""
        cat >/tmp/kill.py <<'END'
{KILL}
END
        gone() {{ ! rdma resource show qp | grep -q " type RC "; }}
        registered() {{ rdma resource show mr | grep " pid " | grep -o "mrlen [0-9]*" | cut -d " " -f 2; }}
        soon() {{ for _ in $(seq 75); do "$@" && return; sleep 0.2; done; return 1; }}
        for GRADFS_RDMA_PLACEMENT in static dynamic; do
            export GRADFS_RDMA_PLACEMENT
            how=$GRADFS_RDMA_PLACEMENT
            case $HOST_NAME in
            a)
                shard --size 4MiB --reducer sum --lease 1 --timeout 60
                echo $(registered)
                meet $how-shard; meet $how-over
                soon gone || {{ rdma resource show qp >&2; exit 8; }}
                echo $(registered)
                kill $shard; wait $shard || exit 4
                rm /tmp/shard.out ;;
            b)
                meet $how-shard; mounted /tmp/mnt
                $python /tmp/learner.py /tmp/mnt/m 1 || exit 5
                $python /tmp/learner.py /tmp/mnt/m 100 >/tmp/steps 2>/dev/null &
                waits test -s /tmp/steps
                $python /tmp/kill.py $mount /tmp/mnt/m/status.json >&2 || exit 8
                wait $!
                wc -l </tmp/steps
                umount -l /tmp/mnt; rm /tmp/mount.out /tmp/steps
                mounted /tmp/again
                $python /tmp/learner.py /tmp/again/m 2 || exit 7
                $gradfs unmount /tmp/again || exit 6
                rm /tmp/mount.out
                meet $how-over ;;
            esac
        done
        """,
        two=True,
        provider="rxe",
        time_limit=300,
    )
    assert done.code == 0, done
    held = [Counter(map(int, line.split())) for line in done.of["a"].out.splitlines()]
    assert len(held) == 4, done
    for before, after in (held[:2], held[2:]):
        # What is the shard's own stays: its arena; what is the model's, too: the directory, and buffers of versions. No
        # rings, and no slots.
        arena, directory, version = 64 << 20, 4096, 4 << 20
        assert before == Counter([arena]) and 1 <= after.pop(version) <= 4, done
        assert after == Counter([arena, directory]), done
    said = [float(line) for line in done.of["b"].out.split()]
    assert len(said) == 8, done
    for first, told, *after in (said[:4], said[4:]):
        # What was taken before the mount died counts, whether it was told or not (a slow machine kills late); the rest
        # does not, nor any part of it.
        assert first == 1 and told + 2 <= after[0] <= told + 3 and after[1] == after[0] + 1, done


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
