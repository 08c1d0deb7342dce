from __future__ import annotations

import errno
import gc
import mmap
import os
import pickle
import socket
import threading
import warnings

import numpy
import pytest
from conftest import until

import gradfs

W = numpy.arange(3000, dtype="f4")
ONES = numpy.ones(3000, "f4")


@pytest.fixture
def model(start):
    with gradfs.open(start({"w": W}, "--reducer", "sgd", "--lr", 1, "--max-versions", 4)) as model:
        yield model


def values(memory):
    return numpy.frombuffer(os.pread(memory.fileno(), memory.size + 1, 0), "f4")


def inode(memory):
    return os.fstat(memory.fileno()).st_ino


def steps(model, count):
    for _ in range(count):
        model.push({"w": ONES})


def is_used_again(model, number):
    """Whether the memory of this inode is that of a later version."""
    for _ in range(10):
        steps(model, 1)
        with model.memfd() as memory:
            if inode(memory) == number:
                return True
    return False


def test_memfd_lends_the_memory_of_a_version(model):
    with model.memfd() as memory:
        assert (memory.version, memory.epoch, memory.size) == (0, model.pull().epoch, W.nbytes)
        assert os.lseek(memory.fileno(), 0, os.SEEK_CUR) == 0
        assert not os.get_inheritable(memory.fileno())
        buffer = bytearray(4)
        assert os.preadv(memory.fileno(), [buffer], 4) == 4 and buffer == W[1].tobytes()
        view = memory.view()
        assert view.readonly and view.nbytes == memory.size
        steps(model, 50)
        assert (values(memory) == W).all() and view.tobytes() == W.tobytes()
        view.release()
        with model.memfd(50) as newest:
            assert newest.version == 50 and (values(newest) == W - 50).all()
    for call in (memory.fileno, memory.view, memory.detach):
        with pytest.raises(gradfs.Closed, match="version 0"):
            call()
    memory.close()


def test_memfd_of_an_older_version_while_it_is_kept(model):
    model.control["retain"] = 1
    steps(model, 4)
    with model.memfd(3) as memory:
        assert memory.version == 3 and (values(memory) == W - 3).all()
        steps(model, 3)
        # One that is held is kept.
        with model.memfd(3) as again:
            assert again.version == 3 and (values(again) == W - 3).all()
    with pytest.raises(gradfs.GradfsError, match="version 4 is not here") as refused:
        until(lambda: model.memfd(4).close())
    assert refused.value.errno == errno.ENOENT and not isinstance(refused.value, gradfs.NotMounted)


@pytest.mark.parametrize("version", [-1, 2**64, 2**64 + 1])
def test_memfd_of_what_is_no_version_is_refused(model, version):
    with pytest.raises(gradfs.Refused, match="no version"):
        model.memfd(version)
    with pytest.raises(TypeError):
        model.memfd(1.5)


def test_memory_that_is_closed_is_used_again(model):
    steps(model, 2)
    with model.memfd() as memory:
        number = inode(memory)
        memory.view().release()
    assert is_used_again(model, number)


@pytest.mark.parametrize("how", ["a view", "detach", "a fork", "nobody closes it"])
def test_memory_that_somebody_may_read_is_never_used_again(model, how):
    # As above, so that it would be used again if it were given back.
    steps(model, 2)
    memory, weights = model.memfd(), W - 2
    number, view = inode(memory), None
    if how == "a view":
        view = memory.view()
        memory.close()
    elif how == "detach":
        file = memory.detach()
    elif how == "a fork":
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(there)
            os.read(here, 1)
            os._exit(0 if (values(memory) == weights).all() else 1)
        memory.close()
    else:
        file = os.dup(memory.fileno())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del memory
            gc.collect()
    assert not is_used_again(model, number)
    if how == "a view":
        assert view.tobytes() == weights.tobytes()
    elif how == "a fork":
        os.close(there)
        assert os.waitpid(child, 0)[1] == 0
        os.close(here)
    else:
        assert os.pread(file, W.nbytes, 0) == weights.tobytes()
        os.close(file)


@pytest.mark.mounted
def test_a_forked_child_gives_nothing_back(model):
    memory = model.memfd()
    child = os.fork()
    if child == 0:
        memory.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    steps(model, 10)
    # The loan goes on.
    with model.memfd(memory.version) as again:
        assert inode(again) == inode(memory) and (values(memory) == W).all()
    memory.close()


def test_memory_that_is_lent_counts_as_open_and_refusals_have_words(model):
    held = []
    for _ in range(4):
        held.append(model.memfd())
        steps(model, 1)
    with pytest.raises(gradfs.GradfsError, match="memfd: programs hold 4 versions open") as refused:
        model.memfd()
    assert refused.value.errno == errno.ENOMEM
    for memory in held:
        memory.close()
    for version in (1, 99):
        with pytest.raises(gradfs.GradfsError, match=f"memfd: version {version} is not here") as refused:
            until(lambda version=version: model.memfd(version).close())
        assert refused.value.errno == errno.ENOENT
    with pytest.raises(TypeError, match="cannot pickle"), model.memfd() as memory:
        pickle.dumps(memory)


@pytest.mark.mounted
def test_memfd_of_a_mount_in_another_network_namespace_says_so(model, monkeypatch):
    monkeypatch.setattr(os, "getxattr", lambda *_: b"gradfs-memory-elsewhere 0")
    with pytest.raises(gradfs.GradfsError, match="network namespace"):
        model.memfd()


@pytest.mark.mounted
def test_memfd_of_a_mount_that_does_not_answer_is_a_timeout(model, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mount:
        mount.bind("\0gradfs-test-silent-" + str(os.getpid()))
        mount.listen()
        monkeypatch.setattr("gradfs.lending._PATIENCE", 0.1)
        monkeypatch.setattr(os, "getxattr", lambda *_: mount.getsockname()[1:] + b" 0")
        with pytest.raises(gradfs.Timeout, match="within 0.1 s"):
            model.memfd()


def test_many_threads_borrow_while_versions_go_by(model):
    wrong, ended = [], threading.Event()

    def borrow():
        while not ended.is_set():
            try:
                with model.memfd() as memory:
                    view = numpy.frombuffer(memory.view(), "f4")
                    if not (view == W - memory.version).all():
                        wrong.append(memory.version)
                    del view
            except gradfs.GradfsError as error:
                if error.errno != errno.ENOMEM:
                    wrong.append(error)

    threads = [threading.Thread(target=borrow) for _ in range(3)]
    for thread in threads:
        thread.start()
    steps(model, 100)
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert model.status["version_buffers"]["existing"] <= 8


def test_mapped_memory_cannot_be_written(model):
    with model.memfd() as memory:
        with pytest.raises(TypeError):
            memory.view()[0] = 1
        with pytest.raises(PermissionError):
            mmap.mmap(memory.fileno(), memory.size)
