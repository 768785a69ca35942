"""A place with archives: what is there, and copies of its small files here."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from shardprep.formats.processes.loop_thread import LoopThread
from shardprep.formats.system.owned import Owned
from shardprep.formats.system.storage.failures import RemoteDenied
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import PATIENT, RemoteFolder
from shardprep.formats.system.storage.stored_file import StoredFile

from .remote_archive import RemoteArchive
from .remote_file import RemoteFile


def files_in(place: Location, names: Sequence[str]) -> dict[str, RemoteFile]:
    """Return the files in a place by name; on a web server, which lists none, the readable ones of ``names``.

    Raises RemoteMissing, RemoteDenied, RemoteFailed, OperationError where obstore is not installed.
    """
    with LoopThread(threads=1) as loop:
        found = loop.run(_found(RemoteFolder(place, PATIENT), names))
    return {name: RemoteFile(place, name, found[name], PATIENT) for name in sorted(found)}


async def _found(folder: RemoteFolder, names: Sequence[str]) -> dict[str, StoredFile]:
    if folder.place.scheme not in ("http", "https"):
        return await folder.files()
    every = await asyncio.gather(*(_asked(folder, name) for name in names))
    return {name: found for name, found in zip(names, every, strict=True) if found is not None}


async def _asked(folder: RemoteFolder, name: str) -> StoredFile | None:
    try:
        return await folder.about(name)
    except RemoteDenied:  # which a public bucket without listing says of what is not there
        return None


class CopiedFiles(Owned):
    """A temporary folder with copies of files; it is removed when nothing refers to this object."""

    def __init__(self, files: Iterable[RemoteFile]) -> None:
        """Copy the files. Raises SourceDamaged for one that has changed, RemoteFailed, OSError."""
        self.folder = Path(tempfile.mkdtemp(prefix="shardprep-"))
        weakref.finalize(self, _remove, self.folder, os.getpid())
        for file in files:
            self._copy(file)

    def _copy(self, file: RemoteFile) -> None:
        path = self.folder / file.name
        with RemoteArchive(file) as archive, path.open("wb") as copy:
            for piece in archive.pieces():
                copy.write(piece)
        os.utime(path, (0, 0))  # a time of this copy would make each run another conversion


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)
