"""The records of a dataset that a loader delivers: all of them, or those that were chosen."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardprep.formats.dataset.record_set import RecordSet
from shardprep.formats.errors import UsageError
from shardprep.formats.images.kinds.image_info import ImageFlag
from shardprep.loaders.engine.protocol.task import Items
from shardprep.loaders.order.displaced_order import Records
from shardprep.loaders.order.weighted_parts import WeightedParts

from .replaying.identity import digest_of
from .shard_task import items_of

MAX_NAMED = 8  # classes in a message

Mask = npt.NDArray[np.bool_]
Chosen = npt.ArrayLike
Classes = Iterable[str | int]


class Subset:
    """Records of a dataset, in stored order. The place of a record is its number among them, from 0.

    Orders, receipts and states are of places, as if the subset were a dataset of its own. ``numbers`` are the
    record numbers, int64, ascending and unique; None for all records of the dataset. With ``weights``, the
    dataset's parts have other shares of the places than they have of the records.
    """

    def __init__(self, dataset: RecordSet, numbers: Records | None = None, weights: object = None) -> None:
        self.dataset = dataset
        self.chosen = numbers
        names, counts = [part.name for part in dataset.parts], [sum(own) for own in self._counts]
        self.weights = None if weights is None else WeightedParts.of(weights, names, counts)

    @classmethod
    def of(
        cls,
        dataset: RecordSet,
        records: Chosen | None,
        classes: Classes | None,
        weights: object = None,
    ) -> Subset:
        """Return the records that ``records`` and ``classes`` both choose; None chooses all.

        ``records`` is a mask or has record numbers; ``classes`` has class names, or labels in the dataset's
        label space. Raises UsageError for anything else, and where no record is chosen.
        """
        if records is None and classes is None and len(dataset):
            return cls(dataset, weights=weights)
        mask = np.ones(len(dataset), np.bool_)
        if records is not None:
            mask &= _mask(np.asarray(records), len(dataset))
        if classes is not None:
            mask &= np.isin(dataset.index["label"], list(_indexed_labels(dataset, classes)))
        if not mask.any():
            raise UsageError("records= and classes= choose no record of the dataset")
        return cls(dataset, None if mask.all() else np.flatnonzero(mask), weights)

    def __len__(self) -> int:
        return len(self.dataset if self.chosen is None else self.chosen)

    @cached_property
    def identity(self) -> str:
        """The root of the dataset; for a part of it, also a digest of the numbers, and of the weights."""
        chosen = "" if self.chosen is None else f" records:{digest_of(self.chosen)}"
        weights = "" if self.weights is None else f" weights:{digest_of(self.weights.places)}"
        return self.dataset.root + chosen + weights

    @property
    def shard_counts(self) -> tuple[int, ...]:
        """The number of these records in each block of the dataset, in stored order; by weight, of places."""
        if self.weights and len(self.dataset.parts) > 1:
            return self.weights.blocks(self._counts)
        return tuple(count for counts in self._counts for count in counts)

    @cached_property
    def _counts(self) -> list[list[int]]:
        """The number of these records in each block of each part."""
        counts = [block.records for block in self.dataset.blocks]
        if self.chosen is not None:
            counts = np.diff(np.searchsorted(self.chosen, np.cumsum(counts)), prepend=0).tolist()
        bounds = np.cumsum([0, *(block.records for block in self.dataset.blocks)])
        firsts = [part.first_record for part in self.dataset.parts]
        cuts = [*np.searchsorted(bounds, firsts).tolist(), len(counts)]
        return [counts[start:stop] for start, stop in pairwise(cuts)]

    @cached_property
    def mean_image(self) -> float:
        """The mean size of an encoded image, in bytes."""
        if self.chosen is None:
            return self.dataset.image_bytes / max(1, len(self))
        return int(self.dataset.index["length"][self.chosen].sum(dtype=np.int64)) / len(self)

    @cached_property
    def crop_ready(self) -> float:
        """The share of the images that are crop-ready, 0..1."""
        if self.chosen is None:
            return self.dataset.crop_ready / max(1, len(self))
        flags = self.dataset.index["flags"][self.chosen]
        return np.count_nonzero(flags & ImageFlag.CROP_READY) / max(1, len(self))

    @property
    def has_labels_at_hand(self) -> bool:
        """Whether :attr:`labels` are in memory, and those of the places; not so of a large collection."""
        return isinstance(self.dataset.index, np.ndarray) and self.weights is None

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        """The labels in the index, by place."""
        labels: npt.NDArray[np.int32] = self.dataset.index["label"]
        return labels if self.chosen is None else labels[self.chosen]

    def numbers(self, epoch: int) -> Records:
        """Return the record numbers, by place."""
        return self.numbers_at(np.arange(len(self)), epoch)

    def numbers_at(self, places: Records, epoch: int) -> Records:
        """Return the record numbers at these places of an epoch, which only weights make depend on it."""
        found = self.weights.positions(places, epoch) if self.weights else places
        return found if self.chosen is None else np.asarray(self.chosen[found])

    def places_of(self, items: Items) -> Records:
        """Return the places of items: with weights these are the numbers of their random values."""
        places: Records = np.ascontiguousarray(items["draw" if self.weights else "number"])
        return places if self.chosen is None or self.weights else np.searchsorted(self.chosen, places)

    def items_at(self, places: Records, epoch: int) -> Items:
        """Return the work items of the records at these places.

        A record has the random values of its number. With weights it may come again, and has those of its
        place.
        """
        numbers = self.numbers_at(places, epoch)
        return items_of(self.dataset.index, numbers, epoch, draws=places if self.weights else None)


def _mask(records: npt.NDArray[np.generic], count: int) -> Mask:
    """Return which of ``count`` records a mask or an array of record numbers chooses."""
    if records.ndim == 1 and records.dtype == np.bool_:
        if len(records) != count:
            raise UsageError(f"records= is a mask of {len(records)} records; the dataset has {count}")
        return records.astype(np.bool_)
    if records.ndim == 1 and not len(records):  # an empty list has no integer type
        return np.zeros(count, np.bool_)
    if records.ndim != 1 or records.dtype.kind not in "iu":
        raise UsageError(
            "records= must be a boolean mask with one value per record, or integers, the record numbers; not "
            f"an array of {records.dtype} of shape {records.shape}"
        )
    return _mask_of_numbers(records, count)


def _mask_of_numbers(numbers: npt.NDArray[np.generic], count: int) -> Mask:
    outside = numbers[(numbers < 0) | (numbers >= count)]  # type: ignore[operator]
    if len(outside):
        raise UsageError(f"records= has {outside[0]}; record numbers of this dataset are 0 to {count - 1}")
    mask = np.zeros(count, np.bool_)
    mask[numbers] = True
    if np.count_nonzero(mask) != len(numbers):
        found, times = np.unique(numbers, return_counts=True)
        raise UsageError(f"records= has {found[times > 1][0]} more than once; give each record number once")
    return mask


def _indexed_labels(dataset: RecordSet, classes: Classes) -> Iterable[int]:
    """Yield the labels in the index of class names, or of labels in the dataset's label space."""
    space = dataset.space
    if isinstance(classes, str | int) or not isinstance(classes, Iterable):
        raise UsageError(f"classes= must be a list of class names or labels, not {classes!r}")
    labels = space.mapping(dataset.label_space)[: len(space)].tolist()
    known: dict[object, int] = {label: place for place, label in enumerate(labels)}
    known.update(space.label_of)
    for name in classes:
        found = known.get(name) if isinstance(name, str | int | np.integer) else None
        if found is None:
            raise UsageError(f"the dataset has no class {name!r}; {_known_classes(dataset)}")
        yield found


def _known_classes(dataset: RecordSet) -> str:
    names = [each.name for each in dataset.space.classes]
    labels = dataset.space.mapping(dataset.label_space)[: len(names)]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return (
        f"its classes are {', '.join(names[:MAX_NAMED])}{more}, its labels ({dataset.label_space}) "
        f"{labels.min()} to {labels.max()}"
    )
