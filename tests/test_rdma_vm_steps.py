"""Steps of a job by RDMA between two hosts, in virtual machines (scripts/rdma-vm): every contribution counts once, also
when the link is down for a while in the middle, or a mount is killed in the middle of a push.

Skipped with the reason where such machines cannot be had, or the build is one without RDMA.
"""

import re
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from cluster import run
from conftest import REPOSITORY, gradfs_binary
from rdmavm import both_but_few_by_rxe, both_providers, few, lasts, vm  # noqa: F401
from test_c_library import library  # noqa: F401

pytestmark = pytest.mark.rdma_vm


# A learner with the standard library alone: contributes ones, and says what the weights are afterwards, and how many
# seconds that has taken.
LEARNER = r"""
import array, os, sys, time
place, steps = sys.argv[1], int(sys.argv[2])
size = os.stat(place + "/weights").st_size
ones = array.array("f", [1.0]) * (size // 4)
for step in range(steps):
    begun = time.monotonic()
    with open(place + "/gradients", "wb", buffering=0) as file:
        view = memoryview(ones).cast("B")
        while view:
            view = view[file.write(view):]
    with open(place + "/weights", "rb") as file:
        weights = file.read()
    assert weights == weights[:4] * (size // 4), "torn"
    print(array.array("f", weights[:4])[0], round(time.monotonic() - begun, 2), flush=True)
"""

# Says, when it is ended, how many bytes of IPv4 packets of a traffic class it has seen go out.
MARKED = r"""
import signal, socket, sys
ETH_P_ALL, OUTGOING = 3, 4
marked = 0
def over(*_):
    print("marked", marked, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, over)
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as packets:
    packets.bind(("eth0", ETH_P_ALL))
    while True:
        packet, (_, protocol, kind, *_) = packets.recvfrom(70000)
        if kind == OUTGOING and protocol == 0x800 and packet[15] == int(sys.argv[1]):
            marked += len(packet)
"""

