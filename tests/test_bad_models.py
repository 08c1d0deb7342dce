"""Model files that must be refused."""

import os

import pytest

from daemons import as_root, in_namespace, place_for_all  # noqa: F401
from refusals import refused_up, safetensors, tensor


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
    "two_slashes_in_a_name": (safetensors({"a//b": tensor(0, 32)}, DATA), ['"a//b"', "'/'", "rename"]),
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


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_model_file_is_refused_by_name(gradfs, tmp_path, fault):
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


def test_a_directory_within_a_checkpoint_is_no_model(gradfs, tmp_path):
    path = tmp_path / "d"
    (path / "model.safetensors").mkdir(parents=True)
    refused_up(gradfs, tmp_path, path, words=[str(path), "not a regular file"], code=1)


def test_a_missing_model_is_named(gradfs, tmp_path):
    path = tmp_path / "missing.safetensors"
    refused_up(gradfs, tmp_path, path, words=[str(path), "No such file"], code=1)


def test_a_device_is_no_model(gradfs, tmp_path):
    refused_up(gradfs, tmp_path, "/dev/zero", words=["/dev/zero", "not a regular file"], code=1)


def test_a_pipe_that_nobody_writes_is_no_model(gradfs, tmp_path):
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    refused_up(gradfs, tmp_path, path, words=[str(path), "not a regular file"], code=1)


@as_root
def test_a_model_that_may_not_be_read_is_named(place_for_all):
    model = place_for_all / "secret.safetensors"
    model.write_bytes(safetensors({"a": tensor(0, 32)}, DATA))
    model.chmod(0o600)
    setup = 'mount -t tmpfs none "$2" && mknod -m 666 "$2/fuse" c 10 229 && mount --bind "$2/fuse" /dev/fuse'
    done = in_namespace(place_for_all, setup, f'${{up%% up *}} up {model} "$1"; code=$?; ! mountpoint -q "$1" || exit 99; exit $code')
    assert done.returncode == 1, done
    assert str(model) in done.stderr and "Permission denied" in done.stderr, done.stderr
