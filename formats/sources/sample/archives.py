"""The archives of a sample, packed like the official ones."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO

import numpy as np

from .images import Album
from .plan import RandomUse, SampleImage, SamplePlan, unsorted_permutation

MTIME = 1_341_360_000  # a fixed time in the summer of 2012, as in the real archives


@contextmanager
def published(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write that gets its name only when it is complete, and is removed after an error.

    A kill leaves ``<name>.partial``, which the next run overwrites. Raises OSError if the disk fails.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def tar_gz(file: IO[bytes]) -> Iterator[tarfile.TarFile]:
    """Open a compressed tar to add members to; equal members give equal bytes with the same zlib."""
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed, tar_of(packed) as tar:
        yield tar


def tar_of(file: IO[bytes] | gzip.GzipFile) -> tarfile.TarFile:
    """Open an uncompressed tar to add members to; closing pads it to a multiple of 10,240 bytes."""
    return tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Append a file without an owner and with the time of all others."""
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(data), MTIME, 0o644
    tar.addfile(member, BytesIO(data))


def write_train(file: IO[bytes], plan: SamplePlan, album: Album) -> None:
    """Write a tar of class tars, by ascending wnid. One class is in memory at a time."""
    labels = {wnid: label for label, wnid in enumerate(plan.wnids)}
    with tar_of(file) as tar:
        for wnid in sorted(labels):
            add_member(tar, f"{wnid}.tar", _class_tar(plan.train_images(labels[wnid]), album))


def _class_tar(images: Iterator[SampleImage], album: Album) -> bytes:
    file = BytesIO()
    with tar_of(file) as tar:
        for image in images:
            add_member(tar, image.file_name, album.draw(image))
    return file.getvalue()


def write_val(file: IO[bytes], plan: SamplePlan, album: Album) -> None:
    """Write a flat tar, not in the order of names."""
    _write_flat(file, list(plan.val_images()), album)


def write_test(file: IO[bytes], plan: SamplePlan, album: Album) -> None:
    """Write a tar of one folder ``test``, not in the order of names."""
    _write_flat(file, list(plan.test_images()), album, prefix="test/")


def _write_flat(file: IO[bytes], images: list[SampleImage], album: Album, *, prefix: str = "") -> None:
    seed, stream, *_ = images[0].seed
    order = unsorted_permutation(np.random.default_rng((seed, RandomUse.TAR_ORDER, stream)), len(images))
    with tar_of(file) as tar:
        for i in order:
            add_member(tar, prefix + images[i].file_name, album.draw(images[i]))
