"""Where the daemon may mount."""

import re
import signal
import subprocess
import time

from conftest import gradfs_binary, write_all
from daemons import ONE, as_root, is_mounted, small, up_refused


def test_a_missing_mountpoint_is_named(gradfs, tmp_path):
    up_refused(gradfs, tmp_path / "none", "does not exist", "mkdir -p")
    assert not (tmp_path / "none").exists()


def test_a_file_is_no_mountpoint(gradfs, tmp_path):
    path = tmp_path / "file"
    path.write_text("kept")
    up_refused(gradfs, path, "not a directory")
    up_refused(gradfs, path / "below", "not a directory")
    assert path.read_text() == "kept"


def test_a_dangling_link_is_no_mountpoint(gradfs, tmp_path):
    path = tmp_path / "link"
    path.symlink_to(tmp_path / "none")
    up_refused(gradfs, path, "does not exist")


def test_a_directory_that_is_not_empty_is_no_mountpoint(gradfs, tmp_path):
    (tmp_path / "precious").write_text("kept")
    up_refused(gradfs, tmp_path, "not empty")
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_link_to_a_directory_is_a_mountpoint(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    process = subprocess.Popen(
        [gradfs_binary(), "up", "--size", "64KiB", "--reducer", "sum", link], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 300
        while not (link / "model").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        write_all(link / "model/gradients", ONE)
        assert (real / "model/version").read_text() == "1\n"
        assert subprocess.run([gradfs_binary(), "unmount", link], timeout=300, check=False).returncode == 0
        assert process.wait(300) == 0
        assert link.is_symlink() and not is_mounted(real)
    finally:
        process.kill()
        process.communicate()
        if is_mounted(real):
            subprocess.run(["umount", "-l", real], check=False)


def test_mountpoint_is_inside_a_live_mount(start_mount, gradfs):
    mount = small(start_mount)
    up_refused(gradfs, mount.model / "control")
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1


def test_a_mountpoint_may_have_odd_characters(start_mount, tmp_path):
    path = tmp_path / "a b\tc\\d\nü"
    path.mkdir()
    mount = small(start_mount, root=path)
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1


def test_a_mountpoint_in_use_is_refused(start_mount, gradfs):
    mount = small(start_mount)
    said = up_refused(gradfs, mount.root, "already mounted by", str(mount.pid), "gradfs unmount")
    assert str(mount.root) in said
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1


def test_already_mounted_and_named_in_other_ways(start_mount, gradfs, tmp_path):
    mount = small(start_mount)
    link = tmp_path / "link"
    link.symlink_to(mount.root)
    for name in [link, f"{mount.root}/", f"{mount.root}/../{mount.root.name}/."]:
        done = gradfs("up", "--size", "64KiB", name, timeout=300)
        assert done.returncode == 1 and "already mounted by" in done.stderr, done
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1


def test_of_several_that_race_for_a_mountpoint_one_wins(tmp_path):
    for round_ in range(3):
        mnt = tmp_path / f"m{round_}"
        mnt.mkdir()
        command = [gradfs_binary(), "up", "--size", "64KiB", "--reducer", "sum", mnt]
        racers = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(5)
        ]
        try:
            deadline = time.monotonic() + 300
            while sum(racer.poll() is None for racer in racers) > 1 or not (mnt / "model").exists():
                assert time.monotonic() < deadline, [racer.poll() for racer in racers]
                time.sleep(0.01)
            winners = [racer for racer in racers if racer.poll() is None]
            assert len(winners) == 1
            for racer in racers:
                if racer is not winners[0]:
                    _, stderr = racer.communicate()
                    assert racer.returncode == 1 and str(mnt) in stderr and "mounted" in stderr, stderr
            assert len(is_mounted(mnt)) == 1
            write_all(mnt / "model/gradients", ONE)
            assert (mnt / "model/version").read_text() == "1\n"
            winners[0].send_signal(signal.SIGTERM)
            assert winners[0].wait(10) == 0
            assert not is_mounted(mnt)
        finally:
            for racer in racers:
                racer.kill()
                racer.communicate()
            while is_mounted(mnt):
                subprocess.run(["umount", "-l", mnt], check=True)


def test_the_hint_about_mounts_finds_them(start_mount, gradfs, tmp_path):
    """Also where a file is called gradfs, which findmnt could take the source for."""
    mount = small(start_mount)
    (tmp_path / "gradfs").touch()
    done = gradfs("unmount", tmp_path)
    assert done.returncode == 1 and "nothing is mounted" in done.stderr, done
    (command,) = re.findall(r"hint: (findmnt .*) lists", done.stderr)
    listed = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert str(mount.root) in listed.stdout, (command, listed)


@as_root
def test_mounted_by_something_else(gradfs, tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    try:
        (tmp_path / "precious").write_text("kept")
        up_refused(gradfs, tmp_path, "is not empty")
        done = gradfs("unmount", tmp_path)
        assert done.returncode == 1 and "not of gradfs" in done.stderr, done
        assert is_mounted(tmp_path)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@as_root
def test_something_else_mounted_over_a_live_mount(start_mount, gradfs):
    mount = small(start_mount)
    subprocess.run(["mount", "-t", "tmpfs", "none", mount.root], check=True)
    try:
        (mount.root / "precious").write_text("kept")
        up_refused(gradfs, mount.root, str(mount.pid))
        done = gradfs("unmount", mount.root)
        assert done.returncode == 1 and "tmpfs" in done.stderr, done
        mount.process.send_signal(signal.SIGTERM)
        mount.process.wait(300)
        assert (mount.root / "precious").exists(), "the daemon has unmounted what was not its own"
        assert (mount.root / "precious").read_text() == "kept"
    finally:
        for line in is_mounted(mount.root):
            if " tmpfs " in line:
                subprocess.run(["umount", mount.root], check=True)
    assert mount.process.returncode == 0, mount.stderr()
    # Whatever is left must not stand in the way of the next one.
    small(start_mount, root=mount.root).contribute(ONE)


def test_unmount_says_where_nothing_is_mounted(gradfs, tmp_path):
    done = gradfs("unmount", tmp_path)
    assert done.returncode == 1 and "nothing is mounted" in done.stderr and str(tmp_path) in done.stderr, done
    done = gradfs("unmount", tmp_path / "none")
    assert done.returncode == 1 and "does not exist" in done.stderr, done
