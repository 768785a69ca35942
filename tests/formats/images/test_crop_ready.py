"""Crop-ready and shrunk images: pixels as of the whole image, alone and in datasets; damage is refused."""

import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from PIL import Image

from shardprep.formats import PlanMismatch, PlanOptions, convert, inspect, open_dataset, repair, verify
from shardprep.formats.errors import BadImage, OperationError
from shardprep.formats.images import crop_ready as jpegtran
from shardprep.formats.images.crop_ready import (
    SIGNATURE,
    TABLE,
    Crop,
    NotCropReady,
    add_grid,
    has_correct_grid,
    make_crop_ready,
    read_grid,
    remove_grid,
    shrink,
)
from shardprep.formats.images.header import ImageFlag, read_image_header
from shardprep.formats.records.record import NO_COLUMNS, ColumnRecord
from shardprep.formats.sources.sample import make_sample
from shardprep.loaders import EvalTransform, LocalShuffle, TrainTransform
from shardprep.loaders.transforms.decode import EncodedImage, decode_rgb
from support.datasets import converted, prep_here, tree, writable
from support.image_files import (
    JPEG,
    PHOTOGRAPHS,
    PROGRESSIVE,
    chunk,
    encoded,
    exif_of,
    frame,
    pixels,
    png,
    scan,
    segment,
    skeleton,
    tiff,
    with_exif,
)
from support.loaded import assert_same, epoch_of, loader_on
from support.sampling import torture_except

pytestmark = pytest.mark.skipif(not shutil.which(jpegtran.PROGRAM), reason="no jpegtran")


def ready(image: bytes) -> bytes:
    return make_crop_ready(image, read_image_header(image))


def picture(width: int, height: int, channels: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (6, 6, channels)).astype(np.uint8)
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    smooth = smooth.reshape(height, width, channels)
    return np.clip(smooth + rng.integers(-30, 31, smooth.shape), 0, 255).astype(np.uint8)


def by_pillow(image: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))


PHOTOGRAPH = encoded(picture(200, 150, 3, 0))


@cache
def ready_photograph() -> bytes:
    return ready(PHOTOGRAPH)


