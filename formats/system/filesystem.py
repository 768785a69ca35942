"""The file system of a path."""

from __future__ import annotations

from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "9p")


def existing_folder(path: Path) -> Path:
    """Return the path itself, or its nearest existing parent folder."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())


def filesystem_type(path: Path) -> str:
    """Return the type of a path's file system, as the kernel names it; "" if it is unknown."""
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
