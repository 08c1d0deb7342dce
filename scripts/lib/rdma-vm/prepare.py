"""Makes an image: fetches Debian packages, unpacks them in the cache folder, and builds the one module Debian lacks.

Nothing is installed on the host except what builds (make, gcc, zstd), and that only where it is missing. The guest's
root is the host's, so only what hosts may lack is fetched.
"""

import json
import lzma
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import image
from image import Image
from machine import MIB, CannotBeHad, Failed, finished, say
from programs import output_of

DEADLINE = 1800.0
HERE = Path(__file__).resolve().parent

# The first of these that apt knows. Mapped gradients take Linux 6.6, reads past the daemon 6.9. The "cloud" flavour
# of the kernel has neither rdma_rxe nor 9p.
KERNELS = ("linux-image-6.12-amd64", "linux-image-amd64")
# What the guest has besides the host's programs, with its libraries.
TOOLS = ("iproute2", "kmod", "libkmod2", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "perftest")
TOOLS += ("libibverbs1", "librdmacm1", "libibumad3", "libnl-3-200", "libnl-route-3-200", "libpci3")
TOOLS += ("nbd-client", "libnl-genl-3-200", "e2fsprogs", "fio")
# Program, and the package that has it.
BUILD = {"gcc": "gcc", "make": "make", "strip": "binutils", "zstd": "zstd", "xz": "xz-utils"}

# The initramfs gets to the host's root with these.
FIRST_MODULES = ("9pnet_virtio", "9p", "overlay")
# crc32 and crc32c are asked for by their users only at run time, so no dependency names them.
MODULES = ("rdma_rxe", "siw", "rdma_ucm", "ib_uverbs", "ib_umad", "virtio_net", "dummy", "fuse", "nbd", "sch_netem")
MODULES += ("ext4", "crc32_generic", "crc32_pclmul", "crc32c_generic", "crc32c_intel")
SIW = "drivers/infiniband/sw/siw/"


APT_OPTIONS = ("Debug::NoLocking=1", "APT::Sandbox::User=", "Acquire::Languages=none", "Acquire::Retries=3")
APT_OPTIONS += ("Acquire::http::Timeout=60", "Acquire::https::Timeout=60")
APT_OPTIONS += ("Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",)


command = partial(output_of, timeout=DEADLINE)


class Apt:
    """apt with lists and packages in a folder of its own: needs no root, and does not care how old the host's are."""

    def __init__(self, work):
        self.packages = work / "packages"
        lists, cache = work / "lists", work / "cache"
        for path in (lists / "partial", cache, self.packages / "partial"):
            path.mkdir(parents=True)
        places = f"Dir::State::lists={lists}", f"Dir::Cache={cache}", f"Dir::Cache::archives={self.packages}"
        self.options = [f"-o{option}" for option in (*places, *APT_OPTIONS)]

    def call(self, program, *words, **options):
        try:
            return command(program, "-q", *self.options, *words, **options)
        except Failed as error:
            raise CannotBeHad(f"packages cannot be had: {error}") from error

    def show(self, package):
        """The fields of a package, or None."""
        try:
            text = self.call("apt-cache", "show", "--no-all-versions", package)
        except CannotBeHad:
            return None
        return dict(re.findall(r"^([A-Z][\w-]*): (.*)$", text, re.MULTILINE)) or None

    def download(self, *packages):
        self.call("apt-get", "download", *packages, cwd=self.packages)

    def with_libraries(self, *packages):
        """Fetches `packages`, and what they depend on and the host lacks."""
        words = ["install", "-y", "-d", "--reinstall", "--no-install-recommends", *packages]
        self.call("apt-get", *words)

    def take(self):
        """The packages that have been fetched since the last time."""
        taken = self.packages / "taken"
        taken.mkdir(exist_ok=True)
        new = sorted(self.packages.glob("*.deb"))
        # With its name: tools and qemu may need the same library, which is then taken a second time.
        return [Path(shutil.move(path, taken / path.name)) for path in new]


def unpack(packages, to):
    to.mkdir(parents=True, exist_ok=True)
    for package in packages:
        command("dpkg-deb", "-x", package, to)


