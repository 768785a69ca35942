"""Images of every kind that OpenCV decodes are converted as they are, and loaded as it decodes them."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from shardprep.formats import verify
from shardprep.formats.verification.levels import LEVELS
from shardprep.loaders import Loader, TrainTransform
from support.datasets import converted
from support.image_files import encoded
from support.image_kinds import KINDS
from support.resealed import reseal
from support.sampling import torture_except
from support.source_builders import write

AS_STORED = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION


def images_of(folder: Path, images: dict[str, bytes]) -> Path:
    for at, (name, image) in enumerate(sorted(images.items())):
        write(folder / f"class{at % 2}" / name, image)
    return folder


def as_png(image: bytes) -> bytes:
    return encoded(cv2.imdecode(np.frombuffer(image, np.uint8), AS_STORED), ".png")


@pytest.fixture(scope="module")
def originals() -> dict[str, bytes]:
    return {name: image for name, (image, _) in KINDS.items()}


@pytest.fixture(scope="module")
def dataset(originals: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    converted(images_of(folder / "source", originals), folder / "out", decode_check=True)
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize("level", torture_except(LEVELS, "decode"))
def test_a_dataset_of_every_kind_is_intact_at_every_level(dataset: Path, level: str) -> None:
    report = verify(dataset, level=level)

    assert (report.findings, report.unchecked) == ([], [])


def batches(dataset: Path) -> list[np.ndarray]:
    with Loader(
        dataset, batch_size=8, drop_last=False, transform=TrainTransform(16), seed=3, workers=0, shuffle=None
    ) as loader:
        return [images.copy() for images, _ in loader]


def test_a_loader_delivers_the_pixels_that_opencv_decodes(
    dataset: Path, originals: dict[str, bytes], tmp_path: Path
) -> None:
    decoded = {name: as_png(image) for name, image in originals.items()}
    converted(images_of(tmp_path / "source", decoded), tmp_path / "out")

    for ours, theirs in zip(batches(dataset), batches(tmp_path / "out"), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.slow
def test_kinds_that_are_untrue_are_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    converted(images_of(tmp_path / "source", {"a.webp": KINDS["lossy.webp"][0]}), out)
    reseal(out, lambda manifest: manifest.update(kinds=["TIFF"]))

    (finding,) = verify(out, level="records").findings

    assert "its kinds are TIFF, but the records have WebP" in finding.problem
