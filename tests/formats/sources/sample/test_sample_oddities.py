import xml.etree.ElementTree as ET
from collections.abc import Callable

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from shardprep.formats.images.header import read_image_header
from shardprep.formats.images.info import ImageFlag, ImageInfo
from shardprep.formats.sources.sample import Album, BoxDefect, Oddity
from support.sample_reading import TEST, TRAIN, TRAIN_BOXES, VAL, VAL_BOXES, Sample, decode, members

IMAGE_SHOWS: dict[Oddity, Callable[[ImageInfo], bool]] = {
    Oddity.PNG: lambda info: info.flags == ImageFlag.PNG and info.components == 4,
    Oddity.CMYK: lambda info: info.flags == ImageFlag.ADOBE and info.components == 4,
    Oddity.GRAYSCALE: lambda info: info.components == 1,
    Oddity.PROGRESSIVE: lambda info: info.flags == ImageFlag.PROGRESSIVE,
    Oddity.EXIF_6: lambda info: info.orientation == 6 and not info.flags,
    Oddity.EXIF_3: lambda info: info.orientation == 3 and not info.flags,
    Oddity.EXIF_8: lambda info: info.orientation == 8 and not info.flags,
    Oddity.CORRUPT_EXIF: lambda info: info.flags == ImageFlag.CORRUPT_EXIF,
    Oddity.TINY_20X17: lambda info: (info.width, info.height) == (20, 17),
    Oddity.TINY_8X8: lambda info: (info.width, info.height) == (8, 8),
}

Edges = list[float]  # xmin, ymin, xmax, ymax
BOX_SHOWS: dict[BoxDefect, Callable[[ET.Element, ImageInfo, Edges], bool]] = {
    BoxDefect.NONE: lambda xml, info, box: 0 <= box[0] < box[2] <= info.width,
    BoxDefect.DISPLAYED_SIZE: lambda xml, info, box: xml.findtext("size/width") == str(info.width * 3 // 2),
    BoxDefect.SWAPPED: lambda xml, info, box: box[0] > box[2],
    BoxDefect.OUTSIDE: lambda xml, info, box: box[0] < info.width < box[2],
    BoxDefect.FAR_OUTSIDE: lambda xml, info, box: info.width < box[0] < box[2],
    BoxDefect.FLOAT: lambda xml, info, box: not any(edge.is_integer() for edge in box),
    BoxDefect.PERCENT_S: lambda xml, info, box: xml.findtext("filename") == "%s",
    BoxDefect.TWO_OBJECTS: lambda xml, info, box: len(xml.findall("object")) == 2,
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample.make(tmp_path_factory.mktemp("sample"))


def is_ordinary(info: ImageInfo) -> bool:
    return info.components == 3 and not info.flags and info.orientation == 1 and info.width > 100


def test_every_image_decodes_and_is_of_a_size_like_the_real_ones(sample: Sample) -> None:
    images = [*sample.train.values(), *sample.val.values(), *members(sample.folder / TEST).values()]
    shapes = np.array([decode(image).shape for image in images])
    assert (shapes[:, 2] == 3).all()
    assert shapes[:, :2].max() <= 500
    assert 400 < shapes[:, :2].max(axis=1).mean() < 500


def test_val_images_look_like_the_train_images_of_their_class(sample: Sample) -> None:
    def colours(image: bytes) -> npt.NDArray[np.float32]:
        histogram = cv2.calcHist([decode(image)], [0, 1, 2], None, [6, 6, 6], [0, 256] * 3)
        return np.sqrt(histogram / histogram.sum()).ravel()

    known = np.stack([colours(image) for image in sample.train.values()])
    wnids = [key[:9] for key in sample.train]
    guesses = {key: wnids[int(np.argmax(known @ colours(image)))] for key, image in sample.val.items()}
    right = [guesses[key] == wnid for key, wnid in sample.wnid_of_val.items()]
    assert np.mean(right) > 0.8  # chance is 0.1


def test_oddities_are_what_the_summary_says_and_the_rest_is_ordinary(sample: Sample) -> None:
    odd = {o.key: Oddity(o.kind) for o in sample.summary.oddities if o.file in (TRAIN, VAL)}
    infos = {key: read_image_header(image) for key, image in (sample.train | sample.val).items()}
    assert {odd[key] for key in odd.keys() & sample.train.keys()} == set(Oddity)
    assert {odd[key] for key in odd.keys() & sample.val.keys()} == {
        Oddity.CMYK,
        Oddity.GRAYSCALE,
        Oddity.EXIF_6,
    }
    assert [key for key, oddity in odd.items() if not IMAGE_SHOWS[oddity](infos[key])] == []
    assert {key for key, info in infos.items() if not is_ordinary(info)} == odd.keys()


@pytest.mark.parametrize(("oddity", "turns"), [(Oddity.EXIF_6, 3), (Oddity.EXIF_3, 2), (Oddity.EXIF_8, 1)])
def test_decoders_that_heed_exif_turn_the_image(sample: Sample, oddity: Oddity, turns: int) -> None:
    image = next(sample.train[o.key] for o in sample.summary.oddities if o.kind == oddity)
    stored = decode(image, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    assert np.array_equal(decode(image), np.rot90(stored, turns))


def test_the_cmyk_image_has_the_colours_of_its_photograph() -> None:
    album = Album.load()
    cmyk = decode(album.cmyk)
    photograph = album.photographs[list(Oddity).index(Oddity.CMYK)]
    small = cv2.resize(photograph, cmyk.shape[1::-1], interpolation=cv2.INTER_AREA)
    assert len(album.cmyk) < 10_000
    assert np.abs(cmyk.astype(int) - small).mean() < 5


@pytest.mark.parametrize("archive", [TRAIN_BOXES, VAL_BOXES])
def test_boxes_have_the_defects_that_the_summary_names_and_no_others(sample: Sample, archive: str) -> None:
    defects = {o.key: BoxDefect(o.kind) for o in sample.summary.oddities if o.file == archive}
    images = sample.train | sample.val
    annotations = {
        name.removesuffix(".xml").removeprefix("val/"): ET.fromstring(text)  # noqa: S314
        for name, text in members(sample.folder / archive).items()
    }
    assert set(defects.values()) == set(BoxDefect) - {BoxDefect.NONE}
    assert defects.keys() < annotations.keys() < images.keys()
    for key, xml in annotations.items():
        info = read_image_header(images[key])
        box = [float(xml.findtext(f"object/bndbox/{edge}", "")) for edge in ("xmin", "ymin", "xmax", "ymax")]
        shown = {defect for defect, shows in BOX_SHOWS.items() if shows(xml, info, box)}
        shown -= {BoxDefect.NONE} if key in defects else set()
        shown -= {BoxDefect.OUTSIDE} if defects.get(key) is BoxDefect.DISPLAYED_SIZE else set()
        assert shown == {defects.get(key, BoxDefect.NONE)}
        names = {each.findtext("name") for each in xml.findall("object")}
        assert names == {sample.wnid_of_val.get(key, key[:9])}
