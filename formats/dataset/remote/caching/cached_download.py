"""The download of one file into a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardprep.formats.dataset.remote.fetching.transfer import Transfer
from shardprep.formats.processes.loop_thread import in_thread

from .cache_folder import CacheFolder
from .eviction import hex_of
from .reserved_part import ReservedPart


@dataclass
class CachedDownload(Transfer):
    """A part with its room, and the cache that it will be a file of."""

    part: ReservedPart
    folder: CacheFolder
    is_published: bool = field(default=False, kw_only=True)

    async def run(self) -> None:
        """Download the file, verify it and publish it. Raises what :meth:`fill` does."""
        await self.fill(self.part)
        await in_thread(self.part.flush)  # before the turn: it can take long
        await in_thread(self._publish)

    def _publish(self) -> None:
        final = self.folder.path_of(hex_of(self.entry))
        final.parent.mkdir(exist_ok=True)
        with self.folder.turn():
            self.part.publish(final)
            self.part.share()
            self.is_published = True

    def give_up(self) -> None:
        """Let the file go; what is not whole is removed. The caller has its turn in the cache."""
        if self.is_published:
            self.part.close()
        else:
            self.part.remove()
