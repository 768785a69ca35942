"""Options of the commands that make a loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # the commands that load nothing do without OpenCV's 50 ms
    from ..loaders import Transform
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


OPTIONS = (
    click.option(
        "--transform",
        type=click.Choice(("train", "eval", "none")),
        default="train",
        show_default=True,
        help="Random or centre crops; none delivers the encoded bytes.",
    ),
    click.option(
        "--size", "pixels", type=click.IntRange(min=1), default=224, show_default=True, help="Side of a crop."
    ),
    click.option("--batch-size", type=click.IntRange(min=1), default=256, show_default=True),
    click.option(
        "--shuffle",
        type=ShuffleType(),
        default="10000",
        show_default=True,
        metavar="WINDOW|none|global",
        help="How far records move: a number, or bytes such as 2GiB.",
    ),
)


def loader_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``transform``, ``pixels``, ``batch_size`` and ``shuffle``."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def transform_of(name: str, pixels: int) -> Transform | None:
    """The evaluation crop is 7/8 of what the shorter side is resized to, as 224 of 256."""
    from ..loaders import EvalTransform, TrainTransform

    if name == "train":
        return TrainTransform(pixels)
    return EvalTransform(pixels, resize=round(pixels * 8 / 7)) if name == "eval" else None
