"""An archive in object storage as a file of a source, with its MD5 if it is checked."""

from __future__ import annotations

import hashlib

from shardprep.formats.sources.listing.archive_md5 import verified_by_md5, verified_by_size
from shardprep.formats.sources.listing.source import Archive

from .remote_archive import RemoteArchive
from .remote_file import RemoteFile


def remote_archive_of(file: RemoteFile, *, check_md5: bool) -> Archive:
    """Return the entry of a file; ``check_md5`` reads all of it.

    Raises SourceDamaged for an official name with another MD5, and RemoteFailed.
    """
    size, e_tag = file.stored.size, file.stored.e_tag
    if not check_md5:
        return Archive(file.name, size, 0, verified=verified_by_size(file.name, size), e_tag=e_tag)
    md5 = _md5(file)
    return Archive(file.name, size, 0, md5, verified_by_md5(file.name, md5, file.url), e_tag)


def _md5(file: RemoteFile) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with RemoteArchive(file) as archive:
        for piece in archive.pieces():
            digest.update(piece)
    return digest.hexdigest()
