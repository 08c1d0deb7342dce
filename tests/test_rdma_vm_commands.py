"""RDMA on the command line of hosts that have devices, in virtual machines (scripts/rdma-vm): what is listed, what is
said of devices that cannot be used, and which way a mount goes.

Skipped with the reason where such machines cannot be had, or the build is one without RDMA.
"""

import json

import pytest
from cluster import run
from conftest import gradfs_binary
from rdmavm import both_providers, vm  # noqa: F401

pytestmark = pytest.mark.rdma_vm


# What the scripts have: $gradfs; `waits WORDS...`, until a command succeeds; `shard WORDS...`, one that is ready; `metrics
# FILE`, those of the mount that has said in FILE where they are.
BEGIN = r"""
set -u
gradfs=%s
mkdir /run/gradfs-test; cd /run/gradfs-test || exit 98
waits() {
    for _ in $(seq 6000); do "$@" && return; sleep 0.1; done
    echo "waited in vain: $*" >&2; cat *.err >&2; exit 99
}
shard() {
    $gradfs shard --listen $HOST_ADDRESS --insecure "$@" >shard.out 2>shard.err &
    shard=$!
    waits grep -q 'gradfs: ready' shard.out
}
metrics() {
    local at=$(sed -n 's|^gradfs: metrics at http://\([0-9.]*\):\([0-9]*\)/.*|/dev/tcp/\1/\2|p' $1)
    exec 3<>$at || return
    printf 'GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n' >&3
    tr -d '\r' <&3
    exec 3>&-
}
"""


@pytest.fixture(scope="module", autouse=True)
def with_rdma():
    if "built without RDMA" in run("rdma", "devices").stderr:
        pytest.skip("this gradfs was built without RDMA")


def begin():
    return BEGIN % gradfs_binary()


@both_providers
def test_devices_are_listed_and_those_that_cannot_be_used_are_clear_errors(vm, provider, tmp_path):  # noqa: F811
    """With `on` the shard does not start; with `auto` it goes on, and its first line says why. So it is with memory
    that an ordinary user may not pin, and with a port that is down. Last, when there is no device any more, what to do."""
    done = vm.run(
        begin()
        + """
        $gradfs rdma devices --json >/share/devices.json && $gradfs rdma devices >/share/devices || exit 3
        for wrong in "--rdma-device mlx5_0" "--rdma-device $RDMA_DEVICE/7" "--rdma-gid-index 200"; do
            $gradfs shard --listen $HOST_ADDRESS:0 --insecure --rdma on $wrong && exit 3
            shard $wrong
            head -n 1 shard.out
            kill $shard; wait $shard || exit 4
            rm shard.out
        done
        # Not root, whose CAP_IPC_LOCK has no limit.
        chmod 777 .
        as_root=$gradfs
        gradfs="setpriv --reuid 1000 --regid 1000 --clear-groups --inh-caps=-all $as_root"
        ulimit -l 4096
        $gradfs shard --listen $HOST_ADDRESS:0 --insecure --rdma on && exit 3
        shard
        head -n 1 shard.out
        kill $shard; wait $shard || exit 4
        rm shard.out
        gradfs=$as_root
        ip link set $RDMA_NETDEV down || exit 5
        $gradfs shard --listen $HOST_ADDRESS:0 --insecure --rdma on && exit 3
        shard
        head -n 1 shard.out
        kill $shard; wait $shard || exit 4
        rdma link delete $RDMA_DEVICE || exit 6
        $gradfs rdma devices >/share/none || exit 7
        $gradfs shard --listen $HOST_ADDRESS:0 --insecure --rdma on 2>/share/none.err
        [ $? = 1 ] || exit 3
        """,
        provider=provider,
        share=tmp_path,
    )
    assert done.code == 0, done
    listed = json.loads((tmp_path / "devices.json").read_text())
    assert listed["cannot_connect_because"] is None, listed
    [device] = listed["devices"]
    assert device["name"] == f"{provider}0" and device["limits"]["queue_pairs"] > 0, device
    assert device["transport"] == ("iWARP" if provider == "siw" else "InfiniBand"), device
    [port] = device["ports"]
    assert port["active"] and port["state"] == "active" and port["link"] and port["mtu"] >= 256, port
    assert [gid["index"] for gid in port["gids"]], port
    if provider == "rxe":
        assert any(gid["address"] == "10.0.0.1" and gid["kind"] == "RoCE v2" for gid in port["gids"]), port
    told = (tmp_path / "devices").read_text()
    assert f"{provider}0: " in told and "GID 0: " in told and "connections can come about" in told, told
    reasons = [
        f'there is no RDMA device "mlx5_0"; there is {provider}0',
        f"port 7 of {provider}0 is not there: it has 1",
        f"GID index 200 of port 1 of {provider}0 holds no GID (`gradfs rdma devices` lists them)",
        f"{64 << 20} bytes cannot be registered: RLIMIT_MEMLOCK is {4 << 20} bytes; raise it (ulimit -l unlimited, or "
        "LimitMEMLOCK=infinity in a systemd unit)",
        f"port 1 of {provider}0 is down",
    ]
    started, failed = done.out.splitlines(), done.err.splitlines()
    assert len(started) == len(failed) == len(reasons), done
    for reason, line, error in zip(reasons, started, failed, strict=True):
        assert line.endswith(f"; no rdma: {reason}") and error == f"gradfs: error: RDMA: {reason}", done
    listed = (tmp_path / "none").read_text()
    assert listed.startswith("no RDMA devices\n"), listed
    none = (tmp_path / "none.err").read_text()
    assert "RDMA: there is no RDMA device" in none and "rdma link add" in none, none


