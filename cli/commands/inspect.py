"""``prep inspect``: summarise a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from shardprep.cli.console.options import FOLDER, json_option
from shardprep.cli.console.output import count_of, print_fields, say, size
from shardprep.cli.console.splits import DatasetWork
from shardprep.formats import Summary, open_dataset, summarise


@click.command()
@click.argument("dataset", type=FOLDER)
@json_option
@click.pass_context
def inspect(ctx: click.Context, dataset: Path, as_json: bool) -> None:
    """Say what DATASET, or each split in that folder, is: counts, bytes, classes, sizes, order, roots."""
    ctx.exit(Inspecting().run(dataset, as_json=as_json))


class Inspecting(DatasetWork[Summary]):
    """The summary of datasets."""

    def result(self, dataset: Path) -> Summary:
        with open_dataset(dataset) as opened:
            return summarise(opened)

    def show(self, result: Summary) -> None:
        say(f"{result.path}: {result.split} split, {count_of(result.records, 'image')}")
        print_fields(_fields(result))

    def to_json(self, result: Summary) -> dict[str, Any]:
        return result.to_json()

    def summary(self, results: Mapping[str, Summary]) -> str:
        found = results.values()
        images = count_of(sum(summary.records for summary in found), "image")
        total = size(sum(summary.disk_bytes for summary in found))
        return f"{', '.join(results)}: {images}, {total} on disk"


def _fields(summary: Summary) -> dict[str, object]:
    low, high = summary.per_class
    labelled = summary.classes_present > 0
    shards = count_of(summary.shards, f"{summary.container.upper()} shard")
    pixels, bytes_ = summary.images, summary.images["length"]
    fields: dict[str, object] = {
        "classes": f"{summary.classes_present:,} of {summary.classes:,}, {low:,} to {high:,} images each"
        if labelled
        else "none: the split has no labels",
        "bytes": f"{size(summary.image_bytes)} of images, {size(summary.disk_bytes)} on disk in {shards}",
        "pixels": f"median {pixels['width'][1]}x{pixels['height'][1]}, largest side "
        f"{max(pixels['width'][3], pixels['height'][3])}",
        "image bytes": f"median {size(bytes_[1])}, 5 % under {size(bytes_[0])}, 5 % over {size(bytes_[2])}",
        "oddities": ", ".join(f"{n} {kind}" for kind, n in summary.oddities.items() if n) or "none",
        "order": _order(summary),
        "boxes": f"{summary.boxes:,}" if summary.boxes else "none",
        "source": summary.source + (", partial" if summary.partial else ""),
        "skipped": count_of(summary.skipped, "bad image"),
        "content_root": summary.content_root,
        "root": summary.root,
    }
    return fields


def _order(summary: Summary) -> str:
    order = f"shuffled, seed {summary.seed}" if summary.order == "shuffled" else "by key"
    if summary.class_sorted:
        order += " (class after class: read in this order it trains badly)"
    return order
