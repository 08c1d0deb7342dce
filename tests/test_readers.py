"""Readers: what docs/use/learners.md promises of them."""

import errno
import os
import select
import threading
import time

import pytest
from cluster import run
from filetools import close, eventually, raises

SIZE = 64 * 4096


def publish(mount, value):
    fd = os.open(mount.model / "publish", os.O_WRONLY)
    try:
        assert os.write(fd, bytes([value]) * SIZE) == SIZE
    finally:
        os.close(fd)


def reads(mount, name):
    (mount.model / "readers" / name).mkdir()
    return mount.model / "readers" / name


def applies(reader, version):
    (reader / "applied").write_text(f"{version}\n")


def names(mount):
    return sorted(entry.name for entry in (mount.model / "readers").iterdir() if entry.is_dir())


class Publisher(threading.Thread):
    """Publishes in a thread of its own: it may be held."""

    def __init__(self, mount, value):
        super().__init__(daemon=True)
        self.mount, self.value, self.error = mount, value, None
        self.start()

    def run(self):
        try:
            publish(self.mount, self.value)
        except OSError as error:
            self.error = error

    def is_held(self, seconds=0.5):
        self.join(seconds)
        return self.is_alive()

    def goes_on(self, seconds=20):
        self.join(seconds)
        assert not self.is_alive() and self.error is None, self.error


def polls(path):
    """A descriptor that has read the file, and a poll of it."""
    fd = os.open(path, os.O_RDONLY)
    before = os.read(fd, 99)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return fd, before, poll


@pytest.fixture
def job(start_mount):
    def start(**settings):
        return start_mount(size=SIZE, reducer="assign", **settings)

    return start


@pytest.fixture
def two_mounts(cluster):
    def start(shards=2, **settings):
        one = cluster(shards)
        one.create("m", size=SIZE, reducer="assign", **settings)
        return one, *(one.mount(model="m") for _ in range(2))

    return start


def test_a_reader_says_what_it_runs(job):
    mount = job()
    assert (mount.model / "readers" / "applied").read_text() == ""
    reader = reads(mount, "infer-0")
    assert sorted(os.listdir(reader)) == ["applied", "staged"] and names(mount) == ["infer-0"]
    assert ((reader / "applied").read_text(), (reader / "staged").read_text()) == (
        "",
        "0\n",
    )
    for version in 1, 2:
        publish(mount, version)
    eventually(lambda: (reader / "staged").read_text() == "2\n")
    # It may go back: it says what it runs.
    for version in 2, 0, 1:
        applies(reader, version)
        assert (reader / "applied").read_text() == f"{version}\n"
    applies(reads(mount, "infer-1"), 2)
    assert (mount.model / "readers" / "applied").read_text() == "1\n", "the least"
    told = {reader["id"]: reader for reader in mount.status()["readers"]}
    host = os.uname().nodename
    assert told["infer-0"] == {
        "id": "infer-0",
        "host": host,
        "staged": 2,
        "applied": 1,
        "given_up": False,
    }
    assert told["infer-1"]["applied"] == 2
    reader.rmdir()
    assert names(mount) == ["infer-1"] and (mount.model / "readers" / "applied").read_text() == "2\n"


def test_a_poll_hears_that_a_reader_has_moved(job):
    mount = job()
    reader = reads(mount, "a")
    files = [polls(path) for path in (reader / "applied", mount.model / "readers" / "applied")]
    other = polls(mount.model / "version")
    assert all(before == b"" and not poll.poll(100) for _, before, poll in files)
    applies(reader, 0)
    for fd, _, poll in files:
        assert poll.poll(5000) and os.pread(fd, 99, 0) == b"0\n" and not poll.poll(0)
    assert not other[2].poll(0), "there is no new version"
    reader.rmdir()
    (own, _, poll), (of_all, _, poll_of_all) = files
    assert poll.poll(5000) and poll_of_all.poll(5000) and os.pread(of_all, 99, 0) == b""
    with raises(errno.ENOENT):
        os.pread(own, 99, 0)
    close(own, of_all, other[0])


@pytest.mark.parametrize("text", ["", "\n", "x\n", "-1\n", "1.5\n", "1 2\n", "+1\n", "99\n", "9" * 30 + "\n"])
def test_what_is_no_version_is_not_applied(job, text):
    mount = job()
    reader = reads(mount, "a")
    publish(mount, 1)
    applies(reader, 1)
    with raises(errno.EINVAL):
        (reader / "applied").write_text(text)
    assert (reader / "applied").read_text() == "1\n"
    assert "applied: " in (mount.model / "error").read_text()
    with raises(errno.EACCES):
        (reader / "staged").write_text("1\n")


