"""The official files of ILSVRC2012 from image-net.org: sizes and MD5."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.system.regular_file import Identity, naming

from .source import Archive


class OfficialFile(NamedTuple):
    """Size in bytes, None if it is not published exactly, and MD5."""

    size: int | None
    md5: str


OFFICIAL_FILES = {  # MD5 as on the download page of 2012, and of 2019 for the patched test images
    "ILSVRC2012_img_train.tar": OfficialFile(147_897_477_120, "1d675b47d978889d74fa0da5fadfb00e"),
    "ILSVRC2012_img_val.tar": OfficialFile(6_744_924_160, "29b22e2961454d5413ddabcf34fc5622"),
    "ILSVRC2012_img_test.tar": OfficialFile(None, "fe64ceb247e473635708aed23ab6d839"),
    "ILSVRC2012_img_test_v10102019.tar": OfficialFile(None, "e1b8681fff3d63731c599df9b4b6fc02"),
    "ILSVRC2012_img_train_t3.tar": OfficialFile(None, "ccaf1013018ac1037801578038d370da"),
    "ILSVRC2012_devkit_t12.tar.gz": OfficialFile(None, "fa75699e90414af021442c21a62c3abf"),
    "ILSVRC2012_bbox_train_v2.tar.gz": OfficialFile(None, "9271167e2176350e65cfe4e546f14b17"),
    "ILSVRC2012_bbox_val_v3.tgz": OfficialFile(None, "f4cd18b5ea29fe6bbea62ec9c20d80f0"),
}


def archive_of(path: Path) -> Archive:
    """Return the entry of a file without reading it; ``verified`` is "size" for the official size."""
    status = path.stat()
    return Archive(
        path.name, status.st_size, status.st_mtime_ns, verified=verified_by_size(path.name, status.st_size)
    )


def verified_by_size(name: str, size: int) -> str:
    """Return "size" for the official size of a file of that name, "no" for another."""
    official = OFFICIAL_FILES.get(name)
    return "size" if official and official.size == size else "no"


def check_md5(path: Path) -> Archive:
    """Read a file once and return its entry. Raises SourceDamaged for an official name with another MD5."""
    before = Identity.of(path.stat())
    with naming(path), path.open("rb") as file:
        md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if Identity.of(path.stat()) != before:
        raise SourceDamaged("changed while it was read; start again", path=path)
    return Archive(path.name, before.size, before.mtime_ns, md5, verified_by_md5(path.name, md5, path))


def verified_by_md5(name: str, md5: str, path: Path | str) -> str:
    """Return "md5" for a file of an official name, "no" for another. Raises SourceDamaged for another MD5."""
    official = OFFICIAL_FILES.get(name)
    if official and official.md5 != md5:
        raise SourceDamaged(f"has MD5 {md5}, not {official.md5}; download it again", path=path)
    return "md5" if official else "no"
