"""``prep fetch``: copy a published dataset from object storage or a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardprep.cli.console.options import ANY_PATH, examples, json_option, progress_option, transfer_options
from shardprep.cli.console.output import print_fields, print_json, say, say_next
from shardprep.cli.console.progress import Form, progress_in
from shardprep.formats import FetchedDataset
from shardprep.formats import fetch as fetch_dataset
from shardprep.formats.system.sizes import count_of, size

MOST_SHARDS = 1_000_000


class ShardNumbers(click.ParamType[list[int]]):
    """Numbers and ranges of shards, such as 0-9,12."""

    name = "shards"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            ranges = [_range_of(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not numbers such as 0-9 or 3,5,7", param, ctx)
        return sorted({number for numbers in ranges for number in numbers})


def _range_of(text: str) -> range:
    """Return the numbers from the first to the last, both included. Raises ValueError."""
    first, dash, last = text.partition("-")
    numbers = range(int(first), int(last if dash else first) + 1)
    if not 0 < len(numbers) <= MOST_SHARDS:
        raise ValueError
    return numbers


@click.command(
    short_help="Copy datasets from object storage or a server, verified.",
    epilog=examples(
        "fetch s3://bucket/shards shards",
        "fetch https://host/shards/train train --shards 0-9",
    ),
)
@click.argument("url")
@click.argument("folder", type=ANY_PATH)
@click.option("--shards", type=ShardNumbers(), metavar="NUMBERS", help="Only these, such as 0-9 or 3,5,7.")
@transfer_options(at_once=8, timeout_s=30, without="a byte")
@progress_option
@json_option
def fetch(url: str, folder: Path, form: Form, as_json: bool, **chosen: Any) -> None:
    """Copy the dataset at URL, or each split in that folder, to FOLDER. Each byte is verified.

    URL is s3://, gs://, az://, https://, http:// or file://; credentials are found in the environment.
    Interrupted in any way, the same command goes on. What is there and right is kept, what is damaged
    is fetched anew.
    """
    done = fetch_dataset(url, folder, progress=progress_in(form), **chosen)
    if as_json:
        print_json({"splits": [_for_machines(one) for one in done]})
        return
    for one in done:
        _print(one)
    if all(one.complete for one in done):
        say_next("inspect", folder)
    else:
        say("next: the same command without --shards; it fetches what is missing, and makes it a dataset")


def _print(done: FetchedDataset) -> None:
    manifest = done.manifest
    fetched, kept = (size(done.manifest.bytes_of(names)) for names in (done.fetched, done.kept))
    state = f"{fetched} fetched" + (f", {kept} were there" if done.kept else "")
    if done.complete:
        shards = count_of(len(manifest.shards), f"{manifest.container.upper()} shard")
        say(f"{done.path}: {count_of(manifest.records, 'image')} in {shards}, all intact: {state}")
        print_fields({"root": manifest.root})
    else:
        files = f"{len(done.fetched) + len(done.kept):,} of {count_of(len(manifest.files), 'file')}"
        say(f"{done.path}: {files}, each intact: {state}; not a dataset yet")


def _for_machines(done: FetchedDataset) -> dict[str, Any]:
    return {
        "path": str(done.path),
        "url": done.url,
        "split": done.manifest.split,
        "records": done.manifest.records,
        "complete": done.complete,
        "fetched": list(done.fetched),
        "fetched_bytes": done.manifest.bytes_of(done.fetched),
        "kept": list(done.kept),
        "kept_bytes": done.manifest.bytes_of(done.kept),
        "root": done.manifest.root,
    }