def merge_usr(tree):
    """Debian 12's packages still have files in /lib; over a host's root they must be where its /lib leads."""
    for name in ("bin", "sbin", "lib", "lib64"):
        if (tree / name).exists():
            shutil.copytree(tree / name, tree / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(tree / name)


def check_host():
    """Ends the run where the rest cannot work."""
    if platform.machine() != "x86_64":
        raise CannotBeHad(f"this is {platform.machine()}: only x86-64 has been made to work")
    for program in ("apt-get", "apt-cache", "dpkg-deb"):
        if not shutil.which(program):
            raise CannotBeHad(f"{program} is missing: kernel and tools are Debian's (Debian 12 or later)")
    if not os.path.islink("/lib"):
        raise CannotBeHad("/lib is not a link to usr/lib: the guest needs a host with a merged /usr")
    missing = [package for program, package in BUILD.items() if not shutil.which(program)]
    if missing:
        say(f"installing {', '.join(missing)}")
        try:
            finished("scripts/setup", *(f"package:{name}" for name in missing))
        except Failed as error:
            raise CannotBeHad(f"{', '.join(missing)} missing (as root: apt-get install {' '.join(missing)})") from error


def choose_kernel(apt):
    """Release and version of the kernel."""
    names = [apt.show(name) for name in KERNELS]
    found = [re.search(r"linux-image-(\S+-amd64)", fields.get("Depends", "")) for fields in names if fields]
    if not any(found):
        raise CannotBeHad(f"apt has neither of {' and '.join(KERNELS)}: is there a network, and is this Debian?")
    release = next(match for match in found if match)[1]
    fields = apt.show(f"linux-image-{release}")
    if not fields:
        raise CannotBeHad(f"apt has no linux-image-{release}")
    return release, fields["Version"]


def unpack_kernel(compressed, to):
    """The ELF file in a bzImage: qemu starts that directly, and the guest need not unpack it by emulation."""
    data = compressed.read_bytes()
    sectors = data[0x1F1] or 4
    offset, length = struct.unpack_from("<II", data, 0x248)
    payload = data[(sectors + 1) * 512 + offset :][:length]
    if payload.startswith(b"\x28\xb5\x2f\xfd"):
        # After the frame comes its size.
        zstd = subprocess.run(["zstd", "-dc"], input=payload[:-4], stdout=subprocess.PIPE, timeout=120, check=True)
        kernel = zstd.stdout
    elif payload.startswith(b"\xfd7zXZ\0"):
        kernel = lzma.LZMADecompressor().decompress(payload)
    else:
        raise Failed(f"{compressed.name}: compressed in an unknown way ({payload[:4].hex()})")
    if not kernel.startswith(b"\x7fELF"):
        raise Failed(f"{compressed.name}: no ELF file in it")
    to.write_bytes(kernel)


def build_siw(work, packages, release):
    """soft-iWARP, which Debian's kernels leave out, from the source of the same kernel. Gives the module."""
    source = next(package for package in packages if package.name.startswith("linux-source-"))
    tree = work / "build"
    unpack([package for package in packages if package != source], tree)
    into = work / "siw"
    into.mkdir()
    # The source is a tar.xz in a package.
    inner = f"tar -xJ -C {into} --wildcards --strip-components={SIW.count('/') + 1} '*/{SIW}*'"
    pipe = f"dpkg-deb --fsys-tarfile {source} | tar -xO --wildcards '*.tar.xz' | {inner}"
    command("bash", "-o", "pipefail", "-c", pipe)
    headers = tree / "usr/src" / f"linux-headers-{release}"
    common = f"linux-headers-{release.removesuffix('-amd64')}-common"
    makefile = headers / "Makefile"
    # It includes the common one by its absolute path.
    makefile.write_text(re.sub(r"/usr/src/(?=linux-headers)", f"{tree}/usr/src/", makefile.read_text()))
    if not (tree / "usr/src" / common).is_dir():
        raise Failed(f"{common} is not among the packages")
    options = ["CONFIG_RDMA_SIW=m", "CONFIG_DEBUG_INFO_BTF_MODULES="]
    command("make", "-s", "-j2", "-C", headers, f"M={into}", *options, "modules")
    return into / "siw.ko"


class Modules:
    """Kernel modules: all that a package has, and how to pick some with what they need."""

    def __init__(self, tools, base, release):
        self.kmod = tools / "usr/bin/kmod"
        self.environment = {**os.environ, "LD_LIBRARY_PATH": str(tools / "usr/lib/x86_64-linux-gnu")}
        self.base, self.release = base, release
        self.path = base / "lib/modules" / release

    def call(self, name, *words):
        # kmod is what it is called.
        return command(name, *words, executable=self.kmod, env=self.environment)

    def needed(self, *names):
        """Paths of the modules and what they need, in the order to load them."""
        paths = []
        for name in names:
            said = self.call("modprobe", "-d", self.base, "-S", self.release, "--ignore-install", "-D", name)
            paths += [Path(path) for path in re.findall(r"^insmod (\S+)", said, re.MULTILINE)]
        return list(dict.fromkeys(paths))

    def copy(self, path, to):
        """Uncompressed and without what is for debuggers, so that the guest loads it fast. Gives its path."""
        to = to / path.name.removesuffix(".xz")
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes())
        command("strip", "-g", to)
        return to


