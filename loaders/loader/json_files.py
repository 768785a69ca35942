"""Records of runs and disks as JSON, with a format and a version."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import Any, ClassVar, Self

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.formats.runtime.files import naming_file, save_bytes, user_path
from shardprep.formats.runtime.json_record import built_fields, canonical_json, plain
from shardprep.formats.sources.listing import read_small_file

LARGEST = 64 << 20  # bytes of a file


def json_of(path: str | os.PathLike[str], *, most: int = LARGEST, what: str = "JSON") -> Any:
    """Read a JSON file. Raises DataError, which names the file, and OSError."""
    path = user_path(path)
    try:
        return json.loads(read_small_file(path, most))
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not {what}: {error}", path=path) from error


class JsonRecord:
    """Shared base of dataclasses that are JSON objects of their fields, of a ``KIND`` and a ``VERSION``.

    Fields ``ADDED`` since the first release, which does not know them, are left out if they are None.
    """

    KIND: ClassVar[str]
    ADVICE: ClassVar[str]
    VERSION: ClassVar[int] = 1
    MOST_BYTES: ClassVar[int] = 1 << 20  # of a file
    ADDED: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types."""
        own: Any = self
        values = {field.name: plain(getattr(self, field.name)) for field in fields(own)}
        for name in self.ADDED:
            if values[name] is None:
                del values[name]
        return {"format": f"shardprep {self.KIND}", "version": self.VERSION} | values

    @classmethod
    def is_format_of(cls, value: Any) -> bool:
        """Whether a JSON value has this format. Raises UnknownVersion for another version of it."""
        is_own = isinstance(value, dict) and value.get("format") == f"shardprep {cls.KIND}"
        if is_own and value.get("version") != cls.VERSION:
            found = f"{cls.KIND} version {value.get('version')!r}"
            raise UnknownVersion(f"{found}; this release knows {cls.VERSION}; {cls.ADVICE}")
        return is_own

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the record with exactly this JSON. Raises DataError for other values, UnknownVersion."""
        if not cls.is_format_of(value):
            raise DataError(f"is not a {cls.KIND}; {cls.ADVICE}")
        try:
            found = cls(**built_fields(cls, value))
            if canonical_json(found.to_json()) != canonical_json(value):
                raise ValueError("its parts are inconsistent")
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, UsageError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(f"is a damaged {cls.KIND} ({why}); {cls.ADVICE}") from error
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a file, replacing an existing one. Raises OSError, OperationError."""
        save_bytes(user_path(path), canonical_json(self.to_json()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file. Raises DataError if it holds no such record, UnknownVersion, OSError."""
        value = json_of(path, most=cls.MOST_BYTES, what=f"a {cls.KIND}; {cls.ADVICE}")
        with naming_file(user_path(path)):
            return cls.from_json(value)
