"""Models as network block devices (docs/use/nbd.md) of Linux's own client, which is its module nbd, and nbd-client. gradfs and
that kernel are in one virtual machine (scripts/rdma-vm), so a device that hangs does no harm here.

Skipped with the reason where such machines cannot be had.
"""

import random
import shutil

import numpy as np
import pytest
from conftest import REPOSITORY, gradfs_binary
from rdmavm import few, lasts, vm  # noqa: F401
from test_c_library import SOURCES, compiled, library  # noqa: F401

pytestmark = pytest.mark.rdma_vm

MIB = 1 << 20
SIZE = 4 * MIB

# What the scripts have: `up FOLDER WORDS...`, a mount that is ready; `down`, its end; `attach WORDS...`, which makes
# /dev/nbd0 of the export `model`; `detach`, its end. The kernel holds a device as long as nobody detaches it, so a script
# does that whichever way it ends.
BEGIN = r"""
set -u
gradfs=%s
mkdir /run/gradfs-test; cd /run/gradfs-test || exit 98
waits() {
    for _ in $(seq 6000); do "$@" && return; sleep 0.1; done
    echo "waited in vain: $*" >&2; cat up.* >&2; exit 99
}
up() {
    local folder=$1
    shift
    mkdir -p $folder
    : >up.out
    $gradfs up "$@" $folder >up.out 2>up.err &
    daemon=$!
    waits grep -q 'gradfs: ready' up.out
}
down() { kill $daemon; wait $daemon; }
capacity() { [ $(cat /sys/block/nbd0/size) $1 0 ]; }
attach() { nbd-client "$@" /dev/nbd0 -N model -b 4096 -timeout 20 >&2 && waits capacity -gt; }
detach() { nbd-client -d /dev/nbd0 >&2 && waits [ ! -e /sys/block/nbd0/pid ]; }
trap 'umount -q disk; [ ! -e /sys/block/nbd0/pid ] || detach; modprobe -r nbd' EXIT
modprobe nbd nbds_max=1 max_part=0 && mkdir disk || exit 98
"""


def begin():
    return BEGIN % gradfs_binary()


@lasts(seconds=40)
def test_ext4_lives_on_a_disk_by_the_kernels_client(vm, tmp_path):  # noqa: F811
    """Over two connections at once it is made, filled, trimmed, and written at random places and verified. It is clean in
    the end, the version that was published is that filesystem, and so is what the next connection reads."""
    (tmp_path / "file").write_bytes(random.Random(1).randbytes(3 * MIB + 5))
    done = vm.run(
        begin()
        + """
        up grad --size 64MiB --dtype u8 --reducer assign --nbd $PWD/socket
        attach -unix $PWD/socket -C 2 || exit 3
        grep -q 'write back' /sys/block/nbd0/queue/write_cache && grep -q 1 /sys/block/nbd0/queue/fua || exit 4
        mkfs.ext4 -q /dev/nbd0 && mount -t ext4 /dev/nbd0 disk && mkdir disk/folder || exit 5
        cp /share/file disk && cp /share/file disk/gone && sync disk/gone && rm disk/gone && fstrim disk || exit 6
        fio --name=random --directory=disk/folder --size=16m --rw=randwrite --bsrange=4k-64k --direct=1 --fsync=32 \\
            --ioengine=libaio --iodepth=8 --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_state_save=0 \\
            --thread >fio.out || { cat fio.out; exit 7; }
        (cd disk && find . -type f -exec sha256sum {} +) >sums && umount disk && fsck.ext4 -fn /dev/nbd0 || exit 8
        sync /dev/nbd0 && cmp /dev/nbd0 grad/model/weights && detach || exit 9
        attach -unix $PWD/socket && fsck.ext4 -fn /dev/nbd0 && mount -t ext4 /dev/nbd0 disk || exit 10
        cmp /share/file disk/file && (cd disk && sha256sum -c ../sums) || exit 11
        umount disk && detach && down || exit 12
        """,
        provider="none",
        share=tmp_path,
    )
    assert done.code == 0, done
    assert done.out.count(": OK\n") == 2, done


