"""``prep index``: an index of the official tars, in which the images stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardprep.cli.console.options import (
    ANY_PATH,
    ByteSize,
    examples,
    json_option,
    progress_option,
    workers_option,
)
from shardprep.cli.console.progress import Form, progress_in
from shardprep.cli.reports.converted_report import show_converted
from shardprep.formats import ConvertOptions, PlanOptions
from shardprep.formats import convert as convert_source
from shardprep.formats.containers.registry import IN_PLACE
from shardprep.formats.conversion.building.plan import BAD_IMAGE_POLICIES
from shardprep.formats.records.stored_order import ARCHIVE_ORDER
from shardprep.formats.sources.listing.source import SPLITS


@click.command(
    short_help="Index the official tars, to train from them in place.",
    epilog=examples("index archives indexed", "index archives/ILSVRC2012_img_train.tar train --split train"),
)
@click.argument("archives", type=ANY_PATH)
@click.argument("output", type=ANY_PATH)
@click.option("--split", type=click.Choice(SPLITS), help="Index this split into OUTPUT itself.")
@click.option(
    "--shard-size", type=ByteSize(), default="1GiB", show_default=True, help="Image bytes per table."
)
@workers_option
@progress_option
@click.option(
    "--on-bad-image",
    type=click.Choice(BAD_IMAGE_POLICIES),
    default="fail",
    show_default=True,
    help="Stop and name the file, or leave it out and list it in quarantine.json.",
)
@click.option("--check-md5", is_flag=True, help="First read official archives whole and check their MD5.")
@click.option("--allow-partial", is_flag=True, help="Accept a wrong number of images, and record that.")
@click.option("--restart", is_flag=True, help="Discard what an interrupted run did.")
@json_option
def index(
    archives: Path,
    output: Path,
    split: str | None,
    shard_size: int,
    workers: int | None,
    form: Form,
    on_bad_image: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Index ARCHIVES in OUTPUT: a dataset per split, and the images stay where they are.

    ARCHIVES is one of the official tars, or the folder that holds them. Each is read once, and OUTPUT
    gets the places, labels and checksums of its images, and a link to it. A Loader takes OUTPUT/train as
    any dataset. Interrupted in any way, the same command goes on; after the archives were moved, it
    links and checks them.
    """
    plan_options = PlanOptions(
        container=IN_PLACE, shard_size=shard_size, order=ARCHIVE_ORDER, on_bad_image=on_bad_image
    )
    done = convert_source(
        archives,
        output,
        split=split,
        plan_options=plan_options,
        options=ConvertOptions(**chosen),
        workers=workers,
        progress=progress_in(form),
    )
    show_converted(done, output, as_json=as_json)
