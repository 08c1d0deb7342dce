"""What gradfs is given that it must refuse: with the right errno, a message that helps, and nothing changed."""

import ctypes
import errno
import hashlib
import json
import mmap
import os
import resource
import struct
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import gradfs_binary

ONE = struct.pack("<f", 1.0)
BLOCK = 64 << 10
EPERM, EINVAL, EACCES = errno.EPERM, errno.EINVAL, errno.EACCES
libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def refused(*errnos):
    """The body must raise OSError with one of `errnos`."""
    names = [errno.errorcode[number] for number in errnos]
    try:
        yield
    except OSError as error:
        got = errno.errorcode.get(error.errno, error.errno)
        assert error.errno in errnos, f"expected {names}, got {got}: {error}"
    else:
        pytest.fail(f"expected {names}, but it succeeded")


def state(mount):
    settings = {path.name: path.read_text() for path in (mount.model / "control").iterdir()}
    return mount.version(), hashlib.sha256(mount.weights()).hexdigest(), settings


@contextmanager
def nothing_changes(mount, one=ONE):
    """Version, weights and settings stay as they are through the body, and the job is usable after it."""
    before = state(mount)
    yield
    after = state(mount)
    assert after == before
    mount.contribute(one)
    assert mount.wait_for_version(before[0] + 1) == before[0] + 1
    assert mount.weights() != b"", "weights can be read"
    assert mount.running()


def said(mount, *words, deadline=2):
    """Waits until a line of the daemon's log holds all `words`."""
    end = time.monotonic() + deadline
    while True:
        lines = mount.stderr().splitlines()
        if any(all(word in line for word in words) for line in lines):
            return
        assert time.monotonic() < end, f"no line of the log holds {words}:\n" + "\n".join(lines[-20:])
        time.sleep(0.01)


@contextmanager
def opened(path, flags):
    """A descriptor; an error of close counts, unless the body has failed already."""
    fd = os.open(path, flags)
    try:
        yield fd
    except BaseException:
        try:
            os.close(fd)
        except OSError:
            pass
        raise
    os.close(fd)


def small(start_mount, *args, **options):
    """A blank model of four blocks."""
    given = {"size": 4 * BLOCK, "block_size": "64KiB", "reducer": "sum", **options}
    return start_mount(*args, **given)


# Model files


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin, end, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


DATA = bytes(32)
BAD_FILES = {
    "empty": (b"", ["not a safetensors file", "0 bytes"]),
    "too_short_for_a_header": (b"\x02\0\0\0", ["not a safetensors file", "4 bytes"]),
    "text": (b"once upon a time there was a model\n", ["not a safetensors file"]),
    "pickle": (b"\x80\x02}q\0X\x01\0\0\0aq\x01K\x01s." * 8, ["not a safetensors file"]),
    "truncated_header": (safetensors({"a": tensor(0, 32)})[:30], ["truncated", "the header", "copy the file again"]),
    "truncated_data": (safetensors({"a": tensor(0, 32)}, DATA[:31]), ["truncated", '"a"', "copy the file again"]),
    "no_data": (safetensors({"a": tensor(0, 32)}), ["truncated", '"a"']),
    "trailing_bytes": (safetensors({"a": tensor(0, 32)}, DATA + b"x"), ["damaged"]),
    "overlap": (safetensors({"a": tensor(0, 16), "b": tensor(12, 28)}, DATA[:28]), ["overlaps", '"a"', '"b"']),
    "out_of_range": (safetensors({"a": tensor(0, 16), "b": tensor(1 << 40, (1 << 40) + 16)}, DATA), ["out of range", '"b"']),
    "offsets_near_2_64": (safetensors({"a": tensor(2**64 - 32, 2**64 - 16)}, DATA), ['"a"']),
    "offsets_beyond_2_64": (safetensors({"a": tensor(2**64, 2**64 + 16)}, DATA), ['"a"']),
    "negative_offset": (safetensors({"a": tensor(-16, 0)}, DATA), ['"a"']),
    "gap": (safetensors({"a": tensor(0, 8), "b": tensor(16, 32)}, DATA), ["belong to no tensor", '"b"']),
    "offsets_backwards": (safetensors({"a": tensor(16, 0, shape=[4])}, DATA[:16]), ['"a"', "16..0"]),
    "shape_disagrees": (safetensors({"a": tensor(0, 32, shape=[9])}, DATA), ['"a"', "36", "0..32"]),
    "shape_overflows": (safetensors({"a": tensor(0, 32, shape=[1 << 62, 1 << 62])}, DATA), ['"a"', "shape"]),
    "negative_shape": (safetensors({"a": tensor(0, 32, shape=[-8])}, DATA), ["header", '"a"']),
    "unknown_dtype": (safetensors({"a": tensor(0, 32, dtype="Q4")}, DATA), ["unknown dtype", '"a"', '"Q4"']),
    "zero_tensors": (safetensors({}, b""), ["no tensors"]),
    "metadata_only": (safetensors({"__metadata__": {"a": "b"}}, b""), ["no tensors"]),
    "only_empty_tensors": (safetensors({"a": tensor(0, 0, shape=[0])}, b""), ["no bytes"]),
    "slash_in_a_name": (safetensors({"a/b": tensor(0, 32)}, DATA), ['"a/b"', "'/'", "rename"]),
    "absolute_name": (safetensors({"/etc/passwd": tensor(0, 32)}, DATA), ['"/etc/passwd"', "rename"]),
    "climbing_name": (safetensors({"../../x": tensor(0, 32)}, DATA), ['"../../x"', "rename"]),
    "dot_dot": (safetensors({"..": tensor(0, 32)}, DATA), ['".."', "rename"]),
    "dot": (safetensors({".": tensor(0, 32)}, DATA), ['"."', "rename"]),
    "nameless": (safetensors({"": tensor(0, 32)}, DATA), ['""', "rename"]),
    "nul_in_a_name": (safetensors({"a\0b": tensor(0, 32)}, DATA), ["NUL", "rename"]),
    "name_too_long": (safetensors({"n" * 252: tensor(0, 32)}, DATA), ["251", "rename"]),
    "duplicate_names": (
        safetensors(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}', DATA),
        ["two tensors", '"a"'],
    ),
    "huge_header": (safetensors({"a": tensor(0, 32)}, DATA, length=2**63), ["header of 9223372036854775808 bytes"]),
    "header_of_all_ones": (safetensors({"a": tensor(0, 32)}, DATA, length=2**64 - 1), ["header"]),
    "header_of_zero": (safetensors({"a": tensor(0, 32)}, DATA, length=0), ["header"]),
    "header_is_a_list": (safetensors(b'[{"a": 1}]', DATA), ["header"]),
    "header_is_not_json": (safetensors(b'{"a": }', DATA), ["header"]),
    "header_is_not_utf8": (safetensors(b'{"\xff": 1}', DATA), ["header"]),
    "header_nests_without_end": (safetensors(b'{"a":' + b"[" * 100_000, DATA), ["header"]),
}


