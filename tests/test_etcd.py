"""A registry in an etcd, and copies between registries, as docs/operate/registry.md promises it."""

import re
import shutil
import time

import pytest
from cluster import Shard, run
from conftest import MountFailed, all_of
from etcd import Etcd, certificates
from filetools import BLOCK, eventually
from patience import HANGS, Limit
from test_cluster_registry import Training, addresses, apart, knows, model  # noqa: F401


@pytest.fixture
def etcd():
    """Call it as `Etcd`; what is started ends with the test."""
    started = []

    def start(*args, **options):
        started.append(Etcd(*args, **options))
        return started[-1]

    yield start
    all_of(one.clean_up for one in started)


@pytest.fixture
def over(cluster):
    """Call it with an etcd and a number of shards: a cluster whose registry is in it."""

    def start(etcd, shards):
        one = cluster(0)
        one.registry = etcd.url
        for _ in range(shards):
            one.add_shard()
        return one

    return start


def refused(done, *words):
    """The one line that a command has failed with."""
    assert done.returncode == 1, done.stdout
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1 and all(word in lines[0] for word in words), done.stderr
    return lines[0]


def test_a_cluster_over_etcd_lives_while_most_members_do(etcd, over):
    three = etcd()
    one = model(over(three, 2), learners=2)
    training = Training(one)
    leader = three.leader()
    for gone in (leader, (leader + 1) % 3):
        three.kill(gone)
        training.goes_on()
        one.create(f"m{gone}", size=BLOCK)
        assert sorted(one.status()["models"]) == sorted(one.models)
        one.run("delete", f"m{gone}")
        one.models.remove(f"m{gone}")
        three.start(gone)
    training.end()


def test_without_most_members_training_goes_on_and_commands_say_why(etcd, over):
    three = etcd()
    one = model(over(three, 2), learners=2)
    training = Training(one)
    three.kill(0, 1)
    training.goes_on()
    begun = time.monotonic()
    why = refused(one.run("create", "other", "--size", "64KiB"), "does not answer", "more than half of its members")
    assert three.members[0] in why and time.monotonic() - begun >= 5, "it has tried"
    with pytest.raises(AssertionError, match="more than half of its members"):
        one.add_shard()
    # Longer than the leases of shards.
    training.goes_on(steps=200, deadline=HANGS)
    three.start(0, 1)
    knows(one, "m")
    assert len(addresses(one)) == 2
    training.goes_on()
    one.create("other", size=BLOCK)
    training.end()


def test_an_etcd_that_was_stopped_knows_all_when_it_is_back(etcd, over):
    single = etcd(1)
    one = model(over(single, 2), learners=1)
    before = addresses(one)
    one.run("drain", "2", "--timeout", "60")
    single.kill(0)
    single.start(0)
    status = one.status()
    assert status["models"] == ["m"] and addresses(one) == before
    assert {shard["shard"]: shard["draining"] for shard in status["shards"]} == {1: False, 2: True}


def test_a_record_of_many_megabytes_is_kept_in_etcd(etcd, over, tmp_path):
    one = over(etcd(1), 1)
    # Metadata of 3 MB, which the record has, too.
    header = b'{"__metadata__":{"notes":"%s"},"w":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}' % (b"x" * 3_000_000)
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    one.create("m", model=tmp_path / "m.safetensors")
    mount = one.mount()
    mount.contribute(bytes(64))
    assert mount.version() == 1


