"""What a store says of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from obstore import ObjectMeta


@dataclass(frozen=True)
class StoredFile:
    """What a store says of a file: its size in bytes, and its ETag, which another content does not have.

    Where a server gives no ETag, the time of the last change is in its place.
    """

    size: int
    e_tag: str

    @classmethod
    def of(cls, found: ObjectMeta) -> StoredFile:
        """Return what obstore says of a file."""
        return cls(found["size"], (found["e_tag"] or found["last_modified"].isoformat()).strip('"'))
