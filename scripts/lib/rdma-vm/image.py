"""What a virtual machine is started from: kernel, initramfs, the guest's own programs, qemu. Kept in a cache folder.

An image is a folder, named after its kernel release and the recipe that made it, and never changed once it has that
name. `current.rN` leads to the newest of recipe N.
"""

import fcntl
import json
import os
import re
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from machine import Failed

# Goes up when what is in an image, or how it is made, changes.
RECIPE = 2
# Another setup that is under way has this long.
PATIENCE = 1800.0


def folder():
    """Where images are kept."""
    named = os.environ.get("GRADFS_RDMA_VM")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(named) if named else cache / "gradfs" / "rdma-vm"
    # make and qemu's options take no quotes.
    if re.search(r"[^\w./+@~-]", str(path)):
        raise Failed(f"{path} has characters that make and qemu take amiss: set GRADFS_RDMA_VM to another folder")
    return path.absolute()


@dataclass(frozen=True)
class Image:
    path: Path

    # `tools` are programs and kernel modules that the guest sees over the host's root.
    kernel = property(lambda self: self.path / "vmlinux")
    initramfs = property(lambda self: self.path / "initramfs.cpio")
    tools = property(lambda self: self.path / "tools")
    # What setup found out: kernel, qemu, packages.
    about = property(lambda self: json.loads((self.path / "about.json").read_text()))

    def qemu(self):
        """The command that starts qemu, and what it needs in its environment."""
        own = self.path / "qemu"
        if not own.exists():
            return ["qemu-system-x86_64"], {}
        libraries = f"{own}/usr/lib/x86_64-linux-gnu:{own}/lib/x86_64-linux-gnu"
        data = ["-L", f"{own}/usr/share/qemu", "-L", f"{own}/usr/share/seabios"]
        return [f"{own}/usr/bin/qemu-system-x86_64", *data], {"LD_LIBRARY_PATH": libraries}


def current():
    """The image to use, or None."""
    link = folder() / f"current.r{RECIPE}"
    path = Path(os.path.realpath(link))
    return Image(path) if link.is_symlink() and (path / "about.json").exists() else None


def required():
    """The same, which must be there."""
    if there := current():
        return there
    raise Failed("not set up yet: scripts/rdma-vm setup")


@contextmanager
def only_one():
    """One setup at a time; waits for the other one."""
    root = folder()
    root.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + PATIENCE
    with open(root / "lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > give_up:
                    raise Failed(f"another setup has been at work in {root} for {PATIENCE:.0f} s: end it") from error
                time.sleep(0.2)
        yield root


def enter(made, release):
    """Makes the finished folder `made` the current image, in one step; whatever had its place could not be used."""
    root = folder()
    name = f"{release}.r{RECIPE}"
    shutil.rmtree(root / name, ignore_errors=True)
    os.rename(made, root / name)
    link = root / f"link.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    os.replace(link, root / f"current.r{RECIPE}")
    return Image(root / name)
