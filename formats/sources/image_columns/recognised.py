"""The recognition of a source with columns in a folder."""

from __future__ import annotations

from pathlib import Path

from shardprep.formats.errors import UsageError
from shardprep.formats.sources.image_columns.coco.coco_source import coco_folder
from shardprep.formats.sources.listing.source import Source
from shardprep.formats.sources.listing.source_options import SourceOptions

from .metadata import metadata_folder
from .paired_folders import paired_folders


def image_columns(path: Path, split: str | None, options: SourceOptions) -> Source | None:
    """Return the source of images with columns beside them, None for a folder without any.

    Raises UsageError for options of several such sources, and what the sources raise.
    """
    metadata = metadata_folder(path, split, options)
    found = [
        source
        for source in (
            coco_folder(path, split, options),
            paired_folders(path, split, options) if options.pairs else None,
            metadata,
        )
        if source is not None
    ]
    if len(found) > 1:
        kinds = " and ".join(source.description for source in found)
        raise UsageError(
            f"has columns of several kinds: {kinds}; convert one, and prep join the other", path=path
        )
    if not found:
        return None
    _refuse_options(found[0], options, takes_columns=found[0] is metadata)
    return found[0]


def _refuse_options(source: Source, options: SourceOptions, *, takes_columns: bool) -> None:
    refused = [name for name in options.for_lists if name == "root" or not takes_columns]
    if options.columns and not takes_columns:
        refused.append("columns")
    if refused:
        names = ", ".join(name.replace("_", " ") for name in refused)
        raise UsageError(f"this source has no {names}: {source.description}")
