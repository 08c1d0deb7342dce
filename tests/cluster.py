"""A cluster for tests: shards on free ports of 127.0.0.1, models on them, and mounts of those."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pytest
from conftest import Daemon, Mount, all_of, flags, gradfs_binary, pause, ran
from patience import HANGS, Limit
from ports import free_address
from wire import HEADER_BYTES, ROLES, Closed, Peer, Reading

START_DEADLINE = STOP_DEADLINE = HANGS
# Options of `gradfs up` that belong to the mount; all others are the model's.
OF_MOUNTS = {"no_passthrough", "threads", "allow_other", "uid", "gid", "umask", "io", "transport", "connections", "metrics", "nbd", "insecure"}


def run(*args, timeout=HANGS):
    """A command of gradfs to its end."""
    return ran([gradfs_binary(), *args], timeout=timeout)


class Shard(Daemon):
    """A running `gradfs shard`; `address` is where it listens, whatever it advertises."""

    def __init__(self, *args, listen=None, command="shard"):
        self._scratch = Path(tempfile.mkdtemp(prefix="gradfs-test-shard-"))
        # Also of one that does not start, or that a test has put another one in the place of.
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        # Of its own, so that it can come back there.
        self.command = [str(gradfs_binary()), command, "--listen", listen or free_address(), *map(str, args)]
        self._begin(self.command)
        end = time.monotonic() + START_DEADLINE
        while "gradfs: ready" not in self.stdout():
            if self.process.poll() is not None or time.monotonic() > end:
                story = f"$ {' '.join(self.command)}\n{self.stdout()}{self.stderr()}"
                self.kill()
                raise AssertionError(f"the shard is not ready\n{story}")
            time.sleep(0.005)
        self.address = re.search(r"listens on ([^ ,;]+)", self.stdout())[1]
        number = re.search(r"shard (\d+) listens", self.stdout())
        self.number = int(number[1]) if number else 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.clean_up()

    def kill(self):
        """SIGKILL, which ends a stopped process, too."""
        if self.running():
            self.process.kill()
        self.process.wait(STOP_DEADLINE)

    def pause(self):
        """It is stopped, with all its threads, until `resume`."""
        pause(self.pid)

    def resume(self):
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self):
        """It is stopped meanwhile."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def stop(self, with_signal=signal.SIGTERM):
        """Asks it to end; returns its exit status."""
        if self.running():
            self.process.send_signal(with_signal)
            try:
                self.process.wait(STOP_DEADLINE)
            except subprocess.TimeoutExpired:
                self.kill()
                pytest.fail(f"the shard did not end within {STOP_DEADLINE} s\n{self.stderr()}", pytrace=False)
        return self.process.returncode

    def clean_up(self):
        try:
            if self.running():
                with contextlib.suppress(ProcessLookupError):
                    self.resume()
                assert self.stop() == 0, self.stderr()
            assert "panicked" not in self.stderr(), self.stderr()
        finally:
            self.kill()
            shutil.rmtree(self._scratch, ignore_errors=True)


class NetworkMount(Mount):
    """A running `gradfs mount`. What one process has published another one shows when it has pulled it: `version` and
    `weights` here first let the mount catch up with the coordinator, so that tests can say what comes next."""

    def __init__(self, cluster, *args, models=(), root=None, **options):
        self.cluster = cluster
        self._shown = list(models) or cluster.models
        self._named = list(models)
        super().__init__(*args, root=root, registry=cluster.registry, **options)

    def _command(self, args, size, model, **options):
        words = [*map(str, args), *flags(options), str(self.root), *self._named]
        return [str(gradfs_binary()), "mount", *words], self._shown

    def coordinator_version(self, model=None):
        """The newest version, as the coordinator says."""
        return self.cluster.coordinator((model or self.model).name)["version"]

    def catch_up(self, deadline=5):
        """Waits until the mount shows the present newest version, with a deadline: all its buffers may be held."""
        if not self.running():
            return
        try:
            newest = self.coordinator_version()
        except (OSError, Closed, KeyError):
            return
        limit = Limit(deadline)
        while super().version() < newest and not limit.over():
            time.sleep(0.001)

    def version(self):
        self.catch_up()
        return super().version()

    def seen(self):
        """The version that is shown at this moment."""
        return super().version()

    def weights(self, learner=None):
        self.catch_up()
        return super().weights(learner)

    def own(self):
        """The name of the mount's own learner."""
        return f"mount-{''.join(c for c in socket.gethostname() if c.isalnum() or c in '-_.')}-{self.pid}"


