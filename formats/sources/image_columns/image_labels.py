"""The labels of images in folders: from a column of a table, or from class folders."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.records.labels import UNLABELLED, LabelSpace
from shardprep.formats.sources.image_columns.tables.cell_values import label_name
from shardprep.formats.sources.labelled_list.classes import ListedClasses


class ImageLabels:
    """The classes of all images of a source, numbered as they come.

    With a column of labels these are its values; an empty one is no label. Otherwise the classes are the
    folders, where every image lies in one and there are two or more; if not, no image has a label.
    """

    def __init__(self) -> None:
        self._listed = ListedClasses()
        self._folders: dict[str, int] = {}
        self._has_loose = False
        self._has_column = False

    def of_cell(self, cell: Any) -> int:
        """Return the number of the class in a cell of the column. Raises ValueError for what is none."""
        self._has_column = True
        name = "" if cell is None else label_name(cell).strip()
        return self._listed.label_of(name) if name else UNLABELLED

    def of_folder(self, path: str) -> int:
        """Return the number of the class of the image at ``path``, below the folder of its split."""
        folder, inside, _ = path.partition("/")
        if not inside:
            self._has_loose = True
            return UNLABELLED
        return self._folders.setdefault(folder, len(self._folders))

    def numbered(self) -> tuple[LabelSpace, npt.NDArray[np.int32]]:
        """Return the space of all classes, and the label in it of each number; the last is that of none."""
        if self._has_column:
            if not len(self._listed):
                return self._without(0)
            space, labels = self._listed.numbered()
            return space, np.append(labels, np.int32(UNLABELLED))
        if self._has_loose or len(self._folders) < 2:
            return self._without(len(self._folders))
        space = LabelSpace.of(self._folders)
        return space, np.array([*(space.label_of[name] for name in self._folders), UNLABELLED], np.int32)

    def _without(self, folders: int) -> tuple[LabelSpace, npt.NDArray[np.int32]]:
        return LabelSpace.of(()), np.full(folders + 1, UNLABELLED, np.int32)
