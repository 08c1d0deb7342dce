"""The jobs of fio-jobs/, each of which moves the whole model: those for a device of the kernel's are in test_nbd_kernel.py."""

import json
import shutil

import numpy as np
import pytest
from conftest import REPOSITORY, ran
from filetools import BLOCK
from test_nbd import export, uri_of

JOBS = sorted(path for path in (REPOSITORY / "fio-jobs").glob("*.fio") if not path.name.startswith("kernel-"))
SIZE = 16 * BLOCK


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_a_job_of_fio_moves_the_whole_model(start_mount, tmp_path, job):
    if not shutil.which("fio"):
        pytest.skip("no fio (scripts/setup test)")
    reads = "-read" in job.name
    mount = start_mount(size=SIZE, block_size=BLOCK, reducer="sum", nbd=tmp_path / "nbd.sock")
    uri = export(uri_of(mount), f"model/{'weights' if reads else 'gradients'}")
    parameters = {"GRADFS": mount.model, "BS": "64k", "NBD_URI": uri, "DEPTH": 4, "PARTS": 1, "PART": "100%", "FLUSH": 1}
    words = ["env", *(f"{name}={value}" for name, value in parameters.items()), "fio", "--output-format=json"]
    done = ran([*words, *(["--readonly"] if reads else []), job], cwd=tmp_path)
    assert done.returncode == 0, done
    (said,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    assert said["error"] == 0 and said["read" if reads else "write"]["io_bytes"] == SIZE, done
    if not reads:
        assert mount.wait_for_version(1) == 1
        assert set(np.frombuffer(mount.weights(), "<f4")) == {2**-7}
