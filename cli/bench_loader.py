"""``prep bench-loader``: how fast a dataset reaches a training process on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import FOLDER, json_option, workers_option
from .text import count_of, print_fields, print_json, size

if TYPE_CHECKING:  # the commands that load nothing do without OpenCV's 50 ms
    from ..loaders import Transform
    from ..loaders.measure import LoaderSpeed
    from ..loaders.order import Shuffle


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
@json_option
def bench_loader(
    dataset: Path,
    transform: str,
    pixels: int,
    batch_size: int,
    shuffle: Shuffle | None,
    seconds: float,
    workers: int | None,
    as_json: bool,
) -> None:
    """Load DATASET for a while, doing nothing with it, and say how fast it comes and where time goes.

    The first epoch reads the disk; later ones, and data that fit in memory, tell the speed of decoding.
    """
    from ..loaders import Loader
    from ..loaders.measure import measure

    make = partial(
        Loader,
        dataset,
        batch_size=batch_size,
        transform=_transform(transform, pixels),
        shuffle=shuffle,
        workers="auto" if workers is None else workers,
        rank=0,
        world_size=1,
        drop_last=False,
    )
    speed = measure(make, seconds=seconds)
    if as_json:
        print_json(speed.to_json())
    else:
        click.echo(f"{dataset}: {speed.images_per_second:,.0f} images/s, {size(speed.bytes_per_second)}/s")
        print_fields(_fields(speed))


def _transform(name: str, pixels: int) -> Transform | None:
    """The evaluation crop is 7/8 of what the shorter side is resized to, as 224 of 256."""
    from ..loaders import EvalTransform, TrainTransform

    if name == "train":
        return TrainTransform(pixels)
    return EvalTransform(pixels, resize=round(pixels * 8 / 7)) if name == "eval" else None


def _fields(speed: LoaderSpeed) -> dict[str, object]:
    stages = ", ".join(f"{name} {seconds * 1e6:,.0f} µs" for name, seconds in speed.stages.items())
    fields: dict[str, object] = {
        "measured": f"{count_of(speed.images, 'image')} in {speed.seconds:.1f} s",
        "first batch": f"after {speed.first_batch:.2f} s",
        "between batches": f"p50 {speed.gap_p50 * 1e3:,.1f} ms, p99 {speed.gap_p99 * 1e3:,.1f} ms",
        "worker, per image": stages,
        "workers waiting": f"{speed.idle:.1%} for work, {speed.blocked:.1%} for a free slot",
        "consumer waiting": f"{speed.starved:.1%} for a batch",
        "main process": f"{speed.main_cpu * 1e6:,.1f} µs of CPU per image",
    }
    if speed.restarts:
        fields["restarts"] = count_of(speed.restarts, "worker")
    return fields
