"""One virtual machine: a qemu process, and a folder for what host and guest tell each other.

Files in the folder are the whole protocol. The host writes `settings` and `stage2`, and a numbered folder for each job
with `command`; the guest writes `ready` there, waits for `go`, runs the command, and writes what it says and its
`status`; or `failed` with the reason. See `init` and `stage2`.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from machine import Failed
from programs import end_with_parent, stop

HERE = Path(__file__).resolve().parent
STOP_DEADLINE = 5.0

# RoCE's MTU is the largest of 1024, 2048 and 4096 that leaves room for headers in the network's.
MTU = 9000
# The first trouble of the kernel ends the machine; interfaces have the kernel's names.
KERNEL_OPTIONS = ("console=ttyS0", "quiet", "panic=-1", "oops=panic", "net.ifnames=0")
KERNEL_OPTIONS += ("mitigations=off", "nokaslr", "tsc=reliable")
# What has a meaning only on the host.
NOT_PASSED = {"_", "OLDPWD", "PWD", "SHLVL", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "SSH_AUTH_SOCK"}
# What a kernel says when it has gone wrong. That memory ran out is the command's doing.
TROUBLE = re.compile(r"GUEST-FAILED|Kernel panic|Oops|BUG:|soft lockup|detected stalls|blocked for more than")


@dataclass(frozen=True)
class Settings:
    """What a machine is like."""

    provider: str = "rxe"
    cpus: int = 2
    memory: int = 1024
    share: Path = None
    interactive: bool = False


def script(command, environment, folder):
    """The shell script that the guest runs: `command` with the host's environment and in the same folder."""
    lines = ["#!/bin/bash"]
    for name, value in environment.items():
        if not name.isidentifier() or name in NOT_PASSED:
            continue
        if name == "PATH":
            # The emulated machine takes seconds for what these scripts do before each Python.
            value = ":".join(part for part in value.split(":") if not part.endswith("/shims"))
        lines.append(f"export {name}={shlex.quote(value)}")
    lines += [". /run/environment", f"cd {shlex.quote(str(folder))} || exit 126", f"exec {shlex.join(command)}"]
    return "\n".join(lines) + "\n"


def _said(path):
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None


class Job:
    """A command that a machine runs: a folder that both sides see, and what has been read of its output."""

    def __init__(self, path, command, share):
        """`share` is the folder that the command sees as /share, below the one that the machine has."""
        self.path = path
        self._read = {"out": 0, "err": 0}
        new = path.with_suffix(".new")
        new.mkdir()
        (new / "command").write_text(script(command, os.environ, Path.cwd()))
        (new / "share").write_text(share)
        new.rename(path)

    def ready(self):
        return (self.path / "ready").exists()

    def go(self):
        """Lets the command begin."""
        (self.path / "go").touch()

    def status(self):
        """The exit status of the command, or None."""
        said = _said(self.path / "status")
        return None if said is None else int(said)

    def output(self):
        """What it has said since the last call: pairs of stream and bytes."""
        for stream, at in self._read.items():
            try:
                with open(self.path / stream, "rb") as file:
                    file.seek(at)
                    data = file.read()
            except FileNotFoundError:
                continue
            if data:
                self._read[stream] += len(data)
                yield stream, data


