"""Command lines and configurations that must be refused."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from conftest import gradfs_binary
from refusals import BLOCK, refused_up, up

BAD_USES = {
    "size_and_file": (["--size", "1MiB", "m.safetensors"], ["--size", "exclude each other"]),
    "size_is_no_multiple": (["--size", "1000001"], ["--size", "1000001", "element size", "1000000 bytes is"]),
    "size_is_odd_for_bf16": (["--size", "3", "--dtype", "bf16"], ["--size", "element size"]),
    "size_is_zero": (["--size", "0"], ["--size", "cannot be empty"]),
    "size_is_negative": (["--size=-5"], ["--size", '"-5"', "not a size"]),
    "size_is_a_word": (["--size", "big"], ["--size", '"big"', "not a size"]),
    "size_is_empty": (["--size", ""], ["--size", "not a size"]),
    "size_is_decimal": (["--size", "1.5GiB"], ["--size", '"1.5GiB"', "not a size"]),
    "size_has_two_meanings": (["--size", "1GB"], ["--size", "GiB"]),
    "size_overflows": (["--size", "99999999999999999999"], ["--size"]),
    "size_overflows_by_its_unit": (["--size", "99999999TiB"], ["--size", "more than a file can hold"]),
    "block_size_is_no_power_of_two": (["--size", "1MiB", "--block-size", "100000"], ["--block-size", "100000", "power of two", "64KiB"]),
    "block_size_is_too_small": (["--size", "1MiB", "--block-size", "32KiB"], ["--block-size", "power of two", "64KiB"]),
    "block_size_is_too_large": (["--size", "16MiB", "--block-size", "8MiB"], ["--block-size", "4MiB"]),
    "block_size_is_zero": (["--size", "1MiB", "--block-size", "0"], ["--block-size"]),
    "block_size_is_a_word": (["--size", "1MiB", "--block-size", "x"], ["--block-size", '"x"']),
    "dtype": (["--size", "1MiB", "--dtype", "f8"], ["--dtype", "f8", "f32", "f64", "bf16"]),
    "dtype_with_a_file": (["--dtype", "f32", "m.safetensors"], ["--dtype", "of no use"]),
    "reducer": (["--size", "1MiB", "--reducer", "magic"], ["--reducer", "magic", "adamw"]),
    "consistency": (["--size", "1MiB", "--consistency", "sometimes"], ["--consistency", "sometimes", "async"]),
    "consistency_in_the_wrong_form": (["--size", "1MiB", "--consistency", "quorum 2"], ["--consistency", '"quorum 2"', "did you mean quorum(2)?"]),
    "insecure_alone": (["--size", "1MiB", "--insecure"], ["insecure", "nbd"]),
    "nonfinite": (["--size", "1MiB", "--nonfinite", "maybe"], ["--nonfinite", "maybe", "reject"]),
    "learning_rate": (["--size", "1MiB", "--learning-rate", "fast"], ["--learning-rate", '"fast"', "number"]),
    "learning_rate_nan": (["--size", "1MiB", "--learning-rate", "nan"], ["--learning-rate", "finite"]),
    "learning_rate_inf": (["--size", "1MiB", "--learning-rate", "inf"], ["--learning-rate", "finite"]),
    "learning_rate_beyond_f32": (["--size", "1MiB", "--learning-rate", "1e39"], ["--learning-rate", "finite"]),
    "learning_rate_negative": (["--size", "1MiB", "--learning-rate", "-1"], ["--learning-rate", '"-1"']),
    "momentum": (["--size", "1MiB", "--momentum", "1.5"], ["--momentum", "from 0 to 1"]),
    "beta1_of_one": (["--size", "1MiB", "--beta1", "1"], ["--beta1", "below 1"]),
    "beta2_rounds_to_one": (["--size", "1MiB", "--beta2", "0.999999999"], ["--beta2", "below 1"]),
    "learners_zero": (["--size", "1MiB", "--learners", "0"], ["--learners", '"0"']),
    "learners_fraction": (["--size", "1MiB", "--learners", "1.5"], ["--learners", '"1.5"']),
    "learners_too_many": (["--size", "1MiB", "--learners", "70000"], ["--learners", "4096"]),
    "min_learners_above_learners": (["--size", "1MiB", "--learners", "2", "--min-learners", "3"], ["--min-learners", "learners is 2", "raise it"]),
    "max_versions_below_retain": (["--size", "1MiB", "--max-versions", "4", "--retain", "3"], ["max_versions (4)", "retain + 3"]),
    "timeout_zero": (["--size", "1MiB", "--timeout", "0"], ["--timeout", "0.001"]),
    "timeout_negative": (["--size", "1MiB", "--timeout=-1"], ["--timeout", '"-1"']),
    "timeout_of_ages": (["--size", "1MiB", "--timeout", "1e300"], ["--timeout", "year"]),
    "lease_is_a_word": (["--size", "1MiB", "--lease", "long"], ["--lease", '"long"']),
    "threads_zero": (["--size", "1MiB", "--threads", "0"], ["--threads", '"0"']),
    "threads_too_many": (["--size", "1MiB", "--threads", "100000"], ["--threads", "256"]),
    "name_twice": (["--name", "a", "--name", "a", "a.safetensors", "b.safetensors"], ["two models are called a", "--name"]),
    "files_of_one_name": (["x/m.safetensors", "z/x/m.safetensors"], ["two models are called x", "--name"]),
    "names_too_few": (["--name", "a", "x.safetensors", "y.safetensors"], ["--name", "1 name(s) for 2 model(s)"]),
    "name_with_a_slash": (["--size", "1MiB", "--name", "a/b"], ['"a/b"', "slash"]),
    "name_dot_dot": (["--size", "1MiB", "--name", ".."], ['".."']),
    "name_empty": (["--size", "1MiB", "--name", ""], ["empty", "--name"]),
    "name_with_a_newline": (["--size", "1MiB", "--name", "a\nb"], ["control character"]),
    "name_too_long": (["--size", "1MiB", "--name", "n" * 256], ["255"]),
    "name_of_the_mounts_own_file": (["--size", "1MiB", "--name", "README"], ["README", "--name"]),
    "no_model": ([], ["no model", "--size"]),
    "unknown_option": (["--size", "1MiB", "--learning-rat", "1"], ["--learning-rat", "--learning-rate"]),
}


@pytest.mark.parametrize("fault", BAD_USES)
def test_a_bad_command_line_is_refused_by_name(gradfs, tmp_path, fault):
    args, words = BAD_USES[fault]
    mnt = tmp_path / "mnt"
    mnt.mkdir()
    done = up(gradfs, mnt, *args)
    shown = f"$ gradfs up {args}\n{done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == 2, shown
    assert done.stderr.startswith("gradfs: error: "), shown
    assert "panicked" not in done.stderr and done.stdout == "", shown
    for word in words:
        assert word in done.stderr, f"{word!r} is missing:\n{shown}"
    assert not os.path.ismount(mnt) and list(mnt.iterdir()) == []


def test_a_negative_size_as_two_words_is_refused(gradfs, tmp_path):
    done = gradfs("up", "--size", "-5", tmp_path, timeout=300)
    assert done.returncode == 2 and "-5" in done.stderr and "--size" in done.stderr, done.stderr


def test_a_missing_mountpoint_argument_is_named(gradfs):
    done = gradfs("up", "--size", "1MiB", timeout=300)
    assert done.returncode == 2 and "mountpoint" in done.stderr, done.stderr


def test_a_model_file_in_place_of_the_mountpoint_is_recognised(gradfs, tmp_path):
    done = gradfs("up", "--size", "1MiB", tmp_path / "a.safetensors", timeout=300)
    assert done.returncode == 2 and "looks like a model file" in done.stderr, done.stderr


BAD_CONFIGURATIONS = {
    "unknown_key": ('size = "1MiB"\nlearning-speed = 1\n', ["unknown key learning-speed", "did you mean"]),
    "unknown_table": ('size = "1MiB"\n[job]\nreducer = "sum"\n', ["unknown key job"]),
    "not_toml": ('size = 1MiB"\n', ["not valid TOML"]),
    "not_text": (b"\xff\xfe\0", ["cannot read the configuration"]),
    "list_for_a_value": ('size = ["1MiB", "2MiB"]\n', ["size must be a single value"]),
    "wrong_word": ('size = "1MiB"\nreducer = "magic"\n', ["reducer", "magic", "adamw"]),
    "contradiction": ('size = "1MiB"\nlearners = 1\nmin_learners = 2\n', ["min_learners", "learners is 1"]),
    "files_and_size": ('size = "1MiB"\nmodels = ["a.safetensors"]\n', ["exclude each other"]),
    "short_key": ('size = "1MiB"\nlr = 0.1\n', ["unknown key lr", "did you mean learning_rate?"]),
    "twice": ('size = "1MiB"\nsize = "2MiB"\n', ["not valid TOML", "size"]),
}


@pytest.mark.parametrize("fault", BAD_CONFIGURATIONS)
def test_a_bad_configuration_file_is_refused_by_name(gradfs, tmp_path, fault):
    text, words = BAD_CONFIGURATIONS[fault]
    path = tmp_path / "job.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused_up(gradfs, tmp_path, "--config", path, words=[str(path), *words], code=2)


def test_a_missing_configuration_file_is_named(gradfs, tmp_path):
    path = tmp_path / "none.toml"
    refused_up(gradfs, tmp_path, "--config", path, words=[str(path), "No such file"], code=2)


def test_a_bad_environment_variable_is_refused_by_name(gradfs, tmp_path):
    env = {"GRADFS_REDUCER": "magic"}
    refused_up(gradfs, tmp_path, "--size", "1MiB", words=["GRADFS_REDUCER", "magic"], code=2, env=env)


def total_memory():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("size", ["1TiB", "8TiB", "all_memory"])
def test_more_than_memory_is_refused_before_it_is_touched(tmp_path, size):
    """A model of this size could only end in the hands of the kernel's OOM killer."""
    mnt = tmp_path / "mnt"
    mnt.mkdir()
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


