"""``prep export``: write a dataset in the format of another loader."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shardprep.cli.console.options import (
    ANY_PATH,
    FOLDER,
    ByteSize,
    examples,
    json_option,
    progress_option,
    workers_option,
)
from shardprep.cli.console.output import print_json, say
from shardprep.cli.console.progress import Form, progress_in
from shardprep.formats import Exported
from shardprep.formats import export as export_dataset
from shardprep.formats.export.registry import FORMATS
from shardprep.formats.system.sizes import count_of, size


@click.command(
    short_help="Write datasets in the format of another loader.",
    epilog=examples(
        "export shards tars --to webdataset --shard-size 1GB",
        "export shards/train images --to folders",
    ),
)
@click.argument("dataset", type=FOLDER)
@click.argument("output", type=ANY_PATH)
@click.option("--to", type=click.Choice(tuple(FORMATS)), required=True, help="The format.")
@click.option(
    "--shard-size",
    type=ByteSize(),
    default="256MiB",
    show_default=True,
    help="Bytes of images and columns per file.",
)
@workers_option
@progress_option
@json_option
def export(
    dataset: Path,
    output: Path,
    to: str,
    shard_size: int,
    workers: int | None,
    form: Form,
    as_json: bool,
) -> None:
    """Write DATASET, or each split in that folder, to OUTPUT in the format of another loader.

    Images stay as they are, and each is checked. Interrupted in any way, the same command finishes the
    job, and the result is byte-identical. A finished export is compared with what was written.
    """
    done = export_dataset(
        dataset, output, to=to, shard_size=shard_size, workers=workers, progress=progress_in(form)
    )
    if as_json:
        print_json({"splits": [_for_machines(one) for one in done]})
        return
    for one in done:
        state = " (was complete, and is intact)" if one.already_complete else ""
        files = count_of(len(one.files), "file" if to != "folders" else "group")
        say(f"{one.path}: {count_of(one.records, 'image')}, {_size(one)} in {files} of {to}{state}")


def _size(done: Exported) -> str:
    return size(sum(file.size for file in done.files))


def _for_machines(done: Exported) -> dict[str, Any]:
    return asdict(done) | {"path": str(done.path), "files": [file.to_json() for file in done.files]}