@settings(deadline=None, max_examples=25)
@given(
    st.tuples(st.integers(1, 2000), st.integers(1, 2000)),
    st.sampled_from([0x111111, 0x211111, 0x221111, 0x121111, 0x411111, 0]),
    st.integers(1, 100),
    st.booleans(),
    st.integers(0, 2**32),
    st.data(),
)
@pytest.mark.slow
def test_a_crop_has_the_pixels_of_the_whole_image_for_another_decoder_too(
    size: tuple[int, int], sampling: int, quality: int, progressive: bool, seed: int, data: st.DataObject
) -> None:
    width, height = size
    options = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_PROGRESSIVE, int(progressive)]
    if sampling:
        options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling]
    image = encoded(picture(width, height, 3 if sampling else 1, seed), ".jpg", *options)
    if data.draw(st.booleans()):  # RGB, in place of JFIF
        image = image[:2] + segment(0xEE, b"Adobe\0\x64\0\0\0\0\0") + image[20:]
    try:
        made = ready(image)
    except NotCropReady:
        assume(False)

    for reduction in (8, 4, 2, 1):
        x, y = (data.draw(st.integers(0, side - 1)) // reduction * reduction for side in (width, height))
        crop = Crop(x, y, data.draw(st.integers(1, width - x)), data.draw(st.integers(1, height - y)))
        whole = EncodedImage(image).pixels(Crop(0, 0, width, height), reduction=reduction)
        x, y, across, down = (-(-side // reduction) for side in crop)

        found = EncodedImage(ColumnRecord.of(("key", 0, made), NO_COLUMNS, True)).pixels(
            crop, reduction=reduction
        )

        np.testing.assert_array_equal(found, whole[y : y + down, x : x + across])

    grid, whole = read_grid(made), by_pillow(image)
    assert grid is not None
    np.testing.assert_array_equal(by_pillow(made), whole)
    if cut := grid.cut(made, crop):
        x, y = crop.x - cut.x, crop.y - cut.y
        found = by_pillow(cut.image.tobytes())[y : y + crop.height, x : x + crop.width]
        np.testing.assert_array_equal(found, whole[crop.y :, crop.x :][: crop.height, : crop.width])


@pytest.mark.parametrize(
    "orientations", [[1], [6], [6, 1], [1, 6], [0, 6], [6, 0], [None, 6], [6, None]], ids=str
)
def test_a_crop_is_of_the_image_as_its_first_orientation_turns_it(orientations: list[int | None]) -> None:
    image = PHOTOGRAPH
    for each in reversed(orientations):
        image = with_exif(image, tiff("<", (0x010F if each is None else 0x0112, 3, each or 0)))
    record = ColumnRecord.of(("key", 0, ready(image)), NO_COLUMNS, True)

    whole = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR_RGB)
    np.testing.assert_array_equal(decode_rgb(image, orientation="apply"), whole)
    found = decode_rgb(record, crop=(30, 20, 50, 60), orientation="apply")

    np.testing.assert_array_equal(found, whole[20:80, 30:80])
    to_the_edge = (30, 20, whole.shape[1] - 30, whole.shape[0] - 20)
    found = decode_rgb(record, crop=to_the_edge, orientation="apply")
    np.testing.assert_array_equal(found, whole[20:, 30:])


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (png(200, 200, 2), "not a JPEG"),
        (next(file for file in PHOTOGRAPHS if file.name == "cmyk.jpg").read_bytes(), "gray or colour"),
        (JPEG, "pixels"),
        (PROGRESSIVE, "pixels"),
        (skeleton(frame(64, 64, marker=0xC9), scan()), "baseline"),
        (skeleton(frame(640, 640), scan()), "damaged"),
    ],
)
def test_images_without_segments_and_small_ones_stay_as_they_are(image: bytes, reason: str) -> None:
    with pytest.raises(NotCropReady, match=reason):
        ready(image)
    for small in (encoded(pixels(100, 300, 3)), encoded(pixels(99, 99, 3)), png(67_000, 101, 0)):
        with pytest.raises(NotCropReady, match="small enough"):
            shrunk(small)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "another restart": lambda image: image.replace(b"\xff\xd3", b"\xff\xd4", 1),
    "another interval": lambda image: re.sub(rb"(?s)(?<=\xff\xdd\x00\x04)..", b"\0\5", image, count=1),
    "a missing segment": lambda image: re.sub(rb"(?s)\xff\xd1.*?(?=\xff\xd2)", b"", image, count=1),
    "a second scan": lambda image: image[:-2] + image[image.index(b"\xff\xda") :],
    "truncated": lambda image: image[: len(image) * 2 // 3],
    "trailing bytes": lambda image: image + b"\0",
    "long headers": lambda image: image.replace(
        b"\xff\xc0", segment(0xFE, bytes(65000)) * 2 + b"\xff\xc0", 1
    ),
    "a cut frame": lambda image: image.replace(
        b"\xff\xc0", segment(0xC0, b"\x08\0\1\0\1\xff") + b"\xff\xc0", 1
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_grid_that_is_not_that_of_the_bytes_is_not_made(damage: Callable[[bytes], bytes]) -> None:
    plain = remove_grid(ready_photograph())

    with pytest.raises(BadImage):
        add_grid(damage(plain), bytes(32))


def test_a_sound_grid_is_told_from_a_damaged_one() -> None:
    made = ready_photograph()
    grid = read_grid(made)
    assert grid is not None
    lengths = made.index(SIGNATURE) + TABLE.size
    first, second = made[lengths : lengths + 2], made[lengths + 2 : lengths + 4]
    swapped = made[:lengths] + second + first + made[lengths + 4 :]

    assert has_correct_grid(made, grid.sha256)
    assert not has_correct_grid(made, bytes(32))
    assert not has_correct_grid(swapped, grid.sha256)
    assert not has_correct_grid(DAMAGES["truncated"](made), grid.sha256)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_table_of_any_bytes_is_never_read_out_of_range(data: st.DataObject) -> None:
    made = bytearray(ready_photograph())
    start = made.index(SIGNATURE)
    for _ in range(data.draw(st.integers(1, 4))):
        made[data.draw(st.integers(start - 4, start + TABLE.size + 40))] = data.draw(st.integers(0, 255))
    size = data.draw(st.sampled_from([len(made), len(made) // 2, start + 20, start + TABLE.size]))
    image = bytes(made[:size])

    grid = read_grid(image)

    if grid is not None:
        width, height = min(20, grid.width), min(20, grid.height)
        grid.cut(image, Crop(grid.width - width, grid.height - height, width, height))


def shrunk(image: bytes, shorter_side: int = 100, quality: int = 90) -> bytes:
    return shrink(image, read_image_header(image), shorter_side=shorter_side, quality=quality)


@pytest.mark.parametrize("photograph", PHOTOGRAPHS[:5], ids=lambda file: file.name)
def test_a_shrunk_photograph_is_near_the_resized_original(photograph: object) -> None:
    image = photograph.read_bytes()  # type: ignore[attr-defined]
    original = decode_rgb(image)
    height, width = original.shape[:2]

    made = shrunk(image, 200)

    small = decode_rgb(made)
    assert min(small.shape[:2]) == 200
    assert small.shape[1] / small.shape[0] == pytest.approx(width / height, rel=0.01)
    assert cv2.PSNR(small, cv2.resize(original, small.shape[1::-1], interpolation=cv2.INTER_AREA)) > 30
    assert len(made) < len(image)


def test_a_shrunk_image_is_crop_ready_has_its_metadata_and_names_its_original() -> None:
    image = with_exif(encoded(pixels(300, 400, 3)), tiff("<", (0x0112, 3, 6)))
    image = image[:2] + segment(0xE2, b"ICC_PROFILE\0\1\1profile") + image[2:]

    made = shrunk(image)

    for original in (image, ready(image)):
        grid = read_grid(shrunk(original))
        assert grid is not None
        assert grid.sha256 == hashlib.sha256(original).digest()
        assert has_correct_grid(shrunk(original), grid.sha256)
    assert read_image_header(made).orientation == 6
    assert made.count(b"ICC_PROFILE\0\1\1profile") == 1
    assert made == shrunk(image)
    assert len(shrunk(image, quality=50)) < len(shrunk(image, quality=95))


@pytest.mark.parametrize(
    ("image", "components"),
    [
        (encoded(pixels(300, 400)), 1),
        (png(300, 400, 6), 3),
        (png(300, 400, 2, chunk(b"eXIf", exif_of(6))), 3),
    ],
)
def test_gray_stays_gray_and_the_rest_is_colour(image: bytes, components: int) -> None:
    info = read_image_header(shrunk(image))
    assert (min(info.width, info.height), info.components) == (100, components)
    assert info.orientation == (6 if b"eXIf" in image else 1)


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crop") / "archives"
    make_sample(folder, classes=2, train_per_class=15, val=4, test=2)
    return folder


@pytest.fixture(scope="session")
def plain(archives: Path) -> Path:
    converted(archives, archives.parent / "plain", shard_size=400_000)
    return archives.parent / "plain"


@pytest.fixture(scope="session")
def ready_shards(archives: Path) -> Path:
    converted(archives, archives.parent / "ready_shards", shard_size=400_000, crop_ready=True)
    return archives.parent / "ready_shards"


@pytest.mark.slow
@pytest.mark.parametrize("workers", torture_except([0, 2], 0))
@pytest.mark.parametrize(
    "transform",
    [
        TrainTransform(64),
        TrainTransform((48, 96), interpolation="cubic", dtype="float32"),
        TrainTransform(100, orientation="apply"),
        EvalTransform(64, resize=72),
        EvalTransform(200, resize=256, interpolation="linear"),
    ],
    ids=["train", "cubic", "oriented", "eval", "eval-linear"],
)
def test_batches_are_those_of_plain_shards(
    plain: Path, ready_shards: Path, transform: object, workers: int
) -> None:
    options = {"transform": transform, "shuffle": LocalShuffle(10), "workers": workers}

    with loader_on(plain, **options) as one, loader_on(ready_shards, **options) as other:
        for _ in range(2):
            assert_same(epoch_of(one), epoch_of(other))


def test_records_are_the_same_pictures_and_name_their_originals(plain: Path, ready_shards: Path) -> None:
    with open_dataset(plain) as one, open_dataset(ready_shards) as other:
        assert [record.key for record in one] == [record.key for record in other]
        flags = other.index["flags"] & ImageFlag.CROP_READY != 0
        assert flags.sum() == other.manifest.crop_ready > 20
        for number, (before, after) in enumerate(zip(one, other, strict=True)):
            np.testing.assert_array_equal(decode_rgb(before), decode_rgb(after))
            assert after.crop_ready == flags[number] == (after.image != before.image)
            assert (read_grid(after.image) is not None) == after.crop_ready
    manifest = json.loads((ready_shards / "manifest.json").read_bytes())
    assert manifest["crit"] == ["crop_ready", "offsets"]
    assert manifest["plan"]["crop_ready"] is True
    assert manifest["plan"]["transcoder"] == jpegtran.jpegtran_version()


def test_the_same_option_goes_on_and_repair_rebuilds_the_bytes_with_the_version_that_coded_the_images(
    archives: Path, ready_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ready_shards, tmp_path / "copy")
    with pytest.raises(PlanMismatch, match="--crop-ready was on, is now off"):
        converted(archives, tmp_path / "copy", shard_size=400_000)
    shard = writable(tmp_path / "copy/shard-00000.lmdb")
    shard.write_bytes(shard.read_bytes()[:-100])

    with monkeypatch.context() as other:
        other.setattr("shardprep.formats.images.crop_ready.jpegtran_version", lambda: "libjpeg-turbo 9.9")
        with pytest.raises(OperationError, match="but libjpeg-turbo 9"):
            repair(tmp_path / "copy", archives, workers=0)

    assert not repair(tmp_path / "copy", archives, workers=0).findings
    assert tree(tmp_path / "copy") == tree(ready_shards)


def test_a_dataset_becomes_crop_ready_on_its_own(plain: Path, ready_shards: Path, tmp_path: Path) -> None:
    made = converted(plain, tmp_path / "made", shard_size=400_000, crop_ready=True)

    with open_dataset(ready_shards) as straight, open_dataset(plain) as first:
        assert made.content_root == straight.manifest.content_root
        assert made.source["dataset"]["root"] == first.manifest.root
        assert made.source["dataset"]["source"] == first.manifest.source
    said = prep_here("inspect", tmp_path / "made").stdout
    assert re.search(r"\d+ images, segments of \d+x\d+ pixels and \d+ bytes \(median\), others: ", said)


@pytest.mark.slow
def test_shrunk_images_are_crop_ready_and_called_lossy(archives: Path, plain: Path, tmp_path: Path) -> None:
    made = converted(archives, tmp_path / "small", shorter_side=64, quality=85)

    with open_dataset(tmp_path / "small") as small, open_dataset(plain) as dataset:
        larger = np.minimum(dataset.index["width"], dataset.index["height"]) > 64
        assert (np.minimum(small.index["width"], small.index["height"])[larger] == 64).all()
        assert made.image_bytes < dataset.manifest.image_bytes
    assert made.plan["shorter_side"] == 64
    assert made.plan["transcoder"].startswith("OpenCV ")
    found = inspect(tmp_path / "small").crop_ready
    assert found is not None
    assert (found.shorter_side, found.quality) == (64, 85)
    assert not verify(tmp_path / "small", level="decode").findings


def test_without_the_program_nothing_is_begun(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for cached in (jpegtran.jpegtran_path, jpegtran.jpegtran_version):
        monkeypatch.setattr(jpegtran, cached.__name__, cached.__wrapped__)
    with pytest.raises(OperationError, match="libjpeg-turbo-progs"):
        convert(archives, tmp_path / "out", plan_options=PlanOptions(crop_ready=True), workers=0)
    assert not (tmp_path / "out").exists()
