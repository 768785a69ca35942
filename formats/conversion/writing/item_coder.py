"""The encoding of items: each becomes a record's key, label and image, and the values of its columns."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from shardprep.formats.columns.codec import BadValue, Codec, refused
from shardprep.formats.columns.found_schema import ExactCodec
from shardprep.formats.columns.item_form import ItemForm
from shardprep.formats.columns.numeric import number_of
from shardprep.formats.columns.plain import ImageCodec, TextCodec
from shardprep.formats.columns.schema import Schema
from shardprep.formats.errors import DataError
from shardprep.formats.records.labels import UNLABELLED, LabelSpace
from shardprep.formats.records.record import MAX_KEY_BYTES

KEY_DIGITS = 8
MAX_LABELS = 100_000  # of labels without names
LABEL_DIGITS = 5
LEAST_BYTES = 1024  # that an item counts as, because memory holds more of it than its values
_ADVICE = "schema= can be given to write_dataset and Flow.save"


class BadItem(DataError):
    """An item that does not fit the others, or the schema; ``number`` is its number from 0 on."""

    number = 0


class EncodedItem(NamedTuple):
    """An item as it is stored."""

    key: bytes
    label: int
    image: bytes
    values: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """The bytes of image and values, at least LEAST_BYTES."""
        return max(LEAST_BYTES, len(self.image) + sum(map(len, self.values)))


@dataclass(frozen=True)
class ItemCoder:
    """Encodes items of one form. Picklable.

    ``schema`` has the columns; ``is_found`` says that it was found from items, so that numbers must have
    exactly its types. ``classes`` are the names of the labels 0, 1, ..., empty for labels without names.
    """

    form: ItemForm
    schema: Schema
    is_found: bool
    classes: tuple[str, ...] = ()

    @property
    def has_images(self) -> bool:
        return "image" in self.form.own

    def encode(self, number: int, item: Any) -> EncodedItem:
        """Return the item of this number, encoded. Raises BadItem, which names number and column."""
        try:
            parts = self.form.parts(item)
            own = {name: self._part(name, parts[name], to) for name, to in self._own.items()}
            values = tuple([self._part(name, parts[name], encode) for name, encode in self._columns])
        except BadValue as error:
            raise bad_item(number, error.message) from error
        return EncodedItem(
            own.get("key") or number_key(number), own.get("label", UNLABELLED), own.get("image", b""), values
        )

    def _part(self, name: str, value: Any, encode: Callable[[Any], Any]) -> Any:
        try:
            return encode(value)
        except BadValue as error:
            raise BadValue(f"{name}: {error.message}") from error

    @cached_property
    def _columns(self) -> tuple[tuple[str, Callable[[Any], bytes]], ...]:
        codecs: Iterable[Codec] = (ExactCodec(f) if self.is_found else f.codec for f in self.schema)
        return tuple((f.name, codec.encode) for f, codec in zip(self.schema, codecs, strict=True))

    @cached_property
    def _own(self) -> dict[str, Callable[[Any], Any]]:
        every = {"key": key_of, "label": self._label, "image": image_of}
        return {name: encode for name, encode in every.items() if name in self.form.own}

    def _label(self, value: Any) -> int:
        """Return the stored label: the place of its name among the sorted names."""
        if isinstance(value, str) != self.form.is_named:
            raise refused(value, "the name of a class" if self.form.is_named else "a label")
        if self.classes:
            label = self._number_of_class(value)
            return label if label == UNLABELLED else self._sorted_place[label]
        label = UNLABELLED - 1 if isinstance(value, bool) else _index(value)
        if not UNLABELLED <= label < MAX_LABELS:
            raise refused(value, f"a label, which is -1 to {MAX_LABELS - 1} (without classes=)")
        return label

    def _number_of_class(self, value: Any) -> int:
        if isinstance(value, str) and value in self._number_of_name:
            return self._number_of_name[value]
        return number_of(value, self.classes, least=UNLABELLED)

    @cached_property
    def _number_of_name(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    @cached_property
    def _sorted_place(self) -> list[int]:
        places = {name: place for place, name in enumerate(sorted(self.classes))}
        return [places[name] for name in self.classes]

    def labels(self, largest: int) -> LabelSpace:
        """Return the label space of a dataset in which ``largest`` is the largest label."""
        numbers = (f"{label:0{LABEL_DIGITS}d}" for label in range(largest + 1))
        return LabelSpace.of(self.classes or numbers)


def number_key(number: int) -> bytes:
    """Return the key of an item that has none."""
    return b"%0*d" % (KEY_DIGITS, number)


def key_of(value: Any) -> bytes:
    """Return a key's bytes. Raises BadValue for what is no key."""
    data = TextCodec().encode(value)
    if not data or len(data) > MAX_KEY_BYTES or b"\0" in data:
        raise refused(value, f"a key, which has 1 to {MAX_KEY_BYTES} bytes and no NUL")
    return data


def image_of(value: Any) -> bytes:
    """Return an image's bytes. Raises BadValue for what is no encoded image."""
    try:
        return ImageCodec().encode(value)
    except BadValue as error:
        advice = "an image is an encoded file's bytes; give pixels and other bytes another name"
        raise BadValue(f"{error.message} ({advice})") from error


def _index(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise refused(value, "a label, or with classes= the name of one") from error


def bad_item(number: int, message: str) -> BadItem:
    """Return the error for an item."""
    error = BadItem(f"item {number}: {message}; {_ADVICE}")
    error.number = number
    return error


def digest_of(items: Sequence[EncodedItem]) -> str:
    """Return the SHA-256 of the first items, which tells other data from the same."""
    digest = hashlib.sha256()
    for item in items:
        for part in (item.key, str(item.label).encode(), item.image, *item.values):
            digest.update(len(part).to_bytes(8, "little") + part)
    return f"sha256:{digest.hexdigest()}"


def kept_of(form: ItemForm, first: Sequence[EncodedItem]) -> Mapping[str, Any]:
    """Return what the manifest keeps of the items in ``source``."""
    return form.to_json() | {"first": digest_of(first)}
