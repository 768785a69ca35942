"""``prep bench-loader``: how fast a dataset reaches a training process on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from shardprep.cli.console.options import (
    ANY_PATH,
    FOLDER_OR_URL,
    CacheOptions,
    cache_options,
    check_replaced,
    check_writable,
    examples,
    json_option,
    loader_options,
    progress_option,
    transform_of,
    workers_option,
)
from shardprep.cli.console.progress import Form
from shardprep.cli.console.splits import DatasetWork
from shardprep.cli.reports.loader_report import print_report
from shardprep.formats.dataset.collecting.collection import open_records
from shardprep.formats.dataset.remote.open_dataset import datasets_in

if TYPE_CHECKING:  # start-up time: OpenCV takes 50 ms
    from shardprep.loaders.measuring.loader_bench import LoaderBench
    from shardprep.loaders.order.epoch_order import Shuffle

SWEPT = {"workers": 0, "batch-size": 1, "slots": 3}  # with the smallest value allowed


class Swept(NamedTuple):
    """A loader's parameter, and the values to try."""

    option: str
    values: tuple[int, ...]


class SweptType(click.ParamType[Swept]):
    """An option and numbers, such as "workers=1,2,4"."""

    name = "sweep"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Swept:
        option, _, numbers = value.partition("=")
        words = numbers.split(",")
        if option not in SWEPT or not all(word.isdecimal() and int(word) >= SWEPT[option] for word in words):
            self.fail(
                f"{value!r} is none of {', '.join(SWEPT)} with numbers, such as workers=1,2,4", param, ctx
            )
        return Swept(option.replace("-", "_"), tuple(map(int, words)))


@click.command(
    "bench-loader",
    short_help="Measure how fast datasets are loaded, and what limits.",
    epilog=examples(
        "bench-loader shards/train",
        "bench-loader shards/train --explain --sweep workers=1,2,4",
        "bench-loader s3://bucket/train --cache /nvme/cache --cache-limit 200GiB",
    ),
)
@click.argument("dataset", type=FOLDER_OR_URL)
@loader_options
@click.option(
    "--seconds", type=click.FloatRange(min=0), default=10, show_default=True, help="How long to measure."
)
@workers_option
@click.option(
    "--explain", is_flag=True, help="Also a table of the stages, and short runs that try the verdict."
)
@click.option(
    "--sweep",
    "swept",
    type=SweptType(),
    metavar="OPTION=N,N",
    help="Measure with each of these workers, batch-size or slots; the rest is about the fastest.",
)
@click.option("--trace", type=ANY_PATH, metavar="FILE.json", help="Also a Chrome trace, for ui.perfetto.dev.")
@click.option("--html", type=ANY_PATH, metavar="FILE", help="Also a page with pictures of it all.")
@click.option(
    "--disk", type=ANY_PATH, metavar="PROFILE.json", help="Compare with a disk, by prep bench-disk --save."
)
@click.option(
    "--columns",
    metavar="NAME,NAME",
    help="Read these columns only; without 'image' among them, and for records without images, --transform is none.  [default: all]",
)
@click.option(
    "--shuffle-quality",
    "mixing",
    is_flag=True,
    help="Also how well the batches are mixed, beside a full shuffle: from the order alone.",
)
@cache_options
@progress_option
@json_option
@click.pass_context
def bench_loader(
    ctx: click.Context,
    dataset: Path | str,
    transform: str,
    pixels: int,
    batch_size: int,
    shuffle: Shuffle | None,
    seconds: float,
    workers: int | None,
    explain: bool,
    swept: Swept | None,
    trace: Path | None,
    html: Path | None,
    disk: Path | None,
    columns: str | None,
    mixing: bool,
    through: CacheOptions,
    form: Form,
    as_json: bool,
) -> None:
    """Load DATASET, or each split in that folder, for a while, and report how fast and what limits it.

    The first epoch reads the disk; later ones, and data that fit in memory, show the speed of decoding.
    """
    from shardprep.loaders import Loader  # start-up time: OpenCV
    from shardprep.loaders.measuring.disk import DiskProfile
    from shardprep.loaders.measuring.loader_bench import bench

    through.check(dataset)
    splits = datasets_in(dataset)
    check_replaced(html)
    for file, option in ((trace, "--trace"), (html, "--html")):
        check_writable(file)
        if file and splits:
            raise click.UsageError(f"{dataset} is a folder of splits, and {option} is of one of them")
    profile = DiskProfile.load(disk) if disk else None
    names = columns.split(",") if columns else None
    cached: dict[str, Any] = {"cache": through.cache, "cache_limit": through.cache_limit}
    has_images = _have_images(splits.values() or [dataset], names, cached)
    made = transform_of(transform, pixels) if has_images else None
    make = partial(
        Loader,
        batch_size=batch_size,
        transform=made,
        shuffle=shuffle,
        workers="auto" if workers is None else workers,
        rank=0,
        world_size=1,
        drop_last=False,
        columns=names,
        **cached,
    )
    measured = partial(
        bench,
        transform=made,
        seconds=seconds,
        swept=swept,
        explain=explain,
        trace=trace,
        watched=form == "bar",
        mixing=mixing,
        disk=profile,
    )
    work = LoaderBenching(
        lambda path: measured(partial(make, path)),
        explain,
        html,
        trace,
        profile.to_json() if profile else None,
    )
    ctx.exit(work.run(dataset, as_json=as_json))


def _have_images(
    datasets: Iterable[Path | str], columns: list[str] | None, cached: Mapping[str, Any]
) -> bool:
    """Whether images are read: of records that have some, where they are not left out."""
    if columns is not None:
        return "image" in columns
    for place in datasets:
        with open_records(place, **cached) as dataset:
            if not all(part.manifest.has_images for part in dataset.parts):
                return False
    return True


class Benched(NamedTuple):
    """The speed of a dataset's loader."""

    dataset: Path | str
    bench: LoaderBench


@dataclass(frozen=True)
class LoaderBenching(DatasetWork[Benched]):
    """The measurement of datasets' loaders by ``measured``."""

    collections = "as one"

    measured: Callable[[Path | str], LoaderBench]
    explain: bool
    html: Path | None
    trace: Path | None
    disk: dict[str, Any] | None

    def result(self, dataset: Path | str) -> Benched:
        found = self.measured(dataset)
        if self.html:
            self._save_page(found, dataset, self.html)
        return Benched(dataset, found)

    def _save_page(self, found: LoaderBench, dataset: Path | str, page: Path) -> None:
        from shardprep.loaders.measuring.pages.run_page import json_of, run_page, save_page  # start-up time

        trace = json_of(self.trace) if self.trace else None
        save_page(run_page(found.to_json(), name=str(dataset), disk=self.disk, trace=trace), page)

    def show(self, result: Benched) -> None:
        print_report(*result, explain=self.explain)

    def to_json(self, result: Benched) -> dict[str, Any]:
        return {"dataset": str(result.dataset), **result.bench.to_json()}

    def summary(self, results: Mapping[str, Benched]) -> str:
        rates = {name: result.bench.speed.images_per_second for name, result in results.items()}
        return ", ".join(f"{name} {rate:,.0f} images/s" for name, rate in rates.items())