def up(gradfs, mnt, *args, env=None):
    """`gradfs up ARGS MNT`, which must end by itself."""
    try:
        return gradfs("up", *args, mnt, timeout=6, env=env)
    except subprocess.TimeoutExpired:
        mounted = os.path.ismount(mnt)
        subprocess.run(["umount", "-l", mnt], stderr=subprocess.DEVNULL, check=False)
        pytest.fail(f"gradfs up {args} was not refused; {'it mounted' if mounted else 'it hangs'}", pytrace=False)


def refused_up(gradfs, tmp_path, *args, words, code=None, env=None):
    """`gradfs up ARGS MNT` must fail and say `words`; nothing is mounted then, nothing left in the directory."""
    mnt = tmp_path / "mnt"
    mnt.mkdir(exist_ok=True)
    done = up(gradfs, mnt, *args, env=env)
    shown = f"$ gradfs up {' '.join(map(str, args))}\n{done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == code if code is not None else done.returncode in (1, 2), shown
    assert done.stderr.startswith("gradfs: error: "), shown
    assert "panicked" not in done.stderr and "RUST_BACKTRACE" not in done.stderr, shown
    assert done.stdout == "", shown
    assert len(done.stderr) < 2000, shown
    for word in words:
        assert word in done.stderr, f"{word!r} is missing:\n{shown}"
    assert not os.path.ismount(mnt) and list(mnt.iterdir()) == [], shown
    return done.stderr


@pytest.mark.parametrize("fault", BAD_FILES)
def test_bad_model_file(gradfs, tmp_path, fault):
    contents, words = BAD_FILES[fault]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(contents)
    refused_up(gradfs, tmp_path, path, words=[str(path), *words], code=1)
    assert path.read_bytes() == contents, "the file is as it was"


def test_one_bad_file_among_good_ones_mounts_nothing(gradfs, tmp_path):
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    good.write_bytes(safetensors({"a": tensor(0, 32)}, DATA))
    bad.write_bytes(b"")
    refused_up(gradfs, tmp_path, good, bad, words=[str(bad), "not a safetensors file"], code=1)


def test_model_is_a_directory(gradfs, tmp_path):
    path = tmp_path / "d.safetensors"
    path.mkdir()
    refused_up(gradfs, tmp_path, path, words=[str(path), "not a regular file"], code=1)


def test_model_is_missing(gradfs, tmp_path):
    path = tmp_path / "missing.safetensors"
    refused_up(gradfs, tmp_path, path, words=[str(path), "No such file"], code=1)


def test_model_is_a_device(gradfs, tmp_path):
    refused_up(gradfs, tmp_path, "/dev/zero", words=["/dev/zero", "not a regular file"], code=1)


def test_model_is_a_pipe_that_nobody_writes(gradfs, tmp_path):
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    refused_up(gradfs, tmp_path, path, words=[str(path), "not a regular file"], code=1)


def test_model_may_not_be_read(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory(prefix="gradfs-test-") as place:
        os.chmod(place, 0o755)
        place = Path(place)
        binary, model, mnt = place / "gradfs", place / "secret.safetensors", place / "mnt"
        binary.write_bytes(gradfs_binary().read_bytes())
        binary.chmod(0o755)
        model.write_bytes(safetensors({"a": tensor(0, 32)}, DATA))
        model.chmod(0o600)
        mnt.mkdir()
        os.chown(mnt, 65534, 65534)
        done = subprocess.run(
            [binary, "up", model, mnt],
            user=65534, group=65534, extra_groups=[], capture_output=True, text=True, timeout=10, cwd="/", check=False,
        )
        assert done.returncode == 1, done
        assert str(model) in done.stderr and "Permission denied" in done.stderr, done.stderr
        assert not os.path.ismount(mnt)


# The command line


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
    "dtype": (["--size", "1MiB", "--dtype", "f64"], ["--dtype", "f64", "f32", "bf16"]),
    "dtype_with_a_file": (["--dtype", "f32", "m.safetensors"], ["--dtype", "of no use"]),
    "reducer": (["--size", "1MiB", "--reducer", "magic"], ["--reducer", "magic", "adamw"]),
    "consistency": (["--size", "1MiB", "--consistency", "sometimes"], ["--consistency", "sometimes", "async"]),
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
    "learners_too_many": (["--size", "1MiB", "--learners", "70000"], ["--learners", "65536"]),
    "min_learners_above_learners": (["--size", "1MiB", "--learners", "2", "--min-learners", "3"], ["--min-learners", "learners is 2", "raise it"]),
    "max_versions_below_retain": (["--size", "1MiB", "--max-versions", "4", "--retain", "3"], ["max_versions (4)", "retain + 3"]),
    "timeout_zero": (["--size", "1MiB", "--timeout", "0"], ["--timeout", "0.001"]),
    "timeout_negative": (["--size", "1MiB", "--timeout=-1"], ["--timeout", '"-1"']),
    "timeout_of_ages": (["--size", "1MiB", "--timeout", "1e300"], ["--timeout", "year"]),
    "lease_is_a_word": (["--size", "1MiB", "--lease", "long"], ["--lease", '"long"']),
    "threads_zero": (["--size", "1MiB", "--threads", "0"], ["--threads", '"0"']),
    "threads_too_many": (["--size", "1MiB", "--threads", "100000"], ["--threads", "256"]),
    "name_twice": (["--name", "a", "--name", "a", "a.safetensors", "b.safetensors"], ["two models are called a", "--name"]),
    "files_of_one_name": (["x/m.safetensors", "y/m.safetensors"], ["two models are called m", "--name"]),
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
def test_bad_command_line(gradfs, tmp_path, fault):
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


def test_negative_size_as_two_words(gradfs, tmp_path):
    done = gradfs("up", "--size", "-5", tmp_path, timeout=10)
    assert done.returncode == 2 and "-5" in done.stderr and "--size" in done.stderr, done.stderr


def test_no_mountpoint(gradfs):
    done = gradfs("up", "--size", "1MiB", timeout=10)
    assert done.returncode == 2 and "mountpoint" in done.stderr, done.stderr


def test_model_file_where_the_mountpoint_should_be(gradfs, tmp_path):
    done = gradfs("up", "--size", "1MiB", tmp_path / "a.safetensors", timeout=10)
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
    "twice": ('size = "1MiB"\nsize = "2MiB"\n', ["not valid TOML", "size"]),
}