# Learners on two mounts take turns to map their gradients and to declare bytes of them final. It fails unless blocks travel
# before fsync, and each step counts once and to the byte.
FINAL = r"""
import errno, json, mmap, os, re, signal, socket, struct, sys, time
host, port, *models = sys.argv[1:]
BLOCK, BLOCKS = 64 << 10, 16
HALF, SIZE = BLOCK // 2, BLOCKS * BLOCK
# Blocks that a client keeps until it has four to send together.
KEPT = 3
weights = [0] * (2 * BLOCKS)

def data(values):
    return b"".join(struct.pack("<f", value) * (HALF // 4) for value in values)

def arrived():
    with socket.create_connection((host, int(port)), 10) as metrics:
        metrics.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        page = b"".join(iter(lambda: metrics.recv(1 << 16), b""))
    [count] = re.findall(rb'^gradfs_payload_bytes_total{.*direction="push".*} (\d+)', page, re.M)
    return int(count)

# Another learner's step: the last block. Its close returns when it is in the sum.
def contribute(place):
    with open(place + "/gradients", "wb", buffering=0) as file:
        assert os.pwrite(file.fileno(), data([100, 100]), SIZE - BLOCK) == BLOCK

class Mapped:
    def __init__(self, place):
        self.place, self.model = place, os.path.dirname(os.path.dirname(place))
        self.fd = os.open(place + "/gradients", os.O_RDWR | os.O_DIRECT)
        self.memory = mmap.mmap(self.fd, SIZE)
        self.begin()

    def text(self, path):
        with open(path) as file:
            return file.read()

    def sent(self):
        return json.loads(self.text(self.model + "/status.json"))["payload"]["pushed_bytes"]

    def version(self):
        return int(self.text(self.model + "/version"))

    def begin(self):
        self.before = self.sent(), arrived(), self.version()

    def final(self, start, length):
        os.posix_fallocate(self.fd, start, length)

    # Waits until so many blocks have travelled, and no others.
    def travel(self, blocks):
        until = time.monotonic() + 600
        while True:
            sent, came = self.sent() - self.before[0], arrived() - self.before[1]
            assert sent <= blocks * BLOCK, "a block has travelled that is not final"
            if min(sent, came) >= (blocks - KEPT) * BLOCK:
                assert self.version() == self.before[2], "it counts before fsync"
                return
            assert time.monotonic() < until, f"{sent} bytes of {blocks} blocks are sent, and {came} have come"
            time.sleep(0.02)

    def is_refused(self):
        try:
            os.fsync(self.fd)
        except OSError as error:
            why = self.text(self.place + "/error")
            assert error.errno == errno.EINVAL and "NaN or Inf" in why, (error, why)
            assert self.version() == self.before[2], "a version without its contribution"
        else:
            raise AssertionError("NaN counts")

def steps(mine, others, ending, bad):
    mapped, values = Mapped(mine), [half % 7 for half in range(2 * BLOCKS)]
    memory, lost, part = mapped.memory, data([1000] * 2 * BLOCKS), BLOCKS // 2 * BLOCK

    def end():
        os.fsync(mapped.fd)
        for half, value in enumerate(values):
            weights[half] += value + 100 * (half >= 2 * BLOCKS - 2)
        for place in mine, others:
            with open(place + "/weights", "rb") as file:
                assert file.read() == data(weights), "other bytes than those of both steps"

    # What is not final yet changes: the first half of block 0, which is final later, and the second half of the block in
    # the middle, which never is.
    contribute(others)
    mapped.begin()
    memory[:] = data([1000, *values[1:BLOCKS + 1]]) + lost[part + HALF:]
    mapped.final(HALF, part)
    mapped.travel(BLOCKS // 2 - 1)
    memory[:] = data(values)
    for _ in range(2):
        mapped.final(0, HALF)
    mapped.final(SIZE - 4 * BLOCK - 8, 4 * BLOCK + 8)
    mapped.travel(BLOCKS // 2 + 4)
    end()
    assert mapped.sent() == mapped.before[0] + SIZE, "not once"

    # A program that ends before fsync.
    contribute(others)
    child = os.fork()
    if child == 0:
        program = Mapped(mine)
        program.memory[:] = lost
        program.final(0, SIZE)
        program.travel(BLOCKS)
        if ending:
            os.kill(os.getpid(), ending)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == ending
    # NaN: once in a block that goes first, and once in one that comes when others have travelled.
    mapped.begin()
    memory[:] = lost
    memory[bad * BLOCK:bad * BLOCK + 4] = struct.pack("<f", float("nan"))
    mapped.final(0, part)
    if bad * BLOCK >= part:
        mapped.travel(BLOCKS // 2)
    mapped.final(part, part)
    mapped.is_refused()
    values = values[1:] + values[:1]
    memory[:] = data(values)
    mapped.final(0, SIZE)
    end()

places = [f"{model}/learners/{name}" for model, name in zip(models, "ab")]
for place in places:
    os.mkdir(place)
steps(*places, signal.SIGKILL, BLOCKS - 1)
steps(*places[::-1], 0, 1)
"""

BEGIN = """
set -u
gradfs=%s
python="/usr/bin/python3 -IS"
# More words for shards and mounts.
flags=
export GRADFS_REGISTRY=a
waits() {
    for _ in $(seq 3000); do "$@" && return; sleep 0.2; done
    echo "waited in vain: $*" >&2; cat /tmp/*.err >&2; exit 99
}
shard() { # words of create
    : >/tmp/shard.out
    env -u GRADFS_REGISTRY $gradfs shard --listen $HOST_ADDRESS --insecure --advertise a --rdma on --rdma-port 7171 \\
        --metrics 127.0.0.1:0 $flags >/tmp/shard.out 2>/tmp/shard.err &
    shard=$!
    (waits grep -q 'gradfs: ready' /tmp/shard.out) || { cat /tmp/shard.err >&2; exit 99; }
    $gradfs create m --block-size 64KiB "$@" >&2 || exit 3
}
mounted() { # a folder, and --transport
    mkdir -p $1
    : >/tmp/mount.out
    $gradfs mount $1 --transport ${2:-rdma} $flags >/tmp/mount.out 2>>/tmp/mount.err &
    mount=$!
    waits grep -q 'gradfs: ready' /tmp/mount.out
}
# Bytes so far: push, of payload that has come to the shard on this host; pull, of all that has come over the link, for
# which a mount counts only blocks that it has checked.
moved() {
    if [ $1 = pull ]; then cat /sys/class/net/eth0/statistics/rx_bytes; return; fi
    exec 3<>$(sed -n 's|^gradfs: metrics at http://\\([0-9.]*\\):\\([0-9]*\\)/.*|/dev/tcp/\\1/\\2|p' /tmp/shard.out) || exit 96
    printf 'GET /metrics HTTP/1.1\\r\\nHost: here\\r\\nConnection: close\\r\\n\\r\\n' >&3
    sed -n 's/^gradfs_payload_bytes_total{.*direction="push".*} //p' <&3
    exec 3>&-
}
part() { # push or pull, BASE, SIZE: waits until a sixteenth to three quarters of SIZE has moved since BASE; says how much it is
    local now until=$((SECONDS + 600))
    while [ $SECONDS -lt $until ]; do
        now=$(($(moved $1) - $2))
        [ $now -le $(($3 / 4 * 3)) ] || { echo "$now of $3 bytes had moved when it was looked" >&2; return 1; }
        [ $now -lt $(($3 / 16)) ] || { echo $now; return; }
        sleep 0.05
    done
    echo "of $3 bytes too few moved" >&2; return 1
}
# What this host sends goes at 1 MB/s, or at other Mbit/s; and as fast as can be.
slow() { tc qdisc add dev eth0 root handle 1: netem rate ${1:-8}mbit limit 100000 || exit 97; }
fast() { tc qdisc del dev eth0 root || exit 97; }
cat >/tmp/learner.py <<'END'
%s
END
cat >/tmp/marked.py <<'END'
%s
END
"""


