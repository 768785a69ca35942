"""``prep verify``: check that a dataset is complete and intact."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shardprep.cli.commands.mending import say_what_mends
from shardprep.cli.console.cluster import cluster_executor, cluster_option
from shardprep.cli.console.options import (
    FOLDER_OR_URL,
    CacheOptions,
    cache_options,
    examples,
    json_option,
    progress_option,
    workers_option,
)
from shardprep.cli.console.output import print_fields, say
from shardprep.cli.console.progress import Form, progress_in
from shardprep.cli.console.splits import DatasetWork
from shardprep.formats import Progress, Report
from shardprep.formats import verify as verify_dataset
from shardprep.formats.dataset.verification.verify import LEVELS
from shardprep.formats.system.sizes import count_of, size


@click.command(
    short_help="Check that datasets are complete and intact.",
    epilog=examples(
        "verify shards",
        "verify shards/train --level decode --workers 4",
        "verify s3://bucket/train --cache /nvme/cache --cache-limit 200GiB",
    ),
)
@click.argument("dataset", type=FOLDER_OR_URL)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="full",
    show_default=True,
    help="What to check; each level checks what the one before it does, see below.",
)
@workers_option
@cluster_option
@cache_options
@progress_option
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    dataset: Path | str,
    level: str,
    workers: int | None,
    cluster: str | None,
    through: CacheOptions,
    form: Form,
    as_json: bool,
) -> None:
    """Check that DATASET, or each split in that folder, or each part of a collection, is intact.

    \b
    quick    the manifest is what was published; all files are there with their sizes, and no others
    full     every SHA-256; rows, labels, lengths (image_bytes) and boxes fit the manifest: it can be opened
    records  every record's checksum and its row in the index, content_root, keys, order, skipped,
             class_sorted; partial for the official classes (for others only the source shows it)
    decode   every image decodes

    Where images were skipped, the order and class_sorted cannot be checked. No level compares with
    the source. Changes nothing. The files at a URL come through the cache, which can be smaller than the
    dataset; files that do not belong to it are not looked for.
    """
    through.check(dataset)
    with cluster_executor(cluster) as executor:
        work = Verifying(level, workers, executor, progress_in(form), through)
        code = work.run(dataset, as_json=as_json)
    ctx.exit(code)


@dataclass(frozen=True)
class Verifying(DatasetWork[Report]):
    """The verification of datasets at one level."""

    collections = "by part"

    level: str
    workers: int | None
    executor: Executor | None
    progress: Progress
    through: CacheOptions

    def result(self, dataset: Path | str) -> Report:
        return verify_dataset(
            dataset,
            level=self.level,
            workers=self.workers,
            executor=self.executor,
            progress=self.progress,
            cache=self.through.cache,
            cache_limit=self.through.cache_limit,
        )

    def show(self, result: Report) -> None:
        print_report(result)
        say_what_mends(result)

    def to_json(self, result: Report) -> dict[str, Any]:
        return result.to_json()

    def exit_code(self, result: Report) -> int:
        return result.exit_code

    def summary(self, results: Mapping[str, Report]) -> str:
        return summary_of(results)


def summary_of(reports: Mapping[str, Report]) -> str:
    """Return one line about the reports of a folder's splits."""
    damaged = [name for name, report in reports.items() if report.exit_code]
    if damaged:
        return f"NOT intact: {', '.join(damaged)} of {', '.join(reports)}"
    manifests = [report.manifest for report in reports.values() if report.manifest]
    images = count_of(sum(manifest.records for manifest in manifests), "image")
    total = size(sum(manifest.size for manifest in manifests))
    return f"{', '.join(reports)}: {images}, {total}, all intact"


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
        say(f"{report.location}: NOT intact: {found}{unread} (level {report.level})")
        return
    word = "complete" if report.level == "quick" else "intact"
    files = count_of(len(manifest.shards), "shard")
    total = size(manifest.size)
    images = count_of(manifest.records, "image")
    say(f"{report.location}: {word}: {images} in {files}, {total} (level {report.level})")
    print_fields({"root": manifest.root})
