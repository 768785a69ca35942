"""``prep bench-loader``: how fast a dataset reaches a training process on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from .loader_report import print_report
from .options import ANY_PATH, FOLDER, check_place, json_option, workers_option
from .text import print_json

if TYPE_CHECKING:  # the commands that load nothing do without OpenCV's 50 ms
    from ..loaders import Transform
    from ..loaders.order import Shuffle

SWEPT = {"workers": 0, "batch-size": 1, "slots": 3}  # with the least that is allowed


class ShuffleType(click.ParamType["Shuffle | None"]):
    """A window in records or bytes ("10000", "2GiB"), or one of two words."""

    name = "shuffle"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Shuffle | None:
        from ..loaders import GlobalShuffle, LocalShuffle

        match value:
            case "none":
                return None
            case "global":
                return GlobalShuffle()
        return LocalShuffle(int(value) if value.isdigit() else value)


class Swept(NamedTuple):
    """A loader's parameter, and the values to try."""

    option: str
    values: tuple[int, ...]


class SweptType(click.ParamType[Swept]):
    """An option and numbers: "workers=1,2,4"."""

    name = "sweep"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Swept:
        option, _, numbers = value.partition("=")
        words = numbers.split(",")
        if option not in SWEPT or not all(word.isdecimal() and int(word) >= SWEPT[option] for word in words):
            self.fail(
                f"{value!r} is none of {', '.join(SWEPT)} with numbers, such as workers=1,2,4", param, ctx
            )
        return Swept(option.replace("-", "_"), tuple(map(int, words)))


@click.command("bench-loader")
@click.argument("dataset", type=FOLDER)
@click.option(
    "--transform",
    type=click.Choice(("train", "eval", "none")),
    default="train",
    show_default=True,
    help="Random or centre crops; none delivers the encoded bytes.",
)
@click.option(
    "--size", "pixels", type=click.IntRange(min=1), default=224, show_default=True, help="Side of a crop."
)
@click.option("--batch-size", type=click.IntRange(min=1), default=256, show_default=True)
@click.option(
    "--shuffle",
    type=ShuffleType(),
    default="10000",
    show_default=True,
    metavar="WINDOW|none|global",
    help="How far records move: a number, or bytes such as 2GiB.",
)
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
@click.option(
    "--disk", type=ANY_PATH, metavar="PROFILE.json", help="Compare with a disk, by prep bench-disk --save."
)
@json_option
def bench_loader(
    dataset: Path,
    transform: str,
    pixels: int,
    batch_size: int,
    shuffle: Shuffle | None,
    seconds: float,
    workers: int | None,
    explain: bool,
    swept: Swept | None,
    trace: Path | None,
    disk: Path | None,
    as_json: bool,
) -> None:
    """Load DATASET for a while, doing nothing with it, and say how fast it comes and what limits it.

    The first epoch reads the disk; later ones, and data that fit in memory, tell the speed of decoding.
    """
    from ..loaders import Loader
    from ..loaders.disk import DiskProfile
    from ..loaders.loader_bench import bench

    check_place(trace)
    made = _transform(transform, pixels)
    make = partial(
        Loader,
        dataset,
        batch_size=batch_size,
        transform=made,
        shuffle=shuffle,
        workers="auto" if workers is None else workers,
        rank=0,
        world_size=1,
        drop_last=False,
    )
    found = bench(
        make,
        made,
        seconds=seconds,
        swept=swept,
        explain=explain,
        trace=trace,
        disk=DiskProfile.load(disk) if disk else None,
    )
    if as_json:
        print_json({"dataset": str(dataset), **found.to_json()})
    else:
        print_report(dataset, found, explain=explain)


def _transform(name: str, pixels: int) -> Transform | None:
    """The evaluation crop is 7/8 of what the shorter side is resized to, as 224 of 256."""
    from ..loaders import EvalTransform, TrainTransform

    if name == "train":
        return TrainTransform(pixels)
    return EvalTransform(pixels, resize=round(pixels * 8 / 7)) if name == "eval" else None