@pytest.fixture(scope="module", autouse=True)
def with_rdma():
    if "built without RDMA" in run("rdma", "devices").stderr:
        pytest.skip("this gradfs was built without RDMA")


def begin():
    return BEGIN % (gradfs_binary(), LEARNER, MARKED)


WITHOUT_MOUNT = """
import array, sys
sys.path.insert(0, sys.argv[1])
import gradfs

with gradfs.open("gradfs://a/m") as model:
    print(model.status["transport"])
    [name] = model.layout
    values = array.array("f", [1]) * model.layout[name].size
    with model.join("x") as learner:
        for step in (1, 2):
            learner.push({name: values})
        assert learner.pull(out={name: values}) == 2
    print(set(values))
"""


@both_but_few_by_rxe
def test_a_program_without_a_mount_trains_by_rdma(vm, library, tmp_path, provider):  # noqa: F811
    """The Python package over the C library, which chooses the fastest way that both hosts have."""
    if b"ibv_open_device" not in (library / "lib/libmodelio.so.0").read_bytes():
        pytest.skip("this library was built without RDMA")
    shutil.copy(library / "lib/libmodelio.so.0", tmp_path)
    (tmp_path / "train.py").write_text(WITHOUT_MOUNT)
    done = vm.run(
        begin()
        + f"""
        case $HOST_NAME in
        a) shard --size 1000004 --reducer sum; meet shard; meet over; kill $shard; wait $shard || exit 4 ;;
        b)
            meet shard
            MODELIO_LIBRARY=/share/libmodelio.so.0 $python /share/train.py {REPOSITORY / "python"} || exit 5
            meet over
            ;;
        esac
        """,
        two=True,
        provider=provider,
        share=tmp_path,
    )
    assert done.code == 0, done
    assert done.of["b"].out.split("\n")[-3:] == ["rdma", "{2.0}", ""], done


@both_providers
def test_steps_between_two_hosts_count_once(vm, provider):  # noqa: F811
    """And what the mount's host sends has the traffic class that was asked for; soft-iWARP knows of none."""
    done = vm.run(
        begin()
        + """
        case $HOST_NAME in
        a) shard --size 1000004 --reducer sum; meet shard; meet over; kill $shard; wait $shard || exit 4 ;;
        b)
            export GRADFS_RDMA_TRAFFIC_CLASS=104
            $python /tmp/marked.py 104 & marked=$!
            meet shard; mounted /tmp/mnt
            $python /tmp/learner.py /tmp/mnt/m 4 || exit 5
            kill $marked; wait $marked || exit 7
            $gradfs unmount /tmp/mnt || exit 6
            meet over ;;
        esac
        """,
        two=True,
        provider=provider,
    )
    assert done.code == 0, str(done)
    *steps, [what, marked] = [line.split() for line in done.of["b"].out.splitlines()]
    assert [float(weight) for weight, _ in steps] == [1, 2, 3, 4], str(done)
    assert what == "marked" and (int(marked) > 400_000) == (provider == "rxe"), str(done)


