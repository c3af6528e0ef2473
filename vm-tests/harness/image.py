"""The guest's kernel and initramfs, made from Debian packages and kept in the cache.

The kernel package is downloaded and unpacked, never installed. The initramfs holds busybox, the modules the
scenarios use and the real mkfs, fsck and nvme tools of this machine with their libraries. It stays uncompressed:
an emulated processor unpacks slower than QEMU loads.
"""

import hashlib
import lzma
import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from .paths import CACHE, VM_TESTS, Skip

# The meta-package that names the current kernel of each series.
KERNELS = {"6.1": "linux-image-amd64", "6.12": "linux-image-6.12-amd64"}

# Loaded at boot in this order, each after what it depends on. The CRC-32C drivers come first: XFS and ext4 look
# them up by algorithm name, which modules.dep does not show.
MODULES = ["virtio_pci", "virtio_blk", "virtio_rng", "virtio_console", "virtio_net", "9pnet_virtio", "9p",
           "crc32c_generic", "crc32c_intel", "ext4", "xfs", "nvme_tcp"]

# Our own scripts of vm-tests/guest and their places in the image.
SCRIPTS = {"init": "init", "agent": "agent", "find-namespace": "bin/find-namespace"}

TOOLS = ["nvme", "blkdiscard", "mkfs.xfs", "xfs_repair", "mkfs.ext4", "e2fsck"]

# What the host itself needs, and the package that brings it.
HOST_TOOLS = {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "depmod": "kmod",
              "dpkg-deb": "dpkg", "apt-get": "apt", "nvme": "nvme-cli", "mkfs.xfs": "xfsprogs",
              "mkfs.ext4": "e2fsprogs"}

SEARCH_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin"


def which(tool):
    return shutil.which(tool, path=SEARCH_PATH)


def require_host_tools():
    missing = sorted(package for tool, package in HOST_TOOLS.items() if not which(tool))
    if missing:
        raise Skip("Debian packages are missing: " + " ".join(missing))


def kernel(series):
    """Directory of the unpacked kernel package of `series`; downloaded at first use."""
    home = CACHE / f"kernel-{series}"
    if (home / "complete").exists():
        return home
    package = newest_kernel_package(KERNELS[series])
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as download:
        # apt fetches as its own user, which must be able to write here; the exact name keeps it to one package.
        os.chmod(download, 0o777)
        apt = subprocess.run(["apt-get", "-q", "download", package], cwd=download, capture_output=True, text=True)
        if apt.returncode != 0:
            raise Skip(f"apt cannot download {package}: {apt.stderr.strip()}")
        [archive] = Path(download).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, home], check=True)
    subprocess.run([which("depmod"), "-b", home, module_directory(home).name], check=True)
    (home / "complete").touch()
    return home


def newest_kernel_package(meta_package):
    for attempt in range(2):
        listing = subprocess.run(["apt-cache", "depends", meta_package], capture_output=True, text=True).stdout
        if found := re.search(r"Depends: (linux-image-\S+)", listing):
            return found[1]
        if attempt == 0:
            subprocess.run(["apt-get", "-q", "update"], stdout=subprocess.DEVNULL)
    raise Skip(f"apt knows no package {meta_package} (is its suite among the sources?)")


def vmlinuz(home):
    [image] = (home / "boot").glob("vmlinuz-*")
    return image


def module_directory(home):
    [directory] = (home / "lib/modules").iterdir()
    return directory


def initramfs(home):
    """The initramfs for the kernel unpacked in `home`; rebuilt when anything that goes into it changed."""
    inputs = [Path(__file__), *(VM_TESTS / "guest" / script for script in SCRIPTS), Path(which("busybox"))]
    inputs += [Path(which(tool)) for tool in TOOLS]
    digest = hashlib.sha256()
    for path in inputs:
        digest.update(path.read_bytes())
    version = module_directory(home).name
    image = CACHE / f"initramfs-{version}-{digest.hexdigest()[:12]}.cpio"
    if not image.exists():
        for stale in CACHE.glob(f"initramfs-{version}-*"):
            stale.unlink()
        with tempfile.TemporaryDirectory() as tree:
            populate(Path(tree), home)
            partial = image.with_suffix(".partial")
            write_cpio(Path(tree), partial)
            partial.rename(image)
    return image


