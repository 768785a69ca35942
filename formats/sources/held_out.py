"""The source of train and val out of one that has train only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.records.stored_order import permutation
from shardprep.formats.sources.listing.source import Box, Entries, Listing, Source, no_such_split

_OTHER_STREAM = 1 << 64  # the stored order is drawn by the seed alone


def held_out(source: Source, fraction: float, seed: int) -> HeldOutVal:
    """Return the source with a fraction of its images in val. Raises UsageError unless it has train only."""
    if source.splits != ("train",):
        raise UsageError(
            f"a val fraction is taken from a source of train only, and this one has {', '.join(source.splits)}; "
            "leave out --val-fraction, or give the folder of train"
        )
    return HeldOutVal(source, fraction, seed)


@dataclass(frozen=True)
class HeldOutVal(Source):
    """The images of a source of train, each either in train or in val.

    Of each class of n images, n times ``fraction`` are in val, rounded up or down, so that all of val is that
    fraction, too; the last image of a class stays in train. Which ones is drawn by ``seed`` from the images'
    keys, and does not depend on the order of the listing.
    """

    source: Source
    fraction: float
    seed: int

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "val")

    @property
    def description(self) -> str:
        return f"{self.source.description}, {self.fraction:g} of it for val"

    @property
    def folders(self) -> tuple[Path, ...]:
        return self.source.folders

    def survey(self, split: str) -> Listing:
        if split not in self.splits:
            raise no_such_split(split, self.splits)
        whole = self._whole
        entries = whole.entries[self._is_val == (split == "val")]
        missing = 0 if whole.expected is None else whole.expected - len(whole.entries)
        return replace(
            whole,
            split=split,
            entries=entries,
            expected=len(entries) + missing if missing else None,
            ignored=whole.ignored if split == "train" else {},
            options={**whole.options, "val_fraction": self.fraction},
            kept_by=None,
        )

    def boxes(self, split: str) -> Iterator[Box] | None:
        return self.source.boxes("train")

    @cached_property
    def _whole(self) -> Listing:
        return self.source.survey("train")

    @cached_property
    def _is_val(self) -> npt.NDArray[np.bool_]:
        return drawn(self._whole.entries, self.fraction, self.seed)


def drawn(entries: Entries, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return for each entry whether it is in the fraction: every (1 / fraction)th, class after class."""
    by_key = np.argsort(entries["key"], kind="stable")
    mixed = by_key[permutation(len(entries), seed | _OTHER_STREAM)]
    by_class = mixed[np.argsort(entries["label"][mixed], kind="stable")]
    labels = entries["label"][by_class]
    chosen = np.diff(np.floor(np.arange(len(entries) + 1) * fraction + 0.5)) > 0
    chosen[:-1] &= labels[1:] == labels[:-1]
    chosen[-1:] = False
    found = np.zeros(len(entries), np.bool_)
    found[by_class[chosen]] = True
    return found
