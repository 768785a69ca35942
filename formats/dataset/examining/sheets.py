"""Contact sheets: some images of a class, chosen by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.errors import UsageError
from shardprep.formats.printable import printable

from .observation import RecordNames, ShownRecord

MOST_PICTURES = 480  # on all sheets
MOST_OF_A_NAMED_CLASS = 60
OF_ANY_CLASS = 8
MOST_CLASSES = 24  # where none is named


@dataclass(frozen=True)
class Sheet:
    """Some ``records`` of a class that has so many ``images``, and its ``words``, None if unknown."""

    name: str
    words: str | None
    images: int
    records: list[ShownRecord]


def contact_sheets(names: RecordNames, classes: Sequence[str], seed: int) -> list[Sheet]:
    """Return the sheets of the named ``classes``; of none, small ones of some classes that the seed chooses.

    Raises UsageError for a class that the dataset does not have.
    """
    dataset, rng = names.datasets[0], np.random.default_rng(seed)
    labels = dataset.index["label"]
    if classes:
        chosen = [_label(dataset, name) for name in dict.fromkeys(classes)]
        most = min(MOST_OF_A_NAMED_CLASS, max(1, MOST_PICTURES // len(chosen)))
    else:
        present = np.unique(labels[labels >= 0])
        chosen = np.sort(rng.choice(present, min(len(present), MOST_CLASSES), replace=False)).tolist()
        most = OF_ANY_CLASS
    sheets = []
    for label in chosen:
        records = np.flatnonzero(labels == label)
        some = np.sort(rng.choice(records, min(len(records), most), replace=False)).tolist()
        each = dataset.manifest.labels.classes[label]
        sheets.append(Sheet(each.name, each.words, len(records), [names.shown(n) for n in some]))
    return sheets


def _label(dataset: Dataset, name: str) -> int:
    label = dataset.manifest.labels.label_of.get(name)
    if label is None:
        close = get_close_matches(name, dataset.classes, 3)
        hint = f"; close are {printable(', '.join(close))}" if close else ""
        raise UsageError(f"has no class {printable(name)!r}{hint}", path=dataset.path)
    return label