@pytest.mark.parametrize("fault", BAD_CONFIGURATIONS)
def test_bad_configuration_file(gradfs, tmp_path, fault):
    text, words = BAD_CONFIGURATIONS[fault]
    path = tmp_path / "job.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused_up(gradfs, tmp_path, "--config", path, words=[str(path), *words], code=2)


def test_configuration_file_is_missing(gradfs, tmp_path):
    path = tmp_path / "none.toml"
    refused_up(gradfs, tmp_path, "--config", path, words=[str(path), "No such file"], code=2)


def test_bad_environment_variable(gradfs, tmp_path):
    env = {"GRADFS_REDUCER": "magic"}
    refused_up(gradfs, tmp_path, "--size", "1MiB", words=["GRADFS_REDUCER", "magic"], code=2, env=env)


def total_memory():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("size", ["1TiB", "256TiB", "all_memory"])
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


# Writes


@pytest.fixture(params=["passthrough", "no_passthrough"])
def way(request):
    """Whether mappings and reads bypass the daemon."""
    return {"no_passthrough": request.param == "no_passthrough"}


def test_write_past_the_end(start_mount):
    mount = small(start_mount)
    size = 4 * BLOCK
    with nothing_changes(mount):
        with opened(mount.model / "gradients", os.O_WRONLY) as fd:
            for offset in [size, size + 1, size + (1 << 20), 1 << 40, 1 << 62]:
                with refused(errno.EFBIG):
                    os.pwrite(fd, ONE, offset)
        said(mount, str(size + 4), str(size))


def test_write_across_the_end(start_mount):
    mount = small(start_mount)
    size = 4 * BLOCK
    with nothing_changes(mount):
        with opened(mount.model / "gradients", os.O_WRONLY) as fd:
            with refused(errno.EFBIG):
                os.pwrite(fd, ONE * 2, size - 4)
            with refused(errno.EFBIG):
                os.pwrite(fd, bytes(size + 4), 0)


def test_write_of_new_weights_past_the_end(start_mount):
    mount = small(start_mount, reducer="assign")
    size = 4 * BLOCK
    with nothing_changes(mount):
        with opened(mount.model / "weights", os.O_WRONLY) as fd:
            with refused(errno.EFBIG):
                os.pwrite(fd, ONE, size)
            with refused(errno.EFBIG):
                os.pwrite(fd, ONE * 2, size - 4)


def test_huge_write_is_cut_at_the_end_and_the_rest_refused(start_mount):
    mount = start_mount(size="16MiB", reducer="sum")
    data = ONE * (5 << 20)
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        done = os.pwrite(fd, data, 0)
        assert 0 < done <= 16 << 20 and done % 4 == 0, done
        while done < 16 << 20:
            done += os.pwrite(fd, data[done:16 << 20], done)
        with refused(errno.EFBIG):
            os.pwrite(fd, ONE, done)
    assert mount.wait_for_version(1) == 1
    assert (mount.weights() == ONE * (4 << 20)) is True


def test_huge_write_in_one_call(start_mount):
    mount = start_mount(size="64MiB", reducer="sum")
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        assert os.write(fd, ONE * (16 << 20)) == 64 << 20
    assert mount.wait_for_version(1) == 1
    assert (mount.weights() == ONE * (16 << 20)) is True


def test_files_that_are_read_only_are_so_for_root_too(start_mount):
    mount = small(start_mount)
    mount.join("a")
    mount.leave("a")
    mount.join("a")
    mount.contribute(ONE, learner="a")
    mount.wait_for_version(1)
    mount.leave("a")
    mount.join("b")
    m = mount.model
    paths = [
        m / "weights", m / "weights.safetensors", m / "tensors/weights.npy", m / "version", m / "status.json",
        m / "versions/1/weights", m / "versions/1/weights.safetensors", m / "versions/1/version",
        m / "versions/1/tensors/weights.npy", m / "learners/b/weights", m / "learners/b/version",
        m / "learners/b/status", mount.root / "README",
    ]
    before = state(mount)
    for path in paths:
        for flags in [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND]:
            # Which of two reasons is given for appending to a read-only file is open.
            with refused(EACCES, EINVAL) if flags & os.O_APPEND else refused(EACCES):
                os.close(os.open(path, flags))
    for path in paths[1:]:
        with refused(EACCES):
            os.truncate(path, 0)
    said(mount, "weights is read-only", "assign", "control/reducer")
    assert state(mount) == before


