"""Mountpoints that are volumes, and commands whose output goes nowhere."""

import subprocess
import sys

from conftest import gradfs_binary
from daemons import as_root, is_mounted


@as_root
def test_an_empty_volume_is_a_mountpoint(start_mount, gradfs, tmp_path):
    volume = tmp_path / "volume"
    volume.mkdir()
    subprocess.run(["mount", "--bind", volume, volume], check=True)
    try:
        mount = start_mount(size="64KiB", reducer="sum", root=volume)
        kind = subprocess.run(["findmnt", "-no", "FSTYPE", volume], capture_output=True, text=True, check=True).stdout
        assert kind.split()[-1] == "fuse.gradfs"
        assert mount.version() == 0
        mount.stop()
        assert is_mounted(volume) and list(volume.iterdir()) == []
        (volume / "precious").write_text("kept")
        done = gradfs("up", "--size", "64KiB", volume)
        assert done.returncode == 1 and "is not empty" in done.stderr, done
    finally:
        while is_mounted(volume):
            subprocess.run(["umount", "-l", volume], check=True)


def test_a_reader_that_has_gone_is_no_failure(tmp_path):
    """The pipe is closed before the command begins."""
    for stream in ("stdout", "stderr"):
        for words in (["up", "--dry-run", "--size", "1MiB", tmp_path], ["unmount", tmp_path], ["up", "--nonsense"], ["completions", "bash"]):
            with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
                reader.wait(300)
                others = {name: subprocess.PIPE for name in ("stdout", "stderr") if name != stream}
                command = [gradfs_binary(), *words]
                done = subprocess.run(command, **{stream: reader.stdin}, **others, timeout=300, check=False, text=True)
            whole = subprocess.run(command, capture_output=True, timeout=300, check=False)
            said = (done.stdout or "") + (done.stderr or "")
            assert done.returncode == whole.returncode and "panicked" not in said, (words, stream, done)


def test_a_command_whose_output_is_lost_fails(tmp_path, start_mount):
    mount = start_mount(size="64KiB")
    background = tmp_path / "background"
    background.mkdir()
    learner = [sys.executable, "-c", "print(1)"]
    for words in (
        ["up", "--dry-run", "--size", "1MiB", tmp_path], ["completions", "bash"], ["--help"], ["status", mount.root],
        ["status", "--json", mount.model], ["rdma", "devices"], ["trace", mount.root, "--seconds", "0.1", "--output", tmp_path / "trace"],
        ["run", "-n", "2", mount.model, "--", *learner],
        ["up", "--background", "--log-file", tmp_path / "log", "--size", "64KiB", background],
    ):
        command = [gradfs_binary(), *words]
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=300, check=False, text=True)
        assert done.returncode == 1 and "cannot print" in done.stderr, (words, done)
    # The daemon that could not say so is there.
    subprocess.run([gradfs_binary(), "unmount", background], check=True, capture_output=True, timeout=300)
