"""``prep verify``: check that a dataset is complete and intact."""

from __future__ import annotations

from pathlib import Path

import click

from shardprep.cli.console.options import FOLDER, json_option, workers_option
from shardprep.cli.console.output import TerminalProgress, count_of, print_fields, print_json, say, size
from shardprep.formats import Report
from shardprep.formats import verify as verify_dataset
from shardprep.formats.dataset.verify import LEVELS


@click.command()
@click.argument("dataset", type=FOLDER)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="full",
    show_default=True,
    help="What to check; each level checks what the one before it does, see below.",
)
@workers_option
@json_option
@click.pass_context
def verify(ctx: click.Context, dataset: Path, level: str, workers: int | None, as_json: bool) -> None:
    """Check that DATASET is complete and intact. Reports every finding; changes nothing.

    \b
    quick    the manifest is what was published; all files are there with their sizes, and no others
    full     every SHA-256; rows, labels, lengths (image_bytes) and boxes fit the manifest: it can be opened
    records  every record's checksum and its row in the index, content_root, keys, order, skipped,
             class_sorted; partial for the official classes (for others only the source shows it)
    decode   every image decodes

    Where images were skipped, the order and class_sorted cannot be checked. No level compares with
    the source.
    """
    report = verify_dataset(dataset, level=level, workers=workers, progress=TerminalProgress())
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report)
    ctx.exit(report.exit_code)


def print_report(report: Report) -> None:
    """Print the findings, then a summary in one line."""
    for kind, findings in (
        ("damaged", report.findings),
        ("unchecked", report.unchecked),
        ("note", report.notes),
    ):
        for finding in findings:
            say(f"{kind}: {finding}")
    manifest = report.manifest
    if report.exit_code or manifest is None:
        found = count_of(len(report.findings), "finding")
        unread = f", {count_of(len(report.unchecked), 'file')} unread" if report.unchecked else ""
        say(f"{report.dataset}: NOT intact: {found}{unread} (level {report.level})")
        return
    word = "complete" if report.level == "quick" else "intact"
    files = count_of(len(manifest.shards), "shard")
    total = size(sum(f.size for f in manifest.files))
    images = count_of(manifest.records, "image")
    say(f"{report.dataset}: {word}: {images} in {files}, {total} (level {report.level})")
    print_fields({"root": manifest.root})