@both_providers
@lasts(seconds=15)
def test_final_bytes_of_a_mapping_travel_before_fsync(vm, provider):  # noqa: F811
    """By fallocate, from a mount that places its blocks and from one whose blocks are fetched. NaN in final bytes is
    reported at fsync. Neither that nor a program that ends before its fsync costs anybody's step, and none of those bytes
    count."""
    done = vm.run(
        begin()
        + f"""
        cat >/tmp/final.py <<'END'
{FINAL}
END
        shard --size 1MiB --reducer sum --learners 2 --timeout 60 --lease 60
        at=$(sed -n 's|^gradfs: metrics at http://\\([0-9.]*\\):\\([0-9]*\\)/.*|\\1 \\2|p' /tmp/shard.out)
        for placement in static dynamic; do
            GRADFS_RDMA_PLACEMENT=$placement mounted /tmp/$placement
        done
        $python /tmp/final.py $at /tmp/static/m /tmp/dynamic/m || {{ cat /tmp/mount.err >&2; exit 5; }}
        for placement in static dynamic; do $gradfs unmount /tmp/$placement || exit 6; done
        kill $shard; wait $shard || exit 4
        """,
        provider=provider,
    )
    assert done.code == 0, str(done)


# Every flag of RDMA with a value that is not its default, but for those that the test above sets, and for what soft-iWARP
# has not. Both ends have them.
FLAGS = """--rdma-device $RDMA_DEVICE --rdma-gid-index $RDMA_GID_INDEX --rdma-inline 64 --rdma-depth 64 --rdma-report-every 8
    --rdma-queues 1 --rdma-polling event --rdma-notice flag --rdma-buffers own --rdma-placement dynamic --rdma-slots 8
    --rdma-arena 32MiB --rdma-shared-receives 0 --rdma-reads 4 --rdma-retries 5"""
OF_ROCE = "--rdma-mtu 1024 --rdma-traffic-class 104"


@both_but_few_by_rxe
def test_steps_count_once_with_every_flag(vm, provider):  # noqa: F811
    done = vm.run(
        begin()
        + f"""
        flags="{FLAGS} {OF_ROCE if provider == "rxe" else ""}"
        case $HOST_NAME in
        a) shard --size 1000004 --reducer sum; meet shard; meet over; kill $shard; wait $shard || exit 4 ;;
        b)
            meet shard; mounted /tmp/mnt
            $python /tmp/learner.py /tmp/mnt/m 2 || exit 5
            grep -o '"transport": *"rdma"' /tmp/mnt/m/status.json | head -n 1
            $gradfs unmount /tmp/mnt || exit 6
            meet over ;;
        esac
        """,
        two=True,
        provider=provider,
    )
    assert done.code == 0, str(done)
    *steps, transport = done.of["b"].out.splitlines()
    assert [float(step.split()[0]) for step in steps] == [1, 2] and "rdma" in transport, str(done)


@few
def test_no_flag_of_rdma_is_left_out():
    """Of those that `gradfs shard` and `gradfs mount` know, each is passed by a test here."""
    known = {flag for command in ("shard", "mount") for flag in re.findall(r"--rdma[a-z-]*", run(command, "--help").stdout)}
    passed = set(re.findall(r"--rdma[a-z-]*", f"{BEGIN} {FLAGS} {OF_ROCE}"))
    assert len(known) > 10 and known == passed


# How the link goes and comes, on both hosts. With rxe all packets are lost instead: the GSI queue pair of Linux 6.12's
# breaks for good when it is to send on a link that is down, and then no program on that host gets a connection; and 7
# retries, the most and the default, are endless ones there (docs/internals/rdma-vm.md). In either case what waits to be
# sent is lost.
LINK = {
    "rxe": """
        export GRADFS_RDMA_RETRIES=3
        down() { tc qdisc replace dev eth0 root handle 2: netem loss 100%; }
        up() { :; }
    """,
    "siw": """
        down() { ip link set eth0 down; }
        up() { ip link set eth0 up; }
    """,
}


