"""``prep publish``: copy a finished dataset to object storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardprep.cli.console.options import FOLDER, examples, json_option, progress_option, transfer_options
from shardprep.cli.console.output import print_fields, print_json, say, say_next
from shardprep.cli.console.progress import Form, progress_in
from shardprep.formats import PublishedDataset
from shardprep.formats import publish as publish_datasets
from shardprep.formats.system.sizes import count_of, size


@click.command(
    short_help="Copy datasets to object storage, verified.",
    epilog=examples(
        "publish shards s3://bucket/shards",
        "publish shards/train gs://bucket/shards/train --at-once 8",
    ),
)
@click.argument("folder", type=FOLDER)
@click.argument("url")
@transfer_options(at_once=4, timeout_s=120, without="an answer")
@progress_option
@json_option
def publish(folder: Path, url: str, form: Form, as_json: bool, **chosen: Any) -> None:
    """Copy the dataset in FOLDER, or each split in it, to URL. Each byte is verified there.

    URL is s3://, gs://, az:// or file://; credentials are found in the environment. The manifest comes
    last. Interrupted in any way, the same command goes on; what is there and right is kept.
    """
    done = publish_datasets(folder, url, progress=progress_in(form), **chosen)
    if as_json:
        print_json({"splits": [_for_machines(one) for one in done]})
        return
    for one in done:
        _print(one)
    say_next("fetch", url, "COPY")


def _print(done: PublishedDataset) -> None:
    manifest = done.manifest
    sent, kept = (size(done.manifest.bytes_of(names)) for names in (done.uploaded, done.kept))
    state = f"{sent} uploaded" + (f", {kept} were there" if done.kept else "")
    shards = count_of(len(manifest.shards), f"{manifest.container.upper()} shard")
    before = " (was complete)" if done.already_complete else ""
    say(f"{done.url}: {count_of(manifest.records, 'image')} in {shards}, all intact: {state}{before}")
    print_fields({"root": manifest.root})


def _for_machines(done: PublishedDataset) -> dict[str, Any]:
    return {
        "url": done.url,
        "split": done.manifest.split,
        "records": done.manifest.records,
        "already_complete": done.already_complete,
        "uploaded": list(done.uploaded),
        "uploaded_bytes": done.manifest.bytes_of(done.uploaded),
        "kept": list(done.kept),
        "kept_bytes": done.manifest.bytes_of(done.kept),
        "root": done.manifest.root,
    }
