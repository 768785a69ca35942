"""Sources of records with columns: written for tests, and read whole."""

import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from source_builders import tar_of

from shardprep.formats.sources.listing.source import Listing


def write_shard(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> Path:
    """Write a shard of WebDataset: the parts of each sample by its stem."""
    path.parent.mkdir(parents=True, exist_ok=True)
    members = [(f"{stem}.{part}", data) for stem, parts in samples.items() for part, data in parts.items()]
    path.write_bytes(tar_of(members, style=tarfile.USTAR_FORMAT))
    return path


def records(listing: Listing) -> dict[str, dict[str, Any]]:
    """The label, the image and the decoded columns by key."""
    found = {}
    with listing.reader as reader:
        for entry in listing.entries:
            columns = decoded(listing, reader.values(entry))
            image = {"image": reader.read(entry)} if listing.has_images else {}
            found[entry["key"].decode()] = {"label": int(entry["label"]), **image, **columns}
    return found


def decoded(listing: Listing, values: Iterable[bytes]) -> dict[str, Any]:
    return {
        field.name: field.codec.decode(value) for field, value in zip(listing.schema, values, strict=True)
    }
