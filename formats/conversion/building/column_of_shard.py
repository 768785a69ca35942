"""One column of one shard: its values are collected, then written to files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardprep.formats.columns.column_entry import column_row, rows_of, shard_name
from shardprep.formats.columns.schema import Field
from shardprep.formats.containers.container import Extent, Stored
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.registry import container
from shardprep.formats.containers.table import Rows, write_table
from shardprep.formats.dataset.manifest import WORK_FOLDER_NAME
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.records.record import content_digest, record_crc
from shardprep.formats.system.atomic_write import hash_file, publishing, unfinished

from .publish_shard import publish_shard


@dataclass(frozen=True, slots=True)
class BuiltColumn:
    """A finished column of a shard, as in the shard's commit record.

    ``rows`` is the file of its rows in the work folder. ``name``, ``size`` and ``sha256`` are those of the
    column's shard, empty and 0 for values in a table.
    """

    rows: str
    rows_sha256: str
    records: int
    name: str = ""
    size: int = 0
    sha256: str = ""

    def has_rows(self, work_folder: Path) -> bool:
        """Whether the rows are those that were written. Raises OSError."""
        return hash_file(work_folder / self.rows) == self.rows_sha256

    def is_intact(self, output: Path, work_folder: Path) -> bool:
        """Whether the files are those that were written. Raises OSError."""
        return self.has_rows(work_folder) and (self.shard is None or self.shard.is_in(output))

    @property
    def shard(self) -> FileEntry | None:
        """The entry of the column's shard; None for values in a table."""
        return FileEntry(self.name, self.size, self.sha256, self.records) if self.name else None


class ColumnOfShard:
    """The values of the column ``field`` for the records of the shard file ``shard``, in their order."""

    def __init__(self, field: Field, shard: str) -> None:
        self.field = field
        self._rows_name = f"{shard}.{field.name}.rows"
        self._stored: list[Stored] = []

    def append(self, key: bytes, value: bytes) -> None:
        """Add the encoded value of the next record."""
        self._stored.append(Stored(key, UNLABELLED, record_crc(key, UNLABELLED, value), value))

    def file_name(self, number: int, kind: str) -> str:
        """Return the name of the column's shard of that number; empty for values in a table."""
        return "" if self.field.is_fixed else shard_name(self.field.name, number, kind)

    def publish(self, run: Path, final: Path, kind: str, expected: Mapping[str, str]) -> str:
        """Write the column's shard, and return its SHA-256.

        ``run`` is the folder of unfinished files, ``kind`` the container; ``expected`` maps names of files to
        the SHA-256 that they must have.
        """
        built = unfinished(run, final.name)
        self._write(built, kind)
        return publish_shard(built, final, kind, self._crcs, expected)

    def built(self, run: Path, output: Path, name: str, sha256: str) -> BuiltColumn:
        """Publish the column's rows; ``name`` and ``sha256`` are those of its shard, empty without one."""
        path = output / WORK_FOLDER_NAME / self._rows_name
        with publishing(path, run) as file:
            write_table(file, self._rows())
        return BuiltColumn(
            rows=path.name,
            rows_sha256=hash_file(path),
            records=len(self._stored),
            name=name,
            size=(output / name).stat().st_size if name else 0,
            sha256=sha256,
        )

    def _write(self, built: Path, kind: str) -> None:
        keys, sizes = ([len(part) for part in parts] for parts in self._parts())
        with container(kind).write(built, Extent(len(sizes), sum(sizes), max(keys, default=1))) as writer:
            for stored in self._stored:
                writer.append(stored)

    def _parts(self) -> tuple[list[bytes], list[bytes]]:
        return [stored.key for stored in self._stored], [stored.image for stored in self._stored]

    @property
    def _crcs(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.array([stored.crc32c for stored in self._stored], np.uint32)

    def _rows(self) -> Rows:
        """The rows of the column's table, with the content digests of the values."""
        rows = np.zeros(len(self._stored), built_row(self.field))
        _, values = self._parts()
        rows["row"] = rows_of(self.field, values, self._crcs.tolist())
        digests = [content_digest(each.key, UNLABELLED, each.image) for each in self._stored]
        rows["digest"] = np.array(digests, "V32")
        return rows


def built_row(field: Field) -> np.dtype[np.void]:
    """Return the dtype of a row of the column's table with the value's content digest."""
    return np.dtype([("row", column_row(field)), ("digest", "V32")])
