"""What a build without optional parts says of them. scripts/test runs this with such a build."""

import pytest
from conftest import gradfs_binary, ran


def test_a_program_without_cuda_tells_how_to_build_one(tmp_path):
    up = [gradfs_binary(), "up", "--size", "1MiB", "--device", "cuda:0", tmp_path]
    done = ran(up)
    if "built without" not in done.stderr and gradfs_binary().parent.name != "plain":
        pytest.skip("this gradfs was built with CUDA")
    assert done.returncode != 0
    assert "cuda:0: this gradfs was built without NVIDIA GPUs" in done.stderr and "--features cuda" in done.stderr
