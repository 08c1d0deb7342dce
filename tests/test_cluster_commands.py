"""The commands of a cluster: their effects, and their messages when they fail."""

import json
import os
import signal
import socket
import subprocess
import threading
import time

import numpy as np
import pytest
from cluster import Shard, end_listening, run
from conftest import gradfs_binary, ran, write_all
from filetools import array, eventually, killed, outcome, shows, takes

SMALL = ("--size", "256KiB", "--block-size", "64KiB", "--reducer", "sum")


def refused(done, *words, code=1):
    """It failed with one clear message that holds all `words`."""
    shown = f"{' '.join(map(str, done.args))}\n{done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == code, shown
    assert done.stderr.startswith("gradfs: error: ") and done.stdout == "", shown
    assert "panicked" not in done.stderr and len(done.stderr) < 1500, shown
    for word in words:
        assert str(word) in done.stderr, f"{word!r} is missing:\n{shown}"
    return done.stderr


@pytest.fixture
def silent():
    """The address of somebody who takes connections and says nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield "127.0.0.1:%d" % listener.getsockname()[1]
    listener.close()


@pytest.fixture
def stranger():
    """The address of something that is not gradfs."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            with one:
                one.recv(1 << 16)
                one.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield "127.0.0.1:%d" % listener.getsockname()[1]
    end_listening(listener, thread)


