"""``prep join``: add columns to a finished dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardprep.cli.console.options import FOLDER, examples, json_option, progress_option, workers_option
from shardprep.cli.console.output import print_fields, print_json, say, say_next
from shardprep.cli.console.progress import Form, progress_in
from shardprep.formats import Joined, UsageError
from shardprep.formats import join as join_columns
from shardprep.formats.system.sizes import count_of


@click.command(
    short_help="Add columns to a finished dataset.",
    epilog=examples(
        "join shards/train --column mask=masks/train",
        "join shards/train --column age=ages.npy --column caption:text=captions.csv",
    ),
)
@click.argument("dataset", type=FOLDER)
@click.option(
    "--column",
    "columns",
    multiple=True,
    required=True,
    metavar="NAME[:KIND]=FROM",
    help="FROM is a dataset, a .npy file or a table with keys; FROM#COLUMN names a column of it. Repeatable.",
)
@workers_option
@progress_option
@json_option
def join(dataset: Path, columns: tuple[str, ...], workers: int | None, form: Form, as_json: bool) -> None:
    """Add columns to DATASET, without writing anything again that is there.

    Datasets and tables have one partner for each record, by key; the rows of an array are in the records'
    order. Interrupted in any way, the same command finishes the job. Repeated later, it builds the damaged
    files of these columns again.
    """
    done = join_columns(dataset, _by_name(columns), workers=workers, progress=progress_in(form))
    if as_json:
        print_json(_for_machines(done))
        return
    _print(done)
    say_next("verify", dataset)


def _by_name(columns: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in columns:
        name, _, origin = text.partition("=")
        if not origin or name in found:
            raise UsageError(f"expected NAME=FROM or NAME:KIND=FROM, each name once, not {text!r}")
        found[name] = origin
    return found


def _for_machines(done: Joined) -> dict[str, Any]:
    manifest = done.manifest
    return {
        "path": str(done.path),
        "records": manifest.records,
        "columns": {field.name: field.kind for field in manifest.schema},
        "added": list(done.added),
        "rebuilt": list(done.rebuilt),
        "content_root": manifest.content_root,
        "root": manifest.root,
    }


def _print(done: Joined) -> None:
    manifest = done.manifest
    state = "" if done.added or done.rebuilt else " (were joined already, and are intact)"
    say(
        f"{done.path}: {count_of(manifest.records, 'record')}, {count_of(len(manifest.schema), 'column')}{state}"
    )
    fields = {"columns": ", ".join(f"{field.name} ({field.kind})" for field in manifest.schema)}
    if done.added:
        fields["added"] = ", ".join(done.added)
    if done.rebuilt:
        fields["rebuilt"] = ", ".join(done.rebuilt)
    print_fields(fields | {"content_root": manifest.content_root, "root": manifest.root})