def test_names_of_readers_are_like_those_of_learners(job):
    mount = job()
    reads(mount, "a")
    for name, number in [
        ("a", errno.EEXIST),
        ("applied", errno.EEXIST),
        ("a b", errno.EINVAL),
        (".a", errno.EINVAL),
        ("a" * 65, errno.ENAMETOOLONG),
    ]:
        with raises(number):
            reads(mount, name)
    with raises(errno.ENOENT):
        (mount.model / "readers" / "b").rmdir()
    with raises(errno.ENOTDIR):
        (mount.model / "readers" / "applied").rmdir()
    assert names(mount) == ["a"]


def test_a_mount_has_so_many_readers_at_most(job):
    mount = job()
    for n in range(256):
        reads(mount, f"r{n}")
    with raises(errno.EDQUOT):
        reads(mount, "one-more")
    (mount.model / "readers" / "r7").rmdir()
    reads(mount, "one-more")
    assert len(names(mount)) == 256


def test_readers_are_no_learners(start_mount):
    mount = start_mount(size=SIZE, reducer="sum", learners=1, min_learners=1)
    applies(reads(mount, "a"), 0)
    mount.contribute(bytes(SIZE))
    mount.wait_for_version(1)
    assert [learner["id"] for learner in mount.status()["learners"]] == ["mount"]
    assert mount.status()["waits_for_learners"] == []
    mount.control("learners", 2)
    mount.control("min_learners", 2)
    with raises(errno.ECANCELED):
        mount.contribute(bytes(SIZE))


def test_all_mounts_see_all_readers(two_mounts):
    one, here, there = two_mounts()
    reader = reads(there, "infer-0")
    eventually(lambda: names(here) == ["infer-0"])
    applies(reads(here, "infer-1"), 0)
    fd, _, poll = polls(here.model / "readers" / "infer-0" / "applied")
    publish(here, 1)
    eventually(lambda: (reader / "staged").read_text() == "1\n")
    applies(reader, 1)
    assert poll.poll(5000) and os.pread(fd, 99, 0) == b"1\n"
    eventually(lambda: (here.model / "readers" / "infer-0" / "staged").read_text() == "1\n")
    host = os.uname().nodename
    for told in one.run("status"), one.run("status", "m"), run("status", here.root):
        assert f"reader infer-0 on {host}: applied 1, staged 1" in told.stdout, told.stdout
    late = one.mount(model="m")
    assert names(late) == ["infer-0", "infer-1"]
    reader.rmdir()
    eventually(lambda: names(here) == names(late) == ["infer-1"])
    close(fd)


def test_only_its_own_mount_moves_a_reader(two_mounts):
    _, here, there = two_mounts(1)
    reader = reads(there, "a")
    applies(reader, 0)
    eventually(lambda: names(here) == ["a"])
    with raises(errno.EACCES):
        applies(here.model / "readers" / "a", 0)
    with raises(errno.EACCES):
        (here.model / "readers" / "a").rmdir()
    with raises(errno.EEXIST):
        reads(here, "a")
    assert names(there) == ["a"]


