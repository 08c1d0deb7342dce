"""Where the daemon may mount; what it finds there is told apart in fs-daemon/src/mountpoint."""

import re
import signal
import subprocess

from conftest import gradfs_binary, ran, write_all
from daemons import ONE, as_root, is_mounted, small, up_refused
from filetools import eventually


def test_only_an_empty_directory_is_a_mountpoint(gradfs, tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("kept")
    link.symlink_to(tmp_path / "none")
    for path, word in [(tmp_path / "none", "mkdir -p"), (link, "does not exist"), (file, "not a directory"), (tmp_path, "not empty")]:
        up_refused(gradfs, path, word)
    assert file.read_text() == "kept" and not (tmp_path / "none").exists()
    for path, word in [(tmp_path, "nothing is mounted"), (tmp_path / "none", "does not exist")]:
        done = gradfs("unmount", path)
        assert done.returncode == 1 and word in done.stderr and str(path) in done.stderr, done


def test_a_mountpoint_may_have_odd_characters(start_mount, tmp_path):
    path = tmp_path / "a b\tc\\d\nü"
    path.mkdir()
    mount = small(start_mount, root=path)
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1


def test_a_mountpoint_in_use_is_refused(start_mount, gradfs, tmp_path):
    """However it is called."""
    mount = small(start_mount)
    link = tmp_path / "link"
    link.symlink_to(mount.root)
    for name in [mount.root, link, f"{mount.root}/", f"{mount.root}/../{mount.root.name}/."]:
        done = gradfs("up", "--size", "64KiB", name, timeout=300)
        assert done.returncode == 1 and "already mounted by" in done.stderr and str(mount.pid) in done.stderr, done
    up_refused(gradfs, mount.model / "control")
    # Where a file is called gradfs, findmnt could take the source for it.
    (tmp_path / "gradfs").touch()
    (command,) = re.findall(r"hint: (findmnt .*) lists", gradfs("unmount", tmp_path).stderr)
    listed = ran(command.split(), cwd=tmp_path)
    assert str(mount.root) in listed.stdout, (command, listed)
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1


def test_of_several_that_race_for_a_mountpoint_one_wins(mnt):
    command = [gradfs_binary(), "up", "--size", "64KiB", "--reducer", "sum", mnt]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen(command, **pipes) for _ in range(5)]
    try:
        eventually(lambda: sum(racer.poll() is None for racer in racers) <= 1 and (mnt / "model").exists())
        (winner,) = [racer for racer in racers if racer.poll() is None]
        for racer in racers:
            if racer is not winner:
                _, stderr = racer.communicate()
                assert racer.returncode == 1 and str(mnt) in stderr and "mounted" in stderr, stderr
        assert len(is_mounted(mnt)) == 1
        write_all(mnt / "model/gradients", ONE)
        winner.send_signal(signal.SIGTERM)
        assert winner.wait(300) == 0 and not is_mounted(mnt)
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
        while is_mounted(mnt):
            subprocess.run(["umount", "-l", mnt], check=True)


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
