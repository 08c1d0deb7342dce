"""Pulls by RDMA, in a virtual machine (scripts/rdma-vm): only blocks that have changed are read.

Skipped with the reason where such machines cannot be had, or the build is one without RDMA.
"""

import json

import pytest
from rdmavm import both_but_few_by_rxe, lasts, vm  # noqa: F401
from test_rdma_vm_steps import begin, with_rdma  # noqa: F401

pytestmark = pytest.mark.rdma_vm

BLOCK, BLOCKS = 64 << 10, 32
# The blocks that the versions change. Of those that nobody has opened between, shards know what the newest 16 have changed.
CHANGED = [[0, 1, 17], [31], [], [8], list(range(BLOCKS)), [8, 9], *([at % BLOCKS] for at in range(14))]
CHANGED_LATER = [[3], [3, 4], [30]]

# Publishes versions, of which one mount opens each, and another one a few: those by its number of the argument. Says for each
# open how many bytes of blocks came and were the same, and how many blocks came whole.
PULLS = r"""
import array, json, os, sys, time
writes, reads, lags = sys.argv[1:4]
block, blocks, changed, opened = json.loads(sys.argv[4])
weights = array.array("f", bytes(block * blocks))

def status(model):
    with open(model + "/status.json") as file:
        return json.load(file)

def moved(model):
    payload = status(model)["payload"]
    assert payload["pull_copied_bytes"] == 0, "blocks come through the ring"
    return payload["pulled_bytes"], payload["pull_patched_bytes"]

def publish(version, places):
    for place in places:
        weights[place * block // 4 + version] = version
    with open(writes + "/publish", "wb", buffering=0) as file:
        assert file.write(weights) == block * blocks

def newest(model):
    with open(model + "/version") as file:
        return int(file.read())

def opens(who, model, version):
    end, before = time.monotonic() + 600, moved(model)
    while newest(model) < version:
        assert time.monotonic() < end, "a version does not come"
        time.sleep(0.02)
    file = open(model + "/weights", "rb")
    assert file.read() == weights.tobytes(), f"version {version} has other bytes"
    came = [after - then for after, then in zip(moved(model), before)]
    print(who, version, *came, status(model)["pull"]["whole_blocks"], flush=True)
    return file, weights.tobytes()

held = []
for model in reads, lags:
    with open(model + "/weights", "rb") as file:
        assert file.read() == weights.tobytes()
for version, places in enumerate(changed, 1):
    publish(version, places)
    held.append(opens("reads", reads, version))
    # Two older versions are held open.
    if len(held) == 3:
        file, data = held.pop(0)
        file.seek(0)
        assert file.read() == data, "a version that is held has changed"
        file.close()
    if version in opened:
        opens("lags", lags, version)[0].close()
"""


@both_but_few_by_rxe
@lasts(seconds=30)
def test_only_blocks_that_have_changed_are_read(vm, provider):  # noqa: F811
    """By a mount that opens every version, and by one that has fallen back: by three versions, and by more than the shard
    knows of, where all is read."""
    changed, opened = [*CHANGED, *CHANGED_LATER], [len(CHANGED), len(CHANGED) + len(CHANGED_LATER)]
    done = vm.run(
        begin()
        + f"""
        cat >/tmp/pulls.py <<'END'
{PULLS}
END
        shard --size {BLOCK * BLOCKS} --reducer assign --pull on-demand --timeout 200
        mounts=
        for name in writes reads lags; do mounted /tmp/$name; mounts="$mounts /tmp/$name/m"; done
        $python /tmp/pulls.py $mounts '{json.dumps([BLOCK, BLOCKS, changed, opened])}' || {{ cat /tmp/mount.err >&2; exit 5; }}
        for name in writes reads lags; do $gradfs unmount /tmp/$name || exit 6; done
        kill $shard; wait $shard || exit 4
        """,
        provider=provider,
    )
    assert done.code == 0, str(done)
    told = [(who, *map(int, numbers)) for who, *numbers in map(str.split, done.out.splitlines())]
    size = BLOCK * BLOCKS
    expected = [("reads", at, len(places)) for at, places in enumerate(changed, 1)]
    later = len({place for places in CHANGED_LATER for place in places})
    expected += [("lags", opened[0], BLOCKS), ("lags", opened[1], later)]
    expected = [(who, at, count * BLOCK, size - count * BLOCK, count) for who, at, count in expected]
    assert sorted(told) == sorted(expected), str(done)
    assert "does not say what has changed" not in done.err, str(done)
