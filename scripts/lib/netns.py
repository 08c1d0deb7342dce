"""Test hosts made of network namespaces, and gradfs clusters on them.

Every host is a network namespace with a name (`ip netns`), joined by a veth pair to a bridge in one more namespace,
the switch; the network of the machine itself is not touched. A host has mounts and a hostname of its own, too, kept by
a process that sleeps: programs on the host are started by nsenter(1) with that process for a target, so all of them see
what is mounted there.

    with Hosts(["shard1", "learner1"], Link(delay=0.001)) as hosts:
        cluster = Cluster.of(hosts, binary, "--size", "1MiB", mounts=["learner1"])
        hosts.start("learner1", ["cat", cluster.model("learner1") / "version"]).finish(10)

What is mounted on a host is seen from outside as well: `hosts.path(host, …)`.
"""

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from machine import CannotBeHad, Failed, own_python
from programs import Program, libc, output_of

COMMAND_DEADLINE = 30.0
WORK = Path(__file__).resolve().parent / "work"

NAMED = Path("/run/netns")
# Those of the namespace that whoever opens them is in.
SETTINGS = Path("/proc/sys/net")
SCRATCH = "gradfs-netns-"
BRIDGE = "br0"
NETWORK = "10.77.0"
PORT = 7070

_CLONE_NEWNET = 0x40000000
_SIOCETHTOOL, _ETHTOOL_STXCSUM = 0x8946, 0x17
_TC_ACT_SHOT = 2


@dataclass(frozen=True)
class Link:
    """How each host's frames leave it: seconds of delay, the share that is lost, bits a second (0 is any), MTU."""

    delay: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    mtu: int = 1500

    def __bool__(self):
        return bool(self.delay or self.loss or self.rate)

    def __str__(self):
        words = [f"{self.delay * 1e3:g} ms"] if self.delay else []
        words += [f"{self.loss * 100:g}% loss"] if self.loss else []
        words += [f"{self.rate / 1e6:g} Mbit/s"] if self.rate else []
        return ", ".join(words) or "no delay, no loss"


def run(*command, check=True):
    """Runs a short command; its output. Failed says what it said."""
    try:
        return output_of(*command, timeout=COMMAND_DEADLINE)
    except Failed:
        if check:
            raise


def require_permission():
    """Raises CannotBeHad where network namespaces and mounts in them cannot be had."""
    for program, package in {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "nsenter": "util-linux"}.items():
        if not shutil.which(program):
            raise CannotBeHad(f"{program} is not installed ({package})")
    if os.geteuid() != 0:
        raise CannotBeHad("making network namespaces takes root")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise CannotBeHad("/dev/fuse is missing or not permitted")
    links = f"ip link add {BRIDGE} type bridge && ip link add left type veth peer name right"
    try:
        run("unshare", "--net", "--mount", "--uts", "sh", "-c", links)
    except Failed as error:
        raise CannotBeHad(f"network namespaces are not permitted here: {error}") from error


def remove_leftovers():
    """Deletes namespaces and files of runs that were killed outright, known by the process that is no more."""

    def left(found):
        pid = found.name.removeprefix(SCRATCH).removeprefix("gradfs-").split("-")[0]
        return pid.isdigit() and not Path(f"/proc/{pid}").exists()

    for path in filter(left, NAMED.glob("gradfs-*-*")):
        run("ip", "netns", "del", path.name, check=False)
    # Mounts on hosts have gone with the hosts: these are plain files.
    for path in filter(left, Path(tempfile.gettempdir()).glob(f"{SCRATCH}*-*")):
        shutil.rmtree(path, ignore_errors=True)


def _in_namespace(name, call):
    """The result of `call()` in a thread that is in the network namespace `name`."""

    def inside():
        with open(NAMED / name) as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {name}")
        return call()

    # A thread of its own, which ends with it.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(inside).result()


def _send_packets_as_they_are(interface):
    """Turns checksum offload off, and with it coalescing: what is sent is packets of one MTU, with checksums."""
    value = ctypes.create_string_buffer(struct.pack("II", _ETHTOOL_STXCSUM, 0))
    request = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, _SIOCETHTOOL, request.ljust(40, b"\0"))