def test_reading_gradients(start_mount):
    mount = small(start_mount)
    mount.join("a")
    for path in [mount.model / "gradients", mount.model / "learners/a/gradients"]:
        with refused(EACCES):
            os.close(os.open(path, os.O_RDONLY))
    said(mount, "gradients is write-only", "read weights instead")


HALVES = {
    "f32": [[(0, 6)], [(0, 1)], [(2, 2)], [(4, 7), (12, 4)], [(BLOCK - 2, 2)], [(BLOCK, 5)], [(BLOCK + 1, 4)], [(0, 4), (4 * BLOCK - 3, 3)]],
    "bf16": [[(0, 3)], [(1, 1)], [(BLOCK - 1, 1)], [(1, 4)]],
    "f16": [[(0, 3)], [(1, 1)], [(BLOCK - 1, 1)], [(1, 4)]],
}
ONES = {"f32": ONE, "f16": struct.pack("<e", 1.0), "bf16": ONE[2:]}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("end", ["close", "fsync"])
def test_half_an_element(start_mount, dtype, end):
    mount = small(start_mount, dtype=dtype)
    for ranges in HALVES[dtype]:
        with nothing_changes(mount, ONES[dtype]):
            fd = os.open(mount.model / "gradients", os.O_WRONLY)
            for offset, length in ranges:
                assert os.pwrite(fd, bytes(length), offset) == length
            if end == "fsync":
                with refused(EINVAL):
                    os.fsync(fd)
                os.close(fd)
            else:
                with refused(EINVAL):
                    os.close(fd)
    said(mount, "in the middle of an element")


def test_half_an_element_that_is_completed_in_time(start_mount):
    mount = small(start_mount)
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        for offset, part in [(0, ONE[:1]), (3, ONE[3:] + ONE[:2]), (1, ONE[1:3]), (6, ONE[2:])]:
            os.pwrite(fd, part, offset)
    assert mount.wait_for_version(1) == 1
    assert (mount.weights()[:12] == ONE * 2 + bytes(4)) is True


def test_fsync_of_half_an_element_leaves_the_handle_usable(start_mount):
    mount = small(start_mount)
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        os.pwrite(fd, bytes(6), 0)
        with refused(EINVAL):
            os.fsync(fd)
        os.pwrite(fd, ONE, 0)
        os.fsync(fd)
        assert mount.version() == 1
    assert mount.version() == 1 and mount.weights()[:4] == ONE


def test_half_an_element_of_new_weights(start_mount):
    mount = small(start_mount, reducer="assign")
    for end in ["fsync", "close"]:
        with nothing_changes(mount):
            fd = os.open(mount.model / "weights", os.O_WRONLY)
            os.pwrite(fd, bytes(6), 0)
            with refused(EINVAL):
                os.fsync(fd) if end == "fsync" else os.close(fd)
            if end == "fsync":
                os.close(fd)


def test_half_an_element_in_a_model_of_several_types(start_mount, tmp_path):
    path = tmp_path / "mixed.safetensors"
    header = {"a": tensor(0, 8), "b": tensor(8, 14, "F16", [3]), "c": tensor(14, 21, "U8", [7])}
    path.write_bytes(safetensors(header, bytes(21)))
    mount = start_mount(model=path, reducer="sum")
    for offset, length, fits in [(0, 6, False), (8, 1, False), (8, 2, True), (10, 4, True), (14, 1, True), (15, 3, True)]:
        fd = os.open(mount.model / "gradients", os.O_WRONLY)
        os.pwrite(fd, bytes(length), offset)
        if fits:
            os.close(fd)
        else:
            with refused(EINVAL):
                os.close(fd)


# NaN and Inf

NONFINITE = {
    "f32": [struct.pack("<f", float(x)) for x in ("nan", "inf", "-inf")] + [struct.pack("<I", 0x7F800001)],
    "f16": [struct.pack("<e", float(x)) for x in ("nan", "inf", "-inf")] + [struct.pack("<H", 0x7C01)],
    "bf16": [struct.pack("<H", x) for x in (0x7FC0, 0x7F80, 0xFF80, 0x7F81)],
}


def contribute_mapped(path, size, offset, data):
    fd = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(fd, size) as memory:
            kept = memory[offset:offset + len(data)]
            memory[offset:offset + len(data)] = data
            try:
                os.fsync(fd)
            finally:
                memory[offset:offset + len(data)] = kept
    finally:
        os.close(fd)


