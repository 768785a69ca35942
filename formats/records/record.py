"""Records: an image with its label and key, their checksums and order, columns, saved items, label spaces."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, Self

import google_crc32c
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shardprep.formats.errors import ManifestDamaged, UsageError, printable
from shardprep.formats.records.schema import RESERVED, BadValue
from shardprep.formats.runtime.json_record import matches, sha256_of
from shardprep.formats.runtime.owners import cached_property

UNLABELLED = -1
MAX_CLASS_ID = (1 << 31) - 1
MAX_WORDS = 1000  # characters; the longest of ILSVRC12 has 121
SPACES = ("sorted_wnid0", "ilsvrc2012_id", "sorted_wnid1_bg")

OFFICIAL_IMAGES = {"train": 1_281_167, "val": 50_000, "test": 100_000}


@dataclass(frozen=True, slots=True)
class ImageClass:
    """A class: its name (for ImageNet the wnid), its words and its devkit id; None if unknown."""

    name: str
    words: str | None = None
    ilsvrc2012_id: int | None = None


@dataclass(frozen=True)
class LabelSpace:
    """The classes in label order: label *i* of ``sorted_wnid0`` is ``classes[i]``.

    Names are unique and sorted by code point; words are not unique (two classes are called crane).
    """

    classes: tuple[ImageClass, ...]

    @classmethod
    def of(
        cls, names: Iterable[str], words: dict[str, str] | None = None, ids: dict[str, int] | None = None
    ) -> LabelSpace:
        """Return the space of these class names; ``words`` default to those of ImageNet's wnids."""
        words = official_words() | (words or {})
        return cls(tuple(ImageClass(n, words.get(n), (ids or {}).get(n)) for n in sorted(set(names))))

    def __len__(self) -> int:
        return len(self.classes)

    def __repr__(self) -> str:
        ends = f" from {self.classes[0].name!r} to {self.classes[-1].name!r}" if self.classes else ""
        return f"<LabelSpace of {len(self):,} classes{ends}>"

    @cached_property
    def label_of(self) -> dict[str, int]:
        """The label in ``sorted_wnid0`` by class name."""
        return {c.name: label for label, c in enumerate(self.classes)}

    @cached_property
    def label_of_id(self) -> dict[int, int]:
        """The label in ``sorted_wnid0`` by ILSVRC2012_ID; empty without the devkit."""
        return {c.ilsvrc2012_id: i for i, c in enumerate(self.classes) if c.ilsvrc2012_id is not None}

    @property
    def is_official(self) -> bool:
        """Whether these are exactly the 1,000 classes of ILSVRC12."""
        return self.label_of.keys() == official_words().keys()

    @property
    def digest(self) -> str:
        """The SHA-256 of the ordered class names; only equal spaces have equal digests."""
        return sha256_of([c.name for c in self.classes])

    def mapping(self, space: str) -> npt.NDArray[np.int64]:
        """Return an int64 array: ``mapping(space)[label]`` is the label in ``space``, -1 for -1.

        ``sorted_wnid0`` is 0 to n - 1; ``ilsvrc2012_id`` is 1 to n as in the devkit; ``sorted_wnid1_bg`` is 1
        to n with 0 for background. Raises UsageError for an unknown space, or without the devkit's ids.
        """
        ids = [c.ilsvrc2012_id for c in self.classes if c.ilsvrc2012_id is not None]
        spaces = dict(zip(SPACES, (range(len(self)), ids, range(1, len(self) + 1)), strict=True))
        if space not in SPACES:
            raise UsageError(f"unknown label space {space!r}; choose from {', '.join(SPACES)}")
        if len(labels := spaces[space]) < len(self):
            raise UsageError("labels in ilsvrc2012_id need a dataset that was converted with the devkit")
        return np.array([*labels, UNLABELLED], dtype=np.int64)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the classes for the manifest."""
        return [{"name": c.name, "words": c.words, "ilsvrc2012_id": c.ilsvrc2012_id} for c in self.classes]

    @classmethod
    def from_json(cls, classes: list[dict[str, Any]]) -> LabelSpace:
        """Return the space of a manifest's classes; the inverse of :meth:`to_json`."""
        return cls(tuple(ImageClass(**c) for c in classes))


@cache
def official_words() -> dict[str, str]:
    """Return the 1,000 wnids of ILSVRC12 in sorted order, each with its words."""
    text = (resources.files("shardprep.formats") / "data/wnids.tsv").read_text(encoding="utf-8")
    return dict(line.split("\t", 1) for line in text.splitlines() if not line.startswith("#"))


MAX_KEY_BYTES = 1024
CRC_RESIDUE = 0x48674BC7  # the CRC-32C of any bytes that end in their own CRC-32C, as "<u4"
MAX_IMAGE_BYTES = 64 << 20  # one ILSVRC12 image is 110 KB on average, the largest is about 15 MB


