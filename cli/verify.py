"""``prep verify``: is a dataset complete, and intact?"""

from __future__ import annotations

from pathlib import Path

import click

from ..formats import Report
from ..formats import verify as verify_dataset
from ..formats.verify import LEVELS
from .options import FOLDER, json_option, workers_option
from .progress import TerminalProgress
from .text import count_of, print_fields, print_json, size


@click.command()
@click.argument("dataset", type=FOLDER)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="full",
    show_default=True,
    help="quick: names and sizes; full: every SHA-256; records: every record; decode: every image.",
)
@workers_option
@json_option
@click.pass_context
def verify(ctx: click.Context, dataset: Path, level: str, workers: int | None, as_json: bool) -> None:
    """Check that DATASET is complete and intact. Reports every finding; changes nothing."""
    report = verify_dataset(dataset, level=level, workers=workers, progress=TerminalProgress())
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report)
    ctx.exit(report.exit_code)


def print_report(report: Report) -> None:
    """The findings, then one line that sums up."""
    for kind, findings in (
        ("damaged", report.findings),
        ("unchecked", report.unchecked),
        ("note", report.notes),
    ):
        for finding in findings:
            click.echo(f"{kind}: {finding}")
    manifest = report.manifest
    if report.exit_code or manifest is None:
        found = count_of(len(report.findings), "finding")
        unread = f", {count_of(len(report.unchecked), 'file')} unread" if report.unchecked else ""
        click.echo(f"{report.dataset}: NOT intact: {found}{unread} (level {report.level})")
        return
    word = "complete" if report.level == "quick" else "intact"
    files = count_of(len(manifest.shards), "shard")
    total = size(sum(f.size for f in manifest.files))
    images = count_of(manifest.records, "image")
    click.echo(f"{report.dataset}: {word}: {images} in {files}, {total} (level {report.level})")
    print_fields({"root": manifest.root})