@pytest.fixture
def nobody():
    """An address that nobody listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        # As long as it is bound, nobody else gets the port.
        yield "127.0.0.1:%d" % bound.getsockname()[1]


def commands(registry, tmp_path):
    (tmp_path / "mnt").mkdir(exist_ok=True)
    at = ("--registry", registry)
    return {
        "status": ("status", *at),
        "create": ("create", "x", *SMALL, *at),
        "mount": ("mount", tmp_path / "mnt", *at),
        "delete": ("delete", "x", *at),
        "drain": ("drain", "127.0.0.1:1", *at),
        "shard": ("shard", "--listen", "127.0.0.1:0", *at),
    }


def test_status_tells_of_shards_and_models(cluster):
    one = cluster(2)
    assert "no models" in one.run("status").stdout
    one.create("m", size="1MiB", block_size="64KiB", reducer="sum", shards=2)
    status = one.status()
    assert status["models"] == ["m"] and status["registry"] == one.registry
    assert [shard["address"] for shard in status["shards"]] == [shard.address for shard in one.shards]
    assert sum(shard["models"][0]["blocks"] for shard in status["shards"]) == 16
    mount = one.mount()
    mount.contribute(np.ones(1, "<f4"))
    models = [model for shard in one.status()["shards"] for model in shard["models"]]
    (coordinator,) = [model["coordinator"] for model in models if model["coordinator"]]
    assert (coordinator["version"], coordinator["clients"], coordinator["contributions"]) == (1, 1, 1)
    assert [learner["name"] for learner in coordinator["learners"]] == [mount.own()]
    said = one.run("status").stdout
    for word in ("m: version 1", "coordinates: running", "1 learner(s)", "models: m", one.shards[1].address):
        assert word in said, said


def test_a_shard_that_is_stopped_with_blocks_says_what_is_lost(cluster):
    one = cluster(2, size="256KiB", block_size="64KiB", shards=1)
    owners = {shard["shard"]: len(shard["models"]) for shard in one.status()["shards"]}
    for shard in one.shards:
        assert shard.stop() == 0
    said = sorted("its blocks of m are lost (gradfs drain moves them off a shard)" in shard.stderr() for shard in one.shards)
    assert said == [False, True], (owners, [shard.stderr() for shard in one.shards])


def test_delete_cuts_off_whoever_uses_it(cluster):
    """They get errors, and no hang; weights that are here stay readable; the name is free."""
    one = cluster(2, size="256KiB", block_size="64KiB", reducer="sum", timeout=1)
    mount = one.mount()
    mount.contribute(np.ones(4, "<f4"))
    held = open(mount.model / "weights", "rb", buffering=0)
    assert one.run("delete", "m").stdout == "gradfs: deleted m\n"
    assert one.status()["models"] == []
    with takes(0, 4):
        assert outcome(mount.contribute, np.ones(4, "<f4")) in ("EIO", "ETIMEDOUT", "ENOTCONN")
    with held:
        assert np.frombuffer(held.read(4), "<f4")[0] == 1
    refused(one.run("delete", "m"), "m", "no model")
    one.models.clear()
    one.create("m", size="256KiB", block_size="64KiB", reducer="sum")
    again = one.mount()
    assert again.version() == 0
    again.contribute(np.full(4, 7, "<f4"))
    assert array(again.model / "weights")[0] == 7
    # The old mount shows the new life of the name, too.
    eventually(lambda: shows(mount.model, 7), deadline=20)
    assert one.coordinator("m")["version"] == 1
    with takes(0, 8):
        assert mount.stop() == 0


def test_create_refuses_what_cannot_be_and_leaves_nothing(cluster, tmp_path):
    one = cluster(2, size="256KiB", block_size="64KiB", reducer="sum")
    # The coordinator takes a moment to reach the other shard.
    eventually(lambda: not any((m["coordinator"] or {}).get("unreachable") for m in one.ask(one.shards[0])["models"]))
    before = one.ask(one.shards[0])
    refused(one.run("create", "m", *SMALL), "m", "already")
    refused(one.run("create", "n", *SMALL, "--shards", 5), "5 shards are wanted", "only 2")
    refused(one.run("create", "a/b", *SMALL), "a/b", code=2)
    refused(one.run("create", "n", *SMALL[:4], "--reducer", "median"), "median", code=2)
    missing = tmp_path / "none.safetensors"
    refused(one.run("create", "n", "--model", missing, "--reducer", "sum"), missing)
    huge = ("--size", "1TiB", "--block-size", "4MiB", "--reducer", "sum")
    refused(one.run("create", "n", *huge), "shard 1", "not enough memory", "GiB are available")
    assert one.status()["models"] == ["m"]
    assert one.ask(one.shards[0])["models"] == before["models"]
    one.create("n", size="256KiB", block_size="64KiB", reducer="sum")


def test_a_shard_that_comes_later_takes_new_models(cluster):
    one = cluster(1, size="256KiB", block_size="64KiB", reducer="sum")
    mount = one.mount(models=["m"])
    added = one.add_shard()
    one.create("n", size="256KiB", block_size="64KiB", reducer="sum")
    assert [model["name"] for model in one.ask(added)["models"]] == ["n"]
    both = one.mount(models=["m", "n"])
    for model in both.models:
        write_all(model / "gradients", np.ones(4, "<f4"))
        eventually(lambda model=model: array(model / "weights")[0] == 1)
    assert both.stop() == 0
    mount.contribute(np.ones(4, "<f4"))
    assert array(mount.model / "weights")[0] == 2


def test_new_models_go_to_shards_with_room_and_little_load(cluster):
    """A model of one shard goes to the one that holds the least; a striped one is coordinated by it."""
    one = cluster(3)
    for number in range(6):
        one.create(f"m{number}", size="256KiB", block_size="64KiB", reducer="sum", shards=1)
    shards = one.status()["shards"]
    assert [len(shard["models"]) for shard in shards] == [2, 2, 2]
    assert all(shard["memory_available"] > 0 for shard in shards)
    one.create("large", size="512KiB", block_size="64KiB", reducer="sum", shards=1)
    made = one.create("striped", *SMALL)
    assert "on 3 shard(s), coordinated by shard 2" in made


def test_a_drained_shard_takes_no_more_models(cluster):
    one = cluster(3, size="256KiB", block_size="64KiB", reducer="sum", shards=3)
    drained = one.shards[1]
    said = one.run("drain", drained.address).stdout
    assert drained.address in said and "no more models" in said
    assert [s["draining"] for s in one.status()["shards"]] == [False, True, False]
    one.create("n", size="256KiB", block_size="64KiB", reducer="sum")
    assert one.ask(drained)["models"] == [], "what it had has moved"
    refused(one.run("create", "o", *SMALL, "--shards", 3), "3 shards are wanted", "only 2")
    mount = one.mount(models=["m"])
    mount.contribute(np.ones(4, "<f4"))
    assert array(mount.model / "weights")[0] == 1
    refused(one.run("drain", "127.0.0.1:1"), "127.0.0.1:1", drained.address)
    refused(one.run("drain", 77), "no shard 77", drained.address)


def test_what_is_not_there_is_said(cluster, tmp_path):
    one = cluster(1)
    (tmp_path / "mnt").mkdir()
    refused(one.run("mount", tmp_path / "mnt"), "no models")
    one.create("m", size="64KiB", block_size="64KiB", reducer="sum")
    refused(one.run("mount", tmp_path / "mnt", "nope"), "nope")
    refused(one.run("mount", tmp_path / "none", "m"), "none")
    refused(one.run("delete", "nope"), "nope")
    assert os.listdir(tmp_path / "mnt") == []


@pytest.mark.parametrize("command", ["status", "create", "mount", "delete", "drain", "shard"])
def test_an_unreachable_registry_is_said(tmp_path, nobody, stranger, silent, command):
    """Nobody, something else, or somebody who says nothing: one line each, in time."""
    with takes(0, 5):
        refused(run(*commands(nobody, tmp_path)[command]), nobody, "connection refused")
    with takes(0, 5):
        refused(run(*commands(stranger, tmp_path)[command]), stranger, "something else listens")
    if command == "shard":
        with takes(3, 8):
            refused(run(*commands(silent, tmp_path)[command]), silent, "no answer before the deadline")


def test_a_port_in_use_and_a_wrong_address_are_said(cluster):
    one = cluster(1)
    taken = one.shards[0].address
    with takes(0, 5):
        refused(run("shard", "--listen", taken), "cannot listen", taken, "in use")
    with takes(0, 5):
        refused(run("shard", "--listen", "192.0.2.1:7170", "--insecure"), "cannot listen", "192.0.2.1:7170")
    with takes(0, 8):
        refused(run("shard", "--listen", "no.such.host.invalid:1"), "no.such.host.invalid")
    refused(run("shard", "--listen", "0.0.0.0:0"), "--advertise", code=2)
    refused(run("status", "--registry", "127.0.0.1:99999"), "99999", code=2)


def test_a_model_is_made_on_slow_shards_too(cluster):
    """One gets its blocks slowly; the connections of the others are silent for longer than a silence may be."""
    one = cluster(1)
    proxy = one.proxy()
    one.add_shard(proxy=proxy)

    def slow(connection, direction, data):
        if direction == "up":
            time.sleep(len(data) / 100_000)
        return data

    proxy.rule = slow
    with takes(11, 25):
        one.create("m", "--size", "2560KiB", "--block-size", "64KiB", "--reducer", "sum")
    proxy.rule = None
    mount = one.mount()
    mount.contribute(np.ones(2560 << 8, "<f4"))
    assert (array(mount.model / "weights") == 1).all()


def slow_create(one, name):
    """A model of which the second shard gets its blocks at 100 KB/s is being created."""
    one.proxies[0].rule = lambda connection, direction, data: (
        (time.sleep(len(data) / 100_000) or data) if direction == "up" else data
    )
    words = [gradfs_binary(), "create", name, "--size", "32MiB", "--block-size", "64KiB", "--registry", one.registry]
    child = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    eventually(lambda: any(model["name"] == name for model in one.ask(one.shards[0])["models"]))
    return child


@pytest.fixture
def slow(cluster):
    one = cluster(1)
    one.proxies = [one.proxy()]
    one.add_shard(proxy=one.proxies[0])
    return one


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_create_that_is_interrupted_leaves_nothing(slow, number):
    child = slow_create(slow, "m")
    time.sleep(1)
    with takes(0, 15):
        child.send_signal(number)
        stdout, stderr = child.communicate(timeout=300)
    assert child.returncode == 1 and stdout == "", stderr
    assert f"creating m was interrupted by {number.name}: nothing is left of it" in stderr, stderr
    slow.proxies[0].rule = None
    assert slow.status()["models"] == []
    eventually(lambda: all(slow.ask(shard)["models"] == [] for shard in slow.shards))
    slow.create("m", *SMALL)


def test_a_model_that_is_not_there_yet_keeps_no_mount_out(slow, tmp_path):
    """Nor does one whose creation was killed; its name is free once it is deleted."""
    slow.create("there", *SMALL)
    child = slow_create(slow, "coming")
    mount = slow.mount()
    assert sorted(os.listdir(mount.root)) == ["README", "there"]
    assert "still being created" in mount.stderr()
    refused(slow.run("mount", tmp_path, "coming"), "coming is still being created")
    killed(child)
    assert "not all blocks are there" in slow.run("status").stdout
    slow.proxies[0].rule = None
    assert slow.run("delete", "coming", timeout=300).returncode == 0
    slow.create("coming", *SMALL)


def test_a_model_that_is_made_later_appears_in_mounts_and_goes_when_it_is_deleted(cluster, tmp_path):
    one = cluster(1)
    one.create("first", *SMALL)
    mount, named = one.mount(), one.mount(models=["first"])
    one.create("second", *SMALL)
    second = mount.root / "second"
    # Each look at a name that is not there yet has the mount ask.
    eventually((second / "weights").exists, deadline=20)
    assert sorted(os.listdir(mount.root)) == ["README", "first", "second"]
    assert "second/" in (mount.root / "README").read_text()
    write_all(second / "gradients", np.ones(4, "<f4").tobytes())
    eventually(lambda: array(second / "weights")[0] == 1)
    held = open(second / "weights", "rb", buffering=0)
    assert one.run("delete", "second").returncode == 0
    eventually(lambda: os.listdir(mount.root) == ["README", "first"], deadline=20)
    eventually(lambda: outcome((second / "weights").read_bytes) == "ENOENT")
    with held:
        assert np.frombuffer(held.read(4), "<f4")[0] == 1, "a version that somebody holds stays readable"
    one.create("second", *SMALL)
    eventually(lambda: shows(second, 0), deadline=20)
    assert os.listdir(named.root) == ["README", "first"], "a mount of named models shows these"


def test_status_tells_of_a_mount_and_of_one_model(cluster):
    one = cluster(2)
    for name in ("m", "other"):
        one.create(name, *SMALL, learners=2)
    a, b = one.mount(models=["m"]), one.mount()
    for mount, name in ((a, "a"), (b, "b")):
        mount.join(name)
    write_all(a.place("a") / "gradients", np.ones(4, "<f4").tobytes())
    eventually(lambda: "a waits for b" in one.run("status", "m").stdout)
    shown = one.run("status", "m").stdout
    assert "  m: version 0" in shown and "other" not in shown
    assert "learner a on 127.0.0.1: step 1" in shown and "learner b on 127.0.0.1: step 0" in shown
    # What a mount says of the job may be half a second old.
    eventually(lambda: "a waits for b" in one.run("status", a.root).stdout)
    for path in (a.root, a.root / "m", a.root / "m" / "learners" / "a"):
        shown = one.run("status", path).stdout
        assert f"{a.root}/m: running, version 0, reducer sum, sync; 2 learner(s), 0 contributions\n" in shown
        assert f"learner a on {socket.gethostname()}: step 1" in shown and "learner b on 127.0.0.1: step 0" in shown
        assert "a waits for b" in shown, shown
    told = json.loads(one.run("status", a.root, "--json").stdout)
    assert told["mount"] == str(a.root) and [model["model"] for model in told["models"]] == ["m"]
    assert told["models"][0]["registry"] == one.registry
    refused(one.run("status", "nope"), "nope", "no model")
    refused(one.run("status", "/tmp"), "/tmp is in no mount of gradfs")


def test_status_tells_of_a_mount_and_of_one_model__in_one_process(start_mount, gradfs):
    mount = start_mount(size="64KiB", reducer="sum", name="policy")
    mount.join("a")
    for _ in range(3):
        write_all(mount.place("a") / "gradients", np.ones(4, "<f4").tobytes())
    (learner,) = mount.status()["learners"]
    eventually(lambda: mount.status()["learners"][0]["steps_per_second"] is not None, deadline=10)
    assert learner["host"] == socket.gethostname() and mount.status()["registry"] is None
    shown = gradfs("status", mount.root).stdout
    assert f"{mount.root}/policy: running, version 3, reducer sum, sync; 1 learner(s), 3 contributions\n" in shown
    assert f"learner a on {socket.gethostname()}: step 3" in shown and "steps/s, idle" in shown


def test_a_registry_of_its_own_serves_shards(mnt):
    with Shard(command="registry") as registry:
        with Shard("--registry", registry.address) as shard:
            done = run("create", "m", *SMALL, "--registry", registry.address)
            assert done.returncode == 0, done.stderr
            status = json.loads(run("status", "--registry", registry.address, "--json").stdout)
            assert [s["address"] for s in status["shards"]] == [shard.address] and status["models"] == ["m"]
        # It has said good-bye.
        status = json.loads(run("status", "--registry", registry.address, "--json").stdout)
        assert status["shards"] == [] and status["models"] == ["m"]
        refused(run("mount", mnt, "--registry", registry.address), "m", "shard 1 is not there")


def test_a_shard_whose_own_address_is_the_registrys_becomes_the_registry(tmp_path, address):
    """One file for all; the file and the shard may name the host differently."""
    config, registry = tmp_path / "cluster.toml", "localhost:" + address.rsplit(":", 1)[1]
    config.write_text(f'registry = "{registry}"\nlisten = "127.0.0.1:0"\n')
    with Shard("--config", config, listen=address) as first, Shard("--config", config) as second:
        assert "and is the registry" in first.stdout() and f"registry {registry}" in second.stdout()
        status = json.loads(run("status", "--config", config, "--json").stdout)
        assert [s["address"] for s in status["shards"]] == [first.address, second.address]


def test_create_asks_the_registry_of_this_host():
    alone = ["unshare", "--map-root-user", "--net", gradfs_binary(), "create", "x", *SMALL]
    done = ran(alone)
    refused(done, "the registry at localhost:7070 cannot be asked")