def populate(tree, home):
    for directory in ["bin", "dev", "etc/nvme"]:
        (tree / directory).mkdir(parents=True)
    shutil.copy(which("busybox"), tree / "bin/busybox")
    (tree / "bin/sh").symlink_to("busybox")
    for script, place in SCRIPTS.items():
        shutil.copy(VM_TESTS / "guest" / script, tree / place)
        (tree / place).chmod(0o755)
    for tool in TOOLS:
        copy_program(tree, Path(which(tool)))
    (tree / "etc/mke2fs.conf").write_bytes(Path("/etc/mke2fs.conf").read_bytes())
    host_id = "6f1b0a3e-55d2-4c6e-9a41-0b0c7d1f2e3a"
    (tree / "etc/nvme/hostnqn").write_text(f"nqn.2014-08.org.nvmexpress:uuid:{host_id}\n")
    (tree / "etc/nvme/hostid").write_text(host_id + "\n")

    order = []
    source = module_directory(home)
    dependencies, builtin = read_module_index(source)
    for name in MODULES:
        if name in builtin:
            continue
        for module in load_order(name, dependencies):
            if module not in order:
                order.append(module)
    placed = []
    for module in order:
        target = tree / "lib/modules" / Path(module).name.removesuffix(".xz")
        target.parent.mkdir(parents=True, exist_ok=True)
        data = (source / module).read_bytes()
        target.write_bytes(lzma.decompress(data) if module.endswith(".xz") else data)
        placed.append("/" + str(target.relative_to(tree)))
    (tree / "modules").write_text("".join(line + "\n" for line in placed))


def with_programs(initramfs, programs, target):
    """`initramfs` with our own programs in its /bin, as the file `target`. The kernel unpacks one after the other."""
    with tempfile.TemporaryDirectory() as tree:
        (Path(tree) / "bin").mkdir()
        for program in programs:
            place = Path(tree) / "bin" / program.name
            # Debugging symbols are most of a build, and would have to be unpacked.
            if not which("strip") or subprocess.run([which("strip"), "-o", place, program]).returncode != 0:
                shutil.copy(program, place)
            copy_libraries(Path(tree), program)
        with open(target, "wb") as whole:
            whole.write(initramfs.read_bytes())
        write_cpio(Path(tree), target, mode="ab")
    return target


def copy_program(tree, program):
    """Copy `program` and its libraries to the paths where they lie here."""
    copy_file(tree, program)
    copy_libraries(tree, program)


def copy_libraries(tree, program):
    """Copy every library the loader would map, each to the path it is looked up by."""
    listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for path in re.findall(r"(/\S+)(?= \(0x)", listing):
        copy_file(tree, path)


def copy_file(tree, path):
    target = tree / str(path).lstrip("/")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def module_name(path):
    return re.sub(r"\.ko(\.xz)?$", "", Path(path).name).replace("-", "_")


def read_module_index(directory):
    """depmod's answer: name -> (path, paths it needs), and the names built into the kernel."""
    dependencies = {}
    for line in (directory / "modules.dep").read_text().splitlines():
        path, needs = line.split(":")
        dependencies[module_name(path)] = (path, needs.split())
    builtin = {module_name(line) for line in (directory / "modules.builtin").read_text().splitlines()}
    return dependencies, builtin


def load_order(name, dependencies):
    # modules.dep lists the direct need first and the deepest last.
    path, needs = dependencies[name]
    return needs[::-1] + [path]


def write_cpio(tree, image, mode="wb"):
    """`tree` as a cpio archive of format newc, every file owned by root."""
    with open(image, mode) as out:
        paths = sorted(tree.rglob("*"))
        for inode, path in enumerate(paths, start=1):
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                data = os.readlink(path).encode()
            elif stat.S_ISREG(status.st_mode):
                data = path.read_bytes()
            else:
                data = b""
            write_cpio_entry(out, str(path.relative_to(tree)), inode, status.st_mode, data)
        write_cpio_entry(out, "TRAILER!!!", 0, 0, b"")


def write_cpio_entry(out, name, inode, mode, data):
    encoded = name.encode() + b"\0"
    fields = [inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0]
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    out.write(header + bytes(-len(header) % 4) + data + bytes(-len(data) % 4))
