"""The card of a run: what decides which records a rank gets at each step, and what becomes of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from typing import Any, Self

import numpy as np

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.formats.images.opencv import cv2
from shardprep.formats.records.canonical_json import canonical_json, parse_canonical_json
from shardprep.formats.sources.listing.text_file import read_small_file
from shardprep.formats.system.atomic_write import save_bytes
from shardprep.formats.system.user_path import user_path
from shardprep.loaders.order.epoch_order import Shuffle, shuffle_from_json
from shardprep.loaders.order.receipt import natural

from .chosen_records import ChosenRecords
from .transform_card import TransformCard

FORMAT = "shardprep run card"
VERSION = 1
LARGEST = 1 << 20  # bytes of a file
ADVICE = "write it with loader.card().save(path)"


@dataclass(frozen=True)
class RunCard:
    """The options of a rank's run, as JSON: for :meth:`.Loader.replay` of its steps on any machine.

    ``dataset`` is the root of the dataset's manifest, ``split`` its split. ``records`` says which were
    chosen, None for all. ``columns`` are those that were named, and ``weights`` those of a collection's
    parts, None without. ``transform`` has the arguments, or the identity, of the transform. ``versions``
    are those of the programs that decide the pixels; a replay takes those that are installed. ``labels``,
    ``shuffle`` (a window counts records), ``seed``, ``batch_size``, ``rank``, ``world_size``,
    ``drop_last``, ``on_bad_record`` and ``with_numbers`` are the Loader's arguments of these names.
    """

    dataset: str
    split: str
    records: ChosenRecords | None
    labels: str
    columns: tuple[str, ...] | None
    weights: dict[str, float] | None
    shuffle: Shuffle | None
    seed: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    on_bad_record: str
    with_numbers: bool
    transform: TransformCard | None
    versions: dict[str, str]

    def options(self) -> dict[str, Any]:
        """Return the arguments of a Loader of this run, beside the path of the dataset.

        Raises UsageError for a transform that is not this package's own, and for chosen records of which the
        card does not have the numbers: replace these with None, and give the Loader the same ones.
        """
        plain = (
            "labels",
            "columns",
            "weights",
            "shuffle",
            "seed",
            "batch_size",
            "rank",
            "world_size",
            "drop_last",
        )
        options = {name: getattr(self, name) for name in (*plain, "on_bad_record", "with_numbers")}
        options["transform"] = self.transform.made() if self.transform else None
        options["records"] = self.records.given() if self.records else None
        return options

    def without_numbers(self) -> RunCard:
        """Return a card of a bounded size, that does not list the records that were chosen."""
        return replace(self, records=self.records and replace(self.records, numbers=None))

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"format": FORMAT, "version": VERSION} | {
            name: value.to_json() if hasattr(value, "to_json") else value for name, value in values.items()
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the card that ``to_json`` described, only if it has exactly this JSON.

        Raises DataError, and UnknownVersion for that of another version.
        """
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise DataError(f"is not a run card; {ADVICE}")
        if value.get("version") != VERSION:
            raise UnknownVersion(f"run card version {value.get('version')!r}; this release knows {VERSION}")
        try:
            card = cls(**_checked(value))
            same = canonical_json(card.to_json()) == canonical_json(value)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, UsageError) as error:
            raise DataError(f"is a damaged run card ({error}); {ADVICE}") from error
        if not same:
            raise DataError(f"is a damaged run card: it has other parts than a card; {ADVICE}")
        return card

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the card to a file, replacing an existing one. Raises OSError, OperationError."""
        final = user_path(path).absolute()
        save_bytes(final, canonical_json(self.to_json()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file. Raises DataError where it holds no card, UnknownVersion, OSError."""
        file = user_path(path)
        data = read_small_file(file, LARGEST)
        try:
            return cls.from_json(parse_canonical_json(data))
        except ValueError as error:
            raise DataError(f"is not a run card ({error}); {ADVICE}", path=file) from error
        except (DataError, UnknownVersion) as error:
            raise type(error)(error.message, path=file) from error


def installed_versions() -> dict[str, str]:
    """The versions that decide the pixels of a batch."""
    return {"shardprep": version("shardprep"), "opencv": cv2.__version__, "numpy": np.__version__}


def _checked(value: dict[str, Any]) -> dict[str, Any]:
    """The fields of a card. Raises KeyError, TypeError or ValueError."""
    texts = {name: _of(str, value[name], name) for name in ("dataset", "split", "labels", "on_bad_record")}
    counts = {name: natural(value[name]) for name in ("seed", "batch_size", "rank", "world_size")}
    flags = {name: _of(bool, value[name], name) for name in ("drop_last", "with_numbers")}
    columns, records, transform = (value[name] for name in ("columns", "records", "transform"))
    weights = value["weights"]
    versions = _of(dict, value["versions"], "versions")
    return {
        **texts,
        **counts,
        **flags,
        "records": None if records is None else ChosenRecords.from_json(records),
        "columns": None if columns is None else tuple(_of(str, name, "columns") for name in columns),
        "weights": None
        if weights is None
        else {name: _of(float, weight, "weights") for name, weight in weights.items()},
        "shuffle": shuffle_from_json(value["shuffle"]),
        "transform": None if transform is None else TransformCard.from_json(transform),
        "versions": {name: _of(str, text, "versions") for name, text in versions.items()},
    }


def _of(kind: type, value: Any, name: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"its {name} is {json.dumps(value)[:100]}")
    return value
