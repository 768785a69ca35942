"""Datasets with columns, converted from a source in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.conversion.convert import build_shards
from shardprep.formats.conversion.plan import PlanOptions, make_plan
from shardprep.formats.conversion.prepare import PreparedSplit
from shardprep.formats.conversion.shard import finish
from shardprep.formats.records.record import LabelSpace
from shardprep.formats.records.schema import Field, Schema
from shardprep.formats.runtime.jobs import JobRunner
from shardprep.formats.runtime.work_folder import WorkFolder
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.sources.listing import EntryTable
from shardprep.formats.sources.source import ByteReader, Listing, Problems
from support.image_files import JPEG

EVERY_KIND = Schema(
    [
        Field("mask", "image"),
        Field("sound", "bytes"),
        Field("caption", "text"),
        Field("about", "json"),
        Field("age", "int"),
        Field("score", "float"),
        Field("colour", "label", ("blue", "red")),
        Field("tags", "labels", ("big", "new", "old")),
        Field("boxes", "float32[*,4]"),
        Field("vector", "float16[3]"),
    ]
)


@dataclass(frozen=True)
class ListReader(ByteReader):
    """Reader of images and values in memory; an entry's offset is its place."""

    images: tuple[bytes, ...]
    encoded: tuple[tuple[bytes, ...], ...]

    def read(self, entry: np.void) -> bytes:
        return self.images[entry["offset"]]

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        return self.encoded[entry["offset"]]

    def location_of(self, entry: np.void) -> str:
        return f"item {entry['offset']}"

    def open(self) -> AbstractContextManager[ListReader]:
        return nullcontext(self)


def every_kind(number: int) -> dict[str, Any]:
    """Values for EVERY_KIND that differ from record to record."""
    return {
        "mask": JPEG,
        "sound": bytes(range(number % 200)),
        "caption": f"grün {number}",
        "about": {"number": number, "parts": [None, True]},
        "age": number - 3,
        "score": number / 7,
        "colour": number % 3 - 1,
        "tags": [number % 3],
        "boxes": np.full((number % 4, 4), number, np.float32),
        "vector": np.arange(number, number + 3).astype(np.float16),
    }


def write_columns(
    output: Path,
    records: int = 12,
    schema: Schema = EVERY_KIND,
    *,
    image: bytes | None = JPEG,
    options: PlanOptions | None = None,
    instead: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Write a dataset of so many records with the values of :func:`every_kind`.

    The encoded values of the record ``k0003`` are those of ``instead`` where it has any.
    """
    own = {} if image is None else {"image": image}
    samples = [every_kind(number) | own for number in range(records)]
    options = options or PlanOptions(shard_size=4 * (len(image or b"") + 1000))
    return write_samples(output, samples, schema, options=options, instead=instead)


def write_samples(
    output: Path,
    samples: list[dict[str, Any]],
    schema: Schema,
    *,
    options: PlanOptions | None = None,
    instead: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Write a dataset of dicts of an image, if there are images, and of the values of the schema.

    Keys are k0000, k0001 and so on, labels 0 and 1 in turn.
    """
    encoded = [tuple(f.codec.encode(s[f.name]) for f in schema) for s in samples]
    images = tuple(sample.get("image", b"") for sample in samples)
    if instead:
        encoded[3] = tuple(instead.get(f.name, value) for f, value in zip(schema, encoded[3], strict=True))
    table = EntryTable(output, Problems())
    for number, values in enumerate(encoded):
        size = sum(map(len, (*values, images[number])))
        table.append(f"k{number:04}", number % 2, length=size, offset=number)
    listing = Listing(
        "train", "memory", table.finish(), LabelSpace.of(["a", "b"]),
        ListReader(images, tuple(encoded)), schema=schema, has_images=any(images),
    )  # fmt: skip
    plan = make_plan(listing, options or PlanOptions(order="key"))
    prepared = PreparedSplit(output, plan, None, plan.shards)
    with WorkFolder(output) as work_folder:
        return finish(work_folder, prepared, build_shards(prepared, work_folder, JobRunner(workers=0)))
