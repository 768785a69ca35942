"""The checks before anything is written: the output folder, its space and its file system."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardprep.formats.containers.registry import container
from shardprep.formats.conversion.building.plan import Plan, PlannedShard
from shardprep.formats.conversion.building.run_folder import bytes_in_run_folders
from shardprep.formats.dataset.index import index_dtype
from shardprep.formats.dataset.manifest import MANIFEST_NAME, WORK_FOLDER_NAME
from shardprep.formats.errors import NoSpace, UsageError
from shardprep.formats.sources.listing.source import SPLITS
from shardprep.formats.system.filesystem import NETWORK_FILESYSTEMS, existing_folder, filesystem_type


def refuse_other_shape(output: Path, split: str | None) -> None:
    """Raise UsageError for a dataset, begun or finished, in the place of a folder of splits, or the reverse.

    ``output`` is to be a folder of splits if ``split`` is None. What is no folder at all is refused, too.
    """
    if output.exists() and not output.is_dir():
        raise UsageError("is not a folder; choose another output", path=output)
    if split is None:
        if _is_dataset(output):
            raise UsageError(
                "holds one dataset, and others would lie in it; choose another output, or go on with this one "
                "with the --split that began it",
                path=output,
            )
    elif inside := [name for name in SPLITS if _is_dataset(output / name)]:
        raise UsageError(
            f"is a folder of splits ({', '.join(inside)}); give {str(output / split)!r} with --split {split}",
            path=output,
        )


def _is_dataset(folder: Path) -> bool:
    """Whether a dataset is there, or was begun there."""
    return any((folder / name).exists() for name in (MANIFEST_NAME, WORK_FOLDER_NAME))


def check_space(work: Mapping[Path, tuple[Plan, Iterable[PlannedShard]]], *, alone: bool = True) -> None:
    """Raise NoSpace unless all that is still to be written fits.

    ``work`` has the plan of each output folder and the shards to build; all lie on one file system. A run
    that works ``alone`` removes the leftovers of killed runs first; others may be alive.
    """
    check_room({output: _bytes_to_write(output, *one) for output, one in work.items()}, alone=alone)


def check_room(bytes_to_write: Mapping[Path, int], *, alone: bool = True) -> None:
    """Raise NoSpace unless as many bytes fit into each output folder; all lie on one file system.

    ``alone`` is that of :func:`check_space`.
    """
    if not bytes_to_write:
        return
    needed = sum(bytes_to_write.values())
    output = next(iter(bytes_to_write))
    free = shutil.disk_usage(existing_folder(output)).free
    if alone:
        free += sum(bytes_in_run_folders(output / WORK_FOLDER_NAME) for output in bytes_to_write)
    if free < needed:
        raise NoSpace(
            f"needs {needed / 1e6:,.0f} MB and the disk has {free / 1e6:,.0f} MB free; make room, or choose "
            "another output",
            path=output,
        )


def _bytes_to_write(output: Path, planned: Plan, shards: Iterable[PlannedShard]) -> int:
    tables = len(planned.order) * (index_dtype(planned.key_bytes).itemsize + 32)  # in .prep, until the end
    return tables + most_bytes(planned, (s for s in shards if not (output / s.name).exists()))


def most_bytes(planned: Plan, shards: Iterable[PlannedShard]) -> int:
    """Return an upper bound of the size of these shards and of the tables."""
    kind = container(planned.options.container)
    tables = len(planned.order) * (index_dtype(planned.key_bytes).itemsize + 32)
    return tables + sum(kind.bytes_needed(shard.extent) for shard in shards)


def refuse_network(output: Path, kind: str) -> None:
    """Raise UsageError for LMDB on a network file system: LMDB maps its file, which is not coherent there."""
    found = filesystem_type(output)
    if kind == "lmdb" and (found in NETWORK_FILESYSTEMS or found.startswith("fuse.")):
        raise UsageError(
            f"lies on a network file system ({found}), where building LMDB is not safe; use --format hdf5, "
            "or convert to a local disk and copy, or add --allow-network-fs",
            path=output,
        )


def check_output(output: Path, source_folders: Iterable[Path] = (), *, work: str = "a conversion") -> None:
    """Raise UsageError for a folder in the source, or with other contents than unfinished work.

    ``work`` names this work in the error. Raises OSError for a place that cannot be written to.
    """
    _check_writable(existing_folder(output))
    for folder in source_folders:
        if output.resolve().is_relative_to(folder):
            raise UsageError(
                "lies in the source, where the next run would find it; choose another", path=output
            )
    if not output.exists():
        return
    if not output.is_dir():
        raise UsageError("is not a folder; choose another output", path=output)
    # In this order: another part of the conversion may begin meanwhile, its work folder first.
    if any(output.iterdir()) and not (output / WORK_FOLDER_NAME).exists():
        raise UsageError(f"is not empty, and not {work} begun here; choose another output", path=output)


def _check_writable(folder: Path) -> None:
    if os.access(folder, os.W_OK | os.X_OK):
        return
    number = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
    raise OSError(number, os.strerror(number), str(folder))
