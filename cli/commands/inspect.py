"""``prep inspect``: summarise a dataset."""

from __future__ import annotations

from pathlib import Path

import click

from shardprep.cli.console.options import FOLDER, json_option
from shardprep.cli.console.output import count_of, print_fields, print_json, say, size
from shardprep.formats import Summary, open_dataset, summarise


@click.command()
@click.argument("dataset", type=FOLDER)
@json_option
def inspect(dataset: Path, as_json: bool) -> None:
    """Say what DATASET is: counts, bytes, classes, sizes, oddities, order, roots."""
    with open_dataset(dataset) as opened:
        summary = summarise(opened)
    if as_json:
        print_json(summary.to_json())
    else:
        say(f"{dataset}: {summary.split} split, {count_of(summary.records, 'image')}")
        print_fields(_fields(summary))


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
        "kinds": ", ".join(f"{n:,} {kind}" for kind, n in summary.kinds.items()),
        "oddities": ", ".join(f"{n:,} {kind}" for kind, n in summary.oddities.items() if n) or "none",
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
