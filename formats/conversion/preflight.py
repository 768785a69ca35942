"""The checks before anything is written: the output folder, its space and its file system."""

from __future__ import annotations

import shutil
from pathlib import Path

from shardprep.formats.containers.registry import container
from shardprep.formats.dataset.index import index_dtype
from shardprep.formats.dataset.manifest import WORK_FOLDER_NAME
from shardprep.formats.errors import NoSpace, UsageError
from shardprep.formats.sources.listing.source import Source
from shardprep.formats.system.filesystem import NETWORK_FILESYSTEMS, existing_folder, filesystem_type

from .plan import Plan
from .run_folder import bytes_in_run_folders


def check_space(output: Path, planned: Plan) -> None:
    """Raise NoSpace unless all that is still to be written fits, after removing leftovers of killed runs."""
    kind = container(planned.options.container)
    tables = 2 * len(planned.order) * (index_dtype(planned.key_bytes).itemsize + 32)
    needed = tables + sum(
        kind.bytes_needed(shard.extent) for shard in planned.shards if not (output / shard.name).exists()
    )
    free = shutil.disk_usage(existing_folder(output)).free + bytes_in_run_folders(output / WORK_FOLDER_NAME)
    if free < needed:
        raise NoSpace(
            f"needs {needed / 1e6:,.0f} MB and the disk has {free / 1e6:,.0f} MB free; make room, or choose "
            "another output",
            path=output,
        )


def refuse_network(output: Path, kind: str) -> None:
    """Raise UsageError for LMDB on a network file system: LMDB maps its file, which is not coherent there."""
    found = filesystem_type(output)
    if kind == "lmdb" and (found in NETWORK_FILESYSTEMS or found.startswith("fuse.")):
        raise UsageError(
            f"lies on a network file system ({found}), where building LMDB is not safe; use --format hdf5, "
            "or convert to a local disk and copy, or add --allow-network-fs",
            path=output,
        )


def check_output(output: Path, source: Source) -> None:
    """Raise UsageError for a folder in the source, or with other contents than an unfinished conversion."""
    for folder in source.folders:
        if output.resolve().is_relative_to(folder):
            raise UsageError(
                "lies in the source, where the next run would find it; choose another", path=output
            )
    if not output.exists():
        return
    if not output.is_dir():
        raise UsageError("is not a folder", path=output)
    begun = (output / WORK_FOLDER_NAME).exists()
    if not begun and any(output.iterdir()):
        raise UsageError("is not empty, and not a conversion begun here; choose another output", path=output)