class Hosts:
    """Hosts of the given names, of up to 15 letters each; all that they are ends with the `with` block."""

    def __init__(self, names, link=Link(), congestion=None):
        """`congestion` is the TCP congestion control of all hosts, or the machine's."""
        self.names, self.link, self.congestion = list(names), link, congestion
        self.scratch = self._relay = None
        self._made, self._keepers, self._programs = [], {}, []

    def __enter__(self):
        require_permission()
        remove_leftovers()
        self.scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-"))
        try:
            self._wire()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    # What they are.

    def namespace(self, name):
        """The name that `ip netns` knows a host by."""
        return f"gradfs-{os.getpid()}-{name}"

    def address(self, host):
        """Its IP address."""
        return f"{NETWORK}.{self.names.index(host) + 1}"

    def path(self, host, path):
        """A path that programs on the host know, as seen from outside."""
        return Path(f"/proc/{self._keepers[host].pid}/root/{path}")

    def enter(self, host):
        """The command that, followed by another, runs it on the host."""
        return ["nsenter", "--target", str(self._keepers[host].process.pid), "--net", "--mount", "--uts"]

    # What runs on them.

    def start(self, host, command, env=None, name=None):
        """Starts a program on the host; it ends with the hosts, if not before."""
        name = name or f"{Path(command[0]).name} on {host}"
        output = self.scratch / f"{len(self._programs)}.log"
        program = Program([*self.enter(host), "--", *command], output, name, env)
        self._programs.append(program)
        return program

    def work(self, host, program, *words, env=None):
        """Starts a program of lib/work there, with a task and its arguments."""
        return self.start(host, [own_python(), WORK / program, *words], env, f"{words[0]} on {host}")

    def sent(self, host):
        """Bytes that a host has sent, with their headers."""
        lines = self.start(host, ["cat", "/proc/net/dev"]).finish(COMMAND_DEADLINE).splitlines()
        return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))

    # What becomes of their links.

    def set_port(self, host, state, check=True):
        """`down`: nothing comes from the host or gets there; the other hosts are not told, and no socket is. `up`: it is back."""
        run("ip", "-n", self.namespace("switch"), "link", "set", "dev", host, state, check=check)

    def limit(self, rate):
        """Has the kernel limit what each host sends, in bits a second. Packets are as long as the kernel makes them."""
        for host in self.names:
            limit = ["tbf", "rate", f"{int(rate)}bit", "burst", "256kb", "latency", "50ms"]
            run("tc", "-n", self.namespace(host), "qdisc", "replace", "dev", "eth0", "root", *limit)

    # How they are made, and end.

    def _wire(self):
        setting = SETTINGS / "ipv6/conf/all/disable_ipv6"
        for name in ["switch", *self.names]:
            run("ip", "netns", "add", self.namespace(name))
            self._made.append(name)
            # No IPv6: its neighbour discovery would be lost and delayed along.
            if setting.exists():
                _in_namespace(self.namespace(name), lambda: setting.write_text("1"))
        switch = self.namespace("switch")
        run("ip", "-n", switch, "link", "add", "name", BRIDGE, "type", "bridge")
        run("ip", "-n", switch, "link", "set", "dev", BRIDGE, "up")
        for host in self.names:
            self._connect(switch, host)
        if self.link:
            self._condition(switch)
        for host in self.names:
            keeper = ["nsenter", f"--net={NAMED / self.namespace(host)}", "unshare", "--mount", "--uts"]
            # Copies of other mounts would keep their daemons alive.
            script = f"umount -alt fuse.gradfs; echo {host} >/proc/sys/kernel/hostname; echo ready; exec sleep infinity"
            output = self.scratch / f"{host}.keeper"
            self._keepers[host] = Program([*keeper, "sh", "-c", script], output, f"host {host}")
        for keeper in self._keepers.values():
            keeper.wait_for("ready")

    def _connect(self, switch, host):
        """The veth pair: `eth0` on the host, and a port of the host's name on the switch."""
        namespace = self.namespace(host)
        run("ip", "-n", namespace, "link", "add", "name", "eth0", "type", "veth", "peer", "name", host, "netns", switch)
        mac = f"02:00:0a:4d:00:{self.names.index(host) + 1:02x}"
        run("ip", "-n", namespace, "link", "set", "dev", "eth0", "mtu", self.link.mtu, "address", mac)
        run("ip", "-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            run("ip", "-n", namespace, "link", "set", "dev", interface, "up")
        run("ip", "-n", switch, "link", "set", "dev", host, "mtu", self.link.mtu, "master", BRIDGE, "up")
        # It need not learn where hosts are, and where it does not see what they send it could not.
        run("nsenter", f"--net={NAMED / switch}", "bridge", "fdb", "add", mac, "dev", host, "master", "static")
        if self.congestion:
            setting = SETTINGS / "ipv4/tcp_congestion_control"
            try:
                _in_namespace(namespace, lambda: setting.write_text(self.congestion))
            except OSError as error:
                raise Failed(f"congestion control {self.congestion}: {error.strerror}") from error

    def _condition(self, switch):
        """Has a relay make the links what they are to be: netem is missing in some kernels."""
        for host in self.names:
            _in_namespace(self.namespace(host), lambda: _send_packets_as_they_are("eth0"))
        for host in self.names:
            # The bridge gets none of what hosts send; the relay sees it before this filter does.
            run("tc", "-n", switch, "qdisc", "add", "dev", host, "clsact")
            drop = ["bpf", "direct-action", "bytecode", f"1,6 0 0 {_TC_ACT_SHOT}"]
            run("tc", "-n", switch, "filter", "add", "dev", host, "ingress", *drop)
        link = self.link.delay, self.link.loss, self.link.rate, self.link.mtu
        relay = [sys.executable, Path(__file__).with_name("netns_relay.py"), *link, BRIDGE, *self.names]
        command = ["nsenter", f"--net={NAMED / switch}", "--", *relay]
        self._relay = Program(command, self.scratch / "relay.log", "the relay")
        self._relay.wait_for("ready")

    def check(self):
        """Failed if what makes the link has ended."""
        if self._relay and self._relay.process.poll() is not None:
            raise Failed(f"the relay ended: {self._relay.said().strip()[-2000:]}")

    def close(self):
        """Ends all programs and takes everything away."""
        for host in self.names:
            if host in self._keepers:
                # So that whoever is to end can say so to the others.
                self.set_port(host, "up", check=False)
        # Mounts are told first, then shards: what was started last ends first.
        relay = [self._relay] if self._relay else []
        for program in [*reversed(self._programs), *self._keepers.values(), *relay]:
            program.stop()
        for name in self._made:
            run("ip", "netns", "del", self.namespace(name), check=False)
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)
        self._programs, self._keepers, self._made, self._relay = [], {}, [], None


