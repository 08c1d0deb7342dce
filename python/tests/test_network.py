"""What holds for models without a mount alone. The tests of files hold there, too: see conftest.py."""

from __future__ import annotations

import errno
import signal
import subprocess
import time

import numpy
import pytest
from conftest import HANGS, binary, until

import gradfs

ONES = numpy.ones(1000, "f4")
PROLOGUE = "import os, signal, sys, time, gradfs, array\nONES = array.array('f', [1] * 1000)\nmodel = gradfs.open(sys.argv[1])\n"


@pytest.fixture
def url(start_without_mount):
    return start_without_mount({"w": numpy.zeros(1000, "f4")}, "--reducer", "sum")


def value(model):
    with model.pull() as weights:
        return weights["w"].numpy()[0].item()


def test_a_url_that_leads_nowhere_is_an_error_with_words(url):
    for wrong, kind, words in (
        ("gradfs://", gradfs.Refused, "gradfs://HOST:PORT/MODEL"),
        ("gradfs://127.0.0.1:1/model", gradfs.NotMounted, "127.0.0.1:1"),
        (url.replace("/model", "/other"), gradfs.NotMounted, "other"),
    ):
        with pytest.raises(kind, match=words):
            gradfs.open(wrong)


def test_without_the_library_the_error_says_how_to_build_it(program, url):
    environment = {"MODELIO_LIBRARY": "/nothing", "LD_LIBRARY_PATH": ""}
    text = f"import os\nos.environ.update({environment!r})\n" + PROLOGUE
    _, err = program(text, url).communicate(timeout=HANGS)
    assert "scripts/library builds" in err


def test_versions_that_are_read_are_let_go_of(url):
    model = gradfs.open(url)
    with model.join() as learner:
        for step in range(40):
            learner.push({"w": ONES})
            assert value(learner) == step + 1
        view = learner.pull()["w"].numpy()
        assert len(model.status["versions_in_memory"]) <= 4
        for _ in range(5):
            learner.push({"w": ONES})
        assert value(learner) == 45 and view[0] == 40


def test_memfd_brings_the_newest_version_where_versions_come_on_demand(url):
    model, trainer = gradfs.open(url), gradfs.open(url)
    model.control["pull"] = "on-demand"
    for version in range(1, 9):
        trainer.push({"w": ONES})
        with model.memfd(model.wait(version - 1)) as memory:
            assert memory.version == version
            assert numpy.frombuffer(memory.view(), "f4")[0] == version


def test_status_has_the_names_of_a_mounts(url, tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    command = [binary(), "mount", mount, "model", "--registry", url.split("/")[2], "--background", "--log-file", tmp_path / "log"]
    subprocess.run(list(map(str, command)), check=True, timeout=HANGS, capture_output=True)
    try:
        mounted, model = gradfs.open(mount), gradfs.open(url)
        with model.join("me"):
            there, here = mounted.status, model.status
        assert set(here) <= set(there)
        assert set(here["shards"][0]) <= set(there["shards"][0])
        same = ("model", "state", "size_bytes", "tensors", "block_size", "blocks", "version", "learning_rate", "control")
        assert {name: here[name] for name in same} == {name: there[name] for name in same}
    finally:
        subprocess.run([binary(), "unmount", "--lazy", str(mount)], check=False, timeout=HANGS, capture_output=True)


def test_who_is_told_of_a_version_opens_that_one_or_a_newer_one(start_without_mount):
    url = start_without_mount({"w": numpy.zeros(1 << 20, "f4")}, "--reducer", "assign")
    writer, reader = gradfs.open(url), gradfs.open(url)
    for version in range(1, 31):
        assert writer.publish({"w": numpy.full(1 << 20, version, "f4")}) == version
        assert value(writer) == version
        told = reader.wait(version - 1, HANGS)
        assert value(reader) >= told == version


def test_a_forked_child_reads_unchanged_bytes_and_calls_nothing(url, program):
    text = PROLOGUE + (
        "with model.join('me') as learner:\n"
        "    weights = learner.pull()\n"
        "    go, gone = os.pipe()\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        os.close(gone)\n"
        "        os.read(go, 1)\n"
        "        assert set(weights['w'].memory.cast('f')) == {0.0}\n"
        "        for call in model.pull, learner.pull, lambda: learner.push({'w': ONES}), lambda: gradfs.open(sys.argv[1]):\n"
        "            try:\n"
        "                call()\n"
        "            except gradfs.Closed as error:\n"
        "                assert 'forked' in str(error)\n"
        "            else:\n"
        "                os._exit(1)\n"
        "        sys.exit(0)\n"
        "    weights.close()\n"
        "    for step in range(30):\n"
        "        learner.push({'w': ONES})\n"
        "        learner.pull().close()\n"
        "    os.close(gone)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    print([learner['id'] for learner in model.status['learners']])\n"
    )
    process = program(text, url)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0 and out == "['me']\n", err
    assert value(gradfs.open(url)) == 30


def test_ctrl_c_ends_a_commit_that_waits_and_takes_it_back(url, program):
    model = gradfs.open(url)
    model.control.update(learners=2)
    text = PROLOGUE + (
        "with model.join('me') as learner:\n"
        "    learner.push({'w': ONES})\n"
        "    step = learner.step()\n"
        "    step['w'] = ONES\n"
        "    print('commits', flush=True)\n"
        "    try:\n"
        "        step.commit()\n"
        "    except KeyboardInterrupt:\n"
        "        print('committed', step.committed, flush=True)\n"
        "    learner.pull()\n"
    )
    with model.join("other") as other:
        process = program(text, url)
        assert process.stdout.readline() == "commits\n"
        # Whenever it comes, the commit waits for the other one.
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "committed False\n"
        other.push({"w": ONES})
        _, err = process.communicate(timeout=HANGS)
        assert process.returncode == 0, err
        assert value(other) == 2


def test_an_exit_with_a_contribution_under_way_loses_nothing_that_counted(url, program):
    text = PROLOGUE + (
        "learner = model.join('me')\n"
        "learner.push({'w': ONES})\n"
        "step = learner.step()\n"
        "step['w'] = ONES\n"
        "view = learner.pull()\n"
    )
    process = program(text, url)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    model = gradfs.open(url)
    assert value(model) == 1
    until(lambda: model.status["learners"] == [])


def test_shards_that_end_are_an_error_and_no_hang(url, shards):
    model = gradfs.open(url)
    model.control["timeout"] = 0.5
    with model.join() as learner:
        learner.push({"w": ONES})
        shards[0].kill()
        with pytest.raises(gradfs.GradfsError) as error:
            for _ in range(3):
                learner.push({"w": ONES})
        assert error.value.errno in (errno.ETIMEDOUT, errno.EIO, errno.ENOTCONN)
