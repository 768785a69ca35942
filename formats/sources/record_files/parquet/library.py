"""The library pyarrow, which is optional, and Parquet files opened with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.formats.system.foreign_file import foreign_file

ADVICE = "copy or download the file again"
MAX_GROUP_BYTES = 1 << 30  # of the columns of one row group, as they are in memory
_MAX_METADATA = 64 << 20


def parquet_module(path: Path) -> ModuleType:
    """Return ``pyarrow.parquet``. Raises UsageError if it is not installed; ``path`` is what needs it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        need = "is read with pyarrow, which is not installed; pip install 'shardprep[parquet]'"
        raise UsageError(need, path=path) from error
    module: ModuleType = pyarrow.parquet
    return module


@contextmanager
def arrow_reads(place: str | Path, *, key: str | None = None, column: str = "") -> Iterator[None]:
    """Raise SourceDamaged for what pyarrow raises over a file: its OSError without errno is one, too."""
    with foreign_file(place, ADVICE, key=key, place=lambda: column and f"the column {column}: "):
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise ValueError(str(error)) from error
            raise


def opened(path: Path) -> Any:
    """Return the open ``ParquetFile``, of which only metadata is read. Raises SourceDamaged, UsageError."""
    module = parquet_module(path)
    with arrow_reads(path):
        return module.ParquetFile(
            path, thrift_string_size_limit=_MAX_METADATA, thrift_container_size_limit=_MAX_METADATA
        )


def read_group(file: Any, group: int, columns: list[str]) -> Any:
    """Return the table of some columns of a row group. Raises ValueError if it is too large to be read."""
    metadata = file.metadata.row_group(group)
    chunks = (metadata.column(number) for number in range(metadata.num_columns))
    size = sum(chunk.total_uncompressed_size for chunk in chunks if _is_of(chunk.path_in_schema, columns))
    if size > MAX_GROUP_BYTES:
        raise ValueError(
            f"the row group {group} has {size} bytes, too many to be read at once; write smaller ones"
        )
    table = file.read_row_group(group, columns=columns, use_threads=False)
    if table.num_rows != metadata.num_rows:
        raise ValueError(f"the row group {group} has {table.num_rows} rows, and says {metadata.num_rows}")
    return table


def _is_of(path: str, columns: list[str]) -> bool:
    return any(path == column or path.startswith(f"{column}.") for column in columns)
