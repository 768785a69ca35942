"""``prep verify``, ``repair``, ``inspect``, ``collect`` and ``export``: finished datasets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shardprep.cli.commands.report import output_file
from shardprep.cli.console import options
from shardprep.cli.console.options import command
from shardprep.cli.console.output import Output, fields, for_each_dataset, json_option, next_step
from shardprep.formats.errors import printable
from shardprep.formats.exports.export import FORMATS, export as export_dataset
from shardprep.formats.records.record import GIVEN, GIVEN_SHUFFLED
from shardprep.formats.reports.examine import report as report_dataset
from shardprep.formats.runtime.progress import count_of, format_size, records_of
from shardprep.formats.shards.dataset import is_collection
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.shards.read import ARCHIVE_NAME, MANIFEST_NAME
from shardprep.formats.shards.summary import (
    ClassCount,
    ColumnSummary,
    Summary,
    class_counts,
    inspect as inspect_dataset,
)
from shardprep.formats.storage.open import collect as collect_parts, open_dataset
from shardprep.formats.transfer.repair import repair as repair_dataset
from shardprep.formats.verification.checks import Report
from shardprep.formats.verification.verify import LEVELS, verify as verify_dataset


@command(
    "Summarise datasets: counts, classes, sizes, oddities.",
    "inspect shards",
    "inspect s3://bucket/train --cache /nvme/cache",
    "inspect shards/train --classes --html report.html",
)
@click.argument("dataset", type=options.FOLDER_OR_URL)
@options.flag("--classes", "Also list the classes: label, images, name, words.")
@options.file("--html", "FILE", "Also write the page of prep report.")
@options.cache
@json_option
def inspect(dataset: Path | str, classes: bool, html: Path | None, **cached: Any) -> Output:
    """Summarise DATASET, each split in that folder, or each part of a collection.

    The summary has counts, bytes, classes, sizes, oddities, order and roots.
    """
    options.check_output_files(html)
    if html and isinstance(dataset, str):
        raise click.UsageError("--html needs a DATASET in a local folder; copy it with prep fetch")
    if html and is_collection(dataset):
        raise click.UsageError(f"{dataset} is a collection; use --html on its parts, one at a time")

    def inspect_one(place: Path | str) -> Output:
        page = output_file(html, place, dataset) if html else None
        if page:
            report_dataset(place, page)
        with open_dataset(place, **cached) as opened:
            summary, listed = inspect_dataset(opened), class_counts(opened) if classes else []
        result = summary.to_json()
        if classes:
            result["class_counts"] = [asdict(each) for each in listed]
        if page:
            result["page"] = str(page)
        return Output(result, _summary_lines(summary, listed, page), result=summary)

    def summary_of_all(results: Mapping[str, Summary]) -> str:
        total = format_size(sum(summary.disk_bytes for summary in results.values()))
        return f"{', '.join(results)}: {_count_records(results.values())}, {total} on disk"

    return for_each_dataset(dataset, inspect_one, summary_of_all, by_part=True)


def _count_records(splits: Collection[Summary | Manifest]) -> str:
    """Return the total number of images, or of records if one of the splits has no images."""
    noun = "image" if all(each.has_images for each in splits) else "record"
    return count_of(sum(each.records for each in splits), noun)


def _format_range(ends: tuple[int, int], noun: str) -> str:
    low, high = ends
    return count_of(high, noun) if low == high else f"{low:,} to {count_of(high, noun)}"


def _summary_lines(summary: Summary, classes: list[ClassCount], page: Path | None) -> Iterator[str]:
    is_labelled = summary.classes_present > 0
    records = records_of(summary.records, has_images=summary.has_images, has_labels=is_labelled)
    yield f"{summary.path}: {summary.split} split, {records}"
    least_and_most = _format_range(summary.per_class, "image" if summary.has_images else "record")
    present = f"{summary.classes_present:,} of {summary.classes:,}, {least_and_most} each"
    shards = count_of(summary.shards, f"{summary.container.upper()} shard")
    size = format_size(summary.disk_bytes)
    on_disk = f"{size} on disk in {shards}"
    if summary.archive is not None:
        on_disk = f"in place in {printable(summary.archive)}, with {size} of tables"
    checked = (f"{md5} of {name}" for name, md5 in summary.archive_md5.items())
    images: dict[str, str | None] = {"images": "none"}
    if summary.has_images:
        pixels = summary.images
        largest = max(pixels["width"][3], pixels["height"][3])
        images = {
            "pixels": f"median {pixels['width'][1]}x{pixels['height'][1]}, largest side {largest}",
            "image bytes": _format_spread(pixels["length"]),
            "kinds": _format_counts(summary.kinds),
            "oddities": _format_counts(summary.oddities),
            "crop-ready": _format_crop_ready(summary),
        }
    shuffled = f"shuffled, seed {summary.seed}"
    orders = {
        "shuffled": shuffled,
        GIVEN_SHUFFLED: shuffled,
        GIVEN: "in the order the items were given",
        "archive": "in the order of the archive",
        "source": "in the order of the source",
    }
    by_class = " (sorted by class; shuffle it for training)" if summary.class_sorted else ""
    yield from fields(
        {
            "classes": present if is_labelled else "none: the split has no labels",
            "bytes": f"{format_size(summary.image_bytes)} of images, " * summary.has_images + on_disk,
            **images,
            **{f"column {column.name}": _format_column(column) for column in summary.columns},
            "order": orders.get(summary.order, "by key") + by_class,
            "boxes": f"{summary.boxes:,}" if summary.boxes else None,
            "source": summary.source + (", partial" if summary.partial else ""),
            "official MD5": ", ".join(checked) or None,
            "skipped": count_of(summary.skipped, "bad image"),
            "content_root": summary.content_root,
            "root": summary.root,
        }
    )
    if classes:
        width = max(len(printable(each.name)) for each in classes)
        yield f"  {'label':>7}{'images':>11}  {'name':{width}}  words"
        for each in classes:
            row = f"  {each.label:>7}{each.images:>11,}  {printable(each.name):{width}}  {each.words or ''}"
            yield row.rstrip()
    if page:
        yield f"page: {page}"


def _format_spread(lengths: Sequence[int]) -> str:
    low, middle, high = map(format_size, lengths[:3])
    return f"median {middle}, 5% under {low}, 5% over {high}"


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {kind}" for kind, number in counts.items() if number) or "none"


def _format_crop_ready(summary: Summary) -> str | None:
    if (stats := summary.crop_ready) is None:
        return None
    width, height = stats.segment_pixels
    side = stats.shorter_side
    lossy = f", shrunk to {side} pixels at quality {stats.quality}" if side else ""
    return (
        f"{count_of(stats.images, 'image')}{lossy}, segments of {width}x{height} pixels and "
        f"{stats.segment_bytes:,} bytes (median), others: {_format_counts(stats.others)}"
    )


def _format_column(column: ColumnSummary) -> str:
    parts = [column.kind, f"{format_size(column.bytes)} ({format_size(column.disk_bytes)} on disk)"]
    if column.lengths:
        parts.append(_format_spread(column.lengths))
    if column.classes:
        parts.append(count_of(column.classes, "class"))
    if column.per_class:
        parts.append(f"{_format_range(column.per_class, 'record')} each")
    if column.unlabelled:
        parts.append(f"{column.unlabelled:,} without")
    return ", ".join(parts)


@command(
    "Check that datasets are complete and intact.",
    "verify shards",
    "verify shards/train --level decode --workers 4",
    "verify s3://bucket/train --cache /nvme/cache --cache-limit 200GiB",
)
@click.argument("dataset", type=options.FOLDER_OR_URL)
@options.choice(
    "--level", LEVELS, "How much to check; each level includes the one before it (see above).", default="full"
)
@options.workers
@options.cluster
@options.cache
@options.output
def verify(dataset: Path | str, cluster: str | None, **chosen: Any) -> Output:
    """Check that DATASET, or each split in that folder, or each part of a collection, is intact.

    \b
    quick    the manifest matches its root; all files are there with their sizes, and no others
    full     every SHA-256; the rows, labels, lengths and boxes in the index fit the manifest
    records  every record's checksum and its row in the index, content_root, keys, order, skipped,
             class_sorted; partial for the official classes (for others, only the source can tell)
    decode   every image decodes

    If images were skipped, the order and class_sorted cannot be checked. No level compares with
    the source or changes anything. The files at a URL are read through the cache, which can be
    smaller than the dataset; extra files there are not reported.
    """
    with options.cluster_executor(cluster) as executor:

        def verify_one(place: Path | str) -> Output:
            report = verify_dataset(place, executor=executor, **chosen)
            advice = [_next_step_for(report)] if report.findings else []
            return Output(report.to_json(), [*_report_lines(report), *advice], report.exit_code, report)

        return for_each_dataset(dataset, verify_one, _summary_of_reports, by_part=True)


def _summary_of_reports(reports: Mapping[str, Report]) -> str:
    damaged = [name for name, report in reports.items() if report.exit_code]
    if damaged:
        return f"NOT intact: {', '.join(damaged)} ({len(damaged)} of {len(reports)})"
    manifests = [report.manifest for report in reports.values() if report.manifest]
    total = format_size(sum(manifest.size for manifest in manifests))
    word = "complete" if all(report.level == "quick" for report in reports.values()) else "intact"
    return f"{', '.join(reports)}: {_count_records(manifests)}, {total}, all {word}"


def _report_lines(report: Report) -> Iterator[str]:
    kinds = {"damaged": report.findings, "unchecked": report.unchecked, "note": report.notes}
    for kind, findings in kinds.items():
        for finding in findings:
            yield f"{kind}: {finding}"
    manifest = report.manifest
    if report.exit_code or manifest is None:
        number = count_of(len(report.findings), "finding")
        unread = f", {count_of(len(report.unchecked), 'file')} unread" if report.unchecked else ""
        yield f"{report.location}: NOT intact: {number}{unread} (level {report.level})"
        return
    word = "complete" if report.level == "quick" else "intact"
    images, files = _count_records([manifest]), count_of(len(manifest.shards), "shard")
    yield f"{report.location}: {word}: {images} in {files}, {format_size(manifest.size)} (level {report.level})"
    yield from fields({"root": manifest.root})


def _next_step_for(report: Report) -> str:
    if report.url is not None:
        return "next: publish the dataset there again, from a copy that passes prep verify"
    manifest, damaged = report.manifest, {finding.file for finding in report.findings}
    if manifest is None or MANIFEST_NAME in damaged:
        return (
            "next: if prep convert was interrupted, run it again to finish; otherwise, restore manifest.json "
            "from a copy, or convert into another folder (see provenance.json)"
        )
    if manifest.archive and any(each.file == ARCHIVE_NAME or each.key for each in report.findings):
        return "next: restore the indexed archive, or run prep index again with its present location"
    damaged &= {file.name for file in manifest.files}
    if not damaged:
        return "next: move the files that do not belong to the dataset elsewhere"
    joined = [entry for entry in manifest.column_entries if entry.field.name in manifest.joined]
    if damaged <= {file.name for column in joined for file in column.files}:
        return "next: run the prep join command that added these columns again; it rebuilds their files"
    if all(each.key is not None for each in report.findings if each.file in damaged):
        return (
            "next: these records are unchanged since they were converted; to leave bad images out, run prep "
            "convert with --decode-check --on-bad-image skip into another folder"
        )
    return next_step("repair", report.dataset, "--source", "SOURCE")


@command(
    "Restore damaged or missing files.",
    "repair shards --source archives",
    "repair shards/train --source archives --workers 4",
    "repair shards --source s3://bucket/shards",
)
@click.argument("dataset", type=options.FOLDER)
@click.option(
    "--source",
    type=options.PATH_OR_URL,
    required=True,
    help="The source it was converted from, or the URL of a copy.",
)
@click.option("--root", type=options.FOLDER, help="Folder that the paths of a list are relative to.")
@options.workers
@options.cluster
@options.output
def repair(dataset: Path, cluster: str | None, **chosen: Any) -> Output:
    """Restore exactly the damaged or missing files of DATASET, or of each split in that folder.

    They are rebuilt from the archives, or fetched from an intact copy in object storage or on a server.
    The root stays the same.
    """
    with options.cluster_executor(cluster) as executor:

        def repair_one(place: Path) -> Output:
            report = repair_dataset(place, executor=executor, **chosen)
            rebuilt = [f"rebuilt: {name}" for name in report.rebuilt]
            lines = [*(rebuilt or [f"{report.dataset}: nothing to rebuild"]), *_report_lines(report)]
            return Output(report.to_json() | {"rebuilt": report.rebuilt}, lines, report.exit_code, report)

        def summary_of_all(reports: Mapping[str, Report]) -> str:
            rebuilt = sum(len(report.rebuilt) for report in reports.values())
            return f"{count_of(rebuilt, 'file')} rebuilt; {_summary_of_reports(reports)}"

        return for_each_dataset(dataset, repair_one, summary_of_all)


@command(
    "Combine finished datasets into one, without copying.",
    "collect all shards/train shards/val",
    "collect all shards/train shards/val --json",
)
@click.argument("out", type=options.ANY_PATH)
@click.argument("parts", type=options.FOLDER, nargs=-1, required=True)
@json_option
def collect(out: Path, parts: tuple[Path, ...]) -> Output:
    """Make a collection of the datasets PARTS, in this order, in the folder OUT.

    Nothing is copied: OUT gets a file of names and roots. The parts must have the same classes and columns. A
    Loader reads OUT as one dataset, whose records are numbered across all parts.
    """
    with collect_parts(out, parts) as collection:
        summary = f"{out}: {count_of(len(collection), 'record')} in {count_of(len(collection.parts), 'part')}"
        shown, listed = {}, []
        for part in collection.parts:
            name, manifest = part.name, part.manifest
            shown[name] = count_of(manifest.records, "record")
            entry = {"name": name, "path": str(part.folder)}
            listed.append(entry | {"records": manifest.records, "root": manifest.root})
        root = {"root": collection.root}
        result = {"path": str(collection.path), "records": len(collection), "parts": listed}
        return Output(result | root, [summary, *fields(shown | root), next_step("verify", out)])


@command(
    "Write datasets in the format of another loader.",
    "export shards tars --to webdataset --shard-size 1GB",
    "export shards/train images --to folders",
)
@click.argument("dataset", type=options.FOLDER)
@click.argument("output", type=options.ANY_PATH)
@options.choice("--to", tuple(FORMATS), "The format.", required=True)
@click.option(
    "--shard-size", type=options.SIZE, default="256MiB", help="Bytes of images and columns per file."
)
@options.work
def export(dataset: Path, output: Path, to: str, **chosen: Any) -> Output:
    """Write DATASET, or each split in that folder, to OUTPUT in the format of another loader.

    Images stay as they are, and each is checked. After any interruption, the same command finishes the
    job, and the result is byte-identical. A finished export is compared with what was written.
    """
    done = export_dataset(dataset, output, to=to, **chosen)
    lines, splits = [], []
    for split in done:
        state = " (was complete, and is intact)" if split.already_complete else ""
        file_form = "class folders" if to == "folders" else f"{count_of(len(split.files), 'file')} of {to}"
        total = format_size(sum(file.size for file in split.files))
        records = records_of(split.records, has_images=split.has_images, has_labels=True)
        lines.append(f"{split.path}: {records}, {total} in {file_form}{state}")
        splits.append(asdict(split) | {"path": str(split.path)})
    return Output({"splits": splits}, lines)