class Cluster:
    """Shards, of which the first is also the registry. Models and mounts that are made here end with the test."""

    def __init__(self, shards=1):
        self.registry, self.shards, self.mounts, self.models = None, [], [], []
        self._peers, self._coordinators, self._ends = {}, {}, []
        for _ in range(shards):
            self.add_shard()

    def add_shard(self, *args, proxy=None, **options):
        """One more; behind a `proxy` it is that which is announced."""
        if proxy is not None:
            args += ("--advertise", proxy.address)
        if self.registry is not None:
            args += ("--registry", self.registry)
        shard = Shard(*args, **options)
        self.shards.append(shard)
        self.registry = self.registry or shard.address
        if proxy is not None:
            proxy.target = shard.address
        return shard

    def proxy(self):
        """A way to a shard that is still to be added."""
        proxy = Proxy()
        self._ends.append(proxy.close)
        return proxy

    def run(self, command, *args, **options):
        return run(command, *args, "--registry", self.registry, **options)

    def create(self, name="m", *args, **options):
        """`gradfs create`, which must succeed; options become flags."""
        done = self.run("create", name, *args, *flags(options))
        assert done.returncode == 0, done.stderr
        self.models.append(name)
        return done.stdout

    def mount(self, *args, **options):
        # Shared memory would go past the proxies.
        transport = "tcp" if self._ends else os.environ.get("GRADFS_TESTS_TRANSPORT")
        mount = NetworkMount(self, *args, **{"transport": transport, **options})
        self.mounts.append(mount)
        return mount

    def status(self):
        done = self.run("status", "--json")
        assert done.returncode in (0, 3), done.stderr
        return json.loads(done.stdout)

    def ask(self, shard):
        """The status of one shard, over a connection that is kept."""
        for _ in range(2):
            peer = self._peers.pop(shard.address, None)
            try:
                if peer is None:
                    peer = Peer(shard.address)
                    assert peer.greet("admin").name == "Welcome"
                status = json.loads(peer.request("Status", epoch=0).payload)
            except (Closed, OSError):
                if peer is None:
                    raise
                peer.socket.close()
                continue
            self._peers[shard.address] = peer
            return status
        raise Closed

    def partition(self, shard, model):
        """What a shard says of its partition of a model."""
        return next(one for one in self.ask(shard)["models"] if one["name"] == model)

    def coordinator_shard(self, model):
        """The shard that coordinates a model."""
        for shard in self.shards:
            if shard.running():
                with contextlib.suppress(StopIteration):
                    if self.partition(shard, model)["coordinator"]:
                        return shard
        raise KeyError(model)

    def coordinator(self, model):
        """What a model's coordinator says of it."""
        for _ in range(2):
            shard = self._coordinators.pop(model, None) or self.coordinator_shard(model)
            with contextlib.suppress(StopIteration, OSError, Closed):
                if told := self.partition(shard, model)["coordinator"]:
                    self._coordinators[model] = shard
                    return told
        raise KeyError(model)

    def clean_up(self):
        peers = [peer.socket.close for peer in self._peers.values()]
        ends = [one.clean_up for one in (*reversed(self.mounts), *reversed(self.shards))] + self._ends + peers
        self.mounts, self.shards, self._ends, self._peers = [], [], [], {}
        all_of(ends)


