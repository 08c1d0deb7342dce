"""Metrics: `GET /metrics` agrees with status.json, and clients that send a wrong request, or none, harm nobody.

docs/operate/metrics.md has the table of names.
"""

import contextlib
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from conftest import gradfs_binary
from filetools import BLOCK, eventually, takes
from test_cluster_addresses import squatter

ANY = "127.0.0.1:0"
# One measurement: its name, labels and value.
LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*)\})? (\S+)')


def at(program):
    """Where a program says that its metrics are."""
    said = re.search(r"^gradfs: metrics at http://(\S+):(\d+)/metrics$", program.stdout(), re.MULTILINE)
    assert said, program.stdout()
    return said[1].strip("[]"), int(said[2])


class Metrics:
    """One scrape."""

    def __init__(self, program):
        with urllib.request.urlopen("http://%s:%d/metrics" % at(program), timeout=5) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4"
            self.text = answer.read().decode()
        self.values, kinds = {}, {}
        assert self.text.endswith("\n")
        for line in self.text.splitlines():
            if line.startswith("# HELP "):
                assert re.fullmatch(r"# HELP gradfs_[a-z_]+ [A-Z1].*\.", line), line
            elif line.startswith("# TYPE "):
                name, kind = line.split()[2:]
                assert name not in kinds
                kinds[name] = kind
            else:
                name, labels, value = LINE.fullmatch(line).groups()
                of_histogram = re.sub(r"_(bucket|sum|count)$", "", name)
                if kinds.get(of_histogram) != "histogram":
                    assert kinds[name] == ("counter" if name.endswith("_total") else "gauge"), line
                key = (name, frozenset(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', labels or "")))
                assert key not in self.values, line
                self.values[key] = float(value)

    def __call__(self, name, **labels):
        return self.values[name, frozenset((label, str(value)) for label, value in labels.items())]

    def all(self, name):
        """Labels and values of a name."""
        return [(dict(labels), value) for (one, labels), value in self.values.items() if one == name]


def are_those_of(mount, name):
    """Holds the metrics of a mount to its status, once nothing changes between the one and the other."""

    def at_rest():
        status, seen = mount.status(), Metrics(mount)
        later = mount.status()
        same = all(status.get(key) == later.get(key) for key in ("version", "contributions", "traffic", "payload"))
        return (status, seen) if same else None

    status, seen = eventually(at_rest)
    ((build, one),) = seen.all("gradfs_build_info")
    version = subprocess.run([gradfs_binary(), "--version"], capture_output=True, text=True, check=True).stdout
    assert one == 1 and build["version"] == version.split()[1] and build["rdma"] in ("true", "false")
    assert seen("gradfs_model_version", model=name) == status["version"]
    assert seen("gradfs_learners", model=name) == len(status["learners"])
    assert [labels["state"] for labels, value in seen.all("gradfs_job_state") if value == 1] == [status["state"]]
    assert seen("gradfs_contributions_total", model=name) == status["contributions"]
    for metric, key in {"gradfs_gradient_norm": "gradient_norm", "gradfs_learning_rate": "learning_rate"}.items():
        assert [value for _, value in seen.all(metric)] == [status[key]] * (status[key] is not None), metric
    for metric, key in {
        "gradfs_written_bytes_total": "written_bytes",
        "gradfs_reduced_on_arrival_bytes_total": "reduced_on_arrival_bytes",
        "gradfs_staged_bytes_total": "staged_bytes",
        "gradfs_blocks_reduced_on_arrival_total": "blocks_reduced_on_arrival",
    }.items():
        assert seen(metric, model=name) == status["traffic"][key], metric
    payload = {
        (labels["direction"], metric): value
        for metric in ("gradfs_payload_bytes_total", "gradfs_payload_copied_bytes_total")
        for labels, value in seen.all(metric)
    }
    if "payload" in status:
        assert payload == {
            ("push", "gradfs_payload_bytes_total"): status["payload"]["pushed_bytes"],
            ("push", "gradfs_payload_copied_bytes_total"): status["payload"]["push_copied_bytes"],
            ("pull", "gradfs_payload_bytes_total"): status["payload"]["pulled_bytes"],
            ("pull", "gradfs_payload_copied_bytes_total"): status["payload"]["pull_copied_bytes"],
        }
    else:
        assert payload == {}
    told = seen.all("gradfs_transport_info")
    assert len(told) == len(status["shards"])
    for shard in status["shards"]:
        labels = {
            "model": name, "shard": str(shard["id"]), "address": shard["address"] or "", "transport": shard["transport"],
        }
        assert (labels, 1) in told
        assert seen("gradfs_shard_connected", model=name, shard=shard["id"]) == shard["connected"]
        for wanted in ("shm", "rdma"):
            fell_back = f"not_{wanted}_because" in shard and shard["transport"] != wanted
            assert seen("gradfs_transport_fallback", model=name, shard=shard["id"], wanted=wanted) == fell_back
    return status, seen


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_metrics_of_a_mount_are_those_of_its_status(cluster, transport):
    one = cluster(2, size=5 * BLOCK, block_size=BLOCK, reducer="sum")
    mount = one.mount(transport=transport, metrics=ANY)
    are_those_of(mount, "m")
    for _ in range(3):
        mount.contribute(np.ones(5 * BLOCK // 4, "<f4"))
    assert mount.weights()[:4] == np.float32(3).tobytes()
    status, seen = are_those_of(mount, "m")
    assert seen("gradfs_model_version", model="m") == 3 and seen("gradfs_contributions_total", model="m") == 3
    assert seen("gradfs_written_bytes_total", model="m") == 15 * BLOCK
    assert seen("gradfs_payload_bytes_total", model="m", direction="push") == 15 * BLOCK
    assert {labels["transport"] for labels, _ in seen.all("gradfs_transport_info")} == {transport}
    assert len(status["shards"]) == 2
    assert {value for _, value in seen.all("gradfs_transport_fallback")} == {0}
    assert {value for _, value in seen.all("gradfs_shard_connected")} == {1}
    gone = one.coordinator_shard("m")
    (number,) = [shard["id"] for shard in status["shards"] if shard["address"] == gone.address]
    gone.kill()
    eventually(lambda: Metrics(mount)("gradfs_shard_connected", model="m", shard=number) == 0)


@pytest.mark.one_process
def test_metrics_of_one_process(start_mount):
    where = "[::1]:0" if has_ipv6() else ANY
    mount = start_mount(size=3 * BLOCK, block_size=BLOCK, reducer="sgd", learning_rate=0.01, clip_norm=2, metrics=where)
    are_those_of(mount, "model")
    mount.contribute(np.ones(3 * BLOCK // 4, "<f4"))
    _, seen = are_those_of(mount, "model")
    assert seen("gradfs_model_version", model="model") == 1
    assert seen("gradfs_gradient_norm", model="model") == pytest.approx((3 * BLOCK / 4) ** 0.5)
    assert seen("gradfs_learning_rate", model="model") == 0.01
    assert seen("gradfs_transport_info", model="model", shard=0, address="", transport="in-process") == 1


def has_ipv6():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def test_metrics_of_snapshots_are_those_of_the_status(cluster, tmp_path):
    one, store = cluster(0), tmp_path / "store"
    shard = one.add_shard("--metrics", ANY)
    one.create("m", size=BLOCK, block_size=BLOCK, reducer="sum", consistency="async", snapshot_to=store, snapshot_every=1)
    mount = one.mount(models=["m"])
    mount.contribute(np.ones(BLOCK // 4, "<f4"))
    eventually(lambda: (mount.model / "durable_version").read_text() == "1\n")
    eventually(lambda: one.coordinator("m")["snapshots"]["durable_version"] == 1)
    status, seen = one.coordinator("m")["snapshots"], Metrics(shard)
    assert seen("gradfs_durable_version", model="m") == 1 and seen("gradfs_snapshot_failures_total", model="m") == 0
    assert seen("gradfs_snapshot_seconds", model="m") == pytest.approx(status["seconds"])
    assert seen("gradfs_snapshot_written_bytes", model="m") == status["written_bytes"] > 0
    assert seen("gradfs_snapshot_age_seconds", model="m") >= status["age_seconds"] >= 0
    shutil.rmtree(store)
    store.write_text("in the way")
    mount.contribute(np.ones(BLOCK // 4, "<f4"))
    eventually(lambda: Metrics(shard)("gradfs_snapshot_failures_total", model="m") > 0)
    store.unlink()


def test_metrics_of_a_shard_are_those_of_its_status(cluster):
    one = cluster(0)
    shard = one.add_shard("--metrics", ANY)
    assert Metrics(shard).all("gradfs_partition_version") == []
    one.create("m", size=4 * BLOCK, block_size=BLOCK, reducer="sum", consistency="async")
    one.create("other", size=BLOCK, block_size=BLOCK, reducer="sum")
    # The only connection now is one that the test keeps.
    one.coordinator("m")
    idle = 1
    eventually(lambda: Metrics(shard)("gradfs_connections", transport="tcp") == idle)
    mounts = {way: one.mount(transport=way, models=["m"]) for way in ("tcp", "shm")}
    for mount in mounts.values():
        mount.contribute(np.ones(BLOCK, "<f4"))
    mounts["tcp"].wait_for_version(2)
    (status,) = one.status()["shards"]
    seen = Metrics(shard)
    assert {labels["model"] for labels, _ in seen.all("gradfs_partition_version")} == {"m", "other"}
    for model in status["models"]:
        name = model["name"]
        assert seen("gradfs_partition_version", model=name) == model["version"]
        assert seen("gradfs_partition_blocks", model=name) == model["blocks"]
        assert seen("gradfs_partition_memory_bytes", model=name) == model["memory_bytes"]
        assert seen("gradfs_learners", model=name) == len(model["coordinator"]["learners"])
        assert seen("gradfs_job_state", model=name, state=model["coordinator"]["state"]) == 1
        assert sum(value for labels, value in seen.all("gradfs_job_state") if labels["model"] == name) == 1
        assert seen("gradfs_contributions_total", model=name) == model["coordinator"]["contributions"]
        for way, verb in (("push", "pushed"), ("pull", "pulled")):
            moved = seen("gradfs_payload_bytes_total", model=name, direction=way)
            assert moved == model["payload"][f"{verb}_bytes"]
            copied = seen("gradfs_payload_copied_bytes_total", model=name, direction=way)
            assert copied == model["payload"][f"{way}_copied_bytes"]
    assert seen("gradfs_partition_version", model="m") == 2 and seen("gradfs_learners", model="m") == 2
    assert seen("gradfs_partition_version", model="other") == 0
    assert seen("gradfs_connections", transport="shm") == status["shared_memory"]["connections"] > 0
    assert seen("gradfs_connections", transport="rdma") == status["rdma"]["connections"] == 0
    assert seen("gradfs_rdma_available") == (status["rdma"]["address"] is not None)
    # The command's own have ended by and by.
    eventually(lambda: Metrics(shard)("gradfs_connections", transport="tcp") == one.ask(shard)["tcp"]["connections"])
    assert Metrics(shard)("gradfs_connections", transport="tcp") > idle
    for mount in mounts.values():
        assert mount.stop() == 0
    eventually(lambda: Metrics(shard)("gradfs_connections", transport="shm") == 0)
    eventually(lambda: Metrics(shard)("gradfs_connections", transport="tcp") == idle)
    assert one.run("delete", "other").returncode == 0
    assert [labels for labels, _ in Metrics(shard).all("gradfs_partition_version")] == [{"model": "m"}]


def test_metrics_tell_of_a_fallback(cluster, address):
    one = cluster(0)
    with squatter(address, "rude"):
        one.add_shard(listen=address)
        one.add_shard()
        one.create("m", size=4 * BLOCK, block_size=BLOCK, reducer="sum", shards=2)
        mount = one.mount(transport="auto", metrics=ANY)
        mount.contribute(np.ones(BLOCK, "<f4"))
        assert mount.weights() == np.ones(BLOCK, "<f4").tobytes()
        status, seen = are_those_of(mount, "m")
    by_address = {shard["address"]: shard for shard in status["shards"]}
    (other,) = set(by_address) - {address}
    for where, transport, fell_back in ((address, "tcp", 1), (other, "shm", 0)):
        shard = by_address[where]["id"]
        assert seen("gradfs_transport_info", model="m", shard=shard, address=where, transport=transport) == 1
        assert seen("gradfs_transport_fallback", model="m", shard=shard, wanted="shm") == fell_back
        assert seen("gradfs_transport_fallback", model="m", shard=shard, wanted="rdma") == 0
    assert "hangs up" in by_address[address]["not_shm_because"]


def connect(program):
    return socket.create_connection(at(program), timeout=10)


def said(program, request):
    """The answer to these bytes, until the end of the connection."""
    with connect(program) as near:
        near.sendall(request)
        answer = b""
        while piece := near.recv(65536):
            answer += piece
    return answer.decode()


def test_requests_that_are_no_scrapes_are_refused(start_mount):
    mount = start_mount(size=BLOCK, block_size=BLOCK, reducer="sum", metrics=ANY)
    whole = said(mount, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    head, body = whole.split("\r\n\r\n", 1)
    assert head.startswith("HTTP/1.1 200 OK\r\n") and f"Content-Length: {len(body)}\r\n" in head
    assert said(mount, b"GET /metrics?a=b HTTP/1.0\r\n\r\n").startswith("HTTP/1.1 200 ")
    only = said(mount, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert only.startswith("HTTP/1.1 200 ") and only.endswith("\r\n\r\n")
    for request, code in [
        (b"GET /metrics/../status.json HTTP/1.1\r\n\r\n", 404), (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"\x00" * 100_000, 400), (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", 431),
    ]:  # fmt: skip
        answer = said(mount, request)
        assert answer.startswith(f"HTTP/1.1 {code} "), (request[:60], answer)
        assert ("\r\nAllow: GET, HEAD\r\n" in answer) == (code == 405)
        assert "gradfs_" not in answer
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen("http://%s:%d/" % at(mount), timeout=5)
    assert refused.value.code == 404 and b"/metrics" in refused.value.read()
    are_those_of(mount, "model")


@pytest.mark.parametrize("of", ["mount", "shard"])
def test_silent_clients_keep_nobody_waiting(cluster, of):
    """Neither the next scrape, nor the end of the program; and they are hung up on."""
    one = cluster(0)
    shard = one.add_shard("--metrics", ANY)
    one.create("m", size=BLOCK, block_size=BLOCK, reducer="sum")
    program = one.mount(metrics=ANY) if of == "mount" else shard
    with contextlib.ExitStack() as kept:
        half = kept.enter_context(connect(program))
        half.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        with takes(0, 3):
            Metrics(program)
        with takes(3, 9):
            assert half.recv(1) == b"", "it is not hung up on"
        for number in range(300):
            silent = kept.enter_context(connect(program))
            if number % 2:
                silent.sendall(b"GET /metr")
        # Asked for, and not taken.
        deaf = kept.enter_context(connect(program))
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        with takes(0, 3):
            for _ in range(5):
                Metrics(program)
        descriptors = len(list(Path(f"/proc/{program.pid}/fd").iterdir()))
        assert descriptors < 200, f"{descriptors} descriptors"
        with takes(0, 5):
            assert program.stop() == 0
    assert "panicked" not in program.stderr() and "does not end" not in program.stderr()


def has_thread(program):
    return any((task / "comm").read_text() == "gradfs-metrics\n" for task in Path(f"/proc/{program.pid}/task").iterdir())


def test_metrics_are_asked_for_by_flag_variable_or_file(cluster, start_mount, tmp_path):
    one = cluster(1)
    assert not has_thread(one.shards[0]) and "metrics" not in one.shards[0].stdout()
    one.create("m", size=BLOCK, block_size=BLOCK, reducer="sum")
    assert not has_thread(one.mount())
    by_variable = one.mount(env={"GRADFS_METRICS": ANY})
    assert has_thread(by_variable) and Metrics(by_variable)("gradfs_model_version", model="m") == 0
    file = tmp_path / "job.toml"
    file.write_text(f'metrics = "{ANY}"\n')
    shard = one.add_shard("--config", file)
    assert Metrics(shard)("gradfs_connections", transport="rdma") == 0
    by_file = one.mount(config=file)
    assert Metrics(by_file)("gradfs_model_version", model="m") == 0
    # The line comes before the one that says that the daemon is ready.
    for program in (shard, by_file):
        lines = program.stdout().splitlines()
        assert "metrics at http://127.0.0.1:" in lines[-2] and "ready" in lines[-1], lines


def test_a_port_of_metrics_that_is_in_use_is_said(cluster, gradfs, mnt):
    one = cluster(1, size=BLOCK, block_size=BLOCK, reducer="sum")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "127.0.0.1:%d" % taken.getsockname()[1]
        for command in [("up", "--size", BLOCK, mnt), ("mount", mnt, "--registry", one.registry), ("shard", "--listen", ANY)]:
            with takes(0, 5):
                done = gradfs(*command, "--metrics", address)
            assert done.returncode == 1 and done.stdout == "" and not mnt.is_mount(), done
            wanted = f"gradfs: error: cannot serve metrics on {address}: "
            assert done.stderr.startswith(wanted) and "in use" in done.stderr, done.stderr
            assert "gradfs: hint: --metrics" in done.stderr and "panicked" not in done.stderr, done.stderr
    for where, code in [("192.0.2.1:1", 1), ("http://x", 2)]:
        done = gradfs("up", "--size", BLOCK, "--metrics", where, mnt)
        assert done.returncode == code and "--metrics" in done.stderr, done
