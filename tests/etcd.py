"""An etcd for tests: members on free ports of 127.0.0.1, that can be killed and started again."""

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from conftest import begin
from patience import HANGS, Limit
from ports import free_address


def needed():
    """Skips the test where there is no etcd; with CI=true it fails."""
    if shutil.which("etcd") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no etcd: scripts/setup test")


class Etcd:
    """An etcd of some members. `url` is what gradfs is told."""

    def __init__(self, members=3, tls=None):
        needed()
        self._scratch = Path(tempfile.mkdtemp(prefix="gradfs-test-etcd-"))
        self._tls = tls
        places = [free_address() for _ in range(2 * members)]
        self.members, self._peers = places[:members], places[members:]
        self.url = ("etcds" if tls else "etcd") + "://" + ",".join(self.members)
        self._processes = [None] * members
        self.start(*range(members))

    def start(self, *which):
        """Starts these members, and waits until they have a leader."""
        scheme = "https" if self._tls else "http"
        for one in which:
            client, peer = f"{scheme}://{self.members[one]}", f"http://{self._peers[one]}"
            cluster = ",".join(f"m{i}=http://{place}" for i, place in enumerate(self._peers))
            command = ["etcd", "--name", f"m{one}", "--data-dir", self._scratch / f"m{one}", "--initial-cluster", cluster]
            command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--logger", "zap", "--log-level", "error"]
            command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, *(self._tls or ())]
            with open(self._scratch / f"m{one}.log", "ab") as log:
                self._processes[one] = begin([str(word) for word in command], stdout=log, stderr=log)
        if self._tls is None:
            limit = Limit(HANGS)
            while any(self.leader(one) is None for one in which):
                assert not limit.over(), "no leader"
                time.sleep(0.05)

    def kill(self, *which):
        for one in which:
            self._processes[one].kill()
            self._processes[one].wait()

    def call(self, one, what, **message):
        """What a member answers by its JSON interface; None if it does not."""
        at = urllib.request.Request(f"http://{self.members[one]}/v3/{what}", json.dumps(message).encode())
        try:
            with urllib.request.urlopen(at, timeout=5) as answer:
                return json.load(answer)
        except (OSError, urllib.error.URLError):
            return None

    def leader(self, one=0):
        """The number of the leader, as a member knows it; None if it knows none."""
        told = self.call(one, "maintenance/status")
        if told is None or told.get("leader", "0") == "0":
            return None
        ids = {}
        for other, process in enumerate(self._processes):
            if process is not None and process.poll() is None and (status := self.call(other, "maintenance/status")):
                ids[status["header"]["member_id"]] = other
        return ids.get(told["leader"])

    def clean_up(self):
        for process in self._processes:
            if process is not None:
                process.kill()
                process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def certificates(directory):
    """An authority, and a certificate of 127.0.0.1 for members and clients, with its key."""
    ca, cert, key, request = (directory / name for name in ("ca.pem", "cert.pem", "key.pem", "request.pem"))
    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout"]
    (directory / "extensions").write_text("subjectAltName=IP:127.0.0.1\n")
    for words in (
        [*new, directory / "ca-key.pem", "-x509", "-days", "30", "-subj", "/CN=authority", "-out", ca],
        [*new, key, "-subj", "/CN=root", "-out", request],
        ["x509", "-req", "-in", request, "-CA", ca, "-CAkey", directory / "ca-key.pem", "-CAcreateserial", "-days", "30"]
        + ["-extfile", directory / "extensions", "-out", cert],
    ):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
    return ca, cert, key
