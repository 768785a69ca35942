"""Images of every kind that OpenCV decodes are converted as they are, and loaded as it decodes them."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from shardprep.formats import UnknownVersion, inspect, open_dataset, read_manifest, verify
from shardprep.formats.verification.levels import LEVELS
from shardprep.loaders import Loader, TrainTransform
from support import crashing_decoder
from support.datasets import converted, prep
from support.image_files import encoded
from support.image_kinds import KINDS, chunk_of_riff, extended_webp
from support.resealed import reseal
from support.sampling import torture_except
from support.source_builders import write

AS_STORED = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(90)


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


def test_every_kind_is_converted_byte_by_byte(dataset: Path, originals: dict[str, bytes]) -> None:
    with open_dataset(dataset) as opened:
        assert {record.key.partition("/")[2]: bytes(record.image) for record in opened} == originals


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


def test_inspect_counts_the_kinds(dataset: Path, originals: dict[str, bytes]) -> None:
    with open_dataset(dataset) as opened:
        summary = inspect(opened)

    assert sum(summary.kinds.values()) == summary.records == len(originals)
    assert summary.kinds["WebP"] == sum(name.endswith(".webp") for name in originals)
    assert "JPEG" not in summary.kinds
    assert summary.oddities["several frames"] == 4
    assert summary.oddities["CMYK"] == 0
    assert "5 WebP" in prep("inspect", dataset, check=True).stdout


def test_a_dataset_of_jpegs_and_pngs_is_as_the_first_readers_know_it(tmp_path: Path) -> None:
    image = encoded(np.zeros((9, 9, 3), np.uint8), ".png")
    manifest = converted(images_of(tmp_path / "source", {"a.png": image, "b.png": image}), tmp_path / "out")

    assert manifest.kinds == ()
    assert "kinds" not in json.loads((tmp_path / "out/manifest.json").read_bytes())


def test_a_dataset_of_other_kinds_is_refused_by_readers_that_do_not_know_them(dataset: Path) -> None:
    """As they refuse every critical key that they do not know."""
    stored = json.loads((dataset / "manifest.json").read_bytes())

    assert stored["crit"] == ["kinds", "offsets"]
    assert stored["kinds"] == [
        "WebP", "TIFF", "BMP", "GIF", "JPEG 2000", "Netpbm", "AVIF", "Sun raster",
    ]  # fmt: skip
    assert list(read_manifest(dataset).kinds) == stored["kinds"]


def small(tmp_path: Path) -> Path:
    converted(images_of(tmp_path / "source", {"a.webp": KINDS["lossy.webp"][0]}), tmp_path / "out")
    return tmp_path / "out"


def test_a_kind_of_a_later_release_is_refused(tmp_path: Path) -> None:
    out = small(tmp_path)
    reseal(out, lambda manifest: manifest["kinds"].append("JPEG XL"))

    with pytest.raises(UnknownVersion, match="JPEG XL"):
        read_manifest(out)


@pytest.mark.slow
def test_kinds_that_are_untrue_are_found(tmp_path: Path) -> None:
    out = small(tmp_path)
    reseal(out, lambda manifest: manifest.update(kinds=["TIFF"]))

    (finding,) = verify(out, level="records").findings

    assert "its kinds are TIFF, but the records have WebP" in finding.problem


def test_heic_is_named_and_may_be_left_out(tmp_path: Path) -> None:
    source = images_of(tmp_path / "source", {"a.heic": HEIC, "b.webp": KINDS["lossy.webp"][0]})

    failed = prep("convert", source, tmp_path / "out", "--split", "train")

    assert failed.returncode == 1
    assert "a.heic: HEIC, which OpenCV does not decode: convert it to PNG or JPEG" in failed.stderr
    assert converted(source, tmp_path / "skipped", on_bad_image="skip").skipped == 1


@pytest.mark.torture
def test_a_webp_that_crashes_the_decoder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashing_decoder.install(tmp_path / "site", monkeypatch)
    crashing = extended_webp(chunk_of_riff(b"XMP ", crashing_decoder.CRASH + b"11"), features=0)
    source = images_of(tmp_path / "source", {"a.webp": crashing, "b.webp": KINDS["lossy.webp"][0]})

    manifest = converted(source, tmp_path / "out", decode_check=True, on_bad_image="skip")

    assert (manifest.records, manifest.skipped) == (1, 1)
    assert b"crashes the decoder (SIGSEGV)" in (tmp_path / "out/quarantine.json").read_bytes()