def test_models_that_fit_one_by_one_but_not_together_are_refused(gradfs, tmp_path):
    mnt = tmp_path / "mnt"
    mnt.mkdir()
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
        assert not os.path.ismount(mnt)
    assert "together" in done.stderr, done
    assert gradfs("up", "--dry-run", models[0], mnt).returncode == 0


def test_a_dry_run_shows_what_a_model_takes_and_mounts_nothing(gradfs, tmp_path):
    """The same sum refuses a model that is too large, and names what takes how much."""
    mnt = tmp_path / "mnt"
    mnt.mkdir()
    words = ["up", "--dry-run", "--size", "1MiB", "--reducer", "adam", "--retain", "2", "--learners", "3", mnt]
    mib = 1 << 20
    for copies, others, total in [("single", {"state": 2 * mib}, 9), ("double", {"state": 4 * mib, "sums": mib}, 12)]:
        done = gradfs(*words, "--state", copies)
        assert done.returncode == 0, done
        shown = {line.split()[0]: int(line.split()[-3]) for line in done.stdout.splitlines() if line.endswith(" GiB")}
        available = shown.pop("available")
        assert shown == {"versions": 4 * mib, **others, "staging": 3 * mib, "in": total * mib}, done
        assert 0 < available <= total_memory(), done
    assert not os.path.ismount(mnt)
    # Versions alone would fit.
    size = total_memory() // 6 // BLOCK * BLOCK
    for dry_run in (["--dry-run"], []):
        done = gradfs("up", *dry_run, "--size", size, "--reducer", "adam", "--retain", "0", "--learners", "9", mnt)
        assert done.returncode == 1 and "not enough memory" in done.stderr, done
        assert not os.path.ismount(mnt)
        assert ("GiB" in done.stdout) == bool(dry_run), "what it takes is shown also where there is too little"
    assert "versions " in done.stderr and "staging " in done.stderr and "--dry-run" in done.stderr, done
