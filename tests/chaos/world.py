"""The processes to which harm is done: a registry, shards, mounts and learners, on hosts of network namespaces or here."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chaos.checker import RESERVED
from conftest import REPOSITORY, gradfs_binary, pause
from ports import free_address

sys.path.append(str(REPOSITORY / "scripts/lib"))

from machine import CannotBeHad, Failed, own_python, say  # noqa: E402
from netns import Hosts, _in_namespace  # noqa: E402
from programs import Program  # noqa: E402

BLOCK = 64 << 10
SIZE = 9 * BLOCK
# Of the job, in seconds: how long calls wait, when silent mounts leave, and how long calls wait for shards.
TIMEOUT, LEASE, PATIENCE = 20, 4, 6
# No call takes longer. A busy machine has more time.
HUNG = 3 * TIMEOUT
# Bytes of a directory as a store.
DISK = 48 << 20


class Here:
    """All hosts are this one. Their links cannot be cut."""

    has_links = False

    def __init__(self, names):
        self.scratch = Path(tempfile.mkdtemp(prefix="gradfs-chaos-"))
        self._count = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Mounts that were killed are still there.
        for name in os.listdir(self.scratch):
            if name.startswith("mount"):
                command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
                subprocess.run([*command, self.scratch / name], capture_output=True, check=False)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def listen(self, host, port):
        return free_address()

    def start(self, host, command, env, name):
        self._count += 1
        return Program(command, self.scratch / f"{self._count}.log", name, env)

    def within(self, host, call):
        return call("127.0.0.1")


class Apart(Hosts):
    """Each host is a network namespace."""

    has_links = True

    def listen(self, host, port):
        return f"{self.address(host)}:{port}"

    def within(self, host, call):
        return _in_namespace(self.namespace(host), lambda: call(self.address(host)))

    def slow(self, host, is_slow):
        """What the host sends waits in a queue."""
        which = "replace" if is_slow else "del"
        limit = ["tbf", "rate", "40mbit", "burst", "32kb", "latency", "300ms"] if is_slow else []
        words = ["tc", "-n", self.namespace(host), "qdisc", which, "dev", "eth0", "root", *limit]
        subprocess.run(words, check=True, capture_output=True)


class Process:
    """A program that is killed and started again, with the same words on the same host."""

    def __init__(self, world, kind, name, host, command, ready="gradfs: ready", env=None):
        self.world, self.kind, self.name, self.host, self.command = world, kind, name, host, command
        self.ready, self._env, self.program, self._read = ready, env, None, 0
        # When it was not there: pairs of times.
        self.away = []

    def start(self):
        """Starts it, and does not wait."""
        self.program, self._read = self.world.place.start(self.host, self.command, self._env, self.name), 0
        self.started = time.monotonic()

    def wait(self):
        """Waits until it is ready."""
        if self.ready:
            self.program.wait_for(self.ready, HUNG)
        if self.away:
            self.away[-1][1] = time.monotonic()

    def kill(self):
        self.away.append([time.monotonic(), float("inf")])
        self.program.process.kill()
        self.program.process.wait(HUNG)

    def stop(self):
        pause(self.program.pid)

    def go_on(self):
        os.kill(self.program.pid, signal.SIGCONT)

    def was_away(self, began, ended):
        return any(since < ended and began < until for since, until in self.away)

    def lines(self):
        """What it has said since this was asked last, in whole lines."""
        with open(self.program.output, "rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").splitlines()


class World:
    """A cluster with a job, its store, and those who use it."""

    def __init__(self, options, dice):
        self.options, self.shards, self.mounts, self.registry, self.clients = options, [], [], [], []
        self.job = {"consistency": dice.choice(["sync", "async"]), "snapshot_every": dice.choice([1, "1s", "2s"])}
        self.names = [f"shard{one + 1}" for one in range(dice.choice([3, 4]))]
        self._ends, self.bucket, self.store, self.settled = [], None, None, 0
        # What shards have said.
        self.heard = []

    def __enter__(self):
        members = ["etcd1", "etcd2", "etcd3"] if self.options.registry == "etcd" else ["registry"]
        hosts = [*self.names, "mount1", *members, "store"]
        try:
            self.disk = self._make_disk()
            self.place = self._make_place(hosts)
            self.flag = self.place.scratch / "leave"
            self._make_store()
            self._begin(members)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make_disk(self):
        """A small disk, before there are hosts: they see it, too."""
        path = Path(tempfile.mkdtemp(prefix="gradfs-chaos-store-"))
        self._ends.append(lambda: shutil.rmtree(path, ignore_errors=True))
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "chaos", path], capture_output=True)
        self.is_small = mounted.returncode == 0
        if self.is_small:
            self._ends.append(lambda: subprocess.run(["umount", "-l", path], check=False))
        else:
            say("no small disk can be made here, so none becomes full")
        return path

    def _make_place(self, hosts):
        try:
            if self.options.here:
                raise CannotBeHad("as it was asked for")
            place = Apart(hosts).__enter__()
        except CannotBeHad as why:
            say(f"all on this host, so no link is cut or slow: {why}")
            place = Here(hosts).__enter__()
        self._ends.append(lambda: place.__exit__(None, None, None))
        return place

    def _make_store(self):
        if self.options.store == "file":
            self.store, self._env = str(self.disk / "store"), {}
            return
        from buckets import Bucket, Server, Way

        self._server = Server()
        self._ends.append(self._server.close)
        self.bucket = Bucket(self._server, "chaos", Way(self._server, lambda call: self.place.within("store", call)))
        self._within = self.bucket.url.removeprefix("s3://chaos/") + "/"
        self._ends.append(self.bucket.way.close)
        self.store, self._env = self.bucket.url, self.bucket.environment()

    def _begin(self, members):
        gradfs = gradfs_binary()
        if self.options.registry == "etcd":
            self._begin_etcd(members)
        else:
            at = self.place.listen("registry", 7070)
            state = self.place.scratch / "registry.state"
            words = [gradfs, "registry", "--listen", at, "--insecure", "--registry-state", state]
            self.registry, self.url = [Process(self, "registry", "registry", "registry", words)], at
        self._all_of(self.registry)
        for name in self.names:
            at = self.place.listen(name, 7070)
            words = [gradfs, "shard", "--listen", at, "--insecure", "--registry", self.url]
            self.shards.append(Process(self, "shard", name, name, words, env=self._env))
            self.shards[-1].at = at
        self._all_of(self.shards)
        self.command("create", "m", "--size", SIZE, "--block-size", BLOCK, "--reducer", "sum", "--snapshot-to", self.store,
                     "--timeout", TIMEOUT, "--lease", LEASE, "--shard-patience", PATIENCE, "--read-own-step", "true",
                     *(word for name, value in self.job.items() for word in (f"--{name.replace('_', '-')}", value)))  # fmt: skip
        # One mount has a host of its own, and one shares memory with a shard.
        for name, host in (("mount1", "mount1"), ("mount2", self.names[0])):
            root = self.place.scratch / name
            root.mkdir()
            words = [gradfs, "mount", root, "m", "--registry", self.url]
            self.mounts.append(Process(self, "mount", name, host, words))
        self._all_of(self.mounts)
        for mount in self.mounts:
            for kind, name in (("learner", "a"), ("learner", "b"), ("watcher", "watcher")):
                program = Path(__file__).with_name("learner.py")
                model = self.place.scratch / mount.name / "m"
                name = f"{mount.name}-{name}"
                words = [own_python(), program, kind, name, mount.name, model, self.flag]
                self.clients.append(Process(self, kind, name, mount.host, words, ready=None))
        self._all_of(self.clients)

    def _begin_etcd(self, members):
        from etcd import needed

        needed()
        peers = {name: self.place.listen(name, 2380) for name in members}
        clients = {name: self.place.listen(name, 2379) for name in members}
        cluster = ",".join(f"{name}=http://{at}" for name, at in peers.items())
        for name in members:
            peer, client = f"http://{peers[name]}", f"http://{clients[name]}"
            words = ["etcd", "--name", name, "--data-dir", self.place.scratch / name, "--initial-cluster", cluster]
            words += ["--listen-client-urls", client, "--advertise-client-urls", client, "--logger", "zap"]
            words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--log-level", "error"]
            self.registry.append(Process(self, "etcd", name, name, words, ready=None))
        self.url = "etcd://" + ",".join(clients.values())

    def _all_of(self, processes):
        for process in processes:
            process.start()
        for process in processes:
            process.wait()

    def command(self, *words):
        """What `gradfs WORDS` says."""
        program = self.place.start(self.names[0], [gradfs_binary(), *words, "--registry", self.url], self._env, f"gradfs {words[0]}")
        return program.finish(HUNG, check=words[0] != "status")

    def _status(self, of_partition):
        """The shards whose partition of the job's newest life is such a one."""
        found = {}
        status = json.loads(self.command("status", "m", "--json"))
        for told in status["shards"]:
            for model in told.get("models") or []:
                if model["name"] == "m" and of_partition(model):
                    found[told["address"]] = model["version"]
        newest = max(found.values(), default=0) // RESERVED
        return [shard for shard in self.shards if found.get(shard.at, -1) // RESERVED == newest]

    def holders(self):
        """The shards that have blocks of the job."""
        return self._status(lambda model: model["blocks"])

    def coordinator(self):
        """The shard that coordinates the job."""
        return self._status(lambda model: model["coordinator"])[0]

    def hears(self, *words):
        """Whether a shard says a line with these words from now on, as a call."""
        since = len(self.heard)
        return lambda: any(all(word in line for word in words) for line in self.heard[since:])

    # The store.

    def snapshots(self):
        """Names and versions of the descriptions, the oldest first."""
        if self.bucket:
            names = [name.removeprefix(self._within) for name in self.bucket.objects()]
        else:
            names = [f"snapshots/{path.name}" for path in (self.disk / "store/snapshots").glob("*.json")]
        found = [(name, re.search(r"snapshots/\d+-v(\d+)-", name)) for name in sorted(names)]
        return [(name, int(version[1])) for name, version in found if version]

    def read(self, name):
        if not self.bucket:
            return (self.disk / "store" / name).read_bytes()
        status, _, body = self._server.ask("GET", f"/chaos/{self._within}{name}")
        if status != 200:
            raise FileNotFoundError(name)
        return body

    def write(self, name, data):
        if not self.bucket:
            (self.disk / "store" / name).write_bytes(data)
        else:
            self._server.ask("PUT", f"/chaos/{self._within}{name}", data)

    def processes(self):
        return [*self.registry, *self.shards, *self.mounts, *self.clients]

    def tails(self, lines=30):
        """The ends of all logs."""
        for process in self.processes():
            if process.program and process.kind not in ("learner", "watcher"):
                said = process.program.said().splitlines()[-lines:]
                yield "\n".join([f"--- {process.name}", *said])

    def __exit__(self, *_):
        for process in self.processes():
            if process.program and process.program.process.poll() is None:
                process.kill()
        for end in reversed(self._ends):
            end()


def events(process):
    """What a client has said since this was asked last."""
    return [json.loads(line) for line in process.lines() if line.startswith("{")]
