"""The examination of a dataset: its content, also compared with another dataset's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError, printable
from shardprep.formats.images.decode import png_of
from shardprep.formats.reports.duplicates import Duplicates, duplicates, shared
from shardprep.formats.reports.observations import (
    KINDS,
    OTHER,
    THIS,
    RecordNames,
    chosen,
    contact_sheets,
    index_statistics,
    observations,
)
from shardprep.formats.reports.pixels import EXTREMES, ImageReading, thumbnail
from shardprep.formats.runtime.files import save_bytes, user_path
from shardprep.formats.runtime.progress import Progress, shown
from shardprep.formats.runtime.workers import WorkerPool, usable_cpus
from shardprep.formats.shards.dataset import Dataset
from shardprep.formats.shards.manifest import QUARANTINE_NAME
from shardprep.formats.shards.summary import class_counts, inspect
from shardprep.formats.verification.checks import quarantined


@dataclass(frozen=True)
class Examination:
    """The findings of a dataset's examination.

    ``found`` is a JSON object of everything on the page except the pictures of single images, which it names
    by record number. ``pictures`` has these as small JPEG files, by ("this" or "other", record number).
    """

    found: dict[str, Any]
    pictures: Mapping[tuple[str, int], bytes]

    def __repr__(self) -> str:
        about, seen = self.found["dataset"], self.found["observations"]
        return f"<Examination of {about['path']!r}: {about['records']:,} records, {len(seen)} observations>"

    def to_json(self) -> dict[str, Any]:
        """Return the object ``found``."""
        return self.found

    def to_html(self) -> str:
        """Return the page: one self-contained file that makes no request and runs no script."""
        from shardprep.formats.reports.pages import page  # start-up time: Jinja

        about = self.found["dataset"]
        pictures = {f"{which}:{record}": data for (which, record), data in self.pictures.items()}
        title = f"{about['path']}: {about['split']}, {about['records']:,} records"
        mean = self.found["pixels"]["mean_image"]
        png = None if mean is None else png_of(np.array(mean, np.uint8))
        return page("dataset", title=title, found=self.found, pictures=pictures, mean=png)

    def findings(self) -> dict[str, Any]:
        """Return the records to leave out of ``Loader(records=…)``, as a JSON object.

        ``leave_out`` has record numbers by kind of finding: all ``damaged``, ``leaks`` and ``suspects``; of
        ``equal bytes`` and ``look alike`` all but the first; and those of each oddity. ``partial`` lists the
        kinds for which only some images were examined.
        """
        about, against = self.found["dataset"], self.found["against"]
        seen = {one["kind"]: one for one in self.found["observations"]}
        kinds = [kind for kind in KINDS if kind not in ("empty classes", "quarantined")]
        return {
            "dataset": about["path"],
            "root": about["root"],
            "records": about["records"],
            "against": None if against is None else {"dataset": against["path"], "root": against["root"]},
            "looked_at": self.found["looked_at"],
            "partial": [kind for kind in kinds if kind in seen and seen[kind]["is_partial"]],
            "leave_out": {kind: list(seen[kind]["leave_out"]) if kind in seen else [] for kind in kinds},
        }

    def save_findings(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`findings` to a JSON file, as :meth:`save` writes the page."""
        save_bytes(user_path(path), json.dumps(self.findings()).encode())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, replaced atomically.

        Raises OperationError if ``path`` is a folder or a device, OSError.
        """
        save_bytes(user_path(path), self.to_html().encode())


def shown_in(value: Any) -> Iterator[tuple[str, int]]:
    """Yield the records that a JSON object names at any depth."""
    if isinstance(value, dict):
        if value.keys() >= {"dataset", "record", "key"}:
            yield value["dataset"], value["record"]
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for part in value:
        yield from shown_in(part)


MOST_LISTED = 50  # archives, and shards; all are counted
MOST_CLASSES_LISTED = 20


def custody(dataset: Dataset, key: str | None = None) -> dict[str, Any]:
    """Return the chain from the source to the root, as a JSON object, with one record as an example.

    This is the record with the ``key``, or the first one. Raises UsageError for an unknown key.
    """
    manifest, shards = dataset.manifest, dataset.manifest.shards
    archives, checked = manifest.source.get("archives"), manifest.archive_md5
    named = [one for one in archives if isinstance(one, dict)] if isinstance(archives, list) else []
    number, example = 0, None
    if key is not None:
        found = np.flatnonzero(dataset.index["key"] == key.encode("utf-8", "surrogatepass"))
        if not len(found):
            raise UsageError(f"has no record with the key {printable(key, 200)!r}", path=dataset.path)
        number = int(found[0])
    if len(dataset):
        row = dataset.index[number]
        shard = shards[int(row["shard"])]
        example = {
            "record": number,
            "key": row["key"].decode("utf-8", "replace"),
            "shard": shard.name,
            "sha256": shard.sha256,
            "ordinal": int(row["ordinal"]),
            "crc32c": f"{int(row['crc32c']):08x}",
        }
    return {
        "layout": manifest.source["layout"],
        "archives": len(named),
        "first_archives": [
            {
                "name": str(one.get("name")),
                "size": size if isinstance(size := one.get("size"), int) else None,
                "md5": checked.get(str(one.get("name"))),
            }
            for one in named[:MOST_LISTED]
        ],
        "in_place": manifest.archive.name if manifest.archive else None,
        "example": example,
        "content_root": manifest.content_root,
        "shards": len(shards),
        "first_shards": [shard.to_json() for shard in shards[:MOST_LISTED]],
        "writer": {str(name): str(value) for name, value in manifest.writer.items()},
        "plan": str(manifest.plan.get("sha256")),
        "root": manifest.root,
    }


def comparison(dataset: Dataset, other: Dataset, across: Duplicates) -> dict[str, Any]:
    """Compare two datasets with the shared images ``across``; return a JSON object.

    ``unbalanced`` lists the common classes whose shares differ by the largest ratios.
    """
    mine, theirs = _shares(dataset), _shares(other)
    common = sorted(mine.keys() & theirs.keys())
    ratios = {
        name: max(mine[name][1], theirs[name][1]) / min(mine[name][1], theirs[name][1]) for name in common
    }
    unbalanced = sorted((name for name in common if ratios[name] > 1), key=lambda name: -ratios[name])
    return {
        "path": os.fspath(other.path),
        "split": other.manifest.split,
        "records": len(other),
        "root": other.manifest.root,
        "common_classes": len(common),
        "missing_there": len(mine.keys() - theirs.keys()),
        "missing_here": len(theirs.keys() - mine.keys()),
        "unbalanced": [
            {
                "name": name,
                "images": mine[name][0],
                "other_images": theirs[name][0],
                "share": mine[name][1],
                "other_share": theirs[name][1],
            }
            for name in unbalanced[:MOST_CLASSES_LISTED]
        ],
        "equal_images": len(np.unique(across.exact["first"])),
        "similar_images": len(np.unique(across.near["first"])),
    }


def _shares(dataset: Dataset) -> dict[str, tuple[int, float]]:
    """Return each nonempty class's number of images, and their share of all."""
    counts = {each.name: each.images for each in class_counts(dataset) if each.images}
    total = sum(counts.values())
    return {name: (count, count / total) for name, count in counts.items()}


