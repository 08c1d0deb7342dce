"""What holds for the binary that is shipped, and not for a build for development."""

import struct
import subprocess

import pytest

from conftest import gradfs_binary


@pytest.fixture
def release():
    path = gradfs_binary()
    if path.parent.name != "release":
        pytest.skip("a build for development keeps what a debugger needs")
    return path


def sections(path):
    """Names of the sections of a 64-bit little-endian ELF file."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    return [data[names + header[0] : data.index(b"\0", names + header[0])].decode() for header in headers]


def test_the_release_has_no_symbols_and_no_debugging_information(release):
    names = sections(release)
    assert ".text" in names
    assert [name for name in names if name.startswith((".debug", ".symtab"))] == []


def test_a_program_without_cuda_tells_how_to_build_one(release, tmp_path):
    up = [release, "up", "--size", "1MiB", "--device", "cuda:0", tmp_path]
    done = subprocess.run(up, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "cuda:0: this gradfs was built without NVIDIA GPUs" in done.stderr and "--features cuda" in done.stderr
