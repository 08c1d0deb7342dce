"""RDMA on the command line of hosts that have no device, in builds with RDMA and without: what must be and cannot is a
clear error, what need not be is passed over, and what makes no sense is refused by either build.

With devices it is looked at in tests/test_rdma_vm_commands.py.
"""

import json

import pytest
from cluster import Shard, run
from conftest import gradfs_binary, ran
from test_cluster_commands import refused

BUILD = "cargo build --release --features rdma"


@pytest.fixture(scope="module")
def why_not():
    """The stated reason why there is no RDMA here."""
    done = run("rdma", "devices", "--json")
    if done.returncode:
        return "built without RDMA"
    if json.loads(done.stdout)["devices"]:
        pytest.skip("this host has RDMA devices")
    return "there is no RDMA device"


def test_devices_are_listed_though_there_are_none(why_not):
    for words in (["rdma", "devices"], ["rdma", "devices", "--json"]):
        done = run(*words)
        if "built" in why_not:
            refused(done, why_not, BUILD)
        elif "--json" in words:
            assert json.loads(done.stdout) == {"devices": [], "cannot_connect_because": None}
        else:
            assert done.returncode == 0 and done.stdout.startswith("no RDMA devices\n"), done
            assert "rdma link add rxe0 type rxe netdev" in done.stdout, done


def test_a_shard_that_must_take_rdma_does_not_start_without(why_not):
    what_to_do = BUILD if "built" in why_not else "rdma link add"
    refused(run("shard", "--listen", "127.0.0.1:0", "--rdma", "on"), "error: RDMA: ", why_not, what_to_do)


@pytest.mark.parametrize("use", ["auto", "off"])
def test_a_shard_that_need_not_is_silent_and_its_status_says_why(why_not, use):
    why = "--rdma off" if use == "off" else why_not
    with Shard("--rdma", use, "-vv") as shard:
        assert "rdma" not in shard.stdout().lower(), shard.stdout()
        assert "no RDMA: " in shard.stderr() and why in shard.stderr(), shard.stderr()
        [status] = json.loads(run("status", "--registry", shard.address, "--json").stdout)["shards"]
        assert why in status["rdma"].pop("unavailable"), status
        assert status["rdma"] == {"address": None, "device": None, "connections": 0, "hindered": False}
        assert "rdma" not in run("status", "--registry", shard.address).stdout


def test_a_device_that_is_named_is_missed_loudly(why_not):
    if "built" in why_not:
        pytest.skip("this build knows of no devices")
    with Shard("--rdma-device", "mlx5_9") as shard:
        assert f"; no rdma: {why_not}" in shard.stdout(), shard.stdout()
        assert why_not in shard.stderr(), shard.stderr()
        assert f"no rdma: {why_not}" in run("status", "--registry", shard.address).stdout


def test_a_mount_that_must_go_by_rdma_does_not_go_otherwise(why_not, cluster, tmp_path):
    one = cluster(1, size="256KiB", block_size="64KiB", reducer="sum")
    done = run("mount", tmp_path, "--registry", one.registry, "--transport", "rdma")
    said = [BUILD] if "built" in why_not else ["takes no RDMA connections", "start it with --rdma on"]
    refused(done, *said)
    # There is no line if nobody could expect RDMA.
    mount = one.mount(transport="auto", rdma_reads=4)
    [shard] = mount.status()["shards"]
    assert shard["transport"] == "shm" and "not_rdma_because" not in shard, shard
    assert "rdma" not in mount.stdout(), mount.stdout()


WRONG = [
    (("--rdma-placement", "both"), ("--rdma-placement", "auto", "static", "dynamic")),
    (("--rdma-gid-index", "first"), ("--rdma-gid-index", "first", "gradfs rdma devices")),
    (("--rdma-gid-index", "fe80::1"), ("not a whole number", "gradfs rdma devices")),
    (("--rdma-device", "mlx5_0/0"), ("--rdma-device", "numbered from 1", "mlx5_0/1")),
    (("--rdma-polling", "often"), ("busy", "event", "adaptive")),
    (("--rdma-arena", "1MiB"), ("4MiB to 64GiB", "64MiB")),
    (("--rdma-retries", "8"), ("from 0 to 7",)),
]


@pytest.mark.parametrize("words, said", WRONG, ids=lambda words: " ".join(words))
def test_settings_that_make_no_sense_are_refused(words, said, tmp_path):
    for command in (["shard", "--listen", "127.0.0.1:0"], ["mount", tmp_path, "--registry", "127.0.0.1:1"]):
        refused(run(*command, *words), *said, code=2)


def test_a_complaint_names_the_source(tmp_path):
    config = tmp_path / "cluster.toml"
    config.write_text('listen = "127.0.0.1:0"\nrdma_placement = "both"\n')
    refused(run("shard", "--config", config), config, "rdma_placement", "auto, static, dynamic", code=2)
    config.write_text('listen = "127.0.0.1:0"\nrdma_gid_indx = 3\n')
    refused(run("shard", "--config", config), "unknown key rdma_gid_indx", "did you mean rdma_gid_index?", code=2)
    done = ran([gradfs_binary(), "shard", "--listen", "127.0.0.1:0"], env={"GRADFS_RDMA": "perhaps"})
    refused(done, "GRADFS_RDMA", "perhaps", "off, auto, on", code=2)


def test_help_and_completions_have_it():
    for command in ("shard", "mount"):
        shown = run(command, "--help").stdout
        assert "\nRDMA:\n" in shown and "--rdma-gid-index" in shown and "--rdma-shared-receives" in shown, shown
        assert ("--rdma-port" in shown) == (command == "shard"), shown
    assert "gradfs rdma devices --json" in run("rdma", "devices", "--help").stdout
    script = run("completions", "bash").stdout
    assert "--rdma-placement" in script and "devices" in script
