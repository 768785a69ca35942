"""``prep repair``: bring damaged files back, from the source or from a copy."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shardprep.cli.console.cluster import cluster_executor, cluster_option
from shardprep.cli.console.options import (
    FOLDER,
    PATH_OR_URL,
    examples,
    json_option,
    progress_option,
    workers_option,
)
from shardprep.cli.console.output import say
from shardprep.cli.console.progress import Form, progress_in
from shardprep.cli.console.splits import DatasetWork
from shardprep.formats import Progress, Report
from shardprep.formats import repair as repair_dataset
from shardprep.formats.system.sizes import count_of

from .verify import print_report, summary_of


@click.command(
    short_help="Bring damaged or missing files back.",
    epilog=examples(
        "repair shards --source archives",
        "repair shards/train --source archives --workers 4",
        "repair shards --source s3://bucket/shards",
    ),
)
@click.argument("dataset", type=FOLDER)
@click.option(
    "--source", type=PATH_OR_URL, required=True, help="What it was converted from, or the URL of a copy."
)
@click.option("--root", type=FOLDER, help="The folder that the paths of a list of images begin at.")
@workers_option
@cluster_option
@progress_option
@json_option
@click.pass_context
def repair(
    ctx: click.Context,
    dataset: Path,
    source: Path | str,
    root: Path | None,
    workers: int | None,
    cluster: str | None,
    form: Form,
    as_json: bool,
) -> None:
    """Bring back exactly the damaged or missing files of DATASET, or of each split in that folder.

    They are rebuilt from the archives, or fetched from an intact copy in object storage or on a server.
    The root stays the same.
    """
    with cluster_executor(cluster) as executor:
        work = Repairing(source, root, workers, executor, progress_in(form))
        code = work.run(dataset, as_json=as_json)
    ctx.exit(code)


@dataclass(frozen=True)
class Repairing(DatasetWork[Report]):
    """The repair of datasets from one source, or from copies in one place."""

    source: Path | str
    root: Path | None
    workers: int | None
    executor: Executor | None
    progress: Progress

    def result(self, dataset: Path) -> Report:
        return repair_dataset(
            dataset,
            self.source,
            root=self.root,
            workers=self.workers,
            executor=self.executor,
            progress=self.progress,
        )

    def show(self, result: Report) -> None:
        for name in result.rebuilt:
            say(f"rebuilt: {name}")
        if not result.rebuilt:
            say(f"{result.dataset}: there was nothing to rebuild")
        print_report(result)

    def to_json(self, result: Report) -> dict[str, Any]:
        return result.to_json() | {"rebuilt": result.rebuilt}

    def exit_code(self, result: Report) -> int:
        return result.exit_code

    def summary(self, results: Mapping[str, Report]) -> str:
        rebuilt = sum(len(report.rebuilt) for report in results.values())
        return f"{count_of(rebuilt, 'file')} rebuilt; {summary_of(results)}"
