"""A source whose splits are packed in different ways: val still in its tar, train already extracted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import LabelConflict
from .evidence import WANTED_FOR_CLASSES
from .labels import LabelSpace
from .recognised_source import RecognisedSource, no_such_split
from .source import SPLITS, Box, Listing, Source


def merged(sources: Sequence[RecognisedSource]) -> Source:
    """Each split of the first source that has it."""
    members = {split: source for source in reversed(sources) for split in source.splits}
    if len(members) == len(sources[0].splits):
        return sources[0]
    return MixedSource({split: members[split] for split in SPLITS if split in members})


@dataclass(frozen=True)
class MixedSource(Source):
    """``members`` has, in the order of SPLITS, the source of each split; all have the same classes."""

    members: Mapping[str, RecognisedSource]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.members)

    @property
    def description(self) -> str:
        parts = ", ".join(f"{split} of {member.layout}" for split, member in self.members.items())
        return f"{parts} ({len(self._labels())} classes)"

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(f for member in self.members.values() for f in member.folders))

    def listing(self, split: str) -> Listing:
        if split not in self.members:
            raise no_such_split(split, self.splits)
        self._labels()
        return self.members[split].listing(split)

    def boxes(self, split: str) -> Iterator[Box] | None:
        return self.members[split].boxes(split)

    def _labels(self) -> LabelSpace:
        """What all splits have in common. Raises LabelConflict where they do not."""
        (first, one), *others = self.members.items()
        for split, other in others:
            if other.labels.digest != one.labels.digest:
                raise LabelConflict(
                    f"{first} ({one.layout}) has {len(one.labels)} classes, {split} ({other.layout}) has "
                    f"{len(other.labels)} or others; put {WANTED_FOR_CLASSES} beside them, "
                    "or keep them in two folders",
                    path=one.beside[0],
                )
        return one.labels