@both_providers
def test_a_mount_goes_by_rdma_or_says_why_not(vm, provider, tmp_path):  # noqa: F811
    """A shard on one host, mounts on another: by RDMA alone, and by TCP where the mount's device is not there."""
    done = vm.run(
        begin()
        + """
        case $HOST_NAME in
        a)
            shard --advertise a --rdma on --rdma-port 7171
            cat shard.out
            export GRADFS_REGISTRY=a
            $gradfs create m --size 1MiB --block-size 64KiB --reducer sum >&2 || exit 3
            meet shard; meet mounted
            $gradfs status
            $gradfs status --json >/share/status.json
            meet asked; meet over
            kill $shard; wait $shard || exit 4 ;;
        b)
            export GRADFS_REGISTRY=a
            meet shard
            mounted() { # $1: name; then options
                name=$1; shift; mkdir $name
                $gradfs mount $name --metrics 127.0.0.1:0 "$@" >$name.out 2>$name.err &
                waits grep -q 'gradfs: ready' $name.out
                cp $name/m/status.json /share/$name.json
                metrics $name.out >/share/$name.metrics || exit 8
                grep -v '^gradfs: metrics at ' $name.out | head -n 1
            }
            mounted rdma --transport rdma
            meet mounted; meet asked
            mounted tcp --rdma-device mlx5_0
            grep 'no RDMA with this shard' tcp.err || exit 5
            mkdir not
            $gradfs mount not --transport rdma --rdma-device mlx5_0 && exit 6
            for name in rdma tcp; do $gradfs unmount $name || exit 7; done
            meet over ;;
        esac
        """,
        two=True,
        provider=provider,
        share=tmp_path,
    )
    assert done.code == 0, done
    first, *status = done.of["a"].out.splitlines()
    assert first.endswith(f"; rdma on {provider}0 port 1 at 10.0.0.1:7171"), done
    told = f", rdma on {provider}0 port 1 at a:7171 with 2 connection(s)"
    assert any(line.startswith("shard 1 at a:7070: ") and line.endswith(told) for line in status), done
    [shard] = json.loads((tmp_path / "status.json").read_text())["shards"]
    assert shard["rdma"] == {
        "address": "a:7171", "device": f"{provider}0 port 1", "connections": 2, "unavailable": None, "hindered": False
    }, shard
    by_rdma, by_tcp, *log = done.of["b"].out.splitlines()
    why = f'there is no RDMA device "mlx5_0"; there is {provider}0'
    assert "; rdma shard; reads" in by_rdma and f"; tcp shard, no rdma: {why}; reads" in by_tcp, done
    assert len(log) == 1 and why in log[0], done
    assert f"gradfs: error: cannot take part in m: model m: {why}" in done.of["b"].err, done
    seen = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("rdma", "tcp")}
    assert seen["rdma"]["transport"] == seen["rdma"]["shards"][0]["transport"] == "rdma", seen
    assert "not_rdma_because" not in seen["rdma"]["shards"][0], seen
    assert seen["tcp"]["transport"] == seen["tcp"]["shards"][0]["transport"] == "tcp", seen
    assert seen["tcp"]["shards"][0]["not_rdma_because"] == why, seen
    for name, fell_back in [("rdma", 0), ("tcp", 1)]:
        metrics = (tmp_path / f"{name}.metrics").read_text()
        assert f'gradfs_transport_fallback{{model="m",shard="1",wanted="rdma"}} {fell_back}\n' in metrics, metrics
        assert f'transport="{name}"}} 1\n' in metrics, metrics


