"""``prep convert``, ``prep index`` and ``prep join``: the commands that make datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from inspect import signature
from math import ceil
from pathlib import Path
from typing import Any, Literal

import click

from shardprep.cli.console import options
from shardprep.cli.console.options import command
from shardprep.cli.console.output import Output, fields, format_columns, next_step, say
from shardprep.formats.conversion.convert import (
    Converted,
    ConvertedPart,
    DryRun,
    PlannedSplit,
    convert as convert_source,
    convert_part,
    plan_conversion,
)
from shardprep.formats.conversion.join import join as join_columns
from shardprep.formats.conversion.plan import BAD_IMAGE_POLICIES, PlanOptions
from shardprep.formats.conversion.prepare import ConvertOptions
from shardprep.formats.errors import UsageError
from shardprep.formats.images.header import DEFAULT_QUALITY
from shardprep.formats.records.record import ARCHIVE_ORDER, ORDERS
from shardprep.formats.runtime.progress import count_of, format_size, records_of
from shardprep.formats.shards.dataset import SPLITS
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.shards.read import CONTAINERS, IN_PLACE
from shardprep.formats.sources.source import SourceOptions
from shardprep.formats.transfer.publish import ConvertedTo, convert_to_url

on_bad_image_option = options.choice(
    "--on-bad-image",
    BAD_IMAGE_POLICIES,
    "Stop and name the file, or leave it out and list it in quarantine.json.",
    default="fail",
)
check_md5_option: options.Option = options.flag(
    "--check-md5", "Check the MD5 of official archives first, which reads them whole."
)
allow_partial_option: options.Option = options.flag(
    "--allow-partial", "Accept a wrong number of images, and record it."
)


@command(
    "Convert archives, folders or files of other libraries to shards.",
    "convert archives shards",
    "convert photos shards --on-bad-image skip --decode-check",
    "convert scenes shards --pair mask=masks",
)
@click.argument("source", type=options.PATH_OR_URL)
@click.argument("output", type=options.PATH_OR_URL)
@options.choice("--split", SPLITS, "Convert only this split, directly into OUTPUT.")
@options.choice("--format", tuple(CONTAINERS), "Container.", name="container", default="lmdb")
@click.option("--shard-size", type=options.SIZE, default="256MiB", help="Image bytes per shard.")
@options.choice(
    "--order",
    ORDERS,
    "Seeded permutation, sorted by key, or as in SOURCE, by file and place.",
    default="shuffled",
)
@options.count("--seed", "Seed of the permutation.", default=0)
@on_bad_image_option
@options.flag("--decode-check", "Also decode every image (ten times slower).")
@options.flag(
    "--crop-ready", "Re-encode JPEGs losslessly, so that training crops take 2/3 of the time; needs jpegtran."
)
@options.count("--shorter-side", "Shrink larger images to this shorter side (lossy).", 1, metavar="PIXELS")
@options.count("--quality", "JPEG quality for --shorter-side.", 1, most=100, default=DEFAULT_QUALITY)
@check_md5_option
@allow_partial_option
@options.flag("--allow-network-fs", "Build LMDB even on a network file system.")
@options.flag("--restart", "Discard the work of an interrupted conversion.")
@options.flag("--follow-symlinks", "Follow symbolic links in SOURCE, even out of it.")
@options.flag(
    "--skip-non-images",
    "Leave out files in folders and lists that are not images; damaged images are still errors.",
)
@options.value(
    "--val-fraction", "F", "Move this fraction of each training class to val, chosen by --seed.", type=float
)
@click.option(
    "--root",
    type=options.FOLDER,
    help="Folder that the paths of a list are relative to.  [default: the list's]",
)
@options.value("--path-column", "NAME", "Column of paths in a CSV or JSON Lines file.")
@options.value("--label-column", "NAME", 'Label column; "" for none.  [default: the usual names]')
@options.value(
    "--image-column",
    "NAME",
    "Column of images in WebDataset, TFRecord, Parquet or tensorpack's LMDB.  [default: the usual names]",
)
@options.value(
    "--column",
    "NAME[:KIND][=HEADER]",
    "Convert this column of a list, metadata.csv or record files; repeatable.  [default: all but a list's, "
    "kinds inferred]",
    name="columns",
    multiple=True,
)
@options.value(
    "--pair",
    "NAME=FOLDER",
    "Convert the images of a second folder as a column, such as mask=masks; repeatable.",
    name="pairs",
    multiple=True,
)
@options.value("--coco", "FILE", "COCO instances file, relative to SOURCE.  [default: found]")
@options.value(
    "--part",
    "I/N",
    "Build one of N shares of the shards, on any machine; omit --part to finish.",
    type=options.PART,
)
@options.cluster
@options.file(
    "--scratch",
    "DIR",
    "Folder to build shards in when OUTPUT is in a bucket.  [default: in ~/.cache/shardprep]",
)
@options.flag("--dry-run", "Write nothing to OUTPUT; report problems, and estimate time and disk space.")
@options.choice(
    "--check-images",
    ("sample", "all"),
    "With --dry-run: the images to read; a sample is 4,096 or more of each split.  [default: sample]",
)
@options.work
def convert(
    source: Path | str,
    output: Path | str,
    part: tuple[int, int] | None,
    cluster: str | None,
    scratch: Path | None,
    dry_run: bool,
    check_images: Literal["sample", "all"] | None,
    **chosen: Any,
) -> Output:
    """Convert SOURCE to shards in OUTPUT: one folder per split, or --split into OUTPUT itself.

    OUTPUT is a folder, or a place in a bucket (s3://, gs://, az://, file://), to which each shard is
    uploaded as soon as it is built.

    SOURCE is what you have: the official tars (a tar, or the folder that holds them), an extracted
    tree, Kaggle's tree, class folders, images with a table, folders of pairs or COCO's annotations
    beside them, an LMDB of tensorpack's LMDBSerializer, shards of WebDataset, TFRecord or Parquet files,
    a list of paths and labels (text, CSV, JSON lines), or converted shards; it is read in place.
    A URL (s3://, gs://, az://, https://, file://) as SOURCE is a folder of official tars, read by ranges.

    After any interruption, the same command finishes the job, and the result is byte-identical.
    """
    if part and cluster:
        raise click.UsageError("--part and --cluster exclude each other; omit one of them")
    if isinstance(output, str) and (part or cluster or dry_run):
        raise click.UsageError("--part, --cluster and --dry-run need a folder as OUTPUT")
    if scratch and not isinstance(output, str):
        raise click.UsageError("--scratch is only for an OUTPUT in a bucket; omit it")
    if check_images and not dry_run:
        raise click.UsageError("--check-images is only for --dry-run; a conversion checks all images")
    arguments = _build_arguments(chosen)
    if isinstance(output, str):
        return conversion_output(convert_to_url(source, output, scratch=scratch, **arguments), output)
    if dry_run:
        planned = plan_conversion(source, output, part=part, images=check_images or "sample", **arguments)
        return Output(planned.to_json(), dry_run_lines(planned), planned.exit_code)
    if part:
        return part_output(convert_part(source, output, part, **arguments), part)
    with options.cluster_executor(cluster) as executor:
        return conversion_output(convert_source(source, output, executor=executor, **arguments), output)


def _build_arguments(chosen: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {name: chosen[name] for name in ("split", "workers", "progress")}
    kinds = {"plan_options": PlanOptions, "options": ConvertOptions, "source_options": SourceOptions}
    for argument, kind in kinds.items():
        names = signature(kind).parameters.keys() & chosen.keys()
        arguments[argument] = kind(**{name: chosen[name] for name in names})
    return arguments


@command(
    "Index the official tars, to train from them in place.",
    "index archives indexed",
    "index archives/ILSVRC2012_img_train.tar train --split train",
)
@click.argument("archives", type=options.ANY_PATH)
@click.argument("output", type=options.ANY_PATH)
@options.choice("--split", SPLITS, "Index only this split, directly into OUTPUT.")
@click.option("--shard-size", type=options.SIZE, default="1GiB", help="Image bytes per table.")
@on_bad_image_option
@check_md5_option
@allow_partial_option
@options.flag("--restart", "Discard the work of an interrupted run.")
@options.work
def index(archives: Path, output: Path, **chosen: Any) -> Output:
    """Make a dataset per split in OUTPUT whose images stay in ARCHIVES.

    ARCHIVES is one of the official tars, or the folder that holds them. Each is read once, and OUTPUT
    gets the places, labels and checksums of its images, and a link to it. A Loader takes OUTPUT/train
    like any dataset. After an interruption, the same command continues; if the archives have moved,
    it links and checks them.
    """
    arguments = _build_arguments({"container": IN_PLACE, "order": ARCHIVE_ORDER, **chosen})
    return conversion_output(convert_source(archives, output, **arguments), output)


def conversion_output(done: Sequence[Converted | ConvertedTo], output: Path | str) -> Output:
    """Return the output of a conversion, with the next command; prints warnings and notes."""
    lines: list[str] = []
    splits = []
    noted: dict[str, list[str]] = {}
    for split in done:
        manifest, is_here = split.manifest, isinstance(split, Converted)
        place = str(split.path) if isinstance(split, Converted) else split.url
        if emptied := split.skipped.emptied:  # these classes keep their labels
            say(f"warning: {place}: all images of {', '.join(emptied)} were skipped", err=True)
        for note in split.notes:
            noted.setdefault(note, []).append(place)
        kind = "table" if manifest.archive else f"{manifest.container.upper()} shard"
        shards = f"{'place, ' if manifest.archive else ''}{count_of(len(manifest.shards), kind)}"
        check = "is intact" if is_here else "the sizes are right"
        state = f" (was complete, and {check})" if split.already_complete else ""
        contents = _format_split(
            manifest, manifest.records, len(manifest.labels), has_labels=split.has_labels
        )
        lines.append(f"{place}: {contents} in {shards}{state}")
        lines += fields(
            {
                "source": manifest.source["layout"],
                "columns": format_columns(manifest.schema.kinds),
                "skipped": f"{split.skipped}; listed in quarantine.json" if manifest.skipped else None,
                "ignored": _format_ignored(split.ignored),
                "partial": "the source has more or fewer images than expected" if manifest.partial else None,
                "content_root": manifest.content_root,
                "root": manifest.root,
            }
        )
        splits.append(
            {
                "path" if is_here else "url": place,
                "split": manifest.split,
                "layout": manifest.source["layout"],
                "records": manifest.records,
                "image_bytes": manifest.image_bytes,
                "shards": len(manifest.shards),
                "columns": manifest.schema.kinds,
                "skipped": manifest.skipped,
                "skipped_causes": [asdict(cause) for cause in split.skipped.causes],
                "emptied_classes": list(split.skipped.emptied),
                "partial": manifest.partial,
                "ignored": dict(split.ignored),
                "notes": list(split.notes),
                "already_complete": split.already_complete,
                "has_images": manifest.has_images,
                "has_labels": split.has_labels,
                "content_root": manifest.content_root,
                "root": manifest.root,
            }
        )
    for note, places in noted.items():
        say(f"note: {', '.join(places)}: {note}", err=True)
    if isinstance(output, str):
        lines.append(next_step("fetch", output, "COPY"))
    else:
        was_complete = all(split.already_complete for split in done)
        lines.append(next_step("bench-loader" if was_complete else "verify", output))
    return Output({"splits": splits}, lines)


def _format_split(split: Manifest | PlannedSplit, records: int, classes: int, *, has_labels: bool) -> str:
    parts = [records_of(records, has_images=split.has_images, has_labels=has_labels)]
    parts += [count_of(classes, "class")] * bool(classes)
    return ", ".join(parts + [format_size(split.image_bytes)] * split.has_images)


def _format_ignored(ignored: Mapping[str, int]) -> str | None:
    return ", ".join(f"{name}: {number}" for name, number in sorted(ignored.items())) or None


def part_output(built: Sequence[ConvertedPart], part: tuple[int, int]) -> Output:
    number, of = part
    lines, splits = [], []
    for share in built:
        state = " (was complete)" if share.already_complete else ""
        records = records_of(share.records, has_images=share.has_images, has_labels=share.has_labels)
        shards = count_of(len(share.shards), "shard")
        lines.append(
            f"{share.path}: part {number} of {of}: {records}, {format_size(share.file_bytes)} in {shards}{state}"
        )
        missing = f"{share.missing:,} of {count_of(share.total, 'shard')}"
        lines += fields({"missing": missing, "skipped": share.skipped if share.skipped.count else None})
        splits.append(
            {
                "path": str(share.path),
                "split": share.split,
                "shards": list(share.shards),
                "records": share.records,
                "file_bytes": share.file_bytes,
                "total_shards": share.total,
                "missing_shards": share.missing,
                "skipped": share.skipped.count,
                "skipped_causes": [asdict(cause) for cause in share.skipped.causes],
                "already_complete": share.already_complete,
                "has_images": share.has_images,
                "has_labels": share.has_labels,
            }
        )
    if all(share.already_complete for share in built):
        lines.append("the conversion is finished")
    else:
        ends = "all parts have ended" if any(share.missing for share in built) else "no part is running"
        lines.append(f"next: when {ends}, run the same command without --part to finish")
    return Output({"part": number, "parts": of, "splits": splits}, lines)


def dry_run_lines(planned: DryRun) -> Iterator[str]:
    sampled = [split for split in planned.splits if 0 < split.checked < split.images]
    for split in planned.splits:
        shards = count_of(split.shards, f"{split.container.upper()} shard")
        state = " (is complete already)" if split.already_complete else ""
        contents = _format_split(split, split.images, split.classes, has_labels=split.has_labels)
        yield f"{split.path}: {contents} in {shards}{state}"
        bad = count_of(split.skipped, "bad image")
        sample = f"{split.checked:,} of {split.images:,} images, a sample; --check-images all reads all"
        yield from fields(
            {
                "source": split.layout,
                "disk": f"at most {format_size(split.disk_bytes)}",
                "columns": format_columns(split.columns),
                "checked": sample if split in sampled else None,
                "skipped": f"{bad} would be left out" if split.skipped else None,
                "ignored": _format_ignored(split.ignored),
            }
        )
        for note in split.notes:
            yield f"note: {note}"
    for problem in planned.skipped:
        yield f"skipped: {problem}"
    for problem in planned.problems:
        yield f"problem: {problem}"
    if planned.seconds is not None and planned.read_rate is not None:
        workers = count_of(max(1, planned.workers), "process")
        yield (
            f"time: about {timedelta(seconds=ceil(planned.seconds))} with {workers}: reading at {format_size(planned.read_rate)}/s "
            "as in this run, and hashing as measured on a sample; writing is not included"
        )
    number = sum(1 for _ in planned.problems)
    none = "no problems in the sample" if sampled else "no problems"
    state = f"the conversion would fail: {count_of(number, 'problem')}" if number else none
    yield f"dry run: {state}; nothing was written"


@command(
    "Add columns to a finished dataset.",
    "join shards/train --column mask=masks/train",
    "join shards/train --column age=ages.npy --column caption:text=captions.csv",
)
@click.argument("dataset", type=options.FOLDER)
@options.value(
    "--column",
    "NAME[:KIND]=FROM",
    "FROM is a dataset, a .npy file or a table with keys; FROM#COLUMN names a column of it. Repeatable.",
    name="columns",
    multiple=True,
    required=True,
)
@options.work
def join(dataset: Path, columns: tuple[str, ...], **chosen: Any) -> Output:
    """Add columns to DATASET without rewriting its files.

    A dataset or table must have one partner for each record, matched by key; the rows of an array are in the
    order of the records. After any interruption, the same command finishes the job. Run again later, it
    rebuilds damaged files of these columns.
    """
    origins: dict[str, str] = {}
    for text in columns:
        name, _, origin = text.partition("=")
        if not origin or name in origins:
            raise UsageError(f"expected NAME=FROM or NAME:KIND=FROM, each name once, not {text!r}")
        origins[name] = origin
    result = join_columns(dataset, origins, **chosen)
    manifest, kinds = result.manifest, result.manifest.schema.kinds
    roots = {"content_root": manifest.content_root, "root": manifest.root}
    state = "" if result.added or result.rebuilt else " (were joined already, and are intact)"
    records, number = count_of(manifest.records, "record"), count_of(len(kinds), "column")
    added, rebuilt = list(result.added), list(result.rebuilt)
    shown = {"added": ", ".join(added) or None, "rebuilt": ", ".join(rebuilt) or None} | roots
    lines = [
        f"{result.path}: {records}, {number}{state}",
        *fields({"columns": format_columns(kinds)} | shown),
        next_step("verify", dataset),
    ]
    entry = {"path": str(result.path), "records": manifest.records, "columns": kinds}
    for note in result.notes:
        say(f"note: {result.path}: {note}", err=True)
    return Output(entry | {"added": added, "rebuilt": rebuilt, "notes": list(result.notes)} | roots, lines)