def test_two_mounts_cannot_have_a_reader_of_one_name(two_mounts):
    _, here, there = two_mounts(1)
    made = []

    def make(mount):
        try:
            made.append(reads(mount, "a"))
        except FileExistsError:
            made.append(None)

    threads = [threading.Thread(target=make, args=(mount,)) for mount in (here, there)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.count(None) == 1, made
    winner = next(reader for reader in made if reader)
    applies(winner, 0)


def test_a_publisher_is_held_until_readers_have_applied(job):
    mount = job(hold_for_readers=1, lease=30)
    reader, silent = reads(mount, "a"), reads(mount, "never")
    publish(mount, 1)
    applies(reader, 0)
    held = Publisher(mount, 2)
    assert held.is_held()
    assert mount.status()["held_by"] == ["a"], "who has applied nothing holds nobody"
    applies(reader, 1)
    held.goes_on()
    assert mount.version() == 2 and mount.status()["held_by"] == []
    assert (silent / "applied").read_text() == ""


@pytest.mark.parametrize("how", ["rmdir", "control"])
def test_a_held_publisher_goes_on_at_once(job, how):
    mount = job(hold_for_readers=1, lease=60)
    reader = reads(mount, "a")
    applies(reader, 0)
    publish(mount, 1)
    held = Publisher(mount, 2)
    assert held.is_held()
    begun = time.monotonic()
    if how == "rmdir":
        reader.rmdir()
    else:
        mount.control("hold_for_readers", 2)
    held.goes_on()
    assert time.monotonic() - begun < 5 and mount.version() == 2


def test_a_version_may_be_so_far_ahead_of_readers(job):
    mount = job(hold_for_readers=3, lease=60)
    reader = reads(mount, "a")
    applies(reader, 0)
    for version in 1, 2, 3:
        publish(mount, version)
    held = Publisher(mount, 4)
    assert held.is_held()
    applies(reader, 1)
    held.goes_on()
    assert mount.version() == 4


@pytest.mark.parametrize("limit", ["lease", "timeout"])
def test_a_reader_that_does_not_follow_is_given_up(job, limit):
    mount = job(
        hold_for_readers=1,
        **{
            "lease": {"lease": 1, "timeout": 60},
            "timeout": {"lease": 60, "timeout": 2},
        }[limit],
    )
    reader = reads(mount, "a")
    applies(reader, 0)
    publish(mount, 1)
    held = Publisher(mount, 2)
    assert held.is_held()
    held.goes_on()
    assert mount.status()["readers"][0]["given_up"]
    publish(mount, 3)
    assert mount.version() == 3, "it is not waited for"
    applies(reader, 2)
    assert not mount.status()["readers"][0]["given_up"]
    held = Publisher(mount, 4)
    assert held.is_held(), "it is waited for again"
    applies(reader, 3)
    held.goes_on()


def test_steps_of_learners_are_held_for_readers(start_mount):
    mount = start_mount(size=SIZE, reducer="sum", hold_for_readers=1, lease=30)
    reader = reads(mount, "a")
    applies(reader, 0)
    mount.contribute(bytes(SIZE))
    mount.wait_for_version(1)
    step = threading.Thread(
        target=lambda: (mount.contribute(bytes(SIZE)), mount.wait_for_version(2)),
        daemon=True,
    )
    step.start()
    time.sleep(0.5)
    assert mount.version() == 1
    eventually(lambda: mount.status()["held_by"] == ["a"])
    assert mount.status()["waits_for_learners"] == []
    applies(reader, 1)
    step.join(20)
    assert not step.is_alive() and mount.version() == 2


def test_a_publisher_on_another_mount_is_held(two_mounts):
    _, here, there = two_mounts(hold_for_readers=1, lease=60)
    reader = reads(there, "a")
    publish(here, 1)
    eventually(lambda: (reader / "staged").read_text() == "1\n")
    applies(reader, 0)
    held = Publisher(here, 2)
    assert held.is_held()
    applies(reader, 1)
    held.goes_on()
    eventually(lambda: there.seen() == 2)


def test_the_status_names_the_readers_that_a_version_waits_for(two_mounts):
    one, here, there = two_mounts(1, hold_for_readers=1, lease=60)
    reader, other = reads(there, "a"), reads(there, "b")
    publish(here, 1)
    for each in reader, other:
        applies(each, 0)
    assert here.status()["held_by"] == [], "nobody waits"
    held = Publisher(here, 2)
    eventually(lambda: here.status()["held_by"] == there.status()["held_by"] == ["a", "b"])
    assert "the next version waits for readers: a, b" in one.run("status", "m").stdout
    applies(other, 1)
    eventually(lambda: here.status()["held_by"] == ["a"])
    applies(reader, 1)
    held.goes_on()
    eventually(lambda: here.status()["held_by"] == [])


def test_readers_of_a_mount_that_is_killed_go_with_its_lease(two_mounts):
    _, here, there = two_mounts(1, hold_for_readers=1, lease=3, timeout=60)
    reader = reads(there, "a")
    applies(reader, 0)
    publish(here, 1)
    eventually(lambda: names(here) == ["a"])
    held = Publisher(here, 2)
    there.kill()
    held.goes_on()
    eventually(lambda: names(here) == [])
    publish(here, 3)


def test_readers_of_a_mount_that_is_unmounted_go_at_once(two_mounts):
    _, here, there = two_mounts(1, hold_for_readers=1, lease=600)
    reads(there, "a")
    eventually(lambda: names(here) == ["a"])
    there.stop()
    eventually(lambda: names(here) == [])


def test_readers_outlast_a_lost_connection(cluster):
    one = cluster(0)
    proxy = one.proxy()
    one.add_shard(proxy=proxy)
    one.create("m", size=SIZE, reducer="assign", lease=60)
    here, there = one.mount(model="m"), one.mount(model="m")
    reader = reads(there, "a")
    applies(reader, 0)
    proxy.reset()
    publish(here, 1)
    eventually(lambda: (reader / "staged").read_text() == "1\n")
    applies(reader, 1)
    eventually(lambda: (here.model / "readers" / "a" / "applied").read_text() == "1\n")