def report(
    dataset: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    against: str | os.PathLike[str] | None = None,
    pixels: str = "sample",
    classes: Sequence[str] = (),
    record: str | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Examination:
    """Examine a dataset, and write a page about it. The result is the same for any number of workers.

    Damaged images and shards are observations, not errors.

    Args:
        dataset: The dataset's folder.
        output: File of the page, replaced atomically. None writes no page; the result has ``save``.
        against: The folder of another dataset to compare with: shared images, and the balance of classes.
        pixels: The images to read: "none", "sample" (at most 4,096 of each dataset are decoded, and the bytes
            of at most 8,192 more compared) or "all" (0.5 to 1.5 ms of CPU and 57 bytes of memory each).
        classes: Names of classes to show many images of; empty shows a few images of up to 24 classes.
        record: Key of the record whose provenance is shown, from its checksum to the root; None is the first.
        seed: Selects the sample and the images shown.
        workers: Number of processes that decode; None is one per usable CPU, 0 decodes in one other process.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The findings.

    Raises:
        UsageError: ``dataset`` is a folder of splits, or ``pixels``, a class or the key is unknown.
        ManifestDamaged, UnknownVersion: A manifest cannot be read.
        OperationError: A process fails, or ``output`` is a folder or a device.
        OSError: A file cannot be read or written.
    """
    with ExitStack() as stack:
        paths = [dataset] if against is None else [dataset, against]
        opened = [stack.enter_context(Dataset(path)) for path in paths]
        this, names = opened[0], RecordNames(opened)
        indexes = [one.index if one.manifest.has_images else one.index[:0] for one in opened]
        # raises UsageError before anything is read
        proof = custody(this, record)
        choices, looked_at = chosen(indexes, pixels, seed)
        sheets = contact_sheets(names, classes, seed) if len(indexes[0]) else []
        count = max(1, usable_cpus() if workers is None else workers)
        reading = ImageReading(stack.enter_context(WorkerPool(count)), count, shown(progress))
        statistics, *their = (
            reading.statistics(one, *choice) for one, choice in zip(opened, choices, strict=True)
        )
        codes, across = statistics.codes, None
        for other in their:
            other_codes = other.codes
            other_codes["record"] += len(this)
            across = shared(codes, other_codes)
        skipped = quarantined(this.path) if this.manifest.table(QUARANTINE_NAME) else []
        found = {
            "dataset": inspect(this).to_json(),
            "looked_at": looked_at,
            "classes": [asdict(each) for each in class_counts(this)],
            "index": index_statistics(indexes[0], len(this.classes), seed),
            "sheets": sheets,
            "custody": proof,
            "pixels": statistics.to_json(),
            "extremes": {
                name: [names.shown(number) | {"value": value} for value, number in statistics.extremes(name)]
                for name in EXTREMES
            },
            "observations": observations(names, looked_at, statistics, duplicates(codes), across, skipped),
            "against": comparison(this, opened[1], across) if across else None,
        }
        pictures: dict[tuple[str, int], bytes] = {}
        if looked_at["decoded"]:
            named = set(shown_in(found))
            for which, one in zip((THIS, OTHER), opened, strict=False):
                records = np.array(sorted(number for where, number in named if where == which), np.int64)
                made = reading.each("pictures of", thumbnail, one, records)
                pictures |= {(which, number): picture for number, picture in made.items()}
    examined = Examination(found, pictures)
    if output is not None:
        examined.save(output)
    return examined