class Cluster:
    """Shards, models and mounts on hosts; the first shard is the registry. It ends with the hosts."""

    def __init__(self, hosts, binary):
        self.hosts, self.binary, self.registry, self.mounts = hosts, Path(binary), None, {}

    def shard(self, host, *options):
        """Starts a shard there; returns its program once it is ready."""
        command = [self.binary, "shard", "--listen", self.hosts.address(host), "--insecure", *options]
        if self.registry:
            command += ["--registry", self.registry]
        program = self.hosts.start(host, command, name=f"the shard on {host}")
        program.wait_for("gradfs: ready")
        self.registry = self.registry or self.hosts.address(host)
        return program

    @classmethod
    def of(cls, hosts, binary, *create, shards=1, mounts=()):
        """The first hosts have shards, and `mounts` have mounts. With options of `gradfs create` there is a model."""
        cluster = cls(hosts, binary)
        for host in hosts.names[:shards]:
            cluster.shard(host)
        if create:
            cluster.create("model", *create)
        for host in mounts:
            cluster.mount(host)
        return cluster

    def model(self, host):
        """The model's directory, as programs on that host know it."""
        return self.mounts[host][0] / "model"

    def command(self, host, *arguments, deadline=COMMAND_DEADLINE):
        """What `gradfs ARGUMENTS --registry …` says on the host."""
        command = [self.binary, *arguments, "--registry", self.registry]
        return self.hosts.start(host, command, name=f"gradfs {arguments[0]}").finish(deadline)

    def create(self, name, *options):
        """Makes a model of all shards."""
        return self.command(self.hosts.names[0], "create", name, *options)

    def mount(self, host, *options):
        """Mounts all models there; returns the mountpoint, as programs on that host know it."""
        path = self.hosts.scratch / host
        path.mkdir()
        command = [self.binary, "mount", path, "--registry", self.registry, *options]
        program = self.hosts.start(host, command, name=f"the mount on {host}")
        program.wait_for("gradfs: ready")
        self.mounts[host] = path, program
        return path