def test_a_mount_that_finds_no_room_says_what_to_set_and_goes_back_when_there_is(vm, tmp_path):  # noqa: F811
    """A mount on another host that may goes by TCP, and says why; one that may not does not come about. Once there is room
    for its connections, status, metrics and log say so, and the model is none the worse."""
    done = vm.run(
        begin()
        + """
        export GRADFS_REGISTRY=a
        case $HOST_NAME in
        a)
            for block in 1MiB 256KiB; do
                env -u GRADFS_REGISTRY $gradfs shard --listen $HOST_ADDRESS --insecure --advertise a --rdma on --rdma-arena 4MiB \
                    >shard.out 2>shard.err &
                shard=$!
                waits grep -q 'gradfs: ready' shard.out
                $gradfs create m --size 1MiB --block-size $block --reducer sum >&2 || exit 3
                meet shard-$block
                if [ $block = 1MiB ]; then meet mounted; $gradfs status; fi
                meet over-$block
                kill $shard; wait $shard || exit 4
                rm shard.out
            done ;;
        b)
            meet shard-1MiB
            mkdir not auto first second
            $gradfs mount not --transport rdma && exit 5
            $gradfs mount auto >auto.out 2>auto.err &
            waits grep -q 'gradfs: ready' auto.out
            head -c 1048576 /dev/zero >auto/m/gradients || exit 6
            cp auto/m/status.json /share/full.json
            meet mounted
            $gradfs unmount auto || exit 7
            meet over-1MiB

            meet shard-256KiB
            $gradfs mount first --transport rdma --connections 16 >first.out 2>first.err &
            waits grep -q 'gradfs: ready' first.out
            waits grep -q 'registered memory is full' first.err
            $gradfs mount second -v --metrics 127.0.0.1:0 >second.out 2>second.err &
            waits grep -q 'gradfs: ready' second.out
            look() { # $1: what it is called
                cp second/m/status.json /share/$1.json
                metrics second.out >/share/$1.metrics || exit 8
            }
            look before
            head -c 1048576 /dev/zero >second/m/gradients || exit 9
            $gradfs unmount first || exit 10
            waits sh -c '! grep -q not_rdma_because second/m/status.json'
            head -c 1048576 /dev/zero >second/m/gradients || exit 11
            waits sh -c '[ "$(cat second/m/version)" = 2 ]'
            look after
            $gradfs unmount second || exit 12
            cp auto.out auto.err second.err /share/
            meet over-256KiB ;;
        esac
        """,
        two=True,
        share=tmp_path,
    )
    assert done.code == 0, done
    # Slots for blocks of 1 MiB never fit; with 256 KiB the first mount takes what there is for connections.
    for_slots = "raise --rdma-arena, or lower --rdma-slots"
    for_rings = "refused by the shard: its registered memory is full: raise its --rdma-arena, or lower its --rdma-slots"
    assert "gradfs: error: " in done.of["b"].err and for_slots in done.of["b"].err, done
    assert "shard 1 at a:7070: " in done.out and ", rdma on rxe0 port 1 at a:7070" in done.out, done
    for name, transport, why in [("full", "tcp", for_slots), ("before", "tcp", for_rings), ("after", "rdma", None)]:
        seen = json.loads((tmp_path / f"{name}.json").read_text())
        [shard] = seen["shards"]
        assert seen["transport"] == shard["transport"] == transport and shard["connected"], seen
        assert why in shard["not_rdma_because"] if why else "not_rdma_because" not in shard, seen
        if name != "full":
            metrics = (tmp_path / f"{name}.metrics").read_text()
            fell_back = f'gradfs_transport_fallback{{model="m",shard="1",wanted="rdma"}} {int(why is not None)}\n'
            assert fell_back in metrics, metrics
    assert seen["version"] == 2, seen
    first = (tmp_path / "auto.out").read_text().splitlines()[0]
    assert "; tcp shard, no rdma: " in first and for_slots in first, first
    # The connections may differ in how much was free when they were refused.
    logs = [(tmp_path / name).read_text().splitlines() for name in ("auto.err", "second.err")]
    told = [[line for line in log if "no RDMA with this shard, using TCP: " in line] for log in logs]
    assert 1 <= len(told[0]) <= 2 and all(for_slots in line for line in told[0]), told
    assert len(told[1]) == 1, told
    assert any("in place of one by TCP there is a better way" in line for line in logs[1]), logs
    assert not any("connection lost" in line for line in logs[1]), logs
