"""What the disk under an output is, and whether it has room."""

from __future__ import annotations

import shutil
from pathlib import Path

from .errors import NoSpace, UsageError
from .index import index_dtype
from .plan import Plan
from .shard import container

MOUNTS = Path("/proc/self/mountinfo")
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "9p")


def check_space(output: Path, planned: Plan) -> None:
    """Raise NoSpace unless what is still to be written fits, all of it."""
    kind = container(planned.options.container)
    tables = 2 * len(planned.order) * (index_dtype(planned.key_bytes).itemsize + 32)
    needed = tables + sum(
        kind.bytes_needed(shard.extent) for shard in planned.shards if not (output / shard.name).exists()
    )
    free = shutil.disk_usage(existing_folder(output)).free
    if free < needed:
        raise NoSpace(
            f"needs {needed / 1e6:,.0f} MB and the disk has {free / 1e6:,.0f} MB free; make room, or choose "
            "another output",
            path=output,
        )


def existing_folder(path: Path) -> Path:
    """The path itself or its nearest parent that is there."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())


def filesystem_type(path: Path) -> str:
    """The type of the file system that holds a path, as the kernel names it; "" where it does not say."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    target = existing_folder(path).resolve()
    best = (-1, "")
    for line in lines:
        mount, _, kind = line.partition(" - ")
        point = Path(mount.split(" ")[4].replace("\\040", " "))
        if target.is_relative_to(point):
            best = max(best, (len(point.parts), kind.split(" ")[0]))
    return best[1]


def refuse_network(output: Path, kind: str) -> None:
    """LMDB maps its file, which network file systems do not keep coherent. Raises UsageError."""
    found = filesystem_type(output)
    if kind == "lmdb" and (found in NETWORK_FILESYSTEMS or found.startswith("fuse.")):
        raise UsageError(
            f"lies on a network file system ({found}), where building LMDB is not safe; use --format hdf5, "
            "or convert to a local disk and copy, or add --allow-network-fs",
            path=output,
        )