class Guest:
    """A machine that runs jobs, one after the other. Start it in the main thread: qemu ends when the thread does that
    began it."""

    def __init__(self, image, name, hosts, settings, link=None):
        """`hosts` are names and addresses of all; `link` is a socket to the other machine."""
        self.name, self.process, self._jobs = name, None, 0
        self.folder = Path(tempfile.mkdtemp(prefix="gradfs-rdma-vm."))
        self._image, self._settings, self._link = image, settings, link
        values = {
            "NAME": name,
            "ADDRESS": hosts[name],
            "HOSTS": " ".join(hosts),
            "KNOWN_HOSTS": "\n".join(["127.0.0.1 localhost", *(f"{where} {host}" for host, where in hosts.items())]),
            "PROVIDER": settings.provider,
            "NETDEV": "eth0" if link else "dummy0",
            "NETDEV_MODULE": "virtio_net" if link else "dummy",
            "MTU": MTU,
            "INTERACTIVE": "yes" if settings.interactive else "",
            "GUEST_BIN": HERE / "bin",
        }
        lines = (f"{key}={shlex.quote(str(value))}\n" for key, value in values.items())
        (self.folder / "settings").write_text("".join(lines))
        shutil.copyfile(HERE / "stage2", self.folder / "stage2")

    def job(self, command, share="."):
        """Gives it a job; the guest begins with it when the one before has ended."""
        self._jobs += 1
        return Job(self.folder / str(self._jobs), command, share)

    def _command(self):
        image, settings = self._image, self._settings
        serial = "stdio,signal=off" if settings.interactive else f"file,path={self.folder}/console"
        words, more = image.qemu()
        # Without checks that cost an emulation much, and without string instructions, which it does byte by byte.
        words += ["-M", "q35", "-accel", "tcg,thread=multi,tb-size=256"]
        words += ["-cpu", "max,-la57,-smap,-smep,-erms,-fsrm"]
        words += ["-smp", settings.cpus, "-m", settings.memory, "-kernel", image.kernel, "-initrd", image.initramfs]
        words += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-monitor", "none"]
        words += ["-append", " ".join(KERNEL_OPTIONS)]
        words += ["-chardev", f"{serial},id=console", "-serial", "chardev:console"]
        words += ["-object", "rng-random,id=random,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=random"]
        read = ("hostroot", "/", ",readonly=on"), ("tools", image.tools, ",readonly=on")
        for tag, path, mode in (*read, ("job", self.folder, ""), ("share", settings.share, "")):
            # A comma is written twice in an option of qemu.
            path = str(path).replace(",", ",,")
            words += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap{mode}"]
            words += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        if self._link:
            mac = f"52:54:00:00:00:{ord(self.name[0]):02x}"
            words += ["-netdev", f"socket,id=link,fd={self._link.fileno()}"]
            words += ["-device", f"virtio-net-pci,netdev=link,romfile=,host_mtu={MTU},mac={mac}"]
        else:
            words += ["-nic", "none"]
        return [str(word) for word in words], more

    def start(self):
        """Boots it."""
        command, more = self._command()
        # A terminal's Ctrl-C is for this program, which ends the machines.
        interactive = self._settings.interactive
        try:
            with open(self.folder / "qemu.log", "wb") as log:
                self.process = subprocess.Popen(
                    command, stdin=None if interactive else subprocess.DEVNULL,
                    stdout=None if interactive else log, stderr=log, env={**os.environ, **more},
                    pass_fds=[self._link.fileno()] if self._link else [],
                    start_new_session=not interactive, preexec_fn=lambda: end_with_parent(signal.SIGKILL),
                )
        except FileNotFoundError as error:
            raise Failed(f"{error.filename} is not there any more: scripts/rdma-vm setup") from error

    def trouble(self):
        """Why it will run no job any more, or None as long as it may."""
        if (said := _said(self.folder / "failed")) is not None:
            return f"it could not be set up: {said.strip()}"
        if self.process.poll() is None:
            return None
        log = (_said(self.folder / "qemu.log") or "").strip().splitlines()
        return self.kernel_trouble() or (log and log[-1]) or f"qemu ended with {self.process.returncode}"

    def kernel_trouble(self):
        """The first line of the console that tells of trouble, or None."""
        return next((line.strip() for line in self.console().splitlines() if TROUBLE.search(line)), None)

    def console(self):
        """What its kernel has said of note."""
        return _said(self.folder / "console") or ""

    def stop(self):
        """Ends the process; what its jobs have said can still be read."""
        if self.process:
            stop(self.process, STOP_DEADLINE)

    def close(self):
        """Nothing of it is left."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