def mounted_over_network(shards, *args, size=None, model=None, root=None, env=None, **options):
    """A mount as `gradfs up` with these options would be, of models on so many shards that end with it."""
    cluster = Cluster(shards)
    try:
        args, words = [], [*map(str, args)]
        while words:
            word = words.pop(0)
            if words and not words[0].startswith("--"):
                options[word[2:].replace("-", "_")] = words.pop(0)
            else:
                options[word[2:].replace("-", "_")] = True
        mine = {name: options.pop(name) for name in OF_MOUNTS & options.keys()}
        given = model if isinstance(model, (list, tuple)) else [model] if model else []
        files = [Path(path) for path in given]
        names = options.pop("name", None)
        names = [names] if isinstance(names, str) else names or [path.stem for path in files] or ["model"]
        for name, file in zip(names, files or [None]):
            cluster.create(name, size=size, model=file, **options)
        return cluster.mount(models=names, root=root, env=env, **mine)
    except BaseException:
        cluster.clean_up()
        raise


class Connection:
    """One connection through a proxy: role, model and client are those of its hello."""

    def __init__(self, near, far):
        self.near, self.far = near, far
        self.role = self.client = self.model = None
        self.passed = {"up": 0, "down": 0}

    def learn(self, data):
        """From its first bytes."""
        try:
            reading = Reading(data[HEADER_BYTES : HEADER_BYTES + int.from_bytes(data[4:8], "little")])
            reading.number(), reading.number()
            role = reading.number()
            self.model, _, self.client = reading.fields("suu")
            self.role = next(name for name, number in ROLES.items() if number == role)
        except (IndexError, StopIteration):
            self.role = "strange"

    def reset(self):
        """Ends both sides as a crash does, and loses the bytes under way."""
        for end in (self.near, self.far):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def end_listening(listener, thread):
    """Ends a thread that accepts, and then what it listens on. Closing alone does not wake it: it would keep the port,
    and if its call is restarted, take connections of whatever has the descriptor's number then."""
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(STOP_DEADLINE)
    assert not thread.is_alive(), "a listener's thread does not end"
    listener.close()


class Proxy:
    """A TCP proxy in front of a shard, that does harm: `rule(connection, direction, data)` returns the bytes to pass on,
    or None to reset the connection. `direction` is up (to the shard) or down. `hold` stops what matches it."""

    def __init__(self):
        self.target = None
        self.rule = None
        self.connections = []
        self._held = lambda connection: False
        self._changed = threading.Condition()
        self._over = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def hold(self, which=lambda connection: True):
        """Nothing passes on these connections, nor on new ones that match, until `release`: a partition."""
        self._held = which

    def release(self):
        self._held = lambda connection: False
        with self._changed:
            self._changed.notify_all()

    def reset(self, which=lambda connection: True):
        """Resets these connections; returns how many."""
        hit = [connection for connection in list(self.connections) if which(connection)]
        for connection in hit:
            connection.reset()
        return len(hit)

    def clients(self):
        """The clients that have said hello here."""
        return {connection.client for connection in list(self.connections) if connection.client}

    def close(self):
        self._over = True
        end_listening(self._listener, self._accepting)
        self.release()
        self.reset()

    def _accept(self):
        while not self._over:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                host, port = self.target.rsplit(":", 1)
                far = socket.create_connection((host, int(port)), timeout=HANGS)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(near, far)
            self.connections.append(connection)
            for args in ((connection, "up", near, far), (connection, "down", far, near)):
                threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(self, connection, direction, source, sink):
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(256 << 10):
                if direction == "up" and connection.role is None:
                    connection.learn(data)
                with self._changed:
                    while self._held(connection) and not self._over:
                        self._changed.wait(0.05)
                if self.rule is not None:
                    data = self.rule(connection, direction, data)
                    if data is None:
                        break
                connection.passed[direction] += len(data)
                sink.sendall(data)
            else:
                sink.shutdown(socket.SHUT_WR)
                return
        connection.reset()
        with contextlib.suppress(ValueError):
            self.connections.remove(connection)