@both_providers
@lasts(seconds=70)
def test_a_link_that_is_down_for_a_while_costs_no_step(vm, provider):  # noqa: F811
    """Five seconds in the middle of a push, and of a pull: nothing moves, then the step goes on. Of soft-RoCE queue pairs
    break by that, and others take their place; those of soft-iWARP, over TCP, are there when the link is up again."""
    size = 4 << 20
    done = vm.run(
        begin()
        + LINK[provider]
        + f"""
        # A connection is known by the port that rdma_cm has opened it from.
        ports() {{ rdma resource show cm_id | sed -n 's/.* state CONNECT .* src-addr [^ ]*:\\([0-9]*\\) .*/\\1/p' | sort; }}
        two() {{ [ $(ports | wc -l) = 2 ]; }}
        up_to() {{ # SECONDS since the link went down at both ends
            local left=$((gone + $1 * 1000000 - ${{EPOCHREALTIME/./}}))
            [ $left -le 0 ] || sleep $((left / 1000000)).$(printf %06d $((left % 1000000)))
        }}
        outage() {{ # push or pull, and the host that counts what comes
            local base parts
            slow
            meet $1
            [ $HOST_NAME != $2 ] || base=$(moved $1) || exit 96
            meet $1-begin
            if [ $HOST_NAME = b ]; then $python /tmp/learner.py /tmp/mnt/m 1 >/tmp/step 2>/tmp/step.err & learner=$!; fi
            if [ $HOST_NAME = $2 ]; then
                parts=$(part $1 $base {size}) || exit 7
                down || exit 97
            fi
            meet $1-part
            [ $HOST_NAME = $2 ] || down || exit 97
            gone=${{EPOCHREALTIME/./}}
            for second in 2 4; do
                up_to $second
                [ $HOST_NAME != $2 ] || parts="$parts $(($(moved $1) - base))"
            done
            up_to 5
            if [ $HOST_NAME = b ]; then
                [ ! -s /tmp/step ] || {{ echo "the step was over before the link was up" >&2; exit 8; }}
                echo broken $1 $(grep -c "connection lost: RDMA: " /tmp/mount.err)
                echo ports $(ports)
            fi
            up && fast || exit 97
            [ $HOST_NAME != $2 ] || echo $1 $parts
            [ $HOST_NAME = b ] || return
            wait $learner || {{ cat /tmp/step.err /tmp/mount.err >&2; exit 5; }}
            sed 's/^/step /' /tmp/step
            waits two
            echo ports $(ports)
        }}
        case $HOST_NAME in
        a)
            shard --size {size} --reducer sum --timeout 60; meet shard
            outage push a; outage pull b
            meet over; kill $shard; wait $shard || exit 4 ;;
        b)
            meet shard; mounted /tmp/mnt
            learn() {{ $python /tmp/learner.py /tmp/mnt/m 1 | sed 's/^/step /'; [ ${{PIPESTATUS[0]}} = 0 ] || exit 5; }}
            learn
            echo ports $(ports)
            outage push a; outage pull b
            learn
            cat /tmp/mount.err >&2
            $gradfs unmount /tmp/mnt || exit 6
            meet over ;;
        esac
        """,
        two=True,
        provider=provider,
    )
    assert done.code == 0, str(done)
    told = [line.split() for host in "ab" for line in done.of[host].out.splitlines()]
    for way in ("push", "pull"):
        [[first, early, late]] = [map(int, words) for what, *words in told if what == way]
        assert size // 16 <= first <= early == late < size, str(done)
    steps = [tuple(map(float, words)) for what, *words in told if what == "step"]
    assert [weight for weight, _ in steps] == [1, 2, 3, 4], str(done)
    assert all(seconds > 5 for _, seconds in steps[1:3]), str(done)
    # Connections: at first, and for push and pull at the end of the outage, and when its step is over.
    at_first, in_push, after_push, in_pull, _ = [words for what, *words in told if what == "ports"]
    assert len(set(at_first)) == len(set(after_push)) == 2, str(done)
    if provider == "rxe":
        # That of a pull comes only with the next packet, if it has been lost at the wrong moment.
        [[_, broken]] = [words for what, *words in told if what == "broken" and words[0] == "push"]
        assert int(broken) > 0 and at_first != after_push, str(done)
    else:
        # When TCP sends again, up to 5 s after the link is up, it may have been silent for too long.
        assert at_first == in_push and after_push == in_pull, str(done)


