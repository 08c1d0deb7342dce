"""Command lines, configurations and files of models that must be refused; what each may hold is tested in fs-daemon/src/config,
fs-daemon/src/cli and libmodelio."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from conftest import gradfs_binary
from daemons import as_root, in_namespace, place_for_all  # noqa: F401
from filetools import BLOCK
from refusals import refused_up, safetensors, tensor

BAD_USES = [
    (["--size", "1MiB", "m.safetensors"], ["--size", "exclude each other"]),
    (["--size", "1000001"], ["--size", "1000001", "element size", "1000000 bytes is"]),
    (["--size=-5"], ["--size", '"-5"', "not a size"]),
    (["--size", "-5"], ["--size", "-5"]),
    (["--size", "1GB"], ["--size", "GiB"]),
    (["--size", "99999999TiB"], ["--size", "more than a file can hold"]),
    (["--size", "1MiB", "--block-size", "100000"], ["--block-size", "100000", "power of two", "64KiB"]),
    (["--size", "1MiB", "--dtype", "f8"], ["--dtype", "f8", "f32", "f64", "bf16"]),
    (["--dtype", "f32", "m.safetensors"], ["--dtype", "of no use"]),
    (["--size", "1MiB", "--reducer", "magic"], ["--reducer", "magic", "adamw"]),
    (["--size", "1MiB", "--consistency", "quorum 2"], ["--consistency", '"quorum 2"', "did you mean quorum(2)?"]),
    (["--size", "1MiB", "--insecure"], ["insecure", "nbd"]),
    (["--size", "1MiB", "--learning-rate", "1e39"], ["--learning-rate", "finite"]),
    (["--size", "1MiB", "--learners", "2", "--min-learners", "3"], ["--min-learners", "learners is 2", "raise it"]),
    (["--size", "1MiB", "--max-versions", "4", "--retain", "3"], ["max_versions (4)", "retain + 3"]),
    (["--size", "1MiB", "--threads", "100000"], ["--threads", "256"]),
    (["x/m.safetensors", "z/x/m.safetensors"], ["two models are called x", "--name"]),
    (["--name", "a", "x.safetensors", "y.safetensors"], ["--name", "1 name(s) for 2 model(s)"]),
    (["--size", "1MiB", "--name", "README"], ["README", "--name"]),
    ([], ["no model", "--size"]),
    (["--size", "1MiB", "--learning-rat", "1"], ["--learning-rat", "--learning-rate"]),
]


def test_a_bad_command_line_is_refused_by_name(gradfs, mnt):
    for args, words in BAD_USES:
        refused_up(gradfs, mnt, *args, words=words, code=2)
    refused_up(gradfs, "1MiB", "--size", words=["mountpoint"], code=2)
    refused_up(gradfs, mnt / "a.safetensors", "--size", "1MiB", words=["looks like a model file"], code=2)


BAD_CONFIGURATIONS = [
    ('size = "1MiB"\nlearning-speed = 1\n', ["unknown key learning-speed", "did you mean"]),
    ('size = 1MiB"\n', ["not valid TOML"]),
    (b"\xff\xfe\0", ["cannot read the configuration"]),
    ('size = ["1MiB", "2MiB"]\n', ["size must be a single value"]),
    ('size = "1MiB"\nlearners = 1\nmin_learners = 2\n', ["min_learners", "learners is 1"]),
]


def test_a_bad_configuration_is_refused_by_name(gradfs, tmp_path, mnt):
    path = tmp_path / "job.toml"
    for text, words in BAD_CONFIGURATIONS:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        refused_up(gradfs, mnt, "--config", path, words=[path, *words], code=2)
    path.unlink()
    refused_up(gradfs, mnt, "--config", path, words=[path, "No such file"], code=2)
    environment = {"GRADFS_REDUCER": "magic"}
    refused_up(gradfs, mnt, "--size", "1MiB", words=["GRADFS_REDUCER", "magic"], code=2, env=environment)


DATA = bytes(32)
BAD_FILES = [
    (b"", ["not a safetensors file", "0 bytes"]),
    (b"\x80\x02}q\0X\x01\0\0\0aq\x01K\x01s." * 8, ["not a safetensors file"]),
    (safetensors({"a": tensor(0, 32)})[:30], ["truncated", "the header", "copy the file again"]),
    (safetensors({"a": tensor(0, 32)}, DATA[:31]), ["truncated", '"a"', "copy the file again"]),
    (safetensors({"a": tensor(0, 32)}, DATA + b"x"), ["damaged"]),
    (safetensors({"a": tensor(0, 16), "b": tensor(12, 28)}, DATA[:28]), ["overlaps", '"a"', '"b"']),
    (safetensors({"a": tensor(2**64 - 32, 2**64 - 16)}, DATA), ['"a"']),
    (safetensors({"a": tensor(0, 32, shape=[9])}, DATA), ['"a"', "36", "0..32"]),
    (safetensors({"a": tensor(0, 32, dtype="Q4")}, DATA), ["unknown dtype", '"a"', '"Q4"']),
    (safetensors({"../../x": tensor(0, 32)}, DATA), ['"../../x"', "rename"]),
    (safetensors({"a": tensor(0, 32)}, DATA, length=2**63), ["header of 9223372036854775808 bytes"]),
    (safetensors(b'{"a":' + b"[" * 100_000, DATA), ["header"]),
]


def test_a_bad_model_file_is_refused_by_name(gradfs, tmp_path, mnt):
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    good.write_bytes(safetensors({"a": tensor(0, 32)}, DATA))
    for contents, words in BAD_FILES:
        bad.write_bytes(contents)
        refused_up(gradfs, mnt, bad, words=[bad, *words])
        assert bad.read_bytes() == contents, "the file is as it was"
    refused_up(gradfs, mnt, good, bad, words=[bad])


def test_what_is_no_file_is_no_model(gradfs, tmp_path, mnt):
    (tmp_path / "d/model.safetensors").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path / "d", "/dev/zero", tmp_path / "pipe.safetensors"):
        refused_up(gradfs, mnt, path, words=[path, "not a regular file"])
    missing = tmp_path / "missing.safetensors"
    refused_up(gradfs, mnt, missing, words=[missing, "No such file"])


@as_root
def test_a_model_that_may_not_be_read_is_named(place_for_all):  # noqa: F811
    model = place_for_all / "secret.safetensors"
    model.write_bytes(safetensors({"a": tensor(0, 32)}, DATA))
    model.chmod(0o600)
    setup = 'mount -t tmpfs none "$2" && mknod -m 666 "$2/fuse" c 10 229 && mount --bind "$2/fuse" /dev/fuse'
    done = in_namespace(place_for_all, setup, f'${{up%% up *}} up {model} "$1"; code=$?; ! mountpoint -q "$1" || exit 99; exit $code')
    assert done.returncode == 1, done
    assert str(model) in done.stderr and "Permission denied" in done.stderr, done.stderr


def total_memory():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("size", ["8TiB", "all_memory"])
def test_more_than_memory_is_refused_before_it_is_touched(mnt, size):  # noqa: F811
    """A model of this size could only end in the hands of the kernel's OOM killer."""
    size = str(total_memory() // BLOCK * BLOCK) if size == "all_memory" else size

    def first_to_be_killed():
        Path("/proc/self/oom_score_adj").write_text("1000")

    process = subprocess.Popen(
        [gradfs_binary(), "up", "--size", size, "--reducer", "sum", mnt],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=first_to_be_killed,
    )
    most, deadline = 0, time.monotonic() + 10
    try:
        while process.poll() is None and time.monotonic() < deadline:
            # It must never come near to hurting anybody.
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    most = max(most, int(line.split()[1]) << 10)
            assert most < 1 << 30, f"it has already touched {most >> 20} MiB for a model of {size}"
            time.sleep(0.002)
    finally:
        process.kill()
        _, stderr = process.communicate()
        if os.path.ismount(mnt):
            subprocess.run(["umount", "-l", mnt], check=False)
    assert process.returncode in (1, 2), f"{process.returncode}: {stderr}"
    assert "not enough memory" in stderr and "gradfs: error: " in stderr, stderr


def test_models_that_fit_one_by_one_but_not_together_are_refused(gradfs, tmp_path, mnt):
    done = gradfs("up", "--dry-run", "--size", "1MiB", mnt)
    available = int(next(line for line in done.stdout.splitlines() if line.startswith("available")).split()[1])
    # Each takes three times its size: two versions and staging.
    size = available // 5 // BLOCK * BLOCK
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    for name in ("a", "b"):
        with open(tmp_path / f"{name}.safetensors", "wb") as model:
            model.write(len(header).to_bytes(8, "little") + header)
            model.truncate(8 + len(header) + size)
    models = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for words in (["--dry-run"], []):
        done = gradfs("up", *words, *models, mnt)
        assert done.returncode == 1 and "not enough memory" in done.stderr, done
    assert "together" in done.stderr, done
    assert gradfs("up", "--dry-run", models[0], mnt).returncode == 0


def test_a_dry_run_shows_what_a_model_takes_and_mounts_nothing(gradfs, mnt):
    """The same sum refuses a model that is too large, and names what takes how much."""
    words = ["up", "--dry-run", "--size", "1MiB", "--reducer", "adam", "--retain", "2", "--learners", "3", mnt]
    mib = 1 << 20
    for copies, others, total in [("single", {"state": 2 * mib}, 9), ("double", {"state": 4 * mib, "sums": mib}, 12)]:
        done = gradfs(*words, "--state-copies", copies)
        assert done.returncode == 0, done
        shown = {line.split()[0]: int(line.split()[-3]) for line in done.stdout.splitlines() if line.endswith(" GiB")}
        available = shown.pop("available")
        assert shown == {"versions": 4 * mib, **others, "staging": 3 * mib, "in": total * mib}, done
        assert 0 < available <= total_memory(), done
    # Versions alone would fit.
    size = total_memory() // 6 // BLOCK * BLOCK
    for dry_run in (["--dry-run"], []):
        done = gradfs("up", *dry_run, "--size", size, "--reducer", "adam", "--retain", "0", "--learners", "9", mnt)
        assert done.returncode == 1 and "not enough memory" in done.stderr, done
        assert ("GiB" in done.stdout) == bool(dry_run), "what it takes is shown also where there is too little"
    assert "versions " in done.stderr and "staging " in done.stderr and "--dry-run" in done.stderr, done
