"""One file of a dataset: kept where it is right, else downloaded and verified before it has its name."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from shardprep.formats.processes.loop_thread import in_thread

from .part_file import HashedFile, PartFile
from .transfer import Transfer


@dataclass
class Download(Transfer):
    """The copy of one file. ``is_kept`` says that it was there before.

    ``part`` is the file's path until it is complete and right, and ``final`` the one afterwards.
    """

    final: Path
    part: Path
    is_kept: bool = field(default=False, kw_only=True)
    is_done: bool = field(default=False, kw_only=True)

    async def run(self) -> None:
        """Keep the file that is there if it is right, else download it. Raises what :meth:`fill` does."""
        self.is_kept = await self._is_right()
        if not self.is_kept:
            with closing(PartFile(self.part)) as part:
                await self._hash(part)
                await self.fill(part)
                await in_thread(part.publish, self.final)
        self.is_done = True

    async def _is_right(self) -> bool:
        """Whether a file of that name is there, with the size and the digest that the manifest lists."""
        try:
            found = HashedFile(self.final)
        except FileNotFoundError:
            return False
        with closing(found):
            if found.size_on_disk == self.entry.size:
                await self._hash(found)
                return found.sha256 == self.entry.sha256
            return False

    async def _hash(self, file: HashedFile) -> None:
        while await in_thread(file.hash_next):
            self.done = min(file.size, self.entry.size)
