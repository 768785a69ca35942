"""The images of a step that was made again, to look at."""

from __future__ import annotations

from collections.abc import Callable

from shardprep.formats.images.gallery import MOST_SHOWN, Gallery, ShownImage
from shardprep.formats.images.png_file import png_of
from shardprep.loaders.transforms.contract import Transform

from .pictures import pictures_of
from .replayed import Replayed


def shown_batch(
    made: Replayed, transform: Transform | None, class_of: Callable[[int], str], *, title: str, most: int
) -> Gallery:
    """Return the first images of a step, at most ``most``, as PNG files. Raises UsageError without images."""
    count = max(0, min(most, MOST_SHOWN, len(made)))
    pictures = pictures_of(made.batch, transform)[:count]
    shown = [
        ShownImage(
            png_of(picture), f"{record.number:,}: {record.key}, {class_of(record.number)}".rstrip(", ")
        )
        for record, picture in zip(made.delivered, pictures, strict=False)
    ]
    return Gallery(
        f"{title}: {count} of {len(made):,} images of step {made.step:,} of epoch {made.epoch:,}", shown
    )
