"""Mountpoints that are volumes, and commands whose output goes nowhere."""

import subprocess
import sys

import pytest
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


def without_reader(stream, *words):
    """A command to its end, with one of its streams in a pipe that was closed before it began."""
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait(300)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: reader.stdin}
        return subprocess.run([gradfs_binary(), *words], **streams, timeout=300, check=False, text=True)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_has_gone_is_no_failure(tmp_path, start_mount, gradfs, stream):
    """The pipe is closed before the command begins."""
    mount = start_mount(size="64KiB")
    for words in (
        ["up", "--dry-run", "--size", "1MiB", tmp_path], ["unmount", tmp_path], ["up", "--nonsense"], ["completions", "bash"],
        ["status", mount.root], ["status", "--json", mount.model],
        ["trace", mount.root, "--seconds", "0.1", "--output", tmp_path / "trace"],
        ["save", "--replace", mount.model, tmp_path / "saved"],
        # It prints a line each second.
        ["run", "-n", "2", "--progress", mount.model, "--", "sleep", "1.5"],
    ):
        done, whole = without_reader(stream, *words), gradfs(*words)
        assert whole.stdout or whole.stderr, words
        said = (done.stdout or "") + (done.stderr or "")
        assert done.returncode == whole.returncode and "panicked" not in said, (words, done)


def test_a_reader_that_has_gone_is_no_failure__but_one_of_processes_that_print(start_mount):
    """Those get SIGPIPE, which is a failure; `gradfs run` itself ends in order."""
    mount = start_mount(size="64KiB")
    words = ["run", "-n", "2", mount.model, "--", "sh", "-c", "while :; do echo line; done"]
    done = without_reader("stdout", *words)
    assert done.returncode == 141 and "panicked" not in done.stderr, done


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
