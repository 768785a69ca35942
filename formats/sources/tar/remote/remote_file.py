"""A file in object storage or on a server, which must not change."""

from __future__ import annotations

from dataclasses import dataclass

from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import RetryPolicy
from shardprep.formats.system.storage.stored_file import StoredFile


@dataclass(frozen=True)
class RemoteFile:
    """The file ``name`` in a place, as it was when the place was listed. Picklable."""

    place: Location
    name: str
    stored: StoredFile
    policy: RetryPolicy

    @property
    def url(self) -> str:
        """The file's URL."""
        return f"{self.place.url}/{self.name}"
