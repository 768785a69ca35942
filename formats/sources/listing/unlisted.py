"""Images in a folder that what lies beside them does not name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources.listing.entry_table import GrowingTable
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.tree_files import FolderWalk, is_image


def add_unlisted(
    root: Path,
    place: str,
    listed: npt.NDArray[np.bytes_],
    problems: Problems,
    advice: str,
    *,
    follow_symlinks: bool = False,
) -> Counter[str]:
    """Add the images below the folder ``place`` of ``root`` that are not among ``listed`` to the problems.

    ``listed`` are paths below ``root``; ``advice`` says what is wrong with an image. Returns the files of
    file managers and the hidden ones that were left out, by name.
    """
    walk = FolderWalk(root, follow_symlinks, problems)
    table = GrowingTable(np.dtype([("path", "S1")]))
    for file in walk.files_below(place):
        if is_image(file):
            table.append((f"{place}/{file.path}".lstrip("/").encode(),))
    for path in np.setdiff1d(table.finish()["path"], listed).tolist():
        problems.add(SourceDamaged(advice, path=root / path.decode()))
    return walk.ignored