@few
@lasts(seconds=20)
def test_a_queue_of_the_library_moves_a_device_of_the_kernel(vm, compiled, library, tmp_path):  # noqa: F811
    """What it has written and synced is a version, and it reads the device back in many pieces at once."""
    compiled(SOURCES / "tests/device.c", "-std=gnu11")
    shutil.copy(library / "lib/libmodelio.so.0", tmp_path)
    done = vm.run(
        begin()
        + """
        up grad --size 8MiB --dtype u8 --reducer assign --nbd $PWD/socket
        attach -unix $PWD/socket || exit 3
        for value in 7 9; do
            LD_LIBRARY_PATH=/share /share/device /dev/nbd0 $value || exit 4
            [ "$(od -An -v -tu1 -w1 grad/model/weights | sort -u | tr -d ' ')" = $value ] || exit 5
        done
        detach && [ $(cat grad/model/version) = 2 ] && down || exit 6
        """,
        provider="none",
        share=tmp_path,
    )
    assert done.code == 0, done
    assert done.out.count("8388608 bytes, 128 pieces\n") == 2, done


@few
@lasts(seconds=20)
def test_the_kernels_client_contributes_as_the_mount_does(vm, tmp_path):  # noqa: F811
    """Gradients that are written to a device and flushed, by a Unix socket and by TCP, make the weights that they make
    through the mount; the device shows them, too. So do those of the jobs of fio-jobs/ for such a device."""
    gradients = np.arange(SIZE // 4, dtype="<f4") / 8 + 1.5
    (tmp_path / "gradients").write_bytes(gradients.tobytes())
    done = vm.run(
        begin()
        + f"jobs={REPOSITORY / 'fio-jobs'}\n"
        + """
        common="--size 4MiB --reducer sum"
        contributes() { # a name, and words of nbd-client
            local name=$1
            shift
            attach "$@" || exit 4
            for step in 1 2; do
                dd if=/share/gradients of=/dev/nbd0 bs=1M oflag=direct conv=fsync,notrunc status=none || exit 5
                dd if=/dev/nbd0 of=/share/$name.device.$step bs=1M iflag=direct status=none || exit 6
                cp grad/model/weights /share/$name.$step || exit 7
            done
            detach && [ $(cat grad/model/version) = 2 ] && down || exit 8
        }
        up grad $common
        for step in 1 2; do
            cat /share/gradients >grad/model/gradients && cp grad/model/weights /share/mount.$step || exit 3
        done
        down
        up grad $common --nbd $PWD/socket
        contributes unix -unix $PWD/socket
        up grad $common --nbd $PWD/socket
        attach -unix $PWD/socket && cd /run || exit 9
        export NBD_DEVICE=/dev/nbd0 BS=64k DEPTH=4 PARTS=1 PART=100% FLUSH=1
        for job in write read; do fio $jobs/kernel-nbd-$job.fio >fio.out || { cat fio.out; exit 9; }; done
        cd /run/gradfs-test && cp grad/model/weights /share/fio && detach && [ $(cat grad/model/version) = 1 ] && down || exit 9
        up grad $common --nbd 127.0.0.1:10809
        contributes tcp 127.0.0.1 10809
        """,
        provider="none",
        share=tmp_path,
    )
    assert done.code == 0, done
    assert set(np.fromfile(tmp_path / "fio", "<f4")) == {2**-7}
    for step in (1, 2):
        expected = (tmp_path / f"mount.{step}").read_bytes()
        assert expected == (gradients * step).tobytes()
        for name in ("unix", "tcp"):
            assert (tmp_path / f"{name}.{step}").read_bytes() == expected, name
            assert (tmp_path / f"{name}.device.{step}").read_bytes() == expected, name
