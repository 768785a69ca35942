"""The classes of a list, numbered as they come."""

from __future__ import annotations

import re

import numpy as np

from shardprep.formats.records.labels import LabelSpace

MAX_CLASSES = 100_000
MAX_NAME = 255  # characters of a class's name
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


class ListedClasses:
    """The classes of a list, numbered as they come. Raises ValueError for what cannot be one."""

    def __init__(self) -> None:
        self._of_name: dict[str, int] = {}
        self._are_numbers: bool | None = None

    def __len__(self) -> int:
        return len(self._of_name)

    def label_of(self, text: str) -> int:
        """Return the number of the class in the order of first occurrence."""
        is_number = _NUMBER.fullmatch(text) is not None
        if not 0 < len(text) <= MAX_NAME:
            raise ValueError(f"has a label of {len(text)} characters, not 1 to {MAX_NAME}")
        if self._are_numbers not in (None, is_number):
            expected = "a number" if self._are_numbers else "a name"
            raise ValueError(f"has the label {text!r}, but the first one is {expected}; use one of both")
        if is_number and int(text) >= MAX_CLASSES:
            raise ValueError(f"has the label {text}, but the largest is {MAX_CLASSES - 1}; use names")
        text.encode()
        self._are_numbers = is_number
        label = self._of_name.setdefault(str(int(text)) if is_number else text, len(self._of_name))
        if label >= MAX_CLASSES:
            raise ValueError(f"has the class {text!r}, which is one more than {MAX_CLASSES}")
        return label

    def numbered(self) -> tuple[LabelSpace, np.ndarray[tuple[int], np.dtype[np.int32]]]:
        """Return the space of all classes, and the label in it of each class as it came."""
        if self._are_numbers:
            numbers = [int(text) for text in self._of_name]
            names = (f"{number:05d}" for number in range(1 + max(numbers)))
            return LabelSpace.of(names), np.array(numbers, np.int32)
        space = LabelSpace.of(self._of_name)
        return space, np.array([space.label_of[name] for name in self._of_name], np.int32)
