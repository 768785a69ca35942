"""``prep inspect``: summarise a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from shardprep.cli.commands.looking.report import Reporting
from shardprep.cli.console.options import (
    ANY_PATH,
    FOLDER_OR_URL,
    CacheOptions,
    cache_options,
    check_replaced,
    examples,
    json_option,
)
from shardprep.cli.console.output import print_fields, say
from shardprep.cli.console.splits import DatasetWork
from shardprep.formats import Summary, open_dataset, summarise
from shardprep.formats.dataset.column_summary import ColumnSummary
from shardprep.formats.dataset.splits import is_collection
from shardprep.formats.dataset.summary import ClassCount, CropReadySummary, class_counts
from shardprep.formats.printable import printable
from shardprep.formats.records.stored_order import GIVEN, GIVEN_SHUFFLED
from shardprep.formats.system.sizes import count_of, size


@click.command(
    short_help="Sum up datasets: counts, classes, sizes, oddities.",
    epilog=examples(
        "inspect shards",
        "inspect s3://bucket/train --cache /nvme/cache",
        "inspect shards/train --classes --html report.html",
    ),
)
@click.argument("dataset", type=FOLDER_OR_URL)
@click.option("--classes", is_flag=True, help="Also list the classes: label, images, name, words.")
@click.option("--html", type=ANY_PATH, metavar="FILE", help="Also write the page of prep report.")
@cache_options
@json_option
@click.pass_context
def inspect(
    ctx: click.Context,
    dataset: Path | str,
    classes: bool,
    html: Path | None,
    through: CacheOptions,
    as_json: bool,
) -> None:
    """Say what DATASET is: counts, bytes, classes, sizes, order, roots.

    Of a folder of splits, or of a collection, it sums up each of them.
    """
    through.check(dataset)
    check_replaced(html)
    ctx.exit(Inspecting(classes, through, _pages_of(dataset, html)).run(dataset, as_json=as_json))


def _pages_of(dataset: Path | str, html: Path | None) -> Reporting | None:
    if html is None:
        return None
    if isinstance(dataset, str):
        raise click.UsageError("--html is for a DATASET in a folder: prep fetch brings one there")
    if is_collection(dataset):
        raise click.UsageError(f"{dataset} is a collection; of --html give its parts, one by one")
    return Reporting(html).of(dataset)


class Inspected(NamedTuple):
    """The summary of a dataset, and its classes and the file of its page if they were asked for."""

    summary: Summary
    classes: list[ClassCount] | None
    page: Path | None


@dataclass(frozen=True)
class Inspecting(DatasetWork[Inspected]):
    """The summary of datasets, and their pages if they are wanted."""

    collections = "by part"

    classes: bool
    through: CacheOptions
    pages: Reporting | None

    def result(self, dataset: Path | str) -> Inspected:
        page = self._page_of(dataset)
        with open_dataset(dataset, cache=self.through.cache, cache_limit=self.through.cache_limit) as opened:
            return Inspected(summarise(opened), class_counts(opened) if self.classes else None, page)

    def _page_of(self, dataset: Path | str) -> Path | None:
        if self.pages is None or isinstance(dataset, str):
            return None
        self.pages.result(dataset)
        return self.pages.page_of(dataset)

    def show(self, result: Inspected) -> None:
        summary = result.summary
        noun = "image" if summary.has_images else "record"
        say(f"{summary.path}: {summary.split} split, {count_of(summary.records, noun)}")
        print_fields(_fields(summary))
        for line in class_lines(result.classes or ()):
            say(line)
        if result.page:
            say(f"page: {result.page}")

    def to_json(self, result: Inspected) -> dict[str, Any]:
        listed = {} if result.classes is None else {"class_counts": [asdict(c) for c in result.classes]}
        page = {} if result.page is None else {"page": str(result.page)}
        return result.summary.to_json() | listed | page

    def summary(self, results: Mapping[str, Inspected]) -> str:
        found = [result.summary for result in results.values()]
        images = count_of(sum(summary.records for summary in found), "image")
        total = size(sum(summary.disk_bytes for summary in found))
        return f"{', '.join(results)}: {images}, {total} on disk"


def class_lines(classes: Sequence[ClassCount]) -> Iterator[str]:
    """Yield the classes as a table."""
    if classes:
        width = max(len(printable(found.name)) for found in classes)
        yield f"  {'label':>7}{'images':>11}  {'name':{width}}  words"
    for found in classes:
        name = printable(found.name)
        yield f"  {found.label:>7}{found.images:>11,}  {name:{width}}  {found.words or ''}".rstrip()


def _fields(summary: Summary) -> dict[str, object]:
    low, high = summary.per_class
    labelled = summary.classes_present > 0
    return {
        "classes": f"{summary.classes_present:,} of {summary.classes:,}, {low:,} to {high:,} images each"
        if labelled
        else "none: the split has no labels",
        "bytes": f"{size(summary.image_bytes)} of images, {_on_disk(summary)}",
        **(_images(summary) if summary.has_images else {"images": "none"}),
        **{f"column {column.name}": _column(column) for column in summary.columns},
        "order": _order(summary),
        "boxes": f"{summary.boxes:,}" if summary.boxes else "none",
        "source": summary.source + (", partial" if summary.partial else ""),
        "skipped": count_of(summary.skipped, "bad image"),
        "content_root": summary.content_root,
        "root": summary.root,
    }


def _images(summary: Summary) -> dict[str, object]:
    pixels, bytes_ = summary.images, summary.images["length"]
    return {
        "pixels": f"median {pixels['width'][1]}x{pixels['height'][1]}, largest side "
        f"{max(pixels['width'][3], pixels['height'][3])}",
        "image bytes": f"median {size(bytes_[1])}, 5 % under {size(bytes_[0])}, 5 % over {size(bytes_[2])}",
        "kinds": ", ".join(f"{n:,} {kind}" for kind, n in summary.kinds.items()),
        "oddities": ", ".join(f"{n:,} {kind}" for kind, n in summary.oddities.items() if n) or "none",
        **({"crop-ready": _crop_ready(summary.crop_ready)} if summary.crop_ready else {}),
    }


def _column(column: ColumnSummary) -> str:
    parts = [column.kind, f"{size(column.bytes)} ({size(column.disk_bytes)} on disk)"]
    if column.lengths:
        low, middle, high, _ = column.lengths
        parts.append(f"median {size(middle)}, 5 % under {size(low)}, 5 % over {size(high)}")
    if column.classes:
        parts.append(count_of(column.classes, "class"))
    if column.per_class:
        low, high = column.per_class
        parts.append(f"{low:,} to {high:,} records each")
    if column.unlabelled:
        parts.append(f"{column.unlabelled:,} without")
    return ", ".join(parts)


def _on_disk(summary: Summary) -> str:
    shards = count_of(summary.shards, f"{summary.container.upper()} shard")
    if summary.archive is None:
        return f"{size(summary.disk_bytes)} on disk in {shards}"
    return f"in place in {printable(summary.archive)}, and {size(summary.disk_bytes)} of tables"


def _crop_ready(found: CropReadySummary) -> str:
    width, height = found.segment_pixels
    others = ", ".join(f"{n:,} {kind}" for kind, n in found.others.items()) or "none"
    lossy = (
        f", shrunk to {found.shorter_side} pixels at quality {found.quality}" if found.shorter_side else ""
    )
    return (
        f"{count_of(found.images, 'image')}{lossy}, segments of {width}x{height} pixels and "
        f"{found.segment_bytes:,} bytes (median), others: {others}"
    )


def _order(summary: Summary) -> str:
    shuffled = f"shuffled, seed {summary.seed}"
    orders = {
        "shuffled": shuffled,
        GIVEN_SHUFFLED: shuffled,
        GIVEN: "as the items were given",
        "archive": "as in the archive",
    }
    order = orders.get(summary.order, "by key")
    if summary.class_sorted:
        order += " (class after class: read in this order it trains badly)"
    return order