@pytest.mark.parametrize("dtype", NONFINITE)
@pytest.mark.parametrize("where", ["whole_block", "partial_block", "last_element", "mapped"])
def test_nan_and_inf_in_gradients(start_mount, way, dtype, where):
    mount = small(start_mount, dtype=dtype, **way)
    one = ONES[dtype]
    count = BLOCK // len(one)
    path = mount.model / "gradients"
    for bad in NONFINITE[dtype]:
        with nothing_changes(mount, one):
            with refused(EINVAL):
                if where == "whole_block":
                    mount.contribute(one * (count // 2) + bad + one * (count - count // 2 - 1), offset=BLOCK)
                elif where == "partial_block":
                    mount.contribute(one + bad, offset=BLOCK + 3 * len(one))
                elif where == "last_element":
                    mount.contribute(one * (count - 1) + bad, offset=3 * BLOCK)
                else:
                    contribute_mapped(path, 4 * BLOCK, 2 * BLOCK + 7 * len(one), bad)
    said(mount, "NaN or Inf", "control/nonfinite")


@pytest.mark.parametrize("dtype", NONFINITE)
def test_nan_spoils_only_its_own_learners_contribution(start_mount, dtype):
    mount = small(start_mount, dtype=dtype, learners=2)
    one = ONES[dtype]
    mount.join("good"), mount.join("bad")
    mount.contribute(one * (BLOCK // len(one)), learner="good")
    for data in [NONFINITE[dtype][0] * (BLOCK // len(one)), one + NONFINITE[dtype][1]]:
        with refused(EINVAL):
            mount.contribute(data, learner="bad")
        assert mount.version() == 0 and mount.weights() == bytes(4 * BLOCK)
    mount.contribute(one, offset=BLOCK, learner="bad")
    assert mount.wait_for_version(1) == 1
    assert (mount.weights() == one * (BLOCK // len(one)) + one + bytes(3 * BLOCK - len(one))) is True


@pytest.mark.parametrize("dtype", NONFINITE)
def test_nan_and_inf_in_new_weights(start_mount, dtype):
    mount = small(start_mount, dtype=dtype, reducer="assign")
    one = ONES[dtype]
    for bad in NONFINITE[dtype]:
        for offset in [0, BLOCK + 6 * len(one), 4 * BLOCK - len(bad)]:
            with nothing_changes(mount, one):
                fd = os.open(mount.model / "weights", os.O_WRONLY)
                os.pwrite(fd, bad, offset)
                with refused(EINVAL):
                    os.close(fd)


@pytest.mark.parametrize("dtype", NONFINITE)
def test_nan_and_inf_are_taken_where_they_are_wanted(start_mount, way, dtype):
    mount = small(start_mount, dtype=dtype, nonfinite="accept", carry=0, **way)
    one = ONES[dtype]
    inf, size = NONFINITE[dtype][1], len(one)
    mount.contribute(inf * (BLOCK // size), offset=BLOCK)
    assert (mount.weights()[BLOCK:2 * BLOCK] == inf * (BLOCK // size)) is True
    mount.contribute(one + inf)
    assert (mount.weights()[:3 * size] == one + inf + bytes(size)) is True
    contribute_mapped(mount.model / "gradients", 4 * BLOCK, 5 * size, inf)
    assert (mount.weights()[5 * size:6 * size] == inf) is True
    nan = NONFINITE[dtype][0]
    mount.contribute(nan)
    got = mount.weights()[:size]
    bits = int.from_bytes(got, "little")
    exponent, fraction = {"f32": (0x7F800000, 0x7FFFFF), "f16": (0x7C00, 0x3FF), "bf16": (0x7F80, 0x7F)}[dtype]
    assert bits & exponent == exponent and bits & fraction, f"{got.hex()} is no NaN"
    assert mount.version() == 4


def test_rewrite_of_a_block_that_is_sent(start_mount):
    mount = small(start_mount)
    whole = ONE * (BLOCK // 4)
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        assert os.pwrite(fd, whole, 0) == BLOCK
        for offset, data in [(0, whole), (0, ONE), (BLOCK - 4, ONE * 2)]:
            with refused(EINVAL):
                os.pwrite(fd, data, offset)
        # A block that is not complete can be written over; the last one counts.
        os.pwrite(fd, ONE, BLOCK)
        os.pwrite(fd, struct.pack("<f", 3.0), BLOCK)
    said(mount, "block 0", "already sent")
    assert mount.wait_for_version(1) == 1
    assert mount.weights() == whole + struct.pack("<f", 3.0) + bytes(3 * BLOCK - 4)


def test_rewrite_through_another_handle(start_mount):
    mount = small(start_mount)
    whole = ONE * (BLOCK // 4)
    with opened(mount.model / "gradients", os.O_WRONLY) as one, opened(mount.model / "gradients", os.O_WRONLY) as other:
        os.pwrite(one, whole, 0)
        with refused(EINVAL):
            os.pwrite(other, whole, 0)
        os.pwrite(other, whole, BLOCK)
        os.fsync(one)
    assert mount.version() == 1
    assert (mount.weights() == whole * 2 + bytes(2 * BLOCK)) is True


def test_append(start_mount):
    mount = small(start_mount)
    mount.join("a")
    mount.leave("a")
    with nothing_changes(mount):
        for name in ["gradients", "device", "weights"]:
            with refused(EINVAL):
                os.close(os.open(mount.model / name, os.O_WRONLY | os.O_APPEND))
        said(mount, "fixed size", "do not append")


def test_truncate_to_another_size(start_mount):
    mount = small(start_mount)
    size = 4 * BLOCK
    with nothing_changes(mount):
        for name in ["gradients", "device", "weights"]:
            for length in [1, size - 1, size + 1, 1 << 40]:
                with refused(EINVAL):
                    os.truncate(mount.model / name, length)
            os.truncate(mount.model / name, size)
            assert (mount.model / name).stat().st_size == size
        with opened(mount.model / "gradients", os.O_WRONLY) as fd:
            with refused(EINVAL):
                os.ftruncate(fd, 8)
        said(mount, "size is fixed at", str(size))


def test_truncate_of_small_files_to_a_size_changes_nothing(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        for path in [mount.model / "version", mount.model / "status.json", mount.root / "README"]:
            with refused(EACCES):
                os.truncate(path, 1)
        os.truncate(mount.model / "control/learning_rate", 0)


def fallocate(fd, mode, offset, length):
    call = libc.fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, mode, offset, length) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def test_fallocate(start_mount, way):
    mount = small(start_mount, **way)
    with nothing_changes(mount):
        for name in ["gradients", "device"]:
            with opened(mount.model / name, os.O_WRONLY) as fd:
                for mode in [0, 1, 3, 0x10]:
                    with refused(errno.EOPNOTSUPP):
                        fallocate(fd, mode, 0, BLOCK)


def test_names_cannot_be_made_removed_or_moved(start_mount, tmp_path):
    mount = small(start_mount)
    m = mount.model
    mount.join("a")
    mount.leave("a")

    def create(path):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))

    with nothing_changes(mount):
        for place in [mount.root, m, m / "control", m / "tensors", m / "versions", m / "versions/0", m / "learners"]:
            with refused(EPERM):
                create(place / "new")
            with refused(EPERM):
                os.mknod(place / "new", 0o600)
            with refused(EPERM):
                os.mkfifo(place / "new")
            with refused(EPERM):
                os.symlink("/etc/passwd", place / "new")
            with refused(EPERM):
                os.link(m / "version", place / "new")
            with refused(EPERM):
                os.rename(m / "version", place / "new")
            if place != m / "learners":
                with refused(EPERM):
                    os.mkdir(place / "new")
            assert not (place / "new").exists()
        files = ["weights", "weights.safetensors", "tensors/weights.npy", "gradients", "device", "version",
                 "status.json", "versions/0/weights", "control/reducer", "../README"]
        for name in files:
            with refused(EPERM):
                os.unlink(m / name)
            with refused(EPERM):
                os.chmod(m / name, 0o777)
            with refused(EPERM):
                os.chown(m / name, 1, 1)
            with refused(EPERM):
                os.setxattr(m / name, "user.x", b"1")
            with refused(EPERM):
                os.removexattr(m / name, "user.gradfs.version")
            with refused(EPERM):
                os.rename(m / name, m / "moved")
        for name in [".", "control", "tensors", "versions", "versions/0", "learners"]:
            with refused(EPERM):
                os.rmdir((m / name).resolve())
            with refused(EPERM):
                os.chmod(m / name, 0o777)
        with refused(EPERM, errno.EXDEV):
            os.rename(m / "version", tmp_path / "stolen")


def test_a_learners_directory_cannot_be_renamed(start_mount):
    mount = small(start_mount)
    mount.join("a")
    for target in [mount.model / "learners/b", mount.root / "b"]:
        with refused(EPERM):
            os.rename(mount.place("a"), target)
    with refused(EPERM):
        os.mkdir(mount.place("a") / "x")
    with refused(EPERM):
        os.unlink(mount.place("a") / "status")
    mount.contribute(ONE, learner="a")
    assert mount.wait_for_version(1) == 1


def test_zero_length_writes_contribute_nothing(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        with opened(mount.model / "gradients", os.O_WRONLY) as fd:
            for offset in [0, 1, BLOCK, 4 * BLOCK]:
                assert os.pwrite(fd, b"", offset) == 0
            os.fsync(fd)
        with opened(mount.model / "control/learning_rate", os.O_WRONLY) as fd:
            assert os.write(fd, b"") == 0


def test_o_direct_with_unaligned_buffers(start_mount, way):
    mount = start_mount(size="4MiB", block_size="64KiB", reducer="sum", **way)
    data = struct.pack("<262144f", *range(1 << 18)) * 4
    raw = mmap.mmap(-1, len(data) + 8192)
    raw[3:3 + len(data)] = data
    with opened(mount.model / "gradients", os.O_WRONLY | os.O_DIRECT) as fd:
        done = 0
        for length in [4, 65532, 65536 + 4, 1 << 20, (1 << 20) + 12, len(data)]:
            with memoryview(raw) as view:
                length = min(length, len(data) - done)
                assert os.pwrite(fd, view[3 + done:3 + done + length], done) == length
            done += length
    assert mount.wait_for_version(1) == 1
    fd = os.open(mount.model / "weights", os.O_RDONLY)
    got = mmap.mmap(-1, len(data) + 8192)
    with memoryview(got) as view:
        assert os.preadv(fd, [view[1:1 + len(data)]], 0) == len(data)
    os.close(fd)
    assert got[1:1 + len(data)] == data


def test_vectored_writes(start_mount):
    mount = small(start_mount)
    data = struct.pack(f"<{BLOCK}f", *range(BLOCK))
    cuts = [0, 1, 3, 4, 10, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7, 4 * BLOCK]
    parts = [data[a:b] for a, b in zip(cuts, cuts[1:])]
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        assert os.writev(fd, parts) == len(data)
    assert (mount.weights() == data) is True
    with opened(mount.model / "gradients", os.O_WRONLY) as fd:
        many = [data[BLOCK + i:BLOCK + i + 1] for i in range(1000)]
        assert os.pwritev(fd, many, BLOCK) == 1000
        with refused(errno.EFBIG):
            os.pwritev(fd, [ONE, ONE, ONE], 4 * BLOCK - 8)
    twice = struct.pack("<250f", *(2 * (BLOCK // 4 + i) for i in range(250)))
    assert (mount.weights() == data[:BLOCK] + twice + data[BLOCK + 1000:]) is True


@pytest.mark.parametrize("call", ["sendfile", "splice", "copy_file_range", "copy_file_range_inside"])
def test_kernel_copies_into_gradients(start_mount, tmp_path, way, call):
    mount = start_mount(size="2MiB", block_size="64KiB", reducer="sum", **way)
    data = struct.pack("<262144f", *range(1 << 18)) * 2
    source = tmp_path / "source"
    source.write_bytes(data)
    inside = call == "copy_file_range_inside"
    if inside:
        mount.contribute(data)
        source = mount.model / "weights"
    version = mount.version()
    expected = struct.pack("<262144f", *range(0, 1 << 19, 2)) * 2 if inside else data
    with opened(source, os.O_RDONLY) as of, opened(mount.model / "gradients", os.O_WRONLY) as to:
        done = 0
        try:
            while done < len(data):
                if call == "sendfile":
                    moved = os.sendfile(to, of, done, len(data) - done)
                elif call == "splice":
                    r, w = os.pipe()
                    moved = os.splice(of, w, 65536, offset_src=done)
                    left = moved
                    while left:
                        left -= os.splice(r, to, left, offset_dst=done + moved - left)
                    os.close(r), os.close(w)
                else:
                    moved = os.copy_file_range(of, to, len(data) - done, done, done)
                assert moved > 0
                done += moved
        except OSError as error:
            # Between filesystems the kernel may refuse; programs then copy by themselves.
            assert call == "copy_file_range" and error.errno in (errno.EXDEV, errno.EOPNOTSUPP), error
            assert done == 0
            os.pwrite(to, data, 0)
    assert mount.wait_for_version(version + 1) == version + 1
    assert (mount.weights() == expected) is True


def test_splice_past_the_end(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        r, w = os.pipe()
        os.write(w, ONE * 4)
        with opened(mount.model / "gradients", os.O_WRONLY) as fd:
            with refused(errno.EFBIG):
                os.splice(r, fd, 16, offset_dst=4 * BLOCK)
        os.close(r), os.close(w)


def test_weights_cannot_be_changed_through_a_mapping(start_mount, way):
    """A version is immutable: a handle that could be mapped writable is refused."""
    mount = small(start_mount, reducer="assign", **way)
    with opened(mount.model / "weights", os.O_RDONLY) as reader:
        with refused(EACCES):
            os.open(mount.model / "weights", os.O_RDWR)
        for flags in (os.O_RDONLY, os.O_WRONLY):
            with opened(mount.model / "weights", flags) as fd, pytest.raises(OSError):
                mmap.mmap(fd, BLOCK, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        assert os.pread(reader, 4, 0) == bytes(4), "a reader of this version sees what was never published"
        assert (mount.model / "versions/0/weights").read_bytes()[:4] == bytes(4)
        assert os.pread(reader, 4, 0) == bytes(4)


def test_stores_through_a_mapping_of_device_are_not_lost_in_silence(start_mount):
    mount = small(start_mount)
    fd = os.open(mount.model / "device", os.O_RDWR)
    try:
        with mmap.mmap(fd, BLOCK) as memory:
            memory[:4] = ONE
            memory.flush()
        os.fsync(fd)
    except OSError:
        return
    finally:
        os.close(fd)
    assert (mount.weights()[:4] == ONE) is True, "every call succeeded, and the stored gradient counts nowhere"


# Settings


BAD_VALUES = {
    "learning_rate": [b"fast", b"\n", b" ", b"nan", b"inf", b"-1", b"1e39", b"0.1 0.2", b"0.1\n0.2\n", b"0,1", b"0x10", b"\xff\xfe", b"0.1\0", b"\0" * 64, b"1" * 5000, b"1" * (2 << 20)],
    "momentum": [b"1.01", b"-0.1", b"x"],
    "beta1": [b"1", b"2"],
    "learners": [b"0", b"-1", b"1.5", b"70000", b"18446744073709551617"],
    "min_learners": [b"0", b"2"],
    "max_versions": [b"0", b"3", b"x"],
    "retain": [b"-1", b"70000", b"14"],
    "timeout": [b"0", b"-1", b"never", b"1e300", b"nan", b"inf"],
    "lease": [b"-1", b"x"],
    "reducer": [b"", b"magic", b"SGD", b"sgd adam", b"../../etc"],
    "consistency": [b"maybe"],
    "aggregation": [b"max"],
    "nonfinite": [b"perhaps"],
}


def test_bad_settings(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        for name, values in BAD_VALUES.items():
            old = (mount.model / "control" / name).read_bytes()
            for value in values:
                if not value:
                    continue
                for flags in [os.O_WRONLY, os.O_WRONLY | os.O_TRUNC, os.O_RDWR]:
                    with opened(mount.model / "control" / name, flags) as fd:
                        with refused(EINVAL):
                            os.write(fd, value)
                assert (mount.model / "control" / name).read_bytes() == old, (name, value)
        said(mount, "control/learning_rate", '"fast"', "number")
        said(mount, "control/min_learners", "above learners")
        for line in mount.stderr().splitlines():
            assert len(line) < 500, f"a line of {len(line)} bytes in the log: {line[:200]}…"


def test_shell_redirection_of_a_bad_setting(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        done = subprocess.run(
            ["sh", "-c", "echo fast | tee control/learning_rate"], cwd=mount.model, capture_output=True, text=True, timeout=10, check=False,
        )
        assert done.returncode != 0 and "Invalid argument" in done.stderr, done


def test_setting_at_an_offset(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        with opened(mount.model / "control/learning_rate", os.O_WRONLY) as fd:
            for offset in [1, 2, 4096, 1 << 40]:
                with refused(EINVAL, errno.EFBIG):
                    os.pwrite(fd, b"0.5\n", offset)
        said(mount, "control/learning_rate", "whole value at once")


def test_unknown_setting(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        path = mount.model / "control/learning_speed"
        for flags in [os.O_RDONLY, os.O_WRONLY]:
            with refused(errno.ENOENT):
                os.open(path, flags)
        with refused(EPERM):
            os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        with refused(errno.ENOENT):
            path.stat()


def test_settings_are_whole_while_they_change(start_mount):
    mount = small(start_mount)
    values = ["0.125", "12345", "0.0000001"]
    stop, strange = threading.Event(), []

    def read():
        while not stop.is_set():
            for way in ["file", "status"]:
                got = mount.control("learning_rate") if way == "file" else mount.status()["control"]["learning_rate"]
                if got not in values and got != "0.01":
                    strange.append(got)

    def write(value):
        while not stop.is_set():
            mount.control("learning_rate", value)

    threads = [threading.Thread(target=read) for _ in range(2)]
    threads += [threading.Thread(target=write, args=[value]) for value in values]
    for thread in threads:
        thread.start()
    time.sleep(0.7)
    stop.set()
    for thread in threads:
        thread.join(20)
    assert strange == []
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1


# Learners


def test_bad_learner_names(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        place = os.fsencode(mount.model / "learners")
        for name in [b".hidden", b"a b", "ü".encode(), b"a\nb", b"\xff\xfe", b"a:b", b"*", b"x" * 65, b"x" * 255]:
            with refused(EINVAL):
                os.mkdir(place + b"/" + name)
        with refused(EINVAL, errno.ENAMETOOLONG):
            os.mkdir(place + b"/" + b"x" * 256)
        assert os.listdir(place) == []
        said(mount, "learner name", "letters, digits")
    os.mkdir(place + b"/" + b"x" * 64)


def test_learner_name_is_taken(start_mount):
    mount = small(start_mount)
    mount.join("a")
    for _ in range(3):
        with refused(errno.EEXIST):
            mount.join("a")
    mount.contribute(ONE, learner="a")
    assert mount.wait_for_version(1) == 1


def test_learner_name_is_taken_in_a_race(start_mount):
    mount = small(start_mount)
    for round_ in range(20):
        outcomes, barrier = [], threading.Barrier(4)

        def join():
            barrier.wait(10)
            try:
                os.mkdir(mount.place(f"r{round_}"))
                outcomes.append(0)
            except OSError as error:
                outcomes.append(error.errno)

        threads = [threading.Thread(target=join) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(outcomes) == [0] + [errno.EEXIST] * 3
        mount.leave(f"r{round_}")


def test_leaving_without_having_joined(start_mount):
    mount = small(start_mount)
    with nothing_changes(mount):
        for name in ["nobody", ".hidden", "x" * 255]:
            with refused(errno.ENOENT):
                mount.leave(name)
        mount.join("a")
        mount.leave("a")
        with refused(errno.ENOENT):
            mount.leave("a")


def test_learner_leaves_while_it_writes(start_mount):
    mount = small(start_mount)
    mount.join("a")
    fd = os.open(mount.place("a") / "gradients", os.O_WRONLY)
    os.pwrite(fd, ONE * (BLOCK // 4), 0)
    os.pwrite(fd, ONE, BLOCK)
    mount.leave("a")
    with nothing_changes(mount):
        with refused(errno.ENOTCONN):
            os.pwrite(fd, ONE * (BLOCK // 4), 2 * BLOCK)
        with refused(errno.ENOTCONN):
            os.close(fd)
    said(mount, "no longer in the job", "join again")


def test_learner_leaves_and_then_closes_what_it_wrote(start_mount):
    mount = small(start_mount)
    mount.join("a")
    fd = os.open(mount.place("a") / "gradients", os.O_WRONLY)
    os.pwrite(fd, ONE, 0)
    mount.leave("a")
    with nothing_changes(mount):
        with refused(errno.ENOTCONN):
            os.close(fd)


def test_handles_outlive_their_learner(start_mount, way):
    mount = small(start_mount, **way)
    mount.contribute(ONE)
    mount.leave("mount")
    mount.join("a")
    place = mount.place("a")
    weights = os.open(place / "weights", os.O_RDONLY)
    gradients = os.open(place / "gradients", os.O_RDWR)
    memory = mmap.mmap(gradients, BLOCK)
    status = os.open(place / "status", os.O_RDONLY)
    mount.leave("a")
    with nothing_changes(mount):
        assert os.pread(weights, 4, 0) == ONE
        memory[:4] = ONE
        for act in [lambda: os.fsync(gradients), lambda: os.pwrite(gradients, ONE, 0)]:
            with refused(errno.ENOTCONN):
                act()
        with refused(errno.ENOENT, errno.ENOTCONN):
            os.pread(status, 100, 0)
        memory.close()
        for fd in [weights, gradients, status]:
            os.close(fd)
        with refused(errno.ENOENT):
            os.open(place / "gradients", os.O_WRONLY)


def test_an_old_handle_does_not_write_for_the_next_learner_of_its_name(start_mount):
    mount = small(start_mount)
    mount.join("a")
    old = os.open(mount.place("a") / "gradients", os.O_WRONLY)
    mount.leave("a")
    mount.join("a")
    with refused(errno.ENOTCONN):
        os.pwrite(old, ONE * (BLOCK // 4), 0)
    mount.contribute(ONE, offset=BLOCK, learner="a")
    with refused(errno.ENOTCONN):
        os.pwrite(old, ONE, 0)
    os.close(old)
    assert mount.wait_for_version(1) == 1
    assert (mount.weights()[:BLOCK + 4] == bytes(BLOCK) + ONE) is True


def test_leaving_in_mid_step_lets_the_others_go_on(start_mount):
    mount = small(start_mount, learners=2)
    mount.join("a"), mount.join("b")
    fd = os.open(mount.place("b") / "gradients", os.O_WRONLY)
    os.pwrite(fd, ONE * (BLOCK // 4), 0)
    mount.contribute(ONE, learner="a")
    assert mount.version() == 0
    mount.leave("b")
    assert mount.wait_for_version(1) == 1
    assert (mount.weights() == ONE + bytes(4 * BLOCK - 4)) is True
    try:
        os.pwrite(fd, ONE, BLOCK)  # May be buffered; what counts is that close tells.
    except OSError as error:
        assert error.errno == errno.ENOTCONN
    with refused(errno.ENOTCONN):
        os.close(fd)


@pytest.mark.parametrize("descriptors", [None, 1024])
def test_too_many_learners(start_mount, descriptors):
    """4,096 fit, also where a login session allows a process 1,024 open files unless it asks for more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, limits[1]))
    try:
        mount = start_mount(size="64KiB", block_size="64KiB", reducer="sum")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    joined = 0
    for i in range(4096):
        try:
            mount.join(i)
        except OSError as error:
            pytest.fail(f"learner {i}: {error}\n{mount.stderr()[-500:]}")
        joined += 1
    for i in range(joined, 5000):
        with refused(errno.EDQUOT):
            mount.join(i)
    said(mount, "4096 learners")
    assert len(os.listdir(mount.model / "learners")) == 4096
    mount.leave(17)
    mount.join("late")
    with refused(errno.EDQUOT):
        mount.join("later")
    for name in os.listdir(mount.model / "learners"):
        mount.leave(name)
    mount.contribute(ONE)
    assert mount.wait_for_version(1) == 1