@lasts(seconds=60)
def test_a_mount_that_is_killed_in_a_push_leaves_no_part_of_it(vm):  # noqa: F811
    """Neither of its contribution nor of its connections, be blocks written to the shard or fetched by it."""
    size = 4 << 20
    done = vm.run(
        begin()
        + f"""
        gone() {{ ! rdma resource show qp | grep -q " type RC "; }}
        registered() {{ rdma resource show mr | grep " pid " | grep -o "mrlen [0-9]*" | cut -d " " -f 2; }}
        for GRADFS_RDMA_PLACEMENT in static dynamic; do
            export GRADFS_RDMA_PLACEMENT
            how=$GRADFS_RDMA_PLACEMENT
            case $HOST_NAME in
            a)
                shard --size {size} --reducer sum --lease 8 --timeout 60
                echo held $(registered)
                meet $how-shard; meet $how-learnt
                base=$(moved push) || exit 96
                meet $how-begin
                part=$(part push $base {size}) || exit 7
                meet $how-kill; meet $how-killed
                waits gone
                echo part $part $(($(moved push) - base))
                meet $how-again; meet $how-over
                waits gone
                echo held $(registered)
                kill $shard; wait $shard || exit 4 ;;
            b)
                meet $how-shard; mounted /tmp/mnt
                $python /tmp/learner.py /tmp/mnt/m 2 || exit 5
                slow 4
                meet $how-learnt; meet $how-begin
                $python /tmp/learner.py /tmp/mnt/m 1 &
                learner=$!
                meet $how-kill
                kill -9 $mount
                ! wait $learner || exit 8
                meet $how-killed
                umount -l /tmp/mnt
                meet $how-again
                fast
                mounted /tmp/again
                $python /tmp/learner.py /tmp/again/m 2 || exit 9
                $gradfs unmount /tmp/again || exit 6
                meet $how-over ;;
            esac
        done
        """,
        two=True,
        provider="rxe",
    )
    assert done.code == 0, str(done)
    told = [line.split() for line in done.of["a"].out.splitlines()]
    held = [Counter(map(int, words)) for what, *words in told if what == "held"]
    assert len(held) == 4, str(done)
    for before, after in (held[:2], held[2:]):
        # What is the shard's own stays: its arena; what is the model's, too: the directory, and buffers of versions. No
        # rings, and no slots.
        arena, directory = 64 << 20, 4096
        assert before == Counter([arena]) and 1 <= after.pop(size) <= 4, str(done)
        assert after == Counter([arena, directory]), str(done)
    parts = [tuple(map(int, words)) for what, *words in told if what == "part"]
    assert len(parts) == 2 and all(0 < seen <= came < size for seen, came in parts), str(done)
    # The learners before and after it count, each step once.
    weights = [float(line.split()[0]) for line in done.of["b"].out.splitlines()]
    assert weights == [1, 2, 3, 4] * 2, str(done)


def test_digits_are_learned_on_two_hosts(vm, tmp_path):  # noqa: F811
    """A learner on each host, one beside the shard and one that has it by RDMA: what is learned is what one process
    learns alone, within rounding."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    np.savez(tmp_path / "digits.npz", images=images, labels=labels)
    model = tmp_path / "m.safetensors"
    make = [sys.executable, REPOSITORY / "examples/make_digits_model.py", model, "--hidden", "256"]
    subprocess.run(make, check=True, capture_output=True, timeout=60)
    # Few steps, and long ones.
    job = "--learners 2 --epochs 4 --batch 128 --lr 0.5"
    done = vm.run(
        begin()
        + f"""
        export DIGITS_NPZ=/share/digits.npz
        work() {{ {sys.executable} {REPOSITORY}/scripts/lib/work/classifiers.py "$@"; }}
        case $HOST_NAME in
        a)
            shard --model /share/m.safetensors --reducer sgd --learning-rate 0.5 --learners 2 --timeout 60
            meet shard; mounted /tmp/mnt auto
            work digits /tmp/mnt/m --rank 0 {job} || exit 5
            meet learned; meet over
            $gradfs unmount /tmp/mnt || exit 6
            kill $shard; wait $shard || exit 4 ;;
        b)
            meet shard; mounted /tmp/mnt rdma
            work digits /tmp/mnt/m --rank 1 {job} || exit 5
            meet learned
            work digits-check /tmp/mnt/m --initial /share/m.safetensors {job} || exit 7
            $gradfs unmount /tmp/mnt || exit 6
            meet over ;;
        esac
        """,
        two=True,
        provider="rxe",
        share=tmp_path,
    )
    assert done.code == 0, str(done)
    assert "check passed" in done.of["b"].out, str(done)
