"""``prep convert``: convert official archives or folders to verified shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import click

from shardprep.cli.console.cluster import cluster_executor, cluster_option
from shardprep.cli.console.options import (
    ANY_PATH,
    FOLDER,
    PATH_OR_URL,
    ByteSize,
    PartOfAll,
    examples,
    json_option,
    progress_option,
    workers_option,
)
from shardprep.cli.console.output import print_json
from shardprep.cli.console.progress import Form, progress_in
from shardprep.cli.reports.converted_report import show_converted
from shardprep.cli.reports.dry_run_report import print_dry_run
from shardprep.cli.reports.part_report import part_for_machines, print_part
from shardprep.formats import (
    ConvertOptions,
    PlanOptions,
    SourceOptions,
    convert_part,
    convert_to_url,
    plan_conversion,
)
from shardprep.formats import convert as convert_source
from shardprep.formats.containers.registry import CONTAINERS
from shardprep.formats.conversion.building.plan import BAD_IMAGE_POLICIES
from shardprep.formats.images.crop_ready.quality import DEFAULT_QUALITY
from shardprep.formats.records.stored_order import ORDERS
from shardprep.formats.sources.listing.source import SPLITS

T = TypeVar("T")


@click.command(
    short_help="Convert archives, folders or tensorpack's LMDB to shards.",
    epilog=examples(
        "convert archives shards",
        "convert photos shards --on-bad-image skip --decode-check",
        "convert scenes shards --pair mask=masks",
    ),
)
@click.argument("source", type=PATH_OR_URL)
@click.argument("output", type=PATH_OR_URL)
@click.option("--split", type=click.Choice(SPLITS), help="Convert this split into OUTPUT itself.")
@click.option(
    "--format",
    "container",
    type=click.Choice(CONTAINERS),
    default="lmdb",
    show_default=True,
    help="Container.",
)
@click.option(
    "--shard-size", type=ByteSize(), default="256MiB", show_default=True, help="Image bytes per shard."
)
@click.option(
    "--order",
    type=click.Choice(ORDERS),
    default="shuffled",
    show_default=True,
    help="Seeded permutation, or sorted by key.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of --order shuffled.")
@workers_option
@progress_option
@click.option(
    "--on-bad-image",
    type=click.Choice(BAD_IMAGE_POLICIES),
    default="fail",
    show_default=True,
    help="Stop and name the file, or leave it out and list it in quarantine.json.",
)
@click.option("--decode-check", is_flag=True, help="Also decode every image (ten times slower).")
@click.option(
    "--crop-ready", is_flag=True, help="Code JPEGs anew, without loss: training crops take 2/3 of the time."
)
@click.option(
    "--shorter-side",
    type=click.IntRange(min=1),
    metavar="PIXELS",
    help="Shrink larger images to this: lossy.",
)
@click.option(
    "--quality",
    type=click.IntRange(1, 100),
    default=DEFAULT_QUALITY,
    show_default=True,
    help="Of the JPEGs that --shorter-side makes.",
)
@click.option("--check-md5", is_flag=True, help="First read official archives whole and check their MD5.")
@click.option("--allow-partial", is_flag=True, help="Accept a wrong number of images, and record that.")
@click.option("--allow-network-fs", is_flag=True, help="Build LMDB on a network file system all the same.")
@click.option("--restart", is_flag=True, help="Discard what an interrupted conversion did.")
@click.option("--follow-symlinks", is_flag=True, help="Read what links in SOURCE point to, in SOURCE or not.")
@click.option(
    "--val-fraction",
    type=float,
    metavar="F",
    help="Take this part of each class of train for val, by --seed.",
)
@click.option("--root", type=FOLDER, help="Of a list: the folder its paths begin at.  [default: the list's]")
@click.option("--path-column", metavar="NAME", help="Of a CSV file or JSON lines: the column of paths.")
@click.option("--label-column", metavar="NAME", help="The column of labels.  [default: the usual names]")
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME:KIND[=HEADER]",
    help="Of metadata.csv or .jsonl: convert this column; repeatable.  [default: all, kinds guessed]",
)
@click.option(
    "--pair",
    "pairs",
    multiple=True,
    metavar="NAME=FOLDER",
    help="Convert images of a second folder, such as mask=masks, as a column; repeatable.",
)
@click.option("--coco", metavar="FILE", help="COCO's instances, relative to SOURCE.  [default: found]")
@click.option(
    "--part",
    type=PartOfAll(),
    metavar="I/N",
    help="Build one of N shares of the shards, on any machine; without --part, finish.",
)
@cluster_option
@click.option(
    "--scratch",
    type=ANY_PATH,
    metavar="DIR",
    help="Where shards are built for OUTPUT in a bucket.  [default: in ~/.cache/shardprep]",
)
@click.option(
    "--dry-run", is_flag=True, help="Write nothing: say all problems, and what the conversion would take."
)
@json_option
@click.pass_context
def convert(
    ctx: click.Context,
    /,
    source: Path | str,
    output: Path | str,
    split: str | None,
    part: tuple[int, int] | None,
    cluster: str | None,
    scratch: Path | None,
    dry_run: bool,
    form: Form,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Convert SOURCE to shards in OUTPUT: one folder per split, or --split into OUTPUT itself.

    OUTPUT is a folder, or a place in a bucket (s3://, gs://, az://, file://), to which each shard is
    uploaded as soon as it is built.

    SOURCE is what you have: the official tars (a tar, or the folder that holds them), an extracted
    tree, Kaggle's tree, class folders, images with a table, folders of pairs or COCO's annotations
    beside them, an LMDB of tensorpack's LMDBSerializer, shards of WebDataset, TFRecord or Parquet files,
    a list of paths and labels (text, CSV, JSON lines), or converted shards; it is read in place.
    A URL (s3://, gs://, az://, https://, file://) as SOURCE is a folder of official tars, read by ranges.

    Interrupted in any way, the same command finishes the job, and the result is byte-identical.
    """
    _refuse_together(output, part=part, cluster=cluster, scratch=scratch, dry_run=dry_run)
    arguments = {
        "split": split,
        "plan_options": _options_of(PlanOptions, chosen),
        "options": _options_of(ConvertOptions, chosen),
        "source_options": _options_of(SourceOptions, chosen),
        "workers": chosen["workers"],
        "progress": progress_in(form),
    }
    if isinstance(output, str):
        show_converted(convert_to_url(source, output, scratch=scratch, **arguments), output, as_json=as_json)
    elif dry_run:
        planned = plan_conversion(source, output, part=part, **arguments)
        print_json(planned.to_json()) if as_json else print_dry_run(planned)
        ctx.exit(planned.exit_code)
    elif part:
        built = convert_part(source, output, part, **arguments)
        print_json(part_for_machines(built, part)) if as_json else print_part(built)
    else:
        with cluster_executor(cluster) as executor:
            done = convert_source(source, output, executor=executor, **arguments)
        show_converted(done, output, as_json=as_json)


def _options_of(kind: Callable[..., T], chosen: Mapping[str, Any]) -> T:
    """Return options from the parameters of the command that have their names."""
    return kind(**{name: chosen[name] for name in signature(kind).parameters if name in chosen})


def _refuse_together(
    output: Path | str,
    *,
    part: tuple[int, int] | None,
    cluster: str | None,
    scratch: Path | None,
    dry_run: bool,
) -> None:
    """Raise UsageError for options that have no meaning together."""
    if part and cluster:
        raise click.UsageError(
            "--part is for machines without a cluster's scheduler; leave out one of the two"
        )
    if isinstance(output, str) and (part or cluster or dry_run):
        raise click.UsageError("--part, --cluster and --dry-run are for an OUTPUT that is a folder")
    if scratch and not isinstance(output, str):
        raise click.UsageError("--scratch is for an OUTPUT in a bucket")