class ColumnValues(Mapping[str, Any]):
    """The values of a record's columns, each by ``read(name)`` on first use. Pickled with all values."""

    def __init__(self, names: tuple[str, ...], read: Callable[[str], Any]) -> None:
        self._names = names
        self._read = read
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            if name not in self._names:
                names = ", ".join(self._names) or "none"
                raise KeyError(f"there is no column {name!r}; the columns are: {names}")
            self._values[name] = self._read(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<columns {', '.join(self._names)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (dict(self),)


def _loaded(values: dict[str, Any]) -> ColumnValues:
    return ColumnValues(tuple(values), values.__getitem__)


NO_COLUMNS: Mapping[str, Any] = _loaded({})


class RecordBatch(NamedTuple):
    """Records collated by torch's ``default_collate``: encoded images, and a tensor of labels."""

    image: Any
    label: Any


class _RecordFields(NamedTuple):
    key: str
    label: int
    image: bytes


class Record(_RecordFields):
    """One image: its ``key``, its ``label`` (-1 for none) and its unchanged encoded bytes, ``image``.

    Notebooks show the picture; the ``repr`` has the image's size instead of its bytes. PyTorch's DataLoader
    collates records to (images, labels).
    """

    __slots__ = ()

    def __new__(cls, key: str, label: int, image: bytes) -> Self:
        """Return the record, or a RecordBatch if ``default_collate`` passes the columns of a batch."""
        if not isinstance(key, str):
            return RecordBatch(image, label)
        return tuple.__new__(cls, (key, label, image))

    @property
    def crop_ready(self) -> bool:
        """Whether the image has a table of segments that the conversion checked."""
        return False

    @property
    def columns(self) -> Mapping[str, Any]:
        """The values of the dataset's columns by name."""
        return NO_COLUMNS

    def __getitem__(self, name: Any) -> Any:
        return self.columns[name] if isinstance(name, str) else super().__getitem__(name)

    def __repr__(self) -> str:
        columns = f", columns {', '.join(self.columns)}" if self.columns else ""
        return f"<Record {printable(self.key)!r}: label {self.label}, {len(self.image):,} bytes{columns}>"

    def _repr_html_(self) -> str:
        from shardprep.formats.images.pictures import figure  # start-up time: OpenCV

        return figure(self.image, caption=repr(self))


def check_transform(transform: object) -> None:
    """Raise UsageError unless this may be a transform of records; name the wrapper of one of images."""
    library = type(transform).__module__.partition(".")[0]
    if library in ("torchvision", "albumentations"):
        raise UsageError(
            f"transform must take a record, but a {type(transform).__name__} of {library} takes an image: give "
            f"{library.capitalize()}(transform), from shardprep.loaders.transforms.{library}"
        )
    if isinstance(transform, type) or not callable(transform):
        raise UsageError(
            f"transform must be a callable of a record, such as TrainTransform(224), not {transform!r}"
        )


def record_crc(key: bytes, label: int, image: bytes | npt.NDArray[np.uint8]) -> int:
    """Return the CRC-32C (Castagnoli, as in RFC 3720) of key, label and image.

    The key's length and the label come first, as ``<Hi``, so that a swapped record is detected, too.
    """
    head = struct.pack("<Hi", len(key), label) + key
    return google_crc32c.extend(google_crc32c.value(head), image)  # type: ignore[no-any-return]


def end_in_crc(heads: Iterable[int], rows: Iterable[bytes]) -> bool:
    """Whether each row ends in the CRC-32C, as "<u4", of its other bytes after those of its ``head``.

    A head is the :func:`record_crc` of a record without an image.
    """
    return set(map(google_crc32c.extend, heads, rows)) <= {CRC_RESIDUE}


def content_digest(key: bytes, label: int, image: bytes) -> bytes:
    """Return a digest of 32 bytes of a record's content, whatever its container and shard.

    It is BLAKE3, as this hashes each image a second time, and SHA-256 takes three times as long.
    """
    head = b"shardprep-record-1\0" + struct.pack("<IiQ", len(key), label, len(image)) + key
    return blake3(head).update(image).digest()


def content_root(digests: Iterable[bytes]) -> str:
    """Return ``blake3:<hex>`` of the records' digests in stored order, given in pieces of any size.

    Equal order, keys, labels and images give equal roots for any container and shard size.
    """
    root = blake3(b"shardprep-content-1\0")
    for piece in digests:
        root.update(piece)
    return f"blake3:{root.hexdigest()}"


ORDERS = ("shuffled", "key", "source")
GIVEN = "given"  # saved items, as they were given
GIVEN_SHUFFLED = "given-shuffled"  # saved items, shuffled by the seed
ITEM_ORDERS = (GIVEN, GIVEN_SHUFFLED)
ARCHIVE_ORDER = "archive"  # images that stay in their archive

MAX_SEED = (1 << 64) - 1


def permutation(count: int, seed: int) -> npt.NDArray[np.intp]:
    """Return a uniform permutation of ``range(count)``: the sorting order of Philox's raw 64-bit stream.

    NumPy guarantees the raw stream of Philox (Salmon et al. 2011), but may change ``Generator.permutation``.
    """
    return np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable")


def is_class_sorted(labels: npt.NDArray[np.int32]) -> bool:
    """Whether each class is one run of records: bad for training in stored order."""
    classes = len(np.unique(labels))
    return classes > 1 and classes == 1 + int(np.count_nonzero(np.diff(labels)))


class ColumnRecord(Record):
    """A record that has columns, by name in :attr:`columns` or as ``record["mask"]``, or is crop-ready."""

    _columns: Mapping[str, Any] = NO_COLUMNS
    _is_crop_ready: bool = False

    @classmethod
    def of(
        cls, fields: Iterable[Any], columns: Mapping[str, Any], is_crop_ready: bool = False
    ) -> ColumnRecord:
        """Return a record with the ``fields`` of a :class:`Record`, in their order, and ``columns``."""
        record = cls(*fields)
        record._columns, record._is_crop_ready = columns, is_crop_ready
        return record

    @property
    def crop_ready(self) -> bool:
        return self._is_crop_ready

    @property
    def columns(self) -> Mapping[str, Any]:
        return self._columns

    def _replace(self, **values: Any) -> Self:
        return self.of(super()._replace(**values), self._columns, self._is_crop_ready)  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        return ColumnRecord.of, (tuple(self), self._columns, self._is_crop_ready)


FORMS = ("dict", "tuple", "list", "value", "record")
LAYOUT = "items"  # in a manifest's source


@dataclass(frozen=True)
class ItemForm:
    """The ``form`` of all items, one of FORMS, and the ``names`` of their parts, in order.

    The names "key", "image" and "label" of a dict or a record are the record's own; all others are columns.
    ``is_named`` is whether labels are given as names. ``classes`` are the names of the labels 0, 1, ...
    unless they are in sorted order.
    """

    form: str
    names: tuple[str, ...]
    is_named: bool = False
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, item: Any) -> ItemForm:
        """Return the form of an item. Raises BadValue for a dict with keys that are not text."""
        if isinstance(item, Record):
            own = ("key", "label", "image") if item.image else ("key", "label")
            return cls("record", (*own, *item.columns))
        if isinstance(item, dict):
            if not all(isinstance(name, str) for name in item):
                raise BadValue("is a dict with names that are not text")
            return cls("dict", tuple(map(str, item)))
        if isinstance(item, tuple | list):
            return cls("tuple" if isinstance(item, tuple) else "list", tuple(map(str, range(len(item)))))
        return cls("value", ("value",))

    @cached_property
    def own_names(self) -> frozenset[str]:
        """The record's own names among those of the items: "key", "image" and "label"."""
        return frozenset(self.names).intersection(RESERVED if self.form in ("dict", "record") else ())

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.own_names)

    def parts(self, item: Any) -> Mapping[str, Any]:
        """Return the parts of an item by name. Raises BadValue if it has another form."""
        if type(item) is dict and self.form == "dict" and tuple(item) == self.names:
            return item  # comparing forms would take a tenth of the time of saving a small item
        form = ItemForm.of(item)
        if form.form != self.form or set(form.names) != set(self.names):
            raise BadValue(f"is {form.description}, expected {self.description}")
        if self.form == "dict":
            return item  # type: ignore[no-any-return]
        if self.form == "record":
            return {"key": item.key, "label": item.label, "image": item.image, **item.columns}
        return dict(zip(self.names, [item] if self.form == "value" else item, strict=True))

    @property
    def description(self) -> str:
        """The form in words, for messages."""
        if self.form == "value":
            return "a bare value"
        if self.form in ("tuple", "list"):
            return f"a {self.form} of {len(self.names)}"
        return f"a {self.form} of {', '.join(sorted(self.names)) or 'nothing'}"

    def item(self, key: str, label: int, image: bytes, values: Sequence[Any]) -> Any:
        """Return the item with these ``values`` of :attr:`columns`."""
        match self.form:
            case "tuple":
                return tuple(values)
            case "list":
                return list(values)
            case "value":
                return values[0]
            case "record":
                columns = dict(zip(self.columns, values, strict=True))
                record = Record(key, label, image)
                return ColumnRecord.of(record, columns) if columns else record
        parts = {"key": key, "label": label, "image": image} | dict(zip(self.columns, values, strict=True))
        return {name: parts[name] for name in self.names}

    def to_json(self) -> dict[str, Any]:
        """Return the form for a manifest's ``source``."""
        form: dict[str, Any] = {"items": self.form, "names": list(self.names)}
        if self.is_named:
            form["labels"] = "names"
        return form | ({"classes": list(self.classes)} if self.classes else {})

    @classmethod
    def of_manifest(cls, source: Mapping[str, Any]) -> ItemForm | None:
        """Return the form in a manifest's ``source``; None if it is not of items. Raises ManifestDamaged."""
        if "items" not in source:
            return None
        form, names, classes = source["items"], source.get("names", ""), source.get("classes", [])
        if form not in FORMS or not matches(names, [str]) or not matches(classes, [str]):
            raise ManifestDamaged("does not state the form of its items; save them again")
        return cls(form, tuple(names), source.get("labels") == "names", tuple(classes))
