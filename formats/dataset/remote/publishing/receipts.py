"""Receipts: what a store said of files that were proven to be there, and are no longer here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.records.canonical_json import canonical_json, parse_canonical_json
from shardprep.formats.system.atomic_write import publish_bytes
from shardprep.formats.system.storage.stored_file import StoredFile


@dataclass(frozen=True)
class Receipts:
    """The receipts in the work folder of a conversion, one for each file, bound to its SHA-256."""

    work_folder: Path

    def of(self, file: FileEntry) -> StoredFile | None:
        """Return what the store said of that file; None if it is not proven to be there."""
        try:
            found = parse_canonical_json(self._path(file).read_bytes())
            stored = StoredFile(**found["stored"])
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None
        return stored if found.get("sha256") == file.sha256 and stored.size == file.size else None

    def write(self, file: FileEntry, stored: StoredFile, run: Path) -> None:
        """Store a receipt, durably; ``run`` is the folder of unfinished files."""
        content = {"sha256": file.sha256, "stored": asdict(stored)}
        publish_bytes(self._path(file), canonical_json(content), run)

    def _path(self, file: FileEntry) -> Path:
        return self.work_folder / f"{file.name}.stored"
