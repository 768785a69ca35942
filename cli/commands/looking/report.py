"""``prep report``: a page that shows what is in a dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from shardprep.cli.console.options import (
    ANY_PATH,
    FOLDER,
    check_replaced,
    examples,
    json_option,
    progress_option,
    workers_option,
)
from shardprep.cli.console.output import say
from shardprep.cli.console.progress import Form, progress_in
from shardprep.cli.console.runs import given_options
from shardprep.cli.console.splits import DatasetWork
from shardprep.formats import DataError, Examination, Progress
from shardprep.formats import report as report_dataset
from shardprep.formats.dataset.examining.choice import PIXELS
from shardprep.formats.dataset.splits import splits_of
from shardprep.formats.progress import NoProgress
from shardprep.formats.system.sizes import count_of

OF_A_DATASET = {
    "against": "--against",
    "pixels": "--pixels",
    "classes": "--class",
    "record": "--record",
    "seed": "--seed",
    "workers": "--workers",
}
LARGEST_TRACE = 256 << 20  # bytes; a loader keeps 200,000 spans, in about 100 MB


@click.command(
    short_help="Write a page that shows what is in a dataset.",
    epilog=examples(
        "report shards/train --against shards/val -o leaks.html",
        "report shards/train --pixels all --class n01440764 --json",
        "report --run stats.json --disk profile.json -o run.html",
    ),
)
@click.argument("dataset", type=FOLDER, required=False)
@click.option(
    "-o", "--output", type=ANY_PATH, default="report.html", show_default=True, help="The page, replaced."
)
@click.option("--against", type=FOLDER, help="Another dataset: what both have, and the balance of classes.")
@click.option(
    "--pixels",
    type=click.Choice(PIXELS),
    default="sample",
    show_default=True,
    help="Which images are read; a sample is up to 4,096.",
)
@click.option(
    "--class", "classes", multiple=True, metavar="NAME", help="Show many images of this class; repeatable."
)
@click.option("--record", metavar="KEY", help="Tell the custody of this record, from its bytes to the root.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Chooses the sample.")
@click.option(
    "--run",
    type=ANY_PATH,
    metavar="STATS.json",
    help="Instead of a dataset: stats, or prep bench-loader --json.",
)
@click.option("--trace", type=ANY_PATH, metavar="FILE.json", help="With --run: a trace, for a timeline.")
@click.option("--disk", type=ANY_PATH, metavar="PROFILE.json", help="With --run: by prep bench-disk --save.")
@workers_option
@progress_option
@json_option
@click.pass_context
def report(
    ctx: click.Context,
    dataset: Path | None,
    output: Path,
    against: Path | None,
    pixels: str,
    classes: tuple[str, ...],
    record: str | None,
    seed: int,
    run: Path | None,
    trace: Path | None,
    disk: Path | None,
    workers: int | None,
    form: Form,
    as_json: bool,
) -> None:
    """Write a page of HTML that shows what is in DATASET, or in each split in that folder.

    It has counts, sizes, pictures, duplicates, suspects of a wrong label, and oddities. The page is one file,
    which loads nothing and runs no program. Of a folder of splits each has a page, such as report-train.html.
    """
    check_replaced(output)
    if (dataset is None) == (run is None) or (run is None and (trace or disk)):
        raise click.UsageError(
            "give a DATASET, or --run STATS.json with --trace and --disk where there are some"
        )
    if run and (typed := given_options(ctx, OF_A_DATASET)):
        raise click.UsageError(f"{OF_A_DATASET[min(typed)]} is of a DATASET, and not of a run")
    if dataset is None:
        report_run(run or Path(), output, trace=trace, disk=disk, as_json=as_json)
        return
    work = Reporting(output, against, pixels, classes, record, seed, workers, progress_in(form))
    if record is not None and splits_of(dataset):
        raise click.UsageError(f"{dataset} is a folder of splits, and --record is of one of them")
    ctx.exit(work.of(dataset).run(dataset, as_json=as_json))


def report_run(run: Path, output: Path, *, trace: Path | None, disk: Path | None, as_json: bool) -> None:
    """Write the page of a run of a loader, from the file of its stats."""
    from shardprep.loaders.measuring.disk import DiskProfile  # start-up time
    from shardprep.loaders.measuring.pages.run_page import json_of, run_page, save_page

    profile = DiskProfile.load(disk).to_json() if disk else None
    traced = json_of(trace, most=LARGEST_TRACE) if trace else None
    values = json_of(run)
    try:
        text = run_page(values, name=run.stem, disk=profile, trace=traced)
    except DataError as error:
        raise DataError(error.message, path=error.path or run) from error
    save_page(text, output)
    say(json.dumps({"page": str(output)}) if as_json else f"{output}: the run in {run}")


@dataclass(frozen=True)
class Reporting(DatasetWork[Examination]):
    """The pages of datasets; with ``has_splits`` the name of each page has that of its split."""

    output: Path
    against: Path | None = None
    pixels: str = "sample"
    classes: tuple[str, ...] = ()
    record: str | None = None
    seed: int = 0
    workers: int | None = None
    progress: Progress = field(default_factory=NoProgress)
    has_splits: bool = False

    def of(self, folder: Path) -> Reporting:
        """Return the work on a dataset, or on each split in the folder."""
        return replace(self, has_splits=bool(splits_of(folder)))

    def page_of(self, dataset: Path) -> Path:
        """Return the file of a dataset's page."""
        name = f"{self.output.stem}-{dataset.name}{self.output.suffix}"
        return self.output.with_name(name) if self.has_splits else self.output

    def result(self, dataset: Path) -> Examination:
        return report_dataset(
            dataset,
            self.page_of(dataset),
            against=self.against,
            pixels=self.pixels,
            classes=self.classes,
            record=self.record,
            seed=self.seed,
            workers=self.workers,
            progress=self.progress,
        )

    def show(self, result: Examination) -> None:
        found = result.to_json()
        path = Path(found["dataset"]["path"])
        say(f"{self.page_of(path)}: {path}, {_looked_at(found['looked_at'])}")
        for one in found["observations"]:
            least = "at least " if one["is_partial"] else ""
            say(f"  {one['title']}: {least}{count_of(one['count'], one['what'])}")

    def to_json(self, result: Examination) -> dict[str, Any]:
        found = result.to_json()
        return {"page": str(self.page_of(Path(found["dataset"]["path"])))} | found

    def summary(self, results: Mapping[str, Examination]) -> str:
        return f"{count_of(len(results), 'page')} written"


def _looked_at(looked: Mapping[str, Any]) -> str:
    if looked["pixels"] == "none":
        return "the index only"
    if not looked["images"]:
        return "records without images"
    return f"{looked['decoded']:,} of {count_of(looked['images'], 'image')} looked at"
