"""The classes of records that have numbers as labels."""

from __future__ import annotations

from itertools import pairwise

from shardprep.formats.records.labels import MAX_WORDS, UNLABELLED, LabelSpace, official_words

MAX_LABEL = 99_999


class NumberedClasses:
    """The labels that were seen, and the names that go with them. Each label stays the same.

    Classes are named by their names if these are in the order of the labels, and by numbers such as ``00042``
    otherwise; the names are then their words. Wnids of ILSVRC12 in their order give its 1,000 classes.
    """

    def __init__(self) -> None:
        self.count = 0
        self.names: dict[int, str] = {}

    def add(self, label: int, name: str | None = None) -> int:
        """Add a record's label, -1 for none, and its name. Raises ValueError for what cannot be."""
        if not UNLABELLED <= label <= MAX_LABEL:
            raise ValueError(f"it has the label {label}, not one from 0 to {MAX_LABEL}")
        if name is not None:
            self._add_name(label, name)
        self.count = max(self.count, label + 1)
        return label

    def _add_name(self, label: int, name: str) -> None:
        if not 0 < len(name) <= MAX_WORDS:
            raise ValueError(f"its class has a name of {len(name)} characters, not 1 to {MAX_WORDS}")
        name.encode()
        if label == UNLABELLED:
            raise ValueError(f"its label is {label}, which is none, but it has the name {name!r}")
        known = self.names.setdefault(label, name)
        if known != name:
            raise ValueError(f"its label {label} is named {name!r}, but it is {known!r} elsewhere")

    def merge(self, other: NumberedClasses) -> None:
        """Add what was seen in another split. Raises ValueError if the names disagree."""
        self.count = max(self.count, other.count)
        for label, name in other.names.items():
            self._add_name(label, name)

    def space(self) -> LabelSpace:
        """Return the space of all labels."""
        official = list(official_words())
        if self.names and self.count <= len(official) and self._are(official):
            return LabelSpace.of(official)
        names = [self.names.get(label, "") for label in range(self.count)]
        if all(names) and all(one < other for one, other in pairwise(names)):
            return LabelSpace.of(names)
        numbers = {label: f"{label:05d}" for label in range(self.count)}
        words = {numbers[label]: name for label, name in self.names.items()}
        return LabelSpace.of(numbers.values(), words)

    def _are(self, names: list[str]) -> bool:
        return all(names[label] == name for label, name in self.names.items())
