"""The making of a sample: a miniature ILSVRC12 in its official packaging."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO

from shardprep.formats.errors import UsageError
from shardprep.formats.progress import NoProgress, Progress
from shardprep.formats.system.user_path import user_path

from .archives import published, write_test, write_train, write_val
from .boxes import (
    BoxDefect,
    annotated_train,
    annotated_val,
    write_train_boxes,
    write_val_boxes,
)
from .devkit import write_devkit
from .images import Album, single_threaded_opencv
from .plan import SampleImage, SamplePlan

TRAIN = "ILSVRC2012_img_train.tar"
VAL = "ILSVRC2012_img_val.tar"
TEST = "ILSVRC2012_img_test.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
TRAIN_BOXES = "ILSVRC2012_bbox_train_v2.tar.gz"
VAL_BOXES = "ILSVRC2012_bbox_val_v3.tgz"


@dataclass(frozen=True, slots=True)
class SampleFile:
    """An archive that was written; ``size`` in bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class SampleOddity:
    """An oddity of one image or annotation: its kind, its key and its archive."""

    kind: str
    key: str
    file: str


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """A sample: files, ``wnids`` in devkit order (ILSVRC2012_ID 1 first), ``images`` per split, oddities."""

    files: tuple[SampleFile, ...]
    wnids: tuple[str, ...]
    images: dict[str, int]
    oddities: tuple[SampleOddity, ...]


def make_sample(
    output: str | os.PathLike[str],
    *,
    classes: int = 10,
    train_per_class: int = 30,
    val: int = 100,
    test: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> SampleSummary:
    """Write six archives into the folder ``output``, which is created if it does not exist.

    ``classes`` is the number of classes, 1 to 1,000; ``train_per_class`` the number of training images of
    each class; ``val`` and ``test`` the numbers of validation and test images, at least 1. Another ``seed``
    (0 or more) gives other classes and crops. ``progress`` receives the progress; None shows none.

    Equal arguments give equal bytes with the same releases of OpenCV, NumPy, SciPy and zlib. An archive gets
    its name only when it is complete. Raises UsageError if the folder holds one already or a number is not
    possible, and OSError if the disk fails.
    """
    folder = user_path(output)
    plan = SamplePlan(classes, train_per_class, val, test, seed)
    images = {"train": classes * train_per_class, "val": val, "test": test}
    with single_threaded_opencv(), _drawing(plan, images, progress or NoProgress()) as on_draw:
        writers = _writers(plan, Album.load(on_draw))
        _refuse_existing(folder, writers)
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in writers.items():
            with published(folder / name) as file:
                write(file)
    files = tuple(SampleFile(name, (folder / name).stat().st_size) for name in writers)
    return SampleSummary(files, plan.wnids, images, tuple(_oddities(plan)))


@contextmanager
def _drawing(plan: SamplePlan, images: dict[str, int], progress: Progress) -> Iterator[Callable[[], None]]:
    """Show the number of drawn images; those with boxes are drawn again, for their sizes."""
    annotated = len(annotated_train(plan)) + len(annotated_val(plan))
    drawn = count()
    with progress.task("sample", records=sum(images.values()) + annotated, size=0):
        yield lambda: progress.at(next(drawn), 0)


def _writers(plan: SamplePlan, album: Album) -> dict[str, Callable[[IO[bytes]], None]]:
    return {
        TRAIN: partial(write_train, plan=plan, album=album),
        VAL: partial(write_val, plan=plan, album=album),
        TEST: partial(write_test, plan=plan, album=album),
        DEVKIT: partial(write_devkit, plan=plan, photographs=album.names),
        TRAIN_BOXES: partial(write_train_boxes, plan=plan, album=album),
        VAL_BOXES: partial(write_val_boxes, plan=plan, album=album),
    }


def _refuse_existing(output: Path, names: Iterable[str]) -> None:
    for name in names:
        if (output / name).exists():
            raise UsageError("is there already; choose another folder, or delete it", path=output / name)


def _oddities(plan: SamplePlan) -> Iterator[SampleOddity]:
    for label in range(plan.classes):
        yield from _odd_images(plan.train_images(label), TRAIN)
    yield from _odd_images(plan.val_images(), VAL)
    for file, images in ((TRAIN_BOXES, annotated_train(plan)), (VAL_BOXES, annotated_val(plan))):
        for image, defect in images:
            if defect is not BoxDefect.NONE:
                yield SampleOddity(defect, image.key, file)


def _odd_images(images: Iterable[SampleImage], file: str) -> Iterator[SampleOddity]:
    return (SampleOddity(image.oddity, image.key, file) for image in images if image.oddity)