def make_initramfs(work, tools, busybox, modules, to):
    """busybox, `init`, and the modules that reach the host's root."""
    tree = work / "initramfs"
    for name in ("bin", "modules", "proc", "sys", "dev", "host", "tools", "upper", "root", "job"):
        (tree / name).mkdir(parents=True)
    shutil.copy2(busybox, tree / "bin/busybox")
    (tree / "bin/sh").symlink_to("busybox")
    shutil.copy2(HERE / "init", tree / "init")
    names = [modules.copy(path, tree / "modules").name for path in modules.needed(*FIRST_MODULES)]
    (tree / "modules/order").write_text("".join(f"{name}\n" for name in names))
    listed = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    with open(to, "wb") as out:
        subprocess.run(
            [busybox, "cpio", "-o", "-H", "newc"], cwd=tree, input=listed.encode(), stdout=out,
            stderr=subprocess.DEVNULL, timeout=60, check=True,
        )


def qemu_version(of):
    """What the image's qemu says it is; fails where it does not start."""
    words, more = of.qemu()
    return command(*words, "--version", env={**os.environ, **more}).splitlines()[0]


def make(work):
    """All of an image, in work/image; gives that and the kernel release."""
    made = work / "image"
    made.mkdir()
    apt = Apt(work)
    say("fetching lists of packages")
    # Without a network it warns, succeeds, and knows nothing; then `show` fails.
    apt.call("apt-get", "update")
    release, version = choose_kernel(apt)
    bare = release.removesuffix("-amd64")
    series = ".".join(release.split(".")[:2])
    headers = [f"linux-headers-{release}", f"linux-headers-{bare}-common", f"linux-kbuild-{bare}"]
    say(f"fetching Linux {release}, its headers and its source")
    apt.download(*(f"{name}={version}" for name in [*headers, f"linux-source-{series}"]))
    sources = apt.take()
    apt.download(f"linux-image-{release}={version}")
    kernel = apt.take()
    say("fetching the guest's tools")
    apt.with_libraries(*TOOLS)
    tools = apt.take()
    apt.download("busybox-static")
    busybox = apt.take()
    if not shutil.which("qemu-system-x86_64"):
        say("fetching qemu")
        apt.with_libraries("qemu-system-x86")
        unpack(apt.take(), made / "qemu")
    qemu = qemu_version(Image(made))

    say("unpacking")
    unpack([*tools, *busybox], made / "tools")
    merge_usr(made / "tools")
    for unused in ("usr/share", "var", "etc/init.d", "etc/default"):
        shutil.rmtree(made / "tools" / unused, ignore_errors=True)
    base = work / "kernel"
    unpack(kernel, base)
    if not (base / "lib").exists():
        (base / "lib").symlink_to("usr/lib")
    unpack_kernel(base / "boot" / f"vmlinuz-{release}", made / "vmlinux")

    say("building siw")
    modules = Modules(made / "tools", base, release)
    (modules.path / "updates").mkdir(exist_ok=True)
    shutil.move(build_siw(work, sources, release), modules.path / "updates")
    modules.call("depmod", "-b", base, release)
    into = made / "tools/usr/lib/modules" / release
    for path in modules.needed(*FIRST_MODULES, *MODULES):
        modules.copy(path, into / path.relative_to(modules.path).parent)
    for name in ("modules.builtin", "modules.order", "modules.builtin.modinfo"):
        shutil.copy2(modules.path / name, into)
    modules.call("depmod", "-b", made / "tools/usr", release)
    make_initramfs(work, made / "tools", made / "tools/usr/bin/busybox", modules, made / "initramfs.cpio")
    packages = [*sources, *kernel, *tools, *busybox]
    names = sorted(package.name.removesuffix(".deb") for package in packages)
    about = {"kernel": release, "qemu": qemu, "packages": names}
    (made / "about.json").write_text(json.dumps(about, indent=2) + "\n")
    return made, release


def usable():
    """The current image, if it is whole: qemu may have been taken from the host since."""
    try:
        if (there := image.current()) and qemu_version(there):
            return there if all(path.exists() for path in (there.kernel, there.initramfs, there.tools)) else None
    except Failed:
        return None


def setup():
    """The image to use, made unless it is there."""
    # Without the lock at first: what is there can be used while another setup makes a newer one.
    if there := usable():
        return there
    with image.only_one() as root:
        if there := usable():
            return there
        begun = time.monotonic()
        check_host()
        # What setups have left that were killed outright.
        for left in root.glob("partial.*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="partial.", dir=root) as work:
            made = image.enter(*make(Path(work)))
        size = sum(path.lstat().st_size for path in made.path.rglob("*") if not path.is_dir())
        say(f"made in {time.monotonic() - begun:.0f} s; it takes {size / MIB:.0f} MiB")
        return made
