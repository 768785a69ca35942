"""The archives of a sample, packed as the official ones are."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO

import numpy as np

from .sample_images import Album
from .sample_plan import SampleImage, SamplePlan, Stream, unsorted_permutation

MTIME = 1_341_360_000  # any fixed time; one of the contest's summer, as the real members have


@contextmanager
def published(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that gets its name only when all of it is written, and else vanishes.

    A kill leaves ``<name>.partial``, which the next run overwrites. Raises OSError where the disk does.
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
    """A compressed tar to add members to; same members, same bytes (with the same zlib)."""
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed, tar_of(packed) as tar:
        yield tar


def tar_of(file: IO[bytes] | gzip.GzipFile) -> tarfile.TarFile:
    """An uncompressed tar to add members to; closing pads it to a multiple of 10,240 bytes."""
    return tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Append a file that belongs to nobody and is as old as all the others."""
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(data), MTIME, 0o644
    tar.addfile(member, BytesIO(data))


def write_train(file: IO[bytes], plan: SamplePlan, album: Album) -> None:
    """A tar of class tars, by ascending wnid. One class is held in memory at a time."""
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
    """A flat tar, not in the order of names."""
    _write_flat(file, list(plan.val_images()), album)


def write_test(file: IO[bytes], plan: SamplePlan, album: Album) -> None:
    """A tar of one folder ``test``, not in the order of names."""
    _write_flat(file, list(plan.test_images()), album, prefix="test/")


def _write_flat(file: IO[bytes], images: list[SampleImage], album: Album, *, prefix: str = "") -> None:
    seed, stream, *_ = images[0].seed
    order = unsorted_permutation(np.random.default_rng((seed, Stream.TAR_ORDER, stream)), len(images))
    with tar_of(file) as tar:
        for i in order:
            add_member(tar, prefix + images[i].file_name, album.draw(images[i]))