def test_etcd_with_passwords_and_certificates(etcd, cluster, tmp_path, monkeypatch):
    single = etcd(1)
    (tmp_path / "password").write_text("secret\n")
    for what, message in [
        ("user/add", {"name": "root", "password": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("user/add", {"name": "gradfs", "password": "secret"}),
        ("user/add", {"name": "other", "password": "secret"}),
        ("role/add", {"name": "gradfs"}),
        # "gradfs/" up to "gradfs0".
        ("role/grant", {"name": "gradfs", "perm": {"permType": "READWRITE", "key": "Z3JhZGZzLw==", "range_end": "Z3JhZGZzMA=="}}),
        ("user/grant", {"user": "gradfs", "role": "gradfs"}),
        ("enable", {}),
    ]:
        assert single.call(0, f"auth/{what}", **message) is not None, what
    status = ["status", "--registry", single.url]
    refused(run(*status), "set GRADFS_ETCD_USER")
    monkeypatch.setenv("GRADFS_ETCD_USER", "gradfs")
    refused(run(*status), "GRADFS_ETCD_PASSWORD_FILE")
    monkeypatch.setenv("GRADFS_ETCD_PASSWORD", "wrong")
    refused(run(*status), "refuses", "check GRADFS_ETCD_USER")
    monkeypatch.setenv("GRADFS_ETCD_PASSWORD", "")
    monkeypatch.setenv("GRADFS_ETCD_PASSWORD_FILE", str(tmp_path / "password"))
    one = cluster(0)
    one.registry = single.url
    one.add_shard()
    one.create("m", size=BLOCK)
    # A member that was restarted has forgotten whom it knew.
    single.kill(0)
    single.start(0)
    knows(one, "m")
    monkeypatch.setenv("GRADFS_ETCD_USER", "other")
    refused(run(*status), "permission denied", "readwrite on the prefix gradfs/")
    for name in ("USER", "PASSWORD", "PASSWORD_FILE"):
        monkeypatch.delenv(f"GRADFS_ETCD_{name}")

    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    ca, cert, key = certificates(tmp_path)
    files = ["--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca, "--client-cert-auth"]
    tls = etcd(1, tls=files)
    refused(run("status", "--registry", tls.url), "GRADFS_ETCD_CA")
    monkeypatch.setenv("GRADFS_ETCD_CA", str(cert))
    refused(run("status", "--registry", tls.url), "check GRADFS_ETCD_CA")
    monkeypatch.setenv("GRADFS_ETCD_CA", str(ca))
    refused(run("status", "--registry", tls.url), "does not answer")
    monkeypatch.setenv("GRADFS_ETCD_CERT", str(cert))
    monkeypatch.setenv("GRADFS_ETCD_KEY", str(key))
    one = cluster(0)
    one.registry = tls.url
    one.add_shard()
    one.create("m", size=BLOCK)
    assert one.status()["models"] == ["m"]
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.delenv(f"GRADFS_ETCD_{name}")
    refused(run("status", "--registry", tls.url.replace("etcds", "etcd")), "etcds:// if it wants TLS")


def test_what_is_no_etcd_is_said_in_one_line(address):
    for url, why in [("etcd://", "no host:port"), ("etcd://u:p@a", "GRADFS_ETCD_USER"), ("etcd://a:b", "no number")]:
        done = run("status", "--registry", url)
        assert done.returncode == 2 and why in done.stderr, done.stderr
    refused(run("status", "--registry", f"etcd://{address}"), address, "does not answer")
    with Shard() as shard:
        refused(run("status", "--registry", f"etcd://{shard.address}"), shard.address, "is that an etcd?")


def copied(source, target):
    done = run("registry", "copy", source, target)
    assert done.returncode == 0, done.stderr
    return int(re.search(r"copied (\d+) model", done.stdout)[1])


def test_a_registry_is_copied_into_etcd_and_back_while_a_job_trains(etcd, apart):  # noqa: F811
    three = etcd()
    one = model(apart(2), learners=2)
    one.run("drain", "2", "--timeout", "60")
    training = Training(one)
    before = addresses(one)
    assert copied(one.registry, three.url) == 1
    assert copied(one.registry, three.url) == 1, "a second time changes nothing"
    # The process passes on what it is asked; nobody else is restarted.
    one.table.kill()
    one.table.gone.append(one.table.process)
    one.table.process = Shard("--registry", three.url, command="registry", listen=one.table.address)
    knows(one, "m")
    training.goes_on()
    assert addresses(one) == before
    there = run("status", "--json", "--registry", three.url)
    assert f'"{one.shards[0].address}"' in there.stdout and '"draining": true' in there.stdout.replace('":true', '": true')
    one.create("made-in-etcd", size=BLOCK)

    one.table.kill()
    one.table.start()
    assert copied(three.url, one.registry) == 2
    knows(one, "m", "made-in-etcd")
    training.goes_on()
    assert addresses(one) == before
    training.end()
    # A name that has another life there is not overwritten.
    one.run("delete", "made-in-etcd")
    one.create("made-in-etcd", size=BLOCK)
    done = run("registry", "copy", three.url, one.registry)
    assert done.returncode == 1 and "1 model(s) are not copied: made-in-etcd: there is already" in done.stderr, done.stderr


def mounted(one):
    """A mount, once the shards have told of their models."""
    limit = Limit(HANGS)
    while True:
        try:
            return one.mount()
        except MountFailed:
            assert not limit.over()


def test_a_registry_with_a_state_file_knows_all_at_once(apart, tmp_path):  # noqa: F811
    one = apart(0)
    state = ["--registry-state", tmp_path / "state"]

    def restart(*options):
        one.table.kill()
        one.table.gone.append(one.table.process)
        one.table.process = Shard(*options, command="registry", listen=one.table.address)

    restart(*state)
    for _ in range(2):
        one.add_shard()
    model(one, learners=2)
    training = Training(one)
    before = addresses(one)
    for shard in one.shards:
        shard.pause()
    restart(*state)
    # No shard can have told it.
    status = one.status()
    assert {shard["shard"]: shard["address"] for shard in status["shards"]} == before
    assert status["models"] == ["m"]
    for shard in one.shards:
        shard.resume()
    training.goes_on()
    training.end()
    held = run("registry", "--listen", "127.0.0.1:0", *state)
    refused(held, "another registry has it")

    # It is a hint: what has changed without it counts.
    restart()
    knows(one, "m")
    one.run("delete", "m")
    one.create("m", size=BLOCK, timeout=20)
    restart(*state)
    mount = mounted(one)
    mount.contribute(bytes(BLOCK))
    assert mount.version() == 1
    one.run("delete", "m")
    restart(*state)
    eventually(lambda: one.status()["models"] == [], deadline=HANGS)


def test_a_shard_that_is_the_registry_keeps_its_state(cluster, tmp_path):
    one = cluster(0)
    state = ["--registry-state", tmp_path / "state"]
    first = one.add_shard(*state)
    one.add_shard()
    one.run("drain", "1", "--timeout", "60")
    one.create("m", size=BLOCK)
    first.kill()
    one.shards[0] = Shard(*state, listen=first.address)
    status = one.status()
    assert status["models"] == ["m"] and one.shards[0].number == 1
    assert {shard["shard"]: shard["draining"] for shard in status["shards"]} == {1: True, 2: False}
